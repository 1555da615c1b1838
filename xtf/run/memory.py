"""Memory: what there is, what is in use, and what a training step will take, before anything is allocated."""

from __future__ import annotations

import os
import sys
from pathlib import Path as FilePath

import torch
from torch import Tensor

from xtf import tree
from xtf.backends import backend_of
from xtf.memory.rehearsal import host_bytes, meta_state, on_meta, rehearse
from xtf.step import TrainStep
from xtf.tree import Tree

BYTES_PER_PARAMETER = 4 * 4
"""float32: the parameter, its gradient, and AdamW's two moments."""


def available_memory() -> int | None:
    """Bytes that can still be allocated on this machine, within the limit of a container; ``None`` where it does not say."""
    found = [_meminfo(), _container()]
    return min((n for n in found if n is not None), default=_physical())


def check_fits(parameters: int, available: int | None, name: str) -> None:
    """Refuse a model whose parameters, gradients and AdamW state do not fit.

    Args:
        parameters: how many.
        available: bytes; ``None`` for not known, which refuses nothing.
        name: what asked for it.

    Raises:
        ValueError: with what is needed and what there is.

    Example:
        >>> check_fits(8_030_261_248, 24 * 10**9, "--preset llama-3.1-8b")
        Traceback (most recent call last):
        ValueError: --preset llama-3.1-8b needs 128.5 GB for 8.03 B parameters, gradients and AdamW's state in float32, ...
    """
    needed = parameters * BYTES_PER_PARAMETER
    if available is not None and needed > available:
        raise ValueError(
            f"{name} needs {needed / 1e9:.1f} GB for {count(parameters)} parameters, gradients and AdamW's state in float32, and this "
            f"machine has {available / 1e9:.1f} GB available: take a smaller one"
        )


def used_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that this process uses: on a GPU the most that its tensors had at once so far, on the CPU, and where the device's
    allocator keeps no statistics, its resident set now.

    0 where the system does not say.

    Example:
        >>> used_memory("cpu") > 1e6
        True
    """
    device = torch.device(device)
    memory = backend_of(device).memory
    if memory is not None:
        return memory.most(device)
    try:
        return int(FilePath("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _most_resident()


def _most_resident() -> int:
    """The largest resident set so far, on systems that have no ``/proc``."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def count(parameters: int) -> str:
    """A number of parameters as people say it.

    Example:
        >>> count(8_030_261_248), count(134_515_008), count(900)
        ('8.03 B', '134.5 M', '900')
    """
    for scale, digits, sign in ((10**9, 2, "B"), (10**6, 1, "M")):
        if parameters >= scale:
            return f"{parameters / scale:.{digits}f} {sign}"
    return f"{parameters:,}"


def _meminfo() -> int | None:
    """``MemAvailable`` of Linux: free memory, and what can be freed without swapping."""
    try:
        lines = FilePath("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container() -> int | None:
    """The limit of a container (cgroup v2) less what it uses."""
    try:
        limit, used = (FilePath("/sys/fs/cgroup", name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(int(limit) - int(used), 0)


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


# What a step takes --------------------------------------------------------------------------------------------------------------


def estimate(step: TrainStep, tokens: int, *, micro_batches: int = 1) -> dict[str, int]:
    """Bytes that a training step takes on this rank, by kind, without allocating them: what `xtf.memory.rehearse` finds, in a few
    numbers.

    Args:
        step: the finished step.
        tokens: of one micro-batch of this rank, padding included.
        micro_batches: how many this rank makes of its batch; with several, gradients are there from the first on.

    Returns:
        ``parameters``, ``gradients``, ``optimizer``: exact. ``batch``: ids, positions and rotary tables of the micro-batches.
        ``activations``: the most that values, their gradients and what stages keep for their backward take at once.
        ``gathered``: the most of whole parameters, and of what collectives take and bring.
        ``logits``: what the loss stage has at once, whole or a chunk.
        ``stage``: the most that another stage makes and drops while it runs.
        ``update``: what the update takes besides, as new copies of parameters and optimizer state where the step does not donate.
        ``host``: the most in host memory.
        ``peak``: the most on the device at any moment, which is less than the sum of all: they are not there together.

    Raises:
        ValueError: for ``tokens`` or ``micro_batches`` below 1.

    Example:
        >>> import xtf
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> found = estimate(step, 1024)
        >>> found["parameters"] == 4 * step.model.param_count()[0], found["optimizer"] // found["parameters"]
        (True, 2)
    """
    line = rehearse(step, tokens, micro_batches=micro_batches)
    before = next(m for m in line.moments if m.event.what == "update")
    passes = [m for m in line.moments if m.event.direction != "update"]
    updates = line.moments[line.moments.index(before) + 1 :]
    state = meta_state(on_meta(step, step.optimizer, 1))
    return {
        "parameters": _bytes(state.params),
        "gradients": before.live["gradients"],
        "optimizer": _bytes(state.opt) - host_bytes(state),
        "batch": line.most["batch"],
        "activations": line.most["activations"],
        "gathered": line.most["communication"],
        "logits": line.most["logits"],
        "stage": max(m.most["workspace"] for m in passes),
        "update": max(m.peak for m in updates) - sum(before.live.values()),
        "host": line.most["host"],
        "peak": line.peak.peak,
    }


def _bytes(value: Tree) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(value) if isinstance(leaf, Tensor))
