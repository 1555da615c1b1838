"""Packed batches: documents laid into rows, as a pure function of seed, step and rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xtf.batch import IGNORE
from xtf.data.balance import plan_batches
from xtf.data.documents import Documents
from xtf.data.mix import Mixture, Source
from xtf.data.packing import best_fit

Rows = list[npt.NDArray[np.int64]]
"""The documents of each row."""

Packing = Literal["best_fit", "balanced"]
"""How documents are laid into rows."""


class PackedBatches:
    """Batches of packed rows, epoch after epoch: a pure function of (seed, step, rank), so a resumed run needs its step alone.

    In each epoch every document stands exactly once: the documents are shuffled, laid into rows by best fit, and the rows are
    shuffled. Epochs follow each other row by row, so that a step may hold the last rows of one and the first of the next.
    Documents of less than 2 tokens, which teach nothing, are not used. With ``packing="balanced"`` rows are those of
    `xtf.data.plan_batches`: the rows of a step cost nearly the same, so that ranks do, however many ranks share them; the last step of an
    epoch may be a small one.

    With ``sources`` documents are drawn in their proportions (`xtf.data.Mixture`). An epoch is then as many documents as there are, and
    `epochs` says how often each source was gone through.

    The rows of a step do not depend on how many ranks there are: a run that goes on with other ranks trains on the same.

    Args:
        documents: none longer than ``seq`` (`Documents.limited`).
        rows: of a global batch.
        seq: tokens of a row.
        seed: of the order.
        pad_id: the id that stands where no document does.
        packing: ``"best_fit"`` or ``"balanced"``.
        sources: whose documents these are, one source after another; without any, all are one.

    Raises:
        ValueError: for sizes that are not possible, a document longer than a row, or no document at all.

    Example:
        >>> batches = PackedBatches(Documents.of([[1, 2, 3], [4, 5], [6, 7]]), rows=1, seq=4, seed=0)
        >>> sorted(batches(0)["input_ids"].tolist() + batches(1)["input_ids"].tolist())
        [[1, 2, 3, 0], [4, 5, 6, 7]]
    """

    def __init__(
        self,
        documents: Documents,
        *,
        rows: int,
        seq: int,
        seed: int,
        pad_id: int = 0,
        packing: Packing = "best_fit",
        sources: Sequence[Source] = (),
    ) -> None:
        if rows < 1 or seq < 2:
            raise ValueError(f"rows is {rows} and seq is {seq}: a batch needs at least 1 row of 2 tokens (the first is never a target)")
        lengths = documents.lengths
        if len(lengths) and int(lengths.max()) > seq:
            raise ValueError(f"a document has {int(lengths.max())} tokens, a row holds {seq}: use documents.limited({seq})")
        self._used = np.flatnonzero(lengths > 1)
        if not len(self._used):
            raise ValueError(
                f"none of the {len(lengths)} documents has at least 2 tokens: there is nothing to train on; where many were left out "
                "because nothing in their first tokens is learned, rows of more tokens (--seq) would take them in"
            )
        if packing not in ("best_fit", "balanced"):
            raise ValueError(f"packing is {packing!r}, expected 'best_fit' or 'balanced'")
        if sources and sum(source.documents for source in sources) != len(documents):
            counts = {source.name: source.documents for source in sources}
            raise ValueError(f"the sources have {counts} documents, {sum(counts.values())} together, but there are {len(documents)}")
        self.documents, self.rows, self.seq, self.seed, self.pad_id, self.packing = documents, rows, seq, seed, pad_id, packing
        self.mixture = Mixture(self._only_used(sources), seed) if sources else None
        self._ends = [0]  # the number of rows up to the end of each epoch that is known so far
        self._plan = lru_cache(maxsize=3)(self._pack_epoch)

    def _only_used(self, sources: Sequence[Source]) -> list[Source]:
        ends = np.cumsum([0, *(source.documents for source in sources)])
        used = np.diff(np.searchsorted(self._used, ends)).tolist()
        return [replace(source, documents=count) for source, count in zip(sources, used, strict=True)]

    def _pack_epoch(self, epoch: int) -> Rows:
        random = np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()[:16])))
        count = len(self._used)
        order = (
            random.permutation(self._used) if self.mixture is None else self._used[self.mixture.draw(epoch * count, (epoch + 1) * count)]
        )
        if self.packing == "balanced":
            seed = int(random.integers(1 << 62))
            plan = plan_batches(self.documents.lengths[order], max_tokens=self.seq, data_ranks=self.rows, seed=seed)
            return [order[pack] for step in plan for (pack,) in step]
        packed = best_fit(self.documents.lengths[order].tolist(), self.seq)
        return [order[packed[at]] for at in random.permutation(len(packed))]

    def _row(self, index: int) -> tuple[int, npt.NDArray[np.int64]]:
        """The epoch and the documents of row ``index``, counted from the beginning of training."""
        while self._ends[-1] <= index:
            self._ends.append(self._ends[-1] + len(self._plan(len(self._ends) - 1)))
        epoch = int(np.searchsorted(self._ends, index, "right")) - 1
        return epoch, self._plan(epoch)[index - self._ends[epoch]]

    def members(self, step: int) -> Rows:
        """The documents of each row of a step's global batch."""
        return [self._row(index)[1] for index in range(step * self.rows, (step + 1) * self.rows)]

    def lengths(self, step: int, ranks: int = 1) -> list[npt.NDArray[np.int64]]:
        """The lengths of the documents that each rank has in a step."""
        each, members = -(-self.rows // ranks), self.members(step)
        parts = [members[rank * each : (rank + 1) * each] for rank in range(ranks)]
        return [self.documents.lengths[np.concatenate([np.zeros(0, np.int64), *part])] for part in parts]

    def epoch(self, step: int) -> float:
        """How many epochs are done before a step."""
        epoch, _ = self._row(step * self.rows)
        return epoch + (step * self.rows - self._ends[epoch]) / (self._ends[epoch + 1] - self._ends[epoch])

    def epochs(self, step: int) -> dict[str, float]:
        """How often each source was gone through before a step, by its name; empty without sources."""
        if self.mixture is None:
            return {}
        (epoch, _), count = self._row(step * self.rows), len(self._used)
        begun = np.concatenate([np.zeros(0, np.int64), *self._plan(epoch)[: step * self.rows - self._ends[epoch]]])
        owners = self.mixture.owner(np.searchsorted(self._used, begun))
        drawn = self.mixture.counts(epoch * count) + np.bincount(owners, minlength=len(self.mixture.sources))
        return {source.name: float(n) / source.documents for source, n in zip(self.mixture.sources, drawn.tolist(), strict=True)}

    def __call__(self, step: int, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
        """The rows of one rank: ranks in order take consecutive rows, as many on each; where rows do not divide, the last ranks
        have rows of padding.

        Returns:
            ``input_ids``, ``labels``, ``document_ids`` (rows, seq) int64 and ``loss_weights`` (rows, seq) float32 (`xtf.batch`).
        """
        if step < 0 or not 0 <= rank < ranks:
            raise ValueError(f"step is {step}, rank is {rank} of {ranks}: expected a step of at least 0 and a rank from 0 to {ranks - 1}")
        each = -(-self.rows // ranks)
        indices = range(step * self.rows + rank * each, step * self.rows + min((rank + 1) * each, self.rows))
        return fill(self.documents, [self._row(index)[1] for index in indices], rows=each, seq=self.seq, pad_id=self.pad_id)


def held_out_batches(
    documents: Documents, *, rows: int, seq: int, rank: int = 0, ranks: int = 1, pad_id: int = 0
) -> Iterator[dict[str, Tensor]]:
    """Every document once, in packed batches of one shape: what an evaluation runs over. Rows of padding fill up the last.

    Args, returns and errors are those of `PackedBatches`.
    """
    used = np.flatnonzero(documents.lengths > 1)
    packed = [used[row] for row in best_fit(documents.lengths[used].tolist(), seq)]
    each = -(-rows // ranks)
    for begin in range(0, len(packed), rows):
        part = packed[begin : begin + rows][rank * each : (rank + 1) * each]
        yield fill(documents, part, rows=each, seq=seq, pad_id=pad_id)


def fill(documents: Documents, members: Rows, *, rows: int, seq: int, pad_id: int = 0) -> dict[str, Tensor]:
    """A batch of ``rows`` rows, the first of which hold these documents, one after another."""
    ids = np.full((rows, seq), pad_id, np.int64)
    labels = np.full((rows, seq), IGNORE, np.int64)
    weights = np.zeros((rows, seq), np.float32)
    owners = np.full((rows, seq), -1, np.int64)
    for row, own in enumerate(members):
        begin, before = 0, -1
        for index, document in zip(own.tolist(), documents.read(own), strict=True):
            span = (row, slice(begin, begin + len(document.ids)))
            before = index if index != before else index + len(documents)  # neighbours of equal numbers would be one document
            ids[span], weights[span], owners[span] = document.ids, document.weights, before
            labels[span] = np.where(document.weights > 0, document.ids if document.labels is None else document.labels, IGNORE)
            begin += len(document.ids)
    parts = {"input_ids": ids, "labels": labels, "loss_weights": weights, "document_ids": owners}
    return {name: torch.from_numpy(part) for name, part in parts.items()}  # pyright: ignore[reportUnknownMemberType]


def taught(documents: Documents) -> npt.NDArray[np.bool_]:
    """Which documents have a token that is learned; the first of a document never is."""
    return np.asarray([bool((documents[index].weights[1:] > 0).any()) for index in range(len(documents))], np.bool_)
