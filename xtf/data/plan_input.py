"""What planners of batches are given, checked."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from xtf.data.cost import CostFunction, Floats
from xtf.data.plan import Ints, Pieces

TooLong = Literal["error", "drop", "split"]
"""What happens to a document longer than a pack."""


def generator(seed: int, use: str) -> np.random.Generator:
    """Random numbers of a seed, for one use."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"seed is {seed!r}, expected an integer")
    return np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(f"{use}/{int(seed)}".encode()).digest()[:16])))


def check_layout(max_tokens: int, data_ranks: int, accumulate: int) -> None:
    """Raise for sizes that no plan has."""
    for name, value in (("max_tokens", max_tokens), ("data_ranks", data_ranks), ("accumulate", accumulate)):
        check_count(name, value)


def check_count(name: str, value: int) -> None:
    """Raise for what is no integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name} is {value!r}, expected an integer of at least 1")


def checked_cost(cost: CostFunction) -> CostFunction:
    """The cost, which raises where it does not give one finite number above 0 for each document."""
    if not callable(cost):
        raise ValueError(f"cost is {cost!r}, expected a function (lengths) -> costs, as Cost.attention() or document_cost(model)")

    def checked(lengths: Ints) -> Floats:
        each = np.asarray(cost(lengths), np.float64)
        if each.shape != lengths.shape:
            raise ValueError(f"cost gave the shape {each.shape} for {lengths.shape} lengths, expected one cost for each document")
        wrong = np.flatnonzero(~np.isfinite(each) | (each < 0) | ((each == 0) & (lengths > 0)))
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(f"cost gave {each[at]} for a document of {int(lengths[at])} tokens, expected a finite number above 0")
        return each

    return checked


def cut(lengths: Sequence[int] | npt.NDArray[Any], max_tokens: int, too_long: TooLong, *, first: int = 0) -> tuple[Pieces, Ints]:
    """Documents of checked lengths, numbered from ``first``, as pieces, none longer than a pack; and the numbers of those dropped."""
    check_too_long(too_long)
    given = np.asarray(lengths)
    if given.ndim != 1:
        raise ValueError(f"lengths has the shape {given.shape}, expected (documents,): the tokens of each document")
    if not len(given):
        raise ValueError("lengths is empty: there is no document to plan; check the data source")
    if not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"lengths is of {given.dtype}, expected integers: the tokens of each document")
    short = np.flatnonzero(given < 1)
    if len(short):
        raise ValueError(
            f"document {first + int(short[0])} has the length {int(given[short[0]])} ({len(short)} under 1): "
            "leave out documents without tokens before planning"
        )
    tokens = given.astype(np.int64)
    numbers = np.arange(first, first + len(tokens), dtype=np.int64)
    long = tokens > max_tokens
    if too_long == "error" and long.any():
        at = int(np.argmax(long))
        raise ValueError(
            f"document {first + at} has {int(tokens[at])} tokens ({int(long.sum())} above max_tokens = {max_tokens}): "
            "give a larger max_tokens, or too_long='drop' or 'split'"
        )
    if too_long == "drop":
        kept = numbers[~long]
        return Pieces(kept, np.zeros(len(kept), np.int64), tokens[~long]), numbers[long]
    counts = -(-tokens // max_tokens)
    owner = np.repeat(np.arange(len(tokens)), counts)
    starts = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * max_tokens
    return Pieces(numbers[owner], starts, np.minimum(tokens[owner], starts + max_tokens)), np.zeros(0, np.int64)


def check_too_long(too_long: str) -> None:
    """Raise for what cannot happen to a long document."""
    if too_long not in ("error", "drop", "split"):
        raise ValueError(f"too_long is {too_long!r}, expected 'error', 'drop' or 'split'")
