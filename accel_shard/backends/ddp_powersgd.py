"""PowerSGD's memory in snapshots: what each rank still owes the others, and where the next approximation begins.

PowerSGD sends an approximation of each gradient and adds what it left out to the next one. That *error* is each rank's
own. torch keeps it per DDP bucket, flat; here it is cut into parameters, so that other buckets can take it. Only the
mean over ranks of gradient plus error is ever approximated, so on another number of ranks each gets the mean.

On CPU ranks a second bucket would hang: in torch's hook a thread of gloo waits for another one's collective, and gloo
has two threads. There buckets are sent one after the other.

Private upstream names (torch 2.13), only read: ``DistributedDataParallel._comm_hooks`` has the hook's state, and
``Reducer._get_zeros_like_grad_buckets`` says which parameters each bucket holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedDataParallelKwargs
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from accel_shard.backends.parameter_layout import StateShape
from accel_shard.errors import UnsupportedPolicyError
from accel_shard.layout import Shard, row_of
from accel_shard.names import canonical

__all__ = ["OneBucketAtATime", "PowerSGDMemory"]

logger = get_logger(__name__)

_COUNTS: Final = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")


class OneBucketAtATime(DistributedDataParallelKwargs):  # type: ignore[misc]  # accelerate ships no types
    """Accelerate's handler, whose hook waits for the bucket before."""

    @classmethod
    def of(cls, handler: DistributedDataParallelKwargs) -> OneBucketAtATime:
        """Return such a handler with the settings of another one."""
        return cls(**{field.name: getattr(handler, field.name) for field in fields(handler)})

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the hook that Accelerate would. Local."""
        super().register_comm_hook(_InTurn(model))


class _InTurn:
    """Stands for the model when the hook is registered."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        before: torch.futures.Future[torch.Tensor] | None = None

        # DDP's reducer holds it where no garbage collector looks, so it must not hold DDP.
        def in_turn(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            nonlocal before
            if before is not None:
                before.wait()
            future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
            before = None if bucket.is_last() else future
            return future

        # DDP compares them with its own types, and here they are text.
        in_turn.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
        self._model.register_comm_hook(state, in_turn)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a bucket has a parameter, and its low-rank factor Q, which is empty for what is sent as it is."""

    name: str
    shape: tuple[int, ...]
    start: int
    rows: int
    columns: int
    rank: int
    """Of the approximation; 0 for none."""

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


class PowerSGDMemory:
    """The memory of the PowerSGD hook that Accelerate gave a DDP model.

    Raises:
        UnsupportedPolicyError: if this version of torch keeps it elsewhere.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        states = [state for _, state in getattr(model, "_comm_hooks", ()) if isinstance(state, PowerSGDState)]
        if len(states) != 1 or not hasattr(model.reducer, "_get_zeros_like_grad_buckets"):
            raise UnsupportedPolicyError(
                f"gradient_compression 'powersgd': torch {torch.__version__} does not say where its memory is, so no "
                "snapshot could hold it. Use torch 2.13, or gradient_compression 'fp16'."
            )
        self.state: Any = states[0]  # torch types little of it
        self._model = model
        self._buckets: dict[int, list[_Place]] | None = None

    def needs_buckets(self, counters: Mapping[str, Any]) -> bool:
        """Tell whether a run with these counters approximates already, and in buckets that DDP formed on its way."""
        formed = not self._model.find_unused_parameters or self._model.static_graph
        return bool(formed and counters["iter"] >= self.state.start_powerSGD_iter)

    def counters(self) -> dict[str, Any]:
        """Return what is a number: the same on every rank."""
        kind, keys, *rest = self.state.rng.get_state(legacy=True)
        numbers = {name: int(getattr(self.state, name)) for name in _COUNTS}
        return numbers | {"random": [kind, keys.tolist(), *rest]}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Put back what :meth:`counters` returned."""
        for name in _COUNTS:
            setattr(self.state, name, counters[name])
        self.state.rng.set_state(tuple(counters["random"]))

    def shards(self, rank: int, ranks: int) -> dict[str, Shard]:
        """Describe the memory: errors as rows of one tensor over all ranks, factors as tensors all ranks have. Local.

        P, the other factor, is computed anew from Q in each step.
        """
        found: dict[str, Shard] = {}
        for index, places in self._plan().items() if self.state.error_dict or self.state.q_memory_dict else ():
            error = self.state.error_dict.get(index)
            for place in places if error is not None else ():
                row = error[place.start : place.stop].view(1, *place.shape)
                found[f"powersgd.error.{place.name}"] = row_of(row, rank, ranks)
            if (memory := self.state.q_memory_dict.get(index)) is not None:
                for place, start, stop in _factors(places):
                    factor = memory[start:stop].view(place.columns, place.rank)
                    found[f"powersgd.factor.{place.name}"] = Shard.whole(factor)
        return found

    def _plan(self) -> dict[int, list[_Place]]:
        """Return what each bucket holds. It is asked for when buckets no longer change: after DDP's second forward."""
        if self._buckets is None:
            names = {id(p): canonical(name) for name, p in self._model.module.named_parameters()}
            self._buckets = {}
            for bucket in self._model.reducer._get_zeros_like_grad_buckets():
                base, found = int(bucket.buffer().storage_offset()), []
                for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                    start = int(gradient.storage_offset()) - base
                    found.append(self._place(names[id(parameter)], tuple(parameter.shape), start))
                self._buckets[bucket.index()] = found
        return self._buckets

    def _place(self, name: str, shape: tuple[int, ...], start: int) -> _Place:
        rows, numel = shape[0], torch.Size(shape).numel()
        columns = numel // rows
        rank = min(rows, columns, self.state.matrix_approximation_rank)
        worth = (rows + columns) * rank * self.state.min_compression_rate < numel
        return _Place(name, shape, start, rows, columns, rank if worth else 0)

    def take(
        self,
        stored: Mapping[str, StateShape],
        read: Callable[[Iterable[tuple[str, Shard]]], None],
        rank: int,
        ranks: int,
    ) -> set[str]:
        """Fill the memory from a snapshot; :meth:`set_counters` came before, and buckets are formed. Local.

        Args:
            stored: shapes of what :meth:`shards` described, by key.
            read: fills shards from the snapshot.
            rank: of this process.
            ranks: how many there are now.

        Returns:
            The keys that were of use.
        """
        used: set[str] = set()
        if not stored:
            return used
        wanted, unfit = list[tuple[str, Shard]](), list[str]()
        for index, places in self._plan().items():
            errors = {place: key for place in places if (key := f"powersgd.error.{place.name}") in stored}
            if errors and self.state.use_error_feedback:
                wanted += self._take_error(index, errors, stored, read, rank, ranks)
                used |= set(errors.values())
            factors = {place: key for place in places if (key := f"powersgd.factor.{place.name}") in stored}
            if not factors or not self.state.warm_start:
                continue
            used |= set(factors.values())
            if {(p, p.columns, p.rank) for p in places if p.rank} == {(p, *stored[k][0]) for p, k in factors.items()}:
                wanted += self._take_factors(index, places, factors, stored)
            else:
                unfit += [place.name for place in factors]
        read(wanted)
        if unfit:
            logger.warning(
                "PowerSGD begins its factors anew for %d parameters (first: %s): the snapshot's are of another "
                "matrix_approximation_rank, or of other buckets; what earlier steps left out is kept",
                len(unfit), unfit[0], main_process_only=True,
            )  # fmt: skip
        return used

    def _take_error(
        self, index: int, keys: Mapping[_Place, str], stored: Mapping[str, StateShape],
        read: Callable[[Iterable[tuple[str, Shard]]], None], rank: int, ranks: int,
    ) -> list[tuple[str, Shard]]:  # fmt: skip
        """Make a bucket's error, and return what of it is still to be read: this rank's; the mean is made here."""
        former, dtype = stored[next(iter(keys.values()))][0][0], stored[next(iter(keys.values()))][1]
        size = max(place.stop for place in self._plan()[index])
        every = torch.zeros(1 if former == ranks else former, size, dtype=dtype, device=self._device())
        cut = {key: every[:, place.start : place.stop].view(len(every), *place.shape) for place, key in keys.items()}
        self.state.error_dict[index] = every[0]
        if former == ranks:
            return [(key, row_of(row, rank, ranks)) for key, row in cut.items()]
        read((key, Shard.whole(rows)) for key, rows in cut.items())
        self.state.error_dict[index] = every.mean(0)
        return []

    def _take_factors(
        self, index: int, places: list[_Place], keys: Mapping[_Place, str], stored: Mapping[str, StateShape]
    ) -> list[tuple[str, Shard]]:
        """Make a bucket's factors, and return what is to be read."""
        found, dtype = list(_factors(places)), stored[next(iter(keys.values()))][1]
        memory = torch.empty(found[-1][2], dtype=dtype, device=self._device())
        others = sum(place.rows * place.rank for place, _, _ in found)
        self.state.q_memory_dict[index] = memory
        self.state.p_memory_dict[index] = torch.empty(others, dtype=dtype, device=self._device())
        return [
            (keys[place], Shard.whole(memory[start:stop].view(place.columns, place.rank)))
            for place, start, stop in found
        ]

    def _device(self) -> torch.device:
        device: torch.device = next(p.device for p in self._model.module.parameters() if p.requires_grad)
        return device


def _factors(places: Iterable[_Place]) -> Iterable[tuple[_Place, int, int]]:
    """Yield where a bucket's flat memory of factors has each: those of matrices of one shape lie together."""
    alike: dict[tuple[int, int], list[_Place]] = {}
    for place in places:
        if place.rank:
            alike.setdefault((place.rows, place.columns), []).append(place)
    at = 0
    for together in alike.values():
        for place in together:
            yield place, at, at + place.columns * place.rank
            at += place.columns * place.rank
