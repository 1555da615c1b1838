"""Saving the whole state of training: a folder beside its place, written by all ranks, renamed when it is complete.

Between the moments at which ranks meet, each works alone: `begin` (is this possible? the first rank makes the hidden folder),
`write_part` (this rank's file), `finish` (the first rank: the index, the rename, ``latest``). `save_state` calls them one after
another; `xtf.checkpoint.background.StateSaver` has a thread for the last two.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, TypeVar

from xtf.checkpoint.folder import CONFIG, CheckpointError
from xtf.checkpoint.kept import point_latest, remove_leftovers
from xtf.checkpoint.shard_file import Block, Written, crc32_of, write_shard
from xtf.checkpoint.together import together
from xtf.checkpoint.training import check_step, config_of, everyone_of, own_blocks
from xtf.checkpoint.training_index import STATE, Leaf, StateIndex
from xtf.checkpoint.writing import check_replaceable, tokenizer_files
from xtf.files import drop_folder, folder_beside, naming, put_in_place
from xtf.state import State
from xtf.step import TrainStep

T = TypeVar("T")

Part = list[int] | None
"""Bytes and checksum of a rank's file; ``None`` for a rank that had nothing to write."""


@dataclass(frozen=True)
class Save:
    """One save, as one rank sees it.

    Args:
        target: the folder to be.
        beside: the hidden folder that is written.
        rank, ranks: this rank, and how many there are.
        leaves: every leaf of the state, whole.
        records: the classes of the optimizer's named tuples.
        at: steps so far.
        extra: what is kept with it.
        config: the ``config.json``.
        tokenizer: files to be copied.
        update_latest: whether ``latest`` is made to name it.
    """

    target: FilePath
    beside: FilePath
    rank: int
    ranks: int
    leaves: Mapping[str, Leaf]
    records: Mapping[str, str]
    at: int
    extra: Mapping[str, Any]
    config: Mapping[str, Any]
    tokenizer: Sequence[FilePath]
    update_latest: bool

    @property
    def failed(self) -> str:
        """The beginning of the error on ranks where nothing failed."""
        return failed(self.target)

    def drop(self) -> None:
        """The first rank: remove what was written. What stood at the target still stands there."""
        drop_folder(self.beside, self.target)


class Unseen(CheckpointError):
    """The folder of the first rank is not there: no shared file system, or another rank has failed and it is gone."""


def failed(target: FilePath) -> str:
    return f"the training checkpoint {target} was not written"


def shard_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


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
    `xtf.StateSaver` does the same while training goes on.

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
    everyone = everyone_of(step)
    save, blocks = begin(step, state, path, list, extra=extra, tokenizer_from=tokenizer_from, update_latest=update_latest)
    try:
        _, parts = together(everyone, step.device, save.failed, lambda: (None, write_part(save, blocks)))
        together(everyone, step.device, save.failed, lambda: (None if save.rank else finish(save, parts), None))
    except BaseException:
        if not save.rank:
            save.drop()
        raise


def begin(
    step: TrainStep,
    state: State,
    path: str | os.PathLike[str],
    take: Callable[[list[Block]], T],
    *,
    extra: Mapping[str, Any] | None,
    tokenizer_from: str | os.PathLike[str] | None,
    update_latest: bool,
) -> tuple[Save, T]:
    """Agree on a save that all ranks can begin with; ranks meet here.

    Args:
        take: what is done with this rank's blocks; an error of it is one of the save.

    Returns:
        The save, and what ``take`` gave.
    """
    check_step("saving a state", step)
    given: list[tuple[str, Any, Any, str]] = [
        ("state", state, State, "the State that step.init or the step gives"),
        ("path", path, (str, os.PathLike), "a path"),
        ("extra", extra or {}, Mapping, "a dict of JSON values"),
    ]
    for name, value, kind, wanted in given:
        if not isinstance(value, kind):
            raise ValueError(f"saving a state: {name} is a {type(value).__name__}, expected {wanted}")
    everyone, target, kept = everyone_of(step), FilePath(os.path.realpath(path)), dict(extra or {})
    rank, ranks = (0, 1) if everyone is None else (everyone.index, everyone.size)
    made: list[FilePath] = []

    def agree() -> tuple[tuple[T, Save], list[str]]:
        own = own_blocks(step, state)
        _check_extra(kept)
        tokenizer, config = tokenizer_files(tokenizer_from) if not rank else [], config_of(step)
        if not rank:
            lost = (target / shard_name(0)).exists() and not (target / STATE).exists()  # one whose index is lost may be replaced too
            check_replaceable(target, "training checkpoint", shard_name(0) if lost else STATE, lambda name: name.startswith("rank-"))
        taken = take(own.blocks)
        if not rank:
            try:
                made.append(folder_beside(target))
            except OSError as error:
                raise naming(error, target) from error
        beside = made[0] if made else target
        at = int(state.step)
        save = Save(target, beside, rank, ranks, own.leaves, own.records, at, kept, config, tokenizer, update_latest)
        return (taken, save), [beside.name, str(target)]

    try:
        (taken, save), told = together(everyone, step.device, failed(target), agree)
        names, targets = zip(*told, strict=True)
        if len(set(targets)) > 1:
            raise ValueError(f"ranks are to save to different paths: {sorted(set(targets))[:3]}; give all of them the same")
    except BaseException:
        for beside in made:
            drop_folder(beside, target)
        raise
    return replace(save, beside=target.with_name(names[0])), taken


def write_part(save: Save, blocks: Sequence[Block], between: Callable[[], None] = lambda: None) -> Part:
    """Write this rank's blocks. No rank meets another.

    Args:
        save: what is written.
        blocks: this rank's.
        between: called before each block; what it raises ends the writing.

    Raises:
        OSError: naming the target, if it cannot be written.
        Unseen: if the first rank's folder is not there.
    """
    try:
        if not save.rank:
            remove_leftovers(save.target.parent, save.target.name, but=save.beside)
        if not blocks:
            return None
        written = write_shard(save.beside / shard_name(save.rank), blocks, between)
        return [written.bytes, written.crc32]
    except FileNotFoundError:
        raise Unseen(f"{save.target.parent} of the first rank is not seen here: save to a file system that all ranks share") from None
    except OSError as error:
        raise naming(error, save.target) from error


def finish(save: Save, parts: Sequence[Part]) -> None:
    """The first rank, when all parts are there: write what else belongs to a checkpoint, and put it in place.

    Raises:
        OSError: naming the target, if it cannot be written.
    """
    beside = save.beside
    try:
        (beside / CONFIG).write_text(json.dumps(save.config, indent=2) + "\n", encoding="utf-8")
        for file in save.tokenizer:
            shutil.copyfile(file, beside / file.name)
        others = {file.name: crc32_of(file) for file in sorted(beside.iterdir()) if file.suffix != ".safetensors"}
        shards = {shard_name(rank): Written(*part) for rank, part in enumerate(parts) if part is not None}
        StateIndex(beside, save.at, save.extra, save.leaves, save.records, shards, others).write()
        put_in_place(beside, save.target)
    except OSError as error:
        raise naming(error, save.target) from error
    shutil.rmtree(beside, ignore_errors=True)  # what was replaced
    if save.update_latest:
        point_latest(save.target)


def _check_extra(extra: Mapping[str, Any]) -> None:
    try:
        same = json.loads(json.dumps(extra)) == extra
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra cannot be written as JSON ({error}): give dicts of strings, lists, numbers, strings") from None
    if not same:
        raise ValueError(f"extra would be another after reading: {extra!r} is not made of dicts of strings, lists, numbers and strings")
