"""A state as it was at one moment, while training goes on: references where nothing is overwritten, copies on the host where it is.

Copies are made while the next step computes. Only its update overwrites the state, and waits until all is copied (Maurya et al. 2024,
"DataStates-LLM": lazy copies between updates).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xtf.checkpoint.folder import CheckpointError
from xtf.checkpoint.shard_file import Block


class Snapshot:
    """Blocks that keep their values until they are written.

    Args:
        blocks: of any device.
        copy: whether blocks on the host are copied; those on other devices always are.
        buffers: host memory by the name of a block; what is missing or of another shape is allocated. What is copied from an
            accelerator is pinned, and copied on a stream of its own (**never run on hardware**).

    Attributes:
        waited: seconds for which an update waited.

    Example:
        >>> value, buffers = torch.ones(3), {}
        >>> snapshot = Snapshot([Block("params.w", (3,), (0,), value)], copy=True, buffers=buffers)
        >>> snapshot.fill()[0].value is buffers["params.w"]
        True
        >>> same = Snapshot([Block("params.w", (3,), (0,), value)], copy=False, buffers={})
        >>> same.fill()[0].value is value
        True
        >>> _ = value.zero_()
        >>> buffers["params.w"].tolist()
        [1.0, 1.0, 1.0]
        >>> same.check()
        Traceback (most recent call last):
        ...
        xtf.checkpoint.folder.CheckpointError: 1 leaves of the state were overwritten while they were saved, the first is params.w: ...
    """

    def __init__(self, blocks: Sequence[Block], *, copy: bool, buffers: dict[str, Tensor]) -> None:
        self._blocks, self._copy, self._buffers = list(blocks), copy, buffers
        self._versions = [_version(block.value) for block in blocks]
        self._read, self._events = threading.Event(), dict[torch.device, Any]()
        devices = {block.value.device for block in blocks if block.value.device.type != "cpu"}
        self._ready = {device: torch.accelerator.current_stream(device).record_event() for device in devices}
        self.waited = 0.0

    def fill(self) -> list[Block]:
        """Copy what is to be copied; the blocks on the host. Called once, by the thread that writes them.

        Raises:
            CheckpointError: as `check`.
        """
        taken = list[Block]()
        try:
            streams = {device: torch.Stream(device) for device in self._ready}
            for device, stream in streams.items():
                stream.wait_event(self._ready[device])
            for block in self._blocks:
                value = block.value.detach()
                if value.device in streams:
                    with streams[value.device]:
                        taken.append(replace(block, value=copy_to(self._buffer(block.name, value), value)))
                        value.record_stream(streams[value.device])
                else:
                    taken.append(replace(block, value=copy_to(self._buffer(block.name, value), value)) if self._copy else block)
            self._events = {device: stream.record_event() for device, stream in streams.items()}
        finally:
            self._read.set()
        for event in self._events.values():
            event.synchronize()
        if self._copy:
            self.check()
            self._blocks = []  # the memory is free
        return taken

    def before_overwriting(self) -> None:
        """Wait until all that is copied has been read."""
        began = time.perf_counter()
        self._read.wait()
        self.waited += time.perf_counter() - began
        for device, event in self._events.items():
            torch.accelerator.current_stream(device).wait_event(event)

    def drop(self) -> None:
        """Let go of the state."""
        self._blocks = []

    def check(self) -> None:
        """Raise a `CheckpointError` if a tensor of the state has been written to before it was saved."""
        pairs = zip(self._blocks, self._versions, strict=False)
        changed = [block.name for block, version in pairs if _version(block.value) != version]
        if changed:
            raise CheckpointError(
                f"{len(changed)} leaves of the state were overwritten while they were saved, the first is {changed[0]}: give StateSaver "
                "the step that trains, compiled with donate=True if it overwrites, or wait() before they are changed"
            )

    def _buffer(self, name: str, value: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            self._buffers[name] = buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.device.type != "cpu")
        return buffer


def copy_to(buffer: Tensor, value: Tensor) -> Tensor:
    return buffer.copy_(value, non_blocking=True)


def _version(value: Tensor) -> int:
    """How often a tensor's memory was written to by torch, through any view; 0 where torch does not count."""
    return 0 if value.is_inference() else value._version  # pyright: ignore[reportPrivateUsage]
