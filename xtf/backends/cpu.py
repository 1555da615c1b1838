"""CPUs.

Inductor has no options of ours: it generates code for the widest vectors of the machine and for torch's present number of threads, which
is what a training step wants; freezing is for parameters that do not change.
"""

from __future__ import annotations

import torch

from xtf.backends import Backend
from xtf.ops import partial_cpu
from xtf.ops.cpu import CPU


def _nothing(device: torch.device) -> None:
    """Operations are done when they return."""


def _name(device: torch.device) -> str:
    return f"{device.type}, {torch.get_num_threads()} threads"


BACKEND = Backend("cpu", ops=CPU, partial=partial_cpu.KERNELS, collectives="gloo", fused_adamw=True, synchronize=_nothing, name=_name)
