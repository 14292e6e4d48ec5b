"""Write a prepared model as a folder that ``from_pretrained`` loads: sharded safetensors, config, tokenizer, card."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_shard.names import persistent_buffers
from accel_shard.precision import DTYPES

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accel_shard.accelerator import PolicyAccelerator
    from accel_shard.backends.base import Backend
    from accel_shard.policy import ShardingPolicy

__all__ = ["ExportSource", "ShardWriter", "export_model", "export_prepared", "parse_size"]

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class ExportSource:
    """Who prepared the model that is exported, and how."""

    accelerator: Accelerator
    policy: ShardingPolicy
    backend: Backend
    config_changes: dict[str, Any]


def export_model(
    accelerator: PolicyAccelerator,
    model: torch.nn.Module,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    card: str | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Export a prepared model under any policy, in the policy's ``save`` dtype.

    Every rank must call it. Weights are gathered one parameter at a time; rank 0 holds at most one shard file's
    worth of them beside its own share, and writes. The folder appears under its name only when it is complete; an
    older one of that name is replaced then, and survives if anything fails.

    Args:
        accelerator: the accelerator that prepared the model.
        model: the prepared model.
        folder: where to; parents are created.
        tokenizer: saved beside the weights if given.
        card: text of README.md.
        max_shard_size: bytes, or a number with KB, MB or GB.

    Returns:
        The folder.

    Raises:
        ValueError: for a size that cannot be read.
        RuntimeError: on every rank, if rank 0 could not write.
    """
    source = ExportSource(accelerator, accelerator.policy, accelerator.backend, accelerator.config_changes)
    return export_prepared(source, model, folder, tokenizer=tokenizer, card=card, max_shard_size=max_shard_size)


def export_prepared(
    source: ExportSource,
    model: torch.nn.Module,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    card: str | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Do what :func:`export_model` says, for a model that any accelerator prepared. Every rank must call it."""
    accelerator, saved = source.accelerator, source.policy.dtypes.save
    target, limit = Path(folder), parse_size(max_shard_size)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    writer = ShardWriter(partial, limit, DTYPES[saved]) if accelerator.is_main_process else None
    inner = _innermost(accelerator.unwrap_model(model, keep_torch_compile=False))
    config = copy.deepcopy(getattr(inner, "config", None))
    for name, value in source.config_changes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for name, weight in source.backend.whole_weights(accelerator, model):
        if writer is not None:
            writer.add(name, weight)
    failure: str | None = None
    if writer is not None:
        for name, buffer in persistent_buffers(inner).items():
            writer.add(name, buffer)
        failure = writer.finish(lambda new: _write_companions(new, inner, config, tokenizer, card, saved), target)
    _agree(failure, target)
    return target


class ShardWriter:
    """The side that writes: collects tensors until a shard is full, writes it, and remembers the first error.

    It must not raise while weights still come: other ranks may be in the gathers that it takes part in.
    """

    def __init__(self, partial: Path, limit: int, dtype: torch.dtype) -> None:
        self._partial, self._limit, self._dtype = partial, limit, dtype
        self._pending: dict[str, torch.Tensor] = {}
        self._bytes = self._total = 0
        self._shards: list[list[str]] = []
        self._error: Exception | None = None
        with self._remembering():
            # What killed runs left behind; the folder itself is never touched before the new one is whole.
            for stale in partial.parent.glob(f"{partial.name.partition('.partial')[0]}.partial*"):
                shutil.rmtree(stale, ignore_errors=True)
            partial.mkdir(parents=True)

    @contextlib.contextmanager
    def _remembering(self) -> Any:
        try:
            yield
        except Exception as error:
            self._error = self._error or error
            self._pending = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a copy of a whole tensor, and write a shard if it is full."""
        if self._error is not None:
            return
        with self._remembering():
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            size = tensor.numel() * dtype.itemsize
            if self._pending and self._bytes + size > self._limit:
                self._flush()
            # A copy: the gathered tensor is freed, or is live training state, when the loop goes on.
            self._pending[name] = tensor.to(device="cpu", dtype=dtype, copy=True).contiguous()
            self._bytes += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        self._shards.append(list(self._pending))
        save_file(self._pending, self._partial / f"shard-{len(self._shards)}", metadata={"format": "pt"})
        self._total += self._bytes
        self._pending, self._bytes = {}, 0

    def finish(self, companions: Callable[[Path], None], target: Path) -> str | None:
        """Write the rest, let ``companions`` put its files beside, and commit. Returns what went wrong, if anything."""
        with self._remembering():
            if self._error is None:
                if self._pending:
                    self._flush()
                self._name_shards()
                companions(self._partial)
                _commit(self._partial, target)
        if self._error is None:
            return None
        shutil.rmtree(self._partial, ignore_errors=True)
        return f"{type(self._error).__name__}: {self._error}"

    def _name_shards(self) -> None:
        count = len(self._shards)
        index: dict[str, str] = {}
        for number, names in enumerate(self._shards, start=1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            (self._partial / f"shard-{number}").rename(self._partial / file)
            index |= dict.fromkeys(names, file)
        if count > 1:
            content = {"metadata": {"total_size": self._total}, "weight_map": index}
            text = json.dumps(content, indent=2) + "\n"
            (self._partial / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_companions(folder: Path, model: Any, config: Any, tokenizer: Any, card: str | None, dtype: str) -> None:
    if hasattr(config, "save_pretrained"):
        # fully_shard puts FSDP before the name of a class.
        sharded = hasattr(model, "set_requires_gradient_sync")
        name = type(model).__name__
        config.architectures = [name.removeprefix("FSDP") if sharded else name]
        config.dtype = str(DTYPES[dtype]).removeprefix("torch.")
        config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


def _innermost(model: Any) -> Any:
    """Return the user's own module; ``unwrap_model`` leaves FSDP1's wrapper on."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return model.module if isinstance(model, FullyShardedDataParallel) else model


def _commit(partial: Path, target: Path) -> None:
    for file in partial.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _agree(failure: str | None, target: Path) -> None:
    """Tell every rank whether rank 0 succeeded; doubles as the barrier after which the folder can be read."""
    shared = [failure]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(shared, src=0)
    if shared[0] is not None:
        raise RuntimeError(f"could not export to {str(target)!r}; nothing there was changed. {shared[0]}")


def parse_size(size: int | str) -> int:
    """Read a number of bytes: a whole number, or one with KB, MB or GB.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(size, int) and size > 0:
        return size
    text = str(size).strip().upper()
    for unit, factor in _UNITS.items():
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return int(float(number) * factor)
    raise ValueError(f"max_shard_size is {size!r}. Allowed: bytes as a whole number, or a number with KB, MB or GB.")
