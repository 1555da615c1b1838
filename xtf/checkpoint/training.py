"""Saving and loading the whole state of training: parameters, optimizer, step, and what the caller adds.

Every rank writes the blocks it holds into a file of its own, straight from its memory, and every rank of any later layout reads the
blocks it needs. In between stands only what `xtf.checkpoint.training_index` describes; nothing is gathered. The parts:

1. `own_blocks` says what this rank writes. It runs on this rank alone and copies nothing.
2. `xtf.checkpoint.shard_file.write_shard` writes it. It runs on this rank alone, on blocks on any device.
3. `save_state` makes the folder before, and puts it in place after; these are the moments at which ranks meet.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import optree
import torch
from torch import Tensor

from xtf import tree
from xtf.checkpoint.folder import CONFIG, CheckpointError, leaf_specs, read_json
from xtf.checkpoint.kept import point_latest, remove_leftovers
from xtf.checkpoint.shard_file import Block, Written, crc32_of, write_shard
from xtf.checkpoint.together import together
from xtf.checkpoint.training_index import PARAMS, STATE, Leaf, StateIndex, read_index, report
from xtf.checkpoint.writing import DTYPES, check_replaceable, config_json, tokenizer_files
from xtf.checkpoint_map import Range
from xtf.collectives import Axis
from xtf.files import folder_atomically
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


def save_state(
    step: TrainStep,
    state: State,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    tokenizer_from: str | os.PathLike[str] | None = None,
    update_latest: bool = True,
) -> None:
    """Write the whole state of training into a folder. Every rank calls it; each writes its own blocks.

    What is written is what the ranks hold, in the dtypes in which they hold it: a run that loads it goes on with the same bits, on
    this layout or another one. What replicas hold is written once, the work spread over them. One block at a time is copied to the
    host. The folder also has a ``config.json``, so that `xtf.models.from_hf` reads it, and `xtf.load` takes its parameters.

    It is written beside ``path``, flushed and renamed when it is complete; then the file ``latest`` in the folder that it stands in
    is made to name it. A kill at any moment leaves the old ``latest`` and what it names, and perhaps a hidden folder that
    `xtf.checkpoint.prune` removes, as does the next save to this path. An error on one rank is an error on all, and leaves what
    stood at ``path`` before.

    Args:
        step: the step whose state it is.
        state: this rank's state.
        path: the folder to write, on a file system that all ranks share: a new one, an empty one, or a training checkpoint, which is
            replaced.
        extra: JSON values to keep with it (where in the data the run is, its seed), the same on all ranks.
        tokenizer_from: a folder from which the tokenizer's files are copied.
        update_latest: whether ``latest`` is made to name it.

    Raises:
        CheckpointError: if another kind of folder stands at ``path``, ``tokenizer_from`` has no tokenizer, or another rank failed.
        ValueError: if ``extra`` would not be the same after reading, the state is not this step's, or the optimizer's state has
            leaves that are no tensors, or that are placed like no parameter and differ on the ranks.
        OSError: on a rank that cannot write.
    """
    everyone, target = _everyone(step), FilePath(os.path.realpath(path))
    kept = dict(extra or {})
    rank = 0 if everyone is None else everyone.index
    said = f"the training checkpoint {target} was not written"

    with ExitStack() as stack:

        def begin() -> tuple[OwnBlocks, str]:
            own = own_blocks(step, state)
            _check_extra(kept)
            if rank:
                return own, ""
            check_replaceable(target, "training checkpoint", STATE, lambda name: name.startswith("rank-"))
            tokenizer = tokenizer_files(tokenizer_from)
            remove_leftovers(target.parent, target.name)
            beside = stack.enter_context(folder_atomically(target))
            (beside / CONFIG).write_text(json.dumps(_config(step), indent=2) + "\n", encoding="utf-8")
            for file in tokenizer:
                shutil.copyfile(file, beside / file.name)
            return own, beside.name

        own, names = together(everyone, step.device, said, begin)
        beside = target.with_name(names[0])

        def write() -> tuple[None, list[int] | None]:
            if not own.blocks:
                return None, None
            if not beside.is_dir():
                raise CheckpointError(f"{target.parent} of the first rank is not seen here: save to a file system that all ranks share")
            written = write_shard(beside / _shard(rank), own.blocks)
            return None, [written.bytes, written.crc32]

        _, parts = together(everyone, step.device, said, write)

        def finish() -> tuple[None, None]:
            if not rank:
                others = {file.name: crc32_of(file) for file in sorted(beside.iterdir()) if file.suffix != ".safetensors"}
                shards = {_shard(i): Written(*part) for i, part in enumerate(parts) if part is not None}
                StateIndex(beside, int(state.step), kept, own.leaves, own.records, shards, others).write()
                stack.close()  # the folder takes its place
                if update_latest:
                    point_latest(target)
            return None, None

        together(everyone, step.device, said, finish)


def load_state(step: TrainStep, path: str | os.PathLike[str]) -> tuple[State, dict[str, Any]]:
    """The state that `save_state` wrote, placed as this step places it. Every rank calls it.

    Each rank reads the blocks it needs, to the nearest MiB, whatever layout wrote them. The bits are those that were saved. Sizes of
    all files are checked, and checksums (CRC-32, about 2 GB/s) of all that is read: damage by accident does not go unseen; against a
    forger it is no help. No pickle is read. A step compiled with ``donate=True`` may take the state over.

    Returns:
        The state, and ``extra`` as it was given.

    Raises:
        CheckpointError: if a file is missing or damaged; if it is of another model (fields of the config are named) or optimizer, or
            stored in other dtypes (leaves are named); or if another rank failed.
    """
    everyone = _everyone(step)

    def read() -> tuple[tuple[State, dict[str, Any]], None]:
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
        return (state, dict(index.extra)), None

    loaded, _ = together(everyone, step.device, f"the training checkpoint {os.fspath(path)} was not loaded", read)
    return loaded


def own_blocks(step: TrainStep, state: State) -> OwnBlocks:
    """What this rank writes of a state: no rank meets another here, and nothing is copied.

    Raises:
        ValueError: as for `save_state`.
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
    everyone = _everyone(step)
    if everyone is None:
        return True
    mesh, index, count = everyone.mesh, 0, 1
    for axis in mesh:
        if placement is None or axis not in placement.axes:
            index, count = index * mesh.sizes[axis] + mesh.coordinate[axis], count * mesh.sizes[axis]
    return index == at % count


def _everyone(step: TrainStep) -> Axis | None:
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
    config, own = read_json(index.folder / CONFIG, "is not complete"), json.loads(json.dumps(_config(step)))
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
    raise CheckpointError(message, missing=missing, extra=extra, misshapen=list(misshapen))


def _config(step: TrainStep) -> dict[str, object]:
    return config_json(step.model, leaf_specs(step.model))


def _check_extra(extra: Mapping[str, Any]) -> None:
    try:
        same = json.loads(json.dumps(extra)) == extra
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra cannot be written as JSON ({error}): give dicts of strings, lists, numbers, strings") from None
    if not same:
        raise ValueError(f"extra would be another after reading: {extra!r} is not made of dicts of strings, lists, numbers and strings")


def _shard(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"
