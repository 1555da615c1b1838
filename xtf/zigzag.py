"""Zig-zag: which tokens of packed documents each of n ranks has, so that all have as many tokens and as much causal attention.

In a document a token sees those before it, so the last of n equal pieces has 2n - 1 times the work of the first. Cut into 2n chunks,
chunks i and 2n - 1 - i together have the same work for every i: rank i takes these two (Megatron-LM's and zig-zag ring attention's
order). Here each document of a packed sequence is cut by itself. Cut as one sequence, documents that end inside a chunk would make
some ranks' chunks light and others' heavy; cut each by itself, every rank has its share of every document, whatever their lengths.

What does not divide by 2n is dealt token by token to the ranks that have fewest so far, of these to those with least work: the numbers of
tokens of two ranks never differ by more than one, so short documents, down to one token, spread too. A rank's rows are in the order
of the packed sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor


class Run(NamedTuple):
    """Neighbouring tokens of one document that a rank has: the first one's number in the packed sequence, the first row that the rank
    has them in, and how many."""

    token: int
    row: int
    length: int


class Block(NamedTuple):
    """Rows of queries of one rank and rows of keys of another that see each other.

    Args:
        queries, keys: the rows.
        ahead: tokens from the first key to the first query: query a sees key b where ``0 <= ahead + a - b < window``. ``None`` where every
            query sees every key.
    """

    queries: slice
    keys: slice
    ahead: int | None


@dataclass(frozen=True)
class Shares:
    """Which tokens of a packed sequence each rank has; made by `zigzag`.

    Args:
        runs: ``runs[rank][document]``, the one or two runs that a rank has of a document; none where it has none of it.
        counts: the tokens of each rank.
        pairs: of each rank, the pairs of a query that it has and a key that it sees, anywhere: its attention's work, without a window.
    """

    runs: tuple[tuple[tuple[Run, ...], ...], ...]
    counts: tuple[int, ...]
    pairs: tuple[int, ...]
    _blocks: dict[tuple[int, int, int | None], list[Block]] = field(
        default_factory=dict[tuple[int, int, int | None], list[Block]], repr=False
    )

    def tokens(self, rank: int) -> Int64[Tensor, " T"]:
        """The number in the packed sequence of each of a rank's rows, ascending.

        Example:
            >>> [zigzag([0, 8], 2).tokens(rank).tolist() for rank in range(2)]
            [[0, 1, 6, 7], [2, 3, 4, 5]]
        """
        runs = [torch.arange(run.token, run.token + run.length) for document in self.runs[rank] for run in document]
        return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)

    def blocks(self, queries: int, keys: int, window: int | None = None) -> list[Block]:
        """Which rows of queries of one rank see which rows of keys of another, in the order of the queries' documents.

        Args:
            queries, keys: the ranks.
            window: how many tokens back, itself included, a token sees.

        Example:
            >>> shares = zigzag([0, 8], 2)
            >>> shares.blocks(0, 1), shares.blocks(0, 0)[0].ahead  # the second chunk sees both of the other rank; its own, as ever
            ([Block(queries=slice(2, 4, None), keys=slice(0, 4, None), ahead=None)], 0)
        """
        if (queries, keys, window) not in self._blocks:
            found = list[Block]()
            for own, other in zip(self.runs[queries], self.runs[keys], strict=True):
                if own and other:
                    found += _causal(own, other) if window is None else _within(own, other, window)
            self._blocks[queries, keys, window] = found
        return self._blocks[queries, keys, window]


def zigzag(ends: Sequence[int], ranks: int) -> Shares:
    """Deal the tokens of packed documents to ranks, see the module.

    Args:
        ends: where documents begin and end, from 0 to the number of tokens, as in ``cu_seqlens``.
        ranks: n, at least 1.

    Raises:
        ValueError: for less than one rank.

    Example:
        >>> zigzag([0, 90, 91, 400], 4).counts
        (100, 100, 100, 100)
    """
    if ranks < 1:
        raise ValueError(f"zigzag: ranks is {ranks}, expected at least 1")
    counts, pairs, runs = [0] * ranks, [0] * ranks, [list[tuple[Run, ...]]() for _ in range(ranks)]
    for begin, end in pairwise(ends):
        even, rest = divmod(end - begin, 2 * ranks)
        sizes = [even] * (2 * ranks)
        fewest = sorted(range(ranks), key=lambda rank: (counts[rank], pairs[rank]))
        for place in range(rest):
            rank = fewest[place % ranks]
            sizes[rank if place < ranks else 2 * ranks - 1 - rank] += 1
        chunks, token = list[tuple[int, int]](), begin
        for size in sizes:
            chunks.append((token, token + size))
            token += size
        for rank in range(ranks):
            mine = [chunk for chunk in (chunks[rank], chunks[2 * ranks - 1 - rank]) if chunk[0] < chunk[1]]
            found = list[Run]()
            for first, last in mine:
                found.append(Run(first, counts[rank], last - first))
                counts[rank] += last - first
                pairs[rank] += _triangle(last - begin) - _triangle(first - begin)
            runs[rank].append(tuple(found))
    return Shares(tuple(tuple(documents) for documents in runs), tuple(counts), tuple(pairs))


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def _rows(runs: Sequence[Run]) -> slice:
    """Of neighbouring runs: those of one document stand together."""
    return slice(runs[0].row, runs[-1].row + runs[-1].length)


def _causal(own: Sequence[Run], other: Sequence[Run]) -> list[Block]:
    """Of one document. Chunks are the same or apart, so queries see all keys of a run or none."""
    if own[0].token == other[0].token:
        return [Block(_rows(own), _rows(own), 0)]
    seen = [[key for key in other if key.token < query.token] for query in own]
    if len(seen) == 2 and seen[0] == seen[1]:
        return [Block(_rows(own), _rows(seen[0]), None)] if seen[0] else []
    return [Block(_rows([query]), _rows(keys), None) for query, keys in zip(own, seen, strict=True) if keys]


def _within(own: Sequence[Run], other: Sequence[Run], window: int) -> list[Block]:
    """Of one document, run by run, those that are not too far apart."""
    found = list[Block]()
    for query in own:
        for key in other:
            ahead = query.token - key.token
            if ahead < 0 or ahead - key.length + 1 >= window:
                continue
            inside = ahead > 0 and ahead + query.length - 1 < window
            found.append(Block(_rows([query]), _rows([key]), None if inside else ahead))
    return found
