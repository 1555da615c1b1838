"""A plan of batches: which documents each rank has in each micro-batch of each step, and how even that is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from xtf.data.cost import Cost, CostFunction

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Pieces(NamedTuple):
    """Pieces of documents: a whole document is the piece from 0 to its length. Each array is (pieces,) int64.

    Args:
        documents: index of the document.
        starts: its first token.
        stops: the token after its last.
    """

    documents: Ints
    starts: Ints
    stops: Ints

    @property
    def lengths(self) -> Ints:
        """Tokens of each."""
        return self.stops - self.starts

    def at(self, where: Any) -> Pieces:
        """Some of them: a slice, indices, or a mask."""
        return Pieces(self.documents[where], self.starts[where], self.stops[where])

    @staticmethod
    def join(parts: Sequence[Pieces]) -> Pieces:
        """One after another."""
        empty = np.zeros(0, np.int64)
        return Pieces(*(np.concatenate([empty, *column]) for column in zip(*parts, strict=True)) if parts else (empty, empty, empty))


class Balance(NamedTuple):
    """How even a plan is, by one cost; over its full steps, the remainder step apart. `Plan.balance` computes it.

    Args:
        steps: full steps.
        fill: their tokens ÷ what their packs could hold.
        tokens: the fewest and the most tokens of a step.
        imbalance: mean over steps of the slowest rank's cost ÷ the mean rank's; 1 is even.
        worst: the largest of these.
        lockstep: the same as ``imbalance`` where ranks wait for each other after every micro-batch, as gathered parameters and
            exchanged experts make them do: Σ over micro-batches of the slowest rank's cost ÷ Σ of the mean rank's.
        micro: mean over steps of the heaviest pack ÷ the mean pack: what a pipeline of micro-batches waits for.
        over_bound: all steps' slowest ranks together ÷ the least that they could be (`Plan.bounds`).
        alike: how random the lengths inside a step are: the variance of log length inside steps ÷ what it is on average where
            documents are put into these steps at random; 1 is random order, 0 means that a step has documents of one length.
        drift: correlation of a document's step with its log length, from -1 to 1; near 0 there is no curriculum.
        remainder: documents of the remainder step.
        remainder_imbalance: the slowest rank ÷ the mean rank there; 1 where there is none.
    """

    steps: int
    fill: float
    tokens: tuple[int, int]
    imbalance: float
    worst: float
    lockstep: float
    micro: float
    over_bound: float
    alike: float
    drift: float
    remainder: int
    remainder_imbalance: float


@dataclass(frozen=True, eq=False)
class Step(Sequence[tuple[Ints, ...]]):
    """One step: ``step[rank][micro_batch]`` are the indices of the documents in this micro-batch of this rank, (documents,) int64.

    Args:
        ranks: of the data axis.
        accumulate: micro-batches.
        full: whether it is one of the full steps, not the remainder.
        flat: the pieces of all its packs.
        offsets: (ranks × accumulate + 1,): where each pack, rank after rank, begins in ``flat``.
    """

    ranks: int
    accumulate: int
    full: bool
    flat: Pieces
    offsets: Ints

    def __len__(self) -> int:
        return self.ranks

    @overload
    def __getitem__(self, index: int) -> tuple[Ints, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[Ints, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[Ints, ...] | list[tuple[Ints, ...]]:
        if isinstance(index, slice):
            return [self[rank] for rank in range(*index.indices(self.ranks))]
        return tuple(pieces.documents for pieces in self.pieces(index))

    def pieces(self, rank: int) -> tuple[Pieces, ...]:
        """Of each of a rank's micro-batches: the pieces of documents, for plans that split them."""
        if not -self.ranks <= rank < self.ranks:
            raise IndexError(f"rank is {rank}, the step has {self.ranks} ranks")
        first = rank % self.ranks * self.accumulate
        bounds = self.offsets[first : first + self.accumulate + 1].tolist()
        return tuple(self.flat.at(slice(begin, end)) for begin, end in itertools.pairwise(bounds))


@dataclass(frozen=True, eq=False)
class Plan(Sequence[Step]):
    """Steps, as flat arrays: memory is linear in documents.

    ``plan[step][rank][micro_batch]`` are indices of documents; ``plan[step].pieces(rank)`` says also which tokens of them, for plans
    that split documents. The last step may be the remainder: what is too little for a full one, spread over all packs, of which
    some are empty where there are fewer documents than packs. A slice of a plan is a plan.

    Args:
        max_tokens: that a pack may have.
        ranks: of the data axis.
        accumulate: packs of each rank in a step.
        full: how many steps are full; the remainder, where there is one, comes after them.
        flat: the pieces of all packs.
        offsets: (packs + 1,) int64: where each pack begins in ``flat``; packs are ordered by step, rank, micro-batch.
        dropped: indices of the documents that are in no step because they are too long, (documents,) int64.

    Example:
        >>> from xtf.data import plan_batches
        >>> plan = plan_batches([4, 4, 3, 1], max_tokens=4, data_ranks=3)
        >>> len(plan), sorted(sorted(plan[0][rank][0].tolist()) for rank in range(3))
        (1, [[0], [1], [2, 3]])
    """

    max_tokens: int
    ranks: int
    accumulate: int
    full: int
    flat: Pieces
    offsets: Ints
    dropped: Ints

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // (self.ranks * self.accumulate)

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> Plan: ...
    def __getitem__(self, index: int | slice) -> Step | Plan:
        each = self.ranks * self.accumulate
        if isinstance(index, slice):
            begin, end, stride = index.indices(len(self))
            if stride != 1:
                raise ValueError(f"plan[{index.start}:{index.stop}:{stride}]: a plan is cut in its order, with a stride of 1")
            end = max(begin, end)
            bounds = self.offsets[begin * each : end * each + 1]
            flat = self.flat.at(slice(int(bounds[0]), int(bounds[-1])))
            full = min(self.full, end) - min(self.full, begin)
            return Plan(self.max_tokens, self.ranks, self.accumulate, full, flat, bounds - bounds[0], self.dropped)
        if not -len(self) <= index < len(self):
            raise IndexError(f"step is {index}, the plan has {len(self)} steps")
        index %= len(self)
        bounds = self.offsets[index * each : (index + 1) * each + 1]
        flat = self.flat.at(slice(int(bounds[0]), int(bounds[-1])))
        return Step(self.ranks, self.accumulate, index < self.full, flat, bounds - bounds[0])

    def __iter__(self) -> Iterator[Step]:
        return (self[step] for step in range(len(self)))

    def same(self, other: Plan) -> bool:
        """Whether both have the same pieces in the same packs, in the same order."""
        mine, theirs = (
            (p.max_tokens, p.ranks, p.accumulate, p.full, *(a.tolist() for a in (*p.flat, p.offsets, p.dropped))) for p in (self, other)
        )
        return mine == theirs

    @property
    def steps(self) -> Ints:
        """The step of each piece of ``flat``."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int64), np.diff(self.offsets)) // (self.ranks * self.accumulate)

    def totals(self, values: npt.NDArray[Any]) -> Floats:
        """Sums over the pieces of each pack.

        Args:
            values: (pieces,), of each piece of ``flat``.

        Returns:
            (steps, ranks, accumulate) float64.
        """
        pack = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        return np.bincount(pack, values, len(self.offsets) - 1).astype(np.float64).reshape(-1, self.ranks, self.accumulate)

    def bounds(self, cost: CostFunction | None = None) -> Floats:
        """The least cost that the slowest rank of each step can have, whoever spreads the step's documents over the ranks: (steps,).

        A rank holds whole pieces, so one rank has the step's heaviest piece, of n tokens. If the step has W tokens, this rank has at least
        W - (ranks - 1) × accumulate × max_tokens of them, since the others hold no more. Those beyond n are of other pieces of the
        step, and a token of these costs at least what it costs in the piece where tokens cost the least. So this rank costs at least
        the heaviest piece and that. And were every rank below the mean over ranks, so would the mean be: the slowest costs at least the
        mean. The bound is the larger of the two.

        Args:
            cost: full attention alone, if ``None``.
        """
        lengths, steps = self.flat.lengths, self.steps
        each = (cost or Cost.attention())(lengths)
        order = np.lexsort((-each, steps))  # of each step the heaviest piece first
        heads = order[np.searchsorted(steps, np.arange(len(self)))]  # no step is without a piece
        cheapest = np.full(len(self), np.inf)
        np.minimum.at(cheapest, steps, each / lengths)
        others = (self.ranks - 1) * self.accumulate * self.max_tokens
        beside = np.maximum(0, self.totals(lengths).sum(axis=(1, 2)) - others - lengths[heads])
        return np.maximum(each[heads] + beside * cheapest, self.totals(each).sum(axis=(1, 2)) / self.ranks)

    def balance(self, cost: CostFunction | None = None) -> Balance:
        """How even the plan is.

        Args:
            cost: of a document; full attention alone, if ``None``.

        Example:
            >>> from xtf.data import plan_batches
            >>> plan_batches([4, 4, 2, 2, 2, 2], max_tokens=4, data_ranks=2).balance().imbalance
            1.0
        """
        each, lengths = (cost or Cost.attention())(self.flat.lengths), self.flat.lengths
        packs, tokens = self.totals(each), self.totals(lengths)
        rest = packs[self.full :].sum(axis=2)
        packs, tokens = packs[: self.full], tokens[: self.full]
        if not self.full:
            return Balance(0, 1.0, (0, 0), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, len(lengths), _peak(rest))
        ranks, by_step = packs.sum(axis=2), tokens.sum(axis=(1, 2))
        relative = ranks.max(axis=1) / ranks.mean(axis=1)
        end = int(self.offsets[self.full * self.ranks * self.accumulate])
        steps, logs = self.steps[:end], np.log(lengths[:end])
        return Balance(
            steps=self.full,
            fill=float(by_step.sum()) / (tokens.size * self.max_tokens),
            tokens=(int(by_step.min()), int(by_step.max())),
            imbalance=float(relative.mean()),
            worst=float(relative.max()),
            lockstep=float((packs.max(axis=1).sum(axis=1) / packs.mean(axis=1).sum(axis=1)).mean()),
            micro=float((packs.max(axis=(1, 2)) / packs.mean(axis=(1, 2))).mean()),
            over_bound=float(ranks.max(axis=1).sum() / self.bounds(cost)[: self.full].sum()),
            alike=_alike(logs, steps, self.full),
            drift=_correlation(steps, logs),
            remainder=len(lengths) - end,
            remainder_imbalance=_peak(rest),
        )


def assemble(pieces: Pieces, pack: Ints, *, full: int, count: int, max_tokens: int, ranks: int, accumulate: int, dropped: Ints) -> Plan:
    """A plan of ``count`` steps, from the pack of each piece, packs numbered by step, rank and micro-batch."""
    offsets = np.zeros(count * ranks * accumulate + 1, np.int64)
    np.cumsum(np.bincount(pack, minlength=len(offsets) - 1), out=offsets[1:])
    return Plan(max_tokens, ranks, accumulate, full, pieces.at(np.argsort(pack, kind="stable")), offsets, dropped)


def _peak(ranks: Floats) -> float:
    """The slowest ÷ the mean of the one step given, 1 where there is none."""
    return float(ranks.max() / ranks.mean()) if ranks.size else 1.0


def _alike(logs: Floats, steps: Ints, count: int) -> float:
    """Variance inside steps ÷ its expectation at random, which is the whole variance with one degree of freedom less for each step."""
    sizes = np.bincount(steps, minlength=count)
    means = np.bincount(steps, logs, count) / np.maximum(sizes, 1)
    inside, whole = float(((logs - means[steps]) ** 2).sum()), float(((logs - logs.mean()) ** 2).sum())
    free = (len(logs) - int((sizes > 0).sum())) / max(len(logs) - 1, 1)
    return inside / (whole * free) if whole * free > 1e-12 * len(logs) else 1.0


def _correlation(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale > 1e-9 else 0.0
