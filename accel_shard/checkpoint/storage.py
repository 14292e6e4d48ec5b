"""Files of a snapshot: safetensors and JSON, hashed while they are written, durable before they count.

``safetensors`` reads them. It has no writer that streams, which hashing on the way and bounded memory need; the format
is a length, a JSON header and the bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch

from accel_shard.checkpoint.places import Place
from accel_shard.checkpoint.stores import store_of
from accel_shard.errors import SnapshotError

__all__ = [
    "DTYPE_NAMES",
    "HASH",
    "FileRecord",
    "bytes_of",
    "file_size",
    "hash_file",
    "write_json",
    "write_tensors",
    "write_text",
]

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
_READ: Final = 1 << 22

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
    """A new file. Both hashes let other threads run, so one hashes a piece while it is being written."""

    def __init__(self, path: Place) -> None:
        self._sink, self._hash, self._size = store_of(path).create(path), _hasher(), 0
        self._helper = ThreadPoolExecutor(1, "accel_shard hash")

    def write(self, data: bytes | memoryview) -> None:
        hashed = self._helper.submit(self._hash.update, data)
        try:
            self._sink.write(data)
        finally:
            hashed.result()
        self._size += len(data)

    def close(self) -> FileRecord:
        self._sink.finish()
        return FileRecord(self._size, self._hash.hexdigest())

    def end(self, *, discard: bool) -> None:
        self._helper.shutdown()
        if discard:
            self._sink.discard()


@contextlib.contextmanager
def _new_file(path: Place) -> Iterator[_HashingFile]:
    file, done = _HashingFile(path), False
    try:
        yield file
        done = True
    finally:
        file.end(discard=not done)


def write_tensors(path: Place, entries: Sequence[tuple[str, torch.Tensor]]) -> FileRecord:
    """Write a new safetensors file, durably, and return its size and hash.

    Tensors are brought to host memory one after the other. Larger dtypes come first, which keeps all aligned; tensors
    that lie one behind the other in host memory in that order are written as one piece.

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
    with _new_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for run in _runs([tensor for _, tensor in ordered]):
            for start in range(0, run.numel(), _CHUNK):
                file.write(bytes_of(run[start : start + _CHUNK]))
        return file.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the host, to read or to write."""
    raw: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _runs(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors' bytes in host memory, those of neighbours in one storage together."""
    run: torch.Tensor | None = None
    for tensor in tensors:
        if not tensor.numel():
            continue
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        if run is not None and run.data_ptr() + run.numel() == flat.data_ptr() and _one_storage(run, flat):
            run = run.as_strided((run.numel() + flat.numel(),), (1,))
        else:
            if run is not None:
                yield run
            run = flat
    if run is not None:
        yield run


def _one_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def write_json(path: Place, content: Any) -> FileRecord:
    """Write a new JSON file, durably, and return its size and hash.

    Raises:
        OSError: if the disk says no, or the file exists.
    """
    return write_text(path, json.dumps(content))


def write_text(path: Place, text: str) -> FileRecord:
    """Write a new file, durably, and return its size and hash.

    Raises:
        OSError: if the disk says no, or the file exists.
    """
    with _new_file(path) as file:
        file.write(text.encode())
        return file.close()


def file_size(path: Place) -> int:
    """Return a file's size in bytes.

    Raises:
        OSError: if there is none.
    """
    source = store_of(path).source(path)
    source.close()
    return source.size


def hash_file(path: Place, name: str) -> str:
    """Return the hash of a file's content. What comes next is read while a piece is hashed.

    Raises:
        SnapshotError: if this machine cannot compute that hash.
        OSError: if it cannot be read.
    """
    digest, store = _hasher(name), store_of(path)
    source = store.source(path)
    # One piece more than readers: the one that is being hashed.
    spare = deque(memoryview(bytearray(min(_READ, max(source.size, 1)))) for _ in range(store.readers + 1))
    ahead: deque[tuple[memoryview, Future[None]]] = deque()
    try:
        with ThreadPoolExecutor(store.readers) as readers:
            for at in range(0, source.size, _READ):
                buffer = spare.popleft() if spare else _hashed(ahead, digest)
                piece = buffer[: min(_READ, source.size - at)]
                ahead.append((piece, readers.submit(source.read_into, at, piece)))
            while ahead:
                _hashed(ahead, digest)
    finally:
        source.close()
    return str(digest.hexdigest())


def _hashed(ahead: deque[tuple[memoryview, Future[None]]], digest: Any) -> memoryview:
    piece, read = ahead.popleft()
    read.result()
    digest.update(piece)
    return piece
