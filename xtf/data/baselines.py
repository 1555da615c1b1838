"""The usual ways to make batches of documents, as plans, so that what `plan_batches` gains can be measured beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xtf.data.packing import best_fit
from xtf.data.plan import Ints, Pieces, Plan, assemble
from xtf.data.plan_input import TooLong, check_count, check_layout, cut, generator


def concatenate_and_cut(
    lengths: Sequence[int] | npt.NDArray[Any], *, max_tokens: int, data_ranks: int, accumulate: int = 1, seed: int = 0
) -> Plan:
    """Documents in random order, laid end to end and cut every ``max_tokens``, as GPT-2 was trained (Radford et al. 2019).

    Packs are full, but documents are cut wherever a pack ends. Steps take packs in order; the last step has those that are left, each
    rank as many as there are.

    Args:
        lengths: (documents,), tokens of each, integers of at least 1; of any length.
        max_tokens: as for `xtf.data.plan_batches`, and so are all others.
        data_ranks: likewise.
        accumulate: likewise.
        seed: likewise.

    Raises:
        ValueError: as `xtf.data.plan_batches`.

    Example:
        >>> plan = concatenate_and_cut([6, 6], max_tokens=4, data_ranks=3)
        >>> [[int(n) for n in pieces.lengths] for rank in range(3) for pieces in plan[0].pieces(rank)]
        [[4], [2, 2], [4]]
    """
    check_layout(max_tokens, data_ranks, accumulate)
    pieces, dropped = cut(lengths, 1 << 62, "error")
    pieces = pieces.at(generator(seed, "concatenate").permutation(len(pieces.documents)))
    ends = np.cumsum(pieces.lengths)
    begins = ends - pieces.lengths
    counts = (ends - 1) // max_tokens - begins // max_tokens + 1  # packs that a document lies in
    owner = np.repeat(np.arange(len(ends)), counts)
    pack = begins[owner] // max_tokens + np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    starts = np.maximum(begins[owner], pack * max_tokens) - begins[owner]
    stops = np.minimum(ends[owner], (pack + 1) * max_tokens) - begins[owner]
    full = int(ends[-1]) // (data_ranks * accumulate * max_tokens)  # that of the last, partly filled pack is none
    return _in_order(Pieces(pieces.documents[owner], starts, stops), pack, max_tokens, data_ranks, accumulate, dropped, full)


def greedy_packing(
    lengths: Sequence[int] | npt.NDArray[Any],
    *,
    max_tokens: int,
    data_ranks: int,
    accumulate: int = 1,
    seed: int = 0,
    too_long: TooLong = "error",
) -> Plan:
    """Documents in random order, each into the present pack if it fits there whole, else into a new one (next fit).

    Args:
        lengths: (documents,), tokens of each, integers of at least 1.
        max_tokens: as for `xtf.data.plan_batches`, and so are all others.
        data_ranks: likewise.
        accumulate: likewise.
        seed: likewise.
        too_long: likewise.

    Raises:
        ValueError: as `xtf.data.plan_batches`.

    Example:
        >>> greedy_packing([3, 3, 3], max_tokens=4, data_ranks=1).balance().fill
        0.75
    """
    check_layout(max_tokens, data_ranks, accumulate)
    pieces, dropped = cut(lengths, max_tokens, too_long)
    pieces = pieces.at(generator(seed, "greedy").permutation(len(pieces.documents)))
    return _in_order(pieces, _next_fit(pieces.lengths, max_tokens), max_tokens, data_ranks, accumulate, dropped)


def best_fit_packing(
    lengths: Sequence[int] | npt.NDArray[Any],
    *,
    max_tokens: int,
    data_ranks: int,
    accumulate: int = 1,
    seed: int = 0,
    too_long: TooLong = "error",
) -> Plan:
    """Documents in random order, each into the fullest pack that has room for it, and packs in random order: nearly full packs that cost
    what they happen to (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"); ``xtf train`` packs so by default.

    Args:
        lengths: (documents,), tokens of each, integers of at least 1.
        max_tokens: as for `xtf.data.plan_batches`, and so are all others.
        data_ranks: likewise.
        accumulate: likewise.
        seed: likewise.
        too_long: likewise.

    Raises:
        ValueError: as `xtf.data.plan_batches`.

    Example:
        >>> best_fit_packing([4, 3, 1], max_tokens=4, data_ranks=2).balance().fill
        1.0
    """
    check_layout(max_tokens, data_ranks, accumulate)
    pieces, dropped = cut(lengths, max_tokens, too_long)
    random = generator(seed, "best fit")
    pieces = pieces.at(random.permutation(len(pieces.documents)))
    packs = best_fit(pieces.lengths.tolist(), max_tokens)
    pack = np.empty(len(pieces.documents), np.int64)
    for place, members in zip(random.permutation(len(packs)).tolist(), packs, strict=True):
        pack[members] = place
    return _in_order(pieces, pack, max_tokens, data_ranks, accumulate, dropped)


def length_grouped(
    lengths: Sequence[int] | npt.NDArray[Any],
    *,
    max_tokens: int,
    data_ranks: int,
    accumulate: int = 1,
    seed: int = 0,
    too_long: TooLong = "error",
    window: int = 50,
) -> Plan:
    """Documents in random order, in windows of as many as fill 50 steps; those of a window sorted by length, packed by next fit, and its
    steps shuffled: transformers' ``group_by_length``, with packs in place of padding.

    Args:
        lengths: (documents,), tokens of each, integers of at least 1.
        max_tokens: as for `xtf.data.plan_batches`, and so are all others.
        data_ranks: likewise.
        accumulate: likewise.
        seed: likewise.
        too_long: likewise.
        window: steps of a window, about.

    Raises:
        ValueError: as `xtf.data.plan_batches`.

    Example:
        >>> plan = length_grouped([1, 4, 1, 1, 4, 1], max_tokens=4, data_ranks=2)
        >>> sorted(sorted(int(plan.flat.lengths[plan.flat.documents == i][0]) for i in pack) for rank in plan[0] for pack in rank)
        [[4], [4]]
    """
    check_layout(max_tokens, data_ranks, accumulate)
    check_count("window", window)
    pieces, dropped = cut(lengths, max_tokens, too_long)
    random = generator(seed, "grouped")
    pieces = pieces.at(random.permutation(len(pieces.documents)))
    each = data_ranks * accumulate
    inside = (np.cumsum(pieces.lengths) - 1) // (window * each * max_tokens)
    pieces = pieces.at(np.lexsort((-pieces.lengths, inside)))
    pack = _next_fit(pieces.lengths, max_tokens)
    full = (int(pack[-1]) + 1) // each
    place = np.argsort(random.permutation(full))
    step = np.concatenate([place, [full]])[np.minimum(pack // each, full)]
    return _in_order(pieces, step * each + pack % each, max_tokens, data_ranks, accumulate, dropped)


def _next_fit(lengths: Ints, max_tokens: int) -> Ints:
    """The pack of each document: the present one, or where it does not fit, the next."""
    packs: list[int] = []
    pack, held = 0, 0
    for tokens in lengths.tolist():
        held += tokens
        if held > max_tokens:
            pack, held = pack + 1, tokens
        packs.append(pack)
    return np.array(packs, np.int64)


def _in_order(pieces: Pieces, pack: Ints, max_tokens: int, ranks: int, accumulate: int, dropped: Ints, full: int | None = None) -> Plan:
    """Packs in order, dealt to ranks in turn; the last step, where it is not full, has empty packs."""
    each = ranks * accumulate
    packs = int(pack.max(initial=-1)) + 1
    at = pack % each  # of a step's packs, the first micro-batch of all ranks comes first
    pack = pack // each * each + at % ranks * accumulate + at // ranks
    return assemble(
        pieces,
        pack,
        full=packs // each if full is None else full,
        count=-(-packs // each),
        max_tokens=max_tokens,
        ranks=ranks,
        accumulate=accumulate,
        dropped=dropped,
    )
