"""Inverse roots and eigenbases, and what becomes of matrices that have none."""

from __future__ import annotations

import pytest
import torch
from stepping import gradients_of, power, relative

from accel_shard.optim.cores import roots
from accel_shard.optim.cores.batch import add_gram_, gram, mirrored, multiply, pieces
from accel_shard.optim.cores.roots import Ridge, eigenbasis, eigh, inverse_root, refined_basis, root_by_basis

pytestmark = pytest.mark.timeout(120)
NONE = Ridge(1e-30)


def with_spectrum(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Symmetric matrices with these eigenvalues."""
    basis = torch.linalg.qr(gradients_of(1, *values.shape, values.shape[-1], seed=seed)[0])[0].to(values.dtype)
    return mirrored(basis @ torch.diag_embed(values) @ basis.mT)


@pytest.mark.parametrize("size", [1, 2, 5, 127, 128, 131, 200])
def test_symmetric_products_by_tiles(size: int) -> None:
    blocks, start = gradients_of(2, 3, size, 7), gradients_of(1, 3, size, size, seed=1)[0]
    factors = mirrored(start)
    want = 0.9 * factors + 0.25 * blocks[0] @ blocks[0].mT
    add_gram_(factors, blocks[0], 0, 0.9, 0.25)
    assert relative(mirrored(factors), want) < 1e-14
    assert torch.equal(mirrored(factors), mirrored(factors).mT)
    assert relative(gram(blocks[1]), blocks[1] @ blocks[1].mT) < 1e-14


@pytest.mark.parametrize("shape", [(5,), (5, 3), (4, 3, 2), (2, 3, 4, 5)])
def test_products_along_each_dimension(shape: tuple[int, ...]) -> None:
    letters = "abcd"[: len(shape)]
    blocks = gradients_of(1, 3, *shape)[0]
    matrices = [gradients_of(1, 3, d, d, seed=d)[0] for d in shape]
    for leave in [None, *range(len(shape))]:
        given = [None if k == leave else m for k, m in enumerate(matrices)]
        used = [(k, m) for k, m in enumerate(given) if m is not None]
        for transposed in (True, False):
            terms = [
                f"z{letters[k]}{letters[k].upper()}" if transposed else f"z{letters[k].upper()}{letters[k]}"
                for k, _ in used
            ]
            result = "".join(c.upper() if k != leave else c for k, c in enumerate(letters))
            want = torch.einsum(",".join([f"z{letters}", *terms]) + f"->z{result}", blocks, *[m for _, m in used])
            assert relative(multiply(blocks, given, transposed=transposed), want) < 1e-14
            own = blocks.clone()
            assert multiply(own, given, transposed=transposed, out=own) is own
            assert relative(own, want) < 1e-14
    grams = [torch.zeros(3, d, d, dtype=torch.float64) for d in shape]
    for k, got in enumerate(grams):
        add_gram_(got, blocks, k, 1.0, 1.0)
        other = letters.replace(letters[k], "x")
        assert relative(mirrored(got), torch.einsum(f"z{letters},z{other}->z{letters[k]}x", blocks, blocks)) < 1e-14


def test_pieces_are_all_blocks_once() -> None:
    blocks = torch.zeros(37, 100, 100)
    assert [i for at in pieces(blocks) for i in range(37)[at]] == list(range(37))
    assert len(list(pieces(blocks))) > 1  # 370,000 elements are more than a piece


@pytest.mark.parametrize("exponent", [1.0, 0.5, 0.25, 0.3, 1 / 6])
def test_root_by_its_definition(exponent: float) -> None:
    matrices = with_spectrum(torch.linspace(0.5, 20, 18, dtype=torch.float64).view(3, 6))
    root, failed = inverse_root(matrices, exponent, NONE)
    assert not failed.any()
    for got, matrix in zip(root, matrices, strict=True):
        assert relative(got, power(matrix, -exponent)) < 1e-12
    assert torch.equal(root, root.mT)


def test_epsilon_is_added_before_the_root() -> None:
    matrix = with_spectrum(torch.tensor([[1e-3, 1.0, 3.0]], dtype=torch.float64))
    eye = torch.eye(3, dtype=torch.float64)
    got, _ = inverse_root(matrix, 0.25, Ridge(0.5))
    assert relative(got[0], power(matrix[0] + 0.5 * eye, -0.25)) < 1e-13
    got, _ = inverse_root(matrix, 0.25, Ridge(0.5, relative=True))
    assert relative(got[0], power(matrix[0] + 0.5 * 4.001 * eye, -0.25)) < 1e-13
    # A least eigenvalue below zero by rounding becomes epsilon; all the others are shifted with it.
    below = torch.diag(torch.tensor([-1e-3, 1.0], dtype=torch.float64)).unsqueeze(0)
    got, _ = inverse_root(below, 0.5, Ridge(1e-4))
    assert relative(got[0], torch.diag(torch.tensor([1e-4, 1.0011], dtype=torch.float64) ** -0.5)) < 1e-12


def test_pseudo_inverse_leaves_out_what_has_no_rank() -> None:
    matrix = with_spectrum(torch.tensor([[0.0, 0.0, 4.0, 16.0]], dtype=torch.float64))
    got, failed = inverse_root(matrix, 0.5, Ridge(0.0, pseudo_inverse=True))
    assert not failed.any()
    want = torch.linalg.pinv(matrix[0] @ matrix[0], hermitian=True, rtol=1e-9)  # of its square, to the power 1/4
    assert relative(got[0] @ got[0] @ got[0] @ got[0], want) < 1e-7
    zeros, failed = inverse_root(torch.zeros(1, 4, 4), 0.5, Ridge(0.0, pseudo_inverse=True))
    assert torch.equal(zeros, torch.zeros(1, 4, 4))
    assert not failed.any()


@pytest.mark.parametrize("method", ["newton"])
@pytest.mark.parametrize("power_of", [1, 2, 4, 6])
def test_solvers_agree(method: str, power_of: int) -> None:
    matrices = with_spectrum(torch.logspace(-3, 1, 40, dtype=torch.float64).view(2, 20).flip(0))
    want, _ = inverse_root(matrices, 1 / power_of, Ridge(1e-6))
    got, failed = inverse_root(matrices, 1 / power_of, Ridge(1e-6), method)
    assert not failed.any()
    assert relative(got, want) < 1e-9
    single, failed = inverse_root(matrices.float(), 1 / power_of, Ridge(1e-6), method)
    assert not failed.any()
    assert relative(single, want.float()) < 3e-5


def test_newton_gives_up_to_eigh_only_for_what_it_cannot_do() -> None:
    matrices = torch.stack([torch.eye(6), torch.diag(torch.tensor([1.0, 1, 1, 1, 1, 0]))])
    want, _ = inverse_root(matrices, 0.25, Ridge(1e-12))
    got, failed = inverse_root(matrices, 0.25, Ridge(1e-12), "newton")
    assert not failed.any()
    assert relative(got, want) < 1e-5


@pytest.mark.parametrize("method", ["eigh", "newton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("relative_to_trace", [True, False])
def test_no_input_gives_anything_but_numbers(method: str, dtype: torch.dtype, relative_to_trace: bool) -> None:
    low_rank = gram(gradients_of(1, 1, 8, 2)[0]).to(dtype)
    some = {
        "zero": torch.zeros(1, 8, 8), "huge": 1e37 * torch.eye(8).unsqueeze(0), "tiny": 1e-40 * torch.eye(8).unsqueeze(0),
        "low rank": low_rank, "large low rank": 1e30 * low_rank, "small low rank": 1e-30 * low_rank,
        "ill-conditioned": with_spectrum(torch.logspace(-20, 10, 8, dtype=torch.float64).unsqueeze(0)),
        "negative by rounding": -1e-9 * torch.eye(8).unsqueeze(0),
    }  # fmt: skip
    broken = {"nan": torch.full((1, 8, 8), torch.nan), "inf": torch.full((1, 8, 8), torch.inf)}
    broken["one nan"] = torch.eye(8).unsqueeze(0).clone()
    broken["one nan"][0, 3, 4] = torch.nan
    batch = torch.cat([m.to(dtype) for m in (*some.values(), *broken.values())])
    root, failed = inverse_root(batch, 0.25, Ridge(1e-6, relative=relative_to_trace), method)
    assert root.isfinite().all()
    assert failed.tolist() == [False] * len(some) + [True] * len(broken)
    # A broken one does not touch its neighbours.
    alone, _ = inverse_root(batch[: len(some)], 0.25, Ridge(1e-6, relative=relative_to_trace), method)
    assert torch.equal(root[: len(some)], alone)
    if relative_to_trace:
        assert relative(root[0], torch.eye(8, dtype=dtype)) < 1e-5
    sizes, _ = inverse_root(torch.tensor([[[16.0]], [[0.0]]], dtype=dtype), 0.25, Ridge(1e-30), method)
    assert float(sizes[0]) == pytest.approx(0.5)


def test_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that fails in fp32 is asked again in fp64, and for a matrix that no rung can do the others go on."""
    real, asked = torch.linalg.eigh, []

    def fails(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append((matrices.dtype, len(matrices)))
        if matrices.dtype == torch.float32 and bool((matrices[:, 0, 1] == 0).any()):
            raise torch.linalg.LinAlgError("did not converge")
        if bool((matrices[:, 0, 2] == 0.5).any()):
            raise torch.linalg.LinAlgError("did not converge either")
        return real(matrices)

    matrices = with_spectrum(torch.linspace(1, 5, 20).view(4, 5))
    matrices[1] = torch.diag(torch.linspace(1, 5, 5))
    matrices[2, 0, 2] = matrices[2, 2, 0] = 0.5 * matrices[2].abs().max()
    want = torch.linalg.eigh(matrices)[0]
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    values, vectors, failed = eigh(matrices)
    assert failed.tolist() == [False, False, True, False]
    assert relative(values[~failed], want[~failed]) < 1e-6
    assert vectors.isfinite().all()
    assert (torch.float32, 4) in asked
    assert (torch.float64, 2) in asked
    assert relative((vectors @ torch.diag_embed(values) @ vectors.mT)[~failed], matrices[~failed]) < 1e-5


def test_a_solver_that_lies_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh

    def lies(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = real(matrices)
        return (values * 0 if matrices.dtype == torch.float32 else values), vectors

    monkeypatch.setattr(torch.linalg, "eigh", lies)
    matrices = with_spectrum(torch.linspace(1, 5, 10).view(2, 5))
    values, _, failed = eigh(matrices)
    assert not failed.any()
    assert relative(values, torch.linspace(1, 5, 10).view(2, 5)) < 1e-5


@pytest.mark.parametrize("method", ["qr", "cholesky_qr"])
def test_a_basis_converges_from_the_last_one(method: str) -> None:
    matrices = with_spectrum(2.0 ** -torch.arange(8, dtype=torch.float64).expand(2, 8))
    eye = torch.eye(8, dtype=torch.float64).expand(2, 8, 8).clone()
    added = Ridge(1e-12, relative=True).of(matrices)
    first, failed = eigenbasis(matrices, eye, added, method)  # nothing is known: by eigh
    assert not failed.any()
    moved = mirrored(matrices + 1e-5 * gram(gradients_of(1, 2, 8, 8, seed=3)[0]))
    basis, off = first, []
    for _ in range(30):
        basis, failed = eigenbasis(moved, basis, added, method)
        assert not failed.any()
        inside = basis.mT @ moved @ basis
        off.append(float((inside - torch.diag_embed(inside.diagonal(dim1=1, dim2=2))).norm()))
        assert relative(basis.mT @ basis, eye) < 1e-10
    assert off[0] > 1e-6
    assert off[-1] < 1e-8
    root, _, failed = root_by_basis(moved, basis, 0.25, Ridge(1e-30), method)
    assert relative(root, inverse_root(moved, 0.25, Ridge(1e-30))[0]) < 1e-7
    assert not failed.any()


def test_cholesky_qr_is_qr_and_falls_back_on_it() -> None:
    matrices = with_spectrum(torch.linspace(5, 1, 16, dtype=torch.float64).view(2, 8))
    start, added = torch.linalg.qr(gradients_of(1, 2, 8, 8, seed=5)[0])[0], Ridge(1e-9, True).of(matrices)
    by_qr, _ = refined_basis(matrices, start, added, "qr")
    by_cholesky, _ = refined_basis(matrices, start, added, "cholesky_qr")
    signs = (by_qr * by_cholesky).sum(-2, keepdim=True).sign()
    assert relative(by_cholesky * signs, by_qr) < 1e-12
    # Far from its basis, a matrix with one eigenvalue above all others moves all columns to one.
    steep = with_spectrum(torch.cat([torch.ones(1, 1), torch.full((1, 7), 1e-6)], 1))
    found, failed = refined_basis(steep, start[:1].float(), Ridge(1e-9, True).of(steep), "cholesky_qr")
    assert not failed.any()
    assert relative(found.mT @ found, torch.eye(8)) < 1e-5


@pytest.mark.parametrize("method", ["eigh", "qr", "cholesky_qr"])
def test_a_basis_of_something_broken_is_not_used(method: str) -> None:
    matrices = with_spectrum(torch.linspace(5, 1, 16).view(2, 8))
    start, added = torch.linalg.qr(gradients_of(1, 2, 8, 8)[0].float())[0], Ridge(1e-9, True).of(matrices)
    matrices[1, 2, 3] = matrices[1, 3, 2] = torch.inf
    found, failed = eigenbasis(matrices, start, added, method)
    assert failed.tolist() == [False, True]
    assert found.isfinite().all()
    assert roots.is_identity(torch.stack([torch.eye(3), torch.ones(3, 3)])).tolist() == [True, False]
