"""The laws on real ranks: processes that speak gloo. The judge is the same as on simulated ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import xtf
from tests import gloo, laws
from xtf import testing, tree
from xtf.dispatch import DISPATCHERS
from xtf.mesh import Mesh, simulate, split_batch
from xtf.record import Record
from xtf.step import compose, train_step
from xtf.transforms import chunk_loss, precision, shard


def check(case: laws.Case) -> None:
    sizes = dict(case.sizes)
    ranks = 1
    for n in sizes.values():
        ranks *= n
    case.compare(gloo.run(laws.observe, case, ranks=ranks, **sizes))


LAYOUTS = [{"data": 2}, {"data": 3}, {"data": 4}, {"data": 2, "expert": 2}, {"data": 2, "replicate": 2}, {"replicate": 2}]
FACTORS: dict[str, Any] = {
    "layout": LAYOUTS,
    "model": ("llama", "qwen3_moe", "tiny", "moe_step"),
    "batch": ("documents", "one_rank", "ignored", "weights"),
    "chunk": (7, None),
    "micros": (None, 2),
    "order": (0, 5),
    "regather": (True, False),
    "optimizer": ("adamw", "muon"),
}


@pytest.mark.parametrize("case", [laws.case(**row) for row in laws.pairwise(**FACTORS)], ids=str)
def test_laws(case: laws.Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_laws_matrix(layout: dict[str, int]) -> None:
    every = {"layout": [layout], "model": laws.MODELS, "batch": ("documents", "one_rank", "ignored", "weights")}
    for row in laws.crossed(every, **{name: values for name, values in FACTORS.items() if name not in every}):
        check(laws.case(**row))


EXPERTS: dict[str, Any] = {
    "layout": [{"expert": 2}, {"data": 2, "expert": 2}, {"expert": 3}, {"expert": 2, "replicate": 2}],
    "model": ("tiny_moe", "qwen3_moe", "deepseek_v3", "moe_step"),
    "dispatcher": tuple(DISPATCHERS),
    "overlap": (1, 2, 3),
    "sharded": (True, False),
    "chunk": (7, None),
    "micros": (None, 2),
    "order": (0, 17),
    "optimizer": ("adamw", "muon"),
}


@pytest.mark.parametrize("case", [laws.case(**row) for row in laws.pairwise(**EXPERTS)], ids=str)
def test_laws_of_experts_on_several_ranks(case: laws.Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_laws_matrix_of_experts_on_several_ranks(dispatcher: str) -> None:
    every = {name: EXPERTS[name] for name in ("layout", "overlap", "sharded", "micros", "optimizer")} | {"dispatcher": [dispatcher]}
    for row in laws.crossed(every, **{name: values for name, values in EXPERTS.items() if name not in every}):
        check(laws.case(**row))


CONTEXT: dict[str, Any] = {
    "layout": [{"context": 2}, {"context": 3}, {"data": 2, "context": 2}, {"context": 2, "expert": 2}],
    "model": ("tiny_moe", "deepseek_v3"),
    "batch": ("lengths", "few"),
    "dispatcher": (None, "deduplicated"),
    "micros": (None, 2),
    "order": (0, 17),
}


@pytest.mark.parametrize("case", [laws.case(**row, chunk=7) for row in laws.pairwise(**CONTEXT)], ids=str)
def test_laws_of_context_on_several_ranks(case: laws.Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("layout", CONTEXT["layout"], ids=str)
def test_laws_matrix_of_context_on_several_ranks(layout: dict[str, int]) -> None:
    every = {"layout": [layout], "model": ("llama", "qwen3_moe", "deepseek_v3", "moe_step"), "batch": laws.ALL_BATCHES, "micros": (None, 2)}
    for row in laws.crossed(every, chunk=(7, None), order=range(6), sharded=(True, False), optimizer=("adamw", "muon")):
        check(laws.case(**row))


def _three_steps(mesh: Mesh) -> tuple[Any, Any, list[Any], list[tuple[str, int]]]:
    """Whole parameters, this rank's, metrics of each step, and the events with their bytes."""
    step = compose(shard(mesh["data"]), chunk_loss(7))(train_step(laws.model("qwen3_moe"), testing.default_optimizer()))
    state, record, seen = step.init(0), Record(), list[Any]()
    for i in range(3):
        state, metrics = step(state, split_batch(testing.random_batch(61, seed=i), mesh), record=record)
        seen.append(metrics)
    return step.full(state.params), state.params, seen, [(str(event), event.bytes) for event in record]


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_is_that_of_simulated_ranks(ranks: int) -> None:
    """Values to rounding (gloo sums in another order), events and bytes exactly."""
    real, simulated = gloo.run(_three_steps, ranks=ranks, data=ranks), simulate(_three_steps, data=ranks)
    for (full, local, metrics, events), (want, want_local, want_metrics, want_events) in zip(real, simulated, strict=True):
        assert events == want_events
        for got, expected in ((full, want), (local, want_local), (metrics, want_metrics)):
            assert tree.paths(got) == tree.paths(expected)
            for a, b in zip(tree.leaves(got), tree.leaves(expected), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_all_ranks_hold_the_same_values() -> None:
    """To the bit: what a rank computes from gathered parameters and global sums must not drift from its neighbour's."""
    first, *others = gloo.run(_three_steps, ranks=3, data=3)
    for full, _, metrics, _ in others:
        for a, b in zip(tree.leaves((full, metrics)), tree.leaves((first[0], first[2])), strict=True):
            assert torch.equal(a, b)


def _mixed(mesh: Mesh) -> tuple[bool, set[torch.dtype]]:
    mixed = precision(params=torch.float32, compute=torch.bfloat16, reduce=torch.float32)
    step = xtf.compile(
        compose(shard(mesh["data"]), chunk_loss(7), mixed)(
            train_step(testing.small_models(torch.float32)["llama"], testing.default_optimizer())
        ),
        backend="eager",
        donate=True,
    )
    state, losses = step.init(0), list[float]()
    batch = split_batch(testing.random_batch(61), mesh)
    before = [leaf.data_ptr() for leaf in tree.leaves(state)][:-2]
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses[-1] < losses[0] and before == [leaf.data_ptr() for leaf in tree.leaves(state)][:-2], {
        leaf.dtype for leaf in tree.leaves(state.params)
    }


def test_mixed_precision_and_donation() -> None:
    assert gloo.run(_mixed, ranks=2, data=2) == [(True, {torch.float32})] * 2


def _no_sum(mesh: Mesh) -> testing.Observation:
    def broken(step: xtf.TrainStep) -> xtf.TrainStep:
        sharded = shard(replicate=mesh["data"])(step)
        sharded.__dict__["program"] = tuple(dataclasses.replace(s, reduce=None) for s in sharded.program if isinstance(s, xtf.Stage))
        return sharded

    model = laws.model("tiny")
    return testing.observe(mesh, broken, model, laws.batch("plain"), testing.default_optimizer(), 0)


def test_the_judge_sees_a_missing_reduction_on_real_ranks() -> None:
    seen = gloo.run(_no_sum, ranks=2, data=2)
    with pytest.raises(testing.LawError, match=r"gradient of layers.0.attention.q on every rank: max\|Δ\|"):
        testing.compare("broken", seen, laws.model("tiny"), laws.batch("plain"), testing.default_optimizer(), seed=0, tolerance=1e-12)
