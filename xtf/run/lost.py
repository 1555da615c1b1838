"""Ranks that died or hang: the others find out which, say so once, and end, so that torchrun starts all of them again.

Nothing is written while all is well: a thread of each rank looks once a second whether some rank has announced that its collective failed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from xtf.collectives.process_group import CollectiveError, set_timeout, store
from xtf.mesh import Mesh
from xtf.step import TrainStep

POLL, GRACE, LEFT = 1.0, 5.0, 10.0
"""Seconds between two looks; that ranks have to answer when one has announced a failure; and that a rank then has left to end by itself."""

LOST = 75
"""The exit code: EX_TEMPFAIL of sysexits.h, try again."""

_KEYS = "xtf/lost"
_GONE = re.compile(r"connection|broken pipe|time-?d? ?-?out|socket|reset by peer|remote process|abort", re.IGNORECASE)


class RanksLost(RuntimeError):
    """Some rank did not come to a collective. One rank raises it with a message, the others without."""

    exit_code = LOST


class Place(NamedTuple):
    """Where a rank is: in words, and whether that is a collective that it waits in."""

    at: str
    waits: bool


@contextmanager
def watched(mesh: Mesh) -> Generator[None]:
    """Within this block a collective that fails because a rank is gone, or did not come in time, raises `RanksLost`.

    Which rank is found out then: every rank whose process runs answers through the store of torch.distributed, and says where it is. A rank
    that hangs answers too, by the thread that watches; `LEFT` seconds later its process is ended. So is that of a rank whose exit hangs.

    Args:
        mesh: of real ranks; of one rank, and of any other kind, nothing is done.

    Raises:
        RanksLost: as said.
    """
    if mesh.size == 1 or not dist.is_initialized():
        yield
        return
    watch = _Watch(mesh.rank, mesh.size)
    watch.thread.start()
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, CollectiveError | dist.DistBackendError) and _GONE.search(str(error))):
            watch.stop()
            raise
        raise RanksLost(watch.explain(error)) from error  # the thread goes on: it ends a process that does not end by itself
    except BaseException:
        watch.stop()
        raise
    watch.stop()


@contextmanager
def limited(step: TrainStep, mesh: Mesh, seconds: float) -> Generator[None]:
    """Within this block a collective waits that long for ranks that do not come. Elsewhere, as where the first rank tokenises data, torch's
    own time-out holds: 30 minutes on gloo, 10 on NCCL.

    Args:
        step: its axes are those of the mesh that are used.
        mesh: the ranks.
        seconds: above 0.
    """
    if mesh.size == 1 or not dist.is_initialized():
        yield
        return
    axes = [mesh.join(*mesh), *(mesh[name] for name in mesh), step.token_axis, step.row_axis]
    known = [axis for axis in axes if axis is not None]
    set_timeout(known, seconds)
    try:
        yield
    finally:
        set_timeout(known, None)


class _Watch:
    """The announcement, the answers and the thread of one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self._store, self._main = rank, size, store(), threading.main_thread().ident
        self._done = threading.Event()
        self.thread = threading.Thread(target=self._look, name="xtf watch", daemon=True)

    def stop(self) -> None:
        """All is well, or nothing to do with other ranks."""
        self._done.set()
        self.thread.join(POLL)

    def _look(self) -> None:
        try:
            while not self._done.wait(POLL):
                if self._store.check([_KEYS]):
                    self._answer(place(sys._current_frames().get(self._main or 0)))  # pyright: ignore[reportPrivateUsage]
                    break
        except RuntimeError:  # the store has gone, and with it what started this process
            return
        if not self._done.wait(LEFT):
            os._exit(LOST)

    def _answer(self, at: Place) -> None:
        if self._store.add(f"{_KEYS}/{self._rank}/answers", 1) == 1:  # of the thread and the main thread the first says where this rank is
            self._store.set(f"{_KEYS}/{self._rank}", json.dumps(at))

    def explain(self, error: BaseException) -> str:
        """Announce the failure, wait for answers, and say who is missing; empty if another rank says it."""
        if threading.current_thread() is threading.main_thread():  # torchrun ends the others when one has died: they have this to say first
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        at = Place(str(getattr(error, "where", "a collective")), True)
        try:
            self._answer(at)
            self._store.set(_KEYS, "1")
            answers, end = dict[int, Place](), time.monotonic() + GRACE
            while len(answers) < self._size and time.monotonic() < end:
                for rank in range(self._size):
                    if rank not in answers and self._store.check([f"{_KEYS}/{rank}"]):
                        answers[rank] = Place(*json.loads(self._store.get(f"{_KEYS}/{rank}")))
                time.sleep(0.05)
            if self._store.add(f"{_KEYS}/speaker", 1) > 1:
                return ""
        except RuntimeError as gone:
            return f"rank {self._rank} waited in {at.at}, which failed ({_line(error)}); who is missing is not known: {_line(gone)}"
        return told(at, answers, self._size, _line(error))


def told(at: Place, answers: Mapping[int, Place], size: int, error: str) -> str:
    """Who did not come, in words.

    Args:
        at: what the rank that speaks waited in.
        answers: where each rank is that answered.
        size: how many ranks there are.
        error: what torch said.

    Example:
        >>> told(Place("all_reduce 'agree'", True), {0: Place("all_reduce 'agree'", True)}, 2, "Connection closed").split(";")[0]
        "rank 1 of 2 did not come to all_reduce 'agree' and does not answer: its process has ended or was stopped, or cannot be reached"
    """
    silent = [rank for rank in range(size) if rank not in answers]
    astray = {rank: place for rank, place in sorted(answers.items()) if not place.waits}
    if silent:
        answer = (
            "does not answer: its process has ended or was stopped"
            if len(silent) == 1
            else "do not answer: their processes have ended or were stopped"
        )
        what = f"{_ranks(silent)} of {size} did not come to {at.at} and {answer}, or cannot be reached"
    elif astray:
        places = "; ".join(f"rank {rank} is {place.at}" for rank, place in astray.items())
        what = f"{_ranks(list(astray))} of {size} did not come to {at.at} in time: {places}"
    elif len({place.at for place in answers.values()}) > 1:
        places = "; ".join(f"rank {rank} in {place.at}" for rank, place in sorted(answers.items()))
        what = f"ranks wait for each other in different collectives: {places}"
    else:
        what = f"the connection of ranks that all run broke in {at.at} ({error})"
    return (
        f"{what}; all ranks end. --resume goes on from the last saved state (torchrun --max-restarts N starts the command again by itself)"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def place(frame: FrameType | None) -> Place:
    """Where a thread is, by its innermost frame."""
    inner, outer = frame, frame
    while outer is not None:
        call: Any = outer.f_locals.get("call")
        if outer.f_code.co_qualname.startswith("ProcessGroupAxis.launch") and call is not None:
            return Place(f"{call} on the axis {outer.f_locals['self'].name!r}", True)
        outer = outer.f_back
    if inner is None:
        return Place("at its end", False)
    return Place(f"at {inner.f_code.co_filename}, line {inner.f_lineno}, in {inner.f_code.co_qualname}", False)
