"""What a save does while training waits: agree on who writes what, and copy this rank's share to host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accel_shard.checkpoint.places import Place
from accel_shard.checkpoint.plan import Planner, WritePlan
from accel_shard.checkpoint.snapshot import StagedSnapshot
from accel_shard.checkpoint.together import attempt
from accel_shard.layout import Layout

__all__ = ["HostMemory", "Stager"]


class HostMemory:
    """One block of host memory for a rank's share, one tensor behind the other as in the file; used again and again."""

    def __init__(self) -> None:
        self._kinds: list[Any] = []
        self._views: list[torch.Tensor] = []

    def hold(self, entries: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Copy tensors; what is returned is valid until the next call, whatever becomes of the originals."""
        entries = sorted(entries, key=lambda entry: -entry[1].element_size())  # keeps every view aligned
        kinds = [(tensor.shape, tensor.dtype, tensor.device.type == "cuda") for _, tensor in entries]
        if kinds != self._kinds:
            self._views = []  # first, so that there are never two blocks
            self._views, self._kinds = _block([tensor for _, tensor in entries]), kinds
        if not entries:
            return []  # a small model on many ranks
        with torch.no_grad():
            torch._foreach_copy_(self._views, [tensor for _, tensor in entries], non_blocking=True)
        for device in {tensor.device for _, tensor in entries}:
            if device.type != "cpu":
                torch.get_device_module(device).synchronize(device)
        return [(name, view) for view, (name, _) in zip(self._views, entries, strict=True)]


def _block(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    pinned = any(tensor.device.type == "cuda" for tensor in tensors)
    block, at, views = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned), 0, []
    for tensor, size in zip(tensors, sizes, strict=True):
        views.append(block[at : at + size].view(tensor.dtype).view(tensor.shape))
        at += size
    return views


class Stager:
    """Stages one snapshot after the other; what stays the same from one to the next is worked out once.

    Args:
        background: copy to host memory, so that training may go on when :meth:`stage` returns. Else the live tensors
            are written: nothing may change before that.
    """

    def __init__(self, *, background: bool) -> None:
        self._planner, self._memory = Planner(), HostMemory() if background else None

    def unchanged(self, layout: Layout) -> bool:
        """Tell whether this rank's state is laid out as at the last call of :meth:`stage`. Local."""
        return self._planner.unchanged(layout)

    def stage(
        self, target: Place, layout: Layout, facts: Mapping[str, Any], own: Mapping[str, Any], *, keep_plan: bool
    ) -> StagedSnapshot:
        """Agree on who writes what, and copy this rank's share if saving goes on in the background.

        Every rank must call it; unless the last plan is kept they exchange what they hold (not the data).

        Args:
            target: the final folder; it must not exist.
            layout: of this rank.
            facts: plain data that rank 0 puts into the manifest.
            own: plain data of this rank alone, as its random state.
            keep_plan: whether :meth:`unchanged` was true on every rank.

        Raises:
            SnapshotError: if the ranks together do not hold some tensor whole, or hold pieces that overlap.
        """
        plan = self._planner.plan(layout, keep=keep_plan)
        failure: list[str] = []
        if self._memory is not None:
            with attempt() as failure:
                plan = WritePlan(self._memory.hold(plan.mine), plan.index)
        words = "".join(f"could not copy the state to host memory: {text}" for text in failure)
        return StagedSnapshot(target, plan, dict(layout.aliases), dict(facts), dict(own), words)
