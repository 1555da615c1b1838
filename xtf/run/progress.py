"""The progress of a run in the terminal: a live line where there is one, plain lines where output goes to a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BAR = (8, 24)  # columns of the bar: where there is no room for the first number it is left out


class _Word(NamedTuple):
    """A part of the line: what it says, its style, and which goes first where the line is too short: the highest number."""

    text: str
    style: str
    drop: int = 0


class Progress:
    """Step of total, loss, tokens per second, utilisation, memory and time left.

    In a terminal it is one live line, redrawn in place; elsewhere a plain line every ``every`` seconds, for the first and
    for the last step, without control characters. Where the line would be wider than the console, the bar is left out, then
    memory, utilisation, the held-out loss, the rate, and the time left. On every rank but 0 it is silent.

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
        self._held_out: float | None = None
        self._mfu: float | None = None
        self._memory = 0

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

    @property
    def seconds_per_step(self) -> float | None:
        """As used for the time left: an exponential average over about 20 steps; ``None`` until two steps were made."""
        return self._seconds

    def update(self, step: int, *, loss: float | None, tokens: int, mfu: float | None = None, memory: int | None = None) -> None:
        """Tell that ``step`` steps are done.

        Args:
            step: of the whole run, the steps that were done before included.
            loss: of this update, in nats per token.
            tokens: how many this last update learned from (supervised ones), over all ranks.
            mfu: model FLOPs utilisation of this update, 0 to 1; averaged like the rate.
            memory: bytes, as `xtf.run.memory.used_memory` counts them; 0 for not known.
        """
        now = self._clock()
        made = step - self._step
        if self._step > self._begin and made > 0:
            seconds = max(now - self._started, 1e-9) / made
            self._seconds = seconds if self._seconds is None else 0.95 * self._seconds + 0.05 * seconds
            rate = tokens / (seconds * made)
            self._rate = rate if self._rate is None else 1 / (0.95 / self._rate + 0.05 / rate) if rate > 0 else self._rate
            if mfu is not None:
                self._mfu = mfu if self._mfu is None else 0.95 * self._mfu + 0.05 * mfu
        self._started, self._step, self._loss = now, step, loss
        self._memory = memory or self._memory
        if self._live is not None:
            self._live.update(self._row(), refresh=True)
        elif made and (step == self._total or self._begin == step - made or now - self._printed >= self._every):
            self._printed = now
            words = self._fitting(self._words())
            self.message(_joined(words, gap=3 if len(_joined(words)) <= self._console.width else 2))

    def held_out(self, loss: float) -> None:
        """Show the loss on held-out data from now on; where the line is not live, also in a line of its own now."""
        self._held_out = loss
        if self._live is not None:
            self._live.update(self._row(), refresh=True)
        else:
            self.message(_joined(self._words()[:1], f"held-out loss {loss:.3f}"))

    def message(self, text: str | Text) -> None:
        """A line of its own, above the live one."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def pause(self) -> None:
        """Time until `resume` counts for no step: an evaluation, a checkpoint."""
        self._paused = self._clock()

    def resume(self) -> None:
        """Ends what `pause` began."""
        self._started += self._clock() - self._paused

    def _words(self) -> list[_Word]:
        words = [_Word(f"step {self._step}/{self._total}", "bold")]
        if self._loss is not None:
            words.append(_Word(f"loss {self._loss:.3f}", "cyan"))
        if self._held_out is not None:
            words.append(_Word(f"held-out {self._held_out:.3f}", "cyan", 3))
        if self._rate is not None:
            words.append(_Word(f"{self._rate:,.0f} tokens/s", "green", 2))
        if self._mfu is not None:
            words.append(_Word(f"MFU {100 * self._mfu:.{0 if self._mfu >= 0.1 else 1}f}%", "green", 4))
        if self._memory:
            words.append(_Word(_gigabytes(self._memory), "magenta", 5))
        if self._seconds is not None:
            words.append(_Word(f"{_minutes(self._seconds * (self._total - self._step))} left", "dim", 1))
        return words

    def _fitting(self, words: list[_Word]) -> list[_Word]:
        """What fits into one line of the console, with a gap of 2 between words."""
        while len(_joined(words, gap=2)) > self._console.width and max(word.drop for word in words):
            words.remove(max(words, key=lambda word: word.drop))
        return words

    def _row(self) -> Text | Table:
        words = self._fitting(self._words())
        left = self._console.width - len(_joined(words, gap=2)) - 2
        texts = [Text(word.text, style=word.style, no_wrap=True) for word in words]
        if left < _BAR[0]:
            return Text("  ", no_wrap=True, overflow="ellipsis").join(texts)
        row = Table.grid(padding=(0, 2))
        row.add_row(texts[0], ProgressBar(total=self._total, completed=self._step, width=min(left, _BAR[1])), *texts[1:])
        return row

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
            self._live.update(self._row(), refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()


def _joined(words: Sequence[_Word], *more: str, gap: int = 3) -> str:
    return (" " * gap).join((*(word.text for word in words), *more))


def _gigabytes(nbytes: int) -> str:
    """Bytes in three figures.

    Example:
        >>> _gigabytes(1_234_000_000), _gigabytes(45_600_000_000), _gigabytes(812_000_000)
        ('1.23 GB', '45.6 GB', '0.81 GB')
    """
    return f"{nbytes / 1e9:.{2 if nbytes < 1e10 else 1}f} GB"


def _minutes(seconds: float) -> str:
    """Whole seconds as ``h:mm:ss`` or ``m:ss``.

    Example:
        >>> _minutes(59.6), _minutes(3725)
        ('1:00', '1:02:05')
    """
    total = round(seconds)
    hours, rest = divmod(total, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
