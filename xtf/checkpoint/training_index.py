"""The index of a training checkpoint: what the folder holds, written last, and how leaves are read through it.

A training checkpoint is a folder with ``state.json`` (the index), a file of blocks for each rank that had some to write
(`xtf.checkpoint.shard_file`), ``config.json``, and perhaps the files of a tokenizer. The index names every leaf with its shape and
dtype, and every file with its size and checksum, and has a checksum of itself. It says nothing of the layout that wrote it: which
blocks there are stands in the files, and any layout may read them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, cast

import torch
from torch import Tensor

from xtf.checkpoint.folder import INDEX, SINGLE, CheckpointError, Described, leaf_specs, read_json
from xtf.checkpoint.shard_file import Shard, Written, crc32_of, damaged, open_shard, unreadable
from xtf.checkpoint.writing import DTYPES
from xtf.checkpoint_map import Range
from xtf.tree import Path

STATE = "state.json"
PARAMS = "params."  # what the names of parameters begin with

_FORMAT = "xtf training state"
_VERSION = 1
_DTYPES = frozenset(str(dtype).removeprefix("torch.") for dtype in DTYPES)
_SHOWN = 30  # names of each kind in one message


@dataclass(frozen=True)
class Leaf:
    """A whole leaf: its dtype as torch names it (``"float32"``), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(value: Tensor, shape: tuple[int, ...]) -> Leaf:
        """A leaf of this whole shape, of which ``value`` is a block."""
        return Leaf(str(value.dtype).removeprefix("torch."), shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class StateIndex:
    """What ``state.json`` says.

    Args:
        folder: the folder it stands in.
        step: updates so far.
        extra: what the caller gave to be kept.
        leaves: every leaf of the state by name.
        records: for the place of each named tuple in the optimizer's state, the name of its class.
        shards: the files of blocks.
        others: all other files.
    """

    folder: FilePath
    step: int
    extra: Mapping[str, Any]
    leaves: Mapping[str, Leaf]
    records: Mapping[str, str]
    shards: Mapping[str, Written]
    others: Mapping[str, Written]

    def write(self) -> None:
        """Write ``state.json`` into the folder."""
        about = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "extra": self.extra,
            "leaves": {name: [leaf.dtype, list(leaf.shape)] for name, leaf in self.leaves.items()},
            "records": self.records,
            "shards": {name: [written.bytes, written.crc32] for name, written in self.shards.items()},
            "others": {name: [written.bytes, written.crc32] for name, written in self.others.items()},
        }
        text = json.dumps({"crc32": _sum(about), "state": about}, indent=1)
        (self.folder / STATE).write_text(text + "\n", encoding="utf-8")

    def check_files(self, *, contents: bool = False) -> None:
        """Raise a `CheckpointError` unless every file is there and of its size; with ``contents``, unless what is not blocks is also
        the same bytes (blocks are verified when they are read)."""
        for name, written in (*self.shards.items(), *self.others.items()):
            file = self.folder / name
            try:
                size = file.stat().st_size
            except OSError as error:
                raise unreadable(file, error) from None
            if size != written.bytes:
                raise damaged(file, f"has {size} bytes, {written.bytes} were written")
            if contents and name in self.others and crc32_of(file) != written:
                raise damaged(file, "has other bytes than were written (checksum)")

    def opened(self) -> Iterator[Shard]:
        """The files of blocks, one after another, their headers verified.

        Raises:
            CheckpointError: if one is missing or damaged.
        """
        for name, written in self.shards.items():
            yield open_shard(self.folder / name, written)

    def read(self, wanted: Mapping[str, tuple[Sequence[Range], Tensor]], shards: Iterable[Shard] | None = None) -> None:
        """Fill tensors with blocks of leaves, see `xtf.checkpoint.shard_file.read_shard`. One file is open at a time.

        Args:
            wanted: for the name of a leaf, the wanted block and a tensor of its shape.
            shards: what `opened` gave, where many reads follow each other.

        Raises:
            CheckpointError: if a file is missing or damaged, or no file has some part of a block.
        """
        found = dict.fromkeys(wanted, 0)
        for shard in self.opened() if shards is None else shards:
            for leaf, count in shard.read(wanted).items():
                found[leaf] += count
        lost = [f"{leaf} ({found[leaf]} of {out.numel()} elements)" for leaf, (_, out) in wanted.items() if found[leaf] != out.numel()]
        if lost:
            raise CheckpointError(f"the files of {self.folder} do not have every part of {listed(lost)}\nsave it again")


def is_training(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a training checkpoint, and not one in Hugging Face layout.

    Raises:
        CheckpointError: if it is both.
    """
    folder = FilePath(path)
    if not (folder / STATE).is_file():
        return False
    both = [name for name in (SINGLE, INDEX) if (folder / name).exists()]
    if both:
        raise CheckpointError(f"{folder} holds a training checkpoint ({STATE}) and a Hugging Face one ({both[0]}): move one of them away")
    return True


def read_index(path: str | os.PathLike[str]) -> StateIndex:
    """The index of a training checkpoint. Its files are not looked at.

    Raises:
        CheckpointError: if there is none, or it is damaged or of another version.
    """
    folder = FilePath(path)
    if not folder.is_dir():
        raise CheckpointError(f"no training checkpoint at {folder}: expected a folder that xtf.save_state wrote")
    if not (folder / STATE).is_file() and any(folder.glob("rank-*.safetensors")):
        raise damaged(folder / STATE, "is missing")
    if not (folder / STATE).is_file():
        what = "a Hugging Face checkpoint, read its parameters with xtf.load" if (folder / "config.json").is_file() else "something else"
        raise CheckpointError(f"{folder} is not a training checkpoint, since it has no {STATE}; it is {what}")
    found = read_json(folder / STATE, "is not a training checkpoint without it")
    if not isinstance(found.get("state"), dict) or found.get("crc32") != _sum(found["state"]):
        raise damaged(folder / STATE, "has other contents than were written (checksum)")
    about = cast("dict[str, Any]", found["state"])
    if (about.get("format"), about.get("version")) != (_FORMAT, _VERSION):
        raise CheckpointError(
            f"{folder / STATE} is {about.get('format')!r} version {about.get('version')}; this xtf reads {_FORMAT!r} version {_VERSION}"
        )
    wrong = _wrong(about)
    if wrong:
        raise CheckpointError(f"{folder / STATE} {wrong}: no xtf.save_state wrote that; take another checkpoint")
    return StateIndex(
        folder,
        about["step"],
        about["extra"],
        {name: Leaf(dtype, tuple(shape)) for name, (dtype, shape) in about["leaves"].items()},
        about["records"],
        {name: Written(*pair) for name, pair in about["shards"].items()},
        {name: Written(*pair) for name, pair in about["others"].items()},
    )


def _wrong(about: Mapping[str, Any]) -> str:
    """What of an index is not as `StateIndex.write` writes it; empty if all is."""
    step = about.get("step")
    if not _is_count(step):
        return f"has the step {step!r:.40}, expected a whole number of at least 0"
    for kind in ("extra", "leaves", "records", "shards", "others"):
        if not isinstance(about.get(kind), dict):
            return f"has {kind} {about.get(kind)!r:.40}, expected an object"
    for name, leaf in about["leaves"].items():
        if not (
            _is_pair(leaf) and str(leaf[0]) in _DTYPES and isinstance(leaf[1], list) and all(map(_is_count, cast("list[Any]", leaf[1])))
        ):
            return f"says of the leaf {name!r:.60} {leaf!r:.60}, expected a dtype and a shape"
    for name, record in about["records"].items():
        if not isinstance(record, str):
            return f"says of the record {name!r:.60} {record!r:.60}, expected a name"
    for name, written in (*about["shards"].items(), *about["others"].items()):
        if FilePath(name).name != name or not (_is_pair(written) and all(map(_is_count, written))):
            return f"says of the file {name!r:.60} {written!r:.60}, expected its size and its checksum"
    return ""


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(cast("list[Any]", value)) == 2


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def read_params(
    model: Described, path: str | os.PathLike[str], blocks: Mapping[Path, Sequence[Range]], device: str | torch.device
) -> dict[Path, Tensor]:
    """A block of each parameter of a training checkpoint, in the dtypes of the model's specs.

    Raises:
        CheckpointError: if a file is missing or damaged, or the parameters are not the model's: all that differ are named.
    """
    index, specs = _index_of(model, path), leaf_specs(model)
    found = {
        name: torch.empty([stop - start for start, stop in blocks[name]], dtype=spec.dtype, device=device) for name, spec in specs.items()
    }
    index.read({PARAMS + name: (blocks[name], out) for name, out in found.items()})
    return found


def open_params(model: Described, path: str | os.PathLike[str]) -> Callable[[Path, Sequence[Range]], Tensor]:
    """``read(leaf, ranges)`` of the parameters of a training checkpoint, as `read_params`, for many reads one after another.

    Raises:
        CheckpointError: as `read_params`, also when ``read`` is called.
    """
    index, specs = _index_of(model, path), leaf_specs(model)
    shards = list(index.opened())

    def read(leaf: Path, ranges: Sequence[Range]) -> Tensor:
        out = torch.empty([stop - start for start, stop in ranges], dtype=specs[leaf].dtype)
        index.read({PARAMS + leaf: (ranges, out)}, shards)
        return out

    return read


def _index_of(model: Described, path: str | os.PathLike[str]) -> StateIndex:
    """The index of a training checkpoint, known to be of this model's parameters."""
    index, specs = read_index(path), leaf_specs(model)
    stored = {name.removeprefix(PARAMS): leaf for name, leaf in index.leaves.items() if name.startswith(PARAMS)}
    missing, extra = [name for name in specs if name not in stored], [name for name in stored if name not in specs]
    misshapen = {
        name: f"{name}: the checkpoint has {stored[name]}, the model expects {Leaf.of(torch.empty(0, dtype=spec.dtype), spec.shape)}"
        for name, spec in specs.items()
        if name in stored
        and (stored[name].shape != spec.shape or getattr(torch, stored[name].dtype).is_floating_point != spec.dtype.is_floating_point)
    }
    if missing or extra or misshapen:
        raise CheckpointError(
            f"the training checkpoint {index.folder} does not fit the model:"
            + report({"missing": missing, "unknown to the model": extra, "misshapen": list(misshapen.values())}),
            missing=missing,
            extra=extra,
            misshapen=list(misshapen),
        )
    return index


def report(kinds: Mapping[str, Sequence[str]]) -> str:
    """Lines of a message: how many there are of each kind, and which."""
    return "".join(f"\n  {len(rows)} {what}: {listed(rows)}" for what, rows in kinds.items() if rows)


def listed(rows: Sequence[str]) -> str:
    """Rows, each on its own line, the first `_SHOWN` of them."""
    more = [f"... and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return "".join(f"\n    {row}" for row in [*rows[:_SHOWN], *more])


def _sum(about: Any) -> int:
    """A checksum of a JSON value, however it is laid out."""
    return zlib.crc32(json.dumps(about, sort_keys=True, separators=(",", ":")).encode())
