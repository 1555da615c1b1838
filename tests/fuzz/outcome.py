"""What may come of a damaged input: a correct run, or one clear error. Anything else is a finding."""

from __future__ import annotations

import io
import signal
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import FrameType

from xtf import cli

SECONDS = 60
"""What one case may take; most take hundredths of a second, and machines may be shared."""


class Hang(BaseException):
    """A case that did not end."""


class Finding(AssertionError):
    """A case that ended as none may."""


@contextmanager
def bounded(seconds: int = SECONDS) -> Generator[None]:
    """Raise `Hang` in the main thread if the block takes longer."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def call(work: Callable[[], object]) -> str:
    """``"ran"``, or the message of the error that it raised, which must be a `ValueError` or an `OSError` that says something."""
    try:
        with bounded(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*passed over.*|.*cannot be used.*", RuntimeWarning)  # of xtf.checkpoint.latest
            work()
    except (UnicodeError, NotImplementedError):
        raise
    except (ValueError, OSError) as error:
        said = str(error)
        if len(said) < 20 or len(said) > 20_000:
            raise Finding(f"a message of {len(said)} characters: {said[:200]!r}") from error
        return said
    return "ran"


def command(*args: str) -> str:
    """``"ran"``, or what the command said; it must leave with 0 or 2, and say what is wrong in one message that begins with its name."""
    out, err = io.StringIO(), io.StringIO()
    with bounded(), redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*passed over.*|.*cannot be used.*", RuntimeWarning)
        try:
            code = cli.main(list(args))
            usage = False
        except SystemExit as leaving:  # options that cannot be parsed: a usage text in a box
            code, usage = leaving.code, True
    said = err.getvalue()
    if code == 0:
        return "ran"
    messages = [line for line in said.splitlines() if line.startswith("xtf: ") and len(line) > 25]
    if code != 2 or "Traceback" in said or not (messages or (usage and said.strip())):
        raise Finding(f"{' '.join(args)} left with {code} and said {said[-1000:]!r}")
    return said
