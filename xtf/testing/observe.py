"""What a rank sees of a transformed step: all that a law compares, as values that can be sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xtf import optim, tree
from xtf.data.documents import Documents
from xtf.mesh import Mesh, split_batch
from xtf.model import Model
from xtf.step import TrainStep, apply, train_step
from xtf.tree import Path

Transform = Callable[[TrainStep], TrainStep]

Given = Mapping[str, Tensor] | Documents
"""What all ranks of a step are given together: a global batch (`xtf.batch.Batch`, each of its own shape), or documents."""


@dataclass(frozen=True)
class Observation:
    """What one rank saw of one step."""

    coordinate: Mapping[str, int]
    row_axes: tuple[str, ...]
    sizes: Mapping[str, int]
    micros: tuple[Mapping[str, Tensor], ...]
    loss: Tensor
    evaluated: Tensor
    grads: Mapping[Path, Tensor | None]
    metrics: Mapping[str, Tensor]
    params: Mapping[Path, Tensor]


def observe(mesh: Mesh | None, transform: Transform, model: Model, batch: Given, optimizer: optim.Optimizer, seed: int) -> Observation:
    """Run a transformed step on this rank (of real or simulated ranks) and return what it did; `xtf.testing.compare` judges it."""
    return observe_steps(mesh, transform, model, [batch], optimizer, seed)[0]


def observe_steps(
    mesh: Mesh | None, transform: Transform, model: Model, batches: Sequence[Given], optimizer: optim.Optimizer, seed: int
) -> list[Observation]:
    """Run one transformed step after another, each on its batch, and return what this rank saw of each. In every step the loss is also
    evaluated, and gradients are also made alone: neither may change what the step does."""
    step = apply(transform, train_step(model, optimizer))
    axes = [name for axis in step.row_axes for name in axis.names]
    state, seen = step.init(seed), list[Observation]()
    for batch in batches:
        part: Any = batch
        if not isinstance(batch, Documents):
            part = split_batch(batch, mesh, axes=axes) if mesh is not None and axes else dict(batch)
        loss, grads = step.value_and_grad(state.params, part)
        evaluated = step.loss(state.params, part)
        full = tree.items(step.full(grads))
        state, metrics = step(state, part)
        seen.append(
            Observation(
                coordinate=dict(mesh.coordinate) if mesh is not None else {},
                row_axes=tuple(axes),
                sizes=dict(mesh.sizes) if mesh is not None else {},
                micros=tuple(step.split(part)),
                loss=loss,
                evaluated=evaluated,
                grads=full,
                metrics=metrics,
                params=tree.items(step.full(state.params)),
            )
        )
    return seen
