"""The run: every contender in a process of its own, a step of each in turn, round after round."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xtf
from xtf.bench.contenders import Entry, check_entries
from xtf.bench.machine import Machine
from xtf.bench.process import Worker
from xtf.bench.workload import Workload
from xtf.run.flops import model_flops
from xtf.spec import ParamSpec
from xtf.tree import items

LOSS_TOLERANCE = {"float32": 1e-4, "float64": 1e-6}
"""How far first losses may be apart, relatively; 2e-2 for other dtypes."""

_UPDATE_PASSES = 7  # AdamW reads parameter, gradient and two moments, and writes all but the gradient


@dataclass(frozen=True)
class Result:
    """What was seen of one contender.

    Args:
        entry: who.
        first_seconds: the first step, which compiles.
        loss: of the first step.
        seconds: of each round.
        update_seconds: the part of these after the gradients.
        peak_bytes: the most memory in these rounds: allocated on an accelerator; on a CPU resident, libraries and all.
        open_bytes: the same before the first step.
    """

    entry: Entry
    first_seconds: float
    loss: float
    seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    peak_bytes: int
    open_bytes: int

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def median_update(self) -> float:
        """Seconds of the part after the gradients."""
        return statistics.median(self.update_seconds)

    @property
    def spread(self) -> float:
        """Half of what lies between the quartiles of the rounds, as a part of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


@dataclass(frozen=True)
class Results:
    """All of a run.

    Args:
        workload: what was computed.
        machine: what the machine can do.
        flops: of a step's mathematics.
        update_bytes: that an update moves, at least.
        results: of each contender.
    """

    workload: Workload
    machine: Machine
    flops: int
    update_bytes: int
    results: tuple[Result, ...]

    @property
    def floor(self) -> float:
        """Seconds: all FLOPs at the peak of matrix products, and the update at that of memory."""
        return self.flops / self.machine.flops + self.update_bytes / self.machine.bandwidth

    def tokens_per_second(self, result: Result) -> float:
        """Of the median step."""
        return self.workload.tokens / result.median

    def mfu(self, result: Result, *, update: bool = True) -> float:
        """Model FLOPs utilisation, of the whole step or without the part after the gradients."""
        return self.flops / (result.median - (0.0 if update else result.median_update)) / self.machine.flops

    def times_as_fast(self, result: Result, other: Result) -> float:
        """How many times as fast a contender is as another: the median over rounds of what the two took side by side."""
        return statistics.median(b / a for a, b in zip(result.seconds, other.seconds, strict=True))


def run_rounds(
    workload: Workload, entries: Sequence[Entry], *, rounds: int = 7, warmup: int = 2, tell: Callable[[str], None] = lambda text: None
) -> Results:
    """Time contenders.

    Args:
        workload: what is computed.
        entries: who computes it.
        rounds: steps of each that are timed.
        warmup: steps of each after its first that are not.
        tell: what is done now, for a progress line.

    Raises:
        ValueError: for entries or numbers that are not possible; before anything runs.
        ValueError: if a contender fails, or does not have the loss of the others.
    """
    chosen = check_entries(list(entries))
    if rounds < 1 or warmup < 0:
        raise ValueError(f"--rounds is {rounds} and --warmup {warmup}, expected at least 1 and 0")
    model = workload.model()
    specs: dict[str, ParamSpec] = items(model.specs)
    size = sum(spec.numel * spec.dtype.itemsize for spec in specs.values() if spec.trainable)
    flops = model_flops(model).step_flops(workload.lengths)
    with ExitStack() as stack:
        if workload.weights is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            tell("writing initial weights")
            xtf.save_params(model, model.init(workload.seed), Path(folder) / "weights")
            workload = dataclasses.replace(workload, weights=str(Path(folder) / "weights"))
        tell("measuring the machine")
        machine = _machine(stack, workload)
        workers = [stack.enter_context(Worker(entry, workload)) for entry in chosen]
        opened, first = list[int](), list[dict[str, Any]]()
        for worker in workers:
            tell(f"{worker.entry.name}: first step")
            opened.append(worker.ask("open", workload=workload.json(), entry=list(worker.entry))["bytes"])
            first.append(worker.ask("first"))
            worker.ask("warm", steps=warmup)
        _check_losses(workload, chosen, [float(one["loss"]) for one in first])
        taken = [list[dict[str, Any]]() for _ in workers]
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}")
            order = [(number + i) % len(workers) for i in range(len(workers))]
            for at in order:
                taken[at].append(workers[at].ask("step"))
        peaks = [int(worker.ask("peak")["bytes"]) for worker in workers]
        again = _machine(stack, workload)
    machine = Machine(max(machine.flops, again.flops), max(machine.bandwidth, again.bandwidth), machine.name)
    results = tuple(
        Result(
            entry,
            float(one["seconds"]),
            float(one["loss"]),
            tuple(float(t["seconds"]) for t in steps),
            tuple(float(t["update_seconds"]) for t in steps),
            peak,
            start,
        )
        for entry, one, steps, peak, start in zip(chosen, first, taken, peaks, opened, strict=True)
    )
    return Results(workload, machine, flops, _UPDATE_PASSES * size, results)


def _machine(stack: ExitStack, workload: Workload) -> Machine:
    worker = stack.enter_context(Worker(Entry("the machine", "xtf", "eager"), workload))
    return Machine(**worker.ask("machine", threads=workload.threads, device=workload.device, dtype=workload.dtype))


def _check_losses(workload: Workload, entries: Sequence[Entry], losses: Sequence[float]) -> None:
    """Who has another loss computes something else, and is not to be compared."""
    tolerance = LOSS_TOLERANCE.get(workload.dtype, 2e-2)
    if max(losses) - min(losses) > tolerance * abs(losses[0]):
        seen = ", ".join(f"{entry.name} {loss:.6f}" for entry, loss in zip(entries, losses, strict=True))
        raise ValueError(f"the contenders do not compute the same: first losses {seen}, more than {tolerance:g} apart")
