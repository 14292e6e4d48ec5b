"""The files that other tools write checkpoints in, opened so that each rank reads only its own boxes.

``torch.save`` files are mapped, not read; safetensors are sliced; of a distributed checkpoint (DCP) one stored piece is
in memory at a time. No pickle is ever trusted: ``torch.load`` runs with ``weights_only=True`` and the few further names
of :func:`_allowed`, DCP's index goes through an unpickler that knows its own classes only.

Private upstream names (torch 2.13): ``_StorageInfo``, ``_MEM_FORMAT_ENCODING`` and ``_create_file_view`` of
``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from accel_shard.checkpoint.storage import DTYPE_NAMES
from accel_shard.errors import SnapshotError
from accel_shard.layout import Box, Shard, overlaps

__all__ = ["Foreign", "OptimizerState", "Stored", "load_pickle", "open_dcp", "open_safetensors", "read_json"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a stored tensor, and what reads a part of it, indexed inside the box."""

    box: Box
    read: Callable[[tuple[slice, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor, in pieces that are read when they are asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Stored:
        """Describe a tensor that is there in one piece."""
        return cls.of_shards([Shard.whole(tensor)])

    @classmethod
    def of_shards(cls, shards: Iterable[Shard]) -> Stored:
        """Describe a tensor of which the ranks of the saving run had a shard each."""
        found = list(shards)
        pieces = tuple(Piece(box, part.__getitem__) for shard in found for box, part in shard.parts)
        return cls(found[0].shape, found[0].dtype, pieces)

    def value(self) -> torch.Tensor:
        """Return a tensor without dimensions."""
        return self.pieces[0].read(()).clone()

    def read_into(self, name: str, shard: Shard) -> None:
        """Fill a shard of the same tensor. Local: communicates nothing.

        Raises:
            SnapshotError: if it has another shape, or some of it is stored nowhere.
        """
        if self.shape != shard.shape:
            raise SnapshotError(f"{name!r} has shape {shard.shape} in this run and {self.shape} in the source.")
        for box, destination in shard.parts:
            found, missing = overlaps(box, [piece.box for piece in self.pieces])
            for number, shared in found:
                piece = self.pieces[number]
                destination[shared.slices(inside=box)].copy_(piece.read(shared.slices(inside=piece.box)))
            if missing:
                raise SnapshotError(f"{name!r} is not whole in the source: {missing[0]} is nowhere.")


@dataclass(slots=True)
class OptimizerState:
    """An optimizer as a file has it, by whatever it calls its parameters: numbers in the order of groups, or names."""

    groups: list[dict[str, Any]]
    states: dict[Any, dict[str, Stored]] = field(default_factory=dict)
    scalars: dict[Any, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of_torch(cls, content: Any, origin: str) -> OptimizerState:
        """Take an optimizer's ``state_dict()``.

        Raises:
            SnapshotError: if it is none, or holds state that is neither tensors nor numbers.
        """
        if not isinstance(content, Mapping) or not {"state", "param_groups"} <= content.keys():
            keys = list(content) if isinstance(content, Mapping) else type(content).__name__
            raise SnapshotError(f"{origin} is no torch optimizer's state: it has {keys}, not 'state', 'param_groups'.")
        found = cls([_plain_group(group) for group in content["param_groups"]])
        for who, state in content["state"].items():
            for key, value in state.items():
                found.add(who, key, value, origin)
        return found

    def add(self, who: Any, key: str, value: Any, origin: str) -> None:
        """Add one state of one parameter: a tensor, a stored one, or a scalar."""
        if isinstance(value, torch.Tensor) and value.dim():
            value = Stored.whole(value)
        if isinstance(value, Stored) and not value.shape:
            value = value.value()
        if isinstance(value, Stored):
            self.states.setdefault(who, {})[key] = value
        elif value is None or isinstance(value, (bool, int, float, str, torch.Tensor)):
            self.scalars.setdefault(who, {})[key] = value.clone() if isinstance(value, torch.Tensor) else value
        else:
            raise SnapshotError(
                f"{origin} keeps the optimizer state {key!r} of {who!r} as a {type(value).__name__}. Allowed: tensors "
                "and numbers. Take over the weights alone, with weights_only=True."
            )

    @property
    def steps(self) -> int | None:
        """Optimizer steps done, as the optimizer itself counts them; None if it does not."""
        counts = [kept.get("step") for kept in (*self.scalars.values(), *self.groups)]
        return max((int(count) for count in counts if count is not None), default=None)


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items()}


@dataclass(slots=True)
class Foreign:
    """A checkpoint that something else wrote, opened.

    Attributes:
        path: where it is.
        kind: what wrote it, for people.
        weights: parameters and buffers, by the names in the file.
        optimizer: None if there is none.
        schedulers: their state dictionaries.
        scaler: that of the loss scaler.
        objects: those of registered objects.
        step: optimizer steps done, if the source says so.
        counters: DeepSpeed's own counts.
        ranks: how many saved it, if that can be seen.
        aliases: further names of tied weights -> the name under which the weight is stored.
        left: what is in it and not taken over.
    """

    path: Path
    kind: str
    weights: dict[str, Stored] = field(default_factory=dict)
    optimizer: OptimizerState | None = None
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Any] | None = None
    objects: list[dict[str, Any]] = field(default_factory=list)
    step: int | None = None
    counters: dict[str, int] = field(default_factory=dict)
    ranks: int | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        SnapshotError: if it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{str(path)!r} cannot be read: {error}") from error


def files_of_index(path: Path) -> list[str]:
    """Return the files that an ``.index.json`` of sharded weights names.

    Raises:
        SnapshotError: if it cannot be read.
    """
    return sorted(set(read_json(path)["weight_map"].values()))


# ---- torch.save --------------------------------------------------------------------------------------------------


class _Inert:
    """Stands in for an object that is not taken over: whatever was pickled lands in its attributes, and stays there."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


# What weights_only=True would refuse, and how it is read instead: never by the class itself, so that none of its code
# runs and DeepSpeed need not be installed.
_STAND_INS: Final[dict[str, Any]] = {
    "deepspeed.utils.tensor_fragment.fragment_address": _Inert,  # in every ZeRO-1/2 file; not needed
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,  # in every ZeRO file; a number to us
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Inert,  # in every ZeRO file; not taken over
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Inert,  # the same, under fp16
    "argparse.Namespace": _Inert,  # scripts save their `args` beside the model; not taken over
    "pathlib.PosixPath": _Inert,  # in such `args`
    "pathlib._local.PosixPath": _Inert,  # the same, by Python 3.13
}


@functools.cache
def _allowed() -> tuple[Any, ...]:
    """Return what ``torch.load`` may use beside its own list; numpy's are for metrics that scripts save as scalars."""
    import numpy as np

    core: Any = getattr(np, "_core", None) or np.core
    # numpy 2 writes "_core", numpy 1 "core"; both mean a number or an array of plain bytes.
    entries: list[Any] = [(stand_in, name) for name, stand_in in _STAND_INS.items()]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        entries += [(core.multiarray.scalar, f"{module}.scalar")]
        entries += [(core.multiarray._reconstruct, f"{module}._reconstruct")]
    entries += [(np.dtype, "numpy.dtype"), (np.ndarray, "numpy.ndarray")]
    kinds = {type(np.dtype(code)) for code in "?bhilqBHILQefd"}  # the classes of numbers; objects are not among them
    return (*entries, *((kind, f"{kind.__module__}.{kind.__qualname__}") for kind in kinds))


def load_pickle(path: Path) -> Any:
    """Map a ``torch.save`` file; its tensors are read from the disk where they are used.

    A file of the format before torch 1.6 cannot be mapped and is read whole.

    Raises:
        SnapshotError: if it cannot be read, or holds anything but data: no code in it is run.
    """
    try:
        with torch.serialization.safe_globals(list(_allowed())):
            try:
                return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line), error)
        raise SnapshotError(
            f"{str(path)!r} holds more than tensors and plain data, and was not loaded, since loading it could run "
            f"code. {str(reason).strip()} Save state dictionaries, not objects."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(f"{str(path)!r} cannot be read as a torch.save file: {error!r}") from error


# ---- safetensors -------------------------------------------------------------------------------------------------


def open_safetensors(path: Path) -> dict[str, Stored]:
    """Open one safetensors file, or all files of an ``.index.json``.

    Raises:
        SnapshotError: if one cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    names = files_of_index(path) if path.suffix == ".json" else [path.name]
    dtypes, found = {text: dtype for dtype, text in DTYPE_NAMES.items()}, {}
    for name in names:
        try:
            file: Any = safe_open(path.parent / name, framework="pt")
        except (OSError, SafetensorError) as error:
            raise SnapshotError(f"{str(path.parent / name)!r} cannot be read: {error}") from error
        for key in file.keys():  # noqa: SIM118  # no mapping, whatever it looks like
            part = file.get_slice(key)
            shape = tuple(part.get_shape())
            read = functools.partial(_slice, file, key)
            found[key] = Stored(shape, dtypes[part.get_dtype()], (Piece(Box.whole(shape), read),))
    return found


def _slice(file: Any, key: str, index: tuple[slice, ...]) -> torch.Tensor:
    piece: torch.Tensor = file.get_slice(key)[index] if index else file.get_tensor(key)
    return piece


# ---- torch.distributed.checkpoint --------------------------------------------------------------------------------


class _IndexUnpickler(pickle.Unpickler):
    """Reads DCP's ``.metadata``, which is a pickle, with the classes of such an index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class."""
        from torch.distributed.checkpoint import filesystem, metadata

        classes = {
            ("torch.distributed.checkpoint.metadata", kind): getattr(metadata, kind)
            for kind in (*metadata.__all__, "_MEM_FORMAT_ENCODING")
        }
        classes["torch.distributed.checkpoint.filesystem", "_StorageInfo"] = filesystem._StorageInfo
        classes["torch", "Size"] = torch.Size
        classes["torch.serialization", "_get_layout"] = torch.serialization._get_layout
        if (module, name) in classes:
            return classes[module, name]
        if module in ("pathlib", "pathlib._local"):
            return _Inert  # where the index was once written
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an index of tensors")


def open_dcp(folder: Path) -> dict[tuple[Any, ...], Any]:
    """Open a distributed checkpoint: path of keys in the saved dictionary -> a stored tensor, or a plain value.

    Raises:
        SnapshotError: if it cannot be read, or its index holds anything but an index.
    """
    try:
        with (folder / ".metadata").open("rb") as file:
            index = _IndexUnpickler(file).load()
        places: dict[tuple[str, tuple[int, ...]], Any] = {
            (key.fqn, tuple(key.offset or ())): place for key, place in index.storage_data.items()
        }
        paths: Mapping[str, tuple[Any, ...]] = index.planner_data
        # The last piece read stays: a flat range takes up to five boxes out of it, one after the other.
        load = functools.lru_cache(maxsize=1)(functools.partial(_load_piece, folder))
        return {tuple(paths[key]): _entry(key, entry, places, load) for key, entry in index.state_dict_metadata.items()}
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"the index {str(folder / '.metadata')!r} cannot be read: {error!r}") from error


def _entry(key: str, entry: Any, places: Mapping[tuple[str, tuple[int, ...]], Any], load: Callable[..., Any]) -> Any:
    if not hasattr(entry, "chunks"):
        return load(*_where(places[key, ()]))
    pieces = []
    for chunk in entry.chunks:
        read = functools.partial(_part, load, _where(places[key, tuple(chunk.offsets)]))
        pieces.append(Piece(Box(tuple(chunk.offsets), tuple(chunk.sizes)), read))
    return Stored(tuple(entry.size), entry.properties.dtype, tuple(pieces))


def _where(place: Any) -> tuple[str, int, int]:
    if getattr(place, "transform_descriptors", None):
        raise SnapshotError(f"{place.relative_path!r} is stored as {place.transform_descriptors}. Allowed: plain.")
    return place.relative_path, place.offset, place.length


def _part(load: Callable[..., Any], where: tuple[str, int, int], index: tuple[slice, ...]) -> torch.Tensor:
    part: torch.Tensor = load(*where)[index]
    return part


def _load_piece(folder: Path, name: str, offset: int, length: int) -> Any:
    from torch.distributed.checkpoint.utils import _create_file_view

    path = folder / name
    if path.parent != folder:
        raise SnapshotError(f"the index of {str(folder)!r} points to {str(path)!r}, outside it.")
    try:
        with path.open("rb") as file:
            view: Any = _create_file_view(file, offset, length)
            return torch.load(view, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise SnapshotError(f"{str(path)!r} cannot be read at byte {offset}: {error}") from error
