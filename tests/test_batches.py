"""Packed batches: every document once an epoch, the same rows whoever asks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xtf.batch import check_batch, pack
from xtf.data import Documents, Mixture, PackedBatches, Source, held_out_batches
from xtf.data.batches import Packing


def documents(lengths: list[int]) -> Documents:
    """Ids that name the document, so that each can be found again."""
    return Documents.of([[i + 1] * n for i, n in enumerate(lengths)], [[0.0] + [0.5] * (n - 1) if n else [] for n in lengths])


lengths = st.lists(st.integers(2, 7), min_size=1, max_size=30)
packings: Any = st.sampled_from(["best_fit", "balanced"])


@given(lengths, st.integers(1, 4), st.integers(0, 3), packings)
@settings(max_examples=50)
def test_each_epoch_has_every_document_once(sizes: list[int], rows: int, seed: int, packing: Packing) -> None:
    batches = PackedBatches(documents(sizes), rows=rows, seq=7, seed=seed, packing=packing)
    flat = [row.tolist() for step in range(200) for row in batches.members(step)]
    seen: list[int] = []
    for row in flat:
        assert sum(sizes[i] for i in row) <= 7
        seen += row
        if len(seen) >= 2 * len(sizes):
            break
    assert sorted(seen[: len(sizes)]) == list(range(len(sizes)))  # an epoch ends at a row's end
    assert sorted(seen[len(sizes) : 2 * len(sizes)]) == list(range(len(sizes)))


@given(lengths, st.integers(1, 5), st.integers(1, 4), st.integers(0, 20), packings, st.booleans())
def test_ranks_hold_the_rows_of_the_global_batch(sizes: list[int], rows: int, ranks: int, step: int, packing: Packing, mixed: bool) -> None:
    sources = [Source("first", 1, 2.0), Source("rest", len(sizes) - 1)] if mixed and len(sizes) > 1 else []
    batches = PackedBatches(documents(sizes), rows=rows, seq=7, seed=1, packing=packing, sources=sources)
    whole = batches(step)
    parts = [batches(step, rank, ranks) for rank in range(ranks)]
    assert len({part["input_ids"].shape for part in parts}) == 1
    for name, value in whole.items():
        joined = torch.cat([part[name] for part in parts])
        assert torch.equal(joined[:rows], value)
    total = sum(int(n.sum()) for n in batches.lengths(step, ranks))
    assert total == int((whole["document_ids"] >= 0).sum())


def test_a_batch_is_one_and_asked_again_the_same() -> None:
    docs = documents([5, 3, 4, 2, 6, 7])
    a, b = (PackedBatches(docs, rows=2, seq=8, seed=3) for _ in range(2))
    late = b(17)  # without asking for those before
    assert all(torch.equal(late[name], a(17)[name]) for name in late)
    batch = a(0)
    check_batch(batch, 10)
    assert set(batch) == {"input_ids", "labels", "loss_weights", "document_ids"}
    weights = pack(batch)["weights"]
    assert set(weights.unique().tolist()) <= {0.0, 0.5}
    assert any(not torch.equal(a(0)["input_ids"], PackedBatches(docs, rows=2, seq=8, seed=s)(0)["input_ids"]) for s in range(4, 9))


def test_epochs_are_counted() -> None:
    batches = PackedBatches(documents([4] * 6), rows=2, seq=4, seed=0)
    assert [batches.epoch(step) for step in (0, 1, 3, 7)] == [0, pytest.approx(1 / 3), 1, pytest.approx(7 / 3)]


def test_held_out_has_every_document_once_on_any_ranks() -> None:
    docs = documents([5, 3, 4, 2, 6, 7, 7])
    for ranks in (1, 2, 3):
        seen: list[int] = []
        for rank in range(ranks):
            for batch in held_out_batches(docs, rows=3, seq=8, rank=rank, ranks=ranks):
                assert batch["input_ids"].shape == (3 if ranks == 1 else 2 if ranks == 2 else 1, 8)
                seen += batch["document_ids"].unique().tolist()
        assert sorted(i for i in seen if i >= 0) == list(range(7))


def test_documents_that_teach_nothing_are_left_out() -> None:
    docs = Documents.of([[1], [], [2, 3]])
    assert [row.tolist() for row in PackedBatches(docs, rows=1, seq=4, seed=0).members(0)] == [[2]]
    with pytest.raises(ValueError, match="none of the 2 documents has at least 2 tokens"):
        PackedBatches(docs.select([0, 1]), rows=1, seq=4, seed=0)


@pytest.mark.parametrize(("rows", "seq", "error"), [(0, 4, "rows is 0"), (1, 1, "seq is 1"), (1, 2, "use documents.limited")])
def test_impossible_sizes_are_refused(rows: int, seq: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        PackedBatches(documents([3]), rows=rows, seq=seq, seed=0)


def test_limits_cut_or_split() -> None:
    docs = Documents.of([[1, 2, 3, 4, 5], [6], [7, 8, 9]], [[0, 1, 1, 0, 1], [1], [0, 1, 1]])
    split = docs.limited(2, long="split")
    assert [split[i].ids.tolist() for i in range(len(split))] == [[1, 2], [3, 4], [5], [6], [7, 8], [9]]
    assert split[1].weights.tolist() == [1, 0]
    assert np.array_equal(split.lengths, [2, 2, 1, 1, 2, 1])
    cut = docs.limited(4)
    assert [cut[i].ids.tolist() for i in range(3)] == [[1, 2, 3, 4], [6], [7, 8, 9]]
    joined = Documents.join([docs.select([2]), docs])
    assert [joined[i].ids.tolist() for i in (0, 1, 3)] == [[7, 8, 9], [1, 2, 3, 4, 5], [7, 8, 9]]
    auto = Documents.join([docs, Documents.of([[1, 2, 3]])]).limited(2, long="auto")
    assert auto.lengths.tolist() == [2, 1, 2, 2, 1]  # the first and the third teach only some of their tokens
    with pytest.raises(ValueError, match="expected 'cut', 'split' or 'auto'"):
        docs.limited(4, long="drop")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="at least 2 tokens"):
        docs.limited(1)


def test_bad_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has the length -2"):
        Documents(np.asarray([1, -2]), lambda indices: [[1]])
    with pytest.raises(ValueError, match="one sequence of integers"):
        Documents(np.asarray([0.5]), lambda indices: [[1]])
    with pytest.raises(ValueError, match="one weight for each"):
        Documents.of([[1, 2]], [[1.0]])


def test_balanced_rows_are_more_even_and_no_less_full() -> None:
    random = np.random.default_rng(0)
    sizes = np.clip(np.rint(40 * np.exp(random.standard_normal(600))), 2, 512).astype(int).tolist()
    worst: dict[str, float] = {}
    for packing in ("best_fit", "balanced"):
        batches = PackedBatches(documents(sizes), rows=8, seq=512, seed=0, packing=packing)
        steps = sum(sizes) // (8 * 512)
        costs = [[int((n.astype(int) ** 2).sum()) for n in batches.lengths(step, 4)] for step in range(steps)]
        worst[packing] = float(np.mean([max(cost) / np.mean(cost) for cost in costs]))
        assert np.mean([sum(int(n.sum()) for n in batches.lengths(step)) for step in range(steps)]) > 0.97 * 8 * 512
    assert worst["balanced"] < 1.1 < 1.4 < worst["best_fit"]


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 5)), min_size=1, max_size=4), st.integers(0, 5), st.integers(0, 400))
def test_a_mixture_keeps_proportions_and_gives_every_document_once_an_epoch(given_: list[tuple[int, float]], seed: int, cut: int) -> None:
    sources = [Source(str(i), n, w) for i, (n, w) in enumerate(given_)]
    mixture, total = Mixture(sources, seed), sum(w for _, w in given_)
    order = mixture.draw(0, 1000)
    assert np.array_equal(np.concatenate([mixture.draw(0, cut), Mixture(sources, seed).draw(cut, 1000)]), order)
    owners = mixture.owner(order)
    assert np.array_equal(mixture.counts(1000), np.bincount(owners, minlength=len(sources)))
    first = 0
    for index, source in enumerate(sources):
        mine = order[owners == index] - first
        assert abs(len(mine) - 1000 * source.weight / total) < 8
        for begin in range(0, len(mine) - source.documents + 1, source.documents):
            assert sorted(mine[begin : begin + source.documents].tolist()) == list(range(source.documents))
        first += source.documents


@pytest.mark.parametrize("packing", ["best_fit", "balanced"])
def test_sources_are_drawn_by_weight_and_their_epochs_are_counted(packing: Packing) -> None:
    docs = documents([5] * 40 + [1] + [6] * 9)  # the document of one token is not used
    sources = [Source("large", 40, 1.0), Source("small", 10, 1.0)]
    batches = PackedBatches(docs, rows=3, seq=20, seed=2, packing=packing, sources=sources)
    seen = np.zeros(50, int)
    for step in range(120):
        epochs = batches.epochs(step)
        assert epochs == {"large": pytest.approx(seen[:40].sum() / 40), "small": pytest.approx(seen[41:].sum() / 9)}
        for row in batches.members(step):
            np.add.at(seen, row, 1)
    assert abs(seen[:40].sum() - seen[41:].sum()) < 25 and seen[:40].sum() > 300
    assert seen[:40].max() - seen[:40].min() <= 2 and seen[41:].max() - seen[41:].min() <= 2 and seen[40] == 0
    late = PackedBatches(docs, rows=3, seq=20, seed=2, packing=packing, sources=sources)  # resumed: asked for the last step only
    assert all(np.array_equal(a, b) for a, b in zip(late.members(119), batches.members(119), strict=True))
    assert PackedBatches(docs, rows=3, seq=20, seed=2).epochs(3) == {}


def test_a_document_twice_in_a_row_stays_two() -> None:
    batch = PackedBatches(documents([3, 2]), rows=1, seq=12, seed=0, sources=[Source("a", 1, 9.0), Source("b", 1)])
    for step in range(20):
        packed = pack(batch(step))
        assert int((packed["positions"] == 0).sum()) >= sum(len(row) for row in batch.members(step))


def test_impossible_mixtures_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the weight of chat is -1.0: expected a finite number above 0"):
        Source("chat", 3, -1.0)
    with pytest.raises(ValueError, match="the source chat has no document"):
        Source("chat", 0)
    with pytest.raises(ValueError, match="each of a name of its own"):
        Mixture([Source("a", 1), Source("a", 2)], 0)
    with pytest.raises(ValueError, match=r"the sources have \{'a': 1\} documents, 1 together, but there are 2"):
        PackedBatches(documents([3, 3]), rows=1, seq=4, seed=0, sources=[Source("a", 1)])
    with pytest.raises(ValueError, match="packing is 'best'"):
        PackedBatches(documents([3]), rows=1, seq=4, seed=0, packing="best")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="the source b has no document"):
        PackedBatches(documents([3, 1]), rows=1, seq=4, seed=0, sources=[Source("a", 1), Source("b", 1)])


def test_documents_that_are_not_there_are_refused() -> None:
    docs = documents([3, 4])
    assert [len(one.ids) for one in docs.read([1, 0, 1])] == [4, 3, 4] and docs.read([]) == []
    with pytest.raises(IndexError, match="documents 1 to 2 are asked for, there are 2"):
        docs.read([1, 2])
    with pytest.raises(IndexError, match="there are 2"):
        docs.read([-1])
    with pytest.raises(ValueError, match=r"a factor of loss weights is 0: expected a finite number above 0"):
        docs.weighted(0)
