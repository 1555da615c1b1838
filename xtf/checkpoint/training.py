"""Saving and loading the whole state of training: parameters, optimizer, step, and what the caller adds.

Every rank writes the blocks it holds into a file of its own, straight from its memory, and every rank of any later layout reads the
blocks it needs. In between stands only what `xtf.checkpoint.training_index` describes; nothing is gathered. The parts:

1. `own_blocks` says what this rank writes. It runs on this rank alone and copies nothing.
2. `xtf.checkpoint.shard_file.write_shard` writes it. It runs on this rank alone, on blocks on any device.
3. `xtf.checkpoint.saving` makes the folder before, and puts it in place after: `save_state` while training waits, and
   `xtf.checkpoint.background` while it goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from xtf import tree
from xtf.checkpoint.folder import CONFIG, CheckpointError, Unfit, leaf_specs, read_json
from xtf.checkpoint.kept import usable
from xtf.checkpoint.shard_file import Block
from xtf.checkpoint.together import together
from xtf.checkpoint.training_index import PARAMS, STATE, Leaf, StateIndex, read_index, report
from xtf.checkpoint.writing import DTYPES, config_json
from xtf.checkpoint_map import Range
from xtf.collectives import Axis
from xtf.placement import Placement
from xtf.state import State
from xtf.step import TrainStep


@dataclass(frozen=True)
class OwnBlocks:
    """What one rank knows of a state, and the part of it that it writes.

    Args:
        blocks: the blocks that this rank writes; together the ranks write every element once. Views of the state.
        leaves: every leaf of the state, whole.
        records: the class of each named tuple in the optimizer's state, by where it stands.
    """

    blocks: list[Block]
    leaves: dict[str, Leaf]
    records: dict[str, str]


def load_state(step: TrainStep, path: str | os.PathLike[str]) -> tuple[State, dict[str, Any]]:
    """The state that `xtf.save_state` wrote, placed as this step places it. Every rank calls it.

    Each rank reads the blocks it needs, to the nearest MiB, whatever layout wrote them. The bits are those that were saved. Sizes of
    all files are checked, and checksums (CRC-32, about 2 GB/s) of all that is read: damage by accident does not go unseen; against a
    forger it is no help. No pickle is read. A step compiled with ``donate=True`` may take the state over.

    Returns:
        The state, and ``extra`` as it was given.

    Raises:
        CheckpointError: if a file is missing or damaged; if it is of another model (fields of the config are named) or optimizer, or
            stored in other dtypes (leaves are named); or if another rank failed.
    """
    check_step("load_state", step)
    said = f"the training checkpoint {os.fspath(path)} was not loaded"
    loaded, _ = together(everyone_of(step), step.device, said, lambda: (_read(step, path), None))
    return loaded


class Newest(NamedTuple):
    """What `load_newest_state` found.

    Args:
        state: the state.
        extra: what was kept with it.
        path: the folder it was read from.
        passed: why newer ones were not used, one text for each.
    """

    state: State
    extra: dict[str, Any]
    path: FilePath
    passed: tuple[str, ...]


def load_newest_state(step: TrainStep, folder: str | os.PathLike[str]) -> Newest | None:
    """The state of the newest training checkpoint of a folder that is sound to the last byte. Every rank calls it.

    The order is that of `xtf.checkpoint.latest`: what the file ``latest`` names, then from the highest step down. One of which a file
    is missing or damaged is passed over, on all ranks if any of them finds it so.

    Returns:
        The state, and which were passed over; ``None`` where the folder has no training checkpoint.

    Raises:
        CheckpointError: if there are some and none can be used, with all reasons, or if one is sound but of another model or optimizer.
    """
    check_step("load_newest_state", step)
    everyone, folder = everyone_of(step), FilePath(folder)
    if folder.is_file() or (folder / STATE).is_file():
        what = "is a file" if folder.is_file() else "is itself a training checkpoint: give the folder that it stands in, or use load_state"
        raise CheckpointError(f"load_newest_state({str(folder)!r}): expected a folder of training checkpoints; this {what}")
    said = f"no state in {folder} was loaded"

    def look() -> tuple[None, list[list[str]]]:
        found: list[list[str]] = []
        if everyone is None or not everyone.index:
            found += (["use", path.name] for path in usable(folder, lambda reason: found.append(["pass", reason])))
        return None, found

    entries, passed = together(everyone, step.device, said, look)[1][0], list[str]()
    for kind, text in entries:
        if kind == "pass":
            passed.append(text)
            continue
        path = folder / text

        def read(path: FilePath = path) -> tuple[tuple[State, dict[str, Any]] | None, str | None]:
            try:
                return _read(step, path), None
            except Unfit:
                raise
            except (CheckpointError, OSError) as error:
                return None, f"{path.name} is passed over: {error}"

        loaded, reasons = together(everyone, step.device, said, read)
        damage = next((reason for reason in reasons if reason is not None), None)
        if loaded is not None and damage is None:
            return Newest(*loaded, path, tuple(passed))
        del loaded  # before the next one takes memory
        passed.append(str(damage))
    if not passed:
        return None
    raise CheckpointError(f"no state in {folder} can be used: {'; '.join(passed)}. Nothing was changed; remove that folder to begin anew")


def _read(step: TrainStep, path: str | os.PathLike[str]) -> tuple[State, dict[str, Any]]:
    """This rank's part of a state, and what was kept with it. No rank meets another."""
    index = read_index(path)
    index.check_files(contents=True)
    empty = _abstract(step)
    names, records = _named(empty)
    wanted, leaves = dict[str, tuple[list[Range], Tensor]](), dict[str, Leaf]()
    for name, leaf in zip(names, tree.leaves(empty), strict=True):
        if leaf is not None:
            ranges, leaves[name] = _ranges(step, name, leaf)
            device = step.device if leaf.is_meta else leaf.device
            wanted[name] = ranges, torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    _check_fits(step, index, leaves, records)
    index.read(wanted)
    state: State = tree.unflatten(empty, [wanted[name][1] if name in wanted else None for name in names])
    return state, dict(index.extra)


def check_step(asked: str, step: object) -> None:
    """Refuse what is no training step."""
    if not isinstance(step, TrainStep):
        raise ValueError(f"{asked} takes a step first, got a {type(step).__name__}: make one by xtf.train_step(model, optimizer)")


def own_blocks(step: TrainStep, state: State) -> OwnBlocks:
    """What this rank writes of a state: no rank meets another here, and nothing is copied.

    Raises:
        ValueError: as for `xtf.save_state`.
    """
    names, records = _named(state)
    blocks, leaves = list[Block](), dict[str, Leaf]()
    for at, (name, value) in enumerate(zip(names, tree.leaves(state), strict=True)):
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.dtype not in DTYPES:
            kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"{name} of the state is {kind}; tensors of {sorted(str(d) for d in DTYPES)} can be saved")
        ranges, leaves[name] = _ranges(step, name, value)
        if value.numel() and _writes(step, _placement(step, name, value), at):
            blocks.append(Block(name, leaves[name].shape, tuple(start for start, _ in ranges), value))
    return OwnBlocks(blocks, leaves, records)


# Where leaves live -----------------------------------------------------------------------------------------------------------------


def _placement(step: TrainStep, name: str, value: Tensor) -> Placement | None:
    """How a leaf of a state is placed; ``None`` if it is whole on every rank.

    An optimizer keeps what it knows of a parameter under the parameter's own path (its trees have the parameters' structure), in the
    shape of the rank's block: such a leaf is placed like the parameter. Others (counts, norms) are the same on all ranks.
    """
    parts = name.split(".")
    paths = [".".join(parts[i:]) for i in range(1, len(parts))]
    placement = next((step.placements[path] for path in paths if path in step.placements), None)  # the longest is the first
    if placement is None or tuple(value.shape) == placement.shape():
        return placement
    if name.startswith(PARAMS):
        raise ValueError(f"{name} has shape {tuple(value.shape)}, this rank keeps {placement.shape()}: is the state this step's?")
    if placement.splits and value.dim():
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but this rank keeps a block of shape {placement.shape()} of its parameter: it is "
            "not known how such a state is placed; keep state in the shape of the parameter, or as scalars that all ranks share"
        )
    return None


def _ranges(step: TrainStep, name: str, value: Tensor) -> tuple[list[Range], Leaf]:
    """The block of a leaf that this rank keeps, and the whole leaf."""
    placement = _placement(step, name, value)
    if placement is None:
        return [(0, n) for n in value.shape], Leaf.of(value, tuple(value.shape))
    return placement.ranges(), Leaf.of(value, placement.spec.shape)


def _writes(step: TrainStep, placement: Placement | None, at: int) -> bool:
    """Whether this rank writes its block of leaf number ``at``: one of those that hold the same, in turn."""
    everyone = everyone_of(step)
    if everyone is None:
        return True
    mesh, index, count = everyone.mesh, 0, 1
    for axis in mesh:
        if placement is None or axis not in placement.axes:
            index, count = index * mesh.sizes[axis] + mesh.coordinate[axis], count * mesh.sizes[axis]
    return index == at % count


def everyone_of(step: TrainStep) -> Axis | None:
    """All ranks of the step's mesh; ``None`` if it has none."""
    axes = (*step.token_axes, *step.owned.values(), *step.sharding.axes, *step.sharding.replicate)
    return axes[0].mesh.join(*axes[0].mesh) if axes else None


def _abstract(step: TrainStep) -> State:
    """A state of the step's structure, shapes and dtypes. What would be on the step's device is on ``meta``."""
    params = {p: torch.empty(placed.shape(), dtype=placed.spec.dtype, device="meta") for p, placed in step.placements.items()}
    return step.state(tree.from_items(step.model.specs, params), handed_over=True)


def _named(state: State) -> tuple[list[str], dict[str, str]]:
    """The name of each leaf, in order, and the class of each named tuple. Fields of named tuples go by name, unlike in `tree.paths`:
    two optimizers that keep as many trees are told apart."""
    names, records = list[str](), dict[str, str]()
    whole: Any = state  # optree's types know its own nodes only
    for accessor in optree.tree_accessors(whole, none_is_leaf=True, namespace="xtf"):
        name = ""
        for entry in accessor:
            record = isinstance(entry, optree.NamedTupleEntry)
            if record:
                records[name] = entry.type.__name__
            name += ("." if name else "") + str(entry.field if record else entry.entry)
        names.append(name)
    if len(set(names)) != len(names):
        raise ValueError(f"the state has two leaves of one name: {sorted({n for n in names if names.count(n) > 1})[:5]}")
    return names, records


# What fits -------------------------------------------------------------------------------------------------------------------------


def _check_fits(step: TrainStep, index: StateIndex, leaves: Mapping[str, Leaf], records: Mapping[str, str]) -> None:
    """Raise one error that names everything in which the checkpoint is not this step's."""
    config, own = read_json(index.folder / CONFIG, "is not complete"), json.loads(json.dumps(config_of(step)))
    fields = [
        f"{key}: {config.get(key, 'nothing')!r} in the checkpoint, {own.get(key, 'nothing')!r} in the model"
        for key in sorted(config.keys() | own.keys())
        if key != "dtype" and config.get(key) != own.get(key)
    ]
    missing, extra = [n for n in leaves if n not in index.leaves], [n for n in index.leaves if n not in leaves]
    both = [(name, index.leaves[name], leaf) for name, leaf in leaves.items() if name in index.leaves]
    misshapen = {name: f"{name}: {had} in the checkpoint, {leaf} in the step" for name, had, leaf in both if had != leaf}
    kinds = [
        f"{place}: {index.records.get(place, 'nothing')} in the checkpoint, {records.get(place, 'nothing')} in the step"
        for place in sorted(index.records.keys() | records.keys())
        if index.records.get(place) != records.get(place)
    ]
    if not (fields or missing or extra or misshapen or kinds):
        return
    hints = ["  make the step's model with xtf.models.from_hf(path) of this folder"] if fields else []
    if any(had.dtype != leaf.dtype for _, had, leaf in both):
        hints.append("  dtypes are those that parameters are stored in: see precision(params=...) and the model's dtype")
    if kinds or any(name.startswith("opt.") for name in (*missing, *extra)):
        hints.append("  the optimizer must be of the kind that was saved; xtf.load(step, path) takes the parameters alone")
    rows = {
        "fields of config.json": fields,
        "states of optimizers": kinds,
        "leaves missing in the checkpoint": missing,
        "leaves unknown to the step": extra,
        "leaves of another shape or dtype": list(misshapen.values()),
    }
    message = "\n".join([f"the training checkpoint {index.folder} is not of this step:{report(rows)}", *hints])
    raise Unfit(message, missing=missing, extra=extra, misshapen=list(misshapen))


def config_of(step: TrainStep) -> dict[str, object]:
    """The ``config.json`` of a step's model."""
    return config_json(step.model, leaf_specs(step.model))
