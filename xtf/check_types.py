"""`check_types`: run a training step on simulated ranks and follow the type of every value (`xtf.value_types`) through it.

Collectives change types, as the table there says: `_TypedAxis` is a simulated axis that applies it. Stages and transfers give values their
names: `_TypedStep` is the step with its plan wrapped. Nothing of either is in a step that is not checked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from xtf import tree
from xtf.batch import PER_DOCUMENT, Batch
from xtf.collectives import Call
from xtf.collectives.simulated import SimulatedAxis, World, run_ranks
from xtf.mesh import Mesh, split_batch
from xtf.model import Model
from xtf.optim import Optimizer
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
        stages: stages and exchanges that ran, forward and backward.
        gradients: the type of each leaf's gradient over each axis, on the first rank.
    """

    name: str
    stages: int = 0
    gradients: dict[Path, dict[str, str]] = field(default_factory=dict[Path, dict[str, str]])

    def __str__(self) -> str:
        return f"{self.name}: types hold; {self.stages} stages and exchanges, {len(self.gradients)} gradients"


# Collectives ---------------------------------------------------------------------------------------------------------------------


class _TypedAxis(SimulatedAxis):
    """A simulated axis that knows what collectives make of types."""

    def __init__(self, mesh: Mesh, names: tuple[str, ...], world: World, typing: Typing) -> None:
        super().__init__(mesh, names, world)
        self.typing = typing

    def launch(self, call: Call) -> Callable[[], Tensor]:
        typing = self.typing
        kinds = {axis: self._kind(call, axis) for axis in typing.axes} if call.op != "barrier" else {}
        with typing.paused():
            finish = super().launch(call)

        def end() -> Tensor:
            with typing.paused():
                out = finish()
            typing.set(out, kinds)
            return out

        return end

    def _kind(self, call: Call, axis: str) -> Kind:
        kind = self.typing.kind(call.x, axis)
        if kind.letter == "C":
            return self._of_parts(call, axis, kind)
        return self._result(call, axis, kind) if axis in self.names else _moved(call, kind)

    def _of_parts(self, call: Call, axis: str, kind: Kind) -> Kind:
        """Of a buffer of several kinds."""
        if call.op == "reduce_scatter":
            start = sum(call.sizes[: self.index])
            kind = window(kind, 0, start, start + call.sizes[self.index])
        elif call.op not in ("all_reduce", "broadcast", "permute"):
            return VARIES if axis not in self.names else self._result(call, axis, joined(kind))
        if kind.letter != "C":
            return self._result(call, axis, kind) if axis in self.names else kind
        if axis not in self.names:
            return kind
        return replace(kind, parts=tuple((size, self._result(call, axis, part)) for size, part in kind.parts))

    def _result(self, call: Call, axis: str, kind: Kind) -> Kind:
        """Over an axis that is reduced, gathered or exchanged."""
        n, said = self.typing.axes[axis], f"{call.op}{f' {call.label!r}' if call.label else ''}"
        sums = call.op == "reduce_scatter" or (call.op == "all_reduce" and call.reduction == "sum")
        if kind.letter == "M" or (kind.letter == "P" and not sums and call.op != "exchange_counts"):
            raise self.typing.error(
                "moves a value that is partial, not summed" if kind.letter == "P" else "sums a mixture", axis, kind, said
            )
        if sums and kind.letter == "R" and not all(abs(factor * n - 1) < 1e-9 for _, factor in kind.whole):
            why = f"sums a value that is already the same on all ranks: it comes to {n} times that. Leave one of the two reductions out"
            raise self.typing.error(why, axis, kind, said)
        if call.op in ("all_reduce", "broadcast", "all_gather"):
            return WHOLE
        if call.op == "permute":
            return kind
        return piece(0) if call.op == "reduce_scatter" else VARIES


def _moved(call: Call, kind: Kind) -> Kind:
    """Over an axis that the collective does not run on."""
    if call.op == "exchange_counts" and kind.letter in "PM":
        return VARIES
    flat = call.op in ("all_gather", "reduce_scatter")
    return VARIES if flat and kind.letter == "S" and kind.dim != 0 else replace(kind, whole=()) if kind.letter == "R" else kind


# The step ------------------------------------------------------------------------------------------------------------------------


class _TypedStep(TrainStep):
    """A step whose plan tells a `Typing` what runs."""

    typing: Typing
    report: TypeReport
    transfers: dict[int, Transfer]

    def plan(self, layout: Layout = (1,)) -> Plan:
        made: dict[Layout, Plan] = self.__dict__["typed_plans"]
        if layout not in made:
            plan = super().plan(layout)
            nodes = tuple(self._exchange(node) if isinstance(node, Exchange) else self._stage(node) for node in plan.program)
            pairs = [None if pair is None else self._pair(node, pair) for node, pair in zip(plan.program, plan.pairs, strict=True)]
            made[layout] = Plan(nodes, pairs)
        return made[layout]

    # Boundaries

    def _settle(self, stage: str, doing: str, values: Sequence[tuple[str, Any]], like: Sequence[Mapping[str, Kind] | None]) -> None:
        """Name what a stage wrote, and find out what a number of one rank made different. ``like`` has, for gradients, the types of what
        they are gradients of: a piece of no known place is where that is."""
        typing = self.typing
        given = [(name, x, known) for (name, x), known in zip(values, like, strict=True) if isinstance(x, Tensor)]
        for axis in typing.axes:
            equal = self._equal(axis, [x for _, x, _ in given])
            for (name, x, known), same in zip(given, equal, strict=True):
                kind = typing.kind(x, axis)
                if kind.letter == "M":
                    why = f"is {kind}: summed over the ranks, the whole part would count {typing.axes[axis]} times"
                    with typing.at(stage, doing):
                        raise typing.error(why, axis, kind, name)
                if kind.letter in "RH" and not same:
                    kind = VARIES
                if known is not None and kind.letter == "S" and kind.dim is None and known[axis].letter == "S":
                    kind = known[axis]
                typing.set(
                    x, {a: kind if a == axis else typing.kind(x, a) for a in typing.axes}, typing.said(x) or f"written by {stage} ({doing})"
                )

    def _equal(self, axis: str, values: Sequence[Tensor]) -> list[bool]:
        """Whether each value has the same bits on all ranks of an axis."""
        raw: SimulatedAxis = self.__dict__["raw_axes"][axis]
        with self.typing.paused():
            flat = [x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in values]
            bits = [hash((x.shape, bytes.numpy().tobytes())) for x, bytes in zip(values, flat, strict=True)]
            seen = raw.start_all_gather(torch.tensor(bits, dtype=torch.int64), [len(bits)] * raw.size, label="types").wait()
        return [bool(row) for row in (seen.view(raw.size, -1) == seen.view(raw.size, -1)[0]).all(0)]

    def _kinds(self, x: object) -> dict[str, Kind] | None:
        return {axis: self.typing.kind(x, axis) for axis in self.typing.axes} if isinstance(x, Tensor) else None

    # Stages

    def _pair(self, node: Any, pair: Pair) -> Pair:
        typing, name = self.typing, node.name

        def given(params: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
            return [(f"the parameter {node.params[leaf]}", x) for leaf, x in params.items()]

        def forward(params: Any, reads: Any, consts: Any) -> Any:
            with typing.at(name, "forward", [*_named("the value ", node.reads, reads), *given(params)]):
                writes, residual = pair.forward(params, reads, consts)
            self._settle(name, "forward", _named("the value ", node.writes, writes), [None] * len(writes))
            self.report.stages += 1
            return writes, (residual, _Kinds([self._kinds(x) for x in reads]))

        def evaluate(params: Any, reads: Any, consts: Any) -> Any:
            with typing.at(name, "evaluation", [*_named("the value ", node.reads, reads), *given(params)]):
                writes = pair.evaluate(params, reads, consts) if pair.evaluate is not None else pair.forward(params, reads, consts)[0]
            self._settle(name, "evaluation", _named("the value ", node.writes, writes), [None] * len(writes))
            return writes

        def backward(params: Any, residual: Any, dwrites: Any, consts: Any) -> Any:
            kept, like = residual
            with typing.at(name, "backward", [*_named("the gradient of ", node.writes, dwrites), *given(params)]):
                dparams, dreads = pair.backward(params, kept, dwrites, consts)
            self._settle(name, "backward", _named("the gradient of ", node.reads, dreads), like.rows)
            leaves = [(f"the gradient of {node.params[leaf]}", x) for leaf, x in dparams.items()]
            self._settle(name, "backward", leaves, [None] * len(leaves))
            self.report.stages += 1
            return dparams, dreads

        return pair._replace(forward=forward, backward=backward, evaluate=evaluate)

    def _exchange(self, node: Exchange) -> Exchange:
        typing, name = self.typing, node.name

        def start(reads: Any) -> Any:
            with typing.at(name, "forward", _named("the value ", node.reads, reads)):
                return node.forward.start(reads), _Kinds([self._kinds(x) for x in reads])

        def wait(handle: Any) -> Any:
            with typing.at(name, "forward"):
                writes, residual = node.forward.wait(handle[0])
            self._settle(name, "forward", _named("the value ", node.writes, writes), [None] * len(writes))
            self.report.stages += 1
            return writes, (residual, handle[1])

        def start_back(given: Any) -> Any:
            (residual, like), dwrites = given
            with typing.at(name, "backward", _named("the gradient of ", node.writes, dwrites)):
                return node.backward.start((residual, dwrites)), like

        def wait_back(handle: Any) -> Any:
            with typing.at(name, "backward"):
                dreads = node.backward.wait(handle[0])
            self._settle(name, "backward", _named("the gradient of ", node.reads, dreads), handle[1].rows)
            self.report.stages += 1
            return dreads

        return replace(
            node, forward=Transfer(start, wait, node.forward.stream), backward=Transfer(start_back, wait_back, node.backward.stream)
        )

    def _stage(self, node: Stage) -> Stage:
        """With its transfers of parameters and gradients named."""
        gather, reduce = node.gather, node.reduce
        if gather is not None and id(gather) not in self.transfers:  # parts of a stage share one
            self.transfers[id(gather)] = self._gather(node, gather)
        if reduce is not None and id(reduce) not in self.transfers:
            self.transfers[id(reduce)] = self._reduce(node, reduce)
        return replace(
            node,
            gather=None if gather is None else self.transfers[id(gather)],
            reduce=None if reduce is None else self.transfers[id(reduce)],
        )

    def _gather(self, node: Stage, gather: Transfer) -> Transfer:
        typing = self.typing

        def start(local: Any) -> Any:
            with typing.at(node.name, "gather of parameters"):
                return gather.start(local)

        def wait(handle: Any) -> Any:
            with typing.at(node.name, "gather of parameters"):
                whole = gather.wait(handle)
            for leaf, x in whole.items():
                typing.set(x, kinds_of(self.placements[node.params[leaf]], typing.axes, owned_only=True))
            return whole

        return Transfer(start, wait, gather.stream)

    def _reduce(self, node: Stage, reduce: Transfer) -> Transfer:
        typing = self.typing

        def start(grads: Any) -> Any:
            with typing.at(node.name, "reduction of gradients", [(f"the gradient of {path}", x) for path, x in grads.items()]):
                return reduce.start(grads)

        def wait(handle: Any) -> Any:
            with typing.at(node.name, "reduction of gradients"):
                return reduce.wait(handle)

        return Transfer(start, wait, reduce.stream)

    # The end

    def _differentiate(self, params: Tree, run: StepLoss, record: Any) -> tuple[dict[str, Tensor], Tree]:
        metrics, grads = super()._differentiate(params, run, record)
        users = {path: s.name for s in reversed(self.program) if isinstance(s, Stage) for path in s.params.values()}
        for path, grad in tree.items(grads).items():
            if grad is not None:
                self.judge(f"the gradient of {path}", grad, self.placements[path], users.get(path, "the step"))
                self.report.gradients[path] = {axis: str(self.typing.kind(grad, axis)) for axis in self.typing.axes}
        return metrics, grads

    def judge(self, what: str, x: Tensor, placement: Placement | None, stage: str) -> None:
        """Refuse what does not lie as its placement says; without one it must be whole."""
        typing = self.typing
        for axis, n in typing.axes.items():
            want = "S" if placement is not None and axis in placement.axes else "R"
            kind = typing.kind(x, axis)
            same = self._equal(axis, [x])[0]
            letter = "S" if kind.letter in "RH" and not same else kind.letter
            if letter in "0H" or letter == want:
                continue
            over = f"{axis}={n}"
            held = {"S": f"each rank of {axis} holds a piece of it", "R": f"all ranks of {axis} hold the same"}[want]
            cause = {
                ("R", "P"): f"{stage} leaves out {axis} when it sums: is {axis} among token_axes, or the stage's partial_over?",
                ("R", "S"): f"it differs from rank to rank, and {stage} does not sum it over {axis}",
                ("S", "R"): f"{stage} sums it over {axis}, though ranks of {axis} have different parameters there",
            }.get((want, letter), f"{stage} does not sum it over {axis}")
            said = "replicated" if letter == "R" else str(kind) if letter == kind.letter else str(VARIES)
            made = f"\n  the partial sum was made by {kind.made}" if kind.made else ""
            raise ValueTypeError(f"{stage}: {what} is {said} over {over}, where {held}: {cause}{made}")


_DOCUMENT = "document"
"""The constant that says which of a rank's documents a token is of (`xtf.models.routers.document_constants`)."""


@dataclass(frozen=True)
class _Kinds:
    """Types in a residual, where it is one leaf."""

    rows: list[Any]


def _named(start: str, names: Sequence[str], values: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"{start}{name}", x) for name, x in zip(names, values, strict=False)]


def kinds_of(placement: Placement, axes: Mapping[str, int], *, owned_only: bool = False) -> dict[str, Kind]:
    """The types of a leaf: as it is kept, or as its stage computes with it."""
    found = dict.fromkeys(axes, WHOLE)
    for split in placement.splits:
        if not (owned_only and split.gathered):
            found |= {name: piece(split.dim) for name in split.axis.names if name in axes}
    return found


def _given() -> Optimizer:
    """An optimizer whose update is the gradient: only types matter."""
    return Optimizer(lambda params, placement: (), lambda grads, state, params, placement: (grads, state), lambda state: {})


def check_types(
    transform: Callable[..., Any],
    *,
    model: Model | Sequence[Model] | None = None,
    batch: Batch | None = None,
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
        llama on data=2: types hold; 12 stages and exchanges, 20 gradients
    """
    from xtf.testing import random_batch, small_models

    if not sizes:
        raise ValueError("check_types: no mesh axis is given, and on one rank every value is whole; expected sizes, as data=2")
    for name, rule in (rules or {}).items():
        if not callable(rule):
            raise ValueError(f"check_types: the rule of {name!r} is a {type(rule).__name__}, expected a function of an Operation")
    chosen = list(small_models().values()) if model is None else [model] if isinstance(model, Model) else list(model)
    reports: list[TypeReport] = []
    for one in chosen:
        whole = random_batch(one.vocab, seed=seed) if batch is None else batch
        name = f"{one.family} on {', '.join(f'{k}={v}' for k, v in sizes.items())}"

        def on_rank(rank: int, world: World, one: Model = one, whole: Batch = whole, name: str = name) -> TypeReport:
            many = {axis: n for axis, n in sizes.items() if n > 1}
            typing = Typing(many, lambda name, elementwise: rule_of(name, elementwise, rules))
            mesh = Mesh(sizes, rank, lambda mesh, names: _TypedAxis(mesh, names, world, typing))
            raw = {axis: SimulatedAxis(mesh, (axis,), world) for axis in many}
            return _follow(mesh, raw, typing, transform(mesh), one, whole, seed, name)

        reports.append(run_ranks(math.prod(sizes.values()), on_rank)[0])
    return reports


def _follow(
    mesh: Mesh, raw: Mapping[str, SimulatedAxis], typing: Typing, transform: Any, model: Model, batch: Batch, seed: int, name: str
) -> TypeReport:
    inner = apply(transform, train_step(model, _given()))
    tokens = [axis for joined in inner.token_axes for axis in joined.names]
    rows = [axis for joined in inner.row_axes for axis in joined.names]

    def seeded(consts: dict[str, Any]) -> dict[str, Any]:
        """Types of constants: pieces over the axes of tokens."""
        found = inner.tokens(consts)
        length = found["input_ids"].shape[0]
        for key, x in found.items():
            if isinstance(x, Tensor):
                per_token = key not in PER_DOCUMENT and x.shape[:1] == (length,)
                own = {axis: piece(0, key == _DOCUMENT and axis in rows) for axis in tokens} if per_token else {}
                own = dict.fromkeys(rows, VARIES) if key in PER_DOCUMENT else own
                typing.set(x, {axis: own.get(axis, HOST) for axis in typing.axes}, f"the constant {key}")
        return found

    step = _TypedStep(**{f.name: getattr(inner, f.name) for f in dataclasses.fields(inner)} | {"tokens": seeded})
    report = TypeReport(name)
    step.__dict__.update(program=inner.program, typing=typing, report=report, transfers={}, typed_plans={}, raw_axes=raw)
    part = split_batch(batch, mesh, axes=rows) if rows else dict(batch)
    state = step.init(seed)
    for path, leaf in tree.items(state.params).items():
        typing.set(leaf, kinds_of(step.placements[path], typing.axes), f"the parameter {path}")
    with typing:
        new, metrics = step(state, part)
        evaluated = step.evaluate(state.params, part)
        for key, x in (metrics | {f"evaluated {key}": x for key, x in evaluated.items()}).items():
            step.judge(f"the metric {key}", x, None, "the step")
        for path, leaf in tree.items(new.params).items():
            step.judge(f"the updated {path}", leaf, step.placements[path], "the step")
    return report


__all__ = ["TypeReport", "ValueTypeError", "check_types"]
