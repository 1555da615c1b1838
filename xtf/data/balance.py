"""Balanced batches: documents packed and dealt so that all ranks have the same work in every step, in random order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from xtf.data.cost import Cost, CostFunction
from xtf.data.even_packs import even_packs, spread_evenly
from xtf.data.plan import Floats, Ints, Pieces, Plan, Step, assemble
from xtf.data.plan_input import TooLong, check_count, check_layout, check_too_long, checked_cost, cut, generator

_BLOCK = 1 << 16  # documents that are handed to the windows at once, so that the time is linear in documents


def plan_batches(
    lengths: Sequence[int] | npt.NDArray[Any],
    *,
    max_tokens: int,
    data_ranks: int,
    accumulate: int = 1,
    seed: int = 0,
    cost: CostFunction | None = None,
    too_long: TooLong = "error",
    window: int | None = None,
    mix: float = 0.0,
) -> Plan:
    """Pack documents, and give each rank packs of the same cost in every step.

    Every document stands exactly once, whole, in a pack of at most ``max_tokens``. All steps are full but the last, the remainder,
    which is spread evenly over ranks. The order is random: documents are shuffled and taken in windows; the packs of a window
    are made even (`xtf.data.even_packs`), sorted by cost and cut into steps of neighbours; then all full steps are shuffled.
    Packs without a very long document mix all lengths, and very long ones stand together in a step, which makes it heavier than others
    but keeps no rank waiting.

    The plan is the same on all ranks: a pure function of the arguments.

    Args:
        lengths: (documents,), tokens of each, integers of at least 1.
        max_tokens: that a pack, one micro-batch of one rank, may have.
        data_ranks: how many parts the batch has.
        accumulate: packs of each rank in a step.
        seed: of the order, any integer.
        cost: of a document, as `document_cost(model)`; full attention alone, if ``None``. Packs have nearly equal tokens, so a plan
            that is even in the squares of lengths is even in every mix of these with tokens, too.
        too_long: what happens to a document longer than ``max_tokens``: ``"error"`` refuses it, ``"drop"`` leaves it out
            (`Plan.dropped`), ``"split"`` cuts it every ``max_tokens`` into pieces that are planned as documents are (`Step.pieces`).
        window: how many steps are balanced with each other. More find better neighbours, fewer are nearer to random order;
            if ``None``, as many as have 8192 packs, and at least 256.
        mix: trades balance for order, from 0 to 1: where packs of a window are sorted by cost, this much of their place is random.
            At 1 the packs of a step are any.

    Raises:
        ValueError: for no documents, a length that is no integer or under 1, a document too long where that is an error, or an
            argument out of range.

    Example:
        >>> plan = plan_batches([5, 3, 8, 1, 7, 4, 4], max_tokens=8, data_ranks=2)
        >>> [len(step) for step in plan], sorted(int(i) for step in plan for rank in step for pack in rank for i in pack)
        ([2, 2], [0, 1, 2, 3, 4, 5, 6])

    References:
        Balancing by sequence length within a window, as Yao et al. 2024, "OmniBal", and Wang et al. 2025, "WLB-LLM", do.
    """
    layout = _Layout(max_tokens, data_ranks, accumulate, cost, window, mix)
    pieces, dropped = cut(lengths, max_tokens, too_long)
    if not len(pieces.documents):
        raise ValueError(f"all {len(dropped)} documents have more than max_tokens = {max_tokens} tokens, so that nothing is left to plan")
    random = generator(seed, "plan")
    shuffled = random.permutation(len(pieces.documents))
    blocks = (pieces.at(shuffled[begin : begin + _BLOCK]) for begin in range(0, len(shuffled), _BLOCK))
    windows = list(_windows(blocks, layout, random))
    return _shuffled(windows, layout, random, dropped)


def stream_batches(
    lengths: Iterable[int],
    *,
    max_tokens: int,
    data_ranks: int,
    accumulate: int = 1,
    seed: int = 0,
    cost: CostFunction | None = None,
    too_long: TooLong = "error",
    window: int | None = None,
    mix: float = 0.0,
) -> Iterator[Step]:
    """`plan_batches` for documents that come one after another: steps of a window go out as soon as it is known.

    What `plan_batches` keeps for all documents, this keeps inside a window: the order of steps is random there, and it is up to the
    source to come in random order beyond. Less than two windows of tokens are held, or three steps where a window is one. Documents
    are numbered as they come. The steps are a pure function of the arguments and the lengths: a resumed run skips those that are
    done, ``itertools.islice(stream_batches(...), done, None)``.

    Args:
        lengths: tokens of each document, any number of them; may be endless.
        max_tokens: as for `plan_batches`, and so are all others.
        data_ranks: likewise.
        accumulate: likewise.
        seed: likewise.
        cost: likewise.
        too_long: likewise; what is dropped keeps its number, and is in no step.
        window: likewise.
        mix: likewise.

    Raises:
        ValueError: as `plan_batches`, for arguments at once, for a length when it comes; if nothing came at all.

    Example:
        >>> import itertools
        >>> steps = stream_batches(itertools.repeat(4), max_tokens=8, data_ranks=2, window=3)
        >>> [[len(pack) for rank in step for pack in rank] for step in itertools.islice(steps, 2)]
        [[2, 2], [2, 2]]
    """
    layout = _Layout(max_tokens, data_ranks, accumulate, cost, window, mix)
    check_too_long(too_long)
    return _stream(lengths, layout, generator(seed, "stream"), too_long)


def _stream(lengths: Iterable[int], layout: _Layout, random: np.random.Generator, too_long: TooLong) -> Iterator[Step]:
    for planned in _windows(_read(lengths, layout, too_long), layout, random):
        yield from _shuffled([planned], layout, random, np.zeros(0, np.int64))


def _read(lengths: Iterable[Any], layout: _Layout, too_long: TooLong) -> Iterator[Pieces]:
    """Pieces as they come, some at a time."""
    first, block, tokens, enough = 0, list[Any](), 0, layout.step_tokens * max(1, layout.window // 8)
    for length in lengths:
        block.append(length)
        tokens += length if isinstance(length, (int, np.integer)) and length > 0 else enough  # what is no length is refused at once
        if tokens >= enough:
            yield cut(block, layout.max_tokens, too_long, first=first)[0]
            first, block, tokens = first + len(block), [], 0
    if block or not first:
        yield cut(block, layout.max_tokens, too_long, first=first)[0]


@dataclass(frozen=True)
class _Layout:
    """The checked arguments of a plan."""

    max_tokens: int
    ranks: int
    accumulate: int
    given_cost: CostFunction | None
    given_window: int | None
    mix: float
    cost: CostFunction = field(init=False)
    window: int = field(init=False)

    def __post_init__(self) -> None:
        check_layout(self.max_tokens, self.ranks, self.accumulate)
        if self.given_window is not None:
            check_count("window", self.given_window)
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix is {self.mix}, expected from 0 (best balance) to 1 (any packs in a step)")
        object.__setattr__(self, "cost", checked_cost(self.given_cost or Cost.attention()))
        object.__setattr__(self, "window", self.given_window or max(256, -(-8192 // self.group)))

    @property
    def group(self) -> int:
        """Packs of a step."""
        return self.ranks * self.accumulate

    @property
    def step_tokens(self) -> int:
        """That a step can hold."""
        return self.group * self.max_tokens


@dataclass(frozen=True)
class _Window:
    """Planned steps: the pack of each piece, which packs stand where (steps, ranks, accumulate), and the cost of each step."""

    pieces: Pieces
    pack: Ints
    steps: Ints
    cost: Floats
    full: bool = True


def _windows(source: Iterator[Pieces], layout: _Layout, random: np.random.Generator) -> Iterator[_Window]:
    """Windows of full steps, as the source gives enough for one; at its end one step that is not full, if anything remains.

    What finds no room in its window comes first in the next. One and a half windows are waited for, so that the last is no small one.
    """
    held = Pieces.join([])
    for come in source:
        held = Pieces.join([held, come])
        while _steps(held, layout) >= layout.window + layout.window // 2 + 1:
            planned, held = _plan_first(held, layout, random)
            yield planned
    while len(held.documents):
        steps = _steps(held, layout)
        if not steps:  # less than a full step; yet the documents may not fit one
            pack = spread_evenly(held.lengths, layout.cost, packs=layout.group, max_tokens=layout.max_tokens, group=layout.ranks)
            if pack is not None:
                yield _Window(held, pack, *_deal(held, pack, 1, layout, random), full=False)
                return
        planned, left = _plan_last(held, max(steps, 1), layout, random)
        if more := _steps(left, layout):  # much found no room: better a little in every step than steps of nothing else
            planned, left = _plan_last(held, steps + more, layout, random)
        held = left
        yield planned


def _steps(held: Pieces, layout: _Layout) -> int:
    """Full steps that documents give: by their tokens, or by those of which no two fit in a pack."""
    lengths = held.lengths
    return max(int(lengths.sum()) // layout.step_tokens, int((2 * lengths > layout.max_tokens).sum()) // layout.group)


def _reach(lengths: Ints, tokens: int) -> int:
    """How many documents, from the first on, have that many tokens together."""
    return min(int(np.searchsorted(np.cumsum(lengths), tokens)) + 1, len(lengths))


def _plan_first(held: Pieces, layout: _Layout, random: np.random.Generator) -> tuple[_Window, Pieces]:
    """A window of the first that are held, and the others."""
    packs, large = layout.window * layout.group, np.cumsum(2 * held.lengths > layout.max_tokens)
    count = min(_reach(held.lengths, packs * layout.max_tokens), int(np.searchsorted(large, packs, "right")))
    planned, left = _plan_window(held.at(slice(0, count)), layout.window, layout, random)
    return planned, Pieces.join([left, held.at(slice(count, None))])


def _plan_last(held: Pieces, steps: int, layout: _Layout, random: np.random.Generator) -> tuple[_Window, Pieces]:
    """All that is held in full steps, but what is too much for them, which is left for the remainder: documents that one rank can have
    without making others wait.

    Where the remainder has e tokens for P packs, these are the documents of up to e ÷ P tokens; more, where these have less than 4 e
    tokens, so that it is not made of all the shortest; but none that costs more than half a mean pack.
    """
    packs, large = steps * layout.group, 2 * held.lengths > layout.max_tokens
    alone = large & (np.cumsum(large) > packs)  # would be in packs of their own, for which there is no place
    chosen, lengths = held.at(~alone), held.lengths[~alone]
    rest = int(lengths.sum()) - packs * layout.max_tokens
    if rest > 0:
        rising = np.sort(lengths)
        short = max(rest // layout.group, int(rising[_reach(rising, 4 * rest) - 1]))
        each = layout.cost(lengths)
        long = (lengths > short) | (2 * each > float(np.cumsum(each)[-1]) / packs)
        chosen = chosen.at(np.argsort(~long, kind="stable"))
    count = _reach(chosen.lengths, packs * layout.max_tokens)
    planned, left = _plan_window(chosen.at(slice(0, count)), steps, layout, random)
    return planned, Pieces.join([left, chosen.at(slice(count, None)), held.at(alone)])


def _plan_window(chosen: Pieces, steps: int, layout: _Layout, random: np.random.Generator) -> tuple[_Window, Pieces]:
    """These pieces in full steps, and what finds no room there."""
    pack = even_packs(chosen.lengths, layout.cost, packs=steps * layout.group, group=layout.group, max_tokens=layout.max_tokens)
    placed = pack >= 0
    kept, pack = chosen.at(placed), pack[placed]
    return _Window(kept, pack, *_deal(kept, pack, steps, layout, random)), chosen.at(~placed)


def _deal(pieces: Pieces, pack: Ints, steps: int, layout: _Layout, random: np.random.Generator) -> tuple[Ints, Floats]:
    """Which packs each step, rank and micro-batch has, (steps, ranks, accumulate), and what each step costs.

    Packs sorted by cost are cut into steps, and those of a step into micro-batches. In each micro-batch the costliest pack goes to the
    rank that has had the least so far.
    """
    ranks, micro, packs = layout.ranks, layout.accumulate, steps * layout.group
    spent = np.bincount(pack, layout.cost(pieces.lengths), packs)
    place = np.empty(packs)
    place[np.argsort(-spent, kind="stable")] = np.arange(packs)
    place = (1 - layout.mix) * place + layout.mix * packs * random.random(packs)
    groups = np.argsort(place, kind="stable").reshape(steps, layout.group)
    groups = np.take_along_axis(groups, np.argsort(-spent[groups], axis=1, kind="stable"), axis=1).reshape(steps, micro, ranks)
    dealt = np.empty_like(groups)
    so_far: Floats = np.zeros((steps, ranks))
    for k in range(micro):
        to = np.argsort(so_far, axis=1, kind="stable")
        np.put_along_axis(dealt[:, k], to, groups[:, k], axis=1)
        so_far += spent[dealt[:, k]]
    dealt = np.take_along_axis(dealt, np.argsort(random.random((steps, micro)), axis=1)[:, :, None], axis=1)
    dealt = np.take_along_axis(dealt, np.argsort(random.random((steps, ranks)), axis=1)[:, None], axis=2)
    return dealt.transpose(0, 2, 1), so_far.sum(axis=1)


def _spread_order(cost: Floats, random: np.random.Generator) -> Ints:
    """A random order of steps in which every stretch of training has steps of every cost, in due proportion.

    Steps sorted by cost are taken a few at a time, about the square root of all, and each of these goes to another stretch.
    So the step of a document is as likely to be any as in a plain shuffle, but the few steps that hold the longest documents do not
    crowd by chance.
    """
    stretches = max(1, round(len(cost) ** 0.5))
    rows = -(-len(cost) // stretches)
    stretch = np.argsort(random.random((rows, stretches)), axis=1).reshape(-1)[: len(cost)] + random.random(len(cost))
    return np.argsort(-cost, kind="stable")[np.argsort(stretch, kind="stable")]


def _shuffled(windows: Sequence[_Window], layout: _Layout, random: np.random.Generator, dropped: Ints) -> Plan:
    """The steps of windows in random order, the one that is not full last; documents of a pack stand in the order in which they came."""
    first, slots, packs = 0, list[Ints](), list[Ints]()
    for window in windows:
        packs.append(window.pack + first)
        slots.append(window.steps.reshape(len(window.steps), -1) + first)
        first += window.steps.size
    full = sum(len(window.steps) for window in windows if window.full)
    steps = np.concatenate([np.zeros((0, layout.group), np.int64), *slots])
    cost = np.concatenate([np.zeros(0), *(window.cost for window in windows if window.full)])
    steps = np.concatenate([steps[_spread_order(cost, random)], steps[full:]])
    place = np.empty(first, np.int64)
    place[steps.reshape(-1)] = np.arange(first)
    pack = place[np.concatenate([np.zeros(0, np.int64), *packs])]
    return assemble(
        Pieces.join([window.pieces for window in windows]),
        pack,
        full=full,
        count=len(steps),
        max_tokens=layout.max_tokens,
        ranks=layout.ranks,
        accumulate=layout.accumulate,
        dropped=dropped,
    )
