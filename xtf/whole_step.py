"""A step as one graph: forward and backward of all its micro-batches, for one rank.

The walk is run once on tensors without values while every operation is written down. What comes of it is one flat graph of
``(parameters, constants) -> (gradients, values, statistics)`` without Python, recomputation and auxiliary losses included, which a
backend lowers as a whole: it may fuse over the borders of stages, and there is no dispatch between them. The price is a graph, and a
compile time, that grow with depth. The optimizer's update is not in it: it writes leaf by leaf in place.

Sizes are constants of the graph but for the number of documents (`xtf.batch.PER_DOCUMENT`).
"""

# pyright: reportUnknownVariableType=false
# (torch's contexts of symbolic shapes carry no types)

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from xtf import tree
from xtf.batch import PER_DOCUMENT
from xtf.joint import serves, take_names
from xtf.record import Event, Record
from xtf.stage import Stage
from xtf.tree import Path
from xtf.walk import Outcome

if TYPE_CHECKING:
    from xtf.step import TrainStep
    from xtf.step_loss import StepLoss

LowerGraph = Callable[[fx.GraphModule, Sequence[int]], Callable[..., Any]]
"""``(graph, which of its inputs have a first dim that differs from call to call) -> fn``: of the same inputs and outputs."""

Differentiate = Callable[[Mapping[Path, Tensor], "StepLoss", "Record | None", bool], Outcome]
"""``(parameters, loss of the step, record, backward) -> Outcome``: what `xtf.step.TrainStep.walked` does."""


def check(step: TrainStep) -> None:
    """Refuse a step that is more than computation on one rank.

    Raises:
        ValueError: naming what stands in the way.
    """
    axes = [*step.token_axes, *step.sequence_axes, *step.owned.values(), *step.sharding.axes, *step.sharding.replicate]
    over = dict.fromkeys(str(axis.name) for axis in axes if axis.size > 1)
    reasons = [f"it has collectives over the axes {', '.join(over)}"] if over else []
    if step.parts > 1:
        reasons.append(f"its micro-batches run in {step.parts} parts that are cut where documents end")
    stages = [node for node in step.program if isinstance(node, Stage)]
    if others := [node.name for node in step.program if not isinstance(node, Stage)]:
        reasons.append(f"it has exchanges ({others[0]}, ...)")
    if moved := [stage.name for stage in stages if stage.store is not None or stage.fetch is not None]:
        reasons.append(f"what stages keep is moved ({moved[0]}, ...)")
    if reasons:
        raise ValueError(
            f"compile(unit='step'): {'; '.join(reasons)}, which the walk orders between stages and no graph can hold. Use unit='stage'"
        )


class _Traced(NamedTuple):
    """A graph as it runs, and the tree that its outputs are the leaves of."""

    run: Callable[..., Any]
    outputs: Any
    serves: Callable[[Sequence[Tensor]], bool]


def whole_step(step: TrainStep, lower: LowerGraph) -> Differentiate:
    """What runs a step's walk as one graph, traced at the first call and for other sizes again; not for other numbers of documents.

    Raises:
        ValueError: see `check`.
    """
    check(step)
    graphs: dict[Hashable, list[_Traced]] = {}

    def differentiate(params: Mapping[Path, Tensor], run: StepLoss, record: Record | None, backward: bool) -> Outcome:
        given = {"params": dict(params), "micros": run.micros, "weights": run.weights, "tokens": run.tokens, "shares": run.shares}
        leaves = tree.items(given)
        tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
        varies = [path.rsplit(".", 1)[-1] in PER_DOCUMENT for path in tensors]
        fixed = tuple((path, leaf) for path, leaf in leaves.items() if path not in tensors)
        key = (backward, fixed, tuple(tensors), tuple(map(_kind, tensors.values(), varies)))
        with _TRACING:
            known = graphs.setdefault(key, [])
            traced = next((one for one in known if one.serves(tuple(tensors.values()))), None)
            if traced is None:
                traced = _trace(step, run, given, tensors, varies, backward, lower)
                known.append(traced)
        out = tree.unflatten(traced.outputs, traced.run(*tensors.values()))
        grads, values, run.aux, run.totals, run.uncounted = out
        if record is not None:
            record.add(Event("run", "backward" if backward else "forward", "step", "backward" if backward else "forward"))
        return Outcome(grads, values)

    return differentiate


def _trace(
    step: TrainStep,
    run: StepLoss,
    given: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    varies: Sequence[bool],
    backward: bool,
    lower: LowerGraph,
) -> _Traced:
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)

    def fake(value: Tensor, varies: bool) -> Tensor:
        dynamic = [DimDynamic.DYNAMIC if varies and dim == 0 and n > 1 else DimDynamic.STATIC for dim, n in enumerate(value.shape)]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        return mode.from_tensor(value, symbolic_context=context)

    fakes = [fake(value, yes) for value, yes in zip(tensors.values(), varies, strict=True)]
    outputs: list[Any] = []

    def flat(*inputs: Tensor) -> list[Tensor]:
        values = dict(zip(tensors, inputs, strict=True))
        own: dict[str, Any] = tree.from_items(given, tree.items(given) | values)
        traced = copy.copy(run)
        traced.micros, traced.weights, traced.tokens, traced.shares = own["micros"], own["weights"], own["tokens"], own["shares"]
        traced.aux, traced.totals, traced.uncounted, traced.counted = [], {}, [], None
        outcome = step.walked(own["params"], traced, Record(), backward)
        found = (outcome.grads, outcome.values, traced.aux, traced.totals, traced.uncounted)
        outputs.append(found)
        return tree.leaves(found)

    made: Any = make_fx(flat, tracing_mode="symbolic")
    with torch.enable_grad():  # the walk differentiates stages itself; what no_grad is around the call does not matter to it
        module: fx.GraphModule = made(*fakes)
    take_names(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    guards = tuple(env.replace(guard.expr) for guard in env.guards)
    skeleton = tree.unflatten(outputs[-1], [None] * len(tree.leaves(outputs[-1])))
    moving = [at for at, value in enumerate(fakes) if any(isinstance(n, torch.SymInt) for n in value.shape)]
    return _Traced(lower(module, moving), skeleton, functools.partial(serves, fakes, guards))


def _kind(value: Tensor, varies: bool) -> Hashable:
    return value.shape[1:] if varies else value.shape, value.dtype, value.device


_TRACING = threading.RLock()  # make_fx is not made for several threads at once
