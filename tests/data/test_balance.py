"""Balanced batches: every document once, packs full, ranks even, order random; and how far from what cannot be beaten."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_lengths import ATTENTION, QWEN3_30B, log_normal, pareto

from xtf.data import Cost, Plan, greedy_packing, independence, least_time, length_grouped, plan_batches, stream_batches

LIMIT = 12
layouts = st.fixed_dictionaries(
    {
        "data_ranks": st.integers(1, 5),
        "accumulate": st.integers(1, 3),
        "seed": st.integers(-2, 3),
        "cost": st.sampled_from([None, ATTENTION, QWEN3_30B, Cost(linear=1.0), Cost(windows=((3, 1.0),))]),
        "window": st.none() | st.integers(1, 4),
        "mix": st.sampled_from([0.0, 0.3, 1.0]),
    }
)
sizes = st.lists(st.integers(1, LIMIT), min_size=1, max_size=150)
long_sizes = st.lists(st.integers(1, 3 * LIMIT), min_size=1, max_size=60)


def members(plan: Plan) -> list[int]:
    return [int(index) for step in plan for rank in step for pack in rank for index in pack]


def check_packs(plan: Plan, lengths: list[int]) -> None:
    """Packs within the limit; every step but the last full, with something in each pack."""
    assert plan.full in (len(plan), len(plan) - 1)
    for number, step in enumerate(plan):
        assert len(step) == plan.ranks and step.full == (number < plan.full)
        for rank in range(plan.ranks):
            packs = step.pieces(rank)
            assert len(packs) == plan.accumulate
            for pack in packs:
                assert 0 <= int(pack.lengths.sum()) <= plan.max_tokens
                assert len(pack.documents) or not step.full
                assert (pack.lengths > 0).all() and all(pack.stops <= np.asarray(lengths)[pack.documents])


@given(sizes, layouts)
def test_every_document_once_and_no_pack_over_the_limit(lengths: list[int], layout: dict[str, Any]) -> None:
    plan = plan_batches(lengths, max_tokens=LIMIT, **layout)
    check_packs(plan, lengths)
    assert sorted(members(plan)) == list(range(len(lengths)))
    assert plan.same(plan_batches(np.array(lengths, np.int32), max_tokens=LIMIT, **layout))
    balance = plan.balance(layout["cost"])
    assert balance.imbalance >= 1 - 1e-12 and balance.over_bound >= 1 - 1e-12 and balance.fill <= 1
    assert balance.lockstep >= balance.imbalance - 1e-12 and balance.micro >= balance.imbalance - 1e-12


def test_no_pack_is_left_empty_where_they_are_nearly_full() -> None:
    """What is missing to full packs is not missing from one of them alone."""
    lengths = np.random.default_rng(560).choice([4, 6], 201)
    check_packs(plan_batches(lengths, max_tokens=LIMIT, data_ranks=4, accumulate=2, window=1), lengths.tolist())


@given(long_sizes, layouts)
def test_long_documents_are_split_or_dropped(lengths: list[int], layout: dict[str, Any]) -> None:
    plan = plan_batches(lengths, max_tokens=LIMIT, too_long="split", **layout)
    check_packs(plan, lengths)
    pieces = sorted(zip(*(part.tolist() for part in plan.flat), strict=True))
    assert pieces == [(i, at, min(n, at + LIMIT)) for i, n in enumerate(lengths) for at in range(0, n, LIMIT)]
    if min(lengths) <= LIMIT:
        plan = plan_batches(lengths, max_tokens=LIMIT, too_long="drop", **layout)
        check_packs(plan, lengths)
        assert sorted(members(plan)) == [i for i, n in enumerate(lengths) if n <= LIMIT]
        assert plan.dropped.tolist() == [i for i, n in enumerate(lengths) if n > LIMIT]


@given(sizes, layouts, st.integers(0, 60))
def test_a_plan_resumed_is_the_rest_of_it(lengths: list[int], layout: dict[str, Any], done: int) -> None:
    plan = plan_batches(lengths, max_tokens=LIMIT, **layout)
    rest, before = plan[done:], plan[:done]
    assert len(rest) == max(0, len(plan) - done) and before.full + rest.full == plan.full
    assert members(before) + members(rest) == members(plan)
    for step, again in zip(itertools.islice(plan, done, None), rest, strict=True):
        assert step.full == again.full
        assert [[pack.tolist() for pack in rank] for rank in step] == [[pack.tolist() for pack in rank] for rank in again]


@given(sizes, layouts, st.integers(1, 5))
def test_workers_that_share_the_steps_have_the_same_plan(lengths: list[int], layout: dict[str, Any], workers: int) -> None:
    """Each plans for itself, and takes as many steps apart as there are workers."""
    plans = [plan_batches(lengths, max_tokens=LIMIT, **layout) for _ in range(workers)]
    taken = [plans[step % workers][step] for step in range(len(plans[0]))]
    assert [[pack.tolist() for rank in step for pack in rank] for step in taken] == [
        [pack.tolist() for rank in step for pack in rank] for step in plan_batches(lengths, max_tokens=LIMIT, **layout)
    ]


@given(sizes, layouts, st.integers(0, 60))
def test_a_stream_has_every_document_once_and_resumes(lengths: list[int], layout: dict[str, Any], done: int) -> None:
    steps = list(stream_batches(lengths, max_tokens=LIMIT, **layout))
    again = list(itertools.islice(stream_batches(iter(lengths), max_tokens=LIMIT, **layout), done, None))
    flat = [[[pack.tolist() for pack in rank] for rank in step] for step in steps]
    assert flat[done:] == [[[pack.tolist() for pack in rank] for rank in step] for step in again]
    assert sorted(i for step in flat for rank in step for pack in rank for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= LIMIT for step in flat for rank in step for pack in rank)
    assert all(step.full for step in steps[:-1])


def test_a_stream_holds_less_than_two_windows() -> None:
    lengths, taken = log_normal(40_000), 0

    def source() -> Any:
        nonlocal taken
        for length in itertools.cycle(lengths.tolist()):  # without an end
            taken += length
            yield length

    window, step_tokens, given_out = 20, 8 * 8192, 0
    for step in itertools.islice(stream_batches(source(), max_tokens=8192, data_ranks=8, window=window), 150):
        assert taken - given_out < 2 * window * step_tokens
        given_out += int(step.flat.lengths.sum())
        assert int(step.flat.lengths.sum()) > 0.98 * step_tokens


def test_a_stream_of_one_window_is_as_even_as_a_plan() -> None:
    lengths = log_normal(20_000)
    steps = list(stream_batches(lengths.tolist(), max_tokens=8192, data_ranks=8, window=150))
    cost = [[float(ATTENTION(lengths[pack]).sum()) for (pack,) in step] for step in steps if step.full]
    assert len(cost) > 290
    assert np.mean([max(ranks) * len(ranks) / sum(ranks) for ranks in cost]) < 1.005
    assert sum(int(step.flat.lengths.sum()) for step in steps if step.full) > 0.999 * len(cost) * 8 * 8192


def test_seeds_and_duplicates() -> None:
    lengths = log_normal(500)
    plans = [plan_batches(lengths, max_tokens=8192, data_ranks=4, seed=seed) for seed in (0, 1, -1, 10**30)]
    assert not any(a.same(b) for a, b in itertools.combinations(plans, 2))


def test_fewer_documents_than_ranks() -> None:
    plan = plan_batches([3, 4], max_tokens=8, data_ranks=5, accumulate=2)
    assert (len(plan), plan.full) == (1, 0) and not plan[0].full
    assert sorted(len(pack) for rank in plan[0] for pack in rank) == [0] * 8 + [1, 1]
    assert sorted(len(np.concatenate(rank)) for rank in plan[0]) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "empty"),
        ([3, 0, 0], {}, "document 1 has the length 0"),
        ([3, -4], {}, "document 1 has the length -4"),
        ([3.0, 4.0], {}, "float64"),
        ([True, False], {}, "bool"),
        ([[3, 4]], {}, "shape"),
        ([3, 9], {}, "document 1 has 9 tokens"),
        ([9, 9], {"too_long": "drop"}, "nothing is left"),
        ([3], {"too_long": "cut"}, "too_long"),
        ([3], {"data_ranks": 0}, "data_ranks is 0"),
        ([3], {"data_ranks": 1.5}, "data_ranks is 1.5"),
        ([3], {"accumulate": 0}, "accumulate"),
        ([3], {"max_tokens": 0}, "max_tokens"),
        ([3], {"window": 0}, "window"),
        ([3], {"mix": 1.5}, "mix"),
        ([3], {"mix": float("nan")}, "mix"),
        ([3], {"seed": 0.5}, "seed"),
        ([3], {"cost": lambda n: n * float("nan")}, "finite"),
        ([3], {"cost": lambda n: n * 0.0}, "above 0"),
        ([3], {"cost": lambda n: 1.0}, "shape"),
    ],
)
def test_refuses(lengths: Any, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"max_tokens": 8, "data_ranks": 2} | options
    with pytest.raises(ValueError, match=message):
        plan_batches(lengths, **arguments)
    if lengths != [[3, 4]] and "nothing" not in message:
        with pytest.raises(ValueError, match=message):
            list(stream_batches(lengths, **arguments))


# How even ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [ATTENTION, QWEN3_30B], ids=["attention", "model"])
@pytest.mark.parametrize(("ranks", "max_tokens", "most"), [(8, 8192, 1.005), (64, 8192, 1.02), (8, 65_536, 1.01)])
@pytest.mark.parametrize("seed", [0, 1])
def test_log_normal_lengths_are_full_and_even(cost: Cost, ranks: int, max_tokens: int, most: float, seed: int) -> None:
    plan = plan_batches(log_normal(20_000, seed), max_tokens=max_tokens, data_ranks=ranks, cost=cost, seed=seed)
    balance = plan.balance(cost)
    assert balance.fill >= 0.999
    assert balance.imbalance <= most
    assert balance.over_bound <= 1.02
    assert balance.tokens[0] >= 0.99 * balance.tokens[1]  # steady
    assert len(plan) - plan.full <= 1 and plan.full >= int(log_normal(20_000, seed).sum()) // (ranks * max_tokens)


@pytest.mark.parametrize("cost", [ATTENTION, QWEN3_30B], ids=["attention", "model"])
def test_micro_batches_are_even_too(cost: Cost) -> None:
    balance = plan_batches(log_normal(20_000), max_tokens=8192, data_ranks=8, accumulate=4, cost=cost).balance(cost)
    assert balance.fill >= 0.999
    assert balance.imbalance <= 1.002 and balance.lockstep <= 1.005 and balance.micro <= 1.01
    assert balance.imbalance - 1 < (balance.lockstep - 1) / 2  # what a rank has more in one micro-batch, it has less in another


def drawn(*values: int) -> Callable[[int], npt.NDArray[np.int64]]:
    return lambda count: np.random.default_rng(3).choice(np.array(values), count)


LENGTHS: dict[str, tuple[Callable[[int], npt.NDArray[np.int64]], float]] = {
    # and the least part of a pack that is filled
    "log normal": (log_normal, 0.999),
    "equal": (drawn(600), 0.952),
    "equal, as long as a pack": (drawn(8192), 1.0),
    "two that fit": (drawn(5000, 3000), 0.97),
    "two that fit badly": (drawn(5000, 100), 0.6),
    "long and short": (drawn(8192, 64), 0.999),
    "heavy tail": (pareto, 0.99),
    "uniform": (lambda count: np.random.default_rng(3).integers(1, 8193, count), 0.99),
}


@pytest.mark.parametrize("cost", [ATTENTION, QWEN3_30B], ids=["attention", "model"])
@pytest.mark.parametrize("ranks", [8, 64, pytest.param(512, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", list(LENGTHS))
def test_steps_are_near_what_cannot_be_beaten(name: str, ranks: int, cost: Cost) -> None:
    make, fill = LENGTHS[name]
    plan = plan_batches(make(2_000 * ranks if ranks < 512 else 200_000), max_tokens=8192, data_ranks=ranks, cost=cost)
    balance = plan.balance(cost)
    assert plan.full >= 9
    assert balance.over_bound <= 1.02
    assert balance.fill >= fill


def test_no_step_is_made_of_what_found_no_room() -> None:
    """No document has less than 100 tokens, so packs stay a little open and much is left: it goes into other steps, not into its own."""
    balance = plan_batches(pareto(100_000), max_tokens=8192, data_ranks=8).balance()
    assert balance.worst < 1.1 and balance.tokens[0] > 0.98 * balance.tokens[1]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [8, 512])
def test_a_million_documents_in_ten_seconds(ranks: int) -> None:
    lengths = log_normal(1_000_000)
    begin = time.process_time()
    plan = plan_batches(lengths, max_tokens=8192, data_ranks=ranks)
    assert time.process_time() - begin < 10
    balance = plan.balance()
    assert balance.fill >= 0.999 and balance.imbalance <= 1.005


def test_memory_is_linear_in_documents() -> None:
    def peak(count: int) -> int:
        lengths = log_normal(count)
        tracemalloc.start()
        plan_batches(lengths, max_tokens=8192, data_ranks=8, window=64)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    small, large = peak(20_000), peak(80_000)
    assert large < 4.4 * small and large < 80_000 * 400


# How random --------------------------------------------------------------------------------------------------------------------


def test_the_step_of_a_document_does_not_depend_on_its_place_or_length() -> None:
    lengths = log_normal(20_000)
    random = greedy_packing(lengths, max_tokens=8192, data_ranks=8)
    grouped = length_grouped(lengths, max_tokens=8192, data_ranks=8)
    place = np.arange(len(lengths))
    for seed in range(3):
        plan = plan_batches(lengths, max_tokens=8192, data_ranks=8, seed=seed)
        balance = plan.balance()
        assert abs(balance.drift) < 0.03
        assert balance.alike > 0.85
        assert independence(plan, place) < 2
        assert independence(plan) < 10 < 100 < independence(grouped)
        mixed = plan_batches(lengths, max_tokens=8192, data_ranks=8, seed=seed, mix=1.0)
        assert balance.alike < mixed.balance().alike and mixed.balance().alike > 0.97
        assert balance.imbalance < 1.01 < 1.5 < mixed.balance().imbalance
    assert independence(random) < 2 and random.balance().alike > 0.97
    assert grouped.balance().alike < 0.2


def test_a_source_in_order_of_length_is_shuffled() -> None:
    lengths = np.sort(log_normal(20_000))
    plan = plan_batches(lengths, max_tokens=8192, data_ranks=8, window=32)
    assert independence(plan, np.arange(len(lengths))) < 10 and plan.balance().alike > 0.85
    together = [np.ptp(pack) for step in plan[: plan.full] for (pack,) in step if len(pack) > 5]
    assert np.median(together) > 10_000  # packs hold documents from anywhere


def test_the_longest_document_may_stand_in_any_step() -> None:
    lengths = log_normal(150, seed=5)
    counts: dict[str, npt.NDArray[np.int64]] = {}
    for name, index in (("longest", int(lengths.argmax())), ("first", 0)):
        counts[name] = np.zeros(plan_batches(lengths, max_tokens=8192, data_ranks=2).full, np.int64)
        for seed in range(400):
            plan = plan_batches(lengths, max_tokens=8192, data_ranks=2, seed=seed)
            at = int(plan.steps[plan.flat.documents == index][0])
            if at < plan.full == len(counts[name]):
                counts[name][at] += 1
    for seen in counts.values():
        expected = seen.sum() / len(seen)
        assert seen.sum() > 200
        # chi-square: twice its degrees of freedom and 10 more is beyond one in a thousand
        assert float(((seen - expected) ** 2 / expected).sum()) < 2 * (len(seen) - 1) + 10


# What cannot be beaten ---------------------------------------------------------------------------------------------------------

two_costs = st.sampled_from([ATTENTION, Cost(3.0, 1.0)])


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 2), st.sampled_from([ATTENTION, Cost(3.0, 1.0)])
)
def test_no_other_spread_of_a_step_is_below_its_bound(lengths: list[int], ranks: int, accumulate: int, cost: Cost) -> None:
    plan = plan_batches(lengths, max_tokens=6, data_ranks=ranks, accumulate=accumulate, cost=cost)
    least = 0.0
    for step, bound in zip(plan, plan.bounds(cost).tolist(), strict=True):
        tokens = step.flat.lengths
        each, best = cost(tokens), float("inf")
        for packs in itertools.product(range(ranks * accumulate), repeat=len(tokens)):
            if np.bincount(packs, tokens, ranks * accumulate).max() <= 6:
                best = min(best, float(np.bincount(np.array(packs) // accumulate, each, ranks).max()))
        assert bound <= best * (1 + 1e-12)
        least += best
    assert least_time(np.array(lengths), max_tokens=6, data_ranks=ranks, accumulate=accumulate, cost=cost) <= least * (1 + 1e-12)
