"""The order of a step's stages and exchanges as a value: to print, to test, and to see what its communication costs.

`schedule` lists what the walk does with one micro-batch: (stage, part, stream), forward and then backward. `timeline` plays such a
list with given durations on one compute and one communication stream, each of which takes its slots in order, and says how much
communication nothing hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from xtf.overlap import Layout
from xtf.stage import Exchange
from xtf.walk import Direction, Plan

if TYPE_CHECKING:
    from xtf.step import TrainStep


class Slot(NamedTuple):
    """One stage or exchange of one part, in one direction.

    Args:
        stage: its name, without the part.
        part: ``"0"`` for part 0, ``"0+1"`` for parts that share a document in attention, ``""`` for what runs on all tokens.
        stream: ``"compute"``, or what the exchange's transfer says.
        direction: ``"forward"`` or ``"backward"``.
        kind: the stage's, or ``"exchange"``.
        needs: places in the schedule of what must have ended before.
    """

    stage: str
    part: str
    stream: str
    direction: Direction
    kind: str
    needs: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """What runs in which order; printed, one line for each slot, one column for each stream."""

    slots: tuple[Slot, ...]

    def __str__(self) -> str:
        names = [f"{slot.stage}  {slot.part}".rstrip() for slot in self.slots]
        streams = list(dict.fromkeys(slot.stream for slot in self.slots))
        width = max(map(len, names), default=0) + 2
        lines: list[str] = []
        direction = ""
        for slot, name in zip(self.slots, names, strict=True):
            if slot.direction != direction:
                direction = slot.direction
                lines += ["".join(text.ljust(width) for text in (direction.ljust(10), *streams)).rstrip()]
            lines.append((" " * width + "".join((name if s == slot.stream else "").ljust(width) for s in streams)).rstrip())
        return "\n".join(lines)


class Played(NamedTuple):
    """A slot and when it runs, in the unit of the durations."""

    slot: Slot
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule played with durations."""

    played: tuple[Played, ...]

    @property
    def span(self) -> float:
        """From the first start to the last end."""
        return max((p.end for p in self.played), default=0.0)

    def busy(self, stream: str) -> float:
        """How long a stream works. Slots of one stream do not overlap."""
        return sum(p.end - p.start for p in self.played if p.slot.stream == stream)

    @property
    def communication(self) -> float:
        """How long streams other than compute work."""
        return sum(p.end - p.start for p in self.played if p.slot.stream != "compute")

    @property
    def exposed(self) -> float:
        """Communication that nothing hides: how long the compute stream waits."""
        return self.span - self.busy("compute")

    @property
    def idle(self) -> float:
        """How long no stream works at all."""
        end, idle = 0.0, 0.0
        for p in sorted(self.played, key=lambda p: p.start):
            idle += max(0.0, p.start - end)
            end = max(end, p.end)
        return idle

    def __str__(self) -> str:
        rows = [
            f"{p.start:10.3f} to {p.end:10.3f}  {p.slot.stream:8} {p.slot.direction:9} {p.slot.stage} {p.slot.part}" for p in self.played
        ]
        hidden = max(0.0, 1 - self.exposed / self.communication) if self.communication else 1.0
        told = f"{self.communication:.3f} of communication, {self.exposed:.3f} exposed ({hidden:.0%} hidden)"
        return "\n".join([*(row.rstrip() for row in rows), f"span {self.span:.3f}: {self.busy('compute'):.3f} of compute, {told}"])


def schedule(step: TrainStep, layout: Layout | None = None) -> Schedule:
    """What the walk does with one micro-batch of a step, forward and then backward.

    Gathers and reductions of parameters are not in it: the walk starts each before the stage that precedes its use.

    Args:
        step: the step, with all its transforms.
        layout: which parts share documents (`xtf.overlap.Layout`); by default none do.

    Raises:
        ValueError: for a layout of another number of parts than the step has.

    Example:
        >>> import xtf
        >>> from xtf.transforms import expert_parallel
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> order = xtf.simulate(lambda mesh: schedule(expert_parallel(mesh["expert"], overlap=2)(step)), expert=2)[0]
        >>> [(slot.stage.removeprefix("layers.0."), slot.part) for slot in order.slots[2:9]]  # doctest: +NORMALIZE_WHITESPACE
        [('attention', '0'), ('router', '0'), ('experts.dispatch', '0'),
         ('attention', '1'), ('router', '1'), ('experts.dispatch', '1'), ('experts', '0')]
    """
    if not hasattr(step, "parts"):
        raise ValueError(f"schedule takes a TrainStep, got {type(step).__name__}: make one with xtf.train_step(model, optimizer)")
    layout = (1,) * step.parts if layout is None else layout
    if min(layout, default=0) < 1:
        raise ValueError(f"layout {layout}: each group has at least 1 part")
    if sum(layout) != step.parts:
        raise ValueError(f"layout {layout} is of {sum(layout)} parts; the step runs in {step.parts}")
    return of_plan(step.plan(layout))


def of_plan(plan: Plan) -> Schedule:
    """The `Schedule` of a plan of the walk."""
    program = plan.program
    writer: dict[str, int] = {}
    needs: list[set[int]] = []
    for i, node in enumerate(program):
        needs.append({writer[name] for name in node.reads if name in writer})
        writer |= dict.fromkeys(node.writes, i)
    readers: list[set[int]] = [set() for _ in program]
    for i, before in enumerate(needs):
        for j in before:
            readers[j].add(i)

    def slot(i: int, direction: Direction, needs: set[int]) -> Slot:
        node = program[i]
        name, _, part = node.name.partition("#")
        if isinstance(node, Exchange):
            transfer = node.forward if direction == "forward" else node.backward
            return Slot(name, part, transfer.stream, direction, "exchange", tuple(sorted(needs)))
        return Slot(name, part, "compute", direction, node.kind, tuple(sorted(needs)))

    slots = [slot(i, "forward", needs[i]) for i in range(len(program))]
    at: dict[int, int] = {}  # the place of a node's backward
    for i in reversed(range(len(program))):
        early = plan.ready_after[i]
        for j in ([] if i in at else [i]) + early:
            if j in at:
                continue
            at[j] = len(slots)
            slots.append(slot(j, "backward", {j} | {at[r] for r in readers[j]}))
    return Schedule(tuple(slots))


def timeline(schedule: Schedule, duration: Callable[[Slot], float]) -> Timeline:
    """Play a schedule: each stream takes its slots in order, and a slot starts when what it needs has ended.

    Args:
        schedule: what runs.
        duration: of each slot, not negative, in any unit.

    Raises:
        ValueError: for a negative duration.

    Example:
        >>> slots = (Slot("a", "", "compute", "forward", "mlp", ()), Slot("x", "", "comm", "forward", "exchange", (0,)),
        ...          Slot("b", "", "compute", "forward", "mlp", ()), Slot("c", "", "compute", "forward", "mlp", (1,)))
        >>> played = timeline(Schedule(slots), lambda slot: 3.0 if slot.stream == "comm" else 2.0)
        >>> played.span, played.communication, played.exposed
        (7.0, 3.0, 1.0)
    """
    free: dict[str, float] = {}
    played: list[Played] = []
    for slot in schedule.slots:
        length = duration(slot)
        if not isinstance(length, (int, float)) or not length >= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"timeline: {slot.stage} has the duration {length!r}; expected a number of at least 0")
        start = max([free.get(slot.stream, 0.0), *(played[i].end for i in slot.needs)])
        free[slot.stream] = start + length
        played.append(Played(slot, start, start + length))
    return Timeline(tuple(played))
