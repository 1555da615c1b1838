"""Batches: what is refused, what constants they become, and how they are cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from xtf.batch import IGNORE, check_batch, cut_rows, normalizer, pack

IDS = torch.tensor([[3, 1, 4], [1, 5, 2]])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, r"batch has no 'input_ids'; it has \[\]"),
        ({"labels": IDS}, r"batch has no 'input_ids'; it has \['labels'\]"),
        (
            {"input_ids": IDS, "attention_mask": IDS, "x": IDS},
            r"unknown keys \['attention_mask', 'x'\]; known are \['document_ids', 'input_ids'",
        ),
        ({"input_ids": IDS[0]}, r"batch\['input_ids'\] must have shape \(batch, seq\), got \(3,\)"),
        ({"input_ids": IDS.tolist()}, r"batch\['input_ids'\] must be a tensor of shape \(batch, seq\), got list"),
        ({"input_ids": IDS, "labels": IDS.tolist()}, r"batch\['labels'\] must be a tensor of shape \(batch, seq\), got list"),
        ({"input_ids": IDS, "labels": IDS[:, :2]}, r"batch\['labels'\] has shape \(2, 2\), input_ids has \(2, 3\): they must be equal"),
        ({"input_ids": IDS, "loss_weights": IDS[:1].float()}, r"batch\['loss_weights'\] has shape \(1, 3\)"),
        ({"input_ids": IDS.float()}, r"batch\['input_ids'\] must be integer, got torch.float32"),
        ({"input_ids": IDS > 1}, r"batch\['input_ids'\] must be integer, got torch.bool"),
        ({"input_ids": IDS, "labels": IDS.double()}, r"batch\['labels'\] must be integer, got torch.float64"),
        ({"input_ids": IDS, "document_ids": IDS.float()}, r"batch\['document_ids'\] must be integer, got torch.float32"),
        ({"input_ids": IDS, "positions": IDS.float()}, r"batch\['positions'\] must be integer, got torch.float32"),
        ({"input_ids": IDS, "loss_weights": IDS}, r"batch\['loss_weights'\] must be floating, got torch.int64"),
        ({"input_ids": IDS, "loss_weights": IDS.to(torch.complex64)}, r"batch\['loss_weights'\] must be floating, got torch.complex64"),
        ({"input_ids": IDS, "loss_weights": -IDS.float()}, r"batch\['loss_weights'\] has negative or non-finite values"),
        ({"input_ids": IDS, "loss_weights": IDS / 0}, r"batch\['loss_weights'\] has negative or non-finite values"),
        ({"input_ids": IDS, "loss_weights": IDS * torch.nan}, r"batch\['loss_weights'\] has negative or non-finite values"),
        ([IDS], r"a batch is a dict of tensors \[.*\], got list"),
        ({"input_ids": IDS + 1}, r"batch\['input_ids'\] holds the id 6, outside the model's vocabulary of 6 \(0 to 5\)"),
        ({"input_ids": IDS - 2}, r"batch\['input_ids'\] holds the id -1, outside"),
        ({"input_ids": IDS, "labels": IDS + 1}, r"batch\['labels'\] holds the id 6, outside"),
        ({"input_ids": IDS, "labels": IDS - 2}, r"batch\['labels'\] holds the id -1, outside"),
    ],
)
def test_what_is_no_batch_is_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_batch(batch, 6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_what_is_a_batch_is_not(dtype: torch.dtype) -> None:
    labels = torch.where(IDS == 1, IGNORE, IDS)
    check_batch(
        {"input_ids": IDS.to(dtype), "labels": labels, "loss_weights": IDS.bfloat16(), "document_ids": IDS - 9, "positions": IDS}, 6
    )
    check_batch({"input_ids": IDS[:0], "labels": IDS[:0]}, 6)
    check_batch({"input_ids": IDS.to("meta"), "labels": IDS.to("meta"), "loss_weights": IDS.float().to("meta")}, 6)  # nothing to look at


def test_constants_of_packed_documents() -> None:
    packed = pack(
        {
            "input_ids": torch.tensor([[7, 8, 9, 6, 5], [1, 2, 3, 4, 0]], dtype=torch.int32),
            "labels": torch.tensor([[7, 8, IGNORE, 6, 5], [1, 2, 3, 4, 0]]),
            "document_ids": torch.tensor([[0, 0, 0, 1, 1], [2, 2, 2, -1, -1]]),
            "loss_weights": torch.tensor([[9.0, 0.5, 9.0, 9.0, 0.25], [9.0, 2.0, 0.0, 9.0, 9.0]]),
        }
    )
    assert packed["input_ids"].tolist() == [7, 8, 9, 6, 5, 1, 2, 3, 4, 0] and packed["input_ids"].dtype == torch.int64
    assert packed["positions"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1]
    assert packed["cu_seqlens"].tolist() == [0, 3, 5, 8, 10] and packed["cu_seqlens"].dtype == torch.int32
    # No target across documents or rows, none that is ignored, none in padding; the weight of target t stands at t.
    assert packed["targets"].tolist() == [8, -100, -100, 5, -100, 2, 3, -100, -100, -100]
    assert packed["weights"].tolist() == [0.5, 0, 0, 0.25, 0, 2, 0, 0, 0, 0]
    assert packed["valid"].tolist() == [True] * 8 + [False] * 2


def test_defaults() -> None:
    packed = pack({"input_ids": IDS})
    assert packed["cu_seqlens"].tolist() == [0, 3, 6] and packed["valid"].all()
    assert (packed["targets"] == IGNORE).all() and not packed["weights"].any()
    packed = pack({"input_ids": IDS, "labels": IDS})
    assert packed["targets"].tolist() == [1, 4, -100, 5, 2, -100]
    assert packed["weights"].tolist() == [1, 1, 0, 1, 1, 0] and packed["weights"].dtype == torch.float32
    packed = pack({"input_ids": IDS, "positions": IDS})
    assert packed["positions"].tolist() == IDS.flatten().tolist()


def test_documents_with_one_id_apart_are_two() -> None:
    """Equal neighbours are one document: an id that comes again begins another; rows always do."""
    packed = pack({"input_ids": torch.zeros(2, 4, dtype=torch.int64), "document_ids": torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]])})
    assert packed["cu_seqlens"].tolist() == [0, 1, 2, 4, 8]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1)])
def test_small_batches(shape: tuple[int, int]) -> None:
    ids = torch.zeros(shape, dtype=torch.int64)
    packed = pack({"input_ids": ids, "labels": ids, "loss_weights": ids.float(), "document_ids": ids})
    assert all(len(packed[name]) == ids.numel() for name in ("input_ids", "positions", "targets", "weights", "valid"))
    assert packed["cu_seqlens"].tolist() == ([0, 1] if ids.numel() else [0])
    assert not packed["weights"].any()


def plain(batch: dict[str, Tensor]) -> list[tuple[int, float]]:
    """(label, weight) of every target, by the definition, token by token."""
    rows, seq = batch["input_ids"].shape
    found: list[tuple[int, float]] = []
    for r in range(rows):
        for t in range(1, seq):
            documents = batch["document_ids"][r]
            label = int(batch["labels"][r, t])
            if documents[t] == documents[t - 1] and documents[t] >= 0 and label != IGNORE:
                found.append((label, float(batch["loss_weights"][r, t])))
    return found


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Tensor]:
    rows, seq = draw(st.integers(0, 4)), draw(st.integers(1, 6))
    matrix = lambda values: torch.tensor(  # noqa: E731
        draw(st.lists(st.lists(values, min_size=seq, max_size=seq), min_size=rows, max_size=rows))
    ).reshape(rows, seq)
    return {
        "input_ids": matrix(st.integers(0, 9)).long(),
        "labels": matrix(st.sampled_from([IGNORE, 0, 1, 2])).long(),
        "document_ids": matrix(st.integers(-1, 2)).long(),
        "loss_weights": matrix(st.sampled_from([0.0, 0.5, 1.0, 3.0])).double(),
    }


@given(batches())
def test_targets_are_those_of_the_definition(batch: dict[str, Tensor]) -> None:
    packed = pack(batch)
    at = packed["targets"] != IGNORE
    assert list(zip(packed["targets"][at].tolist(), packed["weights"][at].tolist(), strict=True)) == plain(batch)
    assert not packed["weights"][~at].any()
    assert not (at & ~packed["valid"]).any()


@given(batches())
def test_documents_tile_the_tokens(batch: dict[str, Tensor]) -> None:
    packed = pack(batch)
    bounds = packed["cu_seqlens"].tolist()
    rows, seq = batch["input_ids"].shape
    assert bounds[0] == 0 and bounds[-1] == rows * seq and bounds == sorted(set(bounds))
    assert set(range(0, rows * seq + 1, seq)) <= set(bounds)  # no document goes over the end of a row
    documents = batch["document_ids"].flatten().tolist()
    for begin, end in itertools.pairwise(bounds):
        assert len(set(documents[begin:end])) == 1
        assert packed["positions"][begin:end].tolist() == list(range(end - begin))


@given(batches(), st.integers(1, 6), st.booleans())
def test_parts_of_a_batch_hold_what_it_holds(batch: dict[str, Tensor], n: int, documents: bool) -> None:
    if not documents:
        batch = {key: value for key, value in batch.items() if key != "document_ids"}
    parts = [cut_rows(batch, n, i) for i in range(n)]
    rows = len(batch["input_ids"])
    assert {tuple(part) for part in parts} == {tuple(parts[0])}  # the same keys on all
    assert all(part[key].shape == parts[0]["input_ids"].shape for part in parts for key in part)
    joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    for key, value in batch.items():
        assert torch.equal(joined[key][:rows], value)
        assert joined[key].dtype == value.dtype
    whole, cut = pack(batch), pack(joined)
    kept = rows * batch["input_ids"].shape[1]
    for name in ("targets", "weights", "positions", "valid"):
        assert torch.equal(cut[name][:kept], whole[name])
    assert not cut["weights"][kept:].any() and not cut["valid"][kept:].any() and (cut["targets"][kept:] == IGNORE).all()
    assert len(joined["input_ids"]) - rows < n
    total = sum(float(pack(part)["weights"].sum()) for part in parts)
    assert total == float(whole["weights"].sum())


def test_parts_that_are_none_are_refused() -> None:
    for n, index in ((2, 2), (2, -1), (0, 0)):
        with pytest.raises(ValueError, match=rf"cut_rows: part {index} of {n} parts; expected 0 to"):
            cut_rows({"input_ids": IDS}, n, index)


def test_normalizer() -> None:
    assert normalizer(torch.tensor(4.0, dtype=torch.float64)) == 0.25
    assert normalizer(torch.tensor(0.0)) == 0
    tiny = torch.finfo(torch.float32).tiny
    assert normalizer(torch.tensor(tiny)) == 1 / tiny
    assert normalizer(torch.tensor(0.5, dtype=torch.float32)).dtype == torch.float32
