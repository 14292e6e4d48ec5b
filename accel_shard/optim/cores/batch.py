"""Products of a batch of blocks with the matrices of their dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

__all__ = ["add_gram_", "gram", "mirrored", "multiply", "norms", "part", "pieces", "scale_"]

# Elements of a piece on a CPU. What follows a product then finds its operands in the cache: a third off a step.
_CACHED = 1 << 17
# Below, the calls cost more than the half of a symmetric product that they save.
_TILED = 128


def pieces(blocks: torch.Tensor) -> Iterator[slice]:
    """Yield which blocks to treat at once: all of them, but on a CPU only as many as its cache holds."""
    count = blocks.shape[0]
    step = max(1, _CACHED // max(1, blocks[0].numel())) if count and blocks.device.type == "cpu" else max(1, count)
    for start in range(0, count, step):
        yield slice(start, start + step)


def part(state: Mapping[str, torch.Tensor], name: str, at: slice) -> torch.Tensor | None:
    """Return some blocks' state, if there is such a state."""
    return state[name][at] if name in state else None


def _unfolded(blocks: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the blocks as matrices whose rows run over a dimension of the block."""
    if blocks.dim() == 2:
        return blocks.unsqueeze(2)
    if blocks.dim() == 3:
        return blocks if dim == 0 else blocks.mT
    return blocks.movedim(dim + 1, 1).flatten(2)


def add_gram_(factors: torch.Tensor, blocks: torch.Tensor, dim: int, beta: float, weight: float) -> None:
    """Set ``factors`` to ``beta * factors + weight * B B'``, ``B`` being the blocks unfolded along a dimension.

    Only the upper triangle is right afterwards. On a CPU the products are made by tiles and those below the diagonal
    left out, which saves 3/8 of the multiplications; :func:`mirrored` completes them where a whole matrix is needed.
    """
    rows = _unfolded(blocks.to(factors.dtype), dim)
    columns, size = rows.mT, rows.shape[1]
    if size < _TILED or rows.device.type != "cpu":
        factors.baddbmm_(rows, columns, beta=beta, alpha=weight)
        return
    tile = -(-size // 4)
    for at in range(0, size, tile):
        end = min(at + tile, size)
        factors[:, at:end, at:].baddbmm_(rows[:, at:end], columns[:, :, at:], beta=beta, alpha=weight)


def gram(matrices: torch.Tensor) -> torch.Tensor:
    """Return ``M M'``, exactly symmetric."""
    product = matrices.new_empty(*matrices.shape[:2], matrices.shape[1])
    add_gram_(product, matrices, 0, 0.0, 1.0)
    return mirrored(product)


def mirrored(factors: torch.Tensor) -> torch.Tensor:
    """Return symmetric matrices with the upper triangles of ``factors``."""
    return factors.triu() + factors.triu(1).mT


def multiply(
    blocks: torch.Tensor,
    matrices: Sequence[torch.Tensor | None],
    *,
    transposed: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each dimension of the blocks with its matrix, or leave it where there is none.

    Args:
        blocks: ``[blocks, *shape]``.
        matrices: for each dimension, ``[blocks, d, d or less]``; of one dtype, in which all is computed.
        transposed: multiply with the transposes (for a basis: to its coordinates), else with the matrices (and back).
        out: where to put the result, which must not be one of the operands but may be ``blocks``.
    """
    there = [m for m in matrices if m is not None]
    if not there:
        return blocks if out is None else out.copy_(blocks)
    result = blocks.to(there[0].dtype)
    if len(matrices) == 2:
        left, right = matrices
        last = out if out is not None and out.dtype == result.dtype else None
        if left is not None:
            # Where this is the only product, it may not write what it reads.
            result = torch.bmm(left.mT if transposed else left, result)
        if right is not None:
            free = last is not None and left is not None
            result = torch.bmm(result, right if transposed else right.mT, out=last if free else None)
    else:
        for dim, matrix in enumerate(matrices):
            if matrix is not None:
                moved = result.movedim(dim + 1, -1)
                flat = moved.reshape(moved.shape[0], -1, moved.shape[-1])
                product = flat @ (matrix if transposed else matrix.mT)
                result = product.reshape(*moved.shape[:-1], product.shape[-1]).movedim(-1, dim + 1)
    if out is None:
        return result
    return out if result is out else out.copy_(result)


def norms(blocks: torch.Tensor) -> torch.Tensor:
    """Return the Frobenius norm of each block."""
    norm: torch.Tensor = torch.linalg.vector_norm(blocks.flatten(1), dim=1)
    return norm


def scale_(blocks: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply each block with its number, in place."""
    return blocks.mul_(factors.to(blocks.dtype).view(-1, *[1] * (blocks.dim() - 1)))
