"""Reading a Hugging Face checkpoint: of each leaf only the block that is asked for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xtf import tree
from xtf.checkpoint.fitting import TIED, Prefix, check, fit, listed
from xtf.checkpoint.folder import INDEX, SINGLE, CheckpointError, Described, existing_folder, leaf_specs, read_config, read_json
from xtf.checkpoint.quantised import Stored, dequantised
from xtf.checkpoint.training_index import is_training, open_params, read_params
from xtf.checkpoint_map import Named, Range, fill
from xtf.spec import ParamSpec
from xtf.tree import Path, Tree

Ranges = Callable[[Path], Sequence[Range]]
"""``ranges(path)``: the block of a leaf that is wanted, a half-open range per dim of the whole leaf."""

_PIECE = 1 << 24  # elements that are put together at a time: what quantised and interleaved weights need beside their leaf


@dataclass(frozen=True)
class _Tensor:
    """A tensor in a checkpoint, not read yet. ``block`` is safetensors' slice of it."""

    shape: tuple[int, ...]
    dtype: str
    file: FilePath
    block: Any

    def read(self, ranges: Sequence[Range]) -> Tensor:
        """A view of the mapped file: only the pages of the block are read, when it is copied."""
        return self.block[tuple(slice(*r) for r in ranges)]


def load_params(model: Described, path: str | os.PathLike[str], *, ignore: Sequence[str] = (), device: str | torch.device = "cpu") -> Tree:
    """The model's whole parameters from a Hugging Face checkpoint folder, or from a training checkpoint (`xtf.save_state`).

    Args:
        model: says which leaves there are (``specs``) and where each is found (``sources``).
        path: a folder with ``config.json`` and ``model.safetensors``, or several files and ``model.safetensors.index.json``; or a
            folder that `xtf.save_state` wrote.
        ignore: regular expressions; tensors whose whole name matches one may be in the checkpoint without being used.
        device: where the parameters are put.

    Returns:
        A tree of the structure of ``model.specs``, each leaf with the shape and dtype of its spec.

    Raises:
        CheckpointError: if a file is missing or damaged, or tensors are missing, unknown or of another shape; all of them
            are named at once.
    """
    return tree.from_items(model.specs, load_leaves(model, path, ignore=ignore, device=device))


def load_leaves(
    model: Described,
    path: str | os.PathLike[str],
    ranges: Ranges | None = None,
    *,
    ignore: Sequence[str] = (),
    device: str | torch.device = "cpu",
) -> dict[Path, Tensor]:
    """A block of each leaf from a Hugging Face checkpoint folder, or from a training checkpoint; nothing outside the blocks is read.

    Weights are read as they are published: in any layout that the model's sources name; under the names of a language model that is
    part of a larger one (``language_model.`` in front, or ``model.language_model.``; then what lies beside it is passed over);
    plain, in block-wise FP8, or in MXFP4 (`xtf.checkpoint.quantised`).

    Every name and shape is checked against the model, also of what lies outside the blocks. Rotary tables are ignored, tensors without
    elements, layers that only predict further tokens (``num_nextn_predict_layers``), and a tied ``lm_head.weight`` that equals the
    embedding (compared on the embedding's block).

    Args:
        model: says which leaves there are (``specs``) and where each is found (``sources``).
        path: a folder with ``config.json`` and ``model.safetensors``, or several files and ``model.safetensors.index.json``; or a
            folder that `xtf.save_state` wrote.
        ranges: the block of each leaf; ``None`` for whole leaves.
        ignore: regular expressions; tensors whose whole name matches one may be in the checkpoint without being used.
        device: where the blocks are put; they are copied there from the mapped file directly.

    Returns:
        ``{path: block}`` in the order of ``model.specs``, of the dtypes of the specs.

    Raises:
        CheckpointError: as for `load_params`.
        ValueError: for a range outside its leaf.
    """
    specs = leaf_specs(model)
    blocks = {leaf: _checked_ranges(leaf, spec, ranges) for leaf, spec in specs.items()}
    folder = existing_folder(path)
    if is_training(folder):
        return read_params(model, folder, blocks, device)
    with ExitStack() as stack:
        read = _opened(model, folder, ignore, stack)
        return {leaf: read(leaf, blocks[leaf], device) for leaf in specs}


@contextmanager
def open_leaves(
    model: Described, path: str | os.PathLike[str], *, ignore: Sequence[str] = (), mapped_bytes: int = 1 << 26
) -> Generator[Callable[[Path, Sequence[Range]], Tensor]]:
    """Like `load_leaves`, for many blocks one after another: ``read(leaf, ranges)`` gives one, on the CPU.

    Names and shapes are checked once. Pages of mapped files count as memory of the process for as long as they are mapped: the files
    of a Hugging Face folder are opened anew after ``mapped_bytes``, or where that is more, after each 256th of the model.

    Raises:
        CheckpointError: as `load_leaves`, also when ``read`` is called.
    """
    folder, specs = existing_folder(path), leaf_specs(model)
    if is_training(folder):
        yield open_params(model, folder)
        return
    limit = max(mapped_bytes, sum(spec.numel * spec.dtype.itemsize for spec in specs.values()) // 256)
    left = 0
    with ExitStack() as stack:
        opened: Callable[[Path, Sequence[Range], str], Tensor] | None = None

        def read(leaf: Path, ranges: Sequence[Range]) -> Tensor:
            nonlocal opened, left
            if opened is None or left <= 0:
                opened = None  # lets go of what is mapped
                stack.close()
                opened, left = _opened(model, folder, ignore, stack), limit
            found = opened(leaf, ranges, "cpu")
            left -= found.nbytes
            return found

        yield read


def _opened(
    model: Described, folder: FilePath, ignore: Sequence[str], stack: ExitStack
) -> Callable[[Path, Sequence[Range], str | torch.device], Tensor]:
    """``read(leaf, block, device)`` from a Hugging Face folder that fits the model."""
    config, specs = read_config(folder), leaf_specs(model)
    tensors, wrong = dequantised(_open(folder, stack), config)
    prefix, fitted = fit(model, tensors)
    check(model, fitted, prefix, folder, tensors, wrong, config, [re.compile(pattern) for pattern in ignore])

    def read_tensor(name: str, block: Sequence[Range]) -> Tensor:
        return tensors[name].read(block)

    def read(leaf: Path, ranges: Sequence[Range], device: str | torch.device) -> Tensor:
        found = torch.empty([stop - start for start, stop in ranges], dtype=specs[leaf].dtype, device=device)
        for block, out in _pieces(ranges, found):
            fill(fitted.sources[leaf], specs[leaf].shape, block, read_tensor, out)
        _check_tied(fitted, prefix, tensors, leaf, ranges)
        return found

    return read


def _pieces(block: Sequence[Range], out: Tensor) -> Iterator[tuple[list[Range], Tensor]]:
    """A block and the tensor for it in pieces of some rows."""
    if out.numel() <= _PIECE:
        yield list(block), out
        return
    (start, stop), *rest = block
    rows = max(1, _PIECE * (stop - start) // out.numel())
    for begin in range(start, stop, rows):
        end = min(begin + rows, stop)
        yield [(begin, end), *rest], out[begin - start : end - start]


def _checked_ranges(leaf: Path, spec: ParamSpec, ranges: Ranges | None) -> list[Range]:
    if ranges is None:
        return [(0, n) for n in spec.shape]
    found = [(int(start), int(stop)) for start, stop in ranges(leaf)]
    if len(found) != len(spec.shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(found, spec.shape, strict=True)):
        raise ValueError(f"ranges({leaf!r}) gave {found}, expected a half-open range in each dim of the whole leaf {spec.shape}")
    return found


def _open(folder: FilePath, stack: ExitStack) -> dict[str, _Tensor]:
    """Every tensor of a folder by name. The files stay open as long as the stack."""
    if (folder / SINGLE).exists():
        index, files = dict[str, str](), [folder / SINGLE]
    elif (folder / INDEX).exists():
        found: object = read_json(folder / INDEX, "").get("weight_map")
        index = cast("dict[str, str]", found) if isinstance(found, dict) else dict[str, str]()
        if not index or not all(type(file) is str for file in index.values()):
            raise CheckpointError(f"{folder / INDEX} has no 'weight_map' of tensor names to file names: copy it again")
        files = [folder / name for name in sorted(set(index.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{folder / INDEX} names files that are not in {folder}: {absent}; copy them too")
    else:
        pickled = sorted(p.name for p in folder.glob("*.bin"))
        why = f"; it has {pickled}, but only safetensors are read: save it again with transformers" if pickled else ""
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{why}")
    tensors = dict[str, _Tensor]()
    for file in files:
        try:
            opened: Any = stack.enter_context(cast("Any", safe_open)(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is not a complete safetensors file ({error}): copy it again") from None
        for name in cast("list[str]", opened.keys()):
            if index.get(name, file.name) == file.name:
                block = opened.get_slice(name)
                tensors[name] = _Tensor(tuple(block.get_shape()), block.get_dtype(), file, block)
    lost = [f"{name} (in {file})" for name, file in index.items() if name not in tensors]
    if lost:
        raise CheckpointError(f"{folder / INDEX} names tensors that are not in their files: {listed(lost)}\ncopy the folder again")
    return tensors


def _check_tied(model: Described, prefix: Prefix, tensors: Mapping[str, Stored], leaf: Path, block: Sequence[Range]) -> None:
    """A head written beside the embedding it is tied to must equal it; compared on the block of the embedding."""
    source = model.sources[leaf]
    for head, embedding in ((prefix.rename(head), prefix.rename(embedding)) for head, embedding in TIED.items()):
        tied = isinstance(source, Named) and source.name == embedding and head in tensors and not _used(model, head)
        if tied and not torch.equal(tensors[head].read(block), tensors[embedding].read(block)):
            raise CheckpointError(
                f"{tensors[head].file}: {head} differs from {embedding}, but the model ties them: "
                "set tie_word_embeddings to false in config.json, or remove the tensor",
                extra=[head],
            )


def _used(model: Described, name: str) -> bool:
    return any(isinstance(source, Named) and source.name == name for source in model.sources.values())
