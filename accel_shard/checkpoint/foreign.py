"""Checkpoints that something else wrote: which tool it was, and its files opened as one source.

Accelerate's ``save_state``, HF Trainer's ``checkpoint-N``, DeepSpeed's folders, and files of ``torch.save`` or
safetensors. Opening is local and reads no weights; :mod:`accel_shard.checkpoint.take_over` puts a source into a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from accel_shard.checkpoint.foreign_deepspeed import find_tag, open_deepspeed
from accel_shard.checkpoint.foreign_files import (
    Foreign,
    OptimizerState,
    Stored,
    files_of_index,
    load_pickle,
    open_dcp,
    open_safetensors,
    read_json,
)
from accel_shard.errors import SnapshotError

__all__ = ["open_foreign"]

_WEIGHTS: Final = ("model", "model_state_dict", "state_dict", "model_state", "module", "net")
_OPTIMIZER: Final = ("optimizer", "optimizer_state_dict", "optimizer_state", "optim")
_SCHEDULER: Final = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "schedulers")
_SCALER: Final = ("scaler", "grad_scaler", "scaler_state_dict")
_STEP: Final = ("global_step", "global_steps", "step", "steps", "iteration")
_HINT: Final = (
    "Allowed: a snapshot; a folder of Accelerate's save_state, HF Trainer's checkpoint-N or DeepSpeed; a file of "
    "torch.save or safetensors."
)


def open_foreign(path: Path) -> Foreign:
    """Find out what wrote a checkpoint, and open it. Local: communicates nothing.

    Raises:
        SnapshotError: if it is none that is known, or cannot be read.
    """
    if not path.exists():
        raise SnapshotError(f"{str(path)!r} does not exist. {_HINT}")
    try:
        return _open_file(path) if path.is_file() else _Folder(path).open()
    except (OSError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise SnapshotError(f"{str(path)!r} is not as its tool writes it: {error!r}. {_HINT}") from error


class _Folder:
    """A folder of Accelerate, Trainer or DeepSpeed. What was opened in it is remembered, for the list of the rest."""

    def __init__(self, path: Path) -> None:
        self.path, self._opened = path, set[str]()

    def open(self) -> Foreign:
        """Open it."""
        for pattern in ("pytorch_model_fsdp*_rank*.bin", "optimizer*_rank*.bin"):
            for odd in self.path.glob(pattern):
                raise SnapshotError(
                    f"{str(odd)!r} is a rank's piece that does not say where it belongs (use_dcp=False). Save with "
                    "DCP, or with FULL_STATE_DICT."
                )
        for pattern in ("model_1.safetensors", "pytorch_model_1*", "pytorch_model_fsdp_1*", "optimizer_1*"):
            for odd in self.path.glob(pattern):
                raise SnapshotError(f"{str(odd)!r} is of a second model or optimizer. Allowed: one each.")
        tag = find_tag(self.path)
        found = open_deepspeed(tag) if tag is not None else Foreign(self.path, "")
        found.path = self.path
        if tag is not None:
            self._opened |= {tag.name, "latest"} | ({p.name for p in tag.iterdir()} if tag == self.path else set())
        else:
            found.weights, found.optimizer = self._weights(), self._optimizer()
        schedulers = [load_pickle(file) for file in self._series("scheduler", "bin")]
        schedulers += [load_pickle(file) for file in self._each("scheduler.pt")]
        found.schedulers = schedulers or found.schedulers
        for file in self._each("scaler.pt"):
            found.scaler = load_pickle(file)
        found.objects = [load_pickle(file) for file in self._series("custom_checkpoint", "pkl")]
        self._name(found, tag)
        found.step = found.optimizer.steps if found.step is None and found.optimizer is not None else found.step
        rest = {re.sub(r"\d+", "*", p.name) for p in self.path.iterdir() if p.name not in self._opened}
        found.left += sorted(rest)
        return found

    def _name(self, found: Foreign, tag: Path | None) -> None:
        ranks = len(list(self.path.glob("random_states_*.pkl")))
        if (self.path / "trainer_state.json").is_file():
            found.kind, found.ranks = "a checkpoint of HF Trainer", None
            found.step = int(read_json(self.path / "trainer_state.json")["global_step"])
            self._opened.add("trainer_state.json")
        elif ranks:
            found.kind, found.ranks = "a folder of Accelerate's save_state", ranks
        elif tag is None:
            found.kind = "a model's folder"

    def _each(self, *names: str) -> list[Path]:
        """Return those that are there, and remember them as opened."""
        there = [self.path / name for name in names if (self.path / name).exists()]
        self._opened |= {path.name for path in there}
        return there

    def _series(self, stem: str, suffix: str) -> list[Path]:
        """Return Accelerate's ``stem.bin``, ``stem_1.bin`` and so on, in the order in which they were prepared."""
        numbered = {}
        for path in self.path.glob(f"{stem}*.{suffix}"):
            match = re.fullmatch(rf"{stem}(?:_(\d+))?\.{suffix}", path.name)
            if match is not None:
                numbered[int(match[1] or 0)] = path
        return self._each(*(numbered[number].name for number in sorted(numbered)))

    def _weights(self) -> dict[str, Stored]:
        """Open the weights: FSDP's own files before those that a sharded run writes beside them, perhaps cast."""
        readers: dict[str, Callable[[Path], dict[str, Stored]]] = {
            "pytorch_model_fsdp_0": _dcp_weights,
            "pytorch_model_fsdp.bin": _pickled_weights,
            "model.safetensors": open_safetensors,
            "model.safetensors.index.json": open_safetensors,
            "pytorch_model.bin": _pickled_weights,
            "pytorch_model.bin.index.json": _pickled_index,
        }
        for name, reader in readers.items():
            if (self.path / name).exists():
                self._opened |= {name, *_parts(self.path / name)}
                return reader(self.path / name)
        raise SnapshotError(
            f"{str(self.path)!r} is no snapshot: it has no manifest.json. It has none of {', '.join(readers)} or "
            f"DeepSpeed's 'latest' either. {_HINT}"
        )

    def _optimizer(self) -> OptimizerState | None:
        there = self._each("optimizer_0", "optimizer.bin", "optimizer.pt")
        if len(there) > 1:
            names = " and ".join(path.name for path in there)
            raise SnapshotError(f"{str(self.path)!r} has {names}. Allowed: one. Remove the one that is not meant.")
        if not there:
            return None
        if there[0].is_dir():
            return _dcp_optimizer(there[0])
        return OptimizerState.of_torch(load_pickle(there[0]), repr(str(there[0])))


# ---- weights and optimizers ------------------------------------------------------------------------------------


def _tensors(content: Any, origin: str) -> dict[str, Stored]:
    """Take a state dictionary of tensors."""
    if not isinstance(content, Mapping):
        raise SnapshotError(f"{origin} is a {type(content).__name__}. Allowed: a state dictionary of tensors.")
    odd = [key for key, value in content.items() if hasattr(value, "placements") or hasattr(value, "local_shards")]
    if odd:
        raise SnapshotError(f"{origin} holds one rank's shard of {odd[0]!r}. Save whole tensors, or with DCP.")
    return {str(key): Stored.whole(value) for key, value in content.items() if isinstance(value, torch.Tensor)}


def _pickled_weights(path: Path) -> dict[str, Stored]:
    return _tensors(load_pickle(path), repr(str(path)))


def _parts(path: Path) -> list[str]:
    """Return the files that an ``.index.json`` names; none for any other file."""
    return files_of_index(path) if path.name.endswith(".index.json") else []


def _pickled_index(path: Path) -> dict[str, Stored]:
    return {key: stored for name in _parts(path) for key, stored in _pickled_weights(path.parent / name).items()}


def _dcp_weights(folder: Path) -> dict[str, Stored]:
    """Open what FSDP saved as ``{"model": state_dict}``."""
    entries = open_dcp(folder)
    return {path[1]: entry for path, entry in entries.items() if isinstance(entry, Stored) and len(path) == 2}


def _dcp_optimizer(folder: Path) -> OptimizerState:
    """Open what FSDP saved as ``{"optimizer": {"state": {name: ...}, "param_groups": [...]}}``."""
    entries, groups = open_dcp(folder), dict[int, dict[str, Any]]()
    for path, entry in entries.items():
        if path[1] == "param_groups" and len(path) == 4:
            groups.setdefault(int(path[2]), {})[path[3]] = entry
    if not groups:
        raise SnapshotError(
            f"{str(folder)!r} has no param_groups, group by group. Save it with accelerate 0.34 or later."
        )
    found = OptimizerState.of_torch({"state": {}, "param_groups": [groups[g] for g in sorted(groups)]}, str(folder))
    for path, entry in entries.items():
        if path[1] == "state":
            found.add(path[2], path[3], entry, str(folder))
    return found


# ---- single files ------------------------------------------------------------------------------------------------


def _open_file(path: Path) -> Foreign:
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return Foreign(path, "a safetensors file", open_safetensors(path))
    content, origin = load_pickle(path), repr(str(path))
    found = Foreign(path, "a torch.save file")
    if not isinstance(content, Mapping):
        raise SnapshotError(f"{origin} holds a {type(content).__name__}. Allowed: a dictionary of state dictionaries.")
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        found.weights = _tensors(content, origin)
        return found
    used = {kind: _only(content, names, origin) for kind, names in _ROLES.items()}
    if used["weights"] is None:
        raise SnapshotError(
            f"{origin} has the keys {', '.join(map(str, content))}. Needed: the weights, as one of "
            f"{', '.join(_WEIGHTS)}."
        )
    found.weights = _tensors(content[used["weights"]], origin)
    if used["optimizer"] is not None:
        found.optimizer = OptimizerState.of_torch(content[used["optimizer"]], f"{used['optimizer']!r} in {origin}")
    if used["scheduler"] is not None:
        schedulers = content[used["scheduler"]]
        found.schedulers = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
    found.scaler = content[used["scaler"]] if used["scaler"] is not None else None
    steps = [key for key in _STEP if isinstance(content.get(key), int)]
    found.step = content[steps[0]] if steps else found.optimizer.steps if found.optimizer is not None else None
    taken = {*used.values(), *steps[:1]}
    found.left = [str(key) for key in content if key not in taken]
    return found


_ROLES: Final = {"weights": _WEIGHTS, "optimizer": _OPTIMIZER, "scheduler": _SCHEDULER, "scaler": _SCALER}


def _only(content: Mapping[str, Any], names: tuple[str, ...], origin: str) -> str | None:
    there = [name for name in names if content.get(name) is not None]
    if len(there) > 1:
        raise SnapshotError(f"{origin} has {' and '.join(there)}, which mean the same. Allowed: one. Save it with one.")
    return there[0] if there else None
