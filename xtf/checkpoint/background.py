"""Saving while training goes on: a snapshot, and a thread of each rank that takes and writes it.

The threads take part in no collective, which would race with those of training. They meet through the folder they write: each rank
leaves a small record beside its file (size and checksum, or what went wrong), and the first rank's thread waits for all of them before
it puts the folder in place. Ranks learn how it ended in `StateSaver.wait`, which the main threads call together.

The way is that of Mohan et al. 2021, "CheckFreq": training never waits for the disk, and for copies only before it overwrites.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path as FilePath
from types import TracebackType
from typing import Any

from torch import Tensor

from xtf.checkpoint.folder import CheckpointError
from xtf.checkpoint.saving import Part, Save, Unseen, begin, finish, shard_name, write_part
from xtf.checkpoint.snapshot import Snapshot
from xtf.checkpoint.together import together
from xtf.checkpoint.training import check_step, everyone_of
from xtf.collectives.process_group import CollectiveError
from xtf.state import State
from xtf.step import TrainStep

GRACE, LOST = 30.0, 5.0
"""Seconds that a save under way is given to end when the program ends with an exception; where a rank was lost, less: its part may never
come, and torchrun waits for the others."""


class StateSaver:
    """`xtf.save_state` while training goes on. Every rank makes one and calls its methods together.

    Where the step does not donate, states are never overwritten: nothing is copied, and the state stays in memory until it is written.
    Where it donates, or the state lies on an accelerator, what this rank writes is copied to host memory that is kept for the next save.
    This goes on while the next step computes; its update waits for the end of it. There is one save at a time: the next waits for it.

    As a context manager it waits in the end. Where the block ends with an exception, ranks may not meet any more: what is under way
    is given `GRACE` seconds to be finished (`LOST` where a rank was lost), else it is dropped (after a ``KeyboardInterrupt`` at once);
    what the last save left complete stays.

    Args:
        step: the step whose states are saved: the one that trains.
        timeout: seconds the first rank waits for the files of the others when its own is written.

    Raises:
        ValueError: for a ``timeout`` that is no positive number.

    Example:
        >>> import tempfile, xtf
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> folder, state = FilePath(tempfile.mkdtemp()), step.init(0)
        >>> with StateSaver(step) as saver:
        ...     saver.save(state, folder / "step-0", extra={"at": 0})  # returns at once
        >>> xtf.load_state(step, folder / "step-0")[1]
        {'at': 0}
    """

    def __init__(self, step: TrainStep, *, timeout: float = 600.0) -> None:
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < float("inf"):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"StateSaver(timeout={timeout!r}): expected a positive number of seconds, as 600")
        check_step("StateSaver", step)
        self._step, self._timeout = step, float(timeout)
        self._everyone, self._buffers = everyone_of(step), dict[str, Tensor]()
        self._work: _Work | None = None
        self._snapshot: Snapshot | None = None
        self._waited = 0.0
        self._unheard: Callable[[], object] = lambda: None

    @property
    def held(self) -> int:
        """Bytes of host memory that are kept for copies."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def waited(self) -> float:
        """Seconds for which updates waited for copies, so far."""
        return self._waited + (0.0 if self._snapshot is None else self._snapshot.waited)

    def save(
        self,
        state: State,
        path: str | os.PathLike[str],
        *,
        extra: Mapping[str, Any] | None = None,
        tokenizer_from: str | os.PathLike[str] | None = None,
        update_latest: bool = True,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Begin to save a state as it is now; see `xtf.save_state` for the arguments and what is written.

        Args:
            state: this rank's state; the step may be called with it, and donate it, when this returns.
            path, extra, tokenizer_from, update_latest: as in `xtf.save_state`.
            then: called by the first rank's thread when the checkpoint is in place, as to `xtf.checkpoint.prune` older ones. It must
                not meet other ranks; an error of it is one of the save.

        Raises:
            Exception: what `wait` raises of the save before; this one is not begun then.
            CheckpointError, ValueError, OSError: as `xtf.save_state`, for what is known before anything is written.
        """
        if then is not None and not callable(then):
            raise ValueError(f"StateSaver.save(then={then!r}): expected a function without arguments")
        self.wait()
        donate = self._step.compilation.donate
        save, snapshot = begin(
            self._step,
            state,
            path,
            lambda blocks: Snapshot(blocks, copy=donate, buffers=self._buffers),
            extra=extra,
            tokenizer_from=tokenizer_from,
            update_latest=update_latest,
        )
        self._waited, self._snapshot = self.waited, snapshot
        self._work = work = _Work(save, snapshot, self._timeout, then)
        self._unheard = weakref.finalize(self, work.orphaned).detach
        try:
            work.thread.start()
        except RuntimeError as error:  # no thread is left: as any failure, it is raised when ranks meet
            work.fail(error)
            return
        if donate:
            state.hold(snapshot.before_overwriting)

    def done(self) -> bool:
        """Whether nothing is under way: this rank's file is written, and on the first rank the whole checkpoint. Meets no other rank."""
        return self._work is None or self._work.over.is_set()

    def wait(self) -> None:
        """Wait until what is under way is in place. Every rank calls it; a failure of one rank is raised on all, once.

        Raises:
            CheckpointError: if another rank failed, or some did not come within the time-out; it names them and says why.
            OSError: on a rank that could not write.
        """
        work, self._work = self._work, None
        if work is None:
            return
        self._unheard()

        def part() -> tuple[None, list[Any] | None]:
            if not work.written.wait(self._timeout + GRACE):
                raise CheckpointError(f"{work.save.target}: this rank's file was not written within {self._timeout + GRACE:g} s")
            error = work.part_error
            return None, error and [isinstance(error, Unseen | Dropped), f"{type(error).__name__}: {error}"]

        def whole() -> tuple[None, None]:
            if not work.save.rank:
                work.over.wait()  # it has a time-out
                if work.error is not None:
                    raise work.error
            return None, None

        try:
            _, said = together(self._everyone, self._step.device, work.save.failed, part)
            _raise_first(work, said)
            together(self._everyone, self._step.device, work.save.failed, whole)
        except BaseException:
            work.end(0.0)
            raise

    def __enter__(self) -> StateSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()
        elif self._work is not None:
            work, self._work = self._work, None
            self._unheard()
            work.end(0.0 if isinstance(error, KeyboardInterrupt) else LOST if isinstance(error, CollectiveError) else GRACE)
            failure = work.part_error or work.error
            if failure is not None:
                error.add_note(f"{work.save.failed} either: {type(failure).__name__}: {failure}")


def _raise_first(work: _Work, said: Sequence[list[Any] | None]) -> None:
    """Raise if a rank could not write its file: on that rank what happened, on others which rank and what.

    Args:
        work: this rank's.
        said: of each rank that failed, whether that follows from the failure of another (then it is told only if there is no other),
            and the error.
    """
    errors = {rank: answer for rank, answer in enumerate(said) if answer is not None}
    first = {rank: text for rank, (follows, text) in errors.items() if not follows} or {rank: text for rank, (_, text) in errors.items()}
    if work.save.rank in first:
        assert work.part_error is not None
        raise work.part_error
    if first:
        told = "; ".join(f"rank {rank} failed: {text}" for rank, text in list(first.items())[:3])
        raise CheckpointError(f"{work.save.failed}: {told}" + (f"; and {len(first) - 3} more" if len(first) > 3 else ""))


class Dropped(Exception):
    """A save that is not to be finished."""


class _Work:
    """What one rank's thread does for one save.

    Attributes:
        written: set when this rank's file is written, or failed.
        part_error: why it failed.
        error: why the whole failed; the first rank knows.
        over: set when the thread is done. Nobody joins it: a signal that interrupts ``Thread.join`` may leave the thread marked as ended.
    """

    def __init__(self, save: Save, snapshot: Snapshot, timeout: float, then: Callable[[], object] | None) -> None:
        self.save, self.timeout, self.then = save, timeout, then
        self.written, self.part_error, self.error = threading.Event(), None, None
        self.part_error: BaseException | None
        self.error: BaseException | None
        self._snapshot = snapshot
        self._dropped, self._until = threading.Event(), float("inf")
        self.over, self._lock, self._alone = threading.Event(), threading.RLock(), False
        # Not a daemon: a program that ends lets it finish.
        self.thread = threading.Thread(target=self._run, name=f"saving {save.target.name}")

    def _run(self) -> None:
        part: Part = None
        try:
            part = self._write()
        except BaseException as error:
            self.part_error = error
        self._snapshot.drop()
        if self.save.rank:
            self._tell(part)
        self.written.set()
        if not self.save.rank:
            try:
                if self.part_error is not None:
                    raise self.part_error
                finish(self.save, self._others(part))
            except BaseException as error:
                self.save.drop()
                self.error = error
            else:
                self._follow()
        with self._lock:
            self.over.set()
            alone = self._alone
        if alone:
            self._say()

    def _write(self) -> Part:
        part = write_part(self.save, self._snapshot.fill(), self._go_on)
        self._snapshot.check()
        return part

    def _go_on(self) -> None:
        if self._dropped.is_set():
            raise Dropped("it was dropped, since the program was interrupted or another rank failed")

    def _tell(self, part: Part) -> None:
        """Leave the record of this rank. Where even that fails, the first rank hears of it when ranks meet."""
        said = {"part": part}
        if self.part_error is not None:
            said = {"error": f"{type(self.part_error).__name__}: {self.part_error}"}
            with suppress(OSError):  # room for the record
                os.unlink(self.save.beside / shard_name(self.save.rank))
        file = _record(self.save, self.save.rank)
        with suppress(OSError):
            file.with_suffix(".part").write_text(json.dumps(said), encoding="utf-8")
            os.rename(file.with_suffix(".part"), file)

    def _others(self, own: Part) -> list[Part]:
        """What all ranks wrote, when all have."""
        parts: dict[int, Part] = {0: own}
        deadline, pause = time.monotonic() + self.timeout, 0.001
        while True:
            self._go_on()
            for rank in range(self.save.ranks):
                if rank not in parts:
                    file = _record(self.save, rank)
                    try:
                        said = json.loads(file.read_text(encoding="utf-8"))
                    except FileNotFoundError:
                        continue
                    if "error" in said:
                        raise CheckpointError(f"{self.save.failed}: rank {rank} failed: {said['error']}")
                    parts[rank] = said["part"]
                    file.unlink()
            if len(parts) == self.save.ranks:
                return [parts[rank] for rank in range(self.save.ranks)]
            if not threading.main_thread().is_alive():  # the interpreter ends
                self._until = min(self._until, time.monotonic() + GRACE)
            if time.monotonic() > min(deadline, self._until):
                missing = [rank for rank in range(self.save.ranks) if rank not in parts]
                raise CheckpointError(
                    f"{self.save.failed}: the files of ranks {missing[:10]}{'...' if len(missing) > 10 else ''} ({len(missing)} of "
                    f"{self.save.ranks}) were not there {self.timeout:g} s after that of the first rank: did they die, is their disk slow "
                    "(StateSaver(timeout=...)), do they see another file system?"
                )
            self._dropped.wait(pause)
            pause = min(2 * pause, 0.1)

    def _follow(self) -> None:
        if self.then is not None:
            try:
                self.then()
            except BaseException as error:
                error.add_note(f"{self.save.target} is complete; this came after")
                self.error = error

    def end(self, grace: float) -> None:
        """Finish within ``grace`` seconds, or drop it."""
        self._until = time.monotonic() + grace
        try:
            self.over.wait(grace)
        finally:  # a signal ends the waiting
            self._dropped.set()
            self.over.wait(GRACE)

    def fail(self, error: BaseException) -> None:
        """End before anything was written."""
        self.part_error = error
        if not self.save.rank:
            self.save.drop()
        self._snapshot.drop()
        self.written.set()
        self.over.set()

    def orphaned(self) -> None:
        """Nobody will wait for it any more: an error is printed."""
        with self._lock:
            self._alone, over = True, self.over.is_set()
        if over:
            self._say()

    def _say(self) -> None:
        error = self.part_error or self.error
        if error is not None:
            print(f"xtf: {self.save.failed}: {type(error).__name__}: {error}", file=sys.stderr)


def _record(save: Save, rank: int) -> FilePath:
    return save.beside / f"rank-{rank:05}.json"
