"""`expert_parallel`: the laws on every layout, dispatcher and overlap; what is sent, and how often the host waits; bad input."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import xtf
from tests import laws
from xtf import testing, tree
from xtf.batch import cut_rows
from xtf.dispatch import DISPATCHERS
from xtf.mesh import Mesh, simulate, split_batch
from xtf.model import Model, run
from xtf.models import from_hf
from xtf.ops.reference import REFERENCE
from xtf.placement import part
from xtf.record import Record
from xtf.spec import Init
from xtf.step import compose, train_step
from xtf.transforms import chunk_loss, expert_parallel, shard

LAYOUTS = [{"expert": 2}, {"data": 2, "expert": 2}, {"expert": 3}, {"replicate": 2, "expert": 2}, {"expert": 4, "data": 1}]


@pytest.mark.parametrize(
    "case",
    [
        laws.case(**row)
        for row in laws.pairwise(
            layout=LAYOUTS,
            model=("tiny_moe", "qwen3_moe", "moe_step", "deepseek_v3"),
            dispatcher=tuple(DISPATCHERS),
            overlap=(1, 2, 3),
            regather=(True, False),
            sharded=(True, False),
            order=(0, 7, 16, 23),
            chunk=(7, None),
            micros=(None, 2),
            optimizer=("adamw", "muon"),
            batch=("documents", "weights"),
        )
    ],
    ids=str,
)
def test_laws(case: laws.Case) -> None:
    case.check()


@pytest.mark.parametrize(
    "case",
    [
        laws.case(**row)
        for row in laws.pairwise(
            layout=[{"expert": 2}, {"data": 2, "expert": 2}],
            batch=("plain", "one_rank", "ignored", "row"),
            model=("tiny_moe", "moe_pooled"),
            dispatcher=tuple(DISPATCHERS),
            overlap=(1, 2),
            chunk=(7,),
        )
    ],
    ids=str,
)
def test_laws_on_uncommon_batches(case: laws.Case) -> None:
    case.check()


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_laws_on_eight_ranks_of_which_three_have_no_experts(dispatcher: str) -> None:
    laws.case(layout={"expert": 8}, model="tiny_moe", dispatcher=dispatcher, overlap=2).check()


@pytest.mark.full
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("overlap", [1, 2, 3])
@pytest.mark.parametrize("expert", [1, 2, 4, 8])
def test_laws_matrix(expert: int, overlap: int, dispatcher: str) -> None:
    inside: dict[str, Any] = {"chunk": (None, 7), "micros": (None, 2), "optimizer": ("adamw", "muon"), "batch": ("documents",)}
    alone, both, copies = {"expert": expert}, {"data": 2, "expert": expert}, {"replicate": 2, "expert": expert}
    rows = laws.product(layout=(alone, both), sharded=(True, False), **inside) + laws.product(layout=(copies,), **inside)
    for row in rows:
        laws.case(model="tiny_moe", dispatcher=dispatcher, overlap=overlap, **row).check()
    models = ("qwen3_moe", "moe_step", "moe_pooled", "deepseek_v3")
    for row in laws.crossed({"layout": (alone, both), "model": models}, batch=laws.BATCHES[:4], order=range(24)):
        laws.case(dispatcher=dispatcher, overlap=overlap, **row).check()


class _Counts(TorchDispatchMode):
    """Counts the calls of some operations."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.calls = names, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.overloadpacket.__name__ in self.names
        return func(*args, **(kwargs or {}))


def test_a_router_routes_once() -> None:
    """In forward. Its backward takes the choice that was kept, as do experts on every rank."""
    model, batch = laws.model("qwen3_moe"), testing.random_batch(61)
    for overlap in (1, 2):

        def calls(mesh: Mesh, overlap: int = overlap) -> tuple[int, int]:
            step = expert_parallel(mesh["expert"], overlap=overlap)(train_step(model, testing.default_optimizer()))
            params = step.init(0).params
            with _Counts("topk") as forward:
                step.loss(params, batch)
            with _Counts("topk") as both:
                step.value_and_grad(params, batch)
            return forward.calls, both.calls

        assert simulate(calls, expert=2) == [(2 * overlap, 2 * overlap)] * 2


def mixture(experts: int, top_k: int) -> Model:
    config = laws.TINY_MOE | {"num_experts": experts, "num_experts_per_tok": top_k, "num_hidden_layers": 1}
    return from_hf(config, dtype=torch.float64)


@pytest.mark.parametrize("top_k", range(1, 9))
def test_any_number_of_experts_for_each_token(top_k: int) -> None:
    dispatcher = list(DISPATCHERS)[top_k % 3]
    testing.check(lambda mesh: expert_parallel(mesh["expert"], dispatcher=dispatcher), model=mixture(8, top_k), expert=3)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_all_tokens_to_one_rank(dispatcher: str) -> None:
    """Routers that know no difference choose the same two of sixteen experts for every token."""
    model = mixture(16, 2)
    specs = tree.items(model.specs)
    specs["layers.0.moe.router"] = dataclasses.replace(specs["layers.0.moe.router"], init=Init.constant(0.0))
    model = dataclasses.replace(model, specs=tree.from_items(model.specs, specs))
    testing.check(lambda mesh: expert_parallel(mesh["expert"], dispatcher=dispatcher, overlap=2), model=model, expert=4)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_rank_without_tokens(dispatcher: str) -> None:
    model, whole = laws.model("tiny_moe"), testing.random_batch(61, rows=2)

    def seen(mesh: Mesh) -> Any:
        step = expert_parallel(mesh["expert"], dispatcher=dispatcher)(train_step(model, testing.default_optimizer()))
        mine = {name: value if mesh.rank == 1 else value[:0] for name, value in whole.items()}
        loss, grads = step.value_and_grad(step.init(0).params, mine)
        return loss, step.full(grads)

    grads, loss = torch.func.grad_and_value(lambda params: model.loss(params, whole))(model.init(0))
    for got, full in simulate(seen, expert=3):
        torch.testing.assert_close(got, loss, rtol=1e-12, atol=0)
        for a, b in zip(tree.leaves(full), tree.leaves(grads), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("overlap", [1, 2])
def test_an_axis_of_one_rank_changes_nothing(overlap: int) -> None:
    model, batch = laws.model("qwen3_moe"), testing.random_batch(61)
    plain = train_step(model, testing.default_optimizer())

    def bits(step: xtf.TrainStep) -> list[Any]:
        return tree.leaves(step(step.init(0), batch))

    (spread,) = simulate(lambda mesh: bits(expert_parallel(mesh["expert"], overlap=overlap)(plain)), expert=1)
    assert all(torch.equal(a, b) for a, b in zip(spread, bits(plain), strict=True))


def test_where_leaves_live() -> None:
    """Experts are split over the expert axis and, inside it, over data; all else over both."""

    def shapes(mesh: Mesh) -> dict[str, tuple[int, ...]]:
        step = compose(shard(mesh["data"], mesh["expert"]), expert_parallel(mesh["expert"]))(
            train_step(laws.model("qwen3_moe"), testing.default_optimizer())
        )
        return {path: placement.shape() for path, placement in step.placements.items()}

    for seen in simulate(shapes, data=2, expert=3):
        assert seen["layers.0.moe.down"] == (1, 20, 10)  # 6 experts over 3 ranks, and those 2 over 2
        assert math.prod(seen["layers.0.attention.q"]) == 24 * 20 // 6


def remote(model: Model, batch: Any, mesh: Mesh) -> tuple[int, int]:
    """Over ranks and layers: pairs of a token and another rank that has experts of it, and slots of experts on another rank."""
    n, experts = mesh["expert"].size, model.config.num_experts
    owner = torch.tensor([i for i in range(n) for _ in range(*part((0, experts), n, i))])
    pairs = slots = 0
    for rank in range(n):
        for indices in _choices(model, model.pack(cut_rows(batch, n, rank))):
            owners = owner[indices]
            slots += int((owners != rank).sum())
            pairs += sum(int((owners == other).any(-1).sum()) for other in range(n) if other != rank)
    return pairs, slots


def _choices(model: Model, consts: dict[str, Any]) -> list[Tensor]:
    """The experts of every token in every layer."""
    stages = model.build(REFERENCE)
    return [run(stages[: at + 1], model.init(0), consts)["router_indices"] for at, stage in enumerate(stages) if stage.kind == "router"]


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_bytes_are_those_of_the_docstring(dispatcher: str, overlap: int) -> None:
    model, batch, n, layers = laws.model("tiny_moe"), testing.random_batch(61, rows=6), 3, 2
    k, hidden, tokens, experts = 2, 6, 6 * 13, 5

    def sent(mesh: Mesh) -> tuple[int, tuple[int, int]]:
        step = expert_parallel(mesh["expert"], dispatcher=dispatcher, overlap=overlap)(train_step(model, testing.default_optimizer()))
        record = Record()
        step.value_and_grad(step.init(0).params, split_batch(batch, mesh, axes=["expert"]), record=record)
        return record.bytes_sent("exchange"), remote(model, batch, mesh)

    seen = simulate(sent, expert=n)
    pairs, slots = seen[0][1]
    counts = layers * overlap * n * (n - 1) * (8 * math.ceil(experts / n) if dispatcher == "all_to_all" else 16)
    expected = {
        "deduplicated": 4 * pairs * hidden * 8 + 2 * pairs * k * 8 + pairs * k * 4,
        "all_to_all": 4 * slots * hidden * 8 + 2 * slots * 8,
        "all_gather": layers * (n - 1) * tokens * (4 * hidden * 8 + 2 * k * 8 + k * 4),
    }
    assert sum(got for got, _ in seen) == expected[dispatcher] + counts
    assert pairs < slots  # in this batch tokens have several experts on one rank: what the test is about


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_the_host_waits_once_for_each_layer_and_part(dispatcher: str) -> None:
    model = laws.model("tiny_moe")

    def events(mesh: Mesh, overlap: int) -> tuple[int, int, int]:
        step = expert_parallel(mesh["expert"], dispatcher=dispatcher, overlap=overlap)(train_step(model, testing.default_optimizer()))
        record = Record()
        step.value_and_grad(step.init(0).params, testing.random_batch(61, seed=mesh.rank), record=record)
        waits = record.select("wait", "sync")
        return len(waits), len({event.stage for event in waits}), len(record.select("wait", "sync", direction="backward"))

    assert simulate(lambda mesh: events(mesh, 1), expert=2) == [(2, 2, 0)] * 2
    assert simulate(lambda mesh: events(mesh, 3), expert=2) == [(6, 6, 0)] * 2


def test_twenty_routings_are_one_compiled_function() -> None:
    """Parameters, and with them routing and the rows of every rank, change from step to step; what is compiled does not, nor does it
    differ between dispatchers."""
    # as many experts on both ranks: ranks of one process share what is compiled
    model = from_hf(laws.TINY_MOE | {"num_experts": 6}, dtype=torch.float32)

    def compiled(mesh: Mesh, dispatcher: str) -> list[int]:
        step = compose(expert_parallel(mesh["expert"], overlap=2, dispatcher=dispatcher), shard(mesh["expert"]), chunk_loss(tokens=16))(
            train_step(model, xtf.optim.sgd(lr=3.0))
        )
        step = xtf.compile(step, backend="aot_eager")
        state, found, sent = step.init(0), list[int](), set[int]()
        for i in range(20):
            record = Record()
            state, _ = step(state, testing.random_batch(61, rows=3, seed=100 * i + mesh.rank), record=record)
            sent.add(record.bytes_sent("exchange"))
            mesh["expert"].barrier()  # the counter is the process'
            found.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])  # pyright: ignore[reportPrivateUsage]
            mesh["expert"].barrier()
        assert len(sent) > 10 or dispatcher == "all_gather"
        return found

    graphs = [found for name in DISPATCHERS for found in simulate(lambda mesh, name=name: compiled(mesh, name), expert=2)]
    assert graphs[0][0] > 0 and len({count for found in graphs for count in found}) == 1, graphs


def test_bad_arguments() -> None:
    step = train_step(laws.model("tiny_moe"), testing.default_optimizer())

    def said(make: Any) -> str:
        with pytest.raises(ValueError) as caught:
            simulate(make, expert=2)
        return str(caught.value)

    assert "is not a mesh axis" in said(lambda mesh: expert_parallel("expert"))  # pyright: ignore[reportArgumentType]
    assert "overlap=0" in said(lambda mesh: expert_parallel(mesh["expert"], overlap=0))
    assert "overlap=1.5" in said(lambda mesh: expert_parallel(mesh["expert"], overlap=1.5))  # pyright: ignore[reportArgumentType]
    unknown = said(lambda mesh: expert_parallel(mesh["expert"], dispatcher="deepep"))
    assert "'deepep'" in unknown and all(name in unknown for name in DISPATCHERS)
    dense = train_step(laws.model("llama"), testing.default_optimizer())
    assert "'llama' has no experts" in said(lambda mesh: expert_parallel(mesh["expert"])(dense))
    nothing = said(lambda mesh: expert_parallel(mesh["expert"], dispatcher=lambda axis, experts, label: None)(step).program)  # pyright: ignore[reportArgumentType, reportReturnType]
    assert "returned a NoneType for layers.0.experts, expected xtf.dispatch.Moves" in nothing
    twice = said(lambda mesh: compose(expert_parallel(mesh["expert"]), expert_parallel(mesh["expert"]))(step))
    assert "applied twice" in twice
    tokens = {name: value[:1, :2] for name, value in testing.random_batch(61).items()}
    short = said(lambda mesh: (s := expert_parallel(mesh["expert"], overlap=3)(step)).loss(s.init(0).params, tokens))
    assert "2 tokens cannot run in 3 parts" in short


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("donate", [False, True])
def test_scores_that_are_not_finite_never_reach_the_parameters(dispatcher: str, donate: bool) -> None:
    model, batch = laws.model("tiny_moe"), testing.random_batch(61)

    def seen(mesh: Mesh) -> Any:
        step = compose(expert_parallel(mesh["expert"], dispatcher=dispatcher), shard(mesh["expert"]))(
            train_step(model, testing.default_optimizer())
        )
        step = xtf.compile(step, backend="eager", donate=donate)
        state = step.init(0)
        leaves = tree.items(state.params)
        router = leaves["layers.1.moe.router"]
        if mesh.rank == 1:
            router.view(-1)[:1] = torch.nan
        kept = tree.map(torch.clone, (state.params, state.opt))
        state, metrics = step(state, split_batch(batch, mesh))
        assert int(metrics["skipped"]) == 1 and int(state.skipped) == 1 and int(state.step) == 1
        assert not bool(metrics["loss"].isfinite())
        same = zip(tree.leaves((state.params, state.opt)), tree.leaves(kept), strict=True)
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in same)
        if mesh.rank == 1:
            tree.items(state.params)["layers.1.moe.router"].view(-1)[:1] = 0.1
        state, metrics = step(state, split_batch(batch, mesh))
        assert int(metrics["skipped"]) == 0 and int(state.skipped) == 1 and int(state.step) == 2
        assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves((state.params, state.opt)))
        return True

    assert simulate(seen, expert=2) == [True, True]


def test_shard_and_expert_parallel_in_any_order_are_one_step() -> None:
    def text(mesh: Mesh) -> list[str]:
        parts = (shard(mesh["data"], mesh["expert"]), expert_parallel(mesh["expert"], overlap=2))
        steps = [
            compose(*order)(train_step(laws.model("tiny_moe"), testing.default_optimizer())) for order in itertools.permutations(parts)
        ]
        return [line for step in steps for line in repr(step).splitlines() if "transforms" not in line and "tokens over" not in line]

    for lines in simulate(text, data=2, expert=2):
        assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]
        assert any("expert over expert" in line for line in lines)
