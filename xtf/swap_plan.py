"""Which stages' activations to swap: as much as the copy hides, or as much as a budget needs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from xtf.backends import backend_of
from xtf.host import is_bytes
from xtf.stage import Stage

DEFAULT_BYTES = 1 << 16
"""A smaller tensor is not worth a copy of its own."""


class StageCost(NamedTuple):
    """What a stage keeps, and how long its forward takes.

    Args:
        name: of the stage.
        bytes: it keeps for its backward.
        seconds: of its forward.
    """

    name: str
    bytes: int
    seconds: float


def plan_swaps(costs: Sequence[StageCost], *, bandwidth: float, budget: int | None = None) -> frozenset[str]:
    """The stages whose activations go to the host.

    A copy is hidden if it ends before the next stage has run: then its memory is free in time. One lane copies, in order. Backward takes
    longer than forward, so what is hidden on the way out is hidden on the way back.

    Args:
        costs: the stages of a forward, in order.
        bandwidth: of a copy, in bytes per second.
        budget: bytes that activations may hold on the device. Stages are swapped until the rest fits: first those whose copies are
            hidden, then others, the first of the program first, for they wait longest. ``None`` for all whose copies are hidden.

    Raises:
        ValueError: for a bandwidth that is not positive, or a negative budget.

    Example:
        >>> costs = [StageCost("a", 100, 1.0), StageCost("b", 100, 1.0), StageCost("c", 400, 1.0), StageCost("d", 100, 1.0)]
        >>> sorted(plan_swaps(costs, bandwidth=200.0)), sorted(plan_swaps(costs, bandwidth=200.0, budget=650))
        (['a', 'b'], ['a'])
        >>> sorted(plan_swaps(costs, bandwidth=200.0, budget=150))
        ['a', 'b', 'c']
    """
    if not bandwidth > 0:
        raise ValueError(f"plan_swaps: bandwidth is {bandwidth} bytes per second; expected more than 0")
    if budget is not None and budget < 0:
        raise ValueError(f"plan_swaps: budget is {budget} bytes; expected at least 0, or None for what the copies hide")
    held, swapped = sum(cost.bytes for cost in costs), set[str]()
    limit = -math.inf if budget is None else budget
    now = lane = 0.0  # when the stage has run, and when the lane is free
    for at, cost in enumerate(costs):
        now += cost.seconds
        done = max(now, lane) + cost.bytes / bandwidth
        after = costs[at + 1].seconds if at + 1 < len(costs) else 0.0
        if held > limit and cost.bytes and done <= now + after:
            swapped.add(cost.name)
            held, lane = held - cost.bytes, done
    for cost in () if budget is None else costs:
        if held > limit and cost.bytes and cost.name not in swapped:
            swapped.add(cost.name)
            held -= cost.bytes
    return frozenset(swapped)


def copy_bandwidth(device: torch.device, *, bytes: int = 1 << 26) -> float:
    """Bytes per second of a copy from a device to pinned host memory: the best of three, measured now. On the CPU, of a copy."""
    source = torch.zeros(bytes, dtype=torch.uint8, device=device)
    target = torch.empty(bytes, dtype=torch.uint8, pin_memory=backend_of(device).pinned)
    times: list[float] = []
    for _ in range(3):
        backend_of(device).synchronize(device)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        backend_of(device).synchronize(device)
        times.append(time.perf_counter() - begin)
    return bytes / max(min(times), 1e-9)


class Automatic:
    """The policy that swaps everything in two forwards, of which it measures the second (the first may compile), then goes by
    `plan_swaps`. Which tensors go is all that depends on what it measures: results are the same bits.

    For `xtf.transforms.swap_activations`, which asks for each tensor that a stage keeps, in the order of the program; the stage that
    was asked for first begins the next forward.

    Args:
        budget: see `plan_swaps`.
        bandwidth: see `plan_swaps`; by default measured after the second forward.
        least: bytes; a smaller tensor stays on the device.
        device: where the step runs.

    Raises:
        ValueError: see `plan_swaps`.

    Attributes:
        costs: what was measured; empty until then.
        swapped: the stages that are swapped; ``None`` for all, until it is known.
    """

    def __init__(
        self, budget: int | None = None, *, bandwidth: float | None = None, least: int = DEFAULT_BYTES, device: torch.device | None = None
    ) -> None:
        if budget is not None and not is_bytes(budget):
            raise ValueError(f"automatic(budget={budget!r}): expected a number of bytes of at least 0, or None for no limit")
        if bandwidth is not None and not (isinstance(bandwidth, int | float) and 0 < bandwidth < math.inf):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"automatic(bandwidth={bandwidth!r}): expected bytes per second, more than 0, or None to measure them")
        self.budget, self.bandwidth, self.least = budget, bandwidth, least
        self.device = device if device is not None else torch.device("cpu")
        self.costs: list[StageCost] = []
        self.swapped: frozenset[str] | None = None
        self._forwards = 0
        self._first = self._last = ""
        self._marks: list[tuple[str, Any]] = []
        self._bytes: dict[str, int] = {}

    def on(self, device: torch.device) -> Automatic:
        """One like this that has measured nothing, for a rank's device."""
        return Automatic(self.budget, bandwidth=self.bandwidth, least=self.least, device=device)

    def __call__(self, stage: Stage, bytes: int) -> bool:
        """Whether a tensor of this size that a stage keeps goes to the host."""
        if self.swapped is None:
            self._measure(stage.name, bytes)
        return bytes >= self.least and (self.swapped is None or stage.name in self.swapped)

    def planned(self, bytes: int) -> bool:
        """The same of a tensor without values, which is not measured: as before anything was."""
        return bytes >= self.least

    def _measure(self, name: str, bytes: int) -> None:
        self._first = self._first or name
        if name != self._last:
            self._forwards += name == self._first
            self._last = name
            if self._forwards == 3:
                self._choose()
            elif self._forwards == 2:
                self._marks.append((name, _mark(self.device)))
        if self._forwards == 2 and bytes >= self.least:
            self._bytes[name] = self._bytes.get(name, 0) + bytes

    def _choose(self) -> None:
        begins = [self._marks[0], *self._marks[:-1]]  # when the first began is not known: nothing is hidden behind it
        self.costs = [
            StageCost(name, self._bytes.get(name, 0), _seconds(begin, end))
            for (_, begin), (name, end) in zip(begins, self._marks, strict=True)
        ]
        bandwidth = copy_bandwidth(self.device) if self.bandwidth is None else self.bandwidth
        self.swapped = plan_swaps(self.costs, bandwidth=bandwidth, budget=self.budget)
        self._marks.clear()


def _mark(device: torch.device) -> Any:
    """Now, on the device's stream."""
    if not backend_of(device).streams:
        backend_of(device).synchronize(device)
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
