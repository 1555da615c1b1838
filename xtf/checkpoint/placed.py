"""Checkpoints of a placed step: each rank reads its own blocks; leaves are gathered one by one and one rank writes them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from xtf import tree
from xtf.checkpoint.folder import CheckpointError, Resolved
from xtf.checkpoint.reading import load_leaves
from xtf.checkpoint.writing import check_target, save_leaves
from xtf.collectives import Axis
from xtf.placement import uncut
from xtf.state import State
from xtf.step import TrainStep
from xtf.tree import Path


def load(step: TrainStep, path: str | os.PathLike[str], *, ignore: Sequence[str] = ()) -> State:
    """A state with the parameters of a Hugging Face or a training checkpoint, a fresh optimizer state, and step 0.

    Each rank reads only the blocks it keeps, straight to the step's device, in the dtypes in which the step stores them.

    Args:
        step: the finished step; its transforms say where each leaf lives.
        path: the checkpoint folder, see `load_params`.
        ignore: regular expressions; tensors whose whole name matches one may be in the checkpoint without being used.

    Raises:
        CheckpointError: as for `load_params`.
    """
    stored = Resolved(tree.from_items(step.model.specs, step.specs), step.model.sources, step.model.hf_config)
    leaves = load_leaves(stored, path, lambda leaf: step.placements[leaf].ranges(), ignore=ignore, device=step.device)
    return step.state(step.tree_of(leaves), handed_over=True)


def save(
    step: TrainStep,
    state: State,
    path: str | os.PathLike[str],
    *,
    shard_bytes: int = 5_000_000_000,
    tokenizer_from: str | os.PathLike[str] | None = None,
) -> None:
    """Write the parameters of a state as a Hugging Face checkpoint. Every rank calls it; the first rank of the mesh writes.

    Leaves are gathered one at a time, so no rank holds more than one whole leaf. It returns on every rank when the checkpoint is
    in place, and raises on every rank if it could not be written. The optimizer's state is not in it.

    Args:
        step: the step whose state it is.
        state: this rank's state.
        path: the folder to write; see `save_leaves` for what may stand there.
        shard_bytes: bytes of tensors per file, at most; a single larger tensor has a file for itself.
        tokenizer_from: a folder from which the tokenizer's files are copied.

    Raises:
        CheckpointError: if another kind of folder stands at ``path``, ``tokenizer_from`` has no tokenizer, or, on ranks that do
            not write, if the one that writes failed.
        OSError: on the rank that writes; what stood at ``path`` before is unchanged.
    """
    axes = (*step.token_axes, *step.owned.values(), *step.sharding.axes, *step.sharding.replicate)
    everyone = axes[0].mesh.join(*axes[0].mesh) if axes else None
    writes = everyone is None or everyone.index == 0
    local, waiting = tree.items(state.params), dict.fromkeys(step.specs)

    def get_leaf(leaf: Path) -> Tensor:
        waiting.pop(leaf)
        return uncut(local[leaf], step.placements[leaf])

    error: Exception | None = None
    try:
        if writes:
            check_target(path, tokenizer_from)
    except Exception as problem:
        error = problem
    _agree(everyone, error, path, step.device)
    try:
        save_leaves(step.model, get_leaf, path, shard_bytes=shard_bytes, tokenizer_from=tokenizer_from, write=writes)
    except OSError as problem:
        error = problem
        for leaf in tuple(waiting):  # the other ranks gather to the end; what cannot be written is gathered with them
            get_leaf(leaf)
    _agree(everyone, error, path, step.device)


def _agree(everyone: Axis | None, error: Exception | None, path: str | os.PathLike[str], device: torch.device) -> None:
    """Raise on every rank if one of them failed: its own error there, a `CheckpointError` elsewhere."""
    failed = 0
    if everyone is not None:
        failed = int(everyone.start_all_reduce(torch.tensor(int(error is not None), device=device), "max", label="checkpoint").wait())
    if error is not None:
        raise error
    if failed:
        raise CheckpointError(f"the checkpoint {os.fspath(path)} was not written: the first rank failed, see its error")
