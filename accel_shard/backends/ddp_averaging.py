"""Local SGD: each rank trains by itself, and every so many optimizer steps all take the mean of their weights.

It does what ``accelerate.local_sgd.LocalSGD`` does, without a line of it in the loop: DDP's reducer is off for good,
and a hook after the optimizer's step counts steps and averages. Optimizer state and buffers are never averaged, so that
ranks differ in them all the time. A snapshot may be made at any step. It holds every rank's own state, so that as many
ranks go on exactly, and the mean over the ranks for whoever resumes with more or fewer, or under another policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate.logging import get_logger

from accel_shard.backends.parameter_layout import StateShape
from accel_shard.errors import UnsupportedPolicyError
from accel_shard.layout import Layout, Shard, row_of

__all__ = ["WeightAveraging"]

logger = get_logger(__name__)

_TOGETHER: Final = 1 << 25  # bytes that are averaged in one collective


class WeightAveraging:
    """Averages the weights of one optimizer over all ranks after every ``period`` of its steps.

    Args:
        optimizer: the torch optimizer; every rank must step it equally often.
        period: steps from one average to the next.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, period: int) -> None:
        self._optimizer, self.period, self.steps = optimizer, period, 0
        self._averaged_at = 0
        optimizer.register_step_post_hook(self._after_step)

    @property
    def apart(self) -> bool:
        """Whether ranks have weights of their own now."""
        return self.steps != self._averaged_at

    def counters(self) -> dict[str, Any]:
        """Return how many steps were done, and after how many of them the last average came."""
        return {"local_sgd": [self.steps, self._averaged_at]}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Put back what :meth:`counters` returned; a snapshot of another policy begins to count."""
        self.steps, self._averaged_at = counters.get("local_sgd", (0, 0))

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        if self.steps % self.period == 0:
            self.average()

    def average(self) -> None:
        """Give every rank the mean of all ranks' weights, if they differ. Every rank must call it."""
        if self.apart:
            average_in_place(p for group in self._optimizer.param_groups for p in group["params"])
            self._averaged_at = self.steps

    def for_snapshot(self, layout: Layout, rank: int, ranks: int) -> Layout:
        """Return a layout of means over the ranks, and of what each has. Every rank must call it.

        Raises:
            UnsupportedPolicyError: on every rank, if they have states of different parameters.
        """
        _check_alike(layout, ranks)
        kept = Layout(
            dict(layout.weights), layout.buffers, {name: dict(states) for name, states in layout.states.items()},
            layout.scalars, layout.groups, layout.aliases,
        )  # fmt: skip
        if self.apart:
            for name, shard in layout.weights.items():
                kept.weights[name] = mean_of(shard, ranks)
        for name, states in layout.states.items():
            for state, shard in states.items():
                kept.states[name][state] = mean_of(shard, ranks)
        kept.own = {key: row_of(tensor.unsqueeze(0), rank, ranks) for key, tensor in self._own(layout)}
        return kept

    def _own(self, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
        for key, shard in layout.tensors():
            if key.startswith("optim.") or (self.apart and key.startswith("model.")):
                yield f"local_sgd.{key}", shard.parts[0][1]

    def take(
        self, layout: Layout, stored: Mapping[str, StateShape],
        read: Callable[[Iterable[tuple[str, Shard]]], None], rank: int, ranks: int,
    ) -> set[str]:  # fmt: skip
        """Take back what this rank had of its own, after the means were loaded. Local.

        Returns:
            The keys that were of use.
        """
        mine = {key: tensor for key, tensor in self._own(layout) if key in stored}
        former = {stored[key][0][0] for key in mine}
        if former == {ranks}:
            read((key, row_of(tensor.unsqueeze(0), rank, ranks)) for key, tensor in mine.items())
        elif former:
            logger.warning(
                "local_sgd: the snapshot is of %d ranks that had trained apart for %d steps; now all %d get the mean "
                "of their weights and optimizer states",
                former.pop(), self.steps - self._averaged_at, ranks, main_process_only=True,
            )  # fmt: skip
            self._averaged_at = self.steps
        return set(mine)


@torch.no_grad()
def average_in_place(parameters: Iterable[torch.Tensor]) -> None:
    """Give every rank the mean of all ranks' tensors. Every rank must call it, with as many of the same shapes."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for tensors in alike.values():
        for chunk in _chunks(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
            dist.all_reduce(flat)
            flat.div_(dist.get_world_size())
            at = 0
            for tensor in chunk:
                tensor.copy_(flat[at : at + tensor.numel()].view(tensor.shape))
                at += tensor.numel()


def _chunks(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    for tensor in tensors:
        if chunk and sum(t.nbytes for t in chunk) + tensor.nbytes > _TOGETHER:
            yield chunk
            chunk = []
        chunk.append(tensor)
    if chunk:
        yield chunk


@torch.no_grad()
def mean_of(shard: Shard, ranks: int) -> Shard:
    """Return the mean over the ranks of a whole tensor, in host memory. Every rank must call it; it sums the tensor.

    What is no floating-point number has no mean; rank 0's is taken.
    """
    tensor = shard.parts[0][1].clone(memory_format=torch.contiguous_format)
    if tensor.is_floating_point() or tensor.is_complex():
        dist.all_reduce(tensor)
        tensor.div_(ranks)
    else:
        dist.broadcast(tensor, src=0)
    return Shard.whole(tensor.cpu())


def _check_alike(layout: Layout, ranks: int) -> None:
    everyones: list[Any] = [None] * ranks
    dist.all_gather_object(everyones, [(key, shard.shape) for key, shard in layout.tensors()])
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            only = sorted({key for key, _ in theirs} ^ {key for key, _ in everyones[0]})
            raise UnsupportedPolicyError(
                f"local_sgd: ranks 0 and {rank} have optimizer states of different parameters ("
                f"{', '.join(only[:5]) or 'in another order'}), because some had a gradient on one of them only. No "
                "snapshot could hold their mean. Use every parameter in each step, or local_sgd 1."
            )
