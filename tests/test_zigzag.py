"""Zig-zag shares: every token has one rank, tokens and work are even, and blocks hold exactly the pairs that see each other."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtf.zigzag import Shares, zigzag

LENGTHS = st.lists(st.integers(0, 40), max_size=8)


def ends(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def documents(lengths: list[int]) -> list[int]:
    return [i for i, length in enumerate(lengths) for _ in range(length)]


@given(LENGTHS, st.integers(1, 9))
def test_every_token_has_one_rank_and_ranks_have_as_many(lengths: list[int], ranks: int) -> None:
    shares = zigzag(ends(lengths), ranks)
    own = [shares.tokens(rank).tolist() for rank in range(ranks)]
    assert sorted(token for tokens in own for token in tokens) == list(range(sum(lengths)))
    assert all(tokens == sorted(tokens) for tokens in own)
    assert [len(tokens) for tokens in own] == list(shares.counts)
    assert max(shares.counts) - min(shares.counts) <= 1
    begins = [begin for begin, length in zip(ends(lengths), lengths, strict=False) for _ in range(length)]
    assert [sum(token - begins[token] + 1 for token in tokens) for tokens in own] == list(shares.pairs)


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 5), st.one_of(st.none(), st.integers(1, 50)))
def test_blocks_are_the_pairs_that_see_each_other(lengths: list[int], ranks: int, window: int | None) -> None:
    shares, document, total = zigzag(ends(lengths), ranks), documents(lengths), sum(lengths)
    want = [(q, k) for q in range(total) for k in range(q + 1) if document[q] == document[k] and (window is None or q - k < window)]
    assert sorted(pair for a in range(ranks) for b in range(ranks) for pair in pairs(shares, a, b, window)) == want


def pairs(shares: Shares, queries: int, keys: int, window: int | None) -> list[tuple[int, int]]:
    """As numbers in the packed sequence."""
    own, other, found = shares.tokens(queries).tolist(), shares.tokens(keys).tolist(), list[tuple[int, int]]()
    for rows, columns, ahead in shares.blocks(queries, keys, window):
        for a, q in enumerate(own[rows]):
            for b, k in enumerate(other[columns]):
                if ahead is None or 0 <= ahead + a - b < (window or 10**9):
                    found.append((q, k))
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "lengths",
    [[65536], [32768, 100, 3000, 1, 29667], [511] * 128, [7, 1, 2, 65526], [2**i for i in range(15)] + [32769], [61000] + [1] * 4536],
    ids=["one", "mixed", "short", "long", "powers", "single tokens"],
)
def test_work_is_even_where_that_of_plain_pieces_is_not(lengths: list[int], ranks: int) -> None:
    """The rank with most pairs has at most a hundredth more than the mean. In n pieces that of one document has nearly twice the mean."""
    shares = zigzag(ends(lengths), ranks)
    assert max(shares.pairs) * ranks / sum(shares.pairs) < 1.01
    if lengths == [65536]:
        assert max(plain(lengths, ranks)) * ranks / sum(shares.pairs) > 2 - 1.01 / ranks
        assert len(set(shares.pairs)) == 1


def test_work_is_even_where_that_of_a_zig_zag_over_all_documents_is_not() -> None:
    """Short documents, then a long one: the rank of the last chunk and that of the long one's first."""
    lengths = [512] * 64 + [32768]
    ours, theirs = zigzag(ends(lengths), 4).pairs, as_one(lengths, 4)
    assert sum(ours) == sum(theirs)
    assert max(ours) * 4 / sum(ours) < 1.001
    assert max(theirs) * 4 / sum(theirs) > 1.7


def work(lengths: list[int], pieces: list[list[tuple[int, int]]]) -> list[int]:
    """Pairs of each rank's pieces of the packed sequence."""
    found: list[int] = []
    for mine in pieces:
        total = 0
        for begin, end in mine:
            for first, last in pairwise(ends(lengths)):
                a, b = max(begin, first) - first, min(end, last) - first
                total += (b * (b + 1) - a * (a + 1)) // 2 if a < b else 0
        found.append(total)
    return found


def plain(lengths: list[int], ranks: int) -> list[int]:
    total = sum(lengths)
    return work(lengths, [[(total * rank // ranks, total * (rank + 1) // ranks)] for rank in range(ranks)])


def as_one(lengths: list[int], ranks: int) -> list[int]:
    total, chunks = sum(lengths), 2 * ranks
    bounds = [total * i // chunks for i in range(chunks + 1)]
    return work(lengths, [[(bounds[c], bounds[c + 1]) for c in (rank, chunks - 1 - rank)] for rank in range(ranks)])


def test_no_ranks() -> None:
    with pytest.raises(ValueError, match="zigzag: ranks is 0, expected at least 1"):
        zigzag([0, 4], 0)


def test_no_tokens() -> None:
    shares = zigzag([0], 3)
    assert shares.counts == (0, 0, 0) and shares.tokens(1).tolist() == [] and shares.blocks(0, 1) == []
