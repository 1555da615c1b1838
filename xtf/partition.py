"""The rule that keeps a chosen list of tensors between a stage's halves (`xtf.joint`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from xtf import tree
from xtf.compile import fingerprint
from xtf.joint import Choose, Halves, cut, hint, trace
from xtf.stage import Lower, Pair, PairRule, Params, Rows, StageFn, Values, half


def partitioned(choose: Choose, name: Hashable) -> PairRule:
    """The rule of a stage that keeps what ``choose`` says, and computes the rest again in backward.

    Its graph is traced at the first call, and again for other sizes; not for other numbers of documents, nor of rows where the key
    is `xtf.stage.Rows`. All stages of one function share it.

    Args:
        choose: what is kept.
        name: equal for equal choices.
    """

    def rule(fn: StageFn, key: Hashable, lower: Lower) -> Pair:
        evaluate = lower(fn, half(key, "forward"))
        runs: dict[int, _Runs] = {}
        last: list[tuple[Hashable, _Runs] | None] = [None]  # of the layer before, most often of the same sizes

        def run_of(params: Params, reads: Values, consts: Mapping[str, Any]) -> _Runs:
            sizes, known = _sizes(params, reads, consts), last[0]
            if known is not None and sizes is not None and known[0] == sizes:
                return known[1]
            halves = _halves(fn, choose, name, params, reads, consts, isinstance(key, Rows))
            if id(halves) not in runs:  # what is in _TRACED stays, so no other takes its place
                runs[id(halves)] = _Runs(halves, half(key, name), lower)
            last[0] = (sizes, runs[id(halves)])
            return runs[id(halves)]

        def forward(params: Params, reads: Values, consts: Mapping[str, Any]) -> tuple[Values, Any]:
            run = run_of(params, reads, consts)
            halves = run.halves
            out = run.forward(dict(params), reads, run.constants(consts))
            writes = len(halves.joint.writes)
            return out[:writes], (run, tuple(reads[at] for at in halves.reads), out[writes:])

        def backward(
            params: Params, residual: tuple[_Runs, Values, Values], dwrites: tuple[Tensor | None, ...], consts: Mapping[str, Any]
        ) -> tuple[Mapping[str, Tensor], tuple[Tensor | None, ...]]:
            run, reads, kept = residual
            joint = run.halves.joint
            cotangents = tuple(d.contiguous() for d in dwrites if d is not None)
            grads = iter(run.backward(dict(params), reads, run.constants(consts), kept, cotangents))
            dparams = {name: next(grads) for name in joint.params}
            return dparams, tuple(next(grads) if yes else None for yes in joint.reads)

        def forward_only(params: Params, reads: Values, consts: Mapping[str, Any]) -> Values:
            return evaluate(params, *reads, **consts)

        return Pair(forward, backward, evaluate=forward_only)

    return rule


class _Runs:
    """The halves of a stage as they run: lowered. A leaf of the residual that holds no tensor."""

    def __init__(self, halves: Halves, key: Hashable, lower: Lower) -> None:
        self.halves = halves
        self.forward = lower(_forward(halves.forward, halves.joint.params), half(key, "forward"))
        self.backward = lower(_backward(halves.backward, halves.joint.params), half(key, "backward"))

    def constants(self, consts: Mapping[str, Any]) -> dict[str, Tensor]:
        """Those that the graph takes, in its order."""
        return {name: consts[name] for name in self.halves.joint.consts}


def _forward(graph: fx.GraphModule, names: tuple[str, ...]) -> Callable[..., Any]:
    def forward(params: Params, reads: Values, consts: Mapping[str, Tensor]) -> Values:
        return graph(*[params[name] for name in names], *reads, *consts.values())

    return forward


def _backward(graph: fx.GraphModule, names: tuple[str, ...]) -> Callable[..., Any]:
    def backward(params: Params, reads: Values, consts: Mapping[str, Tensor], kept: Values, cotangents: Values) -> Values:
        return graph(*[params[name] for name in names], *reads, *consts.values(), *kept, *cotangents)

    return backward


def _halves(fn: StageFn, choose: Choose, name: Hashable, params: Params, reads: Values, consts: Mapping[str, Any], rows: bool) -> Halves:
    """The halves for arguments of these sizes, traced if there are none yet."""
    tensors = [*params.values(), *reads, *(value for value in consts.values() if isinstance(value, Tensor))]
    fixed = tuple((key, value) for key, value in consts.items() if not isinstance(value, Tensor))
    key = (fingerprint(fn), name, rows, tuple(params), tuple(consts), fixed)
    with _TRACING:
        known = _TRACED.setdefault(key, [])
        for halves in known:
            if halves.joint.serves(tensors):
                return halves
        with torch.enable_grad(), _disable_current_modes():  # what counts tensors must not count those of a trace
            given = tree.map(_stand_in, (dict(params), reads, dict(consts)))
            halves = cut(trace(fn, *given, rows=rows), choose)
        known.append(halves)
        return halves


def _sizes(params: Params, reads: Values, consts: Mapping[str, Any]) -> Hashable:
    """What a trace depends on; ``None`` for tensors that are traced themselves, whose sizes are no numbers."""
    values = [*params.values(), *reads, *consts.values()]
    if any(isinstance(value, FakeTensor) for value in values):
        return None
    kinds = [(value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value for value in values]
    return (*params, *consts, *kinds)


def _stand_in(value: Any) -> Any:
    """A tensor of the size of one that is itself traced (`xtf.whole_step`): a trace is made of what has sizes."""
    return torch.empty([hint(n) for n in value.shape], dtype=value.dtype, device=value.device) if isinstance(value, FakeTensor) else value


_TRACED: dict[Hashable, list[Halves]] = {}
_TRACING = threading.RLock()  # make_fx is not made for several threads at once
