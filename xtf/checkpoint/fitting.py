"""Which of a checkpoint's tensors a model's leaves are: the prefix, the layout, and one error for all that does not fit."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple, cast

import torch

from xtf.checkpoint.folder import CONFIG, CheckpointError, Described, Resolved, leaf_specs, tensor_shapes
from xtf.checkpoint.quantised import Stored, refused
from xtf.checkpoint_map import Source, layouts, names, resolve
from xtf.tree import Path

_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # derived from the config, written by old versions of transformers
TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # a tied head may be written beside the embedding it equals
_SHOWN = 100  # names of each kind in one message


class Prefix(NamedTuple):
    """How a checkpoint names a language model that is part of a larger model: names that begin with ``old`` begin with ``new``."""

    old: str = ""
    new: str = ""

    def rename(self, name: str) -> str:
        """The checkpoint's name for a tensor.

        Example:
            >>> Prefix("model.", "model.language_model.").rename("model.norm.weight")
            'model.language_model.norm.weight'
        """
        return self.new + name.removeprefix(self.old) if name.startswith(self.old) else name


PREFIXES = (Prefix(), Prefix("", "language_model."), Prefix("model.", "model.language_model."))


def fit(model: Described, held: Collection[str]) -> tuple[Prefix, Resolved]:
    """The prefix of which most names are held, and the model with its sources in the layouts and under the names of the checkpoint."""
    every = [name for source in model.sources.values() for layout in layouts(source) for name in names(layout)]
    prefix = max(PREFIXES, key=lambda prefix: sum(prefix.rename(name) in held for name in every))
    sources = {path: resolve(source, held, prefix.rename) for path, source in model.sources.items()}
    return prefix, Resolved(model.specs, sources, model.hf_config)


def check(
    model: Described,
    fitted: Described,
    prefix: Prefix,
    folder: FilePath,
    tensors: Mapping[str, Stored],
    wrong: Mapping[str, str],
    config: Mapping[str, Any],
    ignore: Sequence[re.Pattern[str]],
) -> None:
    """Raise one error that names everything that is missing, unknown, or of another shape or kind.

    Args:
        model: what is to be read.
        fitted, prefix: what `fit` gave for it.
        folder: the checkpoint, for the message.
        tensors: what it holds.
        wrong: quantised tensors that cannot be read, and why.
        config: its ``config.json``.
        ignore: names that may be in the checkpoint without being used.
    """
    specs, parts_of = leaf_specs(model), tensor_shapes(fitted)
    wanted = {name: shape for parts in parts_of.values() for name, shape in parts.items()}
    tied = {prefix.rename(head): prefix.rename(embedding) for head, embedding in TIED.items()}
    misshapen = dict[str, str]()
    for leaf, parts in parts_of.items():
        for name, shape in parts.items():
            if name not in tensors:
                continue
            if name in wrong and torch.float8_e4m3fn != specs[leaf].dtype:
                misshapen[name] = wrong[name]
            elif tensors[name].shape != shape:
                misshapen[name] = f"{name}: the checkpoint has {tensors[name].shape}, the model expects {shape}"
            elif _kind(tensors[name].dtype) != _kind_of(specs[leaf].dtype):
                misshapen[name] = f"{name}: the checkpoint has dtype {tensors[name].dtype}, the model expects {specs[leaf].dtype}"
    for head, embedding in tied.items():
        if head in tensors and head not in wanted and embedding in wanted and tensors[head].shape != wanted[embedding]:
            misshapen[head] = f"{head}: the checkpoint has {tensors[head].shape}, the tied embedding is {wanted[embedding]}"
    missing = [name for name in wanted if name not in tensors]
    allowed = {head for head, embedding in tied.items() if embedding in wanted}
    passed_over = (_HARMLESS, *_beyond(config, prefix))
    extra = [
        name for name in tensors
        if name not in wanted and name not in allowed and name.startswith(prefix.new) and 0 not in tensors[name].shape
        and not any(p.search(name) for p in passed_over) and not any(p.fullmatch(name) for p in ignore)
    ]  # fmt: skip
    if not (missing or extra or misshapen):
        return
    absent = {leaf: parts for leaf, parts in parts_of.items() if not any(name in tensors for name in parts)}
    layout_rows = dict[Path, str]()
    for leaf in [leaf for leaf in absent if len(layouts(model.sources[leaf])) > 1]:
        layout_rows[leaf] = _no_layout(leaf, model.sources[leaf], prefix, extra if len(layout_rows) < _SHOWN else ())
    told = {name for leaf in layout_rows for name in absent[leaf]}
    rest = [name for name in missing if name not in told]
    near = _near(rest[:_SHOWN], {name: tensors[name].shape for name in extra}, wanted)
    rows = [f"{name} {wanted[name]}" + (f"; renamed to {near[name]!r}?" if name in near else "") for name in rest]
    report = {
        "missing": [*layout_rows.values(), *rows],
        "extra, unknown to the model": [f"{name} {tensors[name].shape}" for name in extra],
        "misshapen": list(misshapen.values()),
    }
    lines = [f"the checkpoint {folder} does not fit the model:"]
    lines += [f"  {len(rows)} {what}: {listed(rows)}" for what, rows in report.items() if rows]
    if "quantization_config" in config:
        why = refused(config) or "quantization_config says the weights are quantised"
        lines.append(f"  {folder / CONFIG}: {why}")
    lines.append("  was the model made from this folder's config.json? Extras that do not matter can be named in ignore=[...]")
    raise CheckpointError("\n".join(lines), missing=missing, extra=extra, misshapen=list(misshapen))


def listed(rows: Sequence[str]) -> str:
    """Rows, each on its own line, the first `_SHOWN` of them."""
    more = [f"... and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return "".join(f"\n    {row}" for row in [*rows[:_SHOWN], *more])


def _beyond(config: Mapping[str, Any], prefix: Prefix) -> list[re.Pattern[str]]:
    """Layers after the last that only predict further tokens (DeepSeek-V3's ``num_nextn_predict_layers``): not part of the model."""
    inner: object = config.get("text_config")
    own = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else config
    last, more = own.get("num_hidden_layers"), own.get("num_nextn_predict_layers")
    if not isinstance(last, int) or not isinstance(more, int):
        return []
    return [re.compile(rf"^{re.escape(prefix.rename(f'model.layers.{i}.'))}") for i in range(last, last + more)]


def _no_layout(leaf: Path, source: Source, prefix: Prefix, extra: Sequence[str]) -> str:
    """What was looked for where no layout of a leaf is there at all, and which names are near."""
    looked_for, near = list[str](), Counter[str]()
    for layout in layouts(source):
        found = [prefix.rename(name) for name in names(layout)]
        looked_for.append(found[0] if len(found) == 1 else f"{found[0]} to {found[-1]} ({len(found)} tensors)")
        near.update(_nearest(found[0], extra))
    names_near = f"; near names: {', '.join(near)}" if near else "; no name is near"
    return f"the leaf {leaf} in any layout, looked for {', or '.join(looked_for)}{names_near}"


def _nearest(name: str, extra: Sequence[str]) -> list[str]:
    """Of the names that share most leading parts with this one, those that read most like it."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        start = ".".join(parts[:count]) + "."
        alike = [other for other in extra if other.startswith(start)][:_SHOWN]
        if alike:
            return difflib.get_close_matches(name, alike, n=2, cutoff=0)
    return []


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
