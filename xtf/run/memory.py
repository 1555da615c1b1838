"""Whether a model can be trained in this machine's memory, before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path

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
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container() -> int | None:
    """The limit of a container (cgroup v2) less what it uses."""
    try:
        limit, used = (Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(int(limit) - int(used), 0)


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
