"""Ctrl-C between two steps, not within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A run that was stopped by Ctrl-C, with what it left.

    Args:
        folder: the run's folder; ``None`` if it was not made yet.
        step: how many steps were done.
        total: how many there should have been.
    """

    def __init__(self, folder: Path | None, step: int, total: int) -> None:
        super().__init__(f"stopped after step {step} of {total}" if step else "stopped before the first step was done: nothing was trained")
        self.folder, self.step, self.total = folder, step, total


class Interrupt:
    """Whether Ctrl-C was pressed; see `deferred_interrupt`."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.asked = False
        self._held = False
        self._tell = tell

    @contextmanager
    def held(self) -> Generator[None]:
        """Ctrl-C waits for the end of this block; a second one does not."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.asked or not self._held:
            raise KeyboardInterrupt
        self.asked = True
        self._tell()


@contextmanager
def deferred_interrupt(tell: Callable[[], None]) -> Generator[Interrupt]:
    """Within this block, Ctrl-C in an `Interrupt.held` part sets ``asked`` and calls ``tell``, so that the part is finished.

    Elsewhere in the block, and when pressed again, it raises ``KeyboardInterrupt`` as usual. In a thread other than the main
    one, where Python has no signal handlers, nothing changes.
    """
    interrupt = Interrupt(tell)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
