"""xtf as a contender."""

from __future__ import annotations

from typing import Any, cast

import xtf
from xtf.bench.clock import seconds_now
from xtf.bench.contenders import Entry, Taken
from xtf.bench.workload import Workload
from xtf.compile import Backend, Unit
from xtf.optim import Optimizer
from xtf.optim.core import Fused
from xtf.optim.placement import UNPLACED, Placement
from xtf.run.standard import parse_transforms
from xtf.step import TrainStep
from xtf.tree import Tree

LEARNING_RATE = 1e-5  # so small that the loss stays what it is, round after round


def make_step(workload: Workload, entry: Entry, marks: list[float]) -> TrainStep:
    """The finished step. Each update puts the moment at which it began into ``marks``."""
    optimizer = _marked(xtf.optim.adamw(lr=LEARNING_RATE), workload, marks)
    step = xtf.train_step(workload.model(), optimizer, device=workload.device)
    step = xtf.compose(*parse_transforms(entry.transforms, xtf.mesh()))(step)
    backend, _, unit = entry.backend.partition(":")
    return xtf.compile(step, backend=cast(Backend, backend), unit=cast(Unit, unit or "stage"), donate=True)


def open_contender(workload: Workload, entry: Entry) -> Own:
    """See `xtf.bench.contenders.open_contender`."""
    return Own(workload, entry)


class Own:
    """xtf's step and its state."""

    def __init__(self, workload: Workload, entry: Entry) -> None:
        self.workload, self.marks = workload, list[float]()
        self.step = make_step(workload, entry, self.marks)
        self.state = xtf.load(self.step, workload.weights) if workload.weights else self.step.init(workload.seed)
        self.batch = workload.batch()

    def __call__(self) -> Taken:
        self.marks.clear()
        began = seconds_now(self.workload.device)
        self.state, metrics = self.step(self.state, self.batch)
        ended = seconds_now(self.workload.device)
        return Taken(ended - began, ended - self.marks[-1], float(metrics["loss"]))


def _marked(optimizer: Optimizer, workload: Workload, marks: list[float]) -> Optimizer:
    def advanced(grads: Tree, state: Any, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, Any]:
        marks.append(seconds_now(workload.device))
        return xtf.optim.advance(optimizer, grads, state, params, placement)

    return optimizer._replace(update=Fused(optimizer.update, advanced))
