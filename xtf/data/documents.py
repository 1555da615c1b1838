"""Documents: lengths known, tokens fetched when they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from xtf.batch import IGNORE

Ints = npt.NDArray[np.int64]


class Document(NamedTuple):
    """One document.

    Args:
        ids: (tokens,) int64.
        weights: (tokens,) float32; the loss weight of the target at t stands at t, 0 where nothing is learned.
        labels: (tokens,) int64, what is learned at t where it is not ``ids``; ``None`` where it is.
    """

    ids: Ints
    weights: npt.NDArray[np.float32]
    labels: Ints | None = None

    @staticmethod
    def of(given: Any) -> Document:
        """A document of what a ``fetch`` gives: a `Document`, ids alone, or a mapping as a batch is one (`xtf.batch`), of ``input_ids`` and
        perhaps ``labels`` (-100 where nothing is learned) and ``loss_weights``, each (tokens,).

        Example:
            >>> Document.of([5, 6]).weights.tolist(), Document.of({"input_ids": [5, 6], "labels": [-100, 6]}).weights.tolist()
            ([1.0, 1.0], [0.0, 1.0])

        Raises:
            ValueError: for an unknown key, what is not one-dimensional, unequal lengths, or a weight that is negative or not finite.
        """
        if isinstance(given, Document):
            parts: dict[str, Any] = {"input_ids": given.ids, "labels": given.labels, "loss_weights": given.weights}
        elif isinstance(given, Mapping):
            parts = dict(cast("Mapping[str, Any]", given))
        else:
            parts = {"input_ids": given}
        unknown = parts.keys() - {"input_ids", "labels", "loss_weights"}
        if unknown or "input_ids" not in parts:
            raise ValueError(f"a document has {sorted(parts)}; expected input_ids, and perhaps labels and loss_weights")
        ids = np.asarray(parts["input_ids"])
        labels = None if parts.get("labels") is None else np.asarray(parts["labels"])
        weights = np.ones(ids.shape, np.float32) if parts.get("loss_weights") is None else np.asarray(parts["loss_weights"], np.float32)
        for name, part in (("input_ids", ids), ("labels", ids if labels is None else labels), ("loss_weights", weights)):
            if part.ndim != 1 or part.shape != ids.shape:
                raise ValueError(f"{name} of a document has the shape {part.shape}, expected (tokens,), as many as its {ids.shape} ids")
            if name != "loss_weights" and len(part) and not np.issubdtype(part.dtype, np.integer):
                raise ValueError(f"{name} of a document is of {part.dtype}, expected integers")
        if not (np.isfinite(weights) & (weights >= 0)).all():
            wrong = weights[~(np.isfinite(weights) & (weights >= 0))][0]
            raise ValueError(f"a loss weight of a document is {wrong}: expected finite weights of at least 0")
        if labels is not None:
            weights = np.where(labels == IGNORE, np.float32(0), weights)
            same = bool(((labels == ids) | (weights == 0)).all())
            labels = None if same else np.where(weights == 0, ids, labels).astype(np.int64)
        return Document(ids.astype(np.int64, copy=False), weights, labels)

    def part(self, begin: int, end: int) -> Document:
        """The tokens from ``begin`` to before ``end``, as a document."""
        labels = None if self.labels is None else self.labels[begin:end]
        return Document(self.ids[begin:end], self.weights[begin:end], labels)


Fetch = Callable[[Ints], Sequence[Any]]
"""``fetch(indices) -> documents``, as many, each of which `Document.of` takes."""


@dataclass(frozen=True, init=False)
class Documents:
    """Any number of documents, identical on all ranks; each rank fetches only what it needs.

    Args:
        lengths: (documents,) int64, tokens of each.
        fetch: ``fetch(indices)`` gives the documents of these indices, (n,) int64, in their order: each a `Document`, its ids, or a mapping
            (`Document.of`).
        origins: (documents,) int64, the number of each among the documents it comes from, which `select`, `limited` and `join` hand on; by
            default its own index.

    Example:
        >>> docs = Documents([3, 1], lambda indices: [[[5, 6, 7], [8]][i] for i in indices])
        >>> docs.lengths.tolist(), docs[0].ids.tolist(), docs[1].weights.tolist()
        ([3, 1], [5, 6, 7], [1.0])

    Raises:
        ValueError: if ``lengths`` is not one-dimensional, or negative somewhere, or ``origins`` are not as many.
    """

    lengths: Ints
    fetch: Fetch
    origins: Ints | None

    def __init__(self, lengths: Sequence[int] | npt.NDArray[Any], fetch: Fetch, origins: Ints | None = None) -> None:
        given = np.asarray(lengths)
        if given.ndim != 1 or (len(given) and not np.issubdtype(given.dtype, np.integer)):
            raise ValueError(f"lengths must be one sequence of integers, got shape {given.shape} of {given.dtype}")
        if len(given) and int(given.min()) < 0:
            raise ValueError(f"document {int(given.argmin())} has the length {int(given.min())}: expected 0 or more tokens")
        if not callable(fetch):
            raise ValueError(f"fetch is a {type(fetch).__name__}, expected a function (indices) -> documents; Documents.of takes lists")
        if origins is not None and origins.shape != given.shape:
            raise ValueError(f"origins has the shape {origins.shape}, expected one for each of the {len(given)} documents")
        object.__setattr__(self, "lengths", given.astype(np.int64))
        object.__setattr__(self, "fetch", fetch)
        object.__setattr__(self, "origins", origins)

    @staticmethod
    def of(ids: Sequence[Any], weights: Sequence[Sequence[float]] | None = None) -> Documents:
        """Documents in memory, each its ids, or whatever `Document.of` takes; without ``weights`` every token of ids has the weight 1.

        Example:
            >>> docs = Documents.of([[5, 6, 7], {"input_ids": [8, 9], "labels": [-100, 9]}])
            >>> docs.lengths.tolist(), docs[1].weights.tolist()
            ([3, 2], [0.0, 1.0])
        """
        if weights is None:
            every = [Document.of(part) for part in ids]
            return Documents([len(part.ids) for part in every], lambda indices: [every[i] for i in indices.tolist()])
        kept = [np.asarray(part, np.int64) for part in ids]
        heavy = [np.asarray(w, np.float32) for w in weights]
        if [len(part) for part in kept] != [len(part) for part in heavy]:
            raise ValueError("each document needs one weight for each of its ids")
        return Documents([len(part) for part in kept], lambda indices: [Document(kept[i], heavy[i]) for i in indices.tolist()])

    def read(self, indices: Sequence[int] | npt.NDArray[Any]) -> list[Document]:
        """The documents of these indices, fetched at once and checked.

        Raises:
            IndexError: for an index that no document has.
            ValueError: if ``fetch`` gives another number of documents, or one that is none or of another length than ``lengths`` says.
        """
        wanted = np.asarray(indices, np.int64)
        if len(wanted) and not (int(wanted.min()) >= 0 and int(wanted.max()) < len(self)):
            raise IndexError(f"documents {wanted.min()} to {wanted.max()} are asked for, there are {len(self)}")
        given: Sequence[Any] = self.fetch(wanted) if len(wanted) else ()
        if len(given) != len(wanted):
            raise ValueError(f"fetch was asked for {len(wanted)} documents and gave {len(given)}: expected one for each index, in order")
        found: list[Document] = []
        for index, one in zip(wanted.tolist(), given, strict=True):
            try:
                found.append(Document.of(one))
            except ValueError as error:
                raise ValueError(f"document {index}, as fetch gave it: {error}") from error
            if len(found[-1].ids) != self.lengths[index]:
                raise ValueError(f"document {index} has {len(found[-1].ids)} ids as fetch gave it; lengths says {self.lengths[index]}")
        return found

    def __getitem__(self, index: int) -> Document:
        return self.read([index])[0]

    def origin(self, indices: Sequence[int] | npt.NDArray[Any]) -> Ints:
        """The numbers that these documents have among those they come from.

        Example:
            >>> docs = Documents.of([[1], [2, 3, 4], [5, 6]]).select([2, 1]).limited(2, long="split")
            >>> docs.origin([0, 1, 2]).tolist()
            [2, 1, 1]
        """
        wanted = np.asarray(indices, np.int64)
        return wanted if self.origins is None else self.origins[wanted]

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
        return Documents(self.lengths[chosen], lambda indices: self.fetch(chosen[indices]), self.origin(chosen))

    @staticmethod
    def join(parts: Sequence[Documents]) -> Documents:
        """The documents of several sources, one source after another. Where they come from the same documents, as by `select`, their
        ``origins`` stay what they are.

        Example:
            >>> Documents.join([Documents.of([[1]]), Documents.of([[2, 3]])])[1].ids.tolist()
            [2, 3]
        """
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

        def fetch(indices: Ints) -> list[Document]:
            found: list[Any] = [None] * len(indices)
            owners = np.searchsorted(ends, indices, "right")
            for part, source in enumerate(parts):
                places = np.flatnonzero(owners == part)
                for place, one in zip(places.tolist(), source.read(indices[places] - (ends[part] - len(source))), strict=True):
                    found[place] = one
            return found

        lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
        selected = any(part.origins is not None for part in parts)
        return Documents(lengths, fetch, np.concatenate([part.origin(np.arange(len(part))) for part in parts]) if selected else None)

    def weighted(self, factor: float = 1.0, *, everything: bool = False) -> Documents:
        """The same documents with other loss weights.

        Args:
            factor: what they are multiplied by, finite and above 0.
            everything: whether every token is learned first, with the weight 1, also what others than the assistant say.

        Example:
            >>> docs = Documents.of([[1, 2]], [[0.0, 1.0]])
            >>> docs.weighted(0.5)[0].weights.tolist(), docs.weighted(everything=True)[0].weights.tolist()
            ([0.0, 0.5], [1.0, 1.0])
        """
        if not 0 < factor < math.inf:
            raise ValueError(f"a factor of loss weights is {factor}: expected a finite number above 0")

        def fetch(indices: Ints) -> list[Document]:
            found = self.read(indices)
            return [d._replace(weights=(np.ones_like(d.weights) if everything else d.weights) * np.float32(factor)) for d in found]

        return self if factor == 1 and not everything else Documents(self.lengths, fetch, self.origins)

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
            if long == "cut" or (long == "auto" and not bool((self[index].weights > 0).all())):
                pieces[index] = 1
        owner = np.repeat(np.arange(len(self), dtype=np.int64), pieces)
        first = np.cumsum(pieces) - pieces
        begins = (np.arange(len(owner), dtype=np.int64) - first[owner]) * tokens

        def fetch(indices: Ints) -> list[Document]:
            wholes = self.read(owner[indices])
            return [whole.part(begin, begin + tokens) for whole, begin in zip(wholes, begins[indices].tolist(), strict=True)]

        return Documents(np.minimum(self.lengths[owner] - begins, tokens), fetch, self.origin(owner))
