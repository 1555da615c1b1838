"""The checker of value types: no alarm where a layout is right, and each way to forget a sum is caught where it is first used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.new_layout import tensor_parallel
from tests import laws
from xtf import testing
from xtf.batch import normalizer as one_over
from xtf.check_types import _TypedAxis, check_types
from xtf.collectives import Axis
from xtf.collectives.simulated import World, run_ranks
from xtf.compile import compile
from xtf.data import Documents
from xtf.mesh import Mesh
from xtf.ops.reference import REFERENCE
from xtf.placement import reduce_transfer
from xtf.stage import Stage, Transfer
from xtf.step import TrainStep, compose
from xtf.step_loss import StepLoss
from xtf.transforms import (
    accumulate,
    balance_batch,
    chunk_loss,
    context_parallel,
    expert_parallel,
    precision,
    remat,
    shard,
    swap_activations,
)
from xtf.type_rules import RULES, rule_of
from xtf.value_types import HOST, VARIES, WHOLE, ZERO, Kind, Operation, Typing, ValueTypeError, piece

PARTIAL = Kind("P", made="a test")

# What is right -------------------------------------------------------------------------------------------------------------------

Layout = tuple[Callable[[Mesh], testing.Transform], dict[str, int]]


def spread(dispatcher: str, overlap: int) -> Callable[[Mesh], testing.Transform]:
    return lambda m: compose(shard(m["data"], m["expert"]), expert_parallel(m["expert"], overlap=overlap, dispatcher=dispatcher))


DENSE: dict[str, Layout] = {
    "nothing": (lambda m: lambda step: step, {"tensor": 2}),
    "shard": (lambda m: shard(m["data"]), {"data": 2}),
    "replicas": (lambda m: shard(replicate=m["data"]), {"data": 3}),
    "shards and replicas": (lambda m: shard(m["data"], replicate=m["copies"], regather=False), {"data": 2, "copies": 2}),
    "accumulate": (lambda m: compose(accumulate(2), shard(m["data"])), {"data": 2}),
    "chunk_loss": (lambda m: compose(chunk_loss(tokens=5), shard(m["data"])), {"data": 2}),
    "context": (lambda m: compose(shard(m["context"]), context_parallel(m["context"])), {"context": 2}),
    "recompute": (lambda m: compose(remat("everything"), shard(m["data"])), {"data": 2}),
    "keep": (lambda m: compose(remat("nothing"), shard(m["data"])), {"data": 2}),
    "budget": (lambda m: compose(remat(0.5), shard(m["data"])), {"data": 2}),
    "swap": (lambda m: compose(swap_activations(), shard(m["data"])), {"data": 2}),
    "bfloat16": (lambda m: compose(precision(compute=torch.bfloat16), shard(m["data"])), {"data": 2}),
    "many": (
        lambda m: compose(accumulate(2), shard(m["data"], m["context"]), context_parallel(m["context"]), chunk_loss(tokens=5)),
        {"data": 2, "context": 2},
    ),
}

SPARSE: dict[str, Layout] = {
    "deduplicated": (spread("deduplicated", 1), {"data": 2, "expert": 2}),
    "all_to_all": (spread("all_to_all", 1), {"data": 1, "expert": 2}),
    "all_gather": (spread("all_gather", 1), {"data": 2, "expert": 2}),
    "overlap": (spread("deduplicated", 2), {"data": 1, "expert": 2}),
    "all": (
        lambda m: compose(
            accumulate(2),
            shard(m["data"]),
            context_parallel(m["expert"]),
            expert_parallel(m["expert"]),
            remat("nothing"),
            swap_activations(),
            chunk_loss(tokens=7),
        ),
        {"data": 1, "expert": 2},
    ),
}


def columns(axis: Axis, enter: bool = True) -> testing.Transform:
    """Columns of MLPs over an axis, with the collectives inside the stage."""

    def part(stage: Any) -> Any:
        def fn(params: Any, x: Tensor) -> Any:
            inside = axis.copy(x) if enter else x
            return (x + axis.sum(stage.fn(params, inside)[0] - inside),)

        return dataclasses.replace(stage, fn=fn, key=(stage.key, "columns"), partial_over=(axis,)) if stage.kind == "mlp" else stage

    def rewrite(step: TrainStep, program: Any) -> Any:
        return tuple(part(node) if isinstance(node, Stage) else node for node in program)

    return lambda step: step.replace("columns", owned={**step.owned, "mlp": axis}, rewrites=(*step.rewrites, rewrite))


TENSOR: dict[str, Layout] = {
    "tensor": (lambda m: tensor_parallel(m["tensor"]), {"tensor": 2}),
    "collectives in a stage": (lambda m: columns(m["tensor"]), {"tensor": 2}),
    "tensor and shards": (lambda m: compose(shard(m["data"]), tensor_parallel(m["tensor"]), chunk_loss(7)), {"data": 2, "tensor": 2}),
}


ALSO = ("nothing", "shard", "chunk_loss", "context", "keep", "bfloat16")
"""Layouts that are tried with every kind of stage each time."""


def holds(layout: Layout, model: str, **options: Any) -> None:
    given: dict[str, Any] = {**options, **layout[1]}
    (report,) = check_types(layout[0], model=laws.model(model), **given)
    for path, kinds in report.gradients.items():
        assert not set(kinds.values()) & {"partial", "mixed"}, path
    assert report.gradients and report.stages


@pytest.mark.parametrize(("layout", "model"), [*((name, "llama") for name in DENSE), *((name, "deepseek_v3") for name in ALSO)])
def test_layouts_that_are_right(layout: str, model: str) -> None:
    holds(DENSE[layout], model)


@pytest.mark.parametrize("layout", SPARSE)
def test_layouts_of_experts_that_are_right(layout: str) -> None:
    holds(SPARSE[layout], "deepseek_v3" if layout == "overlap" else "tiny_moe")


@pytest.mark.parametrize("layout", TENSOR)
def test_a_layout_by_declarations_is_right(layout: str) -> None:
    holds(TENSOR[layout], "qwen3")


EVERY = [
    *((layout, model) for layout in DENSE for model in laws.MODELS),
    *((layout, model) for layout in SPARSE for model in laws.MODELS if model not in ("llama", "qwen3")),
    *((layout, model) for layout in TENSOR for model in ("llama", "qwen3")),
]


@pytest.mark.full
@pytest.mark.parametrize(("layout", "model"), EVERY)
def test_every_layout_that_is_right(layout: str, model: str) -> None:
    holds((DENSE | SPARSE | TENSOR)[layout], model)


@pytest.mark.parametrize("batch", ["ignored", "row", "token"])
def test_batches_of_which_ranks_have_little(batch: str) -> None:
    holds((lambda m: compose(shard(m["expert"]), expert_parallel(m["expert"])), {"expert": 3}), "deepseek_v3", batch=laws.batch(batch))


def test_documents() -> None:
    documents = Documents.of([np.arange(n).tolist() for n in (13, 1, 7, 2, 21, 3)])
    holds((lambda m: compose(balance_batch(m["data"], max_tokens=24), shard(m["data"])), {"data": 2}), "llama", batch=documents)


def test_an_axis_of_one_rank_has_no_types() -> None:
    (report,) = check_types(lambda m: shard(m["data"]), model=laws.model("tiny"), data=1)
    assert str(report).startswith("llama on data=1: types hold") and report.gradients["embed.weight"] == {}


# What is wrong -------------------------------------------------------------------------------------------------------------------


def caught(transform: Callable[[Mesh], testing.Transform], model: str = "llama", **sizes: Any) -> str:
    """The message of the `ValueTypeError`."""
    with pytest.raises(ValueTypeError) as error:
        check_types(transform, model=laws.model(model), **sizes)
    return str(error.value)


def edited(edit: Callable[[Any], Any]) -> testing.Transform:
    """A transform that edits nodes after everything has been declared on them; ``None`` leaves one out."""

    def transform(step: TrainStep) -> TrainStep:
        changed = dataclasses.replace(step)
        changed.__dict__["program"] = tuple(new for node in step.program for new in [edit(node)] if new is not None)
        return changed

    return transform


def without(name: str) -> testing.Transform:
    return edited(lambda node: None if node.name == name else node)


def test_an_output_that_is_not_summed() -> None:
    said = caught(lambda m: compose(without("layers.0.attention.leave"), tensor_parallel(m["tensor"])), "qwen3", tensor=2).splitlines()
    assert said[0] == "layers.0.mlp (forward): pow uses a partial value as whole (over tensor=2)"
    assert said[1].strip() == "the value x is partial over tensor=2, written by layers.0.attention (forward)"
    assert said[2].strip() == "the partial sum was made by mm in layers.0.attention (forward)"
    assert "start_all_reduce" in said[3]


def test_an_output_that_is_not_summed_before_the_last_norm() -> None:
    said = caught(lambda m: compose(without("layers.1.mlp.leave"), tensor_parallel(m["tensor"])), "qwen3", tensor=2)
    assert said.startswith("norm (forward): ") and "written by layers.1.mlp (forward)" in said


def test_a_gradient_that_is_not_summed_on_its_way() -> None:
    said = caught(lambda m: compose(without("layers.1.mlp.enter"), tensor_parallel(m["tensor"])), "qwen3", tensor=2)
    assert said.startswith("layers.1.attention (backward): ")
    assert "the gradient of x is partial over tensor=2, written by layers.1.mlp (backward)" in said


def test_a_gradient_that_is_not_summed_at_the_end_of_its_way() -> None:
    said = caught(lambda m: compose(without("layers.0.attention.enter"), tensor_parallel(m["tensor"])), "qwen3", tensor=2)
    assert said.startswith("embed: the gradient of embed.weight is partial over tensor=2")
    assert "made by mm in layers.0.attention (backward)" in said


def test_a_gradient_that_is_not_summed_inside_a_stage() -> None:
    said = caught(lambda m: columns(m["tensor"], enter=False), "qwen3", tensor=2)
    assert said.startswith("layers.1.mlp (backward): the gradient of x is a partial sum plus a whole value")
    testing.check(lambda m: columns(m["tensor"]), model=laws.model("qwen3"), tensor=2)


def test_partial_over_is_left_out() -> None:
    def bare(step: TrainStep) -> TrainStep:
        def rewrite(step: TrainStep, program: Any) -> Any:
            return tuple(dataclasses.replace(node, partial_over=()) if isinstance(node, Stage) else node for node in program)

        return step.replace("bare", rewrites=(*step.rewrites, rewrite))

    said = caught(lambda m: compose(bare, tensor_parallel(m["tensor"])), "qwen3", tensor=2).splitlines()
    assert said[0].startswith("layers.0.attention: the gradient of layers.0.attention.k_norm, layers.0.attention.norm, ")
    assert "is partial over tensor=2" in said[0] and said[0].endswith("partial_over?")
    assert said[2].strip().startswith("layers.0.mlp: the gradient of layers.0.mlp.norm is partial")


def test_a_whole_value_added_to_a_partial_one() -> None:
    """Each rank adds x to its part, and all of that is summed: x counts twice."""

    def declared(node: Any) -> Any:  # the function of the model, without what the layout takes off
        plain = {stage.name: stage.fn for stage in laws.model("qwen3").build(REFERENCE)}
        return dataclasses.replace(node, fn=plain[node.name]) if getattr(node, "kind", "") == "mlp" else node

    said = caught(lambda m: compose(edited(declared), tensor_parallel(m["tensor"])), "qwen3", tensor=2)
    assert said.startswith("layers.0.mlp (forward): the value x is a partial sum plus a whole value: the whole part would count once")


def test_a_reduction_that_misses_an_axis_of_tokens() -> None:
    def over_data(step: TrainStep) -> TrainStep:
        def reduce(node: Any) -> Any:
            own = {path: step.placements[path] for path in node.params.values()}
            data = [axis for axis in step.token_axes if axis.name == "data"]
            return dataclasses.replace(node, reduce=reduce_transfer(node.name, own, dict.fromkeys(own, data), None))

        return edited(reduce)(step)

    said = caught(lambda m: compose(over_data, shard(replicate=m["data"]), carries(m["expert"])), data=2, expert=2)
    assert said.startswith("embed: the gradient of embed.weight is partial over expert=2, but it should be the same on all ranks")
    assert "layers.1.mlp: the gradient of layers.1.mlp.down, layers.1.mlp.gate" in said


def carries(axis: Axis) -> testing.Transform:
    return lambda step: step.replace("tokens", token_axes=step.with_token_axes((axis,)))


def again(axis: Axis, kind: str) -> testing.Transform:
    """Sums the gradients of stages of a kind once more."""

    def twice(node: Any) -> Any:
        reduce = getattr(node, "reduce", None)
        if reduce is None or node.kind != kind:
            return node

        def wait(handle: Any) -> Any:
            return {path: axis.start_all_reduce(grad, label=node.name).wait() for path, grad in reduce.wait(handle).items()}

        return dataclasses.replace(node, reduce=Transfer(reduce.start, wait))

    return edited(twice)


def test_a_gradient_that_is_summed_twice() -> None:
    said = caught(lambda m: compose(again(m["data"], "mlp"), shard(replicate=m["data"])), data=2)
    assert said.startswith("layers.1.mlp (reduction of gradients): all_reduce 'layers.1.mlp' sums a value that is the same on all ranks")
    assert "2 times as large (over data=2)" in said


def test_gradients_of_experts_that_are_summed_over_experts() -> None:
    transform = lambda m: compose(again(m["expert"], "experts"), shard(m["data"]), expert_parallel(m["expert"]))  # noqa: E731
    said = caught(transform, "qwen3_moe", data=2, expert=2)
    assert said.startswith("layers.0.experts: the gradient of layers.0.moe.down, layers.0.moe.gate_up is replicated over expert=2")
    assert "layers.0.experts sums it over expert all the same" in said


def loss(fn: Callable[..., Any]) -> testing.Transform:
    """Another function of the loss: ``fn(stage, params, x, targets, weights, normalizer)``."""

    def rewrite(step: TrainStep, program: Any) -> Any:
        def edit(stage: Any) -> Any:
            def own(params: Any, x: Tensor, *, targets: Tensor, weights: Tensor, normalizer: Tensor) -> Any:
                return fn(stage, params, x, targets, weights, normalizer)

            return dataclasses.replace(stage, fn=own) if stage.kind == "loss" else stage

        return tuple(edit(node) if isinstance(node, Stage) else node for node in program)

    return lambda step: step.replace("loss", rewrites=(*step.rewrites, rewrite))


def test_a_loss_by_a_local_count() -> None:
    def by_own(stage: Any, params: Any, x: Tensor, targets: Tensor, weights: Tensor, normalizer: Tensor) -> Any:
        return stage.fn(params, x, targets=targets, weights=weights, normalizer=one_over(weights.double().sum()))

    said = caught(lambda m: compose(loss(by_own), shard(m["data"])), "tiny", data=2)
    assert said.startswith("loss (forward): ") and "uses a partial value as whole (over data=2)" in said and "made by sum in loss" in said


@pytest.mark.parametrize("fused", [True, False])
def test_a_loss_that_is_a_local_mean(fused: bool) -> None:
    def mean(stage: Any, params: Any, x: Tensor, targets: Tensor, weights: Tensor, normalizer: Tensor) -> Any:
        logits, wanted = F.linear(x, params["weight"]), targets.clamp_min(0)
        return (F.cross_entropy(logits, wanted) if fused else F.cross_entropy(logits, wanted, reduction="none").mean(),)

    said = caught(lambda m: compose(loss(mean), shard(m["data"])), "tiny", data=2)
    assert said.startswith("loss (forward): ") and "is a mean over a dim of which each rank has a piece" in said


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_statistics_of_the_auxiliary_loss_that_are_not_summed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepLoss, "_global", lambda self, values: {name: values[name].detach() for name in self.stats})
    said = caught(lambda m: shard(m["data"]), model, data=2)
    assert said.startswith("the step (between its stages): mul uses a partial value as whole (over data=2)")
    assert "made by scatter_add in layers." in said and ".router (forward)" in said


def test_a_metric_that_is_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = StepLoss.metrics

    def local(self: Any, values: Any) -> Any:
        return metrics(self, values) | {"tokens": torch.stack([m["valid"].sum() for m in self.micros]).sum()}

    monkeypatch.setattr(StepLoss, "metrics", local)
    said = caught(lambda m: shard(m["data"]), "tiny", data=2)
    assert said.startswith("the step: the metric tokens is partial over data=2, but it should be the same on all ranks")


def test_a_number_of_the_host_that_differs() -> None:
    """What a rank's index makes different has no type; between stages the values are compared."""

    def edit(axis: Axis) -> testing.Transform:
        def shifted(node: Any) -> Any:
            if getattr(node, "kind", "") != "norm":
                return node
            return dataclasses.replace(node, fn=lambda params, x: (x * (1 + axis.index),), params={}, reduce=None)

        def rewrite(step: TrainStep, program: Any) -> Any:
            return tuple(map(shifted, program))

        return lambda step: step.replace("shifted", rewrites=(*step.rewrites, rewrite))

    said = caught(lambda m: edit(m["tensor"]), "tiny", tensor=2)
    assert "is sharded over tensor=2, but it should be the same on all ranks" in said


# Rules ---------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("xtf_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


def typing_of(rules: Any = None) -> Typing:
    return Typing({"data": 2}, lambda name, elementwise: rule_of(name, elementwise, rules))


def result(fn: Callable[..., Tensor], *inputs: tuple[Tensor, Kind], rules: Any = None) -> Kind:
    """The type over data of what a function of tensors of these types gives."""
    typing = typing_of(rules)
    for x, kind in inputs:
        typing.set(x, {"data": kind})
    with typing:
        out = fn(*(x for x, _ in inputs))
    return typing.kind(out, "data")


def test_an_operation_without_a_rule() -> None:
    x = torch.ones(3)
    assert result(twice, (x, piece(0))) == VARIES and result(twice, (x, WHOLE)).letter == "R"
    with pytest.raises(
        ValueTypeError, match=r"twice uses a partial value and has no rule; if it is linear, give it one with check_types\(rules="
    ):
        result(twice, (x, PARTIAL))

    def linear(op: Operation) -> Kind:
        return op.kinds[0]

    assert result(twice, (x, PARTIAL), rules={"xtf_tests::twice": linear}) == PARTIAL


X, ROWS = torch.ones(4, 6), torch.tensor([0, 2, 2, 3])


@pytest.mark.parametrize(
    ("fn", "kinds", "letter", "dim"),
    [
        (lambda a, b: a @ b.T, (piece(1), piece(1)), "P", None),
        (lambda a, b: a @ b.T, (piece(0), WHOLE), "S", 0),
        (lambda a, b: a @ b.T, (WHOLE, piece(0)), "S", 1),
        (lambda a, b: a @ b.T, (PARTIAL, WHOLE), "P", None),
        (lambda a, b: a + b, (PARTIAL, PARTIAL), "P", None),
        (lambda a, b: a + b, (PARTIAL, WHOLE), "M", None),
        (lambda a, b: a + b / 2, (PARTIAL, WHOLE), "P", None),
        (lambda a, b: (a + b) - b * 0.5, (PARTIAL, WHOLE), "P", None),
        (lambda a, b: a + b, (PARTIAL, ZERO), "P", None),
        (lambda a, b: torch.cat([a, b])[4:], (WHOLE, PARTIAL), "P", None),
        (lambda a, b: torch.stack([a, b]).unbind()[0], (piece(1), PARTIAL), "S", 1),
        (lambda a, b: torch.where(a > 0, b, 0), (WHOLE, PARTIAL), "P", None),
        (lambda a, b: a.sum(0), (piece(0), WHOLE), "P", None),
        (lambda a, b: a.sum(0), (piece(1), WHOLE), "S", 0),
        (lambda a, b: a.sum(0), (VARIES, WHOLE), "S", None),
        (lambda a, b: a.view(4, 2, 3).transpose(0, 1).reshape(2, 12), (piece(1), WHOLE), "S", 0),
        (lambda a, b: a.unsqueeze(1).expand(4, 5, 6).permute(2, 0, 1), (piece(1), WHOLE), "S", 0),
        (lambda a, b: a.softmax(-1).amax(1, keepdim=True) * b, (piece(0), WHOLE), "S", 0),
        (lambda a, b: torch.zeros(9, 6).index_add(0, ROWS, a), (piece(0), WHOLE), "P", None),
        (lambda a, b: torch.zeros(4, 6).index_add(0, a[:, 0].sort().indices, b), (piece(0), piece(0)), "S", 0),
        (lambda a, b: torch.zeros(4, 6).copy_(a), (piece(1), WHOLE), "S", 1),
        (lambda a, b: torch.nn.functional.embedding(ROWS, a), (WHOLE, WHOLE), "R", None),
        (lambda a, b: torch.ones(3) * 2, (WHOLE, WHOLE), "H", None),
    ],
)
def test_results(fn: Any, kinds: tuple[Kind, Kind], letter: str, dim: int | None) -> None:
    found = result(fn, (X.clone(), kinds[0]), (X.clone(), kinds[1]))
    assert (found.letter, found.dim) == (letter, dim)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: a * a,
        lambda a, b: a * b,
        lambda a, b: a + b,
        lambda a, b: 1 / a,
        lambda a, b: a.exp(),
        lambda a, b: a > 0,
        lambda a, b: a.softmax(-1),
        lambda a, b: a.amax(),
        lambda a, b: a @ b.T,
        lambda a, b: a.masked_fill(b > 0, 1.0),
        lambda a, b: (a + 1).sum() * torch.ones(2),
        lambda a, b: torch.tensor(a.sum().item()),
    ],
)
def test_partial_values_are_refused(fn: Any) -> None:
    with pytest.raises(ValueTypeError, match="partial"):
        result(fn, (X.clone(), PARTIAL), (X.clone(), piece(0)))


def test_writing_into_a_view_is_seen() -> None:
    def halves(a: Tensor, b: Tensor) -> Tensor:
        out = torch.zeros(4, 6)
        torch.mm(a, b, out=out[:, :3])
        return out

    assert result(halves, (torch.ones(4, 2), piece(1)), (torch.ones(2, 3), piece(0))).letter == "P"
    assert result(halves, (torch.ones(4, 2), piece(0)), (torch.ones(2, 3), WHOLE)) == piece(0)


def test_every_rule_is_of_an_operation() -> None:
    known = {*dir(torch.ops.aten), "attention_cpu", "attention_cpu_backward", "grouped_mm_cpu", "grouped_mm_cpu_dx", "grouped_mm_cpu_dw"}
    assert all(name in known or hasattr(torch.ops.aten, name) for name in RULES)


def collective(kind: Kind, call: Callable[[Axis, Tensor], Any]) -> Kind:
    """The type over data of what a collective over data gives."""

    def on_rank(rank: int, world: World) -> Kind:
        typing, x = typing_of(), torch.ones(4, dtype=torch.int64)
        mesh = Mesh({"data": 2}, rank, lambda mesh, names: _TypedAxis(mesh, names, world, typing))
        typing.set(x, {"data": kind})
        with typing:
            out = call(mesh["data"], x)
        return typing.kind(out if isinstance(out, Tensor) else out.wait(), "data")

    return run_ranks(2, on_rank)[0]


CALLS: dict[str, Callable[[Axis, Tensor], Any]] = {
    "sum": lambda axis, x: axis.start_all_reduce(x),
    "max": lambda axis, x: axis.start_all_reduce(x, "max"),
    "reduce_scatter": lambda axis, x: axis.start_reduce_scatter(x, [2, 2]),
    "all_gather": lambda axis, x: axis.start_all_gather(x, [4, 4]),
    "all_to_all": lambda axis, x: axis.start_all_to_all(x, [2, 2], [2, 2]),
    "broadcast": lambda axis, x: axis.start_broadcast(x, 0),
    "permute": lambda axis, x: axis.start_permute(x, 1),
    "exchange_counts": lambda axis, x: axis.exchange_counts(x[:2]),
}


@pytest.mark.parametrize("call", CALLS)
def test_collectives(call: str) -> None:
    of_pieces = {"reduce_scatter": piece(0), "permute": piece(0), "all_to_all": VARIES, "exchange_counts": VARIES}.get(call)
    found = collective(piece(0), CALLS[call])
    assert found.letter == "R" if of_pieces is None else found == of_pieces
    if call in ("sum", "reduce_scatter", "exchange_counts"):
        assert collective(PARTIAL, CALLS[call]).letter == ("R" if call == "sum" else "S")
    else:
        with pytest.raises(ValueTypeError, match="moves a value that is partial"):
            collective(PARTIAL, CALLS[call])
    if call in ("sum", "reduce_scatter"):
        with pytest.raises(ValueTypeError, match="the same on all ranks already, which makes it 2 times as large"):
            collective(WHOLE, CALLS[call])
        assert collective(HOST, CALLS[call]).letter in "RS"
    with pytest.raises(ValueTypeError, match="is given a partial sum plus a whole value"):
        collective(Kind("M"), CALLS[call])


# Arguments -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no mesh axis is given"),
        ({"data": 0}, "the size of axis 'data' must be 1 or more, got 0"),
        ({"data": 2, "rules": {"my::op": 3}}, "the rule of 'my::op' is a int"),
    ],
)
def test_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_types(lambda m: shard(m["data"]), model=laws.model("tiny"), **options)


def test_refuses_a_compiled_step() -> None:
    with pytest.raises(ValueError, match="the step is compiled by 'inductor': leave that out"):
        check_types(lambda m: lambda step: compile(shard(m["data"])(step)), model=laws.model("tiny"), data=2)
