"""What a step does take: it runs, and its memory is read between the events of its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from xtf.backends import backend_of
from xtf.batch import Batch
from xtf.memory.live import HOST, Live, tensors
from xtf.memory.rehearsal import HELD, run, watched
from xtf.memory.timeline import KINDS, Moment, Timeline, made_by, replay, stage_kind
from xtf.record import Event, Record, storage_key
from xtf.state import State
from xtf.step import Compilation, TrainStep, eager


class Meter(NamedTuple):
    """How an allocator is read: bytes allocated now, the most since it was reset, and resetting that."""

    now: Callable[[], int]
    most: Callable[[], int]
    reset: Callable[[], None]


def measure(step: TrainStep, state: State, batch: Batch) -> tuple[Timeline, State]:
    """Device memory over a training step that runs for real, on this rank.

    Where the device's allocator keeps no statistics, as on the CPU, storages are counted while the step's eager form runs, as in
    `xtf.memory.rehearse`. On an accelerator the step runs as it is, compiled or not, and the allocator's statistics are read between events
    (`xtf.backends.Memory`): what is allocated now and was at most since the event before. That includes what kernels take for themselves.
    The host runs ahead of the device, but allocations are made by the host in the order of the record. **The readings of an accelerator
    were never run on hardware.**

    Args:
        step: the finished step.
        state: this rank's; a step that donates consumes it.
        batch: this rank's part of the batch.

    Returns:
        The timeline, and the new state.

    Raises:
        ValueError: as the step does.
    """
    micros = step.split(batch)
    tokens = micros[0]["input_ids"].numel()
    stages = {node.name: getattr(node, "kind", "") for node in step.program}
    memory = backend_of(step.device).memory
    if memory is None:
        live = Live(step.device.type)
        compilation = Compilation("eager", eager, step.compilation.donate)
        plain = dataclasses.replace(step, optimizer=watched(step.optimizer, live), compilation=compilation)
        with live:
            new = run(plain, state, batch, live)
        return Timeline(replay(live.log, stages), tokens, len(micros), True), new
    device = step.device
    meter = Meter(lambda: memory.now(device), lambda: memory.most(device), lambda: memory.reset(device))
    moments, new = read_between(step, state, batch, meter, stages)
    return Timeline(moments, tokens, len(micros), True), new


def read_between(step: TrainStep, state: State, batch: Batch, meter: Meter, stages: Mapping[str, str]) -> tuple[tuple[Moment, ...], State]:
    """The moments of a step by what a meter says. What is allocated and in no tree that the walk holds counts as what the event makes."""
    moments: list[Moment] = []
    held: list[tuple[str, Any]] = [("parameters", state.params), ("optimizer", state.opt)]

    def watch(event: Event, now: Mapping[str, Any]) -> None:
        most = meter.most()
        sizes = _sizes([*held, *((HELD[name], value) for name, value in now.items())])
        host = sizes.pop(HOST)
        rest = made_by(event, stages)
        sizes[rest] += max(meter.now() - sum(sizes.values()), 0)
        peak = sizes | {rest: sizes[rest] + max(most - sum(sizes.values()), 0)}
        moments.append(Moment(event, stage_kind(event.stage, stages), sizes, peak, host))
        meter.reset()

    meter.reset()
    new, _ = step(state, batch, record=Record(watch=watch))
    held = [("parameters", new.params), ("optimizer", new.opt)]
    watch(Event("run", "update", "parameters", "update"), {})
    return tuple(moments), new


def _sizes(held: Sequence[tuple[str, Any]]) -> dict[str, int]:
    """Bytes by kind, each storage once, as what holds it first."""
    sizes, seen = dict.fromkeys((*KINDS, HOST), 0), set[int]()
    for kind, value in held:
        for tensor, on_host in tensors(value):
            storage = tensor.untyped_storage()
            if storage_key(storage) not in seen and (on_host or tensor.device.type != "cpu"):
                sizes[HOST if on_host else kind] += storage.nbytes()
            seen.add(storage_key(storage))
    return sizes
