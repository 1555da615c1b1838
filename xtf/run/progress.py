"""The progress of a run in the terminal: a live line where there is one, plain lines where output goes to a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


class Progress:
    """Step of total, loss, tokens per second and time left.

    In a terminal it is one live line, redrawn in place; elsewhere a plain line every ``every`` seconds, for the first and
    for the last step, without control characters. On every rank but 0 it is silent.

    Args:
        total: steps of the whole run.
        done: steps that were done before (a resumed run).
        console: where to write; by default standard error, so that standard output keeps the results.
        rank: this process's rank.
        every: seconds between plain lines.
        clock: seconds from any origin; for tests.

    Example:
        >>> with Progress(2, console=Console(width=80)) as progress:
        ...     progress.update(2, loss=1.5, tokens=100)
        step 2/2   loss 1.500
    """

    def __init__(
        self,
        total: int,
        *,
        done: int = 0,
        console: Console | None = None,
        rank: int = 0,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if total < 1 or not 0 <= done <= total:
            raise ValueError(f"total is {total} and done is {done}: expected at least 1 step, of which 0 to total are done")
        self._total, self._every, self._clock = total, every, clock
        self._console = (console or Console(stderr=True)) if rank == 0 else Console(quiet=True)
        self._live = Live(console=self._console, auto_refresh=False) if rank == 0 and self._console.is_terminal else None
        self._started = self._printed = self._paused = clock()
        self._step = self._begin = done
        self._loss: float | None = None
        self._seconds: float | None = None  # of a step, an exponential average: the first step also compiles and is left out
        self._rate: float | None = None  # tokens per second

    @property
    def console(self) -> Console:
        """Where it writes; quiet on every rank but 0."""
        return self._console

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self._step

    @property
    def tokens_per_second(self) -> float | None:
        """As shown: an exponential average over about 20 steps; ``None`` until two steps were made."""
        return self._rate

    def update(self, step: int, *, loss: float | None, tokens: int) -> None:
        """Tell that ``step`` steps are done; ``tokens`` is how many this last update learned from (supervised ones), over all
        ranks."""
        now = self._clock()
        made = step - self._step
        if self._step > self._begin and made > 0:
            seconds = max(now - self._started, 1e-9) / made
            self._seconds = seconds if self._seconds is None else 0.95 * self._seconds + 0.05 * seconds
            rate = tokens / (seconds * made)
            self._rate = rate if self._rate is None else 1 / (0.95 / self._rate + 0.05 / rate) if rate > 0 else self._rate
        self._started, self._step, self._loss = now, step, loss
        if self._live is not None:
            self._live.update(self._row(), refresh=True)
        elif made and (step == self._total or self._begin == step - made or now - self._printed >= self._every):
            self._printed = now
            self.message("   ".join(self._words()))

    def message(self, text: str | Text) -> None:
        """A line of its own, above the live one."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def pause(self) -> None:
        """Time until `resume` counts for no step: an evaluation, a checkpoint."""
        self._paused = self._clock()

    def resume(self) -> None:
        """Ends what `pause` began."""
        self._started += self._clock() - self._paused

    def _words(self) -> list[str]:
        words = [f"step {self._step}/{self._total}"]
        if self._loss is not None:
            words.append(f"loss {self._loss:.3f}")
        if self._rate is not None and self._seconds is not None:
            words += [f"{self._rate:,.0f} tokens/s", f"{_minutes(self._seconds * (self._total - self._step))} left"]
        return words

    def _row(self) -> Table:
        step, *rest = self._words()
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(step, style="bold"),
            ProgressBar(total=self._total, completed=self._step, width=24),
            *(Text(word, style=style) for word, style in zip(rest, ("cyan", "green", "dim"), strict=False)),
        )
        return row

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
            self._live.update(self._row(), refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()


def _minutes(seconds: float) -> str:
    """Whole seconds as ``h:mm:ss`` or ``m:ss``.

    Example:
        >>> _minutes(59.6), _minutes(3725)
        ('1:00', '1:02:05')
    """
    total = round(seconds)
    hours, rest = divmod(total, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
