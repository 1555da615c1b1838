"""Batches: checked once, then flattened to packed tokens and the constants that stages read.

A batch is a dict of

* ``input_ids`` (batch, seq) integers;
* ``labels`` (batch, seq) integers, ``-100`` where nothing is learned. Aligned with ``input_ids``: the label at t is the token at
  t, and the shift happens here;
* ``document_ids`` (batch, seq) integers, optional: equal neighbours are one document, negative is padding. Without it each
  row is one document;
* ``loss_weights`` (batch, seq) floats, optional: the weight of the target at t stands at t;
* ``positions`` (batch, seq) integers, optional: by default they count from 0 in each document.

The first token of a document is never a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

IGNORE = -100
"""The label that is not learned."""

PER_DOCUMENT = ("cu_seqlens", "document_tokens")
"""Constants whose first dim is that of documents; that of all others, where they have dims, is that of tokens."""

Batch = Mapping[str, Shaped[Tensor, "batch seq"]]

_KEYS = {"input_ids", "labels", "document_ids", "loss_weights", "positions"}


def check_batch(batch: Batch, vocab: int) -> None:
    """Refuse a batch that is not what this module's docstring says.

    Raises:
        ValueError: for a missing or unknown key, a wrong dtype or shape, or an id outside the vocabulary; it names the key
            and shows what was given and expected.
    """
    check_shapes(batch)
    for name, value in batch.items():
        floating = name == "loss_weights"
        if value.is_floating_point() != floating or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"batch[{name!r}] must be {'floating' if floating else 'integer'}, got {value.dtype}")
    weights = batch.get("loss_weights")
    if weights is not None and not weights.is_meta and not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError("batch['loss_weights'] has negative or non-finite values; expected weights of at least 0")
    ids = batch["input_ids"]
    if ids.numel() and not ids.is_meta:
        _check_range("input_ids", ids, vocab)
        labels = batch.get("labels")
        if labels is not None:
            _check_range("labels", torch.where(labels == IGNORE, 0, labels), vocab)


def check_shapes(batch: Batch) -> None:
    """Refuse what is no mapping of known keys to tensors of one shape (batch, seq), ``input_ids`` among them.

    Raises:
        ValueError: as for `check_batch`.
    """
    if not isinstance(batch, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        more = "; a step takes documents after xtf.transforms.balance_batch" if hasattr(batch, "lengths") else ""
        raise ValueError(f"a batch is a dict of tensors {sorted(_KEYS)}, got {type(batch).__name__}{more}")
    unknown = sorted(set(batch) - _KEYS)
    if unknown:
        raise ValueError(f"batch has unknown keys {unknown}; known are {sorted(_KEYS)}")
    if "input_ids" not in batch:
        raise ValueError(f"batch has no 'input_ids'; it has {sorted(batch)}")
    for name, value in batch.items():
        if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"batch[{name!r}] must be a tensor of shape (batch, seq), got {type(value).__name__}")
    shape = tuple(batch["input_ids"].shape)
    if len(shape) != 2:
        raise ValueError(f"batch['input_ids'] must have shape (batch, seq), got {shape}")
    for name, value in batch.items():
        if tuple(value.shape) != shape:
            raise ValueError(f"batch[{name!r}] has shape {tuple(value.shape)}, input_ids has {shape}: they must be equal")


def _check_range(name: str, ids: Integer[Tensor, "batch seq"], vocab: int) -> None:
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        raise ValueError(f"batch[{name!r}] holds the id {bad}, outside the model's vocabulary of {vocab} (0 to {vocab - 1})")


def pack(batch: Batch) -> dict[str, Any]:
    """The constants of a batch: its rows laid end to end, T = batch × seq tokens.

    Returns:
        ``input_ids`` (T,) int64; ``positions`` (T,) int64; ``cu_seqlens`` (documents + 1,) int32, where each document begins
        and the end; ``targets`` (T,) int64, the next token's label or -100; ``weights`` (T,) the weight of that target, 0
        where there is none; ``valid`` (T,) bool, false on padding.

    Example:
        >>> ids = torch.tensor([[5, 6, 7, 8]])
        >>> packed = pack({"input_ids": ids, "labels": ids, "document_ids": torch.tensor([[0, 0, 0, 1]])})
        >>> packed["targets"].tolist(), packed["cu_seqlens"].tolist(), packed["positions"].tolist()
        ([6, 7, -100, -100], [0, 3, 4], [0, 1, 2, 0])
    """
    ids = batch["input_ids"]
    rows, seq = ids.shape
    flat = ids.reshape(-1).long()
    begins = torch.zeros(rows, seq, dtype=torch.bool, device=ids.device)  # whether a document begins here
    if seq:
        begins[:, 0] = True
    documents = batch.get("document_ids")
    if documents is not None:
        begins[:, 1:] |= documents[:, 1:] != documents[:, :-1]
    begins = begins.reshape(-1)
    starts = begins.nonzero().reshape(-1)
    total = torch.tensor([flat.numel()], device=ids.device)
    if "positions" in batch:
        positions = batch["positions"].reshape(-1).long()
    elif flat.numel():
        positions = torch.arange(flat.numel(), device=ids.device) - starts[begins.cumsum(0) - 1]
    else:
        positions = flat
    valid = documents.reshape(-1) >= 0 if documents is not None else torch.ones_like(begins)
    targets = torch.full_like(flat, IGNORE)
    labels = batch.get("labels")
    if labels is not None:
        targets[:-1] = labels.reshape(-1)[1:].long().masked_fill(begins[1:] | ~valid[1:], IGNORE)
    supervised = targets != IGNORE
    weights = batch.get("loss_weights")
    if weights is None:
        weights = supervised.to(torch.float32)
    else:
        weights = torch.cat([weights.reshape(-1)[1:], weights.new_zeros(min(1, flat.numel()))]) * supervised
    return {
        "input_ids": flat,
        "positions": positions,
        "cu_seqlens": torch.cat([starts, total]).to(torch.int32),
        "targets": targets,
        "weights": weights,
        "valid": valid,
    }


def normalizer(total_weight: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """One over the sum of the weights of all targets, 0 where nothing is supervised (loss and gradients are then 0)."""
    return torch.where(total_weight > 0, 1 / total_weight.clamp_min(torch.finfo(total_weight.dtype).tiny), 0)


def cut_rows(batch: Batch, n: int, index: int) -> dict[str, Shaped[Tensor, "rows seq"]]:
    """Part ``index`` of ``n`` equal parts of a batch's rows.

    Where the rows do not divide, ignored rows are added at the end: ids 0, labels -100, weights 0, ``document_ids`` -1 (added
    to every part then, so that all parts have the same keys).

    Example:
        >>> ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
        >>> cut_rows({"input_ids": ids}, 2, 1)["document_ids"].tolist()
        [[0, 0], [-1, -1]]

    Raises:
        ValueError: for a batch of unknown keys or unequal shapes, or parts that are none.
    """
    check_shapes(batch)
    if not 0 <= index < n:
        raise ValueError(f"cut_rows: part {index} of {n} parts; expected 0 to {n - 1}")
    rows, seq = batch["input_ids"].shape
    each = -(-rows // n)
    batch = dict(batch)
    if rows % n and "document_ids" not in batch:
        batch["document_ids"] = torch.zeros_like(batch["input_ids"])
    blank = {"labels": IGNORE, "document_ids": -1}
    part: dict[str, Tensor] = {}
    for name, value in batch.items():
        mine = value[index * each : (index + 1) * each]
        missing = each - mine.shape[0]
        part[name] = torch.cat([mine, value.new_full((missing, seq), blank.get(name, 0))]) if missing else mine
    return part
