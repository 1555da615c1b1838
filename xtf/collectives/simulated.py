"""The interpreter of simulated ranks: threads of one process that meet at each collective.

Starting a collective deposits this rank's input and returns; the last rank of the axis to arrive computes the result of every one
of them, in rank order, so results are exact, the same at every run, and nobody reads another rank's tensor after ``wait`` has
returned. Each rank allocates its own result when it starts, as real ranks do.

Mistakes are found when they happen, without time-outs. Ranks that meet in different collectives all raise. A rank that waits for
one that has finished, or for one that waits (directly or not) for it, can never go on: all raise, naming what each waits for.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from xtf.backends import backend_of
from xtf.collectives import Axis, Call

if TYPE_CHECKING:
    from xtf.mesh import Mesh

T = TypeVar("T")

_GRACE = 0.5  # seconds a rank has to reach its next collective when the run has failed, before it is interrupted


class RankEnded(BaseException):
    """Raised on a simulated rank because the run has failed elsewhere. Never leaves `run_ranks`."""


class _RankThread(threading.Thread):
    """A thread that is a rank; its type is how a simulation inside a simulation is noticed."""


class _Meeting:
    """One collective of one axis: what its ranks deposited so far, and whether it is done."""

    def __init__(self, axis: SimulatedAxis) -> None:
        self.axis = axis.name
        self.members = axis.members
        self.calls: dict[int, Call] = {}
        self.outputs: dict[int, Tensor] = {}
        self.events: list[Any] = []
        self.done = False

    def missing(self) -> list[int]:
        """World ranks that have not come yet."""
        return [rank for rank in self.members if rank not in self.calls]

    def conflict(self, rank: int, call: Call) -> int | None:
        """A rank that came with a collective that ``call`` does not fit, if there is one."""
        index = self.members.index(rank)
        for other, theirs in self.calls.items():
            place = self.members.index(other)
            if _signature(theirs) != _signature(call):
                return other
            if call.op == "all_to_all" and (call.send[place] != theirs.receive[index] or call.receive[place] != theirs.send[index]):
                return other
        return None

    def compute(self) -> None:
        """Fill every rank's output."""
        with torch.no_grad():
            _on_stream(self.events)
            _compute([self.calls[rank] for rank in self.members], [self.outputs[rank] for rank in self.members])
            self.events = _record(self.outputs[self.members[0]])


class World:
    """What the simulated ranks of one run share.

    One lock guards all of it; each rank sleeps on a condition of its own.
    """

    def __init__(self, size: int) -> None:
        lock = threading.Lock()
        self.size = size
        self._lock = lock
        self._wake = [threading.Condition(lock) for _ in range(size)]
        self._changed = threading.Condition(lock)  # a rank has ended, or the run has failed
        self._issued: Counter[tuple[int, str, tuple[int, ...]]] = Counter()  # collectives so far: by rank and axis
        self._meetings: dict[tuple[str, tuple[int, ...], int], _Meeting] = {}
        self._waits: dict[int, _Meeting] = {}  # by rank, what it sleeps for
        self._ended: set[int] = set()
        self._failed = False
        self._message: str | None = None  # where the failure is of all ranks: what each of them raises
        self._errors: list[tuple[int, BaseException]] = []  # what left the ranks' functions, in order of time

    def start(self, axis: SimulatedAxis, call: Call) -> _Meeting:
        """Deposit ``call``; compute the results if it is the last of its meeting."""
        rank = axis.mesh.rank
        output, events = call.output(axis.index), _record(call.x)
        with self._lock:
            self._raise_if_failed()
            number = self._issued[rank, axis.name, axis.members]
            self._issued[rank, axis.name, axis.members] += 1
            key = (axis.name, axis.members, number)
            meeting = self._meetings.setdefault(key, _Meeting(axis))
            other = meeting.conflict(rank, call)
            if other is not None:
                self._fail(
                    f"ranks meet in different collectives on the axis {axis.name!r}: "
                    f"rank {other} calls {meeting.calls[other]}, rank {rank} calls {call}"
                )
                self._raise_if_failed()
            meeting.calls[rank] = call
            meeting.outputs[rank] = output
            meeting.events += events
            complete = not meeting.missing()
            if complete:
                del self._meetings[key]
        if complete:
            meeting.compute()
            with self._lock:
                meeting.done = True
                meeting.calls.clear()
                for member in meeting.members:
                    if self._waits.get(member) is meeting:
                        del self._waits[member]
                        self._wake[member].notify()
        return meeting

    def wait(self, rank: int, meeting: _Meeting, call: Call) -> Tensor:
        """The result of ``rank``. ``call`` is here to keep its input alive until now."""
        with self._lock:
            if not meeting.done:
                self._raise_if_failed()
                self._waits[rank] = meeting
                self._find_deadlock()
                while not meeting.done and not self._failed:
                    self._wake[rank].wait()
                self._waits.pop(rank, None)
                if not meeting.done:
                    self._raise_if_failed()
            output = meeting.outputs.pop(rank)
        _on_stream(meeting.events)
        return output

    def end(self, rank: int, error: BaseException | None) -> None:
        """The function of ``rank`` has returned, or raised ``error``."""
        with self._lock:
            self._ended.add(rank)
            if error is not None:
                self._failed = True
                if not isinstance(error, RankEnded):
                    self._errors.append((rank, error))
                self._wake_all()
            self._find_deadlock()
            self._changed.notify()

    def oversee(self, threads: list[_RankThread]) -> tuple[int, BaseException] | None:
        """Start all threads and return when they have ended: ``None``, or the rank and the exception that came first."""
        begun: list[_RankThread] = []
        try:
            for thread in threads:
                begun.append(thread)
                thread.start()
            with self._lock:
                while len(self._ended) < self.size and not self._failed:
                    self._changed.wait()
        finally:  # also when this thread is interrupted from the keyboard
            with self._lock:
                self._failed = self._failed or len(self._ended) < self.size
                self._wake_all()
            for thread in begun:
                _end(thread)
        return self._errors[0] if self._errors else None

    def _fail(self, message: str) -> None:
        self._failed, self._message = True, message
        self._wake_all()

    def _wake_all(self) -> None:
        for condition in (*self._wake, self._changed):
            condition.notify()

    def _raise_if_failed(self) -> None:
        if self._failed:
            raise RankEnded if self._message is None else RuntimeError(self._message)

    def _find_deadlock(self) -> None:
        """Fail if some rank can never go on. Who runs can; who waits can, if all it waits for can."""
        live = set(range(self.size)) - self._ended - self._waits.keys()
        while more := {rank for rank, meeting in self._waits.items() if rank not in live and live.issuperset(meeting.missing())}:
            live |= more
        if not self._failed and self._waits.keys() - live:
            self._fail("deadlock: " + "; ".join(self._state(rank) for rank in range(self.size)))

    def _state(self, rank: int) -> str:
        if rank in self._ended:
            return f"rank {rank} has finished"
        meeting = self._waits.get(rank)
        if meeting is None:
            return f"rank {rank} runs"
        return f"rank {rank} waits on the axis {meeting.axis!r} in {meeting.calls[rank]} for ranks {meeting.missing()}"


class SimulatedAxis(Axis):
    """An axis of simulated ranks. ``members`` are their world ranks, in axis order."""

    def __init__(self, mesh: Mesh, names: tuple[str, ...], world: World) -> None:
        self.members = mesh.members(*names)
        super().__init__(mesh, names, len(self.members), self.members.index(mesh.rank))
        self._world = world

    def launch(self, call: Call) -> Callable[[], Tensor]:
        meeting = self._world.start(self, call)
        return partial(self._world.wait, self.mesh.rank, meeting, call)


def run_ranks(size: int, fn: Callable[[int, World], T]) -> list[T]:
    """Run ``fn(rank, world)`` for each rank on a thread of its own. See `xtf.mesh.simulate`."""
    if isinstance(threading.current_thread(), _RankThread):
        raise ValueError("simulate was called on a simulated rank: simulations do not nest, use the mesh of the outer one")
    world, results, grad = World(size), dict[int, T](), torch.is_grad_enabled()

    def body(rank: int) -> None:
        error: BaseException | None = None
        try:
            torch.set_num_threads(1)
            # On GPUs, backward would otherwise run on one thread for all ranks and never return from the first collective.
            with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(grad):
                results[rank] = fn(rank, world)
        except BaseException as caught:
            error = caught
        world.end(rank, error)

    threads = [_RankThread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    intra_op = torch.get_num_threads()
    try:
        failure = world.oversee(threads)
    finally:
        torch.set_num_threads(intra_op)  # the ranks' setting is theirs alone, but also what a later thread would start with
    if failure is not None:
        rank, error = failure
        error.add_note(f"raised on simulated rank {rank} of {size}")
        raise error
    return [results[rank] for rank in range(size)]


def _signature(call: Call) -> tuple[Any, ...]:
    """What is equal on all ranks that meet."""
    x = call.x
    shape = {"all_gather": (), "all_to_all": x.shape[1:]}.get(call.op, x.shape)
    return call.op, call.label, tuple(shape), x.dtype, x.device.type, call.sizes, call.reduction, call.root, call.shift


def _compute(calls: list[Call], outputs: list[Tensor]) -> None:
    """Fill the outputs of all ranks of an axis, in axis order."""
    first, xs = calls[0], [call.x for call in calls]
    match first.op:
        case "all_gather":
            for output in outputs:
                torch.cat(xs, out=output)
        case "reduce_scatter":
            pieces = [x.split_with_sizes(list(first.sizes)) for x in xs]
            for i, output in enumerate(outputs):
                _reduce(output, [piece[i] for piece in pieces], "sum")
        case "all_reduce":
            _reduce(outputs[0], xs, first.reduction)
            for output in outputs[1:]:
                output.copy_(outputs[0])
        case "all_to_all":
            pieces = [call.x.split_with_sizes(list(call.send)) for call in calls]
            for i, output in enumerate(outputs):
                torch.cat([piece[i] for piece in pieces], out=output)
        case "exchange_counts":
            table = torch.stack(xs)
            for i, output in enumerate(outputs):
                output.copy_(table[:, i])
        case "broadcast":
            for output in outputs:
                output.copy_(xs[first.root])
        case "permute":
            for i, output in enumerate(outputs):
                output.copy_(xs[(i - first.shift) % len(xs)])
        case "barrier":
            pass


def _reduce(output: Tensor, xs: list[Tensor], reduction: str) -> None:
    output.copy_(xs[0])
    for x in xs[1:]:
        if reduction == "sum":
            output.add_(x)
        else:
            torch.maximum(output, x, out=output)


def _record(x: Tensor) -> list[Any]:
    """Marks what this rank's stream holds now; nothing on a device without streams."""
    return [torch.accelerator.current_stream(x.device).record_event()] if backend_of(x.device).streams else []


def _on_stream(events: list[Any]) -> None:
    """Makes this rank's stream wait for the events."""
    for event in events:
        torch.accelerator.current_stream().wait_event(event)


def _end(thread: threading.Thread) -> None:
    """Return when the thread has ended; one that goes on without coming to a collective is interrupted."""
    deadline = time.monotonic() + _GRACE
    while thread.ident is None and time.monotonic() < deadline:  # its start was interrupted: before it began, or just after
        time.sleep(0.001)
    if thread.ident is None:
        return
    thread.join(_GRACE)
    while thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(RankEnded))
        thread.join(_GRACE)
