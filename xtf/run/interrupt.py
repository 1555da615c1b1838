"""Signals between two steps, not within one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
"""The signals that ask for an end; the exit code is 128 and the signal's number."""


class Interrupted(KeyboardInterrupt):
    """A run that a signal stopped, with what it left.

    Args:
        folder: the run's folder; ``None`` if it was not made yet.
        step: how many steps were done.
        total: how many there should have been.
        saved: the step whose whole state is saved; ``None`` for none.
        signal: the number of the signal.
    """

    def __init__(self, folder: Path | None, step: int, total: int, saved: int | None = None, signal: int = signal.SIGINT) -> None:
        done = f"stopped after step {step} of {total}" if step else "stopped before the first step was done: nothing was trained"
        kept = f"; saved at step {saved}, go on with: xtf train --out {folder} --resume" if saved is not None else ""
        lost = "; no state was saved" if step and saved is None else ""
        super().__init__(done + kept + lost)
        self.folder, self.step, self.total, self.saved, self.signal = folder, step, total, saved, signal


class Interrupt:
    """The signal that asked for an end, 0 for none; see `deferred_interrupt`."""

    def __init__(self, tell: Callable[[], None], patience: float) -> None:
        self.asked = 0
        self._held = False
        self._tell = tell
        self._patience, self._since = patience, 0.0

    @contextmanager
    def held(self) -> Generator[None]:
        """A signal waits for the end of this block; a second Ctrl-C does not. An error on its way out of the block is not replaced by a
        signal: where a rank died, torchrun ends the others at once, and they have yet to say which it was."""
        self._held = True
        yield
        self._held = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        now = time.monotonic()
        if self.asked and (number != signal.SIGINT or now - self._since < self._patience):
            return
        again, self.asked, self._since = bool(self.asked), number, now
        if again or not self._held:
            raise KeyboardInterrupt
        self._tell()


@contextmanager
def deferred_interrupt(tell: Callable[[], None], *, patience: float = 0.0) -> Generator[Interrupt]:
    """Within this block, SIGINT (Ctrl-C), SIGTERM or SIGUSR1 (what Slurm's ``--signal`` sends before the time is up) in an
    `Interrupt.held` part sets ``asked`` and calls ``tell``, so that the part is finished.

    Elsewhere in the block they raise ``KeyboardInterrupt``, and so does Ctrl-C pressed again. In a thread other than the main
    one, where Python has no signal handlers, nothing changes.

    Args:
        tell: called once.
        patience: seconds after the first signal in which further ones change nothing: torchrun sends on to its ranks what the
            terminal has sent them already.
    """
    interrupt = Interrupt(tell, patience)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt.handle) for number in SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
