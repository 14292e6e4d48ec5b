"""What can be done with snapshots without the run that wrote them: list, show, verify, compare, prune, export.

One process, no process group, no device. Tensors are read one at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from accel_shard.checkpoint.places import Place, place
from accel_shard.checkpoint.snapshot import Snapshot, find_snapshots, remove_snapshot
from accel_shard.checkpoint.stores import PIN
from accel_shard.errors import SnapshotError
from accel_shard.export import ShardWriter, parse_size
from accel_shard.layout import Shard
from accel_shard.precision import DTYPES

__all__ = ["differences", "export", "prune", "read_tensor", "rows", "shown", "verify"]


def rows(folder: str | Place) -> list[str]:
    """Describe each snapshot in a folder in one line, the last committed first.

    Raises:
        SnapshotError: if there is none.
    """
    lines = []
    for sequence, path in _in(folder):
        try:
            facts = Snapshot.open(path).manifest
        except SnapshotError as error:
            lines.append(f"{path.name}  cannot be read: {error}")
            continue
        size = sum(record["size"] for record in facts["files"].values())
        pinned = "  pinned" if (path / PIN).exists() else ""
        policy = ",".join(f"{k}={v}" for k, v in facts["policy"].items()) or "ddp"
        lines.append(
            f"{path.name}  commit {sequence}  step {facts['step']}  {size / 1e6:,.1f} MB  {facts['world_size']} ranks  "
            f"{policy}{pinned}"
        )
    return lines


def shown(path: str | Place) -> list[str]:
    """List a snapshot's tensors with shape, dtype and pieces, and its files with their sizes."""
    facts = Snapshot.open(path).manifest
    lines = [f"step {facts['step']}, {facts['world_size']} ranks, progress {json.dumps(facts['progress'])}"]
    for key, stored in facts["tensors"].items():
        shape = "x".join(map(str, stored["shape"])) or "scalar"
        count = len(stored["parts"])
        lines.append(f"{key}  {shape}  {stored['dtype']}  {count} piece{'s' if count > 1 else ''}")
    lines += [f"{name}  {record['size']:,} bytes" for name, record in sorted(facts["files"].items())]
    return lines


def verify(path: str | Place) -> None:
    """Check a snapshot against its manifest, every byte of it.

    Raises:
        SnapshotError: naming the first file that differs, or the tensor that is not whole.
    """
    snapshot = Snapshot.open(path)
    snapshot.verify()
    for key in snapshot.manifest["tensors"]:
        snapshot.check_whole(key)


def read_tensor(snapshot: Snapshot, key: str) -> torch.Tensor:
    """Return a whole tensor."""
    stored = snapshot.tensor(key)
    whole = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    snapshot.read_shards([(key, Shard.whole(whole))])
    return whole


def differences(first: str | Place, second: str | Place) -> Iterator[str]:
    """Yield a line for each tensor that two snapshots do not have alike, however they are cut into pieces."""
    one, two = Snapshot.open(first), Snapshot.open(second)
    keys = one.manifest["tensors"].keys() | two.manifest["tensors"].keys()
    for key in sorted(keys):
        if key not in one.manifest["tensors"] or key not in two.manifest["tensors"]:
            yield f"{key}  only in {(one if key in one.manifest['tensors'] else two).folder}"
            continue
        a, b = read_tensor(one, key), read_tensor(two, key)
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{key}  {tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
        elif not torch.equal(a, b):
            gap = (a.double() - b.double()).abs().max().item()
            yield f"{key}  largest difference {gap:.3g}"


def prune(folder: str | Place, keep: int) -> list[Place]:
    """Remove all but the newest snapshots and the pinned ones, and return those removed.

    What cannot be read as a snapshot neither counts nor goes: it may be somebody else's folder.

    Raises:
        ValueError: if nothing would be kept.
        SnapshotError: if there is none, or the newest that would stay cannot be read.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}. Allowed: whole numbers from 1 on.")
    listed = _in(folder)
    found = [path for number, path in listed if number >= 0]
    Snapshot.open(found[0] if found else listed[0][1]).verify(contents=False)
    return [path for path in found[keep:] if not (path / PIN).exists() and remove_snapshot(path)]


def export(
    path: str | Place, target: str | Path, like: str | Path, *, dtype: str = "fp32", max_size: str = "5GB"
) -> Path:
    """Write a snapshot's weights as a folder that ``from_pretrained`` loads, a tensor at a time.

    Args:
        path: the snapshot: a folder or a URL.
        target: the folder to write; an older one of that name is replaced when the new one is complete.
        like: a model's folder, whose config and tokenizer files are taken over.
        dtype: fp32, bf16 or fp16.
        max_size: of one file, with KB, MB or GB.

    Raises:
        SnapshotError: if it could not be written.
    """
    source, final = _on_disk("like", like), _on_disk("target", target)
    if not (source / "config.json").is_file():
        raise SnapshotError(f"{str(source)!r} has no config.json: give a folder of the same model.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}. Allowed: {', '.join(DTYPES)}.")
    snapshot = Snapshot.open(path)
    writer = ShardWriter(final.with_name(f".{final.name}.partial"), parse_size(max_size), DTYPES[dtype])
    for key in snapshot.manifest["tensors"]:
        kind, _, name = key.partition(".")
        if kind in ("model", "buffer"):
            writer.add(name, read_tensor(snapshot, key))

    def companions(folder: Path) -> None:
        for file in source.iterdir():
            if file.is_file() and "safetensors" not in file.name and file.suffix not in (".bin", ".pt", ".pth"):
                shutil.copy(file, folder / file.name)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    failure = writer.finish(companions, final)
    if failure is not None:
        raise SnapshotError(f"could not export to {str(final)!r}; nothing there was changed. {failure}")
    return final


def _on_disk(option: str, value: str | Path) -> Path:
    where = place(value)
    if not isinstance(where, Path):
        raise ValueError(f"{option} is {value!r}. Allowed: a folder on a disk; only snapshots can be at a URL.")
    return where


def _in(folder: str | Place) -> list[tuple[int, Place]]:
    found = sorted(find_snapshots(place(folder)), reverse=True)
    if not found:
        raise SnapshotError(f"{str(folder)!r} holds no snapshots.")
    return found
