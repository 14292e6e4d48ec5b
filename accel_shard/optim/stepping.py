"""The inner optimizer's step on what this rank updates, bucket by bucket, and the weights sent while it goes on.

An optimizer of torch's own may be stepped on a few tensors at a time: it counts steps for each of them. So a bucket's
new weights travel while the next bucket is updated; what is made in between is as large as a bucket, not as the model;
and on a CPU a step that runs over its tensors many times (all but ``fused``) is done in blocks that stay in the cache,
which takes a third of the time. An optimizer that only claims to be element-wise may count steps for all of its tensors
together, and is stepped once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from accel_shard.optim.bucket import Bucket, Piece, gather_all, is_shared_out, wait_for

__all__ = ["ELEMENTWISE", "seat", "settings_of", "update", "update_bucket"]

ELEMENTWISE: Final[tuple[type[torch.optim.Optimizer], ...]] = (
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
"""Optimizers that treat each element by itself, so that any range of elements can be updated anywhere. Not their
subclasses, which may do otherwise: they are marked with ``elementwise=True``."""

BLOCK: Final = 1 << 18
"""Elements of a block: in fp32, weights, gradients and two states are 4 MB. Half and twice as many are as fast."""

_NO_SETTINGS: Final = ("params", "param_names")


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in _NO_SETTINGS}


def seat(inner: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
    """Give the inner optimizer all pieces as they are now."""
    for index, group in enumerate(inner.param_groups):
        group["params"] = [piece.tensor for b in buckets for piece in b.pieces if piece.group == index]


def update(inner: torch.optim.Optimizer, buckets: Sequence[Bucket], groups: Sequence[dict[str, Any]]) -> None:
    """Update this rank's ranges and bring everyone's to all ranks. Every rank must call it.

    Args:
        inner: the optimizer of the pieces.
        buckets: all of them, in the same order on every rank.
        groups: what the user sees as parameter groups, whose settings apply.
    """
    if type(inner) in ELEMENTWISE:
        wait_for(buckets, [work for bucket in buckets for work in update_bucket(inner, bucket, groups)])
        seat(inner, buckets)
        return
    for bucket in buckets:
        bucket.cut_pieces(inner.state)
        bucket.take_gradients()
    seat(inner, buckets)
    _take_settings(inner, groups)
    if any(bucket.pieces for bucket in buckets):
        inner.step()
    for own, group in zip(inner.param_groups, groups, strict=True):
        group.update(settings_of(own))  # some count their steps there
    for bucket in buckets:
        bucket.drop_gradients()
    gather_all(buckets)


def update_bucket(inner: torch.optim.Optimizer, bucket: Bucket, groups: Sequence[dict[str, Any]]) -> list[Any]:
    """Update this rank's range of a bucket and start to send it. Every rank must call it, for all buckets in one order.

    Returns:
        What to wait for. The inner optimizer is left without its pieces (:func:`seat`).
    """
    bucket.cut_pieces(inner.state)
    bucket.take_gradients()
    _take_settings(inner, groups)
    at_once: dict[int, list[torch.Tensor]] = {}
    for piece in bucket.pieces:
        if piece.tensor.grad is None:
            continue
        if _goes_in_blocks(piece, groups[piece.group]):
            _step_in_blocks(inner, piece)
        else:
            at_once.setdefault(piece.group, []).append(piece.tensor)
    if at_once:
        _step_only(inner, at_once)
    bucket.drop_gradients()
    return bucket.start_gather()


def _take_settings(inner: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    for own, group in zip(inner.param_groups, groups, strict=True):
        own.update(settings_of(group))


def _goes_in_blocks(piece: Piece, group: Mapping[str, Any]) -> bool:
    return piece.tensor.device.type == "cpu" and not group.get("fused") and piece.tensor.numel() > BLOCK


def _step_only(inner: torch.optim.Optimizer, chosen: Mapping[int, list[torch.Tensor]]) -> None:
    for index, group in enumerate(inner.param_groups):
        group["params"] = chosen.get(index, [])
    inner.step()


def _step_in_blocks(inner: torch.optim.Optimizer, piece: Piece) -> None:
    """Step a piece as if at once. Its states stay whole; a block sees views of them, and its own step count."""
    gradient, state = piece.tensor.grad, inner.state[piece.tensor]
    assert gradient is not None
    shape, flat, gradient = piece.tensor.shape, piece.tensor.detach().view(-1), gradient.view(-1)
    shared = {key: value.view(-1) for key, value in state.items() if is_shared_out(value, piece)}
    numbers = {key: value for key, value in state.items() if key not in shared}
    new: dict[str, Any] = {}
    for start in range(0, len(flat), BLOCK):
        here = slice(start, start + BLOCK)
        block = flat[here].requires_grad_()
        block.grad = gradient[here]
        views = {key: value[here] for key, value in shared.items()}
        inner.state[block] = views | {key: _copy(value) for key, value in numbers.items()}
        _step_only(inner, {piece.group: [block]})
        for key, value in inner.state.pop(block).items():
            if value is views.get(key):
                continue
            if not isinstance(value, torch.Tensor) or value.shape != block.shape:
                new[key] = value
                continue
            whole = shared.get(key, new.get(key))  # most states are made in the first step
            if whole is None:
                whole = new[key] = torch.empty(len(flat), dtype=value.dtype, device=value.device)
            whole[here] = value
    state.update({key: v.view(shape) if isinstance(v, torch.Tensor) and v.dim() else v for key, v in new.items()})


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
