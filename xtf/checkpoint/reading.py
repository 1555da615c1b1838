"""Reading a Hugging Face checkpoint: of each leaf only the block that is asked for."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xtf import tree
from xtf.checkpoint.folder import (
    CONFIG,
    INDEX,
    SINGLE,
    CheckpointError,
    Described,
    existing_folder,
    leaf_specs,
    read_config,
    read_json,
    tensor_shapes,
)
from xtf.checkpoint.training_index import is_training, read_params
from xtf.checkpoint_map import Named, Range, fill
from xtf.spec import ParamSpec
from xtf.tree import Path, Tree

Ranges = Callable[[Path], Sequence[Range]]
"""``ranges(path)``: the block of a leaf that is wanted, a half-open range per dim of the whole leaf."""

_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # derived from the config, written by old versions of transformers
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # a tied head may be written beside the embedding it equals
_SHOWN = 100  # names of each kind in one message


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

    Every name and shape is checked against the model, also of what lies outside the blocks. Rotary tables are ignored, and so is
    a tied ``lm_head.weight`` that equals the embedding (compared on the embedding's block).

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
    config = read_config(folder)
    with ExitStack() as stack:
        tensors = _open(folder, stack)
        _check(model, folder, tensors, config, [re.compile(pattern) for pattern in ignore])

        def read(name: str, block: Sequence[Range]) -> Tensor:
            return tensors[name].read(block)

        found = dict[Path, Tensor]()
        for leaf, spec in specs.items():
            found[leaf] = torch.empty([stop - start for start, stop in blocks[leaf]], dtype=spec.dtype, device=device)
            fill(model.sources[leaf], spec.shape, blocks[leaf], read, found[leaf])
        _check_tied(model, tensors, blocks)
    return found


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
        raise CheckpointError(f"{folder / INDEX} names tensors that are not in their files: {_listed(lost)}\ncopy the folder again")
    return tensors


def _check(
    model: Described, folder: FilePath, tensors: Mapping[str, _Tensor], config: Mapping[str, Any], ignore: list[re.Pattern[str]]
) -> None:
    """Raise one error that names everything that is missing, unknown or of another shape or kind."""
    specs, wanted = leaf_specs(model), dict[str, tuple[int, ...]]()
    misshapen = dict[str, str]()
    for leaf, parts in tensor_shapes(model).items():
        wanted.update(parts)
        for name, shape in parts.items():
            if name not in tensors:
                continue
            if tensors[name].shape != shape:
                misshapen[name] = f"{name}: the checkpoint has {tensors[name].shape}, the model expects {shape}"
            elif _kind(tensors[name].dtype) != _kind_of(specs[leaf].dtype):
                misshapen[name] = f"{name}: the checkpoint has dtype {tensors[name].dtype}, the model expects {specs[leaf].dtype}"
    for head, embedding in _TIED.items():
        if head in tensors and head not in wanted and embedding in wanted and tensors[head].shape != wanted[embedding]:
            misshapen[head] = f"{head}: the checkpoint has {tensors[head].shape}, the tied embedding is {wanted[embedding]}"
    missing = [name for name in wanted if name not in tensors]
    ignore = [*ignore, *_further_tokens(model)]
    allowed = {head for head, embedding in _TIED.items() if embedding in wanted}
    extra = [
        name for name in tensors
        if name not in wanted and name not in allowed and not _HARMLESS.search(name) and not any(p.fullmatch(name) for p in ignore)
    ]  # fmt: skip
    if not (missing or extra or misshapen):
        return
    near = _near(missing[:_SHOWN], {name: tensors[name].shape for name in extra}, wanted)
    report = {
        "missing": [f"{name} {wanted[name]}" + (f"; renamed to {near[name]!r}?" if name in near else "") for name in missing],
        "extra, unknown to the model": [f"{name} {tensors[name].shape}" for name in extra],
        "misshapen": list(misshapen.values()),
    }
    lines = [f"the checkpoint {folder} does not fit the model:"]
    lines += [f"  {len(rows)} {what}: {_listed(rows)}" for what, rows in report.items() if rows]
    if "quantization_config" in config:
        lines.append(f"  {folder / CONFIG} says the weights are quantised; only plain weights are read: dequantise them first")
    lines.append("  was the model made from this folder's config.json? Extras that do not matter can be named in ignore=[...]")
    raise CheckpointError("\n".join(lines), missing=missing, extra=extra, misshapen=list(misshapen))


def _further_tokens(model: Described) -> list[re.Pattern[str]]:
    """The names of modules that predict further tokens (DeepSeek-V3's ``num_nextn_predict_layers``): they stand after the last layer,
    and may be in a checkpoint of a model that has none."""
    layers, extra = (model.hf_config.get(name) or 0 for name in ("num_hidden_layers", "num_nextn_predict_layers"))
    return [re.compile(rf"model\.layers\.{layers + i}\..*") for i in range(extra)]


def _check_tied(model: Described, tensors: Mapping[str, _Tensor], blocks: Mapping[Path, Sequence[Range]]) -> None:
    """A head written beside the embedding it is tied to must equal it; compared on the block of the embedding."""
    of_name = {source.name: leaf for leaf, source in model.sources.items() if isinstance(source, Named)}
    for head, embedding in _TIED.items():
        if head in tensors and head not in of_name and embedding in of_name:
            block = blocks[of_name[embedding]]
            if not torch.equal(tensors[head].read(block), tensors[embedding].read(block)):
                raise CheckpointError(
                    f"{tensors[head].file}: {head} differs from {embedding}, but the model ties them: "
                    "set tie_word_embeddings to false in config.json, or remove the tensor",
                    extra=[head],
                )


def _kind(dtype: str) -> str:
    """The kind of a safetensors dtype: ``"F"`` floating, ``"I"`` integer, ``"B"`` bool."""
    return "B" if dtype == "BOOL" else "F" if dtype.startswith(("F", "BF")) else "I" if dtype.startswith(("I", "U")) else dtype


def _kind_of(dtype: torch.dtype) -> str:
    return "F" if dtype.is_floating_point else "B" if dtype == torch.bool else "I"


def _near(missing: Sequence[str], extra: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """For missing names, the extra tensor of the same shape and the same numbers in its name that reads most like it."""
    alike = dict[tuple[Any, ...], list[str]]()
    for name, shape in extra.items():
        alike.setdefault((shape, *re.findall(r"\d+", name)), []).append(name)
    found = dict[str, str]()
    for name in missing:
        best = difflib.get_close_matches(name, alike.get((wanted[name], *re.findall(r"\d+", name)), []), n=1)
        found.update({name: best[0]} if best else {})
    return found


def _listed(rows: Sequence[str]) -> str:
    more = [f"... and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return "".join(f"\n    {row}" for row in [*rows[:_SHOWN], *more])
