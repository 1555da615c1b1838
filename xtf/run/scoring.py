"""The loss of a model on documents, and the log-probability of every token that it had to predict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xtf import tree
from xtf.batch import IGNORE
from xtf.data.documents import Document, Documents
from xtf.model import Model
from xtf.tree import Tree

Long = Literal["split", "cut"]


@dataclass(frozen=True)
class Result:
    """What an evaluation counted. Results of two sets of documents add up to that of both.

    Args:
        nats: Σ weight × cross-entropy, over targets.
        weight: Σ weight, over targets.
        tokens: supervised tokens: targets of a weight above 0.
        documents: documents, those without a target included.
        all_tokens: tokens of these documents, supervised or not.
        bits: Σ cross-entropy / ln 2, each target once whatever its weight; 0 where bytes were not counted.
        bytes: UTF-8 bytes of the text of the targets; 0 where they were not counted.
    """

    nats: float = 0.0
    weight: float = 0.0
    tokens: int = 0
    documents: int = 0
    all_tokens: int = 0
    bits: float = 0.0
    bytes: int = 0

    @property
    def loss(self) -> float:
        """Nats per supervised token, weighted; not a number without any."""
        return self.nats / self.weight if self.weight else math.nan

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per UTF-8 byte of supervised text, which models of different tokenizers can be compared by; ``None`` if not counted."""
        return self.bits / self.bytes if self.bytes else None

    def __add__(self, other: Result) -> Result:
        """Both together."""
        return Result(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def row(self) -> dict[str, float | int | None]:
        """The numbers by name, for JSON; what is not a number is ``None``."""
        return {
            "loss": _finite(self.loss),
            "perplexity": _finite(self.perplexity),
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "weight": self.weight,
            "documents": self.documents,
            "all_tokens": self.all_tokens,
        }


class Scored(NamedTuple):
    """A document and what the model gave it.

    Args:
        number: its number, from 0.
        ids: (tokens,) int64.
        weights: (tokens,) float32, 0 where the id was no target.
        logprobs: (tokens,) float64, nats; 0 where the id was no target.
    """

    number: int
    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    logprobs: npt.NDArray[np.float64]

    @property
    def targets(self) -> npt.NDArray[np.bool_]:
        """Where the id was a target."""
        return self.weights > 0


def evaluate_documents(
    model: Model,
    params: Tree,
    documents: Documents,
    *,
    batch_tokens: int = 4096,
    seq: int | None = None,
    long: Long = "split",
    text: Callable[[Sequence[int]], str] | None = None,
    each: Callable[[Scored], object] | None = None,
) -> Result:
    """The loss of a model on documents. The logits of no more than a chunk of tokens exist at a time.

    Args:
        model: the model.
        params: whole parameters; their device is where it runs.
        documents: ids and weights.
        batch_tokens: tokens that go through the model at a time.
        seq: tokens of a piece, at most; by default the model's context, and no more than ``batch_tokens``.
        long: longer documents are ``"split"`` into pieces that do not see each other, or ``"cut"``.
        text: decodes ids, for bits per byte.
        each: called with each document in order, as soon as it is done.

    Raises:
        ValueError: for sizes that are not possible, ids outside the vocabulary, or a model whose results are not numbers.

    Example:
        >>> from xtf.models import preset
        >>> model = preset("tiny-moe")
        >>> result = evaluate_documents(model, model.init(0), Documents.of([[5, 6, 7], [8, 9]]))
        >>> result.tokens, result.documents, abs(result.loss - math.log(2048)) < 0.5
        (3, 2, True)
    """
    total = Result()
    for done in score_documents(model, params, documents, batch_tokens=batch_tokens, seq=seq, long=long):
        targets, nats = done.targets, -done.logprobs
        counted = text is not None
        total += Result(
            nats=float((nats * done.weights).sum()),
            weight=float(done.weights.sum(dtype=np.float64)),
            tokens=int(targets.sum()),
            documents=1,
            all_tokens=len(done.ids),
            bits=float(nats[targets].sum()) / math.log(2) if counted else 0.0,
            bytes=sum(len(text(run).encode()) for run in _runs(done.ids, targets)) if text is not None else 0,
        )
        if each is not None:
            each(done)
    return total


def score_documents(
    model: Model, params: Tree, documents: Documents, *, batch_tokens: int = 4096, seq: int | None = None, long: Long = "split"
) -> Iterator[Scored]:
    """The log-probabilities of each document, in order. See `evaluate_documents`."""
    check_sizes(batch_tokens, seq, ("batch_tokens", "seq"))
    context = getattr(model.config, "max_position_embeddings", batch_tokens)
    limit = seq if seq is not None else max(2, min(context, batch_tokens))
    pieces = documents.limited(limit, long=long)
    counts = np.maximum(1, -(-documents.lengths // limit)) if long == "split" else np.ones(len(documents), np.int64)
    owner = np.repeat(np.arange(len(documents)), counts)
    waiting: list[tuple[Document, npt.NDArray[np.float64]]] = []
    for first, last in _batches(pieces.lengths, batch_tokens):
        fetched = pieces.read(range(first, last))
        for index, (piece, logprobs) in enumerate(_scored(model, params, fetched), first):
            waiting.append((piece, logprobs))
            if index + 1 == len(owner) or owner[index + 1] != owner[index]:
                ids, weights, found = (
                    np.concatenate(parts) for parts in zip(*((p.ids, _supervised(p), lp) for p, lp in waiting), strict=True)
                )
                yield Scored(int(owner[index]), ids, weights, found)
                waiting = []


def _supervised(piece: Document) -> npt.NDArray[np.float32]:
    """The weights of targets: the first token has none."""
    weights = piece.weights.copy()
    weights[:1] = 0
    return weights


def _batches(lengths: npt.NDArray[np.int64], batch_tokens: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of neighbours with at most ``batch_tokens`` together."""
    first, filled = 0, 0
    for index, length in enumerate(lengths.tolist()):
        if index > first and filled + length > batch_tokens:
            yield first, index
            first, filled = index, 0
        filled += length
    if first < len(lengths):
        yield first, len(lengths)


def _scored(model: Model, params: Tree, pieces: Sequence[Document]) -> Iterator[tuple[Document, npt.NDArray[np.float64]]]:
    """Pieces laid in one row without padding, run, and taken apart again."""
    leaves: list[Tensor] = tree.leaves(params)
    device = leaves[0].device
    ids = torch.tensor(np.concatenate([piece.ids for piece in pieces]), device=device)
    weights = torch.tensor(np.concatenate([piece.weights for piece in pieces]), device=device)
    numbers = torch.tensor(np.repeat(np.arange(len(pieces)), [len(piece.ids) for piece in pieces]), device=device)
    batch = {"input_ids": ids[None], "labels": torch.where(weights > 0, ids, IGNORE)[None], "document_ids": numbers[None]}
    with torch.no_grad():
        found = model.logprobs(params, batch)[0].double().cpu().numpy()
    if not np.isfinite(found).all():
        raise ValueError("the model's log-probabilities are not numbers: its parameters are broken (a diverged run, or a wrong checkpoint)")
    ends = np.cumsum([len(piece.ids) for piece in pieces])
    for piece, end in zip(pieces, ends.tolist(), strict=True):
        yield piece, found[end - len(piece.ids) : end]


def _runs(ids: npt.NDArray[np.int64], targets: npt.NDArray[np.bool_]) -> Iterator[list[int]]:
    """The ids of targets, neighbours together, so that characters of several tokens stay whole."""
    where = np.flatnonzero(targets)
    if len(where):
        for run in np.split(where, np.flatnonzero(np.diff(where) > 1) + 1):
            yield ids[run].tolist()


def check_sizes(batch_tokens: int, seq: int | None, names: tuple[str, str]) -> None:
    """Refuse sizes that are not possible; ``names`` is what the message calls them."""
    if batch_tokens < 2:
        raise ValueError(f"{names[0]} is {batch_tokens}, expected at least 2: the first token of a document is never a target")
    if seq is not None and not 2 <= seq <= batch_tokens:
        raise ValueError(f"{names[1]} is {seq}, expected 2 to {names[0]}={batch_tokens}: a piece goes through the model as a whole")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
