"""The file of one rank in a training checkpoint: blocks of leaves, with checksums that can be verified by parts.

A file is a safetensors file with one tensor for each block, under the name of its leaf. ``__metadata__`` says which block of which
whole leaf it is, and has a CRC-32 of every `SEGMENT` bytes of the data. So a reader that needs a few rows reads those rows and the
rest of the segments they lie in, and everything it uses is verified. It also says where blocks begin in the way of
``torch.distributed.checkpoint.HuggingFaceStorageReader``, which so reads these files (and verifies nothing).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from xtf.checkpoint.folder import CheckpointError
from xtf.checkpoint.writing import DTYPES
from xtf.checkpoint_map import Range

SEGMENT = 1 << 20  # bytes under one checksum

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_LONGEST = 100_000_000  # bytes of a header, as safetensors has it: what is longer is a damaged length
_CHUNK = 1 << 26  # bytes of a block that are read at once


@dataclass(frozen=True)
class Block:
    """A block of a leaf: ``value`` (any device) begins at index ``start`` of a whole leaf of shape ``whole``."""

    name: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    value: Tensor


@dataclass(frozen=True)
class Written:
    """A finished file as the index knows it: its size in bytes, and the CRC-32 of its header, which holds all other checksums."""

    bytes: int
    crc32: int


def write_shard(file: FilePath, blocks: Sequence[Block], between: Callable[[], None] = lambda: None) -> Written:
    """Write blocks to a new file and flush it to the disk. Of blocks on other devices one at a time is copied to the host.

    Args:
        file: the file.
        blocks: one for each leaf, at most.
        between: called before each block; what it raises ends the writing.

    Raises:
        OSError: if it cannot be written; what is there of the file is left to the caller.
    """
    ordered = sorted(blocks, key=lambda block: -block.value.dtype.itemsize)  # each begins at a multiple of its own width
    size = sum(block.value.nbytes for block in ordered)
    sums = _Checksums()
    with open(file, "xb") as out:
        out.write(_header(ordered, [0] * -(-size // SEGMENT)))
        for block in ordered:
            between()
            flat = block.value.detach().to("cpu").contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data
            sums.update(data)
            out.write(data)
        header = _header(ordered, sums.finish())  # of the same length, as checksums are
        out.seek(0)
        out.write(header)
        out.flush()
        os.fsync(out.fileno())
    return Written(len(header) + size, zlib.crc32(header))


def _header(blocks: Sequence[Block], sums: Sequence[int]) -> bytes:
    about = {
        "blocks": {block.name: {"whole": list(block.whole), "start": list(block.start)} for block in blocks},
        "segment": SEGMENT,
        "crc32": "".join(f"{crc:08x}" for crc in sums),
    }
    offsets = {block.name: {"saved_offsets": list(block.start)} for block in blocks}
    metadata = {"format": "pt", "xtf": _json(about), "DCP_SHARDING_INFO": _json(offsets)}
    entries: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for block in blocks:
        end = offset + block.value.nbytes
        entries[block.name] = {"dtype": DTYPES[block.value.dtype], "shape": list(block.value.shape), "data_offsets": [offset, end]}
        offset = end
    text = _json(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


class _Checksums:
    """The CRC-32 of each segment of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.filled, self.current = 0, 0

    def update(self, data: memoryview) -> None:
        begin = 0
        while begin < len(data):
            piece = data[begin : begin + SEGMENT - self.filled]
            self.current = zlib.crc32(piece, self.current)
            self.filled += len(piece)
            begin += len(piece)
            if self.filled == SEGMENT:
                self.done.append(self.current)
                self.filled, self.current = 0, 0

    def finish(self) -> list[int]:
        return [*self.done, self.current] if self.filled else self.done


# Reading -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """A block in a file: its bytes are ``begin`` to ``end`` of the file's data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: tuple[int, ...]
    begin: int
    end: int


def read_shard(file: FilePath, expected: Written, wanted: Mapping[str, tuple[Sequence[Range], Tensor]]) -> dict[str, int]:
    """Copy what a file has of wanted blocks into them.

    Every byte that is used is verified; nothing is read beyond the segments that the blocks lie in.

    Args:
        file: the file.
        expected: what the index says of it.
        wanted: for the name of a leaf, the block of the whole leaf that is wanted, a half-open range per dim, and a tensor of its
            shape, of any device and dtype, to copy it to (values are cast as `torch.Tensor.copy_` does).

    Returns:
        The number of elements that were copied, for each leaf of which there were some.

    Raises:
        CheckpointError: if the file is missing, or not what was written.
    """
    return open_shard(file, expected).read(wanted)


def open_shard(file: FilePath, expected: Written) -> Shard:
    """The header of a file, verified. Nothing stays open.

    Raises:
        CheckpointError: if the file is missing, or not what was written.
    """
    try:
        size = file.stat().st_size
        if size != expected.bytes:
            raise damaged(file, f"has {size} bytes, {expected.bytes} were written")
        with open(file, "rb", buffering=0) as opened:
            return _open(file, opened.fileno(), expected)
    except OSError as error:
        raise unreadable(file, error) from None


@dataclass(frozen=True)
class Shard:
    """A file whose header was verified.

    Args:
        file: where it is.
        stored: its blocks by the names of their leaves, as they lie.
        begin, end: where its data lie in the file.
        sums: the CRC-32 of each segment of the data.
    """

    file: FilePath
    stored: Mapping[str, _Stored]
    begin: int
    end: int
    sums: Sequence[int]

    def read(self, wanted: Mapping[str, tuple[Sequence[Range], Tensor]]) -> dict[str, int]:
        """As `read_shard`."""
        found = dict[str, int]()
        chosen = {name: block for name, block in self.stored.items() if name in wanted and _meets(block, wanted[name][0])}
        if not chosen:
            return found
        try:
            with open(self.file, "rb", buffering=0) as opened:
                segments = _Segments(self.file, opened.fileno(), self.begin, self.end, self.sums)
                for name, block in chosen.items():
                    copied = _copy(block, segments, *wanted[name])
                    found.update({name: copied} if copied else {})
        except OSError as error:
            raise unreadable(self.file, error) from None
        return found


def unreadable(file: FilePath, error: OSError) -> CheckpointError:
    """The error of a file that the system does not let us read."""
    if isinstance(error, FileNotFoundError):
        return damaged(file, "is missing")
    return damaged(file, f"cannot be read ({error.strerror or error})")


def damaged(file: FilePath, what: str) -> CheckpointError:
    """The error of a file that is not what was written."""
    return CheckpointError(f"{file} {what}: the checkpoint is damaged; copy it again, or take another one")


class _Segments:
    """The data of a file, verified as it is read. The last segment is kept: what is read next often begins in it."""

    def __init__(self, file: FilePath, fd: int, begin: int, end: int, sums: Sequence[int]) -> None:
        self.file, self.fd, self.begin, self.end, self.sums = file, fd, begin, end, sums
        self.at, self.last = -1, memoryview(b"")

    def read(self, begin: int, end: int) -> Tensor:
        """Bytes ``begin`` to ``end`` of the data, uint8."""
        out = torch.empty(end - begin, dtype=torch.uint8)
        view = out.numpy().data
        for at in range(begin // SEGMENT, -(-end // SEGMENT)):
            low, high = max(begin, at * SEGMENT), min(end, (at + 1) * SEGMENT)
            view[low - begin : high - begin] = self._segment(at)[low - at * SEGMENT : high - at * SEGMENT]
        return out

    def _segment(self, at: int) -> memoryview:
        if at != self.at:
            begin = self.begin + at * SEGMENT
            data = _read(self.file, self.fd, begin, min(begin + SEGMENT, self.end))
            if zlib.crc32(data) != self.sums[at]:
                raise damaged(self.file, f"has other bytes than were written (checksum of bytes {begin} to {begin + len(data)})")
            self.at, self.last = at, memoryview(data)
        return self.last


def _read(file: FilePath, fd: int, begin: int, end: int) -> bytes:
    parts: list[bytes] = []
    while begin < end:
        parts.append(os.pread(fd, end - begin, begin))
        if not parts[-1]:
            raise damaged(file, f"ends at byte {begin}")
        begin += len(parts[-1])
    return b"".join(parts)


def _open(file: FilePath, fd: int, expected: Written) -> Shard:
    """The blocks of a file, from its header, which must be the one that was written."""
    length = 8 + int.from_bytes(_read(file, fd, 0, min(8, expected.bytes)), "little")
    if not 8 < length <= min(expected.bytes, _LONGEST):
        raise damaged(file, "has no header")
    header = _read(file, fd, 0, length)
    if zlib.crc32(header) != expected.crc32:
        raise damaged(file, "has another header than was written (checksum)")
    try:
        return _parsed(file, json.loads(header[8:]), length, expected)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise damaged(file, f"has a header that no xtf.save_state wrote ({type(error).__name__}: {error})") from error


def _parsed(file: FilePath, entries: dict[str, Any], length: int, expected: Written) -> Shard:
    about = json.loads(entries.pop("__metadata__")["xtf"])
    if about["segment"] != SEGMENT:
        raise CheckpointError(f"{file} has a checksum for every {about['segment']} bytes, this version of xtf reads {SEGMENT}")
    sums = [int(about["crc32"][i : i + 8], 16) for i in range(0, len(about["crc32"]), 8)]
    stored = {
        name: _Stored(_BY_NAME[entry["dtype"]], tuple(entry["shape"]), tuple(about["blocks"][name]["start"]), *entry["data_offsets"])
        for name, entry in entries.items()
    }
    ordered = dict(sorted(stored.items(), key=lambda item: item[1].begin))  # neighbours share segments
    return Shard(file, ordered, length, expected.bytes, sums)


def _meets(block: _Stored, ranges: Sequence[Range]) -> bool:
    """Whether a block and a range have elements in common."""
    spans = zip(ranges, block.start, block.shape, strict=True)
    return all(max(a, s) < min(b, s + n) for (a, b), s, n in spans)


def _copy(block: _Stored, segments: _Segments, ranges: Sequence[Range], out: Tensor) -> int:
    """Copy what a block and a range have in common. Returns the number of elements."""
    shape, start = block.shape or (1,), block.start or (0,)  # a scalar is a row of one
    ranges, out = (ranges, out) if out.dim() else ([(0, 1)], out.view(1))
    common = [(max(a, s), min(b, s + n)) for (a, b), s, n in zip(ranges, start, shape, strict=True)]
    if any(low >= high for low, high in common):
        return 0
    row = math.prod(shape[1:]) * block.dtype.itemsize
    inner = tuple(slice(low - s, high - s) for (low, high), s in zip(common[1:], start[1:], strict=True))
    target = out[tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(common, ranges, strict=True))]
    (low, high), rows = common[0], max(1, _CHUNK // row)
    for first in range(low, high, rows):
        last = min(high, first + rows)
        data = segments.read(block.begin + (first - start[0]) * row, block.begin + (last - start[0]) * row)
        part = data.view(block.dtype).view(last - first, *shape[1:])
        target[first - low : last - low].copy_(part[(slice(None), *inner)])
    return math.prod(high - low for low, high in common)


def crc32_of(file: FilePath) -> Written:
    """Size and CRC-32 of a whole file."""
    crc, size = 0, 0
    with open(file, "rb") as opened:
        while data := opened.read(SEGMENT):
            crc, size = zlib.crc32(data, crc), size + len(data)
    return Written(size, crc)
