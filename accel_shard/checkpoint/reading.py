"""Reads boxes of tensors out of a snapshot's safetensors files: only the bytes that are needed, several ranges at once.

``safetensors`` maps whole local files; here a file may be in an object store, and bytes go straight to where they are
wanted. What a file's header says is checked against the file's size and the snapshot's manifest before it is believed.
Nothing here communicates.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Final

import torch

from accel_shard.checkpoint.places import Place
from accel_shard.checkpoint.plan import Part, StoredTensor
from accel_shard.checkpoint.storage import DTYPE_NAMES, bytes_of
from accel_shard.checkpoint.stores import store_of
from accel_shard.errors import SnapshotError
from accel_shard.layout import Box, overlaps

__all__ = ["Reading", "TensorFile", "byte_runs"]

_LARGEST_HEADER: Final = 100_000_000
_GUESS: Final = 1 << 16
_PIECE: Final = 1 << 25


class TensorFile:
    """A safetensors file that is read in ranges.

    Raises:
        OSError: if it cannot be read.
        SnapshotError: if its header is none.
    """

    def __init__(self, path: Place) -> None:
        self.path, self.source = path, store_of(path).source(path)
        try:
            self._entries, self._start = self._header()
        except BaseException:
            self.source.close()
            raise

    def _header(self) -> tuple[dict[str, Any], int]:
        first = bytearray(min(_GUESS, self.source.size))
        self.source.read_into(0, memoryview(first))
        length = int.from_bytes(first[:8], "little")
        if len(first) < 8 or length > min(_LARGEST_HEADER, self.source.size - 8):
            raise self._fault(f"a header of {length} bytes in a file of {self.source.size}")
        text = bytearray(length)
        text[: len(first) - 8] = first[8 : 8 + length]
        if length > len(first) - 8:
            self.source.read_into(len(first), memoryview(text)[len(first) - 8 :])
        try:
            entries = json.loads(text)
        except ValueError as error:
            raise self._fault(f"its header is not JSON ({error})") from error
        if not isinstance(entries, dict):
            raise self._fault("its header is no dictionary")
        return entries, 8 + length

    def locate(self, part: Part, dtype: str) -> int:
        """Return where in the file a part begins.

        Raises:
            SnapshotError: if the header does not say what the manifest says, or points out of the file.
        """
        entry: Any = self._entries.get(part.entry)
        wanted = getattr(torch, dtype)
        size = part.box.numel * wanted.itemsize
        try:
            start, stop = entry["data_offsets"]
            same = entry["dtype"] == DTYPE_NAMES[wanted] and tuple(entry["shape"]) == part.box.sizes
            sound = start >= 0 and stop - start == size and self._start + stop <= self.source.size
        except (KeyError, TypeError, ValueError):
            same = sound = False
        if not (same and sound):
            raise self._fault(
                f"{part.entry!r} should be {dtype} of {part.box.sizes}, {size} bytes; its header says {entry}"
            )
        return int(self._start + start)

    def _fault(self, what: str) -> SnapshotError:
        return SnapshotError(f"{str(self.path)!r} is no tensor file of this snapshot: {what}.")


def byte_runs(part: Box, wanted: Box, itemsize: int, gap: int) -> tuple[Box, list[int], int]:
    """Say what to read of a row-major part to get a box in it.

    Args:
        part: the box that is stored.
        wanted: a box in it.
        itemsize: bytes of an element.
        gap: where fewer bytes lie between two runs, they are read too.

    Returns:
        The box that is read, which contains ``wanted``; where its runs begin, in bytes from the part's beginning, in
        row-major order; the length of each.
    """
    offsets = [w - p for w, p in zip(wanted.offsets, part.offsets, strict=True)]
    sizes, inner, axis = list(wanted.sizes), itemsize, len(wanted.sizes) - 1
    while axis > 0:
        left_out = (part.sizes[axis] - sizes[axis]) * inner
        if left_out:
            if left_out > gap or math.prod(sizes[:axis]) == 1:
                break
            offsets[axis], sizes[axis] = 0, part.sizes[axis]
        inner *= part.sizes[axis]
        axis -= 1
    strides = [itemsize * math.prod(part.sizes[i + 1 :]) for i in range(max(axis, 0))]
    steps = [[(o + i) * s for i in range(n)] for o, n, s in zip(offsets, sizes, strides, strict=False)]
    first = offsets[axis] * inner if sizes else 0
    read = Box(tuple(o + p for o, p in zip(offsets, part.offsets, strict=True)), tuple(sizes))
    length = sizes[axis] * inner if sizes else itemsize
    return read, [first + sum(at) for at in itertools.product(*steps)], length


class Reading:
    """Fills tensors from a snapshot's files. A context manager: when it ends without an error all are filled.

    Args:
        folder: of the snapshot.

    Raises:
        SnapshotError: when it ends, if a file could not be read.
    """

    def __init__(self, folder: Place) -> None:
        self._folder, self._store = folder, store_of(folder)
        self._files: dict[str, TensorFile] = {}
        # Begun when all are known: threads that read while this one still plans would wait for each other in Python.
        self._jobs: deque[Callable[[], None]] = deque()

    def __enter__(self) -> Reading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._work_off()
        finally:
            for file in self._files.values():
                file.source.close()

    def _work_off(self) -> None:
        with ThreadPoolExecutor(self._store.readers, "accel_shard read") as threads:
            for done in [threads.submit(self._work) for _ in range(self._store.readers)]:
                done.result()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.popleft()
            except IndexError:
                return
            try:
                job()
            except OSError as error:
                self._jobs.clear()
                raise SnapshotError(f"{str(self._folder)!r} cannot be read: {error}") from error

    def fill(self, key: str, stored: StoredTensor, box: Box, destination: torch.Tensor) -> None:
        """Ask for ``destination`` to be filled with a box of a stored tensor.

        Raises:
            SnapshotError: if the stored pieces do not cover the box, or a file is not what the manifest says.
        """
        found, missing = overlaps(box, [part.box for part in stored.parts])
        for number, shared in found:
            self._fill_from(stored.parts[number], stored.dtype, shared, destination[shared.slices(inside=box)])
        if missing:
            raise SnapshotError(f"{key!r} is not whole in the snapshot: {missing[0]} is nowhere.")

    def _fill_from(self, part: Part, dtype: str, shared: Box, target: torch.Tensor) -> None:
        file, kind = self._opened(part.file), getattr(torch, dtype)
        base = file.locate(part, dtype)
        read, starts, length = byte_runs(part.box, shared, kind.itemsize, self._store.gap)
        direct = read == shared and target.device.type == "cpu" and target.dtype == kind and target.is_contiguous()
        if not direct:
            starts = [base + start for start in starts]
            self._jobs.append(partial(_fill_by_way_of_host, file, starts, length, read, shared, kind, target))
            return
        raw = bytes_of(target)
        for number, start in enumerate(starts):
            for at in range(0, length, _PIECE):
                piece = raw[number * length + at : number * length + min(at + _PIECE, length)]
                self._jobs.append(partial(file.source.read_into, base + start + at, piece))

    def _opened(self, name: str) -> TensorFile:
        if name not in self._files:
            try:
                self._files[name] = TensorFile(self._folder / name)
            except OSError as error:
                raise SnapshotError(f"{str(self._folder / name)!r} cannot be read: {error}") from error
        return self._files[name]


def _fill_by_way_of_host(
    file: TensorFile, starts: list[int], length: int, read: Box, shared: Box, kind: torch.dtype,
    target: torch.Tensor,
) -> None:  # fmt: skip
    host = torch.empty(len(starts) * length, dtype=torch.uint8)
    raw = bytes_of(host)
    for number, start in enumerate(starts):
        file.source.read_into(start, raw[number * length : (number + 1) * length])
    with torch.no_grad():
        target.copy_(host.view(kind).reshape(read.sizes)[shared.slices(inside=read)])
