"""A state as it was at one moment, while training goes on: references where nothing is overwritten, copies on the host where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from xtf.checkpoint.folder import CheckpointError
from xtf.checkpoint.shard_file import Block


@dataclass(frozen=True)
class Snapshot:
    """Blocks that keep their values until they are written.

    Args:
        blocks: on the host.
        versions: for blocks that are the state's own tensors, torch's count of writes to each when the snapshot was taken.
        events: what copies from devices end with.
    """

    blocks: list[Block]
    versions: dict[str, int]
    events: list[Any]

    def settle(self) -> None:
        """Wait until the copies are there."""
        for event in self.events:
            event.synchronize()

    def check(self) -> None:
        """Raise a `CheckpointError` if a tensor that was not copied has been written to since."""
        changed = [block.name for block in self.blocks if block.name in self.versions and version(block.value) != self.versions[block.name]]
        if changed:
            raise CheckpointError(
                f"{len(changed)} leaves of the state were overwritten while they were saved, the first is {changed[0]}: give StateSaver "
                "the step that trains, compiled with donate=True if it overwrites, or wait() before they are changed"
            )


class HostCopies:
    """Host memory for one snapshot at a time, kept for the next. What is copied from an accelerator is pinned (**never run on
    hardware**).

    Attributes:
        held: bytes of the buffers.

    Example:
        >>> copies, value = HostCopies(), torch.ones(3)
        >>> block = Block("params.w", (3,), (0,), value)
        >>> kept, same = copies.take([block], copy=True), copies.take([block], copy=False)
        >>> _ = value.zero_()
        >>> kept.blocks[0].value.tolist(), same.blocks[0].value.data_ptr() == value.data_ptr()
        ([1.0, 1.0, 1.0], True)
        >>> same.check()
        Traceback (most recent call last):
        ...
        xtf.checkpoint.folder.CheckpointError: 1 leaves of the state were overwritten while they were saved, the first is params.w: ...
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def held(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take(self, blocks: Sequence[Block], *, copy: bool) -> Snapshot:
        """Blocks as they are now. The snapshot before this one is no longer needed.

        Args:
            blocks: of any device.
            copy: whether blocks on the host are copied; those on other devices always are.
        """
        taken, buffers = list[Block](), dict[str, Tensor]()
        devices = {block.value.device for block in blocks if block.value.device.type != "cpu"}
        for block in blocks:
            value = block.value.detach()
            if copy or value.device.type != "cpu":
                buffer = self._buffers.pop(block.name, None)
                if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                    pinned = value.device.type != "cpu"
                    buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
                buffers[block.name] = buffer.copy_(value, non_blocking=True)  # before whatever its device is given to do later
                value = buffer
            taken.append(replace(block, value=value))
        self._buffers = buffers
        versions = {block.name: version(block.value) for block in taken if block.name not in buffers}
        return Snapshot(taken, versions, [torch.accelerator.current_stream(device).record_event() for device in devices])


def version(value: Tensor) -> int:
    """How often a tensor's memory was written to by torch, through any view; 0 where torch does not count."""
    return 0 if value.is_inference() else value._version  # pyright: ignore[reportPrivateUsage]
