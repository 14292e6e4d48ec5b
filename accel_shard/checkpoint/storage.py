"""Files of a snapshot: safetensors and JSON, hashed while they are written, flushed to the disk before they count.

``safetensors`` reads them. It has no writer that streams, which hashing on the way and bounded memory need; the format
is a length, a JSON header and the bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from accel_shard.errors import SnapshotError

__all__ = ["DTYPE_NAMES", "HASH", "FileRecord", "flush_folder", "hash_file", "write_json", "write_tensors"]

DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_CHUNK: Final = 1 << 24

try:
    import xxhash
except ImportError:  # it comes with datasets; without it the standard library's fastest strong hash serves
    HASH = "blake2b_128"
else:
    HASH = "xxh3_128"


def _hasher(name: str = HASH) -> Any:
    if name == "xxh3_128" and HASH == "xxh3_128":
        return xxhash.xxh3_128()
    if name == "blake2b_128":
        return hashlib.blake2b(digest_size=16)
    raise SnapshotError(f"the files were hashed by {name!r}; `pip install xxhash` to check them.")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the manifest says of one file."""

    size: int
    hash: str


class _HashingFile:
    def __init__(self, path: Path) -> None:
        self._file, self._hash, self._size = path.open("xb"), _hasher(), 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def close(self) -> FileRecord:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(self._size, self._hash.hexdigest())


def write_tensors(path: Path, entries: Sequence[tuple[str, torch.Tensor]]) -> FileRecord:
    """Write a new safetensors file, flush it to the disk, and return its size and hash.

    Tensors are brought to host memory one after the other. Larger dtypes come first, which keeps all aligned.

    Raises:
        OSError: if the disk says no, or the file exists.
        SnapshotError: for a dtype that safetensors does not have.
    """
    ordered = sorted(entries, key=lambda entry: -entry[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise SnapshotError(f"{name!r} has dtype {tensor.dtype}. Allowed: {', '.join(map(str, DTYPE_NAMES))}.")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file = _HashingFile(path)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for _, tensor in ordered:
        for piece in _bytes_of(tensor):
            file.write(piece)
    return file.close()


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    host: Any = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    for start in range(0, host.size, _CHUNK):
        yield memoryview(host[start : start + _CHUNK])


def write_json(path: Path, content: Any) -> FileRecord:
    """Write a new JSON file, flush it to the disk, and return its size and hash.

    Raises:
        OSError: if the disk says no, or the file exists.
    """
    file = _HashingFile(path)
    file.write(json.dumps(content, indent=1).encode())
    return file.close()


def hash_file(path: Path, name: str) -> str:
    """Return the hash of a file's content.

    Raises:
        SnapshotError: if this machine cannot compute that hash.
        OSError: if it cannot be read.
    """
    digest = _hasher(name)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return str(digest.hexdigest())


def flush_folder(path: Path) -> None:
    """Make a folder's entries durable, so that a file in it or a rename of it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
