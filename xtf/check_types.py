"""`check_types`: run a training step on simulated ranks and follow the type of every value (`xtf.value_types`) through it.

Collectives change types as the table there says: `_TypedAxis` is a simulated axis that applies it. Stages and transfers give values their
names: `_TypedStep` is the step with its plan wrapped. Nothing of either is in a step that is not checked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtf import tree
from xtf.batch import PER_DOCUMENT, Batch
from xtf.collectives import Call
from xtf.collectives.simulated import SimulatedAxis, World, run_ranks
from xtf.data.documents import Documents
from xtf.mesh import Mesh, split_batch
from xtf.model import Model
from xtf.optim import UNPLACED, Optimizer
from xtf.optim import Placement as Placements
from xtf.overlap import Layout
from xtf.placement import Placement
from xtf.stage import Exchange, Pair, Stage, Transfer
from xtf.step import TrainStep, apply, train_step
from xtf.step_loss import StepLoss
from xtf.tree import Path, Tree
from xtf.type_rules import joined, rule_of, window
from xtf.value_types import HOST, VARIES, WHOLE, Kind, Rule, Typing, ValueTypeError, piece
from xtf.walk import Plan


@dataclass
class TypeReport:
    """What a check of types went through.

    Args:
        name: the model and the mesh.
        stages: how many stages and exchanges ran, each direction and the evaluation by itself.
        gradients: the type of each leaf's gradient over each axis, as the optimizer gets it, on the first rank.
    """

    name: str
    stages: int = 0
    gradients: dict[Path, dict[str, str]] = field(default_factory=dict[Path, dict[str, str]])

    def __str__(self) -> str:
        return f"{self.name}: types hold; {self.stages} runs of stages and exchanges, {len(self.gradients)} gradients"


# Collectives ---------------------------------------------------------------------------------------------------------------------


class _TypedAxis(SimulatedAxis):
    """A simulated axis that knows what collectives make of types."""

    def __init__(self, mesh: Mesh, names: tuple[str, ...], world: World, typing: Typing) -> None:
        super().__init__(mesh, names, world)
        self.typing = typing

    def launch(self, call: Call) -> Callable[[], Tensor]:
        kinds = {axis: self._kind(call, axis) for axis in self.typing.axes} if call.op != "barrier" else {}
        with self.typing.paused():
            finish = super().launch(call)

        def end() -> Tensor:
            with self.typing.paused():
                out = finish()
            self.typing.set(out, kinds)
            return out

        return end

    def _kind(self, call: Call, axis: str) -> Kind:
        """Of what the collective gives; buffers with parts of several kinds part by part."""
        kind = self.typing.kind(call.x, axis)
        if call.op == "reduce_scatter":
            start = sum(call.sizes[: self.index])
            kind = window(kind, 0, start, start + call.sizes[self.index]) if kind.letter == "C" else kind
        elif call.op not in ("all_reduce", "broadcast", "permute"):
            kind = joined(kind)
        result = self._over if axis in self.names else _beside
        if kind.letter == "C":
            return replace(kind, parts=tuple((size, result(call, axis, part)) for size, part in kind.parts))
        return result(call, axis, kind)

    def _over(self, call: Call, axis: str, kind: Kind) -> Kind:
        """Over an axis that the collective runs on."""
        n, said = self.typing.axes[axis], f"{call.op}{f' {call.label!r}' if call.label else ''}"
        sums = call.op == "reduce_scatter" or (call.op == "all_reduce" and call.reduction == "sum")
        if kind.letter == "M" or (kind.letter == "P" and not sums and call.op != "exchange_counts"):
            why = "moves a value that is partial, as if it were whole" if kind.letter == "P" else f"is given {kind}"
            raise self.typing.error(why, axis, kind, said)
        if sums and kind.letter == "R" and not all(abs(factor * n - 1) < 1e-9 for _, factor in kind.whole):
            why = f"sums a value that is the same on all ranks already, which makes it {n} times as large"
            raise self.typing.error(why, axis, kind, said)
        if call.op in ("all_reduce", "broadcast", "all_gather"):
            return WHOLE
        return kind if call.op == "permute" else piece(0) if call.op == "reduce_scatter" else VARIES


def _beside(call: Call, axis: str, kind: Kind) -> Kind:
    """Over another axis."""
    flat = call.op in ("all_gather", "reduce_scatter") and kind.letter == "S" and kind.dim != 0
    return VARIES if flat or (call.op == "exchange_counts" and kind.letter in "PM") else replace(kind, whole=())


# Stages --------------------------------------------------------------------------------------------------------------------------


class _Kept(NamedTuple):
    """What is kept for a backward, and the types of what was read."""

    residual: Any
    like: _Like


@dataclass(frozen=True, eq=False)
class _Like:
    """Types of values, as one leaf of a residual."""

    rows: Sequence[Mapping[str, Kind] | None]


class _TypedStep(TrainStep):
    """A step whose plan tells a `Typing` what runs, and whose gradients are judged."""

    typing: Typing
    world: SimulatedAxis
    report: TypeReport
    plans: dict[Layout, Plan]
    transfers: dict[int, Transfer]

    def plan(self, layout: Layout = (1,)) -> Plan:
        if layout not in self.plans:
            plan = super().plan(layout)
            nodes = tuple(self._exchange(node) if isinstance(node, Exchange) else self._stage(node) for node in plan.program)
            pairs = [None if pair is None else self._pair(node, pair) for node, pair in zip(plan.program, plan.pairs, strict=True)]
            self.plans[layout] = Plan(nodes, pairs)
        return self.plans[layout]

    def equal(self, values: Sequence[Tensor]) -> dict[str, list[bool]]:
        """Whether each value has the same bits on all ranks of each axis."""
        typing, mesh = self.typing, self.world.mesh
        with typing.paused():
            flat = [x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in values]
            bits = [hash((x.shape, bytes.numpy().tobytes())) for x, bytes in zip(values, flat, strict=True)]
            seen = self.world.start_all_gather(torch.tensor(bits, dtype=torch.int64), [len(bits)] * self.world.size, label="types").wait()
            table, found = seen.view(*typing.axes.values(), len(bits)), dict[str, list[bool]]()
            for axis in typing.axes:
                rows = table[tuple(slice(None) if name == axis else mesh.coordinate[name] for name in typing.axes)]
                found[axis] = [bool(same) for same in (rows == rows[0]).all(0)]
        return found

    def _settle(self, at: str, doing: str, values: Sequence[tuple[str, Any]], like: _Like | None = None) -> None:
        """Name what a stage gave, and find what a number of the host made different. ``like`` has the types of what the first values are
        gradients of: that of a piece is a piece in the same place."""
        given = [(name, x) for name, x in values if isinstance(x, Tensor)]
        known = {name: row for (name, _), row in zip(values, like.rows if like is not None else (), strict=False)}
        equal = self.equal([x for _, x in given])
        for place, (name, x) in enumerate(given):
            kinds, row = self._kinds(x), known.get(name)
            for axis, kind in kinds.items():
                if kind.letter == "M":
                    with self.typing.at(at, doing):
                        raise self.typing.error(f"is {kind}: the whole part would count once for each rank", axis, kind, name)
                if kind.letter in "RH" and not equal[axis][place]:
                    kind = VARIES
                if row is not None and row[axis].letter == "S" and (kind.letter in "RH" or kind == VARIES):
                    kind = row[axis]
                kinds[axis] = kind
            self.typing.set(x, kinds, self.typing.said(x) or f"written by {at} ({doing})")
        self.report.stages += 1

    def _kinds(self, x: Tensor) -> dict[str, Kind]:
        return {axis: self.typing.kind(x, axis) for axis in self.typing.axes}

    def _like(self, values: Sequence[Any]) -> _Like:
        return _Like([self._kinds(x) if isinstance(x, Tensor) else None for x in values])

    def _pair(self, node: Any, pair: Pair) -> Pair:
        typing, name = self.typing, node.name

        def leaves(params: Mapping[str, Tensor], what: str) -> list[tuple[str, Any]]:
            return [(f"{what} {node.params[leaf]}", x) for leaf, x in params.items()]

        def forward(params: Any, reads: Any, consts: Any) -> Any:
            with typing.at(name, "forward", [*_named("value", node.reads, reads), *leaves(params, "the parameter")]):
                writes, residual = pair.forward(params, reads, consts)
            self._settle(name, "forward", _named("value", node.writes, writes))
            return writes, _Kept(residual, self._like(reads))

        def evaluate(params: Any, reads: Any, consts: Any) -> Any:
            with typing.at(name, "evaluation", [*_named("value", node.reads, reads), *leaves(params, "the parameter")]):
                writes = pair.evaluate(params, reads, consts) if pair.evaluate is not None else pair.forward(params, reads, consts)[0]
            self._settle(name, "evaluation", _named("value", node.writes, writes))
            return writes

        def backward(params: Any, kept: _Kept, dwrites: Any, consts: Any) -> Any:
            with typing.at(name, "backward", [*_named("gradient", node.writes, dwrites), *leaves(params, "the parameter")]):
                dparams, dreads = pair.backward(params, kept.residual, dwrites, consts)
            self._settle(name, "backward", [*_named("gradient", node.reads, dreads), *leaves(dparams, "the gradient of")], kept.like)
            return dparams, dreads

        return pair._replace(forward=forward, backward=backward, evaluate=evaluate)

    def _exchange(self, node: Exchange) -> Exchange:
        def wait(handle: tuple[Any, _Like]) -> Any:
            with self.typing.at(node.name, "forward"):
                writes, residual = node.forward.wait(handle[0])
            self._settle(node.name, "forward", _named("value", node.writes, writes))
            return writes, _Kept(residual, handle[1])

        def start(reads: Any) -> Any:
            with self.typing.at(node.name, "forward", _named("value", node.reads, reads)):
                return node.forward.start(reads), self._like(reads)

        def start_back(given: tuple[_Kept, Any]) -> Any:
            with self.typing.at(node.name, "backward", _named("gradient", node.writes, given[1])):
                return node.backward.start((given[0].residual, given[1])), given[0].like

        def wait_back(handle: tuple[Any, _Like]) -> Any:
            with self.typing.at(node.name, "backward"):
                dreads = node.backward.wait(handle[0])
            self._settle(node.name, "backward", _named("gradient", node.reads, dreads), handle[1])
            return dreads

        forward, backward = Transfer(start, wait, node.forward.stream), Transfer(start_back, wait_back, node.backward.stream)
        return replace(node, forward=forward, backward=backward)

    def _stage(self, node: Stage) -> Stage:
        """With its transfers of parameters and gradients named. Parts of a stage share them."""

        def typed(doing: str, transfer: Transfer | None, place: bool) -> Transfer | None:
            if transfer is None:
                return None

            def start(given: Mapping[str, Tensor]) -> Any:
                with self.typing.at(node.name, doing, [(f"{what} {path}", x) for path, x in given.items()]):
                    return transfer.start(given)

            def wait(handle: Any) -> Any:
                with self.typing.at(node.name, doing):
                    got = transfer.wait(handle)
                for leaf, x in got.items() if place else ():
                    self.typing.set(x, kinds_of(self.placements[node.params[leaf]], self.typing.axes, owned_only=True))
                return got

            what = "the parameter" if place else "the gradient of"
            return self.transfers.setdefault(id(transfer), Transfer(start, wait, transfer.stream))

        gather, reduce = typed("gather of parameters", node.gather, True), typed("reduction of gradients", node.reduce, False)
        return replace(node, gather=gather, reduce=reduce)

    def _differentiate(self, params: Tree, run: StepLoss, record: Any) -> tuple[dict[str, Tensor], Tree]:
        metrics, grads = super()._differentiate(params, run, record)
        users = {path: s.name for s in reversed(self.program) if isinstance(s, Stage) for path in s.params.values()}
        found = {path: grad for path, grad in tree.items(grads).items() if grad is not None}
        self.judge("the gradient of ", found, self.placements, users)
        self.report.gradients |= {path: {axis: str(kind) for axis, kind in self._kinds(grad).items()} for path, grad in found.items()}
        return metrics, grads

    def judge(
        self, what: str, values: Mapping[str, Tensor], placements: Mapping[Path, Placement], by: Mapping[str, str] | None = None
    ) -> None:
        """Refuse what does not lie as its placement says; what has none must be whole."""
        equal, wrong = self.equal(list(values.values())), dict[tuple[str, str, str, str], list[tuple[str, str]]]()
        for at, (name, x) in enumerate(values.items()):
            for axis in self.typing.axes:
                want = "S" if name in placements and axis in placements[name].axes else "R"
                kind = self.typing.kind(x, axis)
                kind = VARIES if kind.letter in "RH" and not equal[axis][at] else kind
                if kind.letter not in ("0", "H", want):
                    found = wrong.setdefault(((by or {}).get(name, "the step"), axis, str(replace(kind, dim=None)), want), [])
                    found.append((name, kind.made))
        lines: list[str] = []
        for (stage, axis, held, want), found in wrong.items():
            over, names = f"{axis}={self.typing.axes[axis]}", ", ".join(name for name, _ in found)
            if want == "R":
                told = f"it should be the same on all ranks: {stage} does not sum it over {axis}"
                told += "; is that axis among token_axes, or in the stage's partial_over?" if held == "partial" else ""
            else:
                told = f"each rank of {axis} has its own part of the parameter: {stage} " + ("sums" if held == "replicated" else "cuts")
                told += f" it over {axis} all the same" if held == "replicated" else " it in another way"
            lines.append(f"{stage}: {what}{names} is {held} over {over}, but {told}")
            lines += [f"the partial sum was made by {found[0][1]}"] if found[0][1] else []
        if lines:
            more = [f"and {len(lines) - _LINES} lines more"] if len(lines) > _LINES else []
            raise ValueTypeError("\n  ".join([*lines[:_LINES], *more]))


_LINES = 16  # of a message


def _named(what: str, names: Sequence[str], values: Sequence[Any]) -> list[tuple[str, Any]]:
    of = {"value": "the value", "gradient": "the gradient of"}[what]
    return [(f"{of} {name}", x) for name, x in zip(names, values, strict=False)]


def kinds_of(placement: Placement, axes: Mapping[str, int], *, owned_only: bool = False) -> dict[str, Kind]:
    """The types of a leaf: as it is kept, or as its stage computes with it."""
    found = dict.fromkeys(axes, WHOLE)
    for split in placement.splits:
        if not (owned_only and split.gathered):
            found |= {name: piece(split.dim) for name in split.axis.names if name in axes}
    return found


# The check -----------------------------------------------------------------------------------------------------------------------


def _init(params: Tree, placement: Placements = UNPLACED) -> None:
    return None


def _update(grads: Tree, state: None, params: Tree, placement: Placements = UNPLACED) -> tuple[Tree, None]:
    return grads, None


def _metrics(state: None) -> dict[str, Tensor]:
    return {}


_ADDS = Optimizer(_init, _update, _metrics)
"""An optimizer whose update is the gradient: only types matter."""


def check_types(
    transform: Callable[..., Any],
    *,
    model: Model | Sequence[Model] | None = None,
    batch: Batch | Documents | None = None,
    seed: int = 0,
    rules: Mapping[str, Rule] | None = None,
    **sizes: int,
) -> list[TypeReport]:
    """Check that no value of a transformed step is used as what it is not: above all no partial sum as whole.

    Runs a step (forward, backward, update, and an evaluation) on simulated ranks, eagerly, and derives of every tensor and every mesh axis
    whether it is replicated, sharded or partial; see `xtf.value_types` for the rules. Parameters begin as they are placed, constants of a
    batch as pieces over the axes that carry tokens. In the end loss and metrics must be replicated, and each gradient must lie as
    its parameter does.

    It says *where* a layout is wrong; that values are right is what `xtf.testing.check` says. Numbers of the host (a rank's index) are not
    followed: what they make different is seen between stages, where values of ranks are compared.

    Args:
        transform: a function of the mesh that gives a transform, as in ``lambda mesh: shard(mesh["data"])``.
        model: a model, or several; by default those of `xtf.testing.small_models`.
        batch: the global batch; by default that of `xtf.testing.random_batch`.
        seed: of the initial parameters and the default batch.
        rules: of operations that have none here, by full name, as ``{"my::op": rule}`` (`xtf.value_types.Rule`).
        sizes: the mesh, as in ``data=2, tensor=2``.

    Returns:
        A report for each model.

    Raises:
        ValueTypeError: at the first place where a type does not fit, naming stage, value, axis, and what made the value so.
        ValueError: without sizes, since on one rank every value is whole; or for a rule that is no function.

    Example:
        >>> from xtf.testing import small_models
        >>> from xtf.transforms import shard
        >>> print(*check_types(lambda mesh: shard(mesh["data"]), model=small_models()["llama"], data=2))
        llama on data=2: types hold; 21 runs of stages and exchanges, 20 gradients
    """
    from xtf.testing import random_batch, small_models

    if not callable(transform):
        raise ValueError(f"check_types({transform!r}): expected a function of the mesh that gives a transform")
    if not sizes:
        raise ValueError("check_types: no mesh axis is given, and on one rank every value is whole; expected sizes, as data=2")
    for name, size in sizes.items():
        if isinstance(size, bool) or size < 1:
            raise ValueError(f"check_types: the size of axis {name!r} must be 1 or more, got {size!r}: give a whole number, as {name}=2")
    for name, rule in (rules or {}).items():
        if not callable(rule):
            raise ValueError(f"check_types: the rule of {name!r} is a {type(rule).__name__}, expected a function of an Operation")
    chosen = list(small_models().values()) if model is None else [model] if isinstance(model, Model) else list(model)
    reports: list[TypeReport] = []
    for one in chosen:
        whole = random_batch(one.vocab, seed=seed) if batch is None else batch
        name = f"{one.family} on {', '.join(f'{k}={v}' for k, v in sizes.items())}"

        def on_rank(rank: int, world: World, one: Model = one, whole: Any = whole, name: str = name) -> TypeReport:
            typing = Typing({axis: n for axis, n in sizes.items() if n > 1}, lambda name, elementwise: rule_of(name, elementwise, rules))
            mesh = Mesh(sizes, rank, lambda mesh, names: _TypedAxis(mesh, names, world, typing))
            step = apply(transform(mesh), train_step(one, _ADDS))
            if step.compilation.backend != "eager" or step.compilation.donate:
                raise ValueError(
                    f"check_types follows single operations, but the step is compiled by {step.compilation.backend!r}: leave that out"
                )
            return _follow(_typed(step, mesh, world, typing, TypeReport(name)), whole, seed)

        reports.append(run_ranks(math.prod(sizes.values()), on_rank)[0])
    return reports


_DOCUMENT = "document"
"""The constant that says which of a rank's documents a token is of (`xtf.models.routers.document_constants`)."""


def _typed(inner: TrainStep, mesh: Mesh, world: World, typing: Typing, report: TypeReport) -> _TypedStep:
    """The step that is followed."""
    tokens, rows = ([name for axis in axes for name in axis.names if name in typing.axes] for axes in (inner.token_axes, inner.row_axes))

    def seeded(consts: dict[str, Any]) -> dict[str, Any]:
        """The constants of a micro-batch, with types: what is by token lies in pieces over the axes of tokens."""
        found = inner.tokens(consts)
        for key, x in found.items():
            if isinstance(x, Tensor):
                own = dict.fromkeys(rows, VARIES) if key in PER_DOCUMENT else {}
                if key not in PER_DOCUMENT and x.shape[:1] == found["input_ids"].shape:
                    own = {axis: piece(0, key == _DOCUMENT and axis in rows) for axis in tokens}
                typing.set(x, {axis: own.get(axis, HOST) for axis in typing.axes}, f"the constant {key}")
        return found

    seams: dict[str, Any] = {f.name: getattr(inner, f.name) for f in dataclasses.fields(inner)}
    seams["tokens"] = seeded
    step = _TypedStep(**seams)
    raw = SimulatedAxis(mesh, tuple(typing.axes) or tuple(mesh.sizes), world)
    step.__dict__.update(program=inner.program, typing=typing, world=raw, report=report, plans={}, transfers={})
    return step


def _follow(step: _TypedStep, batch: Batch | Documents, seed: int) -> TypeReport:
    """One step and one evaluation."""
    typing, rows = step.typing, [name for axis in step.row_axes for name in axis.names]
    part: Any = batch
    if not isinstance(batch, Documents):
        part = split_batch(batch, step.world.mesh, axes=rows) if rows else dict(batch)
    state = step.init(seed)
    for path, leaf in tree.items(state.params).items():
        typing.set(leaf, kinds_of(step.placements[path], typing.axes), f"the parameter {path}")
    with typing:
        new, metrics = step(state, part)
        evaluated = step.evaluate(state.params, part)
        step.judge("the metric ", metrics, {})
        step.judge("the evaluated ", evaluated, {})
        step.judge("the updated ", tree.items(new.params), step.placements)
    return step.report


__all__ = ["TypeReport", "ValueTypeError", "check_types"]
