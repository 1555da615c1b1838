"""``xtf train --fit``: as few micro-batches as a device has memory for."""

from __future__ import annotations

import dataclasses
import math
import re

import torch

from xtf.backends import backend_of
from xtf.batch import Batch
from xtf.memory import Timeline, rehearse
from xtf.memory.fit import too_small
from xtf.run.folder import Launch
from xtf.run.memory import available_memory
from xtf.run.ranks import agree
from xtf.run.recipe import Recipe
from xtf.run.standard import default_transforms

_MARGIN = 0.9  # of what is free: kernels and the allocator take what no count sees
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def micro_batches_of(recipe: Recipe) -> tuple[int, int]:
    """Tokens of a micro-batch of a rank, and how many there are in a step."""
    rows, ids = rows_of_rank(recipe), torch.int64
    whole = torch.empty(rows, recipe.data.seq, dtype=ids, device="meta")
    micros = recipe.step.split({"input_ids": whole, "labels": whole})
    return micros[0]["input_ids"].numel(), len(micros)


def rows_of_rank(recipe: Recipe) -> int:
    """Rows of a batch that a rank gets."""
    axis = recipe.step.row_axis
    return -(-recipe.data.rows // (axis.size if axis is not None else 1))


def fitted(launch: Launch, recipe: Recipe, budget: str | None) -> Launch:
    """A launch of the built-in recipe whose steps are cut into as few micro-batches as fit.

    A rank's rows of a step stay what they are, and so do the tokens of an update: ``transforms`` gets an ``accumulate``.

    Args:
        launch: of the built-in recipe.
        recipe: what it makes.
        budget: a size as a text (`parse_bytes`); ``None`` for nine tenths of what this rank's device has free. The least of the ranks'
            counts.

    Raises:
        ValueError: if not even a micro-batch of one row fits; it says what takes how much. If ``transforms`` has an ``accumulate``.
    """
    given = launch.settings["transforms"]
    names = [name.strip() for name in (default_transforms(recipe.mesh) if given is None else given).split(",") if name.strip()]
    for name in names:
        if name.partition("=")[0].strip() == "accumulate":
            raise ValueError(f"--fit chooses accumulate, but --transforms has {name}: leave out one of them")
    step, rows, seq = recipe.step, rows_of_rank(recipe), recipe.data.seq
    room = free_bytes(step.device) if budget is None else parse_bytes(budget)
    bare = dataclasses.replace(step, split=_as_it_is)

    def needs(number: int) -> tuple[Timeline, int]:
        """The peak with this many micro-batches. From the third on each adds the same: its constants and statistics."""
        tokens = -(-rows // number) * seq
        line = rehearse(bare, tokens, micro_batches=min(number, 3))
        peak = line.peak.peak
        if number > 3:
            peak += (number - 3) * (peak - rehearse(bare, tokens, micro_batches=2).peak.peak)
        return line, peak

    low, high = 0, 1  # the first does not fit, the second does, once found
    while needs(high)[1] > room:
        if high == rows:
            line, peak = needs(rows)
            raise ValueError(f"--fit: {too_small(step, line, room, peak)}")
        low, high = high, min(2 * high, rows)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if needs(middle)[1] <= room else (middle, high)
    number = agree(recipe.mesh, high)
    chosen = ",".join([*names, f"accumulate={number}"] if number > 1 else names)
    return dataclasses.replace(launch, settings={**launch.settings, "transforms": chosen})


def _as_it_is(batch: Batch) -> tuple[Batch, ...]:
    return (batch,)


def free_bytes(device: torch.device) -> int:
    """Nine tenths of what a device has free: on a GPU of its memory (never run on hardware), on the CPU of the machine's.

    Raises:
        ValueError: where the system does not say.
    """
    memory = backend_of(device).memory
    free = available_memory() if memory is None else memory.free(device)
    if free is None:
        raise ValueError("--fit: this system does not say how much memory is free; give --budget, as --budget 8GB")
    return int(_MARGIN * free)


def parse_bytes(text: str) -> int:
    """A size as people write it, with its unit: a bare number would be one of bytes, which nobody means.

    Raises:
        ValueError: for what is none.

    Example:
        >>> parse_bytes("1.5GB"), parse_bytes("80 GiB"), parse_bytes("1000 B")
        (1500000000, 85899345920, 1000)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = float(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0
    if not 1 <= size < math.inf:
        raise ValueError(f"{text!r} is no size: expected a number with a unit, as 20GB, 80GiB or 500MB")
    return round(size)
