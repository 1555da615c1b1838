"""Which stages are swapped: what a lane of copies hides, what a budget needs, and what is measured."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import laws
from xtf import swap_plan, testing, tree
from xtf.host import HostMemory
from xtf.record import Record
from xtf.run.memory import estimate
from xtf.step import TrainStep, train_step
from xtf.swap_plan import Automatic, StageCost, plan_swaps
from xtf.transforms import remat, swap_activations
from xtf.transforms.swap_activations import automatic

COSTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=12).map(
    lambda rows: [StageCost(f"stage{i}", size, float(seconds)) for i, (size, seconds) in enumerate(rows)]
)


def late(costs: list[StageCost], swapped: frozenset[str], bandwidth: float) -> set[str]:
    """The stages whose copies are still under way when the stage after has run, on a simulated lane."""
    found, now, lane = set[str](), 0.0, 0.0
    for at, cost in enumerate(costs):
        now += cost.seconds
        if cost.name in swapped:
            lane = max(now, lane) + cost.bytes / bandwidth
            if lane > now + (costs[at + 1].seconds if at + 1 < len(costs) else 0):
                found.add(cost.name)
    return found


@given(COSTS, st.sampled_from([1.0, 10.0, 1e9]))
def test_without_a_budget_every_copy_is_hidden(costs: list[StageCost], bandwidth: float) -> None:
    swapped = plan_swaps(costs, bandwidth=bandwidth)
    assert not late(costs, swapped, bandwidth)
    if bandwidth == 1e9:  # all but the last are hidden, if anything runs after them
        assert swapped == {a.name for a, b in itertools.pairwise(costs) if a.bytes and b.seconds}


@given(COSTS, st.integers(0, 200), st.sampled_from([1.0, 10.0]))
def test_a_budget_is_kept_and_no_more_is_swapped_than_it_needs(costs: list[StageCost], budget: int, bandwidth: float) -> None:
    swapped = plan_swaps(costs, bandwidth=bandwidth, budget=budget)
    sizes = {cost.name: cost.bytes for cost in costs}
    held = sum(sizes.values()) - sum(sizes[name] for name in swapped)
    assert held <= budget
    hidden = plan_swaps(costs, bandwidth=bandwidth)
    if sum(sizes.values()) <= budget:
        assert not swapped
    elif swapped:
        last = max(swapped, key=lambda name: (name not in hidden, int(name.removeprefix("stage"))))  # the last that was chosen
        assert held + sizes[last] > budget


@pytest.mark.parametrize(
    ("given", "said"), [({"bandwidth": 0.0}, "bandwidth is 0.0"), ({"bandwidth": 1.0, "budget": -1}, "budget is -1 bytes")]
)
def test_bad_input(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_swaps([], **given)


@pytest.mark.parametrize("budget", [-1, "1GB", float("nan"), 1.5])
def test_a_budget_that_is_none(budget: Any) -> None:
    with pytest.raises(ValueError, match=r"automatic\(budget=.*\): expected a number of bytes of at least 0"):
        automatic(budget)


@pytest.mark.parametrize("bandwidth", [0, -1.0, "fast", float("nan")])
def test_a_bandwidth_that_is_none(bandwidth: Any) -> None:
    with pytest.raises(ValueError, match=r"automatic\(bandwidth=.*\): expected bytes per second"):
        automatic(bandwidth=bandwidth)


# In a step ----------------------------------------------------------------------------------------------------------------------


def stored(step: TrainStep, params: Any, batch: Any) -> list[str]:
    """The stages that sent something in a forward and backward."""
    record = Record()
    step.value_and_grad(params, batch, record=record)
    return [event.stage for event in record.select("start", "store") if event.bytes]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage takes a second."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(swap_plan, "_mark", lambda device: float(next(seconds)))


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("budget", [None, 0, 30_000, 10**9])
def test_two_forwards_swap_everything_then_what_was_planned(budget: int | None) -> None:
    plain = remat("nothing")(train_step(laws.model("llama"), testing.default_optimizer()))
    policy = Automatic(budget, bandwidth=40_000.0, least=1)
    host = HostMemory()
    step, batch = swap_activations(policy, host=host)(plain), testing.random_batch(61)
    params = step.init(0).params
    every = stored(step, params, batch)
    assert every == stored(step, params, batch)
    later = [stored(step, params, batch) for _ in range(2)]
    assert later[0] == later[1]
    assert policy.swapped is None  # each rank has one of its own
    if budget == 0:
        assert later[0] == every
    elif budget == 10**9:
        assert later[0] == []
    else:
        assert set(later[0]) < set(every)
    expected = tree.leaves(plain.value_and_grad(params, batch))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(tree.leaves(step.value_and_grad(params, batch)), expected, strict=True))
    assert host.out == host.back > 0


def test_it_measures() -> None:
    step = swap_activations(automatic())(train_step(laws.model("llama"), testing.default_optimizer()))
    assert "swap_activations(automatic)" in repr(step)
    own = Automatic(least=1)
    stages = [node for node in step.program if getattr(node, "store", None) is not None]
    for _ in range(3):
        for stage in stages:
            own(stage, 1 << 20)  # pyright: ignore[reportArgumentType]
            own(stage, 1 << 10)  # pyright: ignore[reportArgumentType]
    assert [cost.name for cost in own.costs] == [stage.name for stage in stages]
    assert {cost.bytes for cost in own.costs} == {(1 << 20) + (1 << 10)} and all(cost.seconds >= 0 for cost in own.costs)
    assert own.swapped is not None and swap_plan.copy_bandwidth(torch.device("cpu"), bytes=1 << 20) > 0


def test_asking_what_a_step_takes_measures_nothing() -> None:
    own = Automatic(budget=0, bandwidth=1.0, least=1)
    step = swap_activations(own)(train_step(laws.model("llama"), testing.default_optimizer()))
    for _ in range(4):
        found = estimate(step, 256)
    assert found["host"] > 0 and own.swapped is None
    params, batch = step.init(0).params, testing.random_batch(61)
    assert stored(step, params, batch) == stored(step, params, batch) != []
