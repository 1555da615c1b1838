"""Time and memory of a process, on any device."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from pathlib import Path

import torch

from xtf.backends import backend_of


def seconds_now(device: str) -> float:
    """The time when all that was asked of the device is done."""
    backend_of(device).synchronize(torch.device(device))
    return time.perf_counter()


def reset_peak(device: str) -> None:
    """Begin to watch for a new peak of memory. On a CPU only Linux can; elsewhere the peak stays that of the whole process."""
    memory = backend_of(device).memory
    if memory is not None:
        memory.reset(torch.device(device))
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: str) -> int:
    """The most bytes since `reset_peak`: allocated on an accelerator, resident on a CPU."""
    memory = backend_of(device).memory
    if memory is not None:
        return memory.most(torch.device(device))
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
