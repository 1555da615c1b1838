"""The timeline of a step's memory: after each event of its record, how many bytes are alive, by what they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from xtf.memory.live import HOST, Entry
from xtf.record import Event

KINDS: tuple[str, ...] = ("parameters", "optimizer", "gradients", "batch", "activations", "communication", "logits", "workspace")
"""What device memory is taken by:

* ``parameters`` and ``optimizer``: this rank's parts, and their new copies where the step does not donate;
* ``gradients``: this rank's, and those of a stage until they are summed up;
* ``batch``: ids, positions, targets and rotary tables;
* ``activations``: values between stages, their cotangents, and what stages keep for their backward;
* ``communication``: gathered parameters, and what collectives take and bring until a stage has it;
* ``logits``: what the loss stage makes and drops while it runs;
* ``workspace``: the same of the stage that runs otherwise, its gradients before they are reduced, and of the optimizer's update.
"""


class Moment(NamedTuple):
    """An event and the bytes around it.

    Args:
        event: what happened.
        kind: of the stage, ``""`` where the event is of none.
        live: device bytes after it, by kind.
        most: device bytes by kind when there were most, after the event before and up to this one.
        host: bytes in host buffers after it.
    """

    event: Event
    kind: str
    live: Mapping[str, int]
    most: Mapping[str, int]
    host: int

    @property
    def peak(self) -> int:
        """Device bytes when there were most."""
        return sum(self.most.values())

    def __str__(self) -> str:
        return "the update" if self.event.what == "update" else f"{self.event.stage}, {self.event.direction}"


@dataclass(frozen=True)
class Timeline:
    """Device memory over one step of one rank.

    Args:
        moments: one for each event of the step's record, in order; the last are of the update.
        tokens: of a micro-batch; ``micro_batches``: how many there are.
        measured: whether the step ran, or was only rehearsed.
    """

    moments: tuple[Moment, ...]
    tokens: int
    micro_batches: int = 1
    measured: bool = False

    @cached_property
    def peak(self) -> Moment:
        """The moment at which the device holds most, the first of them."""
        return max(self.moments, key=lambda moment: moment.peak)

    @cached_property
    def most(self) -> dict[str, int]:
        """Of each kind, the most bytes at any moment; they are not there together. ``"host"`` too."""
        found = {kind: max(max(m.live[kind], m.most[kind]) for m in self.moments) for kind in KINDS}
        return found | {HOST: max(m.host for m in self.moments)}

    def json(self) -> dict[str, Any]:
        """What ``xtf memory --json`` writes: plain dicts, lists, numbers and texts; sizes in bytes."""
        events = [
            {"event": str(m.event), "direction": m.event.direction, "micro_batch": m.event.micro, "kind": m.kind}
            | {"live": dict(m.live), "most": dict(m.most), "host": m.host}
            for m in self.moments
        ]
        peak = {"bytes": self.peak.peak, "stage": self.peak.event.stage, "direction": self.peak.event.direction}
        peak |= {"event": self.moments.index(self.peak), "by_kind": dict(self.peak.most)}
        sizes = {"tokens": self.tokens, "micro_batches": self.micro_batches, "measured": self.measured}
        return sizes | {"peak": peak, "most": self.most, "moments": events}


def replay(log: Sequence[Entry], stages: Mapping[str, str], *, host: int = 0) -> tuple[Moment, ...]:
    """The moments of a log.

    A storage is what it is held as. Before somebody holds it, it is what it will be held as first, or communication if a transfer
    made it; what nobody ever holds is what its stage makes and drops.

    Args:
        log: of `xtf.memory.live.Live`.
        stages: the kind of each stage by name.
        host: bytes on the host that are there all the time.
    """
    first = {entry.storage: entry.kind for entry in reversed(log) if entry.what == "held"}
    now, sizes, kinds = dict.fromkeys(KINDS, 0) | {HOST: host}, dict[int, int](), dict[int, str]()
    moments: list[Moment] = []
    for begin, end in _stretches(log):
        event = log[end].event
        assert event is not None
        made = made_by(event, stages)
        most, device = dict(now), _device(now)
        for entry in log[begin:end]:
            if entry.what == "made":
                held = first.get(entry.storage)
                kind = made if held is None or (made == "communication" and held != HOST) else held
                kinds[entry.storage], sizes[entry.storage] = kind, entry.bytes
                now[kind] += entry.bytes
                if _device(now) > device:
                    most, device = dict(now), _device(now)
            elif entry.what == "dropped":
                now[kinds[entry.storage]] -= entry.bytes
            else:
                now[kinds[entry.storage]] -= sizes[entry.storage]
                now[entry.kind] += sizes[entry.storage]
                kinds[entry.storage] = entry.kind
        host = now[HOST]
        kind = stage_kind(event.stage, stages)
        moments.append(Moment(event, kind, _without_host(now), _without_host(most), host))
    return tuple(moments)


def _stretches(log: Sequence[Entry]) -> Iterable[tuple[int, int]]:
    """(first entry, entry of the event) of what leads to each event; what lies behind the last is left out."""
    begin = 0
    for at, entry in enumerate(log):
        if entry.what == "event":
            yield begin, at
            begin = at + 1


def made_by(event: Event, stages: Mapping[str, str]) -> str:
    if event.what in ("gather", "reduce", "exchange", "scalars", "sync"):
        return "communication"
    return "logits" if event.what in ("forward", "backward") and stage_kind(event.stage, stages) == "loss" else "workspace"


def stage_kind(stage: str, stages: Mapping[str, str]) -> str:
    """Of a stage, or of a part of it (`xtf.overlap`)."""
    return stages.get(stage, stages.get(stage.partition("#")[0], ""))


def _device(now: Mapping[str, int]) -> int:
    return sum(now.values()) - now[HOST]


def _without_host(now: Mapping[str, int]) -> dict[str, int]:
    return {kind: now[kind] for kind in KINDS}
