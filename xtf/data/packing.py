"""Packing: documents of different lengths laid into rows of one length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from xtf.batch import IGNORE


def pack_documents(
    documents: Sequence[tuple[Sequence[int], Sequence[int]]], *, seq: int, pad_id: int = 0
) -> dict[str, Int64[Tensor, "rows {seq}"]]:
    """Lay documents into as few rows as best fit finds: each, in the order given, goes into the fullest row with room for it.

    No document is cut or reordered inside; attention and positions do not cross from one to the next (`xtf.batch`).

    Args:
        documents: (ids, labels) of each, equally long, at most ``seq``.
        seq: tokens of a row.
        pad_id: the id that stands where no document does.

    Returns:
        ``input_ids``, ``labels`` (-100 on padding) and ``document_ids`` (the document's index in ``documents``, -1 on
        padding), each (rows, seq) int64.

    Example:
        >>> rows = pack_documents([([1, 2, 3], [1, 2, 3]), ([4, 5], [-100, 5]), ([6], [6])], seq=4)
        >>> rows["input_ids"].tolist()
        [[1, 2, 3, 6], [4, 5, 0, 0]]
        >>> rows["document_ids"].tolist()
        [[0, 0, 0, 2], [1, 1, -1, -1]]

    Raises:
        ValueError: if there is no document, or one is empty, too long, or has not one label for each id.
    """
    if seq < 1:
        raise ValueError(f"seq is {seq}, expected at least 1")
    if not documents:
        raise ValueError("there is no document to pack")
    for index, (ids, labels) in enumerate(documents):
        if len(ids) != len(labels):
            raise ValueError(f"document {index} has {len(ids)} ids and {len(labels)} labels: they must be equally many")
        if not 0 < len(ids) <= seq:
            raise ValueError(f"document {index} has {len(ids)} tokens, a row holds 1 to {seq}: cut or drop it, or give a larger seq")
    rows = best_fit([len(ids) for ids, _ in documents], seq)
    packed = {
        "input_ids": torch.full((len(rows), seq), pad_id, dtype=torch.int64),
        "labels": torch.full((len(rows), seq), IGNORE, dtype=torch.int64),
        "document_ids": torch.full((len(rows), seq), -1, dtype=torch.int64),
    }
    for row, members in enumerate(rows):
        begin = 0
        for index in members:
            ids, labels = documents[index]
            end = begin + len(ids)
            packed["input_ids"][row, begin:end] = torch.tensor(ids)
            packed["labels"][row, begin:end] = torch.tensor(labels)
            packed["document_ids"][row, begin:end] = index
            begin = end
    return packed


def best_fit(lengths: Sequence[int], seq: int) -> list[list[int]]:
    """The documents of each row: each, in the order given, goes into the fullest row with room for it.

    Args:
        lengths: tokens of each document, none more than ``seq``.
        seq: tokens of a row.

    Example:
        >>> best_fit([3, 2, 1], 4)
        [[0, 2], [1]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted; full rows are taken out
    for index, length in enumerate(lengths):
        at = bisect_left(room, (length, -1))
        free, row = room.pop(at) if at < len(room) else (seq, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        if free > length:
            insort(room, (free - length, row))
    return rows
