"""Full packs of even cost: one window of documents, laid into a given number of packs."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from xtf.data.cost import CostFunction

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_CLOSING = 0.08  # share of all tokens, of the shortest documents, that close the packs
_VARIETY = 0.5  # how much of the usual mix of lengths stands beside a long document: 0 the shortest only, 1 as in any other pack


def even_packs(lengths: Ints, cost: CostFunction, *, packs: int, group: int, max_tokens: int) -> Ints:
    """Lay documents into packs so that packs are nearly full, and packs of a group, which a step will hold, cost nearly the same.

    Two things must come out even at once, tokens and cost. A pack has a budget of cost; with its room r and what is left of its budget
    q, the documents that it still needs cost q ÷ r for each token. That is large where documents are long. So documents go from
    the longest to the shortest, each into the pack that needs the most for each token and has room: longest processing time first (Graham
    1969), in two dimensions. The shortest, with a few per cent of all tokens, close the packs by best fit, each into the least room that
    holds it; they cost next to nothing.

    Most packs have the same budget, the mean. A document that costs more than that alone cannot be made cheaper: those are
    seeds of packs, sorted into groups with those as long as themselves, and each pack of such a group has the budget that its longest
    document forces on the group. So a step whose one rank has a long document gives the other ranks as much to do.

    Args:
        lengths: (documents,), none longer than ``max_tokens``; together about as many tokens as the packs hold, or more.
        cost: of a document.
        packs: how many; a multiple of ``group``.
        group: packs of a step.
        max_tokens: that a pack may have.

    Returns:
        The pack of each document, -1 for those that found no room; (documents,) int64. Packs are grouped when sorted by cost.

    Example:
        >>> even_packs(np.array([8, 7, 5, 3, 1]), lambda n: n * n * 1.0, packs=3, group=3, max_tokens=8).tolist()
        [0, 1, 2, 2, 1]
    """
    order = np.argsort(-lengths, kind="stable")
    tokens = lengths[order]
    each = np.asarray(cost(tokens), np.float64)
    tail = np.cumsum(tokens[::-1])[::-1]
    closing = int(np.searchsorted(-tail, -_CLOSING * float(tail[0]))) if len(tail) else 0
    budget, seeds = _budgets(tokens, each, closing, cost, packs, group, max_tokens)
    room, alone = _levels(tokens, packs, max_tokens)
    seeds = max(seeds, alone)
    owner = np.full(len(tokens), -1, np.int64)
    owner[:seeds] = np.arange(seeds)
    room[:seeds] -= tokens[:seeds]
    budget[:seeds] -= each[:seeds]
    closing = max(closing, seeds)
    rooms = room.tolist()
    owner[seeds:closing] = _spread(tokens[seeds:closing].tolist(), each[seeds:closing].tolist(), rooms, budget.tolist())
    owner[closing:] = _close(tokens[closing:].tolist(), rooms)
    missed = np.flatnonzero(owner < 0)
    if len(missed):  # the rest of the room, where packs were not filled to the brim
        held = np.bincount(owner[owner >= 0], tokens[owner >= 0], packs).astype(np.int64)
        owner[missed] = _close(tokens[missed].tolist(), (max_tokens - held).tolist())
    found = np.empty_like(owner)
    found[order] = owner
    return found


def spread_evenly(lengths: Ints, cost: CostFunction, *, packs: int, max_tokens: int, group: int | None = None) -> Ints | None:
    """The pack of each document, each document into the pack that is furthest below its level, the costliest first; (documents,) int64.

    Args:
        lengths: of the documents.
        cost: of a document.
        packs: how many.
        max_tokens: that a pack may have.
        group: how many packs are run at the same time, one on each rank; by default all. All packs of a group have one level, and groups
            have different ones only where documents are too heavy: `_group_levels`.

    Returns:
        ``None`` if a document finds no room that way.
    """
    each = np.asarray(cost(np.asarray(lengths, np.int64)), np.float64)
    order = np.argsort(-each, kind="stable")
    rooms = [max_tokens] * packs
    owner = np.full(len(lengths), -1, np.int64)
    levels = np.repeat(_group_levels(each[order], packs, group or packs), group or packs).tolist()
    heap = [(-level, 0, pack) for pack, level in enumerate(levels)]  # where costs are equal, the one with the fewest tokens
    for document, tokens, value in zip(order.tolist(), np.asarray(lengths)[order].tolist(), each[order].tolist(), strict=True):
        passed: list[tuple[float, int, int]] = []
        while heap and rooms[heap[0][2]] < tokens:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        spent, held, pack = heap[0]
        heapq.heapreplace(heap, (spent + value, held + tokens, pack))
        for entry in passed:
            heapq.heappush(heap, entry)
        rooms[pack] -= tokens
        owner[document] = pack
    return owner


def _group_levels(falling: Floats, packs: int, group: int) -> Floats:
    """What the packs of each group should cost, (packs ÷ group,): the same in all, but where the heaviest document of a group costs more.

    A rank that has one document of twice the cost of a pack makes all others wait, unless they have as much to do at that time, and all
    less at another. With documents by falling cost, group k has document k × group at least; the rest is spread like water.

    Example:
        >>> _group_levels(np.array([6.0, 1, 1, 1, 1, 1, 1]), 4, 2).tolist(), _group_levels(np.array([1.0] * 8), 4, 2).tolist()
        ([6.0, 1.0], [2.0, 2.0])
    """
    groups = packs // group
    heads = np.zeros(groups)
    found = falling[::group][:groups]
    heads[: len(found)] = found
    total = float(falling.sum()) / group
    for heavy in range(groups):  # the first of them are above the water
        water = (total - float(heads[:heavy].sum())) / (groups - heavy)
        if water >= heads[heavy]:
            return np.concatenate([heads[:heavy], np.full(groups - heavy, water)])
    return heads


def _budgets(tokens: Ints, each: Floats, closing: int, cost: CostFunction, packs: int, group: int, max_tokens: int) -> tuple[Floats, int]:
    """The budget of each pack, and how many packs, whole groups, are seeded with the longest documents, one each in falling order.

    Args:
        tokens: falling; ``each`` is their cost.
        closing: the first of the documents that close packs.
    """
    longest = min(packs, len(tokens))
    cost_before, tokens_before = (np.concatenate([[0.0], np.cumsum(values)]) for values in (each, tokens))
    total = cost_before[-1] * min(1.0, packs * max_tokens / max(tokens_before[-1], 1.0))
    least = float((cost_before[-1] - cost_before[closing]) / max(tokens_before[-1] - tokens_before[closing], 1.0))
    heads = np.arange(0, longest, group)
    if not len(heads):
        return np.zeros(packs), 0
    left = max_tokens - tokens[:longest]
    whole_left = np.asarray(cost(left), np.float64)  # the costliest that the room can take: one document
    seeds, budget = 0, np.zeros(packs)
    for _ in range(3):  # what stands beside the seeds depends on how many there are; it settles at once
        usual = (cost_before[-1] - cost_before[seeds]) / max(tokens_before[-1] - tokens_before[seeds], 1.0)
        beside = min(least, usual) + _VARIETY * max(usual - least, 0.0)
        forced = each[heads] + np.minimum(left[heads] * beside, whole_left[heads])
        reached = np.minimum(np.repeat(forced, group)[:longest], each[:longest] + whole_left)
        mean_of_rest = (total - np.concatenate([[0.0], np.cumsum(reached)])[heads]) / (packs - heads)
        free = np.flatnonzero(mean_of_rest >= forced)  # the first group whose documents force nothing
        groups = int(free[0]) if len(free) else len(heads) - 1
        budget[:] = mean_of_rest[groups]
        budget[: groups * group] = np.repeat(forced[:groups], group)
        if groups * group == seeds:
            break
        seeds = groups * group
    return budget, seeds


def _levels(tokens: Ints, packs: int, max_tokens: int) -> tuple[Ints, int]:
    """How many tokens each pack is filled to, (packs,), and how many of the longest documents have more and stand alone.

    Where documents are too few for the packs, as when no two fit together, filling packs to the brim would leave others
    with one document, or none. So they are filled as water would: all to one level. Together the packs then hold exactly
    all tokens, and no document is longer than the level but those that stand alone; so none is left empty that a document could go to.
    """
    total = int(tokens.sum())
    if total >= packs * max_tokens:
        return np.full(packs, max_tokens, np.int64), 0
    longest = tokens[: packs - 1]
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(longest)])
    level, over = np.divmod(total - before, packs - np.arange(len(before)))
    alone = int(np.argmax(np.append(longest, 0) <= level))
    levels = np.full(packs, level[alone], np.int64)
    levels[:alone] = tokens[:alone]
    levels[alone : alone + int(over[alone])] += 1
    return levels, alone


def _spread(tokens: list[int], each: list[float], rooms: list[int], budget: list[float]) -> list[int]:
    """The pack of each document, -1 where none has room; ``rooms`` and ``budget`` are what is left after it.

    Args:
        tokens: falling; ``each`` is their cost.
    """
    heap = [(-budget[pack] / room, pack) for pack, room in enumerate(rooms) if room]
    heapq.heapify(heap)
    waiting: list[tuple[int, int]] = []  # the packs that need the most but have no room yet, by room
    owner = [-1] * len(tokens)
    for document, need in enumerate(tokens):
        while waiting and -waiting[0][0] >= need:
            pack = heapq.heappop(waiting)[1]
            heapq.heappush(heap, (-budget[pack] / rooms[pack], pack))
        while heap and rooms[heap[0][1]] < need:
            pack = heapq.heappop(heap)[1]
            heapq.heappush(waiting, (-rooms[pack], pack))
        if not heap:
            continue
        pack = heap[0][1]
        owner[document] = pack
        rooms[pack] -= need
        budget[pack] -= each[document]
        if rooms[pack]:
            heapq.heapreplace(heap, (-budget[pack] / rooms[pack], pack))
        else:
            heapq.heappop(heap)
    return owner


def _close(tokens: list[int], rooms: list[int]) -> list[int]:
    """Best fit: the pack of each document, the one with the least room that holds it; -1 where none does."""
    free = sorted((room, pack) for pack, room in enumerate(rooms) if room)
    owner = [-1] * len(tokens)
    for document, need in enumerate(tokens):
        at = bisect_left(free, (need, -1))
        if at == len(free):
            continue
        room, pack = free.pop(at)
        owner[document] = pack
        if room > need:
            insort(free, (room - need, pack))
    return owner
