"""What a document costs: against the count of a model's FLOPs, and against measured times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_lengths import QWEN3_30B

from xtf.data import Cost, document_cost, fit_cost
from xtf.models import preset
from xtf.run.flops import AttentionCall, ModelFlops, step_flops
from xtf.testing import small_models

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(lengths, st.lists(st.tuples(st.integers(1, 99), st.none() | st.integers(1, 30)), max_size=4), st.integers(1, 1000))
def test_is_what_the_count_of_flops_says(tokens: list[int], calls: list[tuple[int, int | None]], per_token: int) -> None:
    counted = ModelFlops(per_token, tuple(AttentionCall(width, window) for width, window in calls))
    assert float(document_cost(counted)(tokens).sum()) == step_flops(counted, tokens)


def test_of_a_model_is_its_step() -> None:
    model = small_models()["deepseek_v3"]
    assert float(document_cost(model)([1, 7, 30]).sum()) == step_flops(model, [1, 7, 30])


def test_of_a_published_model() -> None:
    model = preset("qwen3-30b-a3b")
    assert document_cost(model) == QWEN3_30B
    assert QWEN3_30B.linear == pytest.approx(6 * model.param_count()[1], rel=0.1)


@given(st.floats(1e-6, 1e-3), st.floats(1e-12, 1e-7), st.lists(lengths, min_size=3, max_size=8))
def test_fit_finds_what_made_the_times(linear: float, quadratic: float, packs: list[list[int]]) -> None:
    made = Cost(linear, quadratic)
    packs = [*packs, [1000], [10, 4000]]
    found = fit_cost(packs, [float(made(pack).sum()) for pack in packs])
    assert found.linear == pytest.approx(linear, rel=1e-6)
    assert found.quadratic == pytest.approx(quadratic, rel=1e-4)


def test_fit_is_the_best_without_negative_coefficients() -> None:
    packs, times = [[100], [200], [400], [800]], [1.0, 1.9, 3.5, 6.0]  # grows slower than its length
    found = fit_cost(packs, times)
    assert found.quadratic == 0

    def error(cost: Cost) -> float:
        return float(sum((float(cost(pack).sum()) - time) ** 2 for pack, time in zip(packs, times, strict=True)))

    rivals = [Cost(a, b) for a in np.linspace(0.0005, 0.02, 40).tolist() for b in [0.0, 1e-8, 1e-6, 1e-5]]
    assert error(found) <= min(map(error, rivals))
    flat = fit_cost([100, 200], [0.5, 4.0])  # faster than its square
    assert flat.linear == 0 and flat.quadratic > 0


def test_refuses() -> None:
    wrong: dict[str, Any]
    for wrong in ({"linear": -1.0}, {"quadratic": float("nan")}, {}, {"linear": 1.0, "windows": ((4, -1.0),)}):
        with pytest.raises(ValueError, match="coefficients"):
            Cost(**wrong)
    with pytest.raises(ValueError, match="window"):
        Cost(windows=((0, 1.0),))
    with pytest.raises(ValueError, match="tell"):
        fit_cost([5, 5, 5], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="tell"):
        fit_cost([5], [1.0])
    with pytest.raises(ValueError, match="one time for each"):
        fit_cost([5, 6], [1.0])
    with pytest.raises(ValueError, match="none negative"):
        fit_cost([5, 6], [1.0, -1.0])
    with pytest.raises(ValueError, match="at least 1"):
        fit_cost([5, [0, 3]], [1.0, 1.0])
    with pytest.raises(ValueError, match="at least 1"):
        fit_cost([5, np.array([1.5])], [1.0, 1.0])
