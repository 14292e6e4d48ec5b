"""The cores against closed forms, against torch's own optimizers, and with input that no formula likes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from stepping import DOUBLE, Stepper, as_the_reference, gradients_of, power, relative

from accel_shard.optim.core import Core
from accel_shard.optim.cores.adamw import AdamWCore
from accel_shard.optim.cores.galore import GaLoreCore
from accel_shard.optim.cores.muon import MuonCore, newton_schulz
from accel_shard.optim.cores.shampoo import ShampooCore
from accel_shard.optim.cores.soap import SOAPCore

pytestmark = pytest.mark.timeout(120)
CORES = [ShampooCore, SOAPCore, MuonCore, GaLoreCore, AdamWCore]
PLAIN = {"lr": 0.1, "weight_decay": 0.0}
BARE: dict[str, Any] = {
    **PLAIN, **DOUBLE, "precondition_frequency": 1, "start_preconditioning_step": 1, "grafting": "none", "epsilon": 1e-12, "relative_epsilon": False,
    "betas": (0.0, 1.0),
}  # fmt: skip
EYE = torch.eye(20, dtype=torch.float64)


def double(core: type[Core]) -> dict[str, Any]:
    """The settings of a core in float64."""
    wanted = {**DOUBLE, "ns_dtype": "float64", **PLAIN}
    return {option: value for option, value in wanted.items() if option in core.defaults}


def by_torch(kind: type[torch.optim.Optimizer], weights: torch.Tensor, gradients: list[torch.Tensor], **options: Any):
    """Weights after an optimizer of torch's."""
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = kind([parameter], **options)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    assert not torch.equal(parameter.detach(), weights)
    return parameter.detach()


# Shampoo: closed forms


def test_a_vector_with_a_sum_is_full_matrix_adagrad() -> None:
    weights, gradients = gradients_of(1, 2, 6, seed=1)[0], gradients_of(9, 2, 6)
    stepper = Stepper(ShampooCore(), weights, **{**BARE, "epsilon": 1e-6})
    want, moments = weights.clone(), torch.zeros(2, 6, 6, dtype=torch.float64)
    for gradient in gradients:
        stepper.step(gradient)
        for block in range(2):
            moments[block] += torch.outer(gradient[block], gradient[block])
            want[block] -= 0.1 * power(moments[block] + 1e-6 * EYE[:6, :6], -0.5) @ gradient[block]
        assert relative(stepper.weights, want) < 1.2e-9


@pytest.mark.parametrize("exponent", [0.25, 0.5, 1 / 3])
def test_a_matrix_with_means_by_the_formula(exponent: float) -> None:
    weights, gradients = gradients_of(1, 1, 5, 4, seed=1)[0], gradients_of(9, 1, 5, 4)
    settings = {**BARE, "betas": (0.9, 0.99), "epsilon": 1e-6, "inverse_exponent_override": exponent}
    stepper = Stepper(ShampooCore(), weights, **settings)
    want, mean = weights[0].clone(), torch.zeros(5, 4, dtype=torch.float64)
    left, right = torch.zeros(5, 5, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    for step, (gradient,) in enumerate(gradients, 1):
        stepper.step(gradient.unsqueeze(0))
        left, right = 0.99 * left + 0.01 * gradient @ gradient.T, 0.99 * right + 0.01 * gradient.T @ gradient
        mean = 0.9 * mean + 0.1 * gradient
        roots = [power(m / (1 - 0.99**step) + 1e-6 * EYE[: len(m), : len(m)], -exponent) for m in (left, right)]
        want -= 0.1 * roots[0] @ (mean / (1 - 0.9**step)) @ roots[1]
        assert relative(stepper.weights[0], want) < 3.4e-9


def test_a_tensor_of_order_three_by_the_formula() -> None:
    (gradient,) = gradients_of(1, 1, 3, 4, 2)
    direction = Stepper(ShampooCore(), torch.zeros_like(gradient), **BARE).step(gradient)
    g = gradient[0]
    moments = [torch.einsum(f"{a},{b}->ij", g, g) for a, b in (("iab", "jab"), ("aib", "ajb"), ("abi", "abj"))]
    roots = [power(m + 1e-12 * EYE[: len(m), : len(m)], -1 / 6) for m in moments]
    assert relative(direction[0], torch.einsum("abc,ai,bj,ck->ijk", g, *roots)) < 1e-11


def test_the_first_step_is_the_polar_factor() -> None:
    (gradient,) = gradients_of(1, 3, 6, 6)
    left, _, right = torch.linalg.svd(gradient)
    direction = Stepper(ShampooCore(), torch.zeros_like(gradient), **{**BARE, "epsilon": 1e-30}).step(gradient)
    assert relative(direction, left @ right) < 1e-12


def test_orthogonal_equivariance_and_invariance_of_scale() -> None:
    weights, gradients = torch.zeros(1, 5, 5, dtype=torch.float64), gradients_of(6, 1, 5, 5)
    left, right = (torch.linalg.qr(gradients_of(1, 5, 5, seed=s)[0])[0] for s in (8, 9))
    plain = Stepper(ShampooCore(), weights, **BARE).run(gradients)
    turned = Stepper(ShampooCore(), weights, **BARE).run([left @ g @ right for g in gradients])
    assert relative(turned, left @ plain @ right) < 1e-11
    # A sum of one scale gives steps that do not know the scale: with a relative epsilon exactly, else nearly.
    for relative_epsilon, tolerance in ((True, 1e-13), (False, 1e-10)):
        settings = {**BARE, "relative_epsilon": relative_epsilon}
        one, two = (Stepper(ShampooCore(), weights, **settings).run([s * g for g in gradients]) for s in (1.0, 1024.0))
        assert relative(two, one) < tolerance


def test_kl_shampoo_by_the_formula() -> None:
    gradients = gradients_of(5, 1, 5, 3)
    settings = {**BARE, "betas": (0.0, 0.9), "kl_shampoo": True, "use_bias_correction": False, "epsilon": 1e-3}
    stepper = Stepper(ShampooCore(), torch.zeros(1, 5, 3, dtype=torch.float64), **settings)
    moments = [torch.zeros(n, n, dtype=torch.float64) for n in (5, 3)]
    roots = [EYE[:5, :5], EYE[:3, :3]]
    for (gradient,) in gradients:
        direction = stepper.step(gradient.unsqueeze(0))
        seen = [gradient @ roots[1] @ roots[1] @ gradient.T / 3, gradient.T @ roots[0] @ roots[0] @ gradient / 5]
        moments = [0.9 * m + 0.1 * s for m, s in zip(moments, seen, strict=True)]
        roots = [power(m + 1e-3 * EYE[: len(m), : len(m)], -0.5) for m in moments]
        assert relative(direction[0], roots[0] @ gradient @ roots[1]) < 1e-11


def test_kl_shampoo_finds_the_factors_of_a_covariance() -> None:
    """Of gradients with a Kronecker product as covariance; there the product of its factors is that covariance."""
    spectra = [torch.linspace(0.5, 4, n, dtype=torch.float64) for n in (4, 6)]
    gradients = [spectra[0].sqrt()[:, None] * g * spectra[1].sqrt() for g in gradients_of(3000, 1, 4, 6)]
    settings = {
        **BARE,
        "betas": (0.0, 0.999),
        "kl_shampoo": True,
        "epsilon": 1e-6,
        "precondition_frequency": 10,
        "start_preconditioning_step": 20,
    }
    stepper = Stepper(ShampooCore(), torch.zeros(1, 4, 6, dtype=torch.float64), **settings)
    stepper.run(gradients)
    left, right = (stepper.state[f"factor_{dim}_of_2"][0].diagonal() for dim in (0, 1))
    got = torch.outer(left, right)
    assert relative(got, torch.outer(*spectra)) < 0.15


# Shampoo: what surrounds the roots


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_before_its_start_with_adam_grafting_it_is_adamw(decay: float) -> None:
    weights, gradients = gradients_of(1, 1, 4, 3, seed=1)[0], gradients_of(8, 1, 4, 3)
    settings = {**double(ShampooCore), "betas": (0.9, 0.99), "start_preconditioning_step": 99, "weight_decay": decay}
    got = Stepper(ShampooCore(), weights, **settings).run(gradients)
    want = by_torch(torch.optim.AdamW, weights, gradients, lr=0.1, betas=(0.9, 0.99), weight_decay=decay)
    assert relative(got, want) < 1e-12


@pytest.mark.parametrize(("dampening", "nesterov"), [(0.0, False), (0.0, True), (0.5, False)])
def test_before_its_start_with_sgd_grafting_it_is_sgd_with_momentum(dampening: float, nesterov: bool) -> None:
    weights, gradients = gradients_of(1, 1, 4, 3, seed=1)[0], gradients_of(8, 1, 4, 3)
    options = {"momentum": 0.9, "dampening": dampening}
    settings = {**double(ShampooCore), **options, "betas": (0.0, 0.99), "start_preconditioning_step": 99}
    for grafting in ("sgd", "none"):
        stepper = Stepper(ShampooCore(), weights, **settings, use_nesterov=nesterov, grafting=grafting)
        # torch begins with the gradient itself as momentum, whatever the dampening.
        first = 1 / (1 - dampening)
        got = stepper.run([gradients[0] * first, *gradients[1:]])
        if dampening:
            want = by_torch(torch.optim.SGD, weights, gradients, lr=0.1, **options)
        else:
            want = by_torch(torch.optim.SGD, weights, gradients, lr=0.1, **options, nesterov=nesterov)
        assert relative(got, want) < 1e-12


@pytest.mark.parametrize("grafting", ["sgd", "adagrad", "rmsprop", "adam"])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e6])
def test_grafted_steps_have_the_others_length_in_each_block(grafting: str, scale: float) -> None:
    weights, gradients = torch.zeros(2, 4, 3, dtype=torch.float64), [scale * g for g in gradients_of(6, 2, 4, 3)]
    settings = {**BARE, "grafting": grafting, "betas": (0.9, 0.99), "epsilon": 1e-6 * scale**2}
    grafted, never = (
        Stepper(ShampooCore(), weights, **{**settings, "start_preconditioning_step": start}) for start in (1, 99)
    )
    own = Stepper(ShampooCore(), weights, **{**settings, "grafting": "none"})
    for gradient in gradients:
        got, length, way = (each.step(gradient) for each in (grafted, never, own))
        for block in range(2):
            assert float(got[block].norm() / length[block].norm()) == pytest.approx(1, rel=1e-10)
            assert relative(got[block] / got[block].norm(), way[block] / way[block].norm()) < 1e-10
        assert relative(got, length) > 0.01


def test_statistics_every_other_step() -> None:
    gradients = gradients_of(6, 1, 4, 3)
    settings = {**BARE, "betas": (0.0, 0.9), "epsilon": 1e-6, "statistics_every": 2}
    stepper = Stepper(ShampooCore(), torch.zeros(1, 4, 3, dtype=torch.float64), **settings)
    other = Stepper(ShampooCore(), stepper.weights, **{**settings, "statistics_every": 1})
    for step, gradient in enumerate(gradients):
        direction = stepper.step(gradient)
        if step % 2 == 0:
            other.step(gradient)
        roots = [other.state[f"root_{dim}_of_2"] for dim in (0, 1)]
        assert relative(direction, roots[0] @ gradient @ roots[1]) < 1e-12


@pytest.mark.parametrize("method", ["newton", "qr", "cholesky_qr"])
def test_every_way_to_a_root_gives_the_same_steps(method: str) -> None:
    """The iterative ways from a basis are approximate; with steady gradients they settle on the same."""
    steady = gradients_of(1, 2, 12, 8)[0]
    gradients = [steady + 0.01 * g for g in gradients_of(80, 2, 12, 8, seed=3)]
    settings = {**double(ShampooCore), "betas": (0.0, 0.9), "precondition_frequency": 2, "epsilon": 1e-4}
    by_eigh, other = (
        Stepper(ShampooCore(), torch.zeros_like(steady), **{**settings, "root_method": m}) for m in ("eigh", method)
    )
    for gradient in gradients:
        want, got = by_eigh.step(gradient), other.step(gradient)
    assert relative(got, want) < (1e-9 if method == "newton" else 2e-2)


# SOAP


@pytest.mark.parametrize("how", ["ignored", "long", "before the start"])
def test_soap_without_a_change_of_basis_is_adam(how: str) -> None:
    weights, gradients = gradients_of(1, 2, 4, 3, seed=1)[0], gradients_of(8, 2, 4, 3)
    off = {
        "ignored": {"ignored_basis_change_dims": {2: [0, 1]}}, "long": {"max_precond_dim": 2},
        "before the start": {"start_preconditioning_step": 99},
    }[how]  # fmt: skip
    stepper = Stepper(SOAPCore(), weights, **double(SOAPCore), **off, betas=(0.9, 0.99))
    want = by_torch(torch.optim.Adam, weights, gradients, lr=0.1, betas=(0.9, 0.99))
    assert relative(stepper.run(gradients), want) < 1e-12


def test_soap_by_the_formula() -> None:
    gradients = gradients_of(6, 1, 4, 4)
    settings = {**double(SOAPCore), "betas": (0.9, 0.8), "shampoo_beta": 0.7, "precondition_frequency": 1}
    # From step 2: in the basis of the first gradient, all that is off its diagonal is rounding.
    stepper = Stepper(SOAPCore(), torch.zeros(1, 4, 4, dtype=torch.float64), **settings)
    left, right, mean, square = (torch.zeros(4, 4, dtype=torch.float64) for _ in range(4))
    for step, (gradient,) in enumerate(gradients, 1):
        direction = stepper.step(gradient.unsqueeze(0))
        left, right = 0.7 * left + 0.3 * gradient @ gradient.T, 0.7 * right + 0.3 * gradient.T @ gradient
        bases = [torch.linalg.eigh(m)[1] if step > 1 else EYE[:4, :4] for m in (left, right)]
        square = 0.8 * square + 0.2 * (bases[0].T @ gradient @ bases[1]) ** 2
        mean = 0.9 * mean + 0.1 * gradient
        inside = bases[0].T @ (mean / (1 - 0.9**step)) @ bases[1]
        want = bases[0] @ (inside / ((square / (1 - 0.8**step)).sqrt() + 1e-8)) @ bases[1].T
        assert relative(direction[0], want) < 1e-10


def test_soap_is_equivariant_where_adam_is_not() -> None:
    weights, gradients = torch.zeros(1, 5, 5, dtype=torch.float64), gradients_of(6, 1, 5, 5)
    left, right = (torch.linalg.qr(gradients_of(1, 5, 5, seed=s)[0])[0] for s in (8, 9))
    turned = [left @ g @ right for g in gradients]
    for core, options, same in (
        (SOAPCore, {"start_preconditioning_step": 1, "precondition_frequency": 1, "epsilon": 1e-2}, True),
        (AdamWCore, {}, False),
    ):
        one, two = (Stepper(core(), weights, **double(core), **options).run(g) for g in (gradients, turned))
        assert (relative(two, left @ one @ right) < 1e-9) is same


@pytest.mark.parametrize("method", ["qr", "cholesky_qr"])
def test_soap_by_iteration_settles_on_eigenvectors(method: str) -> None:
    steady = gradients_of(1, 2, 6, 6)[0]
    settings = {**double(SOAPCore), "betas": (0.0, 0.9), "precondition_frequency": 1, "basis_method": method}
    stepper = Stepper(SOAPCore(), torch.zeros_like(steady), **settings)
    for gradient in gradients_of(80, 2, 6, 6, seed=3):
        stepper.step(steady + 1e-3 * gradient)
    inside = stepper.state["basis_0"].mT @ (steady @ steady.mT) @ stepper.state["basis_0"]
    off = inside - torch.diag_embed(inside.diagonal(dim1=1, dim2=2))
    assert float(off.norm() / inside.norm()) < 5e-3


# AdamW, Muon, GaLore


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_is_torchs(dtype: torch.dtype) -> None:
    weights, gradients = gradients_of(1, 2, 4, 3, seed=1, dtype=dtype)[0], gradients_of(30, 2, 4, 3, dtype=dtype)
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    got = Stepper(AdamWCore(), weights, **options, state_dtype=str(dtype).removeprefix("torch.")).run(gradients)
    want = by_torch(torch.optim.AdamW, weights, gradients, **options, foreach=False)
    assert relative(got, want) < (1e-6 if dtype == torch.float32 else 1e-14)  # 30 times the rounding
    one = Stepper(AdamWCore(), weights, **options, state_dtype=str(dtype).removeprefix("torch.")).run(gradients[:1])
    want = by_torch(torch.optim.AdamW, weights, gradients[:1], **options, foreach=False)
    assert relative(one, want) < (1e-7 if dtype == torch.float32 else 1e-15)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (4, 3, 5)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_applies_its_polynomial_to_singular_values(shape: tuple[int, ...], nesterov: bool) -> None:
    gradients = gradients_of(4, 2, *shape)
    stepper = Stepper(MuonCore(), torch.zeros(2, *shape, dtype=torch.float64), **double(MuonCore), nesterov=nesterov)
    mean, (a, b, c) = torch.zeros(2, *shape, dtype=torch.float64), MuonCore.defaults["ns_coefficients"]
    for gradient in gradients:
        direction = stepper.step(gradient)
        mean = 0.95 * mean + 0.05 * gradient
        seen = (0.95 * mean + 0.05 * gradient if nesterov else mean).flatten(2)
        left, values, right = torch.linalg.svd(seen, full_matrices=False)
        values = values / values.norm(dim=-1, keepdim=True)
        for _ in range(5):
            values = a * values + b * values**3 + c * values**5
        assert float(values.min()) > 0.3
        assert float(values.max()) < 1.3
        scale = math.sqrt(max(1, seen.shape[1] / seen.shape[2]))
        want = scale * (left * values.unsqueeze(-2)) @ right
        assert relative(direction.flatten(2), want) < 1e-12


def test_newton_schulz_with_enough_steps_is_the_polar_factor() -> None:
    (matrices,) = gradients_of(1, 3, 8, 5)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    assert relative(newton_schulz(matrices, 40, (1.875, -1.25, 0.375)), left @ right) < 1e-12


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_muon_is_torchs_to_the_precision_of_bfloat16(adjust: str, shape: tuple[int, int]) -> None:
    """Torch's orthogonalises in bfloat16."""
    gradients = gradients_of(3, *shape, dtype=torch.float32)
    options = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "adjust_lr_fn": adjust}
    weights = gradients_of(1, *shape, seed=5, dtype=torch.float32)[0]
    want = by_torch(torch.optim.Muon, weights, gradients, **options)
    for dtype, tolerance in (("float32", 4e-2), ("bfloat16", 4e-2)):
        stepper = Stepper(MuonCore(), weights.unsqueeze(0), **options, ns_dtype=dtype)
        got = stepper.run([g.unsqueeze(0) for g in gradients])[0]
        assert relative(got - weights, want - weights) < tolerance


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (6, 2, 5)])
def test_galore_by_the_formula(shape: tuple[int, ...]) -> None:
    gradients = gradients_of(6, 1, *shape)
    settings = {**double(GaLoreCore), "rank": 3, "update_proj_gap": 4, "align": False, "betas": (0.9, 0.99)}
    stepper = Stepper(GaLoreCore(), torch.zeros(1, *shape, dtype=torch.float64), **settings)
    mean, square = 0.0, 0.0
    for step, gradient in enumerate(gradients, 1):
        direction = stepper.step(gradient)
        rows = gradient[0].flatten(1)
        rows = rows if rows.shape[0] <= rows.shape[1] else rows.T
        if step in (1, 5):
            projector = torch.linalg.svd(rows)[0][:, :3]
            # Singular vectors are free in their sign: take the ones that it took.
            signs = (projector * stepper.state["projector"][0]).sum(0).sign()
            assert relative(projector * signs, stepper.state["projector"][0]) < 1e-9
            projector = projector * signs
        seen = projector.T @ rows
        mean, square = 0.9 * mean + 0.1 * seen, 0.99 * square + 0.01 * seen**2
        adam = (mean / (1 - 0.9**step)) / ((square / (1 - 0.99**step)).sqrt() + 1e-8)
        want = 0.25 * projector @ adam
        got = direction[0].flatten(1)
        assert relative(got if got.shape == want.shape else got.T, want) < 1e-8


def test_galores_basis_stays_near_the_last_one() -> None:
    """Of the same subspace the basis of an aligned projector is the nearest; of the same gradient it is the last one."""
    core, (gradient, noise) = GaLoreCore(), gradients_of(2, 3, 8, 12)
    settings = {**core.defaults, **double(GaLoreCore), "rank": 4}
    stepper = Stepper(core, torch.zeros_like(gradient), **double(GaLoreCore), rank=4)
    stepper.step(gradient)
    old = stepper.state["projector"]
    again, _ = core.refresh({**stepper.state, "gradient": gradient}, settings, 2)
    assert relative(again["projector"], old) < 1e-12
    distances = {}
    for align in (True, False):
        seen = {**stepper.state, "gradient": gradient + 0.1 * noise}
        found = core.refresh(seen, {**settings, "align": align}, 2)[0]["projector"]
        assert relative(found.mT @ found, torch.eye(4, dtype=torch.float64).expand(3, 4, 4)) < 1e-12
        distances[align] = (float((found - old).norm()), found @ found.mT)
    assert relative(distances[True][1], distances[False][1]) < 1e-10  # one subspace
    assert distances[True][0] < 0.8 * distances[False][0]


# All of them


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("shape", [(5, 4), (150, 130)])
def test_a_batch_is_each_block_alone(core: type[Core], shape: tuple[int, int]) -> None:
    weights, gradients = gradients_of(1, 3, *shape, seed=1)[0], gradients_of(4, 3, *shape)
    settings = double(core)
    together = Stepper(core(), weights, **settings).run(gradients)
    for block in range(3):
        alone = Stepper(core(), weights[block : block + 1], **settings).run([g[block : block + 1] for g in gradients])
        assert relative(together[block], alone[0]) < 1e-13
    assert relative(together, weights) > 1e-3


@pytest.mark.parametrize("core", [ShampooCore, SOAPCore])
@pytest.mark.parametrize("method", ["eigh", "cholesky_qr"])
def test_rounding_does_not_grow(core: type[Core], method: str) -> None:
    """With the defaults, gradients that differ by rounding give weights that differ by little."""
    gradients = gradients_of(30, 1, 16, 12, dtype=torch.float32)
    other = [g * (1 + 1e-7 * n) for g, n in zip(gradients, gradients_of(30, 1, 16, 12, seed=4), strict=True)]
    option = {"root_method" if core is ShampooCore else "basis_method": method}
    one, two = (
        Stepper(core(), torch.zeros(1, 16, 12), **option).run([g.float() for g in gs]) for gs in (gradients, other)
    )
    assert 0 < relative(two, one) < 1e-4


INPUTS = {
    "zero": torch.zeros(2, 6, 5), "huge": 1e30 * torch.ones(2, 6, 5), "tiny": 1e-30 * torch.ones(2, 6, 5),
    "smallest": torch.full((2, 6, 5), 1e-45), "largest": torch.full((2, 6, 5), 3e38),
    "rank one": torch.arange(60.0).view(2, 6, 5), "one element": torch.eye(6, 5).expand(2, 6, 5) * torch.eye(6)[0, :, None],
    "ill-conditioned": torch.diag_embed(torch.logspace(-18, 18, 5)).expand(2, 5, 5), "vector": torch.ones(2, 7),
    "one": torch.ones(2, 1), "row": torch.ones(2, 1, 5),
}  # fmt: skip


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", INPUTS)
def test_no_gradient_gives_anything_but_numbers(core: type[Core], name: str) -> None:
    gradient = INPUTS[name]
    if gradient.dim() == 2 and core in (MuonCore, GaLoreCore):
        with pytest.raises(ValueError, match=r"the shape of a block is \(\d,\). Allowed: two dimensions or more; give"):
            core().state(tuple(gradient.shape[1:]), core.defaults)
        return
    variants: list[dict[str, Any]] = [{}]
    if core is ShampooCore:
        variants = [
            {"grafting": g, "root_method": m} for g in ("adam", "sgd", "none") for m in ("eigh", "newton", "qr")
        ]
    elif core is SOAPCore:
        variants = [{"basis_method": m} for m in ("eigh", "qr", "cholesky_qr")]
    start = {"start_preconditioning_step": 1, "precondition_frequency": 2}  # the worst that can be asked for
    usual = gradients_of(5, *gradient.shape, dtype=torch.float32)
    for variant in variants:
        settings = {**variant, **{k: v for k, v in start.items() if k in core.defaults}}
        for sequence in ([gradient] * 5, [*usual, gradient, *usual], [gradient, *usual]):
            stepper = Stepper(core(), torch.zeros_like(gradient), **settings)
            for each in sequence:
                assert stepper.step(each).isfinite().all(), (variant, stepper.steps)
            assert stepper.weights.isfinite().all()


@pytest.mark.parametrize("method", ["eigh", "newton", "qr", "cholesky_qr"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_factor_keeps_the_last_root(method: str, broken: float) -> None:
    for core, option, prefix in ((ShampooCore, "root_method", "root_"), (SOAPCore, "basis_method", "basis_")):
        if core is SOAPCore and method == "newton":
            continue
        stepper = Stepper(core(), torch.zeros(3, 6, 5), **{option: method}, precondition_frequency=1)
        stepper.run(gradients_of(3, 3, 6, 5, dtype=torch.float32))
        factor = next(name for name in stepper.state if name.startswith("factor_1"))
        state = {name: tensor.clone() for name, tensor in stepper.state.items()}
        good, none = stepper.core.refresh(state, stepper.settings, 3)
        state[factor][1, 0, 2] = broken
        found, kept = stepper.core.refresh(state, stepper.settings, 3)
        assert none.tolist() == [False] * 3
        assert kept.tolist() == [False, True, False]
        assert any(name.startswith(prefix) for name in found)
        for name, tensor in found.items():
            assert tensor.isfinite().all()
            assert torch.equal(tensor[[0, 2]], good[name][[0, 2]])
        last = f"{prefix}1" + ("_of_2" if core is ShampooCore else "")
        assert torch.equal(found[last][1], state[last][1])


def test_galore_keeps_its_projector_for_gradients_of_zeros() -> None:
    stepper = Stepper(GaLoreCore(), torch.zeros(2, 6, 8), rank=2, update_proj_gap=1)
    (gradient,) = gradients_of(1, 2, 6, 8, dtype=torch.float32)
    stepper.step(gradient)
    before = stepper.state["projector"].clone()
    gradient[0] = 0
    stepper.step(gradient)
    assert stepper.kept.tolist() == [1, 0]
    assert torch.equal(stepper.state["projector"][0], before[0])


@pytest.mark.parametrize("core", [ShampooCore, SOAPCore])
def test_nothing_is_refreshed_that_nobody_looks_at(core: type[Core]) -> None:
    stepper = Stepper(core(), torch.zeros(1, 6, 5), start_preconditioning_step=8, precondition_frequency=3)
    stepper.run(gradients_of(1, 1, 6, 5, dtype=torch.float32))
    for step, used in ((1, False), (4, False), (5, False), (6, True), (7, True), (8, True)):
        assert bool(stepper.core.refresh(stepper.state, stepper.settings, step)[0]) is used


@pytest.mark.parametrize("core", CORES)
def test_states_keep_their_dtype_whatever_the_gradients(core: type[Core]) -> None:
    """Momenta in float64 of gradients in float32, and the other way round."""
    for state, dtype in (("float64", torch.float32), ("float32", torch.float64)):
        options = {o: state for o in ("state_dtype", "factor_dtype") if o in core.defaults}
        stepper = Stepper(core(), torch.zeros(1, 6, 5, dtype=dtype), **options)
        stepper.run(gradients_of(3, 1, 6, 5, dtype=dtype))
        want = Stepper(
            core(),
            torch.zeros(1, 6, 5).double(),
            **double(core) | {"lr": core.defaults["lr"], "weight_decay": core.defaults["weight_decay"]},
        ).run(gradients_of(3, 1, 6, 5))
        assert relative(stepper.weights.double(), want) < 1e-3
        assert {t.dtype for t in stepper.state.values()} == {getattr(torch, state)}


@pytest.mark.parametrize("core", CORES)
def test_costs(core: type[Core]) -> None:
    made, settings = core(), core.defaults
    small, large = (made.cost((n, n), settings) for n in (128, 256))
    assert 0 < small.step < large.step
    assert (large.refresh > 0) == (made.period(settings) > 0)
    if core in (ShampooCore, SOAPCore, MuonCore):
        assert 6 < large.step / small.step < 9  # products
    assert made.period(settings) == settings.get("precondition_frequency", settings.get("update_proj_gap", 0))


def test_costs_follow_the_shape() -> None:
    core, settings = ShampooCore(), ShampooCore.defaults
    assert core.cost((256, 64), settings).refresh == pytest.approx(10 * (256**3 + 64**3))
    assert core.cost((64, 32), {**settings, "inverse_exponent_override": {2: {0: 0.0}}}).refresh == 10 * 32**3


REFUSED = [
    (ShampooCore, {"lr": -1.0}, r"lr is -1.0. Allowed: a number of at least 0"),
    (ShampooCore, {"lr": math.nan}, r"lr is nan"),
    (ShampooCore, {"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0. Allowed: at least 0 and less than 1"),
    (ShampooCore, {"betas": (0.9, 1.1)}, r"betas\[1\] is 1.1. Allowed: 0 to 1 \(1: a sum\)"),
    (ShampooCore, {"betas": 0.9}, r"betas is 0.9. Allowed: two numbers"),
    (ShampooCore, {"beta3": 1.0}, r"beta3 is 1.0"),
    (ShampooCore, {"epsilon": 0.0}, r"epsilon is 0.0. Allowed: above 0"),
    (ShampooCore, {"pseudo_inverse": True}, r"epsilon is 1e-06. Allowed: 0 with pseudo_inverse=True"),
    (ShampooCore, {"pseudo_inverse": True, "epsilon": 0.0, "root_method": "newton"}, r"root_method is 'newton'. Allowed: 'eigh'"),
    (ShampooCore, {"grafting": "adamw"}, r"grafting is 'adamw'. Allowed: none, sgd, adagrad, rmsprop, adam"),
    (ShampooCore, {"betas": (0.9, 1.0)}, r"grafting_beta2 is None. Allowed: below 1 for grafting='adam', and betas\[1\] is 1"),
    (ShampooCore, {"grafting_epsilon": -1e-8}, r"grafting_epsilon is -1e-08"),
    (ShampooCore, {"root_method": "svd"}, r"root_method is 'svd'. Allowed: eigh, newton, qr, cholesky_qr"),
    (ShampooCore, {"root_method": "newton", "inverse_exponent_override": 0.3}, r"inverse_exponent_override is 0.3. Allowed: 1/2"),
    (ShampooCore, {"inverse_exponent_override": {2: {0: -0.5}}}, r"inverse_exponent_override is -0.5"),
    (ShampooCore, {"precondition_frequency": 0}, r"precondition_frequency is 0. Allowed: a whole number of at least 1"),
    (ShampooCore, {"precondition_frequency": 2.5}, r"precondition_frequency is 2.5"),
    (ShampooCore, {"statistics_every": True}, r"statistics_every is True"),
    (ShampooCore, {"start_preconditioning_step": 0}, r"start_preconditioning_step is 0. Allowed: -1, or 1 up"),
    (ShampooCore, {"use_nesterov": True}, r"momentum is 0.0. Allowed: above 0, since dampening or use_nesterov is given"),
    (ShampooCore, {"momentum": 1.0}, r"momentum is 1.0"),
    (ShampooCore, {"trace_scaling_exponent": 2.0}, r"trace_scaling_exponent is 2.0"),
    (ShampooCore, {"factor_dtype": "bfloat16"}, r"factor_dtype is 'bfloat16'. Allowed: float32, float64"),
    (SOAPCore, {"basis_method": "newton"}, r"basis_method is 'newton'. Allowed: eigh, qr, cholesky_qr"),
    (SOAPCore, {"shampoo_beta": 2.0}, r"shampoo_beta is 2.0"),
    (SOAPCore, {"ignored_basis_change_dims": [0]}, r"ignored_basis_change_dims is \[0\]"),
    (SOAPCore, {"inverse_exponent": 0.0}, r"inverse_exponent is 0.0"),
    (MuonCore, {"adjust_lr_fn": "keller"}, r"adjust_lr_fn is 'keller'. Allowed: original, match_rms_adamw"),
    (MuonCore, {"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients is \(1.0, 2.0\). Allowed: three"),
    (MuonCore, {"momentum": 0.0}, r"nesterov is True. Allowed: False with momentum=0"),
    (MuonCore, {"ns_dtype": "float16"}, r"ns_dtype is 'float16'"),
    (GaLoreCore, {"rank": 0}, r"rank is 0"),
    (GaLoreCore, {"scale": 0.0}, r"scale is 0.0"),
    (AdamWCore, {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0. Allowed: at least 0 and less than 1"),
    (AdamWCore, {"weight_decay": -0.1}, r"weight_decay is -0.1"),
    (AdamWCore, {"eps": -1.0}, r"eps is -1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("core", "wrong", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_makes_no_sense_is_refused(core: type[Core], wrong: dict[str, Any], said: str) -> None:
    core().check(core.defaults)
    with pytest.raises(ValueError, match=said):
        core().check({**core.defaults, **wrong})


@pytest.mark.parametrize("core", CORES)
def test_defaults_are_plain(core: type[Core]) -> None:
    """So that a state dict with them loads with weights_only=True."""
    plain = (int, float, bool, str, type(None), tuple)
    assert all(isinstance(value, plain) for value in core.defaults.values())
    assert {"lr", "weight_decay"} <= set(core.defaults)
    assert as_the_reference(3)(3, 2)
