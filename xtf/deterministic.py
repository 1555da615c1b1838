"""Deterministic algorithms for the time of a call: torch's switch is one for the whole process, and is set back afterwards."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The environment variable without which cuBLAS may choose another order of sums at every call."""


class _Users:
    """How many calls need the switch now (simulated ranks are threads), and what it was before the first."""

    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0
        self.before = (False, False)

    def enter(self) -> None:
        with self.lock:
            if self.count == 0:
                self.before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
                torch.use_deterministic_algorithms(True)
            self.count += 1

    def leave(self) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0:
                torch.use_deterministic_algorithms(self.before[0], warn_only=self.before[1])


_users = _Users()
_NONE = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic() -> Generator[None]:
    """Within this block torch uses deterministic algorithms only (``torch.use_deterministic_algorithms``), in all threads of the process.

    Raises:
        RuntimeError: where an operation has none on this device; it names the operation.

    Example:
        >>> with deterministic():
        ...     torch.are_deterministic_algorithms_enabled()
        True
        >>> torch.are_deterministic_algorithms_enabled()
        False
    """
    _users.enter()
    try:
        yield
    except RuntimeError as error:
        if found := _NONE.search(str(error)):
            raise RuntimeError(
                f"deterministic=True: {found[1]} has no deterministic form on this device; compile without deterministic=True, or run "
                "what uses it otherwise (another transform, or xtf.compile with another backend)"
            ) from error
        raise
    finally:
        _users.leave()


def where_asked(asked: Callable[[Any], bool]) -> Callable[[F], F]:
    """Decorates a method to run under `deterministic` if its object asks for it."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not asked(self):
                return method(self, *args, **kwargs)
            with deterministic():
                return method(self, *args, **kwargs)

        return cast(F, wrapped)

    return decorate


def check_device(device: torch.device) -> None:
    """Refuse a device whose libraries were not told to be deterministic.

    Raises:
        ValueError: on CUDA, if the environment variable `WORKSPACE` is not set to one of the two values that say so.
    """
    if device.type == "cuda" and os.environ.get(WORKSPACE) not in (":4096:8", ":16:8"):
        raise ValueError(
            f"deterministic=True on {device}: {WORKSPACE} is {os.environ.get(WORKSPACE)!r}, expected ':4096:8' or ':16:8'; set it before "
            "the process uses CUDA (xtf train --deterministic does)"
        )
