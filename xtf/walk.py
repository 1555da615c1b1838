"""The walk: the one loop that runs a program forward and backward and orders every transfer declared on it.

For each micro-batch the stages run in order, then in reverse. Around that line the walk

* starts the gather of the next stage that needs one before it runs this stage, in both directions and across micro-batches, and
  frees what was gathered as soon as no task before the next gather needs it;
* starts the reduction of gradients when the last stage using a parameter has run backward, and waits for it when the next one is
  ready;
* starts a store when a stage has run and waits for it when the next stage has run; starts the fetch of the stage before it runs
  the one behind it;
* starts an exchange at its place in the forward, and in the backward as soon as the gradients it moves are complete (after the
  stage that first read what it brought); waits for it when a stage needs what it brings.

Everything is recorded in order (`xtf.record`). Nothing here depends on what a transform is for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from xtf.record import Act, Event, Record, What, handle_bytes, handle_syncs, storage_bytes, storage_key
from xtf.stage import Exchange, Pair, Program, Stage, Transfer, is_differentiable
from xtf.tree import Path

Direction = Literal["forward", "backward"]
Seeds = Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""``(micro-batch, final values) -> cotangents`` of some of them; called once between forward and backward."""


class Task(NamedTuple):
    """One stage of one micro-batch in one direction."""

    micro: int
    direction: Direction
    node: int  # index in the program


@dataclass(frozen=True)
class Plan:
    """A program as the walk runs it, with what follows from its order.

    Args:
        program: stages and exchanges in order.
        pairs: the `Pair` of each stage, ``None`` for exchanges.
    """

    program: Program
    pairs: Sequence[Pair | None]

    @cached_property
    def last_reads(self) -> list[list[str]]:
        """For each node, the values whose content nothing reads after it."""
        needed: set[str] = set()
        found: list[list[str]] = []
        for node in reversed(self.program):
            needed -= set(node.writes)
            found.append([name for name in node.reads if name not in needed])
            needed |= set(node.reads)
        return found[::-1]

    @cached_property
    def reduced_by(self) -> list[tuple[Path, ...]]:
        """For each node, the paths whose gradient is complete when it has run backward: it is their first user."""
        seen: set[Path] = set()
        found: list[tuple[Path, ...]] = []
        for node in self.program:
            own = tuple(dict.fromkeys(p for p in node.params.values() if p not in seen)) if isinstance(node, Stage) else ()
            seen.update(own)
            found.append(own)
        return found

    @cached_property
    def ready_after(self) -> list[list[int]]:
        """For each node, the exchanges whose gradients are complete when it has run backward: it is the first to read what they
        write. (An exchange that another reads is left at its place: to start it early, the walk would have to wait.)"""
        found: list[list[int]] = [[] for _ in self.program]
        for index, node in enumerate(self.program):
            if isinstance(node, Exchange):
                names = set(node.writes)
                later = range(index + 1, len(self.program))
                first = next((j for j in later if names & {*self.program[j].reads, *self.program[j].writes}), None)
                if first is not None and isinstance(self.program[first], Stage) and names & set(self.program[first].reads):
                    found[first].append(index)
        return [row[::-1] for row in found]


class Session(NamedTuple):
    """A stretch of tasks for which a stage's parameters stay gathered: started before task ``start`` runs, waited for before
    ``first`` runs, freed after ``last`` has run. Stages that gather the same parameters (parts of one stage) share it."""

    key: Hashable  # of the gather
    start: int
    first: int
    last: int


def _gather_key(stage: Stage) -> Hashable:
    """Equal for stages that gather the same parameters in the same way."""
    return id(stage.gather), tuple(stage.params.values())


def tasks(plans: Sequence[Plan], *, backward: bool) -> list[Task]:
    """Every task in the order in which it runs, micro-batch after micro-batch."""
    order: list[Task] = []
    for micro, plan in enumerate(plans):
        order += [Task(micro, "forward", i) for i in range(len(plan.program))]
        if backward:
            order += [Task(micro, "backward", i) for i in reversed(range(len(plan.program)))]
    return order


def sessions(plans: Sequence[Plan], order: Sequence[Task]) -> list[Session]:
    """When each stage's parameters are gathered and freed, in order.

    They are kept between uses in one direction of one micro-batch; from one use to the next when no other gather lies between
    (the last stage, whose backward follows its forward at once); and in both directions when the stage declares
    ``regather=False``.
    """
    found: list[Session] = []
    going: dict[tuple[int, str, Hashable], int] = {}  # (micro, direction or "both", gather) -> its open session
    before: int | None = None  # the last task so far that uses gathered parameters
    for at, task in enumerate(order):
        stage, pair = plans[task.micro].program[task.node], plans[task.micro].pairs[task.node]
        if not isinstance(stage, Stage) or pair is None or stage.gather is None or (task.direction == "backward" and not pair.needs_params):
            continue
        key = _gather_key(stage)
        use = (task.micro, task.direction if stage.regather else "both", key)
        if use not in going and found and found[-1].key == key and order[found[-1].first].micro == task.micro:
            going[use] = len(found) - 1
        if use in going:
            found[going[use]] = found[going[use]]._replace(last=at)
        else:
            going[use] = len(found)
            found.append(Session(key, at if before is None else before, at, at))
        before = at
    return found


@dataclass
class Outcome:
    """What a walk leaves: this rank's gradients by path (empty without backward), and each micro-batch's final values."""

    grads: dict[Path, Tensor] = field(default_factory=dict[Path, Tensor])
    values: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])


def walk(
    plans: Sequence[Plan],
    params: Mapping[Path, Tensor],
    micros: Sequence[Mapping[str, Any]],
    *,
    keep: Sequence[str],
    seeds: Seeds | None = None,
    trained: frozenset[Path] = frozenset(),
    record: Record | None = None,
) -> Outcome:
    """Run a program on each micro-batch.

    Args:
        plans: what to run on each micro-batch: the same program, or its stages in another order.
        params: this rank's parameters by path.
        micros: the constants of each micro-batch.
        keep: names of the values to return for each micro-batch (loss, statistics).
        seeds: gives the cotangents that a backward begins with. Without it only the forward runs and nothing is kept for a
            backward.
        trained: paths that get gradients.
        record: where events go.
    """
    return _Walk(plans, params, micros, keep, seeds, trained, record if record is not None else Record()).run()


@dataclass
class _Pending:
    """Values under way in an exchange; resolved once, by whoever needs them first."""

    transfer: Transfer
    handle: Any
    names: tuple[str, ...]
    stage: str
    index: int | None = None  # of the exchange, when its residual comes with the values
    got: dict[str, Any] | None = None


def _check_given(pending: _Pending, got: Any) -> None:
    """Refuse what an exchange's ``wait`` gave, if it is not what `xtf.stage.Exchange` says."""
    values = got
    if pending.index is not None:
        if _length(got) != 2:
            raise ValueError(f"exchange {pending.stage}: forward's wait gave no (values, residual), but a {type(got).__name__}")
        values = got[0]
    if _length(values) != len(pending.names):
        raise ValueError(
            f"exchange {pending.stage}: wait gave {_length(values)} values, expected {len(pending.names)}: {', '.join(pending.names)}"
        )


def _length(value: Any) -> int | None:
    """Of a tuple; of anything else ``None``."""
    return len(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else None


class _Walk:
    """The state of one walk. Methods are in the order in which a task uses them."""

    def __init__(
        self,
        plans: Sequence[Plan],
        params: Mapping[Path, Tensor],
        micros: Sequence[Mapping[str, Any]],
        keep: Sequence[str],
        seeds: Seeds | None,
        trained: frozenset[Path],
        record: Record,
    ) -> None:
        assert len(plans) == len(micros)
        self.plans, self.params, self.micros = plans, params, micros
        self.keep, self.seeds, self.trained, self.record = set(keep), seeds, trained, record
        self.order = tasks(plans, backward=seeds is not None)
        self.sessions = sessions(plans, self.order)
        self.next_session = 0
        self.gathering: deque[tuple[Session, Any]] = deque()  # started, not yet waited for
        self.whole: dict[Hashable, Mapping[str, Tensor]] = {}  # gathered parameters, by the key of the gather
        self.until: dict[Hashable, int] = {}  # the last task of its session, likewise
        self.values: dict[str, Any] = {}  # name -> tensor or _Pending
        self.cotangents: dict[str, list[Any]] = {}
        self.residuals: dict[int, Any] = {}
        self.blank: dict[int, list[tuple[torch.Size, torch.dtype, torch.device] | None]] = {}
        self.storing: list[tuple[int, Any]] = []
        self.stored: dict[int, Any] = {}
        self.fetching: dict[int, Any] = {}
        self.unreduced: dict[Path, Tensor] = {}
        self.reducing: tuple[Stage, Any] | None = None
        self.seen: set[int] = set()  # storages of gradients handed out
        self.early: dict[int, _Pending] = {}  # exchanges whose backward started before its place
        self.outcome = Outcome()
        self.task = Task(0, "forward", 0)

    @property
    def plan(self) -> Plan:
        """That of the task's micro-batch."""
        return self.plans[self.task.micro]

    @property
    def program(self) -> Program:
        return self.plan.program

    def run(self) -> Outcome:
        for at, task in enumerate(self.order):
            self.task = task
            node = self.program[task.node]
            if isinstance(node, Exchange):
                self._exchange(node)
            elif task.direction == "forward":
                self._forward(at, node)
            else:
                self._backward(at, node)
            if task.direction == "forward" and task.node == len(self.program) - 1:
                self._turn()
            if task.direction == "backward" and task.node == 0:
                self.cotangents.clear()
        self._finish_reduce()
        return self.outcome

    def _log(self, act: Act, what: What, stage: str, nbytes: int = 0, stream: str = "compute") -> None:
        self.record.add(Event(act, what, stage, self.task.direction, self.task.micro, nbytes, stream), self._held)

    def _held(self) -> dict[str, Any]:
        """What a watcher of the record sees. Transfers under way are in no tree, but for the stores and fetches of what stages keep;
        that is by state, micro-batch and index in the program, and what stands under a key stays the same."""
        kept = {"residual": self.residuals, "storing": dict(self.storing), "stored": self.stored, "fetching": self.fetching}
        return {
            "constants": self.micros,
            "gathered": list(self.whole.values()),
            "values": [*self.values.values(), *self.outcome.values, *self.cotangents.values()],
            "kept": {(state, self.task.micro, index): value for state, part in kept.items() for index, value in part.items()},
            "gradients": [self.unreduced, self.outcome.grads],
        }

    def _start(self, what: What, stage: str, transfer: Transfer, value: Any) -> Any:
        handle = transfer.start(value)
        self._log("start", what, stage, handle_bytes(handle), transfer.stream)
        for _ in range(handle_syncs(handle)):
            self._log("wait", "sync", stage)
        return handle

    def _wait(self, what: What, stage: str, transfer: Transfer, handle: Any) -> Any:
        value = transfer.wait(handle)
        self._log("wait", what, stage, storage_bytes(value), transfer.stream)
        return value

    # Parameters ------------------------------------------------------------------------------------------------------------------

    def _own(self, stage: Stage) -> dict[str, Tensor]:
        return {name: self.params[path] for name, path in stage.params.items()}

    def _start_gather(self) -> None:
        """Start the next gather, labelled with the task it is for."""
        session, now = self.sessions[self.next_session], self.task
        self.task = self.order[session.first]
        stage = self.program[self.task.node]
        assert isinstance(stage, Stage) and stage.gather is not None
        self.gathering.append((session, self._start("gather", stage.name, stage.gather, self._own(stage))))
        self.next_session, self.task = self.next_session + 1, now

    def _gathered(self, at: int, stage: Stage, pair: Pair) -> Mapping[str, Tensor]:
        """This stage's parameters; when they have come, the next gather starts, so that it is under way while the stage runs and
        no more than two stages are in memory."""
        if self.task.direction == "backward" and not pair.needs_params:
            return {}
        if stage.gather is None:
            return self._own(stage)
        key = _gather_key(stage)
        if key not in self.whole:
            if not self.gathering:  # the first of all
                self._start_gather()
            session, handle = self.gathering.popleft()
            assert session.key == key
            self.whole[key] = self._wait("gather", stage.name, stage.gather, handle)
            self.until[key] = session.last
        while self.next_session < len(self.sessions) and self.sessions[self.next_session].start <= at:
            self._start_gather()
        return self.whole[key]

    def _release(self, at: int, stage: Stage) -> None:
        key = _gather_key(stage)
        if key in self.whole and at >= self.until[key]:
            self._log("free", "gather", stage.name, storage_bytes(self.whole.pop(key)))

    # Forward ---------------------------------------------------------------------------------------------------------------------

    def _value(self, name: str) -> Tensor:
        value = self.values[name]
        if isinstance(value, _Pending):
            self.values.update(self._resolve(value))
            value = self.values[name]
        return value

    def _resolve(self, pending: _Pending) -> dict[str, Any]:
        if pending.got is None:
            got = self._wait("exchange", pending.stage, pending.transfer, pending.handle)
            _check_given(pending, got)
            if pending.index is not None:
                got, residual = got
                if self.seeds is not None:
                    self.residuals[pending.index] = residual
            pending.got, pending.handle = dict(zip(pending.names, got, strict=True)), None
        return pending.got

    def _exchange(self, node: Exchange) -> None:
        if self.task.direction == "forward":
            reads = tuple(self._value(name) for name in node.reads)
            pending = _Pending(
                node.forward, self._start("exchange", node.name, node.forward, reads), node.writes, node.name, self.task.node
            )
            self._forget(node)
            self.values.update(dict.fromkeys(node.writes, pending))
        else:
            pending = self.early.pop(self.task.node, None) or self._start_back(self.task.node)
            for name in node.reads:
                self.cotangents.setdefault(name, []).append(pending)

    def _start_back(self, index: int) -> _Pending:
        """Start an exchange's backward. What it brings is entered at its place: names may mean other values until then."""
        node = self.program[index]
        assert isinstance(node, Exchange)
        given = (self.residuals.pop(index), tuple(self._cotangent(name) for name in node.writes))
        return _Pending(node.backward, self._start("exchange", node.name, node.backward, given), node.reads, node.name)

    def _forward(self, at: int, stage: Stage) -> None:
        pair = self.plan.pairs[self.task.node]
        assert pair is not None
        reads = tuple(self._value(name) for name in stage.reads)
        consts = {name: self.micros[self.task.micro][name] for name in stage.consts}
        params = self._gathered(at, stage, pair)
        if self.seeds is None:
            writes = pair.evaluate(params, reads, consts) if pair.evaluate is not None else pair.forward(params, reads, consts)[0]
            residual = None
        else:
            writes, residual = pair.forward(params, reads, consts)
        del params, reads
        self._log("run", "forward", stage.name)
        self._release(at, stage)
        self._finish_stores()
        self._forget(stage)
        self.values.update(zip(stage.writes, writes, strict=True))
        if self.seeds is not None:
            self.blank[self.task.node] = [(w.shape, w.dtype, w.device) if is_differentiable(w) else None for w in writes]
            if stage.store is None:
                self.residuals[self.task.node] = residual
            else:
                self.storing.append((self.task.node, self._start("store", stage.name, stage.store, residual)))

    def _forget(self, node: Stage | Exchange) -> None:
        """Drop the values that no later stage of the forward reads."""
        for name in self.plan.last_reads[self.task.node]:
            if name not in self.keep:
                self.values.pop(name, None)

    def _finish_stores(self) -> None:
        for index, handle in self.storing:
            stage = self.program[index]
            assert isinstance(stage, Stage) and stage.store is not None
            self.stored[index] = self._wait("store", stage.name, stage.store, handle)
            self._log("free", "store", stage.name)
        self.storing.clear()

    def _turn(self) -> None:
        """Between forward and backward: values are final, cotangents begin."""
        self._finish_stores()
        for name in list(self.values):
            self._value(name)
        values = {name: value for name, value in self.values.items() if name in self.keep}
        self.values.clear()
        self.outcome.values.append(values)
        if self.seeds is not None:
            self.cotangents = {name: [value] for name, value in self.seeds(self.task.micro, values).items()}

    # Backward --------------------------------------------------------------------------------------------------------------------

    def _cotangent(self, name: str) -> Tensor | None:
        """The sum of what has flowed back into a value, taken out: what is written above is another value of that name."""
        total: Tensor | None = None
        for item in self.cotangents.pop(name, []):
            one = self._resolve(item)[name] if isinstance(item, _Pending) else item
            if one is not None:
                total = one if total is None else total + one
        return total

    def _start_fetch(self, index: int) -> None:
        stage = self.program[index]
        if isinstance(stage, Stage) and stage.fetch is not None and index in self.stored:
            self.fetching[index] = self._start("fetch", stage.name, stage.fetch, self.stored.pop(index))

    def _residual(self, stage: Stage) -> Any:
        index = self.task.node
        self._start_fetch(index)
        ahead = next((i for i in range(index - 1, -1, -1) if i in self.stored), None)
        if ahead is not None:
            self._start_fetch(ahead)
        if index in self.fetching:
            assert stage.fetch is not None
            return self._wait("fetch", stage.name, stage.fetch, self.fetching.pop(index))
        return self.residuals.pop(index)

    def _backward(self, at: int, stage: Stage) -> None:
        pair, index = self.plan.pairs[self.task.node], self.task.node
        assert pair is not None
        dwrites: list[Tensor | None] = []
        for name, blank in zip(stage.writes, self.blank.pop(index), strict=True):
            dy = self._cotangent(name)
            dwrites.append(dy if dy is not None or blank is None else torch.zeros(blank[0], dtype=blank[1], device=blank[2]))
        residual = self._residual(stage)
        consts = {name: self.micros[self.task.micro][name] for name in stage.consts}
        params = self._gathered(at, stage, pair)
        dparams, dreads = pair.backward(params, residual, tuple(dwrites), consts)
        del params, residual, dwrites
        self._log("run", "backward", stage.name)
        self._release(at, stage)
        if stage.fetch is not None:
            self._log("free", "fetch", stage.name)
        for name, dx in zip(stage.reads, dreads, strict=True):
            if dx is not None:
                self.cotangents.setdefault(name, []).append(dx)
        for name, grad in dparams.items():
            path = stage.params[name]
            if path in self.trained:
                self.unreduced[path] = self.unreduced[path] + grad if path in self.unreduced else grad
        ready = {path: self.unreduced.pop(path) for path in self.plan.reduced_by[index] if path in self.unreduced}
        if ready:
            self._reduce(stage, ready)
        for exchange in self.plan.ready_after[index]:
            self.early[exchange] = self._start_back(exchange)

    def _reduce(self, stage: Stage, ready: dict[Path, Tensor]) -> None:
        if stage.reduce is None:
            kept = self.outcome.grads  # what is added to these is only read
            self._accumulate({path: grad if path in kept else self._distinct(grad) for path, grad in ready.items()})
            return
        self._finish_reduce()
        self.reducing = (stage, self._start("reduce", stage.name, stage.reduce, ready))

    def _finish_reduce(self) -> None:
        if self.reducing is not None:
            stage, handle = self.reducing
            assert stage.reduce is not None
            self.reducing = None
            self._accumulate(self._wait("reduce", stage.name, stage.reduce, handle))

    def _distinct(self, grad: Tensor) -> Tensor:
        """A gradient in memory of its own: autograd may return one tensor for two parameters, or an expanded view."""
        storage = grad.untyped_storage()
        if storage_key(storage) in self.seen or storage.nbytes() != grad.nbytes or not grad.is_contiguous():
            grad = grad.clone(memory_format=torch.contiguous_format)
        self.seen.add(storage_key(grad.untyped_storage()))
        return grad

    def _accumulate(self, local: Mapping[Path, Tensor]) -> None:
        for path, grad in local.items():
            have = self.outcome.grads.get(path)
            self.outcome.grads[path] = grad if have is None else have.add_(grad)
