"""The rules by which types of values (`xtf.value_types`) go through operations, one mesh axis at a time.

A sharded dim follows views: where a dim is split, its first factor is the sharded one; where dims are merged, what they become is. A sum
over the sharded dim is partial; where the dim is not known, the sum is only known to differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from xtf.value_types import HOST, VARIES, WHOLE, ZERO, Kind, Operation, Refused, Rule, piece

_USED = "uses a partial value as whole"
_MIXED = "uses a partial sum to which something whole was added: the whole part would count once for each rank"
_PLUS_PIECE = "adds a partial sum and a piece of another value"
_LOCAL_MEAN = "is a mean over a dim of which each rank has a piece, and such means do not sum up to that of the whole"
_NO_RULE = "uses a partial value and has no rule; if it is linear, give it one with check_types(rules=...)"


def rule_of(name: str, elementwise: bool, more: Mapping[str, Rule] | None = None) -> Rule:
    """The rule of an operation, by its full name, as ``"aten::mm"``; ``more`` go before those here."""
    if more and name in more:
        return more[name]
    space, _, short = name.partition("::")
    if space in ("aten", "xtf") and short in RULES:
        return RULES[short]
    if space == "aten" and "_backward" in short:
        return _backward
    return elements if space == "aten" and elementwise else _unknown


def refuse_partial(kinds: Sequence[Kind], why: str = _USED) -> None:
    """Refuse partial values among these."""
    for kind in kinds:
        if kind.letter in "PM":
            raise Refused(kind, _MIXED if kind.letter == "M" else why)


def joined(kind: Kind) -> Kind:
    """One kind for a buffer with parts of several."""
    if kind.letter != "C":
        return kind
    kinds = [k for _, k in kind.parts if k.letter != "0"]
    partial = [k for k in kinds if k.letter in "PM"]
    return together(kinds) if not partial else partial[0] if len(partial) == len(kinds) else VARIES


def together(kinds: Sequence[Kind], local: bool = False) -> Kind:
    """What depends on these, none of which is partial: S where one is, along the dim on which those that know one agree."""
    if not any(k.letter == "S" for k in kinds):
        return WHOLE if any(k.letter == "R" for k in kinds) else HOST
    dims = {k.dim for k in kinds if k.dim is not None}
    return piece(dims.pop() if len(dims) == 1 else None, local)


def _flat(kinds: Any) -> list[Kind]:
    """Every kind in a tree of kinds."""
    if isinstance(kinds, Kind):
        return [joined(kinds)]
    return [k for row in cast(list[Any], kinds) for k in _flat(row)] if isinstance(kinds, list) else []


def _dims(value: Any) -> list[int]:
    return list(cast(list[int], value)) if isinstance(value, (list, tuple)) else [value]


def _mapped(kind: Kind, dims: Callable[[int], int | None]) -> Kind:
    """A kind whose sharded dim becomes another; ``None`` where it is lost."""
    kind = joined(kind)
    return piece(dims(kind.dim), kind.local) if kind.dim is not None else kind


def _aligned(op: Operation, last: int | None = None) -> list[Kind]:
    """Kinds of the first arguments, sharded dims counted as in the result: broadcasting aligns dims from the last."""
    ndim = op.outs[0].dim() if op.outs else 0
    found: list[Kind] = []
    for value, kind in zip(op.args[:last], op.kinds[:last], strict=True):
        shift = ndim - value.dim() if isinstance(value, Tensor) else 0
        found += [_mapped(one, lambda d, shift=shift: d + shift) for one in _flat(kind)]
    return found


def _integers(op: Operation) -> bool:
    return bool(op.outs) and not op.outs[0].is_floating_point()


# Element by element --------------------------------------------------------------------------------------------------------------


def elements(op: Operation) -> Kind:
    """Any function of elements."""
    kinds = _aligned(op)
    refuse_partial(kinds)
    return together(kinds, _integers(op) and any(k.local for k in kinds))


def _scaled(kind: Kind, factor: object) -> Kind:
    """A kind times a number, or (any other ``factor``) times something whole."""
    if isinstance(factor, (int, float)):
        return replace(kind, whole=tuple((key, c * factor) for key, c in kind.whole))
    return replace(kind, whole=())


def _mul(op: Operation) -> Kind:
    a, b = _aligned(op, 2)
    if "0" in (a.letter, b.letter):
        return ZERO
    if b.letter in "PM" or (b.letter == "R" and not isinstance(op.args[0], Tensor)):
        a, b, factor = b, a, op.args[0]
    else:
        factor = op.args[1]
    number = not isinstance(factor, Tensor)
    if (a.letter == "P" and b.letter in "RH") or (a.letter in "RM" and number):
        return _scaled(a, factor)
    return elements(op)


def _div(op: Operation) -> Kind:
    a, b = _aligned(op, 2)
    number = not isinstance(op.args[1], Tensor)
    if op.named.get("rounding_mode") is None and ((a.letter == "P" and b.letter in "RH") or (a.letter in "RM" and number and op.args[1])):
        return _scaled(a, 1 / op.args[1] if number else None)
    return elements(op)


def plus(a: Kind, b: Kind, n: int) -> Kind:
    """The kind of a sum, over an axis of n ranks. What is whole is partial too if its factor is 1/n."""
    letters = {a.letter, b.letter}
    if "0" in letters:
        return b if a.letter == "0" else a
    if letters & set("PM"):
        if "S" in letters:
            if (a if a.letter == "S" else b).dim is None:
                return VARIES
            raise Refused(a if a.letter in "PM" else b, _PLUS_PIECE)
        factors: dict[int, float] = {}
        for key, factor in (*a.whole, *b.whole):
            factors[key] = factors.get(key, 0.0) + factor
        left = tuple((key, c) for key, c in factors.items() if abs(c) > 1e-9 and abs(c * n - 1) > 1e-9)
        return Kind("M" if left or "H" in letters else "P", made=a.made or b.made, whole=left)
    if letters == {"R"} and len(a.whole) == len(b.whole) == 1 and a.whole[0][0] == b.whole[0][0]:
        return replace(a, whole=((a.whole[0][0], a.whole[0][1] + b.whole[0][1]),))
    return together([a, b], a.local or b.local)


def _add(sign: float) -> Rule:
    def rule(op: Operation) -> Kind:
        a, b = _aligned(op, 2)
        return plus(a, _scaled(b, sign * op.named.get("alpha", 1)), op.n)

    return rule


def _where(op: Operation) -> Kind:
    """A choice between a partial value and 0, the same on all ranks, is partial."""
    mask, a, b = _aligned(op, 3) if op.name == "where" else [_aligned(op)[at] for at in (1, 0, 2)]
    partial = {a.letter, b.letter} == {"P", "0"} and mask.letter in "RH"
    return elements(op) if not partial else a if a.letter == "P" else b


def _backward(op: Operation) -> Kind | list[Kind]:
    """Of a derivative: linear in its first argument."""
    kinds = _aligned(op)
    if kinds[0].letter == "P" and all(k.letter in "RH0" for k in kinds[1:]):
        return kinds[0]
    return [elements(op)] * len(op.outs)


# The same values, elsewhere ------------------------------------------------------------------------------------------------------


def _same(op: Operation) -> Kind:
    """Copies and casts; to integers and truth values they are functions."""
    return elements(op) if op.args[0].is_floating_point() and _integers(op) else op.kinds[0]


def _view(op: Operation) -> Kind:
    old, new = tuple(op.args[0].shape), tuple(op.outs[0].shape)
    return op.kinds[0] if old == new else _mapped(op.kinds[0], lambda dim: regrouped(old, new, dim))


def regrouped(old: Sequence[int], new: Sequence[int], dim: int) -> int | None:
    """The dim of a view in which the first factor of a dim is; ``None`` where dims of size 1 leave it open.

    Example:
        >>> regrouped((6, 4), (6, 2, 2), 1), regrouped((6, 2, 2), (12, 2), 1), regrouped((6, 1, 4), (6, 4), 1)
        (1, 0, 1)
        >>> regrouped((6, 4), (6, 1, 4), 1) is None
        True
    """
    if 0 in old:
        return None
    before = math.prod(old[:dim])
    same, there = ([at for at in range(len(shape)) if math.prod(shape[:at]) == before] for shape in (old, new))
    if not there:  # merged with what is before it
        return max((at for at in range(len(new)) if math.prod(new[:at]) < before), default=None)
    if len(same) == len(there):
        return there[same.index(dim)]
    return there[0] if len(there) == 1 and dim == same[0] else None


def _moved(to: Callable[[Operation, int], int | None]) -> Rule:
    """Of a view in which ``to`` says where a dim is."""
    return lambda op: _mapped(op.kinds[0], lambda dim: to(op, dim))


def _at(op: Operation, name: str = "dim", of: int = 0) -> int:
    """A dim that is an argument, counted from the first."""
    return op.named[name] % max((op.outs[0] if of else op.args[0]).dim(), 1)


def _transposed(op: Operation, dim: int) -> int:
    a, b = (0, 1) if op.name == "t" else (_at(op, "dim0"), _at(op, "dim1"))
    return {a: b, b: a}.get(dim, dim)


def _squeezed(op: Operation, dim: int) -> int | None:
    shape, given = op.args[0].shape, op.named.get("dim")
    gone = {d % len(shape) for d in (range(len(shape)) if given is None else _dims(given)) if shape[d] == 1}
    return None if dim in gone else dim - sum(g < dim for g in gone)


def window(kind: Kind, dim: int, start: int, stop: int, *, drop: bool = False) -> Kind:
    """The kind of a range along a dim, and whether that dim goes."""
    if kind.letter == "C" and kind.dim == dim:
        at, parts = 0, list[tuple[int, Kind]]()
        for size, part in kind.parts:
            parts.append((min(stop, at + size) - max(start, at), part))
            at += size
        kind = side_by_side(dim, [(size, part) for size, part in parts if size > 0])
    kind = replace(kind, whole=())
    return _mapped(kind, lambda d: None if d == dim else d - (d > dim)) if drop else kind


def side_by_side(dim: int, parts: Sequence[tuple[int, Kind]]) -> Kind:
    """The kind of tensors laid end to end."""
    kinds = [k for size, k in parts if size and k.letter != "0"]
    letters = {k.letter for k in kinds}
    if not kinds:
        return ZERO
    if letters <= set("RH") or letters == {"S"}:
        return together(kinds, all(k.local for k in kinds))
    return kinds[0] if letters == {"P"} else Kind("C", dim, parts=tuple(parts))


def _pieces(op: Operation) -> list[Kind]:
    """Ranges of a dim: one from ``start`` or ``index``, or one after another."""
    dim, x = _at(op), op.args[0]
    drop, at = op.name in ("unbind", "select"), op.named.get("start") or op.named.get("index") or 0
    at = min(max(at + x.shape[dim] if at < 0 else at, 0), x.shape[dim])
    found: list[Kind] = []
    for out in op.outs:
        size = 1 if drop else out.shape[dim] * (op.named.get("step") or 1)
        found.append(window(op.kinds[0], dim, at, at + size, drop=drop))
        at += size
    return found


def _cat(op: Operation) -> Kind:
    dim = _at(op, of=1)
    if op.name == "stack":
        return side_by_side(dim, [(1, _mapped(k, lambda d: d + (d >= dim))) for k in op.kinds[0]])
    parts = [(x.shape[dim], k) for x, k in zip(op.args[0], op.kinds[0], strict=True) if x.shape != (0,)]
    return side_by_side(dim, [p for size, k in parts for p in (k.parts if k.letter == "C" and k.dim == dim else ((size, joined(k)),))])


# Products and sums ---------------------------------------------------------------------------------------------------------------


def product(op: Operation, a: Kind, b: Kind, of_a: Mapping[int, int], of_b: Mapping[int, int]) -> Kind:
    """The kind of a product, summed over those dims that ``of_a`` and ``of_b`` (dim: dim of the result) leave out."""
    a, b = joined(a), joined(b)
    if "0" in (a.letter, b.letter):
        return ZERO
    if {a.letter, b.letter} & set("PM"):
        if {a.letter, b.letter} not in ({"P", "R"}, {"P", "H"}):
            refuse_partial([a, b])
        return a if a.letter == "P" else b
    sharded = [(k.dim, of) for k, of in ((a, of_a), (b, of_b)) if k.letter == "S"]
    known = [(dim, of) for dim, of in sharded if dim is not None]
    left = [of[dim] for dim, of in known if dim in of]
    if len(known) < len(sharded) or 0 < len(left) < len(known):
        return VARIES
    return together([a, b]) if not sharded else together([piece(dim) for dim in left]) if left else op.partial


def _mm(op: Operation) -> Kind:
    added, at = (joined(op.kinds[0]), 1) if op.name in ("addmm", "baddbmm") else (ZERO, 0)
    batch = op.args[at].dim() - 2
    dims = {d: d for d in range(batch)}
    found = product(op, op.kinds[at], op.kinds[at + 1], {**dims, batch: batch}, {**dims, batch + 1: batch + 1})
    shift = op.outs[0].dim() - op.args[0].dim()
    return plus(_mapped(added, lambda d: d + shift), found, op.n) if at else found


def _reduced(op: Operation) -> set[int]:
    given, ndim = op.named.get("dim"), op.args[0].dim()
    return set(range(ndim)) if given is None or given == [] else {d % max(ndim, 1) for d in _dims(given)}


def _sum(op: Operation) -> Kind:
    kind, gone = op.kinds[0], _reduced(op)
    if kind.letter == "C":
        total = ZERO
        for _, part in kind.parts:
            total = plus(total, joined(part), op.n)
        kind = total
    if kind.letter == "S" and kind.dim in gone:
        if op.name == "mean":
            raise Refused(kind, _LOCAL_MEAN)
        return op.partial
    keep = bool(op.named.get("keepdim", False))
    return _mapped(replace(kind, whole=()), lambda d: None if d in gone else d if keep else d - sum(g < d for g in gone))


def _along(op: Operation) -> Kind | list[Kind]:
    """Functions of the elements along a dim that give one of them, as the largest, or as many, as softmax."""
    kinds = _flat(op.kinds)
    refuse_partial(kinds)
    kind, gone = joined(op.kinds[0]), _reduced(op)
    if kind.letter != "S":
        return [together(kinds)] * len(op.outs)
    if op.outs[0].dim() < op.args[0].dim() or op.named.get("keepdim"):
        keep = bool(op.named.get("keepdim", False))
        return [_mapped(kind, lambda d: None if d in gone else d if keep else d - sum(g < d for g in gone))] * len(op.outs)
    return [kind, replace(kind, local=kind.dim in (gone | {None}))][-len(op.outs) :] if "sort" in op.name or op.name == "topk" else kind


def _targets(op: Operation) -> list[Kind]:
    """The loss of targets, and its derivative."""
    kinds = _flat(op.kinds)
    if op.name.endswith("_backward") and kinds[0].letter == "P" and all(k.letter in "RH0" for k in kinds[1:]):
        return [kinds[0]]
    refuse_partial(kinds)
    kind = together([k for k in kinds if k.dim == 0] or kinds)
    if op.name.endswith("_backward") or kind.dim != 0 or not op.named["reduction"]:
        return [kind] * len(op.outs)
    if op.named["reduction"] == 1:
        raise Refused(kind, _LOCAL_MEAN)
    return [op.partial, op.partial]


# Rows picked and rows added -------------------------------------------------------------------------------------------------------


def picked(x: Kind, index: Kind, dim: int, more: int) -> Kind:
    """What an index picks of x along a dim; the index' dims take that dim's place, which makes ``more`` dims more."""
    x, index = joined(x), joined(index)
    refuse_partial([index, *([x] if index.letter == "S" else [])])
    if x.letter in "PM0":
        return x
    if index.dim is not None:
        return piece(dim + index.dim, x.local)
    if x.dim is not None and index.letter != "S":
        return piece(x.dim if x.dim <= dim else x.dim + more, x.local)
    return VARIES if "S" in (x.letter, index.letter) else together([x, index])


def _pick(op: Operation) -> Kind:
    x = joined(op.kinds[0])
    if op.name == "embedding":
        return VARIES if x.dim == 0 else picked(x, op.kinds[1], 0, op.args[1].dim() - 1)
    if op.name == "gather":
        index = joined(op.kinds[2])
        return picked(x, index, _at(op), 0) if x.letter in "PM0" or index.letter != "S" else together([x, index], x.local)
    if op.name == "index_select":
        return picked(x, op.kinds[2], _at(op), 0)
    given = [(at, k) for at, k in enumerate(op.kinds[1]) if k is not None]
    if len(given) == 1:
        return picked(x, given[0][1], given[0][0], op.outs[0].dim() - op.args[0].dim())
    refuse_partial(_flat(op.kinds))
    return VARIES if any(k.letter == "S" for k in _flat(op.kinds)) else WHOLE


def _scatter(op: Operation) -> Kind:
    """Rows added to, or put at, indices along a dim. Indices into a rank's own piece leave the sum in that piece."""
    target, index, source = (joined(op.kinds[at]) for at in (0, 2, 3))
    adds, dim = op.name in ("scatter_add", "index_add"), _at(op)
    at = None if index.dim is None else index.dim + (dim if op.name == "index_add" else 0)
    refuse_partial([index, *([source] if index.letter == "S" else [])])
    if source.letter in "PM":
        found = source
    elif index.letter == "S":
        if index.local or at is None:
            found = piece(None if at is None else dim, index.local and _integers(op))
        else:
            found = piece(at) if at != dim else op.partial if adds else VARIES
    else:
        found = op.partial if adds and source.dim == dim else together([index, source])
    return plus(target, found, op.n)


def _places(op: Operation) -> Kind:
    """Where something is in the first argument."""
    kind = joined(op.kinds[0])
    refuse_partial([kind])
    return piece(None if kind.dim is None else 0, True) if kind.letter == "S" else together([kind])


def _search(op: Operation) -> Kind:
    sought, among = (joined(op.kinds[at]) for at in ((1, 0) if op.name == "searchsorted" else (0, 1)))
    refuse_partial([sought, among])
    found = sought if sought.letter == "S" else VARIES if among.letter == "S" else together([sought, among])
    return replace(found, local=among.letter == "S")


# Numbers of the host, kernels ----------------------------------------------------------------------------------------------------


def _filled(op: Operation) -> Kind:
    given = op.named.get("fill_value", op.named.get("s", 1))
    return ZERO if isinstance(given, (int, float)) and not given else HOST


def _read(op: Operation) -> list[Kind]:
    refuse_partial(_flat(op.kinds))
    return []


def attention(op: Operation) -> list[Kind]:
    """Queries, keys and values, of which tokens or heads may be sharded; integers say which see which. Of a derivative that is
    one operation, the gradient comes first."""
    floats = [at for at, x in enumerate(op.args) if isinstance(x, Tensor) and x.is_floating_point()]
    kinds = [joined(op.kinds[at]) for at in floats]
    if op.name.endswith("backward") and kinds[0].letter == "P" and all(k.letter in "RH0" for k in kinds[1:]):
        return [kinds[0]] * len(op.outs)
    refuse_partial(kinds)
    found = together([k for k in kinds if k.letter == "S"] or _flat(op.kinds))
    return [VARIES if found.dim == op.args[floats[0]].dim() - 1 else found] * len(op.outs)


def _grouped(op: Operation) -> Kind:
    """Products of groups of rows. Where groups (experts) are sharded, which rows they have is not known."""
    a, b, offsets = (joined(k) for k in op.kinds)
    refuse_partial([offsets, *([a] if b.letter == "S" else [])])
    if op.name == "grouped_mm_cpu_dw":
        found = product(op, a, b, {1: 1}, {1: 2})
    elif b.dim == 0 and a.letter != "0":
        return VARIES
    else:
        found = product(op, a, b, {0: 0}, {2: 1} if op.name == "grouped_mm_cpu_dx" else {1: 1})
    return VARIES if offsets.letter == "S" and found.letter in "RH" else found


def _unknown(op: Operation) -> list[Kind]:
    refuse_partial(_flat(op.kinds), _NO_RULE)
    return [VARIES if any(k.letter == "S" for k in _flat(op.kinds)) else together(_flat(op.kinds))] * len(op.outs)


def _table(*rows: tuple[Rule, str]) -> dict[str, Rule]:
    return {name: rule for rule, names in rows for name in names.split()}


RULES: Mapping[str, Rule] = _table(
    (_same, "alias detach clone _to_copy lift_fresh_copy"),
    (_view, "view _unsafe_view reshape"),
    (_moved(_transposed), "t transpose"),
    (_moved(lambda op, dim: [d % op.args[0].dim() for d in op.named["dims"]].index(dim)), "permute"),
    (_moved(lambda op, dim: dim + op.outs[0].dim() - op.args[0].dim()), "expand"),
    (_moved(lambda op, dim: dim + (dim >= _at(op, of=1))), "unsqueeze select_backward"),
    (_moved(lambda op, dim: dim), "slice_backward"),
    (_moved(_squeezed), "squeeze"),
    (_pieces, "slice select split split_with_sizes unbind"),
    (_cat, "cat stack"),
    (_add(1.0), "add"),
    (_add(-1.0), "sub"),
    (lambda op: _scaled(joined(op.kinds[0]), -1.0), "neg"),
    (_mul, "mul"),
    (_div, "div"),
    (elements, "floor_divide"),
    (_where, "where masked_fill"),
    (lambda op: _aligned(op, 2)[1], "copy fill"),
    (_mm, "mm bmm addmm baddbmm"),
    (lambda op: product(op, op.kinds[0], op.kinds[1], {0: 0}, {}), "mv"),
    (lambda op: product(op, op.kinds[0], op.kinds[1], {}, {}), "dot"),
    (_sum, "sum mean"),
    (_along, "amax amin aminmax any all logsumexp linalg_vector_norm sort topk argsort argmax cumsum _softmax _log_softmax"),
    (_targets, "nll_loss_forward nll_loss_backward"),
    (_pick, "embedding index_select index gather"),
    (_scatter, "scatter scatter_add index_add"),
    (_places, "nonzero nonzero_static"),
    (_search, "searchsorted bucketize"),
    (lambda op: ZERO, "zeros empty new_zeros new_empty zeros_like empty_like zero"),
    (_filled, "arange full ones new_full new_ones full_like ones_like scalar_tensor lift_fresh"),
    (_read, "_local_scalar_dense"),
    (attention, "attention_cpu attention_cpu_backward"),
    (attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"),
    (_grouped, "grouped_mm_cpu grouped_mm_cpu_dx grouped_mm_cpu_dw"),
)
"""Rules by the operation's name, without overload; in place and out of place are one."""
