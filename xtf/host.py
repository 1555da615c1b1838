"""Host memory for what leaves the device for a while: reused buffers, and copies on streams of their own.

Where the device's backend has them, buffers are pinned, each direction has a stream, and nothing waits on the host: copies are ordered
by events. On the CPU a copy is a copy, so that everything above this file runs, and is tested, without a device. Tensors without values
go to buffers without values, in a pool of their own.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xtf.backends import backend_of

_ROOM = 1.25  # a free buffer serves a tensor if it is at most this much larger


def is_bytes(value: object) -> bool:
    """Whether a value is a number of bytes: an integer, or a float without a fraction, of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == value // 1


def check_host(what: str, host: object) -> None:
    """Refuse what is no `HostMemory`, and not ``None``."""
    if host is not None and not isinstance(host, HostMemory):
        raise ValueError(f"{what}(host={host!r}): expected a xtf.host.HostMemory, as HostMemory(limit=64 * 2**30), or None")


@dataclass
class Buffer:
    """Bytes on the host, and when the last copy out of or into them is done."""

    data: Tensor
    done: Any = None


@dataclass(frozen=True)
class Away:
    """A tensor that is on the host.

    Args:
        buffer: where.
        shape, dtype, device: of the tensor.
        bytes: its size.
    """

    buffer: Buffer
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    bytes: int

    def view(self) -> Tensor:
        """The copy, on the host."""
        return self.buffer.data[: self.bytes].view(self.dtype).view(self.shape)


class HostMemory:
    """A pool of host buffers.

    Args:
        limit: the most bytes it holds, in use or kept for reuse; ``None`` for no limit.

    Raises:
        ValueError: for a negative limit.

    Attributes:
        held: bytes of all buffers now.
        out, back: how many tensors went to the host and came back, so far.

    Example:
        >>> host = HostMemory()
        >>> away = host.send(torch.arange(3.0))
        >>> host.fetch(away)[0].tolist(), host.held, (host.out, host.back)
        ([0.0, 1.0, 2.0], 12, (1, 1))
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and not is_bytes(limit):
            raise ValueError(f"HostMemory(limit={limit!r}): expected a number of bytes of at least 0, or None for no limit")
        self.limit, self.held, self.out, self.back = limit, 0, 0, 0
        self._planned: HostMemory | None = None  # for tensors without values
        self._free: list[Buffer] = []
        self._lock = threading.RLock()  # what lets go may do so while this thread holds it
        self._streams: dict[tuple[torch.device, str], Any] = {}
        self._told = False

    def allocate(self, bytes: int, device: torch.device) -> Tensor:
        """A new buffer for tensors of a device: (bytes,) uint8."""
        return torch.empty(bytes, dtype=torch.uint8, pin_memory=backend_of(device).pinned)

    @property
    def planned(self) -> HostMemory:
        """What holds tensors without values: nothing is allocated, and what is in use here is not touched."""
        if self._planned is None:
            self._planned = _Planned(self.limit)
        return self._planned

    def send(self, tensor: Tensor) -> Away | None:
        """Begin to copy a tensor to the host. The caller drops it when what it needs it for is done; its memory is not reused before
        the copy has read it. ``None`` where the limit is reached; the first time, a warning says so."""
        if tensor.is_meta and not isinstance(self, _Planned):
            return self.planned.send(tensor)
        buffer = self._take(tensor.nbytes, tensor.device)
        if buffer is None:
            return None
        away = Away(buffer, tensor.shape, tensor.dtype, tensor.device, tensor.nbytes)
        if not backend_of(tensor.device).streams:
            away.view().copy_(tensor)
        else:
            stream = self._stream(tensor.device, "out")
            stream.wait_stream(torch.accelerator.current_stream(tensor.device))
            with stream:
                if buffer.done is not None:
                    stream.wait_event(buffer.done)
                away.view().copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            buffer.done = stream.record_event()
        self.out += 1
        return away

    def fetch(self, away: Away) -> tuple[Tensor, Any]:
        """Begin to bring a tensor back; its buffer is free again. Returns the tensor and what `arrive` takes."""
        if away.device.type == "meta" and not isinstance(self, _Planned):
            return self.planned.fetch(away)
        buffer = away.buffer
        if not backend_of(away.device).streams:
            tensor, done = away.view().to(away.device, copy=True), None
        else:
            stream = self._stream(away.device, "back")
            with stream:
                stream.wait_event(buffer.done)
                tensor = torch.empty(away.shape, dtype=away.dtype, device=away.device)
                tensor.copy_(away.view(), non_blocking=True)
            done = buffer.done = stream.record_event()
        with self._lock:
            self._free.append(buffer)
            self.back += 1
        return tensor, done

    def arrive(self, tensor: Tensor, done: Any) -> Tensor:
        """The tensor, for use on the current stream."""
        if done is not None:
            stream = torch.accelerator.current_stream(tensor.device)
            stream.wait_event(done)
            tensor.record_stream(stream)
        return tensor

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros on the host that stay there, for a device to `bring` and `put`. For ``"meta"``, a view on the host that takes no memory."""
        if device.type == "meta":
            return torch.zeros((), dtype=dtype).expand(*shape)
        bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            self.held += bytes
        made = self.allocate(bytes, device).zero_().view(dtype).view(*shape)
        weakref.finalize(made, self._let_go, bytes).atexit = False
        return made

    def bring(self, held: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Begin to copy what stays on the host to a device; returns the copy and what `arrive` takes."""
        with self._lock:
            self.back += 1
        if device.type == "meta":
            return torch.empty(held.shape, dtype=held.dtype, device=device), None
        if not backend_of(device).streams:
            return held.to(device, copy=True), None
        stream = self._stream(device, "back")
        stream.wait_stream(self._stream(device, "out"))
        with stream:
            return held.to(device, non_blocking=True), stream.record_event()

    def put(self, tensor: Tensor, held: Tensor | None) -> Tensor:
        """Begin to copy a tensor to the host, into ``held`` if given; `settle` before the host reads it."""
        if held is None or (backend_of(tensor.device).pinned and not held.is_pinned()):
            held = self.zeros(tensor.shape, tensor.dtype, tensor.device)
        with self._lock:
            self.out += 1
        if tensor.is_meta:
            return held
        if not backend_of(tensor.device).streams:
            return held.copy_(tensor)
        stream = self._stream(tensor.device, "out")
        stream.wait_stream(torch.accelerator.current_stream(tensor.device))
        with stream:
            held.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
        return held

    def settle(self, device: torch.device) -> None:
        """Wait until all that was put is on the host."""
        if backend_of(device).streams:
            self._stream(device, "out").synchronize()

    def _let_go(self, bytes: int) -> None:
        with self._lock:
            self.held -= bytes

    def _take(self, bytes: int, device: torch.device) -> Buffer | None:
        with self._lock:
            fits = [b for b in self._free if bytes <= b.data.numel() <= max(bytes * _ROOM, 512)]
            if fits:
                best = min(fits, key=lambda b: b.data.numel())
                self._free = [b for b in self._free if b is not best]
                return best
            while self._free and self.limit is not None and self.held + bytes > self.limit:
                self.held -= self._free.pop(0).data.numel()
            if self.limit is not None and self.held + bytes > self.limit:
                if not self._told:
                    warnings.warn(
                        f"host memory: {bytes:,} bytes more than the {self.held:,} held would pass the limit of {self.limit:,}; what does "
                        "not fit stays on the device",
                        stacklevel=2,
                    )
                self._told = True
                return None
            self.held += bytes
        return Buffer(self.allocate(bytes, device))

    def _stream(self, device: torch.device, direction: str) -> Any:
        key = (device, direction)
        if key not in self._streams:
            self._streams[key] = torch.Stream(device)
        return self._streams[key]


class _Planned(HostMemory):
    """Buffers without values. Nothing warns: what does not fit is only asked about."""

    def __init__(self, limit: int | None) -> None:
        super().__init__(limit)
        self._told = True

    def allocate(self, bytes: int, device: torch.device) -> Tensor:
        return torch.empty(bytes, dtype=torch.uint8, device="meta")
