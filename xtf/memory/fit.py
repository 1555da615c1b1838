"""The largest micro-batch that fits a device, from the timeline of its memory."""

from __future__ import annotations

import math

from xtf.memory.rehearsal import MOST_MICRO_BATCHES, MOST_TOKENS, check_step, check_whole, rehearse
from xtf.memory.timeline import Timeline
from xtf.step import TrainStep

MOST = 1 << 22
"""Tokens of a micro-batch that are tried at most, unless more are asked for: a rehearsal makes its positions and tables."""


def fit_tokens(step: TrainStep, bytes: int, *, multiple: int = 64, micro_batches: int = 1, most: int = MOST) -> int:
    """The largest micro-batch of this rank, in tokens, whose training step fits.

    Exact by the count of `xtf.memory.rehearse`: the answer fits, and ``multiple`` tokens more do not. Memory is close to linear in
    tokens, so a few rehearsals find it.

    Args:
        step: the finished step, with all its transforms.
        bytes: what the step may take on the device at its peak, parameters and optimizer state among it.
        multiple: the answer is a multiple of this, as of the length of a row.
        micro_batches: how many this rank makes of its batch; several take more, as gradients are there from the first on.
        most: tokens that are never passed, as those of the whole batch of this rank.

    Returns:
        Tokens; the largest multiple up to ``most`` where that fits.

    Raises:
        ValueError: for what is no step, an argument that is no number of at least 1 (whole, but for ``bytes``), ``most`` below
            ``multiple``, or if ``multiple`` tokens do not fit: it says what takes how much.

    Example:
        >>> import xtf
        >>> from xtf.memory import rehearse
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> tokens = fit_tokens(step, 200 * 10**6)
        >>> rehearse(step, tokens).peak.peak <= 200 * 10**6 < rehearse(step, tokens + 64).peak.peak
        True
    """
    check_step("fit_tokens", step)
    if not _is_size(bytes):
        raise ValueError(f"fit_tokens: bytes is {bytes!r}, expected a number of at least 1, as 20 * 10**9 for 20 GB")
    check_whole("fit_tokens: multiple", multiple, MOST_TOKENS, "the answer is a multiple of it, as of the length of a row")
    check_whole("fit_tokens: micro_batches", micro_batches, MOST_MICRO_BATCHES, "it is how many this rank makes of its batch")
    check_whole("fit_tokens: most", most, MOST_TOKENS, "the answer is never more")
    if most < multiple:
        raise ValueError(f"fit_tokens: most is {most}, expected at least one multiple of {multiple}")
    known: dict[int, int] = {}

    def peak(count: int) -> int:
        """Of a number of multiples."""
        if count not in known:
            known[count] = rehearse(step, count * multiple, micro_batches=micro_batches).peak.peak
        return known[count]

    if peak(1) > bytes:
        line = rehearse(step, multiple, micro_batches=micro_batches)
        raise ValueError(too_small(step, line, bytes, peak(1)))
    low, high, end = 1, 2, most // multiple
    while high <= end and peak(high) <= bytes:  # grow along the line through the last two
        low, high = high, min(max(_guess(low, peak(low), high, peak(high), bytes) + 1, high + 1), 16 * high, max(end, high + 1))
    if high > end:  # the largest that is allowed fits
        return low * multiple
    while high - low > 1:
        guess = min(max(_guess(low, peak(low), high, peak(high), bytes), low + 1), high - 1)
        for count in (guess, guess + 1, None):  # where memory is linear, the guess fits and the next does not
            count = (low + high) // 2 if count is None else count
            if low < count < high:
                low, high = (count, high) if peak(count) <= bytes else (low, count)
    return low * multiple


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < math.inf


def _guess(first: int, at_first: int, second: int, at_second: int, bytes: int) -> int:
    """Where a line through two points reaches ``bytes``; halfway between them where it does not rise."""
    slope = (at_second - at_first) / (second - first) if second > first else 0.0
    return int(first + (bytes - at_first) / slope) if slope > 0 else (first + second) // 2


_REMEDIES = {
    "optimizer": "swap_optimizer",
    "activations": "swap_activations",
    "logits": "chunk_loss",
    "parameters": "shard over more ranks",
    "gradients": "shard over more ranks",
}
"""What makes a kind smaller."""


def too_small(step: TrainStep, line: Timeline, bytes: int, peak: int) -> str:
    """What a micro-batch takes that does not fit, the largest first, and what the step does not do yet against that."""
    parts = [(kind, size) for kind, size in sorted(line.peak.most.items(), key=lambda item: -item[1]) if size]
    said = ", ".join(f"{kind} {size_text(size)}" for kind, size in parts)
    done = {name.partition("(")[0] for name in step.stack}
    advice = dict.fromkeys(_REMEDIES[kind] for kind, size in parts if kind in _REMEDIES and size >= 0.05 * line.peak.peak)
    advice = [*(name for name in advice if name not in done), *(() if step.compilation.donate else ("donate",)), "take fewer tokens"]
    return (
        f"a micro-batch of {line.tokens:,} tokens does not fit {size_text(bytes)}: the step takes {size_text(peak)} at its peak "
        f"({line.peak}): {said}. Try, in this order: {', '.join(advice)}"
    )


def size_text(bytes: float) -> str:
    """A size in its unit.

    Example:
        >>> size_text(2 * 10**9), size_text(61_440_000), size_text(500)
        ('2.0 GB', '61.4 MB', '500 bytes')
    """
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if bytes >= scale:
            return f"{bytes / scale:,.1f} {unit}"
    return f"{bytes:g} bytes"
