"""Stages: the pieces a training step is made of, and the transfers declared on them.

A *program* is a sequence of stages over named values. A stage reads some values, writes others and may read constants (what a
batch brings: ids, positions, targets). Names are variables, not single assignments: every block of a transformer reads
``"x"`` and writes ``"x"``. The engine (`xtf.walk`) runs the sequence forward, then backward; a value's gradient has the
value's name.

Three kinds of thing may be declared, and only the walk orders them:

* a `Stage` computes. It is written as a pure function ``fn`` and becomes a `Pair` (forward, backward) by a rule: `recompute`
  keeps only what the stage read, and a pair may be written by hand.
* an `Exchange` moves values between stages (an all-to-all, say): a `Transfer` forward and its transpose backward.
* a stage's `gather`, `reduce`, `store` and `fetch` are `Transfer`s of its parameters, its gradients and its residual.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xtf.tree import Path

Params = Mapping[str, Tensor]
"""The parameters of one stage, by the stage's own names for them."""

Values = tuple[Tensor, ...]
"""Values in the order in which a stage reads or writes them."""

StageFn = Callable[..., Values]
"""``fn(params, *reads, **consts) -> writes``: pure, runs under ``torch.func.vjp`` and ``torch.compile(fullgraph=True)``."""

Lower = Callable[[Callable[..., Any], Hashable], Callable[..., Any]]
"""``lower(fn, key) -> fn``: turns a pure function into what runs (see `xtf.compile`). Equal keys mean equal functions."""


class Rows(NamedTuple):
    """A key for `Lower` that says: dim 0 of every tensor argument outside mappings of parameters is a number of rows that differs
    from call to call, so what is compiled for one number must serve all."""

    key: Hashable


def half(key: Hashable, name: Hashable) -> Hashable:
    """The key of one of the functions that a stage's function becomes; of rows, if the stage's is.

    Example:
        >>> half("mlp", "forward"), half(Rows("mlp"), "forward")
        (('mlp', 'forward'), Rows(key=('mlp', 'forward')))
    """
    return Rows((key.key, name)) if isinstance(key, Rows) else (key, name)


class Pair(NamedTuple):
    """A stage as the walk runs it.

    Args:
        forward: ``(params, reads, consts) -> (writes, residual)``; the residual is any tree, kept for ``backward``.
        backward: ``(params, residual, dwrites, consts) -> (dparams, dreads)``. ``dwrites`` has a tensor for each written value
            (zeros where nothing used it, ``None`` for integers); ``dparams`` has the stage's names as keys; ``dreads`` has
            ``None`` for values without a gradient (integers).
        needs_params: whether ``backward`` reads its parameters. Where it does not, they are not gathered for it and it
            receives an empty mapping.
        evaluate: the forward alone, where nothing will be differentiated and it is cheaper than ``forward``.
    """

    forward: Callable[[Params, Values, Mapping[str, Any]], tuple[Values, Any]]
    backward: Callable[[Params, Any, tuple[Tensor | None, ...], Mapping[str, Any]], tuple[Mapping[str, Tensor], tuple[Tensor | None, ...]]]
    needs_params: bool = True
    evaluate: Callable[[Params, Values, Mapping[str, Any]], Values] | None = None


PairRule = Callable[[StageFn, Hashable, Lower], Pair]
"""How a stage's function becomes a `Pair`."""


class Transfer(NamedTuple):
    """A move that takes time: ``start(value) -> handle`` returns at once, ``wait(handle) -> value`` when it is done.

    ``start`` may be called well before and ``wait`` well after other stages run; neither may depend on anything but its
    argument. A handle with an attribute ``bytes`` (or a tree of such) has those counted in the event record.

    Args:
        start: begins the move.
        wait: ends it.
        stream: the name of the lane it occupies (``"comm"``, ``"copy"``), for the record and for CUDA.
    """

    start: Callable[[Any], Any]
    wait: Callable[[Any], Any]
    stream: str = "comm"


@dataclass(frozen=True)
class Stage:
    """A piece of computation between named values.

    Args:
        name: unique in the program, as in ``"layers.3.attention"``; errors, events and traces use it.
        kind: what it is, for transforms that look for it: ``"embed"``, ``"attention"``, ``"router"``, ``"experts"``, ``"mlp"``,
            ``"shared"`` (experts that every token goes to), ``"statistics"``, ``"norm"``, ``"loss"``.
        fn: ``fn(params, *reads, **consts) -> writes``.
        key: equal for stages whose ``fn`` is the same function of equally shaped arguments; what is compiled for one is used
            for all of them.
        params: the stage's own names for its parameters, and the path of each in the parameter tree.
        reads: the values it takes, in order.
        writes: the values it returns, in order. Values that no stage reads and that are not the loss are statistics.
        consts: constants it takes by name (no gradient).
        rule: how ``fn`` becomes a `Pair`.
        named: the names that ``fn`` gives to values inside with `xtf.joint.keep`.
        gather: makes the whole parameters of what this rank keeps: ``{name: local} -> {name: whole}``. Started before the
            preceding stage runs, in both directions.
        reduce: makes this rank's gradients of the whole ones: ``{path: whole} -> {path: local}``. Started when the last
            stage that uses these parameters has run backward.
        store: moves the residual away after the forward; waited for when the next stage has run.
        fetch: brings it back; started before the stage preceding it in backward order runs.
        regather: whether gathered parameters are freed after the forward and gathered again for the backward.
        partial_over: mesh axes (`xtf.collectives.Axis`) over whose ranks this stage's gradients are partial sums although the
            axis carries no tokens of its own, as in tensor parallelism. Axes that carry tokens need not be named.
    """

    name: str
    kind: str
    fn: StageFn
    key: Hashable
    params: Mapping[str, Path]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    consts: tuple[str, ...] = ()
    rule: PairRule = field(default_factory=lambda: recompute)
    named: tuple[str, ...] = ()
    gather: Transfer | None = None
    reduce: Transfer | None = None
    store: Transfer | None = None
    fetch: Transfer | None = None
    regather: bool = True
    partial_over: tuple[Any, ...] = ()

    def __call__(self, params: Params, reads: Values, consts: Mapping[str, Any]) -> Values:
        """Run ``fn`` itself, without engine: what the reference does."""
        return self.fn(params, *reads, **{name: consts[name] for name in self.consts})


@dataclass(frozen=True)
class Exchange:
    """A move of values between stages, and its transpose in backward order.

    It starts at its place in the program and is waited for just before the first stage that reads what it writes, so the
    stages between the two run while it is under way.

    Args:
        name: unique in the program.
        reads: values taken; ``writes``: values given (both may have the same names).
        forward: ``start(reads)``, then ``wait(handle) -> (writes, residual)``; the residual is any tree that ``backward`` needs.
        backward: ``start((residual, dwrites))``, then ``wait(handle) -> dreads``; a cotangent may be ``None`` for zero.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    forward: Transfer
    backward: Transfer


Program = tuple["Stage | Exchange", ...]


def is_differentiable(value: object) -> bool:
    """Whether a value carries a gradient: a tensor of a floating dtype."""
    return isinstance(value, Tensor) and value.is_floating_point()


def recompute(fn: StageFn, key: Hashable, lower: Lower) -> Pair:
    """The rule that keeps only what the stage read and runs ``fn`` again in backward (Chen et al. 2016, "Training deep nets
    with sublinear memory cost"). Forward again and backward are one function, so a compiler sees both together."""

    def backward(params: Params, reads: Values, consts: Mapping[str, Any], dwrites: tuple[Tensor | None, ...]) -> Any:
        def of_differentiable(params: Params, floats: Values) -> Values:
            rest = iter(floats)
            written = fn(params, *[next(rest) if is_differentiable(r) else r for r in reads], **consts)
            return tuple(w for w in written if is_differentiable(w))

        pullback: Any = torch.func.vjp(of_differentiable, dict(params), tuple(r for r in reads if is_differentiable(r)))[1]
        return pullback(tuple(d for d in dwrites if d is not None))

    run = lower(fn, half(key, "forward"))
    run_backward = lower(backward, half(key, "recompute"))

    def forward_half(params: Params, reads: Values, consts: Mapping[str, Any]) -> tuple[Values, Any]:
        return run(params, *reads, **consts), reads

    def backward_half(
        params: Params, reads: Values, dwrites: tuple[Tensor | None, ...], consts: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], tuple[Tensor | None, ...]]:
        dparams, dfloats = run_backward(params, reads, consts, dwrites)
        rest = iter(dfloats)
        return dparams, tuple(next(rest) if is_differentiable(r) else None for r in reads)

    return Pair(forward_half, backward_half)
