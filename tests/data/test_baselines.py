"""The usual ways to batch, as plans; and that balanced batches are more even than all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_lengths import ATTENTION, QWEN3_30B, log_normal

from xtf.data import Cost, best_fit_packing, concatenate_and_cut, greedy_packing, length_grouped, plan_batches

LIMIT = 12
layouts = st.fixed_dictionaries({"data_ranks": st.integers(1, 4), "accumulate": st.integers(1, 3), "seed": st.integers(0, 3)})


WHOLE = st.sampled_from([greedy_packing, best_fit_packing, length_grouped])


@given(st.lists(st.integers(1, LIMIT), min_size=1, max_size=120), layouts, WHOLE)
def test_every_document_once_and_no_pack_over_the_limit(lengths: list[int], layout: dict[str, Any], method: Any) -> None:
    plan = method(lengths, max_tokens=LIMIT, **layout)
    assert sorted(plan.flat.documents.tolist()) == list(range(len(lengths)))
    assert plan.flat.lengths.tolist() == [lengths[i] for i in plan.flat.documents]
    packs = plan.totals(plan.flat.lengths)
    assert packs.max() <= LIMIT and (packs[: plan.full] > 0).all() and len(plan) - plan.full <= 1
    assert plan.same(method(lengths, max_tokens=LIMIT, **layout))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), layouts)
def test_cutting_fills_all_packs_but_the_last_and_loses_no_token(lengths: list[int], layout: dict[str, Any]) -> None:
    plan = concatenate_and_cut(lengths, max_tokens=LIMIT, **layout)
    packs = np.sort(plan.totals(plan.flat.lengths).reshape(-1))[::-1]
    whole, rest = divmod(sum(lengths), LIMIT)
    assert packs.tolist() == [LIMIT] * whole + [rest] + [0] * (len(packs) - whole - 1) if len(packs) > whole else not rest
    seen = {(i, t) for i, a, b in zip(*(part.tolist() for part in plan.flat), strict=True) for t in range(a, b)}
    assert seen == {(i, t) for i, n in enumerate(lengths) for t in range(n)}
    assert plan.flat.lengths.sum() == sum(lengths)


@pytest.mark.parametrize("cost", [ATTENTION, QWEN3_30B], ids=["attention", "model"])
def test_balanced_batches_are_more_even(cost: Cost) -> None:
    lengths = log_normal(20_000)
    layout: dict[str, Any] = {"max_tokens": 8192, "data_ranks": 8}
    ours = plan_batches(lengths, cost=cost, **layout).balance(cost)
    cut = concatenate_and_cut(lengths, **layout).balance(cost)
    greedy = greedy_packing(lengths, **layout).balance(cost)
    grouped = length_grouped(lengths, **layout).balance(cost)
    assert cut.fill == 1.0
    assert greedy.fill < 0.96 and grouped.fill < 0.97
    for other in (cut, greedy, grouped):
        assert ours.imbalance - 1 < (other.imbalance - 1) / 10
    assert grouped.alike < 0.2 < 0.85 < ours.alike < greedy.alike


def test_refuses() -> None:
    for method in (concatenate_and_cut, greedy_packing, length_grouped):
        with pytest.raises(ValueError, match="data_ranks"):
            method([3], max_tokens=8, data_ranks=0)
        with pytest.raises(ValueError, match="empty"):
            method([], max_tokens=8, data_ranks=1)
    for method in (greedy_packing, length_grouped):
        with pytest.raises(ValueError, match="9 tokens"):
            method([9], max_tokens=8, data_ranks=1)
    with pytest.raises(ValueError, match="window"):
        length_grouped([3], max_tokens=8, data_ranks=1, window=0)
