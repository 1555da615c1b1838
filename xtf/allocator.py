"""Memory of a CPU process that is freed and taken again in every step."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt, from malloc.h
_NEVER, _LARGEST = -1, 32 << 20  # no trimming; glibc takes no larger threshold


def keep_freed_memory() -> bool:
    """Let the process keep the memory that tensors on the CPU free, for the next ones, instead of giving it back to the system.

    A training step frees and takes the same memory again and again. By its defaults glibc gives most of it back and asks for it anew, and
    the system must clear each page before a step may touch it: some 10,000 page faults for each step of a model of 15 million
    parameters, a twentieth of its time. The most memory that the process holds does not change, but it goes on holding it. Blocks of more
    than 32 MiB always come from the system.

    It is a setting of the whole process, so xtf sets it in the programs that it is the whole of (``xtf train``, ``xtf bench``) and
    leaves it to your scripts.

    Returns:
        Whether it was set: only on Linux with glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST))
