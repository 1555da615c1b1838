"""Backends: all that xtf must know of a kind of device, in one record for each kind.

The rest of xtf asks `backend_of` for a device's record and takes its functions; it names no device. CPUs and NVIDIA GPUs are run as
tuned here, Ascend NPUs from the documentation of ``torch_npu`` (**never run on hardware**), and a device that nobody registered with the
plain ops and what torch says of it. `register` adds a kind of device, or replaces one: a backend of one's own is one record
(``docs/write_a_backend.md``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xtf.ops import Ops
from xtf.ops.reference import REFERENCE

if TYPE_CHECKING:
    from xtf.zigzag import Block

__all__ = ["DEVICE_MEMORY", "Backend", "Memory", "Partial", "backend_of", "register"]


class _Serves(Protocol):
    def __call__(self, q: Tensor, v: Tensor, blocks: Sequence[Block], window: int | None) -> bool: ...


class Partial(NamedTuple):
    """Kernels of partial attention, `xtf.ops.partial`, which gives the meaning of the arguments.

    Args:
        serves: ``(q, v, blocks, window) -> bool``, whether the kernels take all these blocks at once. Where they do not, they are asked
            for one block at a time, and where they do not take that, plain operations serve.
        attend: ``(q, k, v, blocks, scale) -> (rows, out, logsumexp)`` of the rows of the blocks' queries.
        attend_backward: ``(dq, dk, dv, dout, q, k, v, out, logsumexp, blocks, scale)``, adds to the first three in place.
    """

    serves: _Serves
    attend: Callable[..., tuple[slice | Tensor, Tensor, Tensor]]
    attend_backward: Callable[..., None]


class Memory(NamedTuple):
    """How a device's memory is read, in bytes, each a function of the device.

    Args:
        free: what is free of its memory.
        now: what tensors take now.
        most: the most that they took since the last ``reset``.
        reset: begin to watch for a new ``most``.
    """

    free: Callable[[torch.device], int]
    now: Callable[[torch.device], int]
    most: Callable[[torch.device], int]
    reset: Callable[[torch.device], None]


def _free(device: torch.device) -> int:
    return int(torch.accelerator.get_memory_info(device)[0])


DEVICE_MEMORY = Memory(
    _free,
    torch.accelerator.memory_allocated,
    torch.accelerator.max_memory_allocated,
    torch.accelerator.reset_peak_memory_stats,
)
"""Memory by ``torch.accelerator``, for devices whose allocator keeps these statistics."""


def _synchronize(device: torch.device) -> None:
    torch.accelerator.synchronize(device)


def _name(device: torch.device) -> str:
    named = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if named is None else str(named(device))


@dataclass(frozen=True)
class Backend:
    """A kind of device. What is left at its default is right on any device, if not fast.

    Args:
        device: the kind, as ``torch.device`` spells it: ``"cuda"``.
        ops: the kernels of attention and grouped products.
        partial: those of attention over a part of the keys (`xtf.transforms.context_parallel`); ``None`` for plain operations.
        collectives: the backend of ``torch.distributed``; ``None`` for the one that torch has for the device.
        inductor: options of ``torch.compile`` when `xtf.compile` lowers with inductor, as ``{"max_autotune": True}``.
        pinned: whether host memory can be pinned for copies to and from it.
        streams: whether copies and kernels can run side by side, by ``torch.Stream`` and ``torch.Event``; where not, copies wait.
        fused_adamw: whether torch has a fused AdamW kernel for it.
        memory: how its memory is read; ``None`` where torch keeps no statistics: the storages of tensors are counted instead.
        synchronize: wait until all that was asked of a device is done.
        name: what people call a device of the kind, as ``"NVIDIA H200"``.

    Raises:
        ValueError: for a device that is no kind, or ops that are none.

    Example:
        >>> backend_of("cpu").collectives, backend_of("meta").ops.name, backend_of("cpu").streams
        ('gloo', 'reference', False)
    """

    device: str
    ops: Ops = REFERENCE
    partial: Partial | None = None
    collectives: str | None = None
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    pinned: bool = False
    streams: bool = False
    fused_adamw: bool = False
    memory: Memory | None = None
    synchronize: Callable[[torch.device], None] = _synchronize
    name: Callable[[torch.device], str] = _name

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not self.device.isidentifier():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"Backend(device={self.device!r}): expected a kind of device without a number, as 'cuda'")
        if not isinstance(self.ops, Ops):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"Backend({self.device!r}, ops={self.ops!r}): expected xtf.ops.Ops(name, attention, grouped_mm)")


def register(backend: Backend) -> None:
    """Use a backend for its kind of device from now on, in place of the one that was there.

    Steps that were built before keep what they were built with.

    Raises:
        ValueError: for what is no `Backend`.
    """
    if not isinstance(backend, Backend):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"register({backend!r}): expected a Backend, as Backend('cuda', ops=...)")
    _REGISTERED[backend.device] = backend


def backend_of(device: torch.device | str) -> Backend:
    """The backend of a device.

    Args:
        device: a device, or a kind of device, as ``"cuda"``.

    Raises:
        ImportError: where the backend needs a package that is missing; it says which.
    """
    kind = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    found = _REGISTERED.get(kind)
    return _shipped(kind) if found is None else found


@functools.cache
def _shipped(kind: str) -> Backend:
    return import_module(f"xtf.backends.{kind}").BACKEND if kind in _SHIPPED else Backend(kind)


_SHIPPED = ("cpu", "cuda", "meta", "npu")  # a module is imported only where its device is used
_REGISTERED: dict[str, Backend] = {}
