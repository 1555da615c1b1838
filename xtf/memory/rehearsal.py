"""A rehearsal: a step runs as it is, on tensors without values, and what is alive is counted."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from xtf import tree
from xtf.batch import Batch
from xtf.memory.live import Live
from xtf.memory.timeline import Timeline, replay
from xtf.ops.cpu import CPU
from xtf.optim import Optimizer
from xtf.optim.placement import UNPLACED, Placement
from xtf.record import Event, Record
from xtf.state import State
from xtf.step import Compilation, TrainStep, eager
from xtf.tree import Tree

HELD = {"constants": "batch", "gathered": "communication", "values": "activations", "kept": "activations", "gradients": "gradients"}
"""What the walk's names for what it holds are called here."""

MOST_TOKENS = 1 << 26
"""Of a micro-batch: a rehearsal makes its positions and tables."""

MOST_MICRO_BATCHES = 1 << 16


def rehearse(step: TrainStep, tokens: int, *, micro_batches: int = 1) -> Timeline:
    """Device memory over a training step of this rank, without allocating any of it.

    The step itself runs, its walk, its transfers and its update, on tensors of the device ``"meta"``. Collectives move nothing and
    have results of the right size, so one rank stands for all, real, simulated or planned (`xtf.plan_mesh`); under expert
    parallelism tokens choose experts by the mesh's stated routing. Buffers on the host count as the host's. A compiled
    step is rehearsed in its eager form: a compiler that fuses takes less.

    Not seen are what one operation takes for itself alone, and what an allocator wastes.

    Args:
        step: the finished step.
        tokens: of one micro-batch of this rank, padding included; they are one document.
        micro_batches: how many this rank makes of its batch; with several, gradients are there from the first on.

    Raises:
        ValueError: for what is no `TrainStep`, ``tokens`` that is no whole number from 1 to 2²⁶ or ``micro_batches`` from 1 to 2¹⁶, or a
            step of which a part reads values that nothing states.

    Example:
        >>> import xtf
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> line = rehearse(step, 4096)
        >>> line.peak.event.stage, line.peak.most["parameters"] == 4 * step.model.param_count()[0]
        ('loss', True)
    """
    check_step("rehearse", step)
    check_whole("rehearse: tokens", tokens, MOST_TOKENS, "they are those of one micro-batch of one rank")
    check_whole("rehearse: micro_batches", micro_batches, MOST_MICRO_BATCHES, "it is how many this rank makes of its batch")
    live = Live("meta")
    planned = on_meta(step, watched(step.optimizer, live), micro_batches)
    state = meta_state(planned)
    on_host = host_bytes(state)
    ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    with live:
        try:
            run(planned, state, {"input_ids": ids, "labels": ids}, live)
        except (NotImplementedError, RuntimeError) as error:  # torch raises either where an operation needs values
            if "allocate memory" in str(error):
                raise ValueError(
                    f"rehearse: tokens is {tokens:,}, whose positions and tables do not fit this machine's memory: take fewer tokens"
                ) from error
            if "meta" not in str(error):
                raise
            raise ValueError(
                f"the step cannot be rehearsed, a part of it reads values of tensors that have none: {error}. Read numbers by "
                "xtf.collectives.planned.read, which takes them from what is stated"
            ) from error
    kinds = {node.name: getattr(node, "kind", "") for node in planned.program}
    return Timeline(replay(live.log, kinds, host=on_host), tokens, micro_batches)


def check_step(asked: str, step: object) -> None:
    """Refuse what is no training step."""
    if not isinstance(step, TrainStep):
        raise ValueError(f"{asked} takes a step, got {step!r:.60}: make one by xtf.train_step(model, optimizer)")


def check_whole(name: str, value: object, most: int, advice: str) -> None:
    """Refuse what is no whole number from 1 to ``most``."""
    try:
        fits = not isinstance(value, bool) and 1 <= operator.index(value) <= most  # pyright: ignore[reportArgumentType]
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{name} is {value!r:.60}, expected a whole number from 1 to {most:,}; {advice}")


def host_bytes(state: State) -> int:
    """What of a state without values stands for tensors that live on the host."""
    return sum(leaf.nbytes for leaf in tree.leaves(state.opt) if isinstance(leaf, Tensor) and leaf.is_cpu and leaf.dim())


def on_meta(step: TrainStep, optimizer: Optimizer, micro_batches: int) -> TrainStep:
    """The step on the device ``"meta"``: eager, and with as many micro-batches of the batch that it is given."""

    def split(batch: Batch) -> list[Batch]:
        return [batch] * micro_batches

    compilation = Compilation("eager", eager, step.compilation.donate)
    return dataclasses.replace(step, optimizer=optimizer, split=split, ops=CPU, compilation=compilation, device=torch.device("meta"))


def meta_state(step: TrainStep) -> State:
    """An initial state without values; the counts have theirs."""
    leaves = {path: torch.empty(at.shape(), dtype=step.specs[path].dtype, device="meta") for path, at in step.placements.items()}
    return step.state(step.tree_of(leaves), handed_over=True)


def watched(optimizer: Optimizer, live: Live) -> Optimizer:
    """An optimizer whose update is an event of the log."""

    def update(grads: Tree, state: Any, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, Any]:
        live.hold("gradients", grads)
        live.record(Event("start", "update", "optimizer", "update"))
        updates, new = optimizer.update(grads, state, params, placement)
        live.hold("optimizer", new)
        live.record(Event("run", "update", "optimizer", "update"))
        return updates, new

    return optimizer._replace(update=update)


def run(step: TrainStep, state: State, batch: Batch, live: Live) -> State:
    """One step under ``live``, whose log then holds every event and who held what."""
    live.hold("parameters", state.params, fixed=True)
    live.hold("optimizer", state.opt, fixed=True)

    seen: set[Any] = set()

    def watch(event: Event, held: Mapping[str, Any]) -> None:
        for name, value in held.items():
            if name == "kept":  # most of what there is, and looked at once
                value, known = [kept for key, kept in value.items() if key not in seen], set(value)
                seen.intersection_update(known)
                seen.update(known)
            live.hold(HELD[name], value)
        live.record(event)

    new, _ = step(state, batch, record=Record(watch=watch))
    live.hold("parameters", new.params)
    live.hold("optimizer", new.opt)
    live.record(Event("run", "update", "parameters", "update"))
    return new
