"""Sources in proportions: which document comes next where several sources are drawn from with given probabilities."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: its multiples, modulo 2**64, are spread most evenly


@dataclass(frozen=True)
class Source:
    """Neighbouring documents of one source.

    Args:
        name: what it is called.
        documents: how many it has.
        weight: how often it is drawn from: its share of all weights is the share of its documents among those drawn.

    Raises:
        ValueError: for a source without documents, or a weight that is not finite and above 0.
    """

    name: str
    documents: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.documents < 1:
            raise ValueError(f"the source {self.name} has no document that can be used: leave it out")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"the weight of {self.name} is {self.weight}: expected a finite number above 0, or no such source")


class Mixture:
    """An endless order of documents, drawn from sources in proportion to their weights: a pure function of (seed, place).

    The source of each place is that of a golden-ratio sequence (Weyl 1916): of any n places in a row a source has its share to within a
    few, so proportions hold in every stretch of training and not only on average. Of each source the documents come in random order,
    every document once before any comes again: the source's own epochs.

    Args:
        sources: their documents are numbered one source after another.
        seed: of all that is random.

    Raises:
        ValueError: for no source, or two of one name.

    Example:
        >>> mixture = Mixture([Source("a", 2, 3.0), Source("b", 5, 1.0)], seed=0)
        >>> order = mixture.draw(0, 8)
        >>> int((order < 2).sum()), sorted(order[order < 2][:2].tolist())
        (6, [0, 1])
    """

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        self.sources, self.seed = tuple(sources), seed
        names = [source.name for source in sources]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"sources are {names}: expected at least one, each of a name of its own")
        weights = np.array([source.weight for source in sources])
        self._edges = (np.cumsum(weights / weights.sum())[:-1] * 2.0**64).astype(np.uint64)
        self._first = np.cumsum([0, *(source.documents for source in sources)])
        self._offset = np.uint64(int.from_bytes(hashlib.sha256(f"mixture/{seed}".encode()).digest()[:8], "big"))
        self._counted: list[Ints] = [np.zeros(len(sources), np.int64)]  # drawn before each block of places

    def counts(self, place: int) -> Ints:
        """How many documents of each source stand before a place, (sources,)."""
        while len(self._counted) <= place // _BLOCK:
            begin = (len(self._counted) - 1) * _BLOCK
            self._counted.append(self._counted[-1] + self._count(begin, begin + _BLOCK))
        block = place // _BLOCK
        return self._counted[block] + self._count(block * _BLOCK, place)

    def draw(self, begin: int, end: int) -> Ints:
        """The documents of places ``begin`` to before ``end``."""
        owners, counts = self._owners(begin, end), self.counts(begin)
        found = np.empty(end - begin, np.int64)
        for index, source in enumerate(self.sources):
            places = np.flatnonzero(owners == index)
            drawn = counts[index] + np.arange(len(places))
            for epoch in range(int(counts[index]) // source.documents, (int(counts[index]) + len(places)) // source.documents + 1):
                now = drawn // source.documents == epoch
                found[places[now]] = self._first[index] + self._permutation(index, epoch)[drawn[now] % source.documents]
        return found

    def owner(self, documents: Ints) -> Ints:
        """The source of each document."""
        return np.searchsorted(self._first, documents, "right") - 1

    def _owners(self, begin: int, end: int) -> Ints:
        """The source of each place."""
        at = np.arange(begin, end, dtype=np.uint64) * _GOLDEN + self._offset  # modulo 2**64
        return np.searchsorted(self._edges, at, "right").astype(np.int64)

    def _count(self, begin: int, end: int) -> Ints:
        return np.bincount(self._owners(begin, end), minlength=len(self.sources)).astype(np.int64)

    def _permutation(self, index: int, epoch: int) -> Ints:
        key = hashlib.sha256(f"{self.seed}/{self.sources[index].name}/{epoch}".encode()).digest()[:16]
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key))).permutation(self.sources[index].documents)


_BLOCK = 1 << 20  # places that are counted once and for all
