"""Overlap: the tokens of a micro-batch in parts, interleaved so that one part's exchanges are under way while another computes.

Domino (Wang et al. 2024, arXiv 2409.15241) cuts a micro-batch into independent parts to hide tensor-parallel communication;
DualPipe (DeepSeek-V3, arXiv 2412.19437, 3.2.1) and XTuner V1 do so for expert parallelism. Here it is a rewriting of a program that
has exchanges, whatever they are for: the stages between the first exchange's attention and the last exchange's reader are made
once for each part, and put in the order in which the parts take turns: each runs up to its next exchange and what can run while
that is under way. The walk runs the program backwards for gradients, where the same turns hide the transposed exchanges.

Documents stay whole in attention. Parts end where a document does if one ends near enough; where none does, the attention of the
parts that share a document is one stage (a *group* of parts), and only what is between attentions takes turns. So a single long
document overlaps too. All ranks cut alike, at the end of a document only where each of them has one: collectives must meet.

Dims: T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtf.batch import PER_DOCUMENT
from xtf.stage import Exchange, Pair, Params, Program, Stage, Values

Layout = tuple[int, ...]
"""How many parts each group has, in order: ``(1, 1)`` for two parts that share no document, ``(2,)`` for two that do."""

DOCUMENTS = "cu_seqlens"
"""The constant that a stage reads in which tokens of a document see each other: where documents begin and end."""


class Cut(NamedTuple):
    """Where a micro-batch is cut.

    Args:
        bounds: the first token of each part, and T.
        layout: which parts share documents.
    """

    bounds: tuple[int, ...]
    layout: Layout


def near_ends(ends: Sequence[int], parts: int) -> tuple[int | None, ...]:
    """For each even cut between parts, where a document ends within a quarter of a part's length of it, or ``None``.

    Args:
        ends: where documents begin and end, from 0 to T, as in ``cu_seqlens``.
        parts: how many, at least 1.

    Raises:
        ValueError: if there are more parts than tokens.

    Example:
        >>> near_ends([0, 90, 210, 400], 2), near_ends([0, 10, 400], 2)
        ((210,), (None,))
    """
    total = ends[-1]
    if parts > total:
        raise ValueError(f"a micro-batch of {total} tokens cannot run in {parts} parts: give more tokens, or a smaller overlap")
    found: list[int | None] = []
    for i in range(1, parts):
        near = min(ends, key=lambda end: abs(end - total * i / parts))
        found.append(near if abs(near - total * i / parts) <= total / parts / 4 else None)
    return tuple(found)


def cut_documents(ends: Sequence[int], parts: int, apart: Sequence[bool]) -> Cut:
    """Cut packed documents into parts of nearly equal length.

    Args:
        ends: see `near_ends`; so is ``parts``.
        apart: for each cut, whether it may be where a document ends. All ranks are told the same: a program is the same on all.

    Example:
        >>> cut_documents([0, 90, 210, 400], 2, [True]), cut_documents([0, 90, 210, 400], 2, [False])
        (Cut(bounds=(0, 210, 400), layout=(1, 1)), Cut(bounds=(0, 200, 400), layout=(2,)))
    """
    bounds, layout = [0], [1]
    for i, (near, may) in enumerate(zip(near_ends(ends, parts), apart, strict=True), start=1):
        if may and near is not None:
            bounds.append(near)
            layout.append(1)
        else:
            bounds.append(ends[-1] * i // parts)
            layout[-1] += 1
    return Cut((*bounds, ends[-1]), tuple(layout))


def part_constants(consts: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """The constants of a micro-batch with those of its parts added: ``name#i`` of part i, ``name#i+j`` of a group.

    Tensors whose first dim is T are cut, but for those of `xtf.batch.PER_DOCUMENT`; `DOCUMENTS` becomes that of the documents
    inside; the rest stays as it is.
    """
    bounds, total, found = cut.bounds, cut.bounds[-1], dict(consts)
    found[_SIZES] = tuple(b - a for a, b in pairwise(bounds))
    ends: list[int] = consts[DOCUMENTS].tolist()
    for first, last in {*_groups(cut.layout), *((i, i) for i in range(len(bounds) - 1))}:
        start, stop, suffix = bounds[first], bounds[last + 1], _suffix(first, last)
        for name, value in consts.items():
            per_token = name not in PER_DOCUMENT and isinstance(value, Tensor) and value.shape[:1] == (total,)
            found[name + suffix] = value[start:stop].clone() if per_token else value  # a copy: see _cut
        inside = [0, *(end - start for end in ends if start < end < stop), stop - start]
        found[DOCUMENTS + suffix] = torch.tensor(inside, dtype=torch.int32, device=consts[DOCUMENTS].device)
    return found


def overlapped(program: Program, pairs: Sequence[Pair | None], layout: Layout) -> tuple[Program, tuple[Pair | None, ...]]:
    """A program in parts that take turns, and the pairs of its stages.

    Args:
        program: finished: its transfers are declared.
        pairs: the pair of each stage, ``None`` for exchanges.
        layout: of the parts.

    Returns:
        The program and its pairs. Of a stage in parts, the names, reads and writes end in ``#i``, or ``#i+j`` for a group. A program
        without exchanges is returned as it is.
    """
    region = _region(program)
    if region is None or sum(layout) == 1:
        return program, tuple(pairs)
    begin, end = region
    parts, inside = sum(layout), range(begin, end)
    late = [i for i in inside if _of_all(program[i])]  # what sums up over tokens comes when all parts have run
    turns = [i for i in inside if i not in late]
    entering, written = list[str](), set[str]()
    for i in turns:
        entering += [name for name in program[i].reads if name not in written and name not in entering]
        written |= set(program[i].writes)
    after = [program[i] for i in (*late, *range(end, len(program)))]
    by_token = _read_before_written([node for node in after if not _of_all(node)], written)
    read_inside = {name for i in turns for name in program[i].reads}
    sums = [name for name in dict.fromkeys(n for i in turns for n in program[i].writes) if name not in read_inside and name not in by_token]
    nodes: list[tuple[Stage | Exchange, Pair | None]] = [(program[i], pairs[i]) for i in range(begin)]
    nodes += [_split(name, parts) for name in entering]
    nodes += _turns([(program[i], pairs[i]) for i in turns], layout)
    nodes += [_join(name, parts) for name in sorted(by_token)]
    nodes += [_sum(sums, parts)] if sums else []
    nodes += [(program[i], pairs[i]) for i in (*late, *range(end, len(program)))]
    return tuple(node for node, _ in nodes), tuple(pair for _, pair in nodes)


_SIZES = "part_sizes"


def _region(program: Program) -> tuple[int, int] | None:
    """The stages that run in parts, a half-open range: from the attention before the first exchange to the first stage that reads what
    the last exchange brings."""
    exchanges = [i for i, node in enumerate(program) if isinstance(node, Exchange)]
    if not exchanges:
        return None
    begin = max((i for i in range(exchanges[0]) if _is_documentwise(program[i])), default=exchanges[0])
    brought = set(program[exchanges[-1]].writes)
    return begin, next(i for i in range(exchanges[-1] + 1, len(program)) if brought & set(program[i].reads)) + 1


def _is_documentwise(node: Stage | Exchange) -> bool:
    return isinstance(node, Stage) and DOCUMENTS in node.consts


def _of_all(node: Stage | Exchange) -> bool:
    return isinstance(node, Stage) and node.kind == "statistics"


def _read_before_written(nodes: Sequence[Stage | Exchange], names: set[str]) -> set[str]:
    """Which of ``names`` these nodes read as they were before."""
    found, gone = set[str](), set[str]()
    for node in nodes:
        found |= set(node.reads) & names - gone
        gone |= set(node.writes)
    return found


def _groups(layout: Layout) -> list[tuple[int, int]]:
    """The first and the last part of each group."""
    ends = list(accumulate(layout))
    return [(end - size, end - 1) for size, end in zip(layout, ends, strict=True)]


def _suffix(first: int, last: int) -> str:
    return "#" + "+".join(map(str, range(first, last + 1)))


def _turns(nodes: Sequence[tuple[Stage | Exchange, Pair | None]], layout: Layout) -> list[tuple[Stage | Exchange, Pair | None]]:
    """The nodes of all parts in the order in which the parts take turns.

    A part runs up to its next exchange, then what does not read what that brings; then the next part has its turn. A stage of a
    group runs when all parts of the group have come to it.
    """
    group_of = {part: (first, last) for first, last in _groups(layout) for part in range(first, last + 1)}
    at = dict.fromkeys(group_of, 0)  # the next node of each part
    out: list[tuple[Stage | Exchange, Pair | None]] = []
    while any(i < len(nodes) for i in at.values()):
        for part in at:
            coming = set[str]()  # what an exchange of this turn brings
            while at[part] < len(nodes):
                node, pair = nodes[at[part]]
                if coming & set(node.reads):
                    break
                first, last = group_of[part] if _is_documentwise(node) else (part, part)
                if any(at[other] != at[part] for other in range(first, last + 1)):
                    break  # the last of the group to come runs it for all
                out.append(_for_parts(node, pair, first, last))
                for other in range(first, last + 1):
                    at[other] += 1
                if isinstance(node, Exchange):
                    coming |= set(node.writes)
                if part != first:
                    break  # the first of the group goes on
    return out


def _for_parts(node: Stage | Exchange, pair: Pair | None, first: int, last: int) -> tuple[Stage | Exchange, Pair | None]:
    """The node of a part, or of a group of parts."""
    suffix = _suffix(first, last)
    reads, writes = (tuple(f"{name}#{part}" for name in names for part in range(first, last + 1)) for names in (node.reads, node.writes))
    if isinstance(node, Exchange):
        return replace(node, name=node.name + suffix, reads=reads, writes=writes), None
    assert pair is not None
    stage = replace(node, name=node.name + suffix, reads=reads, writes=writes, consts=tuple(name + suffix for name in node.consts))
    pair = _renamed(pair, {name + suffix: name for name in node.consts})
    return stage, pair if first == last else _grouped(pair, last - first + 1)


def _renamed(pair: Pair, names: Mapping[str, str]) -> Pair:
    """A pair that takes its constants under other names: ``{given: own}``."""

    def own(consts: Mapping[str, Any]) -> dict[str, Any]:
        return {names[name]: value for name, value in consts.items()}

    def forward(params: Params, reads: Values, consts: Mapping[str, Any]) -> tuple[Values, Any]:
        return pair.forward(params, reads, own(consts))

    def backward(params: Params, residual: Any, dwrites: tuple[Tensor | None, ...], consts: Mapping[str, Any]) -> Any:
        return pair.backward(params, residual, dwrites, own(consts))

    def evaluate(params: Params, reads: Values, consts: Mapping[str, Any]) -> Values:
        assert pair.evaluate is not None
        return pair.evaluate(params, reads, own(consts))

    return pair._replace(forward=forward, backward=backward, evaluate=None if pair.evaluate is None else evaluate)


def _grouped(pair: Pair, parts: int) -> Pair:
    """A pair that takes and gives the values of several parts where ``pair`` takes and gives them end to end."""

    def joined(values: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        runs = [values[i : i + parts] for i in range(0, len(values), parts)]
        return tuple(None if any(v is None for v in run) else torch.cat([v for v in run if v is not None]) for run in runs)

    def apart(values: tuple[Tensor | None, ...], sizes: list[int]) -> tuple[Tensor | None, ...]:
        return tuple(piece for v in values for piece in ([None] * parts if v is None else _cut(v, sizes)))

    def whole(reads: Values) -> tuple[Values, list[int]]:
        return tuple(v for v in joined(reads) if v is not None), [v.shape[0] for v in reads[:parts]]

    def forward(params: Params, reads: Values, consts: Mapping[str, Any]) -> tuple[Values, Any]:
        values, sizes = whole(reads)
        writes, residual = pair.forward(params, values, consts)
        return tuple(w for w in apart(writes, sizes) if w is not None), (residual, sizes)

    def backward(params: Params, residual: Any, dwrites: tuple[Tensor | None, ...], consts: Mapping[str, Any]) -> Any:
        kept, sizes = residual
        dparams, dreads = pair.backward(params, kept, joined(dwrites), consts)
        return dparams, apart(dreads, sizes)

    def evaluate(params: Params, reads: Values, consts: Mapping[str, Any]) -> Values:
        assert pair.evaluate is not None
        values, sizes = whole(reads)
        return tuple(w for w in apart(pair.evaluate(params, values, consts), sizes) if w is not None)

    return pair._replace(forward=forward, backward=backward, evaluate=None if pair.evaluate is None else evaluate)


def _cut(value: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """The parts of a value, as copies: compiled code is made for where in memory a view begins, and whole values can be freed."""
    return tuple(part.clone() for part in torch.split(value, list(sizes)))


def _plain(
    name: str, kind: str, reads: tuple[str, ...], writes: tuple[str, ...], fn: Callable[..., Any], back: Callable[..., Any]
) -> tuple[Stage, Pair]:
    """A stage without parameters that keeps nothing: ``fn(values, sizes of the parts)``, and ``back(cotangents, sizes)``."""

    def whole(params: Params, *values: Tensor, **consts: Any) -> Values:
        return fn(values, consts[_SIZES])

    def forward(params: Params, values: Values, consts: Mapping[str, Any]) -> tuple[Values, None]:
        return fn(values, consts[_SIZES]), None

    def backward(params: Params, residual: Any, dwrites: tuple[Tensor | None, ...], consts: Mapping[str, Any]) -> Any:
        return {}, back(dwrites, consts[_SIZES])

    return Stage(name, kind, whole, name, {}, reads, writes, (_SIZES,)), Pair(forward, backward, needs_params=False)


def _split(name: str, parts: int) -> tuple[Stage, Pair]:
    def fn(values: Values, sizes: Sequence[int]) -> Values:
        return _cut(values[0], sizes)

    def back(dwrites: tuple[Tensor | None, ...], sizes: Sequence[int]) -> tuple[Tensor | None, ...]:
        given = [d for d in dwrites if d is not None]
        return (torch.cat(given) if given else None,)

    return _plain(f"split.{name}", "split", (name,), tuple(f"{name}#{i}" for i in range(parts)), fn, back)


def _join(name: str, parts: int) -> tuple[Stage, Pair]:
    def fn(values: Values, sizes: Sequence[int]) -> Values:
        return (torch.cat(values),)

    def back(dwrites: tuple[Tensor | None, ...], sizes: Sequence[int]) -> tuple[Tensor | None, ...]:
        (d,) = dwrites
        return (None,) * parts if d is None else _cut(d, sizes)

    return _plain(f"join.{name}", "join", tuple(f"{name}#{i}" for i in range(parts)), (name,), fn, back)


def _sum(names: Sequence[str], parts: int) -> tuple[Stage, Pair]:
    """What sums over tokens, summed over parts."""

    def fn(values: Values, sizes: Sequence[int]) -> Values:
        return tuple(torch.stack(values[i : i + parts]).sum(0) for i in range(0, len(values), parts))

    def back(dwrites: tuple[Tensor | None, ...], sizes: Sequence[int]) -> tuple[Tensor | None, ...]:
        return tuple(d for d in dwrites for _ in range(parts))

    return _plain("sum.parts", "sum", tuple(f"{name}#{i}" for name in names for i in range(parts)), tuple(names), fn, back)
