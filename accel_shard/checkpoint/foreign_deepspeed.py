"""DeepSpeed's own checkpoints: fp32 masters and optimizer state out of the flat partitions of any number of ranks.

What a rank saved is a flat tensor a parameter group, in the order of ``param_shapes``. Stages 1 and 2 lay a group's
parameters one after the other and cut that into equal partitions; stage 3 cuts every parameter into equal parts and
lays these one after the other. The last ones are padded. The keys are DeepSpeed 0.19.8's; DeepSpeed is not imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from accel_shard.checkpoint.foreign_files import Foreign, OptimizerState, Stored, load_pickle
from accel_shard.errors import SnapshotError
from accel_shard.layout import Shard

__all__ = ["find_tag", "open_deepspeed"]

_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps")
_OPTIMIZER_FILE: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


def find_tag(folder: Path) -> Path | None:
    """Return the folder with DeepSpeed's files: this one, or the one that its ``latest`` names; None if neither is.

    Raises:
        SnapshotError: if ``latest`` names a folder that is not there.
    """
    if any(_MODEL_FILE.fullmatch(path.name) for path in folder.glob("*_model_states.pt")):
        return folder
    latest = folder / "latest"
    if not latest.is_file():
        return None
    tag = latest.read_text(encoding="utf-8").strip()
    if Path(tag).name != tag or not (folder / tag).is_dir():
        raise SnapshotError(f"{str(latest)!r} names {tag!r}, and there is no such folder beside it.")
    return folder / tag


def open_deepspeed(tag: Path) -> Foreign:
    """Open a checkpoint of any ZeRO stage, and of none.

    Raises:
        SnapshotError: if files of a rank are missing, cannot be read, or tensor or expert parallelism cut the model.
    """
    models, optimizers = _numbered(tag, _MODEL_FILE), _numbered(tag, _OPTIMIZER_FILE)
    experts = sorted(path.name for path in tag.glob("*expert*.pt"))
    if experts:
        raise SnapshotError(f"{str(tag)!r} holds experts ({experts[0]}), which are not read. Allowed: dense models.")
    if not models:
        raise SnapshotError(f"{str(tag)!r} has no *_model_states.pt: it is no DeepSpeed checkpoint, or not whole.")
    first = load_pickle(models[0])
    found = Foreign(tag, "a DeepSpeed checkpoint")
    found.counters = {name: int(first[name]) for name in _COUNTERS if isinstance(first.get(name), int)}
    found.step = found.counters.get("global_steps")
    found.aliases = dict(first.get("shared_params") or {})
    scheduler = first.get("lr_scheduler")
    found.schedulers = [scheduler] if scheduler is not None else []
    found.left = [name for name in ("data_sampler", "random_ltd") if first.get(name) is not None]
    found.ranks = first.get("dp_world_size")
    module: Mapping[str, Any] = first["module"]
    buffers = frozenset(first.get("buffer_names") or ())
    # In stage 3 the module's own weights are empty: what they were is in the partitions. A tied weight's further names
    # hold the copy that forward uses, not the master.
    found.weights = {
        name: Stored.whole(value)
        for name, value in module.items()
        if isinstance(value, torch.Tensor) and name not in found.aliases and (value.numel() or name in buffers)
    }
    if optimizers:
        _read_partitions(found, first, models, optimizers)
    elif first.get("optimizer") is not None:
        found.optimizer = OptimizerState.of_torch(first["optimizer"], f"{str(models[0])!r}")
    return found


def _numbered(tag: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files of the pattern by rank, and check that none is missing."""
    found = {}
    for path in tag.iterdir():
        match = pattern.fullmatch(path.name)
        if match is not None:
            if int(match[2]):
                raise SnapshotError(f"{str(path)!r} is of tensor parallelism, which is not read. Allowed: mp_rank_00.")
            found[int(match[1] or 0)] = path
    missing = sorted(set(range(max(found, default=-1) + 1)) - found.keys())
    if missing:
        raise SnapshotError(f"{str(tag)!r} lacks the file of rank {missing[0]}: {pattern.pattern}.")
    return [found[rank] for rank in sorted(found)]


def _read_partitions(found: Foreign, first: Any, models: list[Path], optimizers: list[Path]) -> None:
    ranks = [load_pickle(path)["optimizer_state_dict"] for path in optimizers]
    count = ranks[0]["partition_count"]
    count = max(count) if isinstance(count, (list, tuple)) else count
    if count != len(ranks):
        raise SnapshotError(f"{count} ranks saved {str(found.path)!r}, and the files of {len(ranks)} are there.")
    shapes = [dict(group) for group in first["param_shapes"]]
    if int(ranks[0].get("zero_stage", 1)) == 3:
        base, flats = [r["optimizer_state_dict"] for r in ranks], [r["fp32_flat_groups"] for r in ranks]
        pieces = _by_equal_parts(shapes, flats, found.path)
        frozen = [load_pickle(path).get("frozen_param_fragments") or {} for path in models]
    else:
        base, flats = (
            [r["base_optimizer_state"] for r in ranks],
            [r["single_partition_of_fp32_groups"] for r in ranks],
        )
        pieces = _by_range(shapes, ranks, flats, found.path)
        frozen = [first.get("frozen_param_fragments") or {}]
    if not isinstance(base[0], Mapping):
        raise SnapshotError(f"{str(found.path)!r} was saved with elastic_checkpoint, which is not read. Turn it off.")
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [fragments[name].reshape(-1) for fragments in frozen if name in fragments]
        if parts:
            found.weights[name] = Stored.of_shards(_equal_parts(tuple(shape), parts))
    group_of = {index: g for g, group in enumerate(base[0]["param_groups"]) for index in group["params"]}
    groups: list[dict[str, Any]] = [dict(group) | {"params": []} for group in base[0]["param_groups"]]
    state = OptimizerState(groups)
    for index, names in enumerate(shapes):
        for name, shape in names.items():
            groups[group_of[index]]["params"].append(name)
            where = pieces[name]
            found.weights[name] = _assemble(tuple(shape), where, [flat[index] for flat in flats])
            for key, value in base[0]["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    held = [rank["state"][index][key] for rank in base]
                    state.add(name, key, _assemble(tuple(shape), where, held), str(found.path))
                else:
                    state.add(name, key, value, str(found.path))
    found.optimizer = state


_Where = list[tuple[int, int, int, int]]
"""Rank, first element in its flat tensor, first element in the parameter, count."""


def _assemble(shape: tuple[int, ...], where: _Where, flats: list[torch.Tensor]) -> Stored:
    return Stored.of_shards(
        Shard.flat_range(shape, start, flats[rank].narrow(0, offset, count)) for rank, offset, start, count in where
    )


def _by_range(shapes: list[dict[str, Any]], ranks: list[Any], flats: list[Any], path: Path) -> dict[str, _Where]:
    """Find each parameter of stage 1 or 2: all of a group one after the other, cut into equal partitions."""
    found: dict[str, _Where] = {}
    gaps = ranks[0].get("param_alignment_paddings") or [[0] * len(names) for names in shapes]
    for index, names in enumerate(shapes):
        size = flats[0][index].numel()  # only the last partitions are stored without what fills them up
        begin = 0
        for (name, shape), gap in zip(names.items(), gaps[index], strict=True):
            end, where = begin + math.prod(shape), []
            for rank, flat in enumerate(flats):
                low, high = max(begin, rank * size), min(end, rank * size + flat[index].numel())
                if low < high:
                    where.append((rank, low - rank * size, low - begin, high - low))
            held = sum(count for *_, count in where)
            if held != end - begin:
                raise SnapshotError(f"{held:,} of the {end - begin:,} elements of {name!r} are in {str(path)!r}.")
            found[name], begin = where, end + gap
    return found


def _by_equal_parts(shapes: list[dict[str, Any]], flats: list[Any], path: Path) -> dict[str, _Where]:
    """Find each parameter of stage 3: an equal part of it in every rank's flat tensor, in the order of shapes."""
    found: dict[str, _Where] = {}
    for index, names in enumerate(shapes):
        at = 0
        for name, shape in names.items():
            numel = math.prod(shape)
            part = math.ceil(numel / len(flats))
            where = [(rank, at, rank * part, min(part, numel - rank * part)) for rank in range(len(flats))]
            found[name] = [piece for piece in where if piece[3] > 0]
            at += part
        if any(flat[index].numel() != at for flat in flats):
            raise SnapshotError(
                f"group {index} of {str(path)!r} holds {flats[0][index].numel():,} elements a rank, and its parameters "
                f"need {at:,}. Partitions over part of the ranks (hpZ, MiCS) are not read."
            )
    return found


def _equal_parts(shape: tuple[int, ...], parts: list[torch.Tensor]) -> Iterator[Shard]:
    at, numel = 0, math.prod(shape)
    for part in parts:
        count = min(part.numel(), numel - at)
        if count > 0:
            yield Shard.flat_range(shape, at, part[:count])
        at += part.numel()
