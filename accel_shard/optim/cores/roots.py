"""Inverse roots and eigenbases of batches of symmetric positive semidefinite matrices, which never come out as NaN.

A matrix that one way cannot handle goes down a ladder: in its own dtype; in float64 with a little on the diagonal; the
same on the CPU (a device's solver can fail, or return nonsense, where LAPACK does not); and then the caller is told to
keep what it had. All of this is for refreshes: it asks the host how things went, as nothing in a plain step does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accel_shard.optim.cores.batch import all_finite, gram, replaced

__all__ = ["Ridge", "eigenbasis", "eigh", "inverse_root", "is_identity", "refined_basis", "root_by_basis", "root_of"]


@dataclass(frozen=True, slots=True)
class Ridge:
    """What keeps a matrix without full rank from having an infinite inverse.

    Attributes:
        epsilon: added to all eigenvalues: to the diagonal, before the root is taken. If rounding left the least
            eigenvalue below 0, all are shifted further, so that it becomes ``epsilon``.
        relative: instead, ``epsilon`` times the trace is the floor of the eigenvalues, so that a root scales with its
            matrix; that of zeros is 1. What lies below the floor is rounding in the main, of which with an addition
            1 % to 0.1 % came through to the weights where factors lack rank. (``newton`` has no eigenvalues, and adds.)
        pseudo_inverse: instead, eigenvalues below ``size * machine epsilon`` of the largest have the inverse root 0.
    """

    epsilon: float
    relative: bool = False
    pseudo_inverse: bool = False

    def of(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return what is added to each matrix, or its floor, ``[blocks, 1]``."""
        trace = matrices.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
        if not self.relative:
            return torch.full_like(trace, self.epsilon)
        return torch.where(trace > 0, trace.clamp(min=0) * self.epsilon, 1.0)


def eigh(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return eigenvalues (ascending), eigenvectors, and which matrices have none; what is there for those is finite.

    Args:
        matrices: ``[blocks, n, n]``, symmetric.
    """
    size = matrices.shape[-1]
    # No element is larger than the largest of the diagonal. Of order one, nothing over- or underflows on the way.
    scale = matrices.diagonal(dim1=-2, dim2=-1).abs().amax(-1)
    scale = torch.where(scale.isfinite() & (scale > 0), scale, 1.0)
    scaled = matrices / scale.view(-1, 1, 1)
    failed = ~all_finite(scaled)
    values, vectors, wrong = _try(replaced(scaled, failed, torch.eye(size).to(matrices)))
    if wrong.any():
        for place in dict.fromkeys((matrices.device, torch.device("cpu"))):
            again = wrong.nonzero().flatten()
            jitter = 1e-14 * torch.eye(size, dtype=torch.float64, device=place)
            found, basis, still = _try(scaled[again].to(place, torch.float64) + jitter)
            values[again], vectors[again] = found.to(values), basis.to(vectors)
            wrong[again] = still.to(wrong.device)
            if not wrong.any():
                break
    return values * scale.unsqueeze(-1), vectors, failed | wrong


def _try(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decompose what can be decomposed; the others have the identity, and are marked."""
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except RuntimeError:  # LinAlgError is one; so is what a device's library says
        if len(matrices) == 1:
            ones = torch.ones_like(matrices[:, 0])
            return ones, torch.diag_embed(ones), torch.ones(1, dtype=torch.bool, device=matrices.device)
        each = [_try(matrix.unsqueeze(0)) for matrix in matrices]
        values, vectors, wrong = (torch.cat(parts) for parts in zip(*each, strict=True))
        return values, vectors, wrong
    # A solver that goes wrong without a word rarely keeps the trace.
    trace = matrices.diagonal(dim1=-2, dim2=-1).sum(-1)
    off = (values.sum(-1) - trace).abs() > 1e-3 * matrices.shape[-1]
    wrong = ~(all_finite(values) & all_finite(vectors)) | off
    return values, vectors, wrong


def root_of(
    values: torch.Tensor, vectors: torch.Tensor, exponent: float, ridge: Ridge, added: torch.Tensor
) -> torch.Tensor:
    """Return the matrices with these eigenvalues and eigenvectors, to the power ``-exponent``.

    Args:
        values: ``[blocks, n]``.
        vectors: ``[blocks, n, n]``.
        exponent: positive.
        ridge: what is done about small eigenvalues.
        added: what :meth:`Ridge.of` said of the matrices.
    """
    if ridge.pseudo_inverse:
        size = values.shape[-1]
        cutoff = size * torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True).clamp(min=0)
        halves = torch.where(values > cutoff, values.clamp(min=torch.finfo(values.dtype).tiny), 1.0)
        halves = torch.where(values > cutoff, halves.pow(-exponent / 2), 0.0)
    else:
        lifted = torch.maximum(values, added) if ridge.relative else values + added
        least = lifted.amin(-1, keepdim=True)
        # In this order: what is added may be less than the rounding of the least.
        halves = torch.where(least < added, (lifted - least) + added, lifted).pow(-exponent / 2)
    # From both sides, so that the root is exactly symmetric and is made in 5/8 of a product.
    return gram(vectors * halves.unsqueeze(-2))


def inverse_root(
    matrices: torch.Tensor, exponent: float, ridge: Ridge, method: str = "eigh"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``matrices`` to the power ``-exponent``, and which of them have no usable one (what is there is finite).

    Args:
        matrices: ``[blocks, n, n]``, symmetric.
        exponent: positive.
        ridge: what is done about small eigenvalues.
        method: ``eigh``; or ``newton``, the coupled Newton iteration, which needs an exponent of 1/2, 1/3, 1/4 ... and
            falls back on ``eigh`` for matrices with which it does not converge. It is products only: for GPUs.
    """
    if method == "newton":
        root, failed = _newton(matrices, round(1 / exponent), ridge.of(matrices))
        if failed.any():
            again = failed.nonzero().flatten()
            root[again], failed[again] = inverse_root(matrices[again], exponent, ridge)
        return root, failed
    values, vectors, failed = eigh(matrices)
    root = root_of(values, vectors, exponent, ridge, ridge.of(matrices))
    failed |= ~all_finite(root)
    return replaced(root, failed, torch.zeros_like(root[:1])), failed


def _newton(matrices: torch.Tensor, power: int, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Iterate ``X <- X T, M <- T^p M`` with ``T = ((p + 1) I - M) / p`` until ``M`` is the identity.

    ``M`` starts as the matrix, scaled by its norm so that no eigenvalue is above ``p + 1``; then it converges.
    """
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    lifted = matrices + added.unsqueeze(-1) * eye
    # Both bound the largest eigenvalue from above. The smaller one saves iterations.
    bound = torch.minimum(torch.linalg.vector_norm(lifted, dim=(-2, -1)), lifted.abs().sum(-1).amax(-1)).view(-1, 1, 1)
    scale = (power + 1) / (2 * bound)
    root, coupled = scale.pow(1 / power) * eye, scale * lifted
    tolerance = 1e-6 if matrices.dtype == torch.float32 else 1e-12
    best = (coupled - eye).abs().amax((-2, -1))
    kept, stuck = root, best <= tolerance
    for _ in range(100):
        if stuck.all():
            break
        step = ((power + 1) * eye - coupled) / power
        root, coupled = root @ step, torch.linalg.matrix_power(step, power) @ coupled
        error = (coupled - eye).abs().amax((-2, -1))
        # Near its end the iteration can drift off again, and the others of the batch go on: keep what was best, and
        # nothing that comes after a matrix is done.
        better = (error < best) & ~stuck
        kept = torch.where(better.view(-1, 1, 1), root, kept)
        best = torch.where(better, error, best)
        stuck = stuck | (best <= tolerance) | (~better & (best < 1e-2)) | ~error.isfinite()
    return kept, ~((best < 1e-3) & all_finite(kept))


def is_identity(basis: torch.Tensor) -> torch.Tensor:
    """Return which bases are the one they start as: nothing better is known yet."""
    return (basis.diagonal(dim1=-2, dim2=-1) == 1.0).all(-1)


def refined_basis(
    matrices: torch.Tensor, basis: torch.Tensor, added: torch.Tensor, method: str = "cholesky_qr"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a better eigenbasis, by one step of simultaneous iteration from an earlier one, and which have none.

    The columns of ``(A + added) Q`` are orthogonalised in their order, which should be that of falling eigenvalues:
    else the larger ones swamp the smaller.

    Args:
        matrices: ``[blocks, n, n]``, symmetric.
        basis: ``[blocks, n, n]``, orthogonal: eigenvectors of a matrix like these.
        added: to the diagonals, ``[blocks, 1]``, positive: keeps the columns of small eigenvalues out of the rounding.
        method: ``qr``; or ``cholesky_qr``, from the products of the columns, which is faster, and falls back on ``qr``
            for bases that would not come out orthogonal.
    """
    moved = (matrices @ basis).addcmul_(added.unsqueeze(-1), basis)
    lengths = torch.linalg.vector_norm(moved, dim=-2, keepdim=True)
    moved /= torch.where(lengths > 0, lengths, 1.0)
    failed = ~all_finite(moved)
    moved = replaced(moved, failed, basis)
    if method == "qr":
        return torch.linalg.qr(moved)[0], failed
    # With columns of one length, of a basis that was nearly right, the products are nearly the identity.
    factor, info = torch.linalg.cholesky_ex(gram(moved.mT), upper=True)
    steep = factor.diagonal(dim1=-2, dim2=-1).amin(-1) < 0.1  # Its square is what rounding is multiplied with.
    poor = (info != 0) | steep | ~all_finite(factor)
    factor = replaced(factor, poor, torch.eye(basis.shape[-1]).to(factor))
    found = torch.linalg.solve_triangular(factor, moved, upper=True, left=False)
    if poor.any():
        again = poor.nonzero().flatten()
        found[again] = torch.linalg.qr(moved[again])[0]
    return found, failed


def eigenbasis(
    matrices: torch.Tensor, basis: torch.Tensor, added: torch.Tensor, method: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a basis in which the matrices are diagonal, or nearly so, and which have none.

    Args:
        matrices: ``[blocks, n, n]``, symmetric.
        basis: the last one. What is still the identity is decomposed.
        added: as in :func:`refined_basis`.
        method: ``eigh``: eigenvectors, by rising eigenvalue. ``qr`` and ``cholesky_qr``: one step from the last basis,
            which is by falling eigenvalue, as these need it.
    """
    if method == "eigh":
        values, vectors, failed = eigh(matrices)
        return _settled(values, vectors, basis, added), failed
    fresh = is_identity(basis)
    if not fresh.any():
        return refined_basis(matrices, basis, added, method)
    found, failed = torch.empty_like(basis), torch.zeros_like(fresh)
    new, old = fresh.nonzero().flatten(), (~fresh).nonzero().flatten()
    values, vectors, failed[new] = eigh(matrices[new])
    found[new] = _settled(values, vectors, basis[new], added[new]).flip(-1)
    if len(old):
        found[old], failed[old] = refined_basis(matrices[old], basis[old], added[old], method)
    return found, failed


def _settled(values: torch.Tensor, vectors: torch.Tensor, last: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Return eigenvectors of which those below the floor are the last basis's, as far as they lie in their space.

    Any basis of that space is as right as another, and rounding chooses: then what is done in the coordinates of the
    basis, element by element, would depend on it. What is left of given vectors in the space, orthogonalised in their
    order, is a smooth function of the space, up to signs. (The nearest basis would be another, at ten times the cost.)
    """
    below = values <= floor
    which = below.any(-1).nonzero().flatten()
    if not len(which):
        return vectors
    # They are the first columns. The identity fills up, so that matrices with spaces of any size are one batch.
    count = int(below.sum(-1).amax())
    mask = below[which, :count].unsqueeze(-2)
    space, given = vectors[which, :, :count] * mask, last[which, :, :count] * mask
    turn, _ = torch.linalg.qr(space.mT @ given + torch.diag_embed((~mask[:, 0]).to(values.dtype)))
    settled = vectors[which]
    settled[..., :count] = torch.where(mask, space @ turn, settled[..., :count])
    return vectors.index_copy(0, which, replaced(settled, ~all_finite(settled), vectors[which]))


def root_by_basis(
    matrices: torch.Tensor, basis: torch.Tensor, exponent: float, ridge: Ridge, method: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return roots and bases by one step from the last bases, and which matrices have none (what is there is finite).

    The root is that of the matrix without what is off the diagonal in its basis.
    """
    added = ridge.of(matrices)
    found, failed = eigenbasis(matrices, basis, added, method)
    values = (found * (matrices @ found)).sum(-2)
    values, order = values.sort(-1, descending=True)
    found = found.gather(-1, order.unsqueeze(-2).expand_as(found))
    root = root_of(values, found, exponent, ridge, added)
    failed = failed | ~all_finite(root)
    return replaced(root, failed, torch.zeros_like(root[:1])), found, failed
