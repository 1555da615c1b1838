"""Writing a Hugging Face checkpoint: one leaf in memory at a time, put in place only when it is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import BinaryIO

import torch
from torch import Tensor

from xtf import tree
from xtf.checkpoint.folder import CONFIG, INDEX, SINGLE, TOKENIZER, CheckpointError, Described, existing_folder, leaf_specs, tensor_shapes
from xtf.checkpoint_map import Piece, Range, Source, pieces, take_apart
from xtf.files import folder_atomically
from xtf.spec import ParamSpec
from xtf.tree import Path, Tree

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class _Planned:
    """A tensor to be written: ``begin`` is where its bytes begin in the shard, header included."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def save_params(
    model: Described,
    params: Tree,
    path: str | os.PathLike[str],
    *,
    shard_bytes: int = 5_000_000_000,
    tokenizer_from: str | os.PathLike[str] | None = None,
) -> None:
    """Write whole parameters as a Hugging Face checkpoint folder that transformers loads.

    Args:
        model: says where each leaf goes (``sources``), its dtype (``specs``) and the ``config.json`` (``hf_config``).
        params: a tree of the structure of ``model.specs``, whole leaves.
        path: the folder to write; see `save_leaves` for what may stand there.
        shard_bytes: bytes of tensors per file, at most; a single larger tensor has a file for itself.
        tokenizer_from: a folder from which the tokenizer's files are copied.

    Raises:
        CheckpointError: if another kind of folder stands at ``path``, or ``tokenizer_from`` has no tokenizer.
        ValueError: if ``params`` has another structure or other shapes; each is named.
        OSError: if it cannot be written; what stood at ``path`` before is unchanged.
    """
    specs = leaf_specs(model)
    if not tree.same_structure(params, model.specs):
        given, wanted = set(tree.paths(params)), set(specs)
        raise ValueError(
            f"params must have the structure of model.specs: missing {sorted(wanted - given)}, unknown {sorted(given - wanted)}"
            + ("" if given != wanted else "; the paths agree, so the kinds of containers differ")
        )
    leaves: dict[Path, Tensor] = tree.items(params)
    given_shapes = {leaf: tuple(value.shape) for leaf, value in leaves.items()}
    wrong = [f"{leaf} {given_shapes[leaf]}, expected {spec.shape}" for leaf, spec in specs.items() if given_shapes[leaf] != spec.shape]
    if wrong:
        raise ValueError(f"params must be whole leaves (of a placed step: step.full(params)); other shapes: {'; '.join(wrong)}")
    save_leaves(model, leaves.__getitem__, path, shard_bytes=shard_bytes, tokenizer_from=tokenizer_from)


def save_leaves(
    model: Described,
    get_leaf: Callable[[Path], Tensor],
    path: str | os.PathLike[str],
    *,
    shard_bytes: int = 5_000_000_000,
    tokenizer_from: str | os.PathLike[str] | None = None,
    write: bool = True,
) -> None:
    """Write a Hugging Face checkpoint folder, asking for one whole leaf at a time.

    Each leaf is asked for once, in the order of ``model.specs``, and let go when its bytes are written: at no time is more
    than one leaf held here. So ``get_leaf`` may gather a sharded leaf; then every rank calls this, with ``write`` on one of them.

    The folder is written beside ``path``, flushed, and renamed into place: a checkpoint that stood there stays until the new
    one is complete, and stays after any failure. It is replaced as a whole, its tokenizer included.

    Args:
        model: says where each leaf goes (``sources``), its dtype (``specs``; a leaf of another dtype is cast) and the
            ``config.json`` (``hf_config``, to which ``dtype`` is added).
        get_leaf: gives the whole leaf of a path, on any device.
        path: the folder to write: a new one, an empty one, or a checkpoint that holds nothing else.
        shard_bytes: bytes of tensors per file, at most; a single larger tensor has a file for itself.
        tokenizer_from: a folder from which the tokenizer's files are copied.
        write: ``False`` on ranks that only take part in ``get_leaf``.

    Raises:
        CheckpointError: if another kind of folder stands at ``path``, or ``tokenizer_from`` has no tokenizer.
        ValueError: if a leaf has another shape than its spec, or a dtype that safetensors does not have.
        OSError: if it cannot be written; what stood at ``path`` before is unchanged.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}, expected at least 1: the bytes of tensors per file")
    specs, shards = leaf_specs(model), _plan(model, shard_bytes)
    if not write:
        for leaf in specs:
            get_leaf(leaf)
        return
    with _files(model, shards, path, tokenizer_from) as place:
        for leaf, spec in specs.items():
            _write_leaf(model, leaf, spec, get_leaf(leaf), place)


def save_blocks(
    model: Described,
    read: Callable[[Path, Sequence[Range]], Tensor],
    path: str | os.PathLike[str],
    *,
    shard_bytes: int = 5_000_000_000,
    tokenizer_from: str | os.PathLike[str] | None = None,
    piece_bytes: int = 1 << 24,
) -> None:
    """Like `save_leaves`, asking for leaves piece by piece: ``read(leaf, ranges)`` gives a block, a half-open range per dim.

    No more than one piece is held here. It is some rows of a stored tensor: a layer's experts come one by one.

    Args:
        model, path, shard_bytes, tokenizer_from: as for `save_leaves`.
        read: gives a block of a leaf, on any device.
        piece_bytes: bytes of a piece, where one row is not larger.

    Raises:
        CheckpointError, OSError: as `save_leaves`.
        ValueError: as `save_leaves`, and for a block of another shape.
    """
    if shard_bytes < 1 or piece_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes} and piece_bytes is {piece_bytes}, expected at least 1: bytes of a file, of a piece")
    specs, shards = leaf_specs(model), _plan(model, shard_bytes)
    with _files(model, shards, path, tokenizer_from) as place:
        for leaf, spec in specs.items():
            for piece in pieces(model.sources[leaf], spec.shape, max(1, piece_bytes // spec.dtype.itemsize)):
                _write_piece(leaf, piece, read(leaf, piece.block), place)


@contextmanager
def _files(
    model: Described, shards: Mapping[str, Sequence[_Planned]], path: str | os.PathLike[str], tokenizer_from: str | os.PathLike[str] | None
) -> Generator[dict[str, tuple[BinaryIO, _Planned]]]:
    """The file of each tensor and its place there; all but the tensors' bytes are written."""
    tokenizer = check_target(path, tokenizer_from)
    with folder_atomically(path) as folder:
        (folder / CONFIG).write_text(json.dumps(config_json(model, leaf_specs(model)), indent=2) + "\n", encoding="utf-8")
        for file in tokenizer:
            shutil.copyfile(file, folder / file.name)
        if len(shards) > 1:
            (folder / INDEX).write_text(json.dumps(_index(shards), indent=2) + "\n", encoding="utf-8")
        with ExitStack() as stack:
            place = dict[str, tuple[BinaryIO, _Planned]]()
            for name, shard in shards.items():
                file = stack.enter_context(open(folder / name, "xb"))
                file.write(_header(shard))
                place.update({planned.name: (file, planned) for planned in shard})
            yield place


def check_target(path: str | os.PathLike[str], tokenizer_from: str | os.PathLike[str] | None) -> list[FilePath]:
    """Raise a `CheckpointError` if nothing may be written at ``path``. Returns the tokenizer's files to copy."""
    check_replaceable(FilePath(path), "checkpoint", CONFIG, lambda name: name == INDEX or name.endswith(".safetensors"))
    return tokenizer_files(tokenizer_from)


def _write_leaf(model: Described, leaf: Path, spec: ParamSpec, value: Tensor, place: Mapping[str, tuple[BinaryIO, _Planned]]) -> None:
    if tuple(value.shape) != spec.shape:
        raise ValueError(f"the leaf {leaf!r} has shape {tuple(value.shape)}, expected the whole leaf {spec.shape}: gather it first")
    _write(model.sources[leaf], value, 0, place)


def _write_piece(leaf: Path, piece: Piece, value: Tensor, place: Mapping[str, tuple[BinaryIO, _Planned]]) -> None:
    wanted = tuple(stop - start for start, stop in piece.block)
    if tuple(value.shape) != wanted:
        raise ValueError(f"the block {piece.block} of the leaf {leaf!r} has shape {tuple(value.shape)}, expected {wanted}")
    _write(piece.source, value.reshape(piece.shape), piece.row, place)


def _write(source: Source, value: Tensor, row: int, place: Mapping[str, tuple[BinaryIO, _Planned]]) -> None:
    """Write a leaf, or some rows of its tensors, from ``row`` on."""
    for name, tensor in take_apart(source, value.detach()):
        file, planned = place[name]
        file.seek(planned.begin + row * torch.Size(planned.shape[1:]).numel() * planned.dtype.itemsize)
        flat = tensor.to(device="cpu", dtype=planned.dtype).contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)


def _plan(model: Described, shard_bytes: int) -> dict[str, list[_Planned]]:
    """The tensors of each file, in the order in which leaves are asked for, filled one file after another."""
    specs = leaf_specs(model)
    unknown = sorted({str(spec.dtype) for spec in specs.values() if spec.dtype not in DTYPES})
    if unknown:
        raise ValueError(f"safetensors files have no dtype {unknown}; they have {sorted(str(d) for d in DTYPES)}")
    shards: list[list[_Planned]] = [[]]
    filled = 0
    for leaf, parts in tensor_shapes(model).items():
        for name, shape in parts.items():
            planned = _Planned(name, specs[leaf].dtype, shape)
            if shards[-1] and filled + planned.bytes > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(planned)
            filled += planned.bytes
    if len(shards) == 1:
        return {SINGLE: _laid_out(shards[0])}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": _laid_out(shard) for i, shard in enumerate(shards, 1)}


def _laid_out(shard: Sequence[_Planned]) -> list[_Planned]:
    """The tensors in the order in which they lie: wide dtypes first, so that each begins at a multiple of its own width."""
    ordered = sorted(shard, key=lambda planned: -planned.dtype.itemsize)
    begin = len(_header(ordered))
    found: list[_Planned] = []
    for planned in ordered:
        found.append(replace(planned, begin=begin))
        begin += planned.bytes
    return found


def _header(shard: Sequence[_Planned]) -> bytes:
    """A safetensors file up to its first tensor: the length of the JSON as 8 bytes, the JSON, spaces up to a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for planned in shard:
        offsets = [offset, offset + planned.bytes]
        entries[planned.name] = {"dtype": DTYPES[planned.dtype], "shape": list(planned.shape), "data_offsets": offsets}
        offset += planned.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _index(shards: Mapping[str, Sequence[_Planned]]) -> dict[str, object]:
    every = [planned for shard in shards.values() for planned in shard]
    return {
        "metadata": {
            "total_parameters": sum(torch.Size(planned.shape).numel() for planned in every),
            "total_size": sum(planned.bytes for planned in every),
        },
        "weight_map": {planned.name: file for file, shard in sorted(shards.items()) for planned in shard},
    }


def config_json(model: Described, specs: Mapping[Path, ParamSpec]) -> dict[str, object]:
    """The model's config.json, with the dtype that most parameters have."""
    elements = Counter[torch.dtype]()
    for spec in specs.values():
        elements[spec.dtype] += spec.numel
    config: dict[str, object] = {key: value for key, value in model.hf_config.items() if key != "torch_dtype"}
    return config | {"dtype": str(elements.most_common(1)[0][0]).removeprefix("torch.")}


def check_replaceable(target: FilePath, what: str, needed: str, belongs: Callable[[str], bool]) -> None:
    """Raise unless ``target`` is nothing, an empty folder, or a checkpoint that holds nothing else.

    Args:
        target: what would be replaced.
        what: the kind of checkpoint, for the message.
        needed: the file that makes a folder one.
        belongs: whether a name is one of its other files; configuration and tokenizer always are.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file, a {what} is a folder: give another path")
    names = {p.name for p in target.iterdir()}
    other = sorted(n for n in names if n not in (needed, CONFIG, *TOKENIZER) and not belongs(n))
    if other or (names and needed not in names):
        found = f"it also holds {other[:10]}" if other else f"it has no {needed}"
        raise CheckpointError(f"{target} will not be overwritten, since it is not only a {what} ({found}): give another path")


def tokenizer_files(folder: str | os.PathLike[str] | None) -> list[FilePath]:
    if folder is None:
        return []
    files = [existing_folder(folder) / name for name in TOKENIZER]
    found = [file for file in files if file.is_file()]
    if not any(file.name.startswith(("tokenizer.", "vocab.", "spiece.")) for file in found):
        raise CheckpointError(f"tokenizer_from={str(folder)!r} has no tokenizer: expected one of {', '.join(TOKENIZER)}")
    return found
