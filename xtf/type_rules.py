"""The rules by which types of values (`xtf.value_types`) go through operations, one mesh axis at a time.

Sharded dims follow views as factors: where a dim is split, its first factor is taken to be the sharded one; where dims are merged, what
they become is. A sum over a dim is partial if that dim is sharded, and only unknown where it is not known which dim is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from xtf.value_types import HOST, VARIES, WHOLE, ZERO, Kind, Operation, Refused, Rule, piece

_WHOLE_ONLY = "takes a value that is partial, and gives of a summand what does not sum up to that of the whole"
_MIXED = "takes a partial sum to which something whole was added: summed over the ranks, that would count n times"
_PLUS_PIECE = "adds a partial sum and a piece of another value"
_LOCAL_MEAN = "is over a dim of which each rank has a piece: means of pieces do not sum up to the mean; sum, and divide by a count of all ranks"


def rule_of(name: str, elementwise: bool, more: Mapping[str, Rule] | None = None) -> Rule:
    """The rule of an operation, by its full name, as ``"aten::mm"``; ``more`` go before those here."""
    if more and name in more:
        return more[name]
    short = name.partition("::")[2]
    if short in RULES and name.startswith(("aten::", "xtf::")):
        return RULES[short]
    if name.startswith("aten::") and "_backward" in short:
        return _backward
    return _function if elementwise and name.startswith("aten::") else _unknown


# Helpers ------------------------------------------------------------------------------------------------------------------------


def _flat(kinds: Any) -> list[Kind]:
    """Every kind in a tree of kinds, parts of a buffer as one."""
    if isinstance(kinds, Kind):
        return [_joined(kinds)]
    return [k for row in kinds for k in _flat(row)] if isinstance(kinds, (list, tuple)) else []  # pyright: ignore[reportUnknownVariableType]


def _joined(kind: Kind) -> Kind:
    """One kind for a buffer with parts of several."""
    if kind.letter != "C":
        return kind
    kinds = [k for _, k in kind.parts if k.letter != "0"]
    letters = {k.letter for k in kinds}
    partial = next((k for k in kinds if k.letter in "PM"), None)
    if partial is not None:
        return partial if letters == {partial.letter} else VARIES
    return _varying(kinds) if "S" in letters else WHOLE


def _varying(kinds: Sequence[Kind], local: bool = False) -> Kind:
    """S of what several S agree on."""
    dims = {k.dim for k in kinds if k.letter == "S" and k.dim is not None}
    return piece(dims.pop() if len(dims) == 1 else None, local)


def _plain(kinds: Sequence[Kind]) -> Kind:
    """Of what is not sharded."""
    letters = {k.letter for k in kinds}
    return WHOLE if "R" in letters else HOST


def refuse_partial(kinds: Sequence[Kind], why: str = _WHOLE_ONLY) -> None:
    """Refuse partial values among these."""
    for kind in kinds:
        if kind.letter in "PM":
            raise Refused(kind, _MIXED if kind.letter == "M" else why)


def _aligned(op: Operation, args: Sequence[int]) -> list[Kind]:
    """Kinds of arguments, with sharded dims counted as in the result: broadcasting aligns dims from the last."""
    ndim = op.outs[0].dim() if op.outs else 0
    found: list[Kind] = []
    for at in args:
        kind, value = op.kinds[at], op.args[at]
        for one in _flat(kind):
            shift = ndim - value.dim() if isinstance(value, Tensor) else 0
            found.append(piece(one.dim + shift, one.local) if one.letter == "S" and one.dim is not None else one)
    return found


def _every(op: Operation) -> list[Kind]:
    return _aligned(op, range(len(op.args)))


def _integers(op: Operation) -> bool:
    return bool(op.outs) and not op.outs[0].is_floating_point()


def _mapped(kind: Kind, dims: Callable[[int], int | None]) -> Kind:
    """A kind whose sharded dim becomes another; ``None`` where it is lost."""
    kind = _joined(kind)
    return piece(dims(kind.dim), kind.local) if kind.letter == "S" and kind.dim is not None else kind


# Element by element --------------------------------------------------------------------------------------------------------------


def _function(op: Operation) -> Kind:
    """Any function of elements."""
    kinds = _every(op)
    refuse_partial(kinds)
    if any(k.letter == "S" for k in kinds):
        return _varying(kinds, _integers(op) and any(k.local for k in kinds))
    return _plain(kinds)


def _scaled(kind: Kind, factor: object) -> Kind:
    if kind.whole and isinstance(factor, (int, float)):
        return replace(kind, whole=tuple((key, c * factor) for key, c in kind.whole))
    return replace(kind, whole=()) if kind.letter == "R" else kind


def _mul(op: Operation) -> Kind:
    kinds = _aligned(op, (0, 1))
    if any(k.letter == "0" for k in kinds):
        return ZERO
    partial = [k for k in kinds if k.letter in "PM"]
    if len(partial) == 1:
        other = kinds[1 - kinds.index(partial[0])]
        factor = op.args[1 - kinds.index(partial[0])]
        if other.letter in "RH" and (partial[0].letter == "P" or not isinstance(factor, Tensor)):
            return _scaled(partial[0], factor)
    if not partial and kinds[0].letter == "R" and not isinstance(op.args[1], Tensor):
        return _scaled(kinds[0], op.args[1])
    return _function(op)


def _div(op: Operation) -> Kind:
    kinds = _aligned(op, (0, 1))
    if op.named.get("rounding_mode") is None:
        if kinds[0].letter == "0":
            return ZERO
        number = not isinstance(op.args[1], Tensor)
        if kinds[0].letter == "P" and kinds[1].letter in "RH" or kinds[0].letter in "RM" and number:
            return _scaled(kinds[0], 1 / op.args[1] if number else None)
    return _function(op)


def plus(a: Kind, b: Kind, n: int) -> Kind:
    """The kind of a sum over an axis of n ranks."""
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
        made = a.made or b.made
        return Kind("M", made=made, whole=left) if left or "H" in letters else Kind("P", made=made)
    if "S" in letters:
        return _varying([a, b], a.local or b.local)
    if letters == {"R"} and len(a.whole) == 1 and len(b.whole) == 1 and a.whole[0][0] == b.whole[0][0]:
        return replace(a, whole=((a.whole[0][0], a.whole[0][1] + b.whole[0][1]),))
    return _plain([a, b])


def _add(sign: float) -> Rule:
    def rule(op: Operation) -> Kind:
        a, b = _aligned(op, (0, 1))
        return plus(a, _scaled(b, sign * op.named.get("alpha", 1)), op.n)

    return rule


def _where(op: Operation) -> Kind:
    mask, a, b = _aligned(op, (0, 1, 2))
    if "P" in (a.letter, b.letter) and {a.letter, b.letter} <= set("P0") and mask.letter in "RH0":
        return a if a.letter == "P" else b
    return _function(op)


def _masked_fill(op: Operation) -> Kind:
    x, mask, value = _aligned(op, (0, 1, 2))
    return x if x.letter == "P" and mask.letter in "RH0" and value.letter == "0" else _function(op)


def _backward(op: Operation) -> Kind:
    """Of a derivative: linear in its first argument."""
    kinds = _every(op)
    if kinds[0].letter == "P" and all(k.letter in "RH0" for k in kinds[1:]):
        return kinds[0]
    return _function(op)


# The same values, elsewhere ------------------------------------------------------------------------------------------------------


def _same(op: Operation) -> Kind:
    """Copies and casts; to integers or truth values they are functions."""
    if op.outs and op.args[0].is_floating_point() and not op.outs[0].is_floating_point():
        return _function(op)
    return op.kinds[0]


def _negative(op: Operation) -> Kind:
    return _scaled(_joined(op.kinds[0]), -1.0)


def _copy(op: Operation) -> Kind:
    source = _aligned(op, (1,))[0]
    return source


def _view(op: Operation) -> Kind:
    kind = op.kinds[0]
    if kind.letter == "C" and op.outs[0].shape == op.args[0].shape:
        return kind
    return _mapped(kind, lambda dim: regrouped(tuple(op.args[0].shape), tuple(op.outs[0].shape), dim))


def regrouped(old: Sequence[int], new: Sequence[int], dim: int) -> int | None:
    """The dim of a view in which the first factor of a dim is; ``None`` where dims of size 1 leave it open.

    Example:
        >>> regrouped((6, 4), (6, 2, 2), 1), regrouped((6, 2, 2), (12, 2), 1), regrouped((6, 1, 4), (6, 4), 1)
        (1, 0, 1)
        >>> regrouped((6, 4), (6, 1, 4), 1) is None
        True
    """
    if tuple(old) == tuple(new):
        return dim
    if 0 in old:
        return None
    before = math.prod(old[:dim])
    same, there = ([at for at in range(len(shape)) if math.prod(shape[:at]) == before] for shape in (old, new))
    if not there:  # merged with what is before it
        return max((at for at in range(len(new)) if math.prod(new[:at]) < before), default=None)
    if len(same) == len(there):
        return there[same.index(dim)]
    return there[0] if len(there) == 1 and dim == same[0] else None


def _transpose(op: Operation) -> Kind:
    ndim = op.args[0].dim()
    a, b = (0, 1) if op.name in ("t", "numpy_T") else (op.named["dim0"] % max(ndim, 1), op.named["dim1"] % max(ndim, 1))
    return _mapped(op.kinds[0], lambda dim: {a: b, b: a}.get(dim, dim))


def _permute(op: Operation) -> Kind:
    dims = [d % op.args[0].dim() for d in op.named["dims"]]
    return _mapped(op.kinds[0], dims.index)


def _expand(op: Operation) -> Kind:
    shift = op.outs[0].dim() - op.args[0].dim()
    return _mapped(op.kinds[0], lambda dim: dim + shift)


def _unsqueeze(op: Operation) -> Kind:
    at = op.named["dim"] % op.outs[0].dim()
    return _mapped(op.kinds[0], lambda dim: dim + (dim >= at))


def _squeeze(op: Operation) -> Kind:
    shape, given = op.args[0].shape, op.named.get("dim")
    some = range(len(shape)) if given is None else given if isinstance(given, (list, tuple)) else [given]
    gone = {d % max(len(shape), 1) for d in some if shape and shape[d] == 1}  # pyright: ignore[reportUnknownVariableType]
    return _mapped(op.kinds[0], lambda dim: None if dim in gone else dim - sum(g < dim for g in gone))


def _window(kind: Kind, dim: int, start: int, stop: int, drop: bool = False) -> Kind:
    """The kind of a range along a dim."""
    if kind.letter == "C" and kind.dim == dim:
        at, parts = 0, list[tuple[int, Kind]]()
        for size, part in kind.parts:
            width = min(stop, at + size) - max(start, at)
            parts += [(width, part)] if width > 0 else []
            at += size
        kind = side_by_side(dim, parts)
    kind = replace(kind, whole=()) if kind.letter == "R" else kind
    if not drop:
        return kind
    return _mapped(kind, lambda d: None if d == dim else d - (d > dim))


def side_by_side(dim: int, parts: Sequence[tuple[int, Kind]]) -> Kind:
    """The kind of tensors laid end to end."""
    kinds = [k for size, k in parts if size and k.letter != "0"]
    letters = {k.letter for k in kinds}
    if not kinds:
        return ZERO
    if letters <= set("RH"):
        return replace(_plain(kinds), whole=())
    if letters == {"S"}:
        return _varying(kinds, all(k.local for k in kinds))
    return kinds[0] if letters == {"P"} else Kind("C", dim, parts=tuple(parts))


def _slice(op: Operation) -> Kind:
    x, dim, size = op.args[0], op.named["dim"] % op.args[0].dim(), op.outs[0].shape[op.named["dim"]]
    start = op.named.get("start") or 0
    start = min(max(start + x.shape[dim] if start < 0 else start, 0), x.shape[dim])
    return _window(op.kinds[0], dim, start, start + size * (op.named.get("step") or 1))


def _select(op: Operation) -> Kind:
    dim = op.named["dim"] % op.args[0].dim()
    at = op.named["index"] % op.args[0].shape[dim]
    return _window(op.kinds[0], dim, at, at + 1, drop=True)


def _split(op: Operation) -> list[Kind]:
    dim, found, at = op.named["dim"] % op.args[0].dim(), list[Kind](), 0
    for out in op.outs:
        size = 1 if op.name == "unbind" else out.shape[dim]
        found.append(_window(op.kinds[0], dim, at, at + size, drop=op.name == "unbind"))
        at += size
    return found


def _cat(op: Operation) -> Kind:
    dim = op.named["dim"] % max(op.outs[0].dim(), 1)
    kinds: list[Kind] = op.kinds[0]
    if op.name == "stack":
        parts = [(1, _mapped(k, lambda d: d + (d >= dim))) for k in kinds]
    else:
        parts = [(x.shape[dim], k) for x, k in zip(op.args[0], kinds, strict=True) if x.shape != (0,)]
        parts = [inner for size, k in parts for inner in (k.parts if k.letter == "C" and k.dim == dim else ((size, _joined(k)),))]
    return side_by_side(dim, parts)


def _undo_select(op: Operation) -> Kind:
    """The gradient of a range: put into zeros."""
    dim = op.named["dim"] % max(op.outs[0].dim(), 1)
    kind = _joined(op.kinds[0])
    return _mapped(kind, lambda d: d + (d >= dim)) if op.name == "select_backward" else kind


# Products and sums ---------------------------------------------------------------------------------------------------------------


def product(op: Operation, a: Kind, b: Kind, of_a: Mapping[int, int], of_b: Mapping[int, int]) -> Kind:
    """The kind of a product that is summed over those dims of a and b that ``of_a`` and ``of_b`` (dim: dim of the result) leave out."""
    a, b = _joined(a), _joined(b)
    if "0" in (a.letter, b.letter):
        return ZERO
    if a.letter in "PM" or b.letter in "PM":
        if (a.letter == "P" and b.letter in "RH") or (b.letter == "P" and a.letter in "RH"):
            return a if a.letter == "P" else b
        refuse_partial([a, b])
    sharded = [(k, of) for k, of in ((a, of_a), (b, of_b)) if k.letter == "S"]
    if not sharded:
        return _plain([a, b])
    if any(k.dim is None for k, _ in sharded):
        return VARIES
    summed = [k.dim not in of for k, of in sharded]
    if all(summed):
        return op.partial
    return VARIES if any(summed) else _varying([piece(of[k.dim]) for k, of in sharded if k.dim is not None])


def _mm(op: Operation) -> Kind:
    added, (a, b) = (op.kinds[0], (1, 2)) if op.name in ("addmm", "baddbmm") else (ZERO, (0, 1))
    if op.args[a].dim() == 3:
        found = product(op, op.kinds[a], op.kinds[b], {0: 0, 1: 1}, {0: 0, 2: 2})
    else:
        found = product(op, op.kinds[a], op.kinds[b], {0: 0}, {1: 1})
    if added.letter == "0":
        return found
    shift = op.outs[0].dim() - op.args[0].dim()
    return plus(_mapped(added, lambda d: d + shift), found, op.n)


def _mv(op: Operation) -> Kind:
    return product(op, op.kinds[0], op.kinds[1], {0: 0} if op.name == "mv" else {}, {})


def _reduced(op: Operation) -> set[int]:
    ndim, given = op.args[0].dim(), op.named.get("dim")
    if given is None or given == []:
        return set(range(ndim))
    return {d % max(ndim, 1) for d in (given if isinstance(given, (list, tuple)) else [given])}  # pyright: ignore[reportUnknownVariableType]


def _shifted(op: Operation, kind: Kind, gone: set[int]) -> Kind:
    keep = bool(op.named.get("keepdim", False))
    return _mapped(kind, lambda d: None if d in gone else d if keep else d - sum(g < d for g in gone))


def _sum(op: Operation) -> Kind:
    kind, gone = op.kinds[0], _reduced(op)
    if kind.letter == "C":
        total = ZERO
        for _, part in kind.parts:
            total = plus(total, _joined(part), op.n)
        kind = total
    if kind.letter == "S" and kind.dim in gone:
        return op.partial
    return replace(kind, whole=()) if kind.letter == "R" else _shifted(op, kind, gone)


def _mean(op: Operation) -> Kind:
    kind, gone = _joined(op.kinds[0]), _reduced(op)
    if kind.letter == "S" and kind.dim in gone:
        raise Refused(kind, _LOCAL_MEAN)
    return _sum(op)


def _over_dim(op: Operation) -> list[Kind]:
    """Functions of the elements along a dim: largest, any, norm, softmax, sort."""
    kinds = _flat(op.kinds)
    refuse_partial(kinds)
    kind, gone = _joined(op.kinds[0]), _reduced(op)
    if op.name in ("sort", "topk", "cumsum", "argsort", "_softmax", "_log_softmax") or kind.letter != "S":
        if kind.letter != "S":
            kind = VARIES if any(k.letter == "S" for k in kinds) else _plain(kinds)
        places = replace(kind, local=True) if kind.letter == "S" and kind.dim in (gone | {None}) else kind
        return [kind, places][-len(op.outs) :] if op.name in ("sort", "topk", "argsort") else [kind] * len(op.outs)
    return [_shifted(op, kind, gone)] * len(op.outs)


def _nll(op: Operation) -> list[Kind]:
    kinds = _flat(op.kinds)
    refuse_partial(kinds)
    kind = _varying([k for k in kinds if k.dim == 0] or kinds) if any(k.letter == "S" for k in kinds) else _plain(kinds)
    if kind.letter == "S" and op.named["reduction"] == 1:
        raise Refused(kind, _LOCAL_MEAN)
    return [op.partial if kind.dim == 0 and op.named["reduction"] else kind, VARIES if kind.letter == "S" else kind]


def _nll_backward(op: Operation) -> Kind:
    kinds = _flat(op.kinds)
    if kinds[0].letter == "P" and all(k.letter in "RH0" for k in kinds[1:]):
        return kinds[0]
    refuse_partial(kinds)
    return _varying([k for k in kinds if k.dim == 0] or kinds) if any(k.letter == "S" for k in kinds) else _plain(kinds)


# Rows picked and rows added -------------------------------------------------------------------------------------------------------


def _picked(x: Kind, index: Kind, dim: int, width: int) -> Kind:
    """What an index picks of x along a dim; the index' dims take that dim's place, which makes ``width`` more."""
    x, index = _joined(x), _joined(index)
    refuse_partial([index])
    if x.letter in "PM":
        if index.letter == "S":
            refuse_partial([x])
        return x
    if x.letter == "0":
        return ZERO
    if index.letter == "S" and index.dim is not None:
        return piece(dim + index.dim, x.local)
    if x.letter == "S" and x.dim is not None and index.letter != "S":
        return piece(x.dim if x.dim <= dim else x.dim + width, x.local)
    return VARIES if "S" in (x.letter, index.letter) else _plain([x, index])


def _embedding(op: Operation) -> Kind:
    weight = _joined(op.kinds[0])
    if weight.letter == "S" and weight.dim == 0:
        return VARIES  # of another rank's rows it has nothing
    return _picked(weight, op.kinds[1], 0, op.args[1].dim() - 1)


def _index_select(op: Operation) -> Kind:
    return _picked(op.kinds[0], op.kinds[2], op.args[1] % op.args[0].dim(), 0)


def _index(op: Operation) -> Kind:
    given = [(at, k, x) for at, (k, x) in enumerate(zip(op.kinds[1], op.args[1], strict=True)) if k is not None]
    if len(given) == 1:
        at, kind, x = given[0]
        return _picked(op.kinds[0], kind, at, op.outs[0].dim() - op.args[0].dim()) if x.dim() else VARIES
    kinds = _flat(op.kinds)
    refuse_partial(kinds)
    return VARIES if any(k.letter == "S" for k in kinds) else _plain(kinds)


def _gather(op: Operation) -> Kind:
    x, index = _joined(op.kinds[0]), _joined(op.kinds[2])
    if x.letter in "PM0" or index.letter != "S":
        return _picked(x, index, op.args[1], 0)
    return _varying([x, index], x.local)


def _scatter(op: Operation) -> Kind:
    """Rows added to, or put at, indices along a dim."""
    target, index, source = (_joined(op.kinds[at]) for at in (0, 2, 3))
    adds = op.name in ("scatter_add", "index_add")
    dim = op.args[1] % max(op.args[0].dim(), 1)
    along = dim if op.name == "index_add" else 0  # where an index' own dims begin
    refuse_partial([index])
    if source.letter in "PM":
        if index.letter == "S":
            refuse_partial([source])
        found = source
    elif index.letter == "S":
        at = None if index.dim is None else index.dim + along
        if index.local:
            found = piece(None if at is None else dim, _integers(op))
        else:
            found = VARIES if at is None or (at == dim and not adds) else op.partial if at == dim else piece(at)
    elif source.letter == "S":
        found = op.partial if adds and source.dim == dim else source
    else:
        found = _plain([index, source])
    if target.letter == "0":
        return found
    if target.letter in "PM" or found.letter in "PM":
        return plus(target, found, op.n)
    return _varying([target, found]) if "S" in (target.letter, found.letter) else _plain([target, found])


def _places(op: Operation) -> Kind:
    """Where something is in the first argument."""
    kind = _joined(op.kinds[0])
    refuse_partial(_flat(op.kinds))
    return piece(0 if kind.dim is not None else None, True) if kind.letter == "S" else _plain([kind])


def _search(op: Operation) -> Kind:
    values, rows = (1, 0) if op.name == "searchsorted" else (0, 1)
    sought, among = _joined(op.kinds[values]), _joined(op.kinds[rows])
    refuse_partial([sought, among])
    found = sought if sought.letter == "S" else VARIES if among.letter == "S" else _plain([sought, among])
    return replace(found, local=found.letter == "S" and among.letter == "S")


# What the host makes, what it reads ----------------------------------------------------------------------------------------------


def _zeros(op: Operation) -> Kind:
    return ZERO


def _made(op: Operation) -> Kind:
    given = op.named.get("fill_value", op.named.get("s", op.named.get("value", 1)))
    return ZERO if isinstance(given, (int, float)) and not given else HOST


def _fill(op: Operation) -> Kind:
    return _joined(op.kinds[1])


def _read(op: Operation) -> list[Kind]:
    refuse_partial(_flat(op.kinds))
    return []


# Kernels -------------------------------------------------------------------------------------------------------------------------


def attention(op: Operation) -> list[Kind]:
    """Queries, keys and values: tokens or heads may be sharded. Of a backward, the gradient comes first."""
    tensors = [at for at, x in enumerate(op.args) if isinstance(x, Tensor) and x.is_floating_point()]
    kinds = [_joined(op.kinds[at]) for at in tensors]
    partial = kinds[0].letter == "P" and op.name.endswith("backward") and all(k.letter in "RH0" for k in kinds[1:])
    if partial:
        return [kinds[0]] * len(op.outs)
    refuse_partial(kinds)
    last = op.args[tensors[0]].dim() - 1
    found = _varying(kinds) if any(k.letter == "S" for k in kinds) else None
    if found is None:
        found = VARIES if any(k.letter == "S" for k in _flat(op.kinds)) else _plain(kinds)
    return [piece(None) if found.letter == "S" and found.dim == last else found] * len(op.outs)


def _grouped(op: Operation) -> Kind:
    """Products of groups of rows. Where groups (experts) are sharded, rows are of no known place."""
    a, b, offsets = (_joined(k) for k in op.kinds)
    refuse_partial([offsets])
    if op.name == "grouped_mm_cpu_dw":
        found = product(op, a, b, {1: 1}, {1: 2})
        return VARIES if offsets.letter == "S" and found.letter not in "PS0" else found
    if b.letter == "S" and b.dim == 0 and a.letter != "0":
        refuse_partial([a])
        return VARIES
    found = product(op, a, b, {0: 0}, {1: 1} if op.name == "grouped_mm_cpu" else {2: 1})
    return VARIES if offsets.letter == "S" and found.letter not in "PS0" else found


def _unknown(op: Operation) -> list[Kind]:
    kinds = _flat(op.kinds)
    refuse_partial(kinds, "takes a value that is partial, and has no rule: if it is linear, give it one (check_types(rules=...))")
    found = VARIES if any(k.letter == "S" for k in kinds) else _plain(kinds)
    return [found] * len(op.outs)


def _table(*rows: tuple[Rule, str]) -> dict[str, Rule]:
    return {name: rule for rule, names in rows for name in names.split()}


RULES: Mapping[str, Rule] = _table(
    (_same, "alias detach clone _to_copy contiguous lift lift_fresh_copy view_as_real"),
    (_negative, "neg"),
    (_copy, "copy"),
    (_view, "view _unsafe_view reshape"),
    (_transpose, "t transpose"),
    (_permute, "permute"),
    (_expand, "expand"),
    (_unsqueeze, "unsqueeze"),
    (_squeeze, "squeeze"),
    (_slice, "slice"),
    (_select, "select"),
    (_split, "split split_with_sizes unbind"),
    (_cat, "cat stack"),
    (_undo_select, "select_backward slice_backward"),
    (_add(1.0), "add"),
    (_add(-1.0), "sub"),
    (_mul, "mul"),
    (_div, "div"),
    (_function, "floor_divide"),
    (_where, "where"),
    (_masked_fill, "masked_fill"),
    (_mm, "mm bmm addmm baddbmm"),
    (_mv, "mv dot"),
    (_sum, "sum"),
    (_mean, "mean"),
    (_over_dim, "amax amin aminmax any all logsumexp linalg_vector_norm sort topk argsort argmax cumsum _softmax _log_softmax"),
    (_nll, "nll_loss_forward"),
    (_nll_backward, "nll_loss_backward"),
    (_embedding, "embedding"),
    (_index_select, "index_select"),
    (_index, "index"),
    (_gather, "gather"),
    (_scatter, "scatter scatter_add index_add"),
    (_places, "nonzero nonzero_static"),
    (_search, "searchsorted bucketize"),
    (_zeros, "zeros empty new_zeros new_empty zeros_like empty_like zero"),
    (_made, "arange full ones new_full new_ones full_like ones_like scalar_tensor lift_fresh eye"),
    (_fill, "fill"),
    (_read, "_local_scalar_dense"),
    (
        attention,
        "attention_cpu attention_cpu_backward _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    (_grouped, "grouped_mm_cpu grouped_mm_cpu_dx grouped_mm_cpu_dw"),
)
"""Rules by the operation's name, without overload; in place and out of place are one."""
