"""What this machine can do: the most FLOPs of matrix products, and the most bytes that memory moves."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from xtf.backends import backend_of
from xtf.bench.clock import seconds_now
from xtf.run.flops import peak_flops

_BYTES = {"cpu": 1 << 28}  # of each of the two blocks of a copy: many times what caches hold
_ROUNDS = 12


class Machine(NamedTuple):
    """Rates.

    Args:
        flops: of matrix products, per second.
        bandwidth: bytes read and written, per second, by a copy.
        name: of the device.
    """

    flops: float
    bandwidth: float
    name: str


def measure_machine(device: str, dtype: str) -> Machine:
    """Measure with torch's present threads, in about a second."""
    size = _BYTES.get(device, 1 << 30)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(_ROUNDS):
        began = seconds_now(device)
        target.copy_(source)
        best = max(best, 2 * size / (seconds_now(device) - began))
        time.sleep(0.01)
    name = backend_of(device).name(torch.device(device))
    return Machine(peak_flops(device, getattr(torch, dtype)), best, name)
