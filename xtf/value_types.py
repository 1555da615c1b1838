"""Types of values over mesh axes: whether what a rank holds is the whole value, a piece of it, or a summand.

Over each mesh axis a tensor of a rank is one of

=====  ==================================================================================================================
``R``  replicated: the same on all ranks of the axis
``S``  sharded: this rank's piece, along a dim where that is known; or otherwise different from rank to rank
``P``  partial: a summand; what is meant is the sum over the ranks
=====  ==================================================================================================================

and, on the way, ``0`` (zeros, which are any of the three), ``H`` (made of numbers of the host, whole unless ranks turn out to differ),
``M`` (a partial sum plus something whole, an error unless the whole part comes to 1/n) and ``C`` (kinds side by side in one
buffer). `Typing` watches every operation of a rank and derives the types of results:

==================================================  ========================================================================
operation                                           result
==================================================  ========================================================================
views, casts, copies                                that of the input; the sharded dim follows the dims
P + P, P × R, P ÷ R, sums of P, backward of R at P  P
P + R                                               M; P when the whole part has the factor 1/n (``x/n + part``)
P + S, P × P, P × S, 1 ÷ P, any function of P       **refused: a partial value is used as whole**
function of S (and R)                               S
product or sum over a dim that is S                 P, where both factors are S along it, or one is
mean over a dim that is S                           refused: the mean of a piece is no summand of the mean
rows added at indices that are S (embedding, count) P; where the indices are places in the rank's own piece, S
all_reduce (sum)                                    P or S gives R; R is refused: n times too much
all_reduce (max), broadcast                         R
reduce_scatter                                      P or S gives S; R is refused
all_gather                                          S gives R
all_to_all, permute                                 S
any collective but the sums                         of P is refused
an operation without a rule                         R of R, S of S; of P it is refused
==================================================  ========================================================================

Not followed: numbers on the host, as a rank's index (what they make different is seen between stages, where the values of ranks are
compared); and that the gradient of a plain sum, one number for all tokens, is of as many tokens as a rank has (it counts as R until it
meets a piece).

The idea is that of the types of JAX's ``shard_map`` (``check_vma``: values that vary over manual axes), of the placements of torch's
DTensor (Replicate, Shard, Partial), and of ``spmd_types`` for PyTorch, which follows such types through operations and collectives; here
without a type in any signature. `xtf.type_rules` has the rules of operations, `xtf.check_types` runs a step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode  # pyright: ignore[reportPrivateUsage]
from torch.utils.weak import WeakIdKeyDictionary

_P = ParamSpec("_P")
_T = TypeVar("_T")

Letter = Literal["0", "H", "R", "S", "P", "M", "C"]


@dataclass(frozen=True)
class Kind:
    """The type of a tensor over one mesh axis.

    Args:
        letter: see `xtf.value_types`.
        dim: of S, the dim along which ranks hold pieces, ``None`` where it is not known; of C, the dim along which parts lie.
        local: of S, whether these are places in the rank's own piece (what sorting it gives, say).
        made: of P, what made it.
        whole: of R and M, what it is a multiple of, and the factors.
        parts: of C, size and kind of each part.
    """

    letter: Letter
    dim: int | None = None
    local: bool = False
    made: str = ""
    whole: tuple[tuple[int, float], ...] = ()
    parts: tuple[tuple[int, Kind], ...] = ()

    def __str__(self) -> str:
        names = {"0": "zero", "H": "replicated", "R": "replicated", "P": "partial", "M": "a partial sum plus a whole value", "C": "mixed"}
        return names.get(self.letter) or ("sharded" if self.dim is None else f"sharded along dim {self.dim}")


ZERO, HOST, WHOLE, VARIES = Kind("0"), Kind("H"), Kind("R"), Kind("S")
"""What has no values, what the host made, what is replicated, and what differs in no known way."""


def piece(dim: int | None, local: bool = False) -> Kind:
    """Sharded along ``dim``."""
    return Kind("S", dim, local)


class ValueTypeError(AssertionError):
    """A value is used as what it is not. The message names the stage, the value, the axis, and what made the value so."""


class Refused(Exception):
    """What a rule raises: the kind that does not fit, and why."""

    def __init__(self, kind: Kind, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


@dataclass(frozen=True)
class Operation:
    """One operation over one axis, as a rule sees it.

    Args:
        name: without namespace, overload and the sign of being in place, as in ``"add"``.
        args: all arguments in the order of its schema, with their defaults.
        kinds: of each argument: a `Kind` for tensors and numbers, a list of them for lists of tensors, else ``None``.
        outs: the tensors it gave.
        n: the size of the axis.
        made: how a P that it makes says where it comes from.
        named: the arguments by name.
    """

    name: str
    args: Sequence[Any]
    kinds: Sequence[Any]
    outs: Sequence[Tensor]
    n: int
    made: str
    named: Mapping[str, Any]

    @property
    def partial(self) -> Kind:
        """A summand that this operation makes."""
        return Kind("P", made=self.made)


Rule = Callable[[Operation], "Kind | Sequence[Kind]"]
"""The kind of what an operation gives, or of each tensor that it gives. Raises `Refused`."""


@dataclass
class _Entry:
    kinds: dict[str, Kind]
    at: int  # when it was set, in writes
    said: str = ""  # name and writer, of what passes between stages


@dataclass
class _Written:
    """What was written into a storage in place."""

    ref: StorageWeakRef
    kinds: dict[str, Kind]
    ndim: int
    at: int


@dataclass
class Place:
    """Where a rank is: a stage, what it is doing, and the named tensors that it was given."""

    stage: str
    doing: str
    given: list[tuple[str, Tensor]] = field(default_factory=list[tuple[str, Tensor]])

    def __str__(self) -> str:
        return f"{self.stage} ({self.doing})" if self.doing else self.stage


class Typing(TorchDispatchMode):
    """Holds the types of one rank's tensors, beside them, and follows every operation while it is entered.

    Args:
        axes: the mesh axes of more than one rank, and their sizes.
        rule: finds the rule of an operation, by its full name (``"aten::add"``) and whether it works element by element.
    """

    def __init__(self, axes: Mapping[str, int], rule: Callable[[str, bool], Rule]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.axes = dict(axes)
        self.place = Place("the step", "between its stages")
        self._rule = rule
        self._entries: Any = WeakIdKeyDictionary()
        self._written: dict[int, _Written] = {}
        self._paused = 0
        self._clock = itertools.count(1)
        self._keys = itertools.count(1)

    # What is known ---------------------------------------------------------------------------------------------------------------

    def kind(self, x: Tensor, axis: str) -> Kind:
        """The type of a tensor over an axis; what was never seen comes from the host."""
        entry: _Entry | None = self._entries.get(x)
        kind, at = (entry.kinds.get(axis, HOST), entry.at) if entry is not None else (HOST, 0)
        written = self._written.get(x.untyped_storage()._cdata)  # pyright: ignore[reportPrivateUsage]
        if written is not None and written.at > at and not written.ref.expired():
            return _overwritten(kind, written.kinds[axis], written.ndim == x.dim())
        return kind

    def set(self, x: Tensor, kinds: Mapping[str, Kind], said: str = "") -> None:
        """Say what a tensor is."""
        given = {axis: kinds.get(axis, HOST) for axis in self.axes}
        named = {a: replace(k, whole=((next(self._keys), 1.0),)) if k.letter == "R" and not k.whole else k for a, k in given.items()}
        self._entries[x] = _Entry(named, next(self._clock), said)

    def name(self, x: Tensor, said: str) -> None:
        """Name a tensor and its writer, for messages."""
        self.set(x, {axis: self.kind(x, axis) for axis in self.axes}, said)

    def said(self, x: Tensor) -> str:
        """The name that a tensor was given, if any."""
        entry: _Entry | None = self._entries.get(x)
        return entry.said if entry is not None else ""

    @contextmanager
    def paused(self) -> Generator[None]:
        """Operations in it are not followed."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def at(self, stage: str, doing: str, given: Sequence[tuple[str, Any]] = ()) -> Generator[None]:
        """Operations in it are of this stage."""
        before = self.place
        self.place = Place(stage, doing, [(name, x) for name, x in given if isinstance(x, Tensor)])
        try:
            yield
        finally:
            self.place = before

    # Operations ------------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or not self.axes:
            return func(*args, **kwargs)
        schema = func._schema
        space, _, called = schema.name.partition("::")
        inplace, arguments = called.endswith("_") and not called.endswith("__"), schema.arguments
        bound = [args[i] if i < len(args) else kwargs.get(a.name, a.default_value) for i, a in enumerate(arguments)]
        named = {a.name: value for a, value in zip(arguments, bound, strict=True)}
        rule = self._rule(f"{space}::{called.removesuffix('_') if inplace else called}", torch.Tag.pointwise in func.tags)
        target: list[Tensor] = [bound[0]] if inplace else [t for a, t in zip(arguments, bound, strict=True) if a.is_out and t is not None]
        name = called.removesuffix("_") if inplace else called
        return self.follow(lambda: func(*args, **kwargs), rule, name, bound, named, target)

    def follow(
        self, run: Callable[[], Any], rule: Rule, name: str, args: Sequence[Any], named: Mapping[str, Any], target: Sequence[Tensor] = ()
    ) -> Any:
        """Run an operation whose result, or what it changes in place, has the types that its rule says."""
        kinds = {axis: [self._of(value, axis) for value in args] for axis in self.axes}
        self._paused += 1
        try:
            out = run()
        finally:
            self._paused -= 1
        outs = target or _tensors(out)
        found: list[dict[str, Kind]] = [{} for _ in outs]
        for axis, n in self.axes.items():
            try:
                given = rule(Operation(name, args, kinds[axis], outs, n, f"{name} in {self.place}", named))
            except Refused as refused:
                raise self.error(refused.why, axis, refused.kind, name) from None
            for at, row in enumerate(found):
                row[axis] = given if isinstance(given, Kind) else given[at]
        for x, row in zip(outs, found, strict=True):
            if target:
                self._write(x, row)
            self.set(x, row)
        return out

    def _of(self, value: Any, axis: str) -> Any:
        if isinstance(value, Tensor):
            return self.kind(value, axis)
        if isinstance(value, (bool, int, float, complex)):
            return HOST if value else ZERO
        if isinstance(value, (list, tuple)):
            return [self._of(v, axis) for v in value]  # pyright: ignore[reportUnknownVariableType]
        return None

    def _write(self, x: Tensor, kinds: dict[str, Kind]) -> None:
        """Other tensors with this storage see what was written."""
        storage = x.untyped_storage()
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]
        before = self._written.get(key)
        if before is not None and not before.ref.expired():
            kinds = {axis: _overwritten(before.kinds[axis], kind, before.ndim == x.dim()) for axis, kind in kinds.items()}
        self._written[key] = _Written(StorageWeakRef(storage), kinds, x.dim(), next(self._clock))
        if len(self._written) > 10_000:
            self._written = {key: w for key, w in self._written.items() if not w.ref.expired()}

    # Messages --------------------------------------------------------------------------------------------------------------------

    def error(self, why: str, axis: str, kind: Kind, operation: str) -> ValueTypeError:
        """The error of an operation in the present place."""
        over = f"{axis}={self.axes[axis]}"
        lines = [f"{self.place}: {operation} {why} (over {over})"]
        for name, x in self.place.given:
            of = self.kind(x, axis)
            if of.letter in "PM":
                by = f", {self.said(x)}" if self.said(x) else ""
                lines.append(f"{name} is {of} over {over}{by}")
        if kind.made:
            lines.append(f"the partial sum was made by {kind.made}")
        if kind.letter in "PM":
            lines.append(f"sum it over {over} first, with start_all_reduce or start_reduce_scatter; between stages, in an Exchange")
        return ValueTypeError("\n  ".join(lines))


def followed_by(rule: Rule, changes: int = 0) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Declares a function's types: where types are followed they are what ``rule`` says, whatever operations it runs inside. For what no
    rule of an operation can tell, as that a sum over some keys is whole because other ranks sum over the others.

    Args:
        rule: of the function as one operation, with its positional arguments.
        changes: how many of its first arguments are what it gives, changed in place; 0 for what it returns.
    """

    def declare(fn: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(fn)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            typing = _get_current_dispatch_mode()
            if not isinstance(typing, Typing):
                return fn(*args, **kwargs)
            target = [x for x in args[:changes] if isinstance(x, Tensor)]
            return typing.follow(lambda: fn(*args, **kwargs), rule, fn.__name__, args, kwargs, target)

        return run

    return declare


def _overwritten(had: Kind, new: Kind, same_dims: bool) -> Kind:
    """The kind of a tensor into a part of which something was written."""
    new = new if same_dims or new.letter != "S" else replace(new, dim=None)
    if had.letter == "0":
        return new
    if new.letter == "0" or (had.letter, had.dim) == (new.letter, new.dim):
        return had
    if {had.letter, new.letter} <= set("HR"):
        return WHOLE
    if had.letter == "S" and new.letter == "S":
        return piece(had.dim if new.dim is None else new.dim if had.dim is None else None)
    partial = next((k for k in (had, new) if k.letter in "PM"), None)
    if partial is not None and {had.letter, new.letter} & set("HR"):
        return replace(partial, letter="M")
    return VARIES


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []  # pyright: ignore[reportUnknownVariableType]
