"""What is alive while something runs: a log of every storage that operations make and drop, and of who holds it."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtf import tree
from xtf.host import Buffer
from xtf.record import Event, storage_key

HOST: str = "host"
"""What buffers on the host are held as."""


class Entry(NamedTuple):
    """A line of the log.

    Args:
        what: a storage was made or dropped, or is held as a kind from now on; or an event was recorded.
        storage: its number.
        bytes: its size.
        kind: what it is held as.
        event: what was recorded.
    """

    what: Literal["made", "dropped", "held", "event"]
    storage: int = -1
    bytes: int = 0
    kind: str = ""
    event: Event | None = None


class Live(TorchDispatchMode):
    """Logs storages of one kind of device, from when an operation makes them to when nobody holds them.

    What an operation takes for itself alone is not seen.

    Args:
        device: the kind of device, as ``"meta"``.

    Attributes:
        log: what happened, in order.
    """

    def __init__(self, device: str) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.device = device
        self.log: list[Entry] = []
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._kinds: dict[int, str] = {}
        self._fixed: set[int] = set()
        self._made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # what is handed in was made before, perhaps by a rank on another thread
        given = {storage_key(leaf.untyped_storage()) for leaf in tree.leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree.leaves(out):
            if isinstance(leaf, Tensor) and storage_key(leaf.untyped_storage()) not in given:
                self._number(leaf)
        return out

    def hold(self, kind: str, value: Any, *, fixed: bool = False) -> None:
        """Say that the tensors of a tree are held as a kind; ``fixed`` for good, whoever else holds them too."""
        for tensor, on_host in tensors(value):
            number = self._number(tensor)
            wanted = HOST if on_host else kind
            if number is not None and number not in self._fixed and self._kinds.get(number) != wanted:
                self._kinds[number] = wanted
                self.log.append(Entry("held", number, kind=wanted))
                if fixed:
                    self._fixed.add(number)

    def record(self, event: Event) -> None:
        """Log an event."""
        self.log.append(Entry("event", event=event))

    def _number(self, tensor: Tensor) -> int | None:
        """That of a tensor's storage, which is new if it was not seen before; ``None`` for one that does not count."""
        if tensor.device.type != self.device:
            return None
        storage = tensor.untyped_storage()
        key, size = storage_key(storage), storage.nbytes()
        if key in self._alive:
            return self._alive[key][0]
        if not size:
            return None
        number = self._made
        self._made += 1

        def gone(_: object) -> None:
            del self._alive[key]
            self.log.append(Entry("dropped", number, size))

        self._alive[key] = number, weakref.ref(storage, gone)
        self.log.append(Entry("made", number, size))
        return number


def tensors(value: Any, on_host: bool = False) -> Iterator[tuple[Tensor, bool]]:
    """The tensors of a tree, also inside records such as a transfer's handle, and whether each is a buffer on the host."""
    for leaf in tree.leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf, on_host
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors(getattr(leaf, field.name), on_host or isinstance(leaf, Buffer))
