"""``xtf export``: a checkpoint carried away in the Hugging Face layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

import xtf
from xtf import tree
from xtf.checkpoint.reading import load_leaves, open_leaves
from xtf.checkpoint.writing import check_target, save_blocks
from xtf.model import Model
from xtf.run.source import DtypeName, Prefer, find, has_tokenizer, note, stored_dtype
from xtf.spec import ParamSpec
from xtf.tree import Path as Leaf

GROUP_BYTES = 1 << 30
"""Leaves are read in groups of about this size: opening a checkpoint checks all of its names, which takes a while for large ones."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class ExportOptions:
    """Write a checkpoint in the Hugging Face layout: weights as safetensors, config, tokenizer and chat template."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """The folder of a run, a training checkpoint, or a Hugging Face folder."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The folder to write: new, empty, or a checkpoint, which is replaced."""
    dtype: DtypeName | None = None
    """Of the weights. By default that of the source."""
    shard_size: str = "5GB"
    """The most that one file holds, as 5GB or 500MB (powers of ten)."""
    prefer: Prefer = "best"
    """Which checkpoint of a run's folder: the one of the lowest held-out loss, or the last."""


def run(options: ExportOptions) -> Path:
    """Write the checkpoint piece by piece: memory does not grow with it, nor with a layer's experts.

    Returns:
        The folder that was written.

    Raises:
        ValueError: for a source that is no checkpoint, a size that is none, or a folder that must not be overwritten.
        OSError: if it cannot be written; what stood there before is unchanged.
    """
    shard_bytes = parse_bytes(options.shard_size)
    folder = find(options.source, options.prefer)
    if options.out.resolve() == folder.resolve():
        raise ValueError(f"OUT {options.out} is the checkpoint that is exported: give another folder")
    if folder != options.source:
        note(f"checkpoint {folder}")
    tokenizer = folder if has_tokenizer(folder) else None
    check_target(options.out, tokenizer)
    if tokenizer is None:
        note(f"{folder} has no tokenizer: the export has none either")
    model = xtf.models.from_hf(folder, dtype=getattr(torch, options.dtype or stored_dtype(folder)))
    with open_leaves(model, folder) as read:
        save_blocks(model, read, options.out, shard_bytes=shard_bytes, tokenizer_from=tokenizer)
    note(f"wrote {options.out}")
    return options.out


def parse_bytes(text: str) -> int:
    """A number of bytes with a unit of powers of ten.

    Example:
        >>> parse_bytes("5GB"), parse_bytes("1.5 mb"), parse_bytes("700")
        (5000000000, 1500000, 700)

    Raises:
        ValueError: for what is no such number, or less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGT]?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if size < 1:
        raise ValueError(f"--shard-size is {text!r}, expected bytes of tensors per file, as 5GB, 500MB or 1000000")
    return size


def leaf_by_leaf(model: Model, folder: Path, group_bytes: int = GROUP_BYTES) -> Callable[[Leaf], Tensor]:
    """``get_leaf(path)`` for `xtf.checkpoint.save_leaves`: each leaf once, read in groups in the order of ``model.specs``, and let go
    when given. A leaf that is asked for before others is found, and what was read before it is held until it is asked for."""
    specs: Mapping[Leaf, ParamSpec] = tree.items(model.specs)
    groups = _groups(specs, group_bytes)
    held: dict[Leaf, Tensor] = {}

    def get_leaf(leaf: Leaf) -> Tensor:
        while leaf not in held:
            wanted = next(groups)

            def ranges(path: Leaf, wanted: set[Leaf] = wanted) -> list[tuple[int, int]]:
                return [(0, n if path in wanted else 0) for n in specs[path].shape]

            read = load_leaves(model, folder, ranges)
            held.update({path: read[path] for path in wanted})
        return held.pop(leaf)

    return get_leaf


def _groups(specs: Mapping[Leaf, ParamSpec], group_bytes: int) -> Iterator[set[Leaf]]:
    group: set[Leaf] = set()
    filled = 0
    for path, spec in specs.items():
        size = spec.numel * spec.dtype.itemsize
        if group and filled + size > group_bytes:
            yield group
            group, filled = set[Leaf](), 0
        group.add(path)
        filled += size
    if group:
        yield group
