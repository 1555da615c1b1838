"""A rehearsal of a step: its stages run once on tensors without values, and the bytes that are alive are counted.

It follows `xtf.walk` for one micro-batch, but runs no transfer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtf import tree
from xtf.stage import Pair, Program, Stage, is_differentiable
from xtf.tree import Path


class Moment(NamedTuple):
    """One stage's backward.

    Args:
        bytes: the most alive while it runs; of gradients, only those that are not complete yet and its own.
        makes: the leaves whose gradients it makes.
        completes: the leaves whose gradients are complete then; they are not counted any more.
    """

    bytes: int
    makes: tuple[Path, ...]
    completes: tuple[Path, ...]


@dataclass
class Rehearsal:
    """Bytes besides parameters, optimizer state and the batch's constants.

    Args:
        forward: the most alive while running forward.
        backward: the stages' backwards, in their order.
        activations: kept at the end of the forward, all together.
        loss: the most that the loss stage has at once besides what was there before.
        stage: the same of the largest other stage.
        gradients: the dtype in which each leaf's gradient is made.
    """

    forward: int = 0
    backward: list[Moment] = field(default_factory=list[Moment])
    activations: int = 0
    loss: int = 0
    stage: int = 0
    gradients: dict[Path, torch.dtype] = field(default_factory=dict[Path, torch.dtype])


def rehearse(program: Program, params: Mapping[Path, Tensor], consts: Mapping[str, Any], trained: frozenset[Path]) -> Rehearsal:
    """Run a program's stages on the device ``"meta"``.

    Args:
        program: stages; nothing but stages.
        params: whole parameters by path, on ``"meta"``.
        consts: constants of a micro-batch, on ``"meta"``.
        trained: paths that get gradients.
    """
    stages = [node for node in program if isinstance(node, Stage)]
    pairs = [stage.rule(stage.fn, stage.key, _as_it_is) for stage in stages]
    found, live = Rehearsal(), _Live()
    with live:
        residuals, blanks = _forward(stages, pairs, params, consts, found, live)
        _backward(stages, pairs, params, consts, trained, residuals, blanks, found, live)
    return found


def _as_it_is(fn: Callable[..., Any], key: object) -> Callable[..., Any]:
    return fn


def _note(found: Rehearsal, stage: Stage, extra: int) -> None:
    if stage.kind == "loss":
        found.loss = max(found.loss, extra)
    else:
        found.stage = max(found.stage, extra)


_Blanks = list[tuple[torch.Size, torch.dtype] | None]


def _forward(
    stages: Sequence[Stage], pairs: Sequence[Pair], params: Mapping[Path, Tensor], consts: Mapping[str, Any], found: Rehearsal, live: _Live
) -> tuple[list[Any], list[_Blanks]]:
    """What each stage keeps, and the shapes and dtypes of what it wrote, as far as differentiable."""
    values, residuals, blanks = dict[str, Tensor](), list[Any](), list[_Blanks]()
    last = {name: at for at, stage in enumerate(stages) for name in stage.reads}
    for at, (stage, pair) in enumerate(zip(stages, pairs, strict=True)):
        before = live.mark()
        reads = tuple(values[name] for name in stage.reads)
        writes, residual = pair.forward(_own(stage, params), reads, {name: consts[name] for name in stage.consts})
        _note(found, stage, live.most - before)
        found.forward = max(found.forward, live.most)
        residuals.append(residual)
        blanks.append([(w.shape, w.dtype) if is_differentiable(w) else None for w in writes])
        values = {name: v for name, v in (values | dict(zip(stage.writes, writes, strict=True))).items() if last.get(name, -1) > at}
        del reads, writes, residual
    found.activations = live.now
    return residuals, blanks


def _backward(
    stages: Sequence[Stage],
    pairs: Sequence[Pair],
    params: Mapping[Path, Tensor],
    consts: Mapping[str, Any],
    trained: frozenset[Path],
    residuals: list[Any],
    blanks: list[_Blanks],
    found: Rehearsal,
    live: _Live,
) -> None:
    cotangents, incomplete = dict[str, Tensor](), dict[Path, Tensor]()
    first = {path: at for at, stage in reversed(list(enumerate(stages))) for path in stage.params.values()}
    for at, (stage, pair) in reversed(list(enumerate(zip(stages, pairs, strict=True)))):
        before = live.mark()
        dwrites: list[Tensor | None] = []
        for name, blank in zip(stage.writes, blanks[at], strict=True):
            dy = cotangents.pop(name, None)
            dwrites.append(dy if dy is not None or blank is None else torch.zeros(blank[0], dtype=blank[1], device="meta"))
        residual, residuals[at] = residuals[at], None
        own = _own(stage, params) if pair.needs_params else {}
        dparams, dreads = pair.backward(own, residual, tuple(dwrites), {name: consts[name] for name in stage.consts})
        del residual, dwrites
        for name, dx in zip(stage.reads, dreads, strict=True):
            if dx is not None:
                cotangents[name] = cotangents[name] + dx if name in cotangents else dx
        grads = {stage.params[name]: grad for name, grad in dparams.items() if stage.params[name] in trained}
        for path, grad in grads.items():
            incomplete[path] = incomplete[path] + grad if path in incomplete else grad
            found.gradients[path] = incomplete[path].dtype
        _note(found, stage, live.most - before)
        completes = tuple(path for path in dict.fromkeys(stage.params.values()) if first[path] == at and path in incomplete)
        found.backward.append(Moment(live.most, tuple(grads), completes))
        del dparams, dreads, grads
        for path in completes:
            del incomplete[path]


def _own(stage: Stage, params: Mapping[Path, Tensor]) -> dict[str, Tensor]:
    return {name: params[path] for name, path in stage.params.items()}


class _Live(TorchDispatchMode):
    """Bytes of the storages that operations made and that are still alive: now, and the most since the last mark."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.now = self.most = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def mark(self) -> int:
        """Forget the most; returns what is alive now."""
        self.most = self.now
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_key(leaf.untyped_storage()) for leaf in tree.leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree.leaves(out):
            if isinstance(leaf, Tensor) and _key(leaf.untyped_storage()) not in given:
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = _key(storage), storage.nbytes()
        if key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def _key(storage: torch.UntypedStorage) -> int:
    """The address of the storage itself: without values, all data pointers are 0."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage]
