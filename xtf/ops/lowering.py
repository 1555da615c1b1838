"""Which ops a device runs best."""

from __future__ import annotations

from collections.abc import Callable

import torch

from xtf.ops import Ops
from xtf.ops.reference import REFERENCE


def best(device: torch.device) -> Ops:
    """The best ops for a device; the reference where there is nothing better.

    Example:
        >>> best(torch.device("cpu")).name
        'cpu'
    """
    return _BY_DEVICE.get(device.type, lambda: REFERENCE)()


def _cpu() -> Ops:
    from xtf.ops.cpu import CPU

    return CPU


def _cuda() -> Ops:
    from xtf.ops.cuda import CUDA

    return CUDA


_BY_DEVICE: dict[str, Callable[[], Ops]] = {"cpu": _cpu, "cuda": _cuda}  # a backend is imported only where it is used
