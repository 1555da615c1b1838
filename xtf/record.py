"""The event record of a walk: what started, ran, was waited for and was freed, in order.

Tests, the memory report, the planner and the tracer read this one record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from xtf import tree

Act = Literal["start", "wait", "run", "free"]
What = Literal["forward", "backward", "gather", "reduce", "store", "fetch", "exchange", "scalars", "sync", "update"]


@dataclass(frozen=True)
class Event:
    """One thing the walk did.

    Args:
        act: ``start`` or ``wait`` of a transfer, ``run`` of a stage, ``free`` of what a transfer brought.
        what: ``forward`` and ``backward`` of a stage, or the kind of transfer. ``scalars`` are the step's own small all-reduces; a wait for
            ``sync`` is the host waiting for numbers from the device.
        stage: the stage's name.
        direction: the direction the walk was going in.
        micro: index of the micro-batch.
        bytes: for a start, bytes this rank sends (collectives: on a ring); for wait and free, bytes that arrived or were freed.
        stream: the lane the work occupies.
    """

    act: Act
    what: What
    stage: str
    direction: Literal["forward", "backward", "update"] = "forward"
    micro: int = 0
    bytes: int = 0
    stream: str = "compute"

    def __str__(self) -> str:
        return f"{self.act} {self.what} {self.stage}"


@dataclass
class Record:
    """A list of events in the order in which they happened on this rank.

    Args:
        events: what happened so far.
        watch: called after each event, with it and with what the walk holds then: trees by name (`xtf.walk`). Nothing of them may be
            kept or changed.
    """

    events: list[Event] = field(default_factory=list[Event])
    watch: Callable[[Event, Mapping[str, Any]], None] | None = field(default=None, repr=False, compare=False)

    def add(self, event: Event, held: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Append an event; ``held`` is for `watch`."""
        self.events.append(event)
        if self.watch is not None:
            self.watch(event, held())

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def select(
        self, act: Act | None = None, what: What | None = None, stage: str | None = None, direction: str | None = None
    ) -> list[Event]:
        """The events that match everything given."""
        wanted = {"act": act, "what": what, "stage": stage, "direction": direction}
        return [e for e in self.events if all(v is None or getattr(e, k) == v for k, v in wanted.items())]

    def position(self, act: Act, what: What, stage: str, direction: str, micro: int = 0) -> int:
        """Index of the one such event.

        Raises:
            ValueError: if there is none or more than one.
        """
        found = [
            i for i, e in enumerate(self.events) if (e.act, e.what, e.stage, e.direction, e.micro) == (act, what, stage, direction, micro)
        ]
        if len(found) != 1:
            raise ValueError(f"the record has {len(found)} events '{act} {what} {stage}' ({direction}, micro-batch {micro}); expected one")
        return found[0]

    def bytes_sent(self, what: What | None = None) -> int:
        """Bytes this rank sent (ring volume), of one kind of transfer or of all."""
        return sum(e.bytes for e in self.select("start", what))


@dataclass(frozen=True)
class Extra:
    """What a transfer does besides its `xtf.collectives.Work`: a leaf of its handle, for the record.

    Args:
        bytes: that it sent or will send.
        syncs: how often the host waited for the device when it was started.
    """

    bytes: int = 0
    syncs: int = 0


def storage_bytes(value: Any) -> int:
    """Bytes of the distinct storages of the tensors in a tree."""
    storages = [leaf.untyped_storage() for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


def storage_key(storage: torch.UntypedStorage) -> int:
    """Equal for tensors that share memory, as long as they live. Data pointers are not: without values, all of them are 0."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


def handle_syncs(handle: Any) -> int:
    """How often the host waited for the device when the transfer with this handle was started."""
    return sum(int(getattr(leaf, "syncs", 0)) for leaf in tree.leaves(handle))


def handle_bytes(handle: Any) -> int:
    """Bytes that a transfer's handle says it moves: the sum of ``.bytes`` over its leaves (tensors have none)."""
    return sum(int(getattr(leaf, "bytes", 0)) for leaf in tree.leaves(handle))
