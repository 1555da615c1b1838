"""A plan as a sequence, and its statistics against the same written plainly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_lengths import ATTENTION, QWEN3_30B
from tokenizers import Tokenizer

from xtf.data import Cost, Pieces, Plan, Tokenized, independence, plan_batches, tokenize_files


def of(steps: Sequence[Sequence[Sequence[Sequence[int]]]], *, full: int, max_tokens: int = 8) -> Plan:
    """A plan of lengths, ``steps[step][rank][micro_batch]``, documents numbered in this order."""
    packs = [pack for step in steps for rank in step for pack in rank]
    lengths = np.array([n for pack in packs for n in pack], np.int64)
    flat = Pieces(np.arange(len(lengths)), np.zeros(len(lengths), np.int64), lengths)
    offsets = np.cumsum([0, *map(len, packs)])
    return Plan(max_tokens, len(steps[0]), len(steps[0][0]), full, flat, offsets, np.zeros(0, np.int64))


PLAN = of([[[[3, 1], [2]], [[4], [1, 1]]], [[[8], [2]], [[5], [5]]], [[[1], []], [[2], []]]], full=2)


def test_is_a_sequence() -> None:
    assert len(PLAN) == 3 and [step.full for step in PLAN] == [True, True, False]
    assert [[pack.tolist() for pack in rank] for rank in PLAN[0]] == [[[0, 1], [2]], [[3], [4, 5]]]
    assert [[pack.tolist() for pack in rank] for rank in PLAN[-1]] == [[[10], []], [[11], []]]
    assert [[pack.tolist() for pack in rank] for rank in PLAN[0][1:]] == [[[3], [4, 5]]]
    assert [pack.lengths.tolist() for pack in PLAN[1].pieces(-1)] == [[5], [5]]
    assert PLAN[1:].same(of([[[[8], [2]], [[5], [5]]], [[[1], []], [[2], []]]], full=1)) is False  # its documents keep their numbers
    assert PLAN[1:].full == 1 and PLAN[2:].full == 0 and len(PLAN[5:]) == 0 and len(PLAN[2:1]) == 0
    assert PLAN[:].same(PLAN) and PLAN[1:][0][0][0].tolist() == [6]
    with pytest.raises(IndexError, match="3 steps"):
        PLAN[3]
    with pytest.raises(IndexError, match="2 ranks"):
        PLAN[0][2]
    with pytest.raises(ValueError, match="stride"):
        PLAN[::2]


def test_balance_is_what_it_says() -> None:
    balance = PLAN.balance(Cost(linear=1.0))
    assert balance.steps == 2 and balance.remainder == 2
    assert balance.fill == (12 + 20) / (8 * 8) and balance.tokens == (12, 20)
    assert balance.imbalance == balance.worst == 1.0
    assert balance.lockstep == (1.0 + (8 + 5) / 10) / 2
    assert balance.micro == (4 / 3 + 8 / 5) / 2
    assert balance.remainder_imbalance == 2 / 1.5
    square = PLAN.balance(ATTENTION)
    assert square.imbalance == pytest.approx(((18 / 16) + (68 / 59)) / 2)
    assert square.worst == pytest.approx(68 / 59)
    assert square.over_bound == pytest.approx((18 + 68) / (16 + 64))
    assert PLAN.balance() == square


def test_the_bound_counts_what_must_stand_beside_the_heaviest() -> None:
    plan = of([[[[6, 1]], [[4, 4]]]], full=1)
    assert plan.bounds(Cost(linear=1.0)).tolist() == [7.5]  # the mean
    assert plan.bounds(ATTENTION).tolist() == [37.0]  # 15 tokens, of which the other rank has 8 at most: 1 beside the 6
    assert of([[[[6], [1]], [[4], [4]]]], full=1).bounds(ATTENTION).tolist() == [36.0]  # two packs hold more


def test_alike_and_drift() -> None:
    random = np.random.default_rng(0)
    lengths = np.exp(random.standard_normal(4000) + 4).astype(int).clip(1, 1000)

    def steps(order: np.ndarray) -> Plan:
        return of([[[part.tolist()]] for part in lengths[order].reshape(200, 20)], full=200, max_tokens=20_000)

    any_order, rising = steps(random.permutation(4000)), steps(np.argsort(lengths))
    assert any_order.balance().alike == pytest.approx(1, abs=0.02) and abs(any_order.balance().drift) < 0.05
    assert independence(any_order) < 2
    assert rising.balance().alike < 0.01 and rising.balance().drift > 0.9 and independence(rising) > 100
    assert independence(rising, np.arange(4000)) > 100  # numbered in their order
    assert independence(rising, random.permutation(4000)) < 2
    assert independence(of([[[[3]]]] * 8, full=8)) == 1.0  # one length
    with pytest.raises(ValueError, match="8 full steps"):
        independence(of([[[[3]]]] * 8, full=8), bins=9)
    with pytest.raises(ValueError, match="bins"):
        independence(rising, bins=1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 3), st.integers(1, 2))
def test_totals_are_sums_of_packs(lengths: list[int], ranks: int, accumulate: int) -> None:
    plan = plan_batches(lengths, max_tokens=9, data_ranks=ranks, accumulate=accumulate)
    totals = plan.totals(plan.flat.lengths)
    for k, step in enumerate(plan):
        for rank in range(ranks):
            assert totals[k, rank].tolist() == [sum(lengths[i] for i in pack) for pack in step[rank]]


@pytest.fixture(scope="module")
def real_lengths(real_inputs: Path) -> list[int]:
    files = [file for part in ("text", "chat") for file in sorted((real_inputs / part).glob("*.jsonl"))]
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").split("\n") if line]
    texts = [row["text"] if "text" in row else json.dumps(row, ensure_ascii=False) for row in rows]
    tokenizer = Tokenizer.from_file(str(real_inputs / "qwen3-tokenizer" / "tokenizer.json"))
    return [len(encoded.ids) for encoded in tokenizer.encode_batch_fast(texts)]


@pytest.mark.parametrize("cost", [ATTENTION, QWEN3_30B], ids=["attention", "model"])
@pytest.mark.parametrize(("max_tokens", "ranks"), [(2048, 8), (2048, 64), (4096, 8), (4096, 16), (8192, 4), (8192, 8), (16_384, 8)])
def test_real_texts(real_lengths: list[int], max_tokens: int, ranks: int, cost: Cost) -> None:
    """Few documents of two kinds, long articles and short conversations, in 5 steps or more: near what cannot be beaten."""
    plan = plan_batches(real_lengths, max_tokens=max_tokens, data_ranks=ranks, cost=cost, too_long="split")
    balance = plan.balance(cost)
    assert plan.full >= 5
    assert balance.over_bound <= 1.02
    assert balance.fill >= 0.997


@pytest.mark.parametrize("cost", [ATTENTION, QWEN3_30B], ids=["attention", "model"])
@pytest.mark.parametrize("ranks", [8, 64, pytest.param(512, marks=pytest.mark.full)])
def test_every_real_file_by_itself(tokenized: Tokenized, ranks: int, cost: Cost) -> None:
    """Repeated until it fills ten steps."""
    assert len(tokenized.parts) == 5
    for part in tokenized.parts:
        own = tokenized.documents.lengths[part.first : part.first + part.documents]
        lengths = np.tile(own, -(-10 * ranks * 8192 // int(own.sum())))
        balance = plan_batches(lengths, max_tokens=8192, data_ranks=ranks, cost=cost, too_long="split").balance(cost)
        assert balance.steps >= 9 and balance.over_bound <= 1.02 and balance.fill > 0.99, part.path


@pytest.fixture(scope="module")
def tokenized(real_inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenized:
    files = [file for part in ("text", "chat") for file in sorted((real_inputs / part).glob("*.json*"))]
    return tokenize_files(files, real_inputs / "smollm2-135m", cache_dir=tmp_path_factory.mktemp("cache"))
