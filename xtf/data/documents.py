"""Documents: lengths known, tokens fetched when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt


class Document(NamedTuple):
    """One document.

    Args:
        ids: (tokens,) int64.
        weights: (tokens,) float32; the loss weight of the target at t stands at t, 0 where nothing is learned.
    """

    ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Documents:
    """Any number of documents, identical on all ranks; each rank fetches only what it needs.

    Args:
        lengths: (documents,) int64, tokens of each.
        fetch: ``fetch(index)`` gives the document of that index.

    Example:
        >>> docs = Documents.of([[5, 6, 7], [8]])
        >>> docs.lengths.tolist(), docs.fetch(0).ids.tolist(), docs.fetch(1).weights.tolist()
        ([3, 1], [5, 6, 7], [1.0])

    Raises:
        ValueError: if ``lengths`` is not one-dimensional, or negative somewhere.
    """

    lengths: npt.NDArray[np.int64]
    fetch: Callable[[int], Document]

    def __post_init__(self) -> None:
        lengths = np.asarray(self.lengths)
        if lengths.ndim != 1 or (len(lengths) and not np.issubdtype(lengths.dtype, np.integer)):
            raise ValueError(f"lengths must be one sequence of integers, got shape {lengths.shape} of {lengths.dtype}")
        if len(lengths) and int(lengths.min()) < 0:
            raise ValueError(f"document {int(lengths.argmin())} has the length {int(lengths.min())}: expected 0 or more tokens")
        object.__setattr__(self, "lengths", lengths.astype(np.int64))

    @staticmethod
    def of(ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None) -> Documents:
        """Documents in memory; without ``weights`` every token has the weight 1."""
        kept = [np.asarray(part, np.int64) for part in ids]
        heavy = [np.ones(len(part), np.float32) for part in kept] if weights is None else [np.asarray(w, np.float32) for w in weights]
        if [len(part) for part in kept] != [len(part) for part in heavy]:
            raise ValueError("each document needs one weight for each of its ids")
        return Documents(np.asarray([len(part) for part in kept], np.int64), lambda index: Document(kept[index], heavy[index]))

    @property
    def tokens(self) -> int:
        """Of all documents together."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, indices: Sequence[int] | npt.NDArray[Any]) -> Documents:
        """The documents of these indices, in this order.

        Example:
            >>> Documents.of([[1], [2, 3], [4]]).select([2, 1]).lengths.tolist()
            [1, 2]
        """
        chosen = np.asarray(indices, np.int64)
        return Documents(self.lengths[chosen], lambda index: self.fetch(int(chosen[index])))

    @staticmethod
    def join(parts: Sequence[Documents]) -> Documents:
        """The documents of several sources, one source after another.

        Example:
            >>> Documents.join([Documents.of([[1]]), Documents.of([[2, 3]])]).fetch(1).ids.tolist()
            [2, 3]
        """
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

        def fetch(index: int) -> Document:
            part = int(np.searchsorted(ends, index, "right"))
            return parts[part].fetch(index - int(ends[part - 1] if part else 0))

        return Documents(np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)]), fetch)

    def limited(self, tokens: int, *, long: Literal["cut", "split", "auto"] = "cut") -> Documents:
        """No document longer than ``tokens``.

        Args:
            tokens: the most a document may have.
            long: what happens to those that have more: ``"cut"`` drops their ends (a conversation keeps its beginning),
                ``"split"`` makes several documents of them, none of which is lost; ``"auto"`` splits those of which every token
                is learned (texts) and cuts the others (conversations).

        Example:
            >>> docs = Documents.of([[1, 2, 3, 4, 5]])
            >>> docs.limited(2).lengths.tolist(), docs.limited(2, long="split").lengths.tolist()
            ([2], [2, 2, 1])
        """
        if tokens < 2:
            raise ValueError(f"a document needs at least 2 tokens to teach one (the first is never a target), got a limit of {tokens}")
        if long not in ("cut", "split", "auto"):
            raise ValueError(f"long is {long!r}, expected 'cut', 'split' or 'auto'")
        pieces = np.maximum(1, -(-self.lengths // tokens))
        for index in np.flatnonzero(pieces > 1).tolist():
            if long == "cut" or (long == "auto" and not bool((self.fetch(index).weights > 0).all())):
                pieces[index] = 1
        owner = np.repeat(np.arange(len(self), dtype=np.int64), pieces)
        first = np.cumsum(pieces) - pieces
        begins = (np.arange(len(owner), dtype=np.int64) - first[owner]) * tokens

        def fetch(index: int) -> Document:
            whole, begin = self.fetch(int(owner[index])), int(begins[index])
            return Document(whole.ids[begin : begin + tokens], whole.weights[begin : begin + tokens])

        return Documents(np.minimum(self.lengths[owner] - begins, tokens), fetch)
