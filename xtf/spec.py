"""Parameters are described once: shape, dtype, logical axes and initial value of every leaf.

Initial values, abstract trees, placement on a mesh and the checkpoint map are all derived from `ParamSpec`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float64, Int64, Shaped
from torch import Tensor

from xtf.tree import Path

_BLOCK = 1 << 20  # elements initialised at once: bounds the int64 and float64 temporaries to a few tens of MB


@dataclass(frozen=True)
class Init:
    """How a leaf starts: ``normal`` with a standard deviation, or a ``constant``.

    Example:
        >>> Init.normal(0.02), Init.constant(1.0)
        (Init(kind='normal', value=0.02), Init(kind='constant', value=1.0))
    """

    kind: Literal["normal", "constant"]
    value: float

    @staticmethod
    def normal(std: float) -> Init:
        """Independent draws from a normal distribution of mean 0."""
        return Init("normal", std)

    @staticmethod
    def constant(value: float) -> Init:
        """The same value everywhere."""
        return Init("constant", value)


@dataclass(frozen=True)
class ParamSpec:
    """One leaf of a model's parameters.

    Args:
        shape: the whole leaf's shape, whatever its placement.
        dtype: the dtype it is stored in.
        axes: a logical name for each dim (``"vocab"``, ``"embed"``, ``"heads"``, ``"mlp"``, ``"expert"``), or ``None``.
        init: its initial value.
        trainable: ``False`` for leaves without gradient that the step itself updates (a router's bias).

    Raises:
        ValueError: if the number of axes is not the number of dims.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str | None, ...]
    init: Init
    trainable: bool = True

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"ParamSpec of shape {self.shape} needs {len(self.shape)} axes, got {self.axes}: name each dim or give None")

    @property
    def numel(self) -> int:
        """Number of elements of the whole leaf."""
        return math.prod(self.shape)

    def initial(self, seed: int, path: Path, ranges: Sequence[tuple[int, int]] | None = None) -> Shaped[Tensor, "*block"]:
        """Initial values of the block ``ranges`` (a half-open range per dim) of this leaf, or of all of it.

        Each value depends on ``seed``, ``path`` and its own index only, so every layout starts from the same
        parameters and no rank ever builds more than it keeps. A counter-based generator (splitmix64, as in Steele et
        al. 2014, "Fast splittable pseudorandom number generators") makes that possible; torch's own is sequential.

        Example:
            >>> spec = ParamSpec((4, 6), torch.float32, ("vocab", "embed"), Init.normal(1.0))
            >>> bool((spec.initial(0, "w")[2:, 1:3] == spec.initial(0, "w", [(2, 4), (1, 3)])).all())
            True
        """
        ranges = [(0, n) for n in self.shape] if ranges is None else list(ranges)
        sizes = [stop - start for start, stop in ranges]
        if self.init.kind == "constant":
            return torch.full(sizes, self.init.value, dtype=self.dtype)
        out = torch.empty(math.prod(sizes), dtype=self.dtype)
        key = int.from_bytes(hashlib.sha256(f"{seed}/{path}".encode()).digest()[:8], "little", signed=True)
        for begin in range(0, out.numel(), _BLOCK):
            index = _global_index(torch.arange(begin, min(begin + _BLOCK, out.numel())), self.shape, ranges, sizes)
            out[begin : begin + _BLOCK] = _normal(index, key).mul_(self.init.value)
        return out.view(sizes)


def _global_index(
    flat: Int64[Tensor, " n"], shape: Sequence[int], ranges: Sequence[tuple[int, int]], sizes: Sequence[int]
) -> Int64[Tensor, " n"]:
    """The index in the whole leaf of each flat index of the block."""
    if tuple(sizes) == tuple(shape):
        return flat
    index = torch.zeros_like(flat)
    stride = 1
    for size, n, (start, _) in zip(reversed(sizes), reversed(shape), reversed(ranges), strict=True):
        index += (flat % size + start) * stride
        flat = flat // size
        stride *= n
    return index


def _normal(index: Int64[Tensor, " n"], key: int) -> Float64[Tensor, " n"]:
    """Standard normal float64 values for int64 counters, by splitmix64 and the inverse error function."""
    z = index * -7046029254386353131 + key  # 0x9E3779B97F4A7C15 as a signed integer; overflow wraps, as intended
    z = (z ^ _shift(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    z = z ^ _shift(z, 31)
    uniform = (_shift(z, 11).to(torch.float64) + 0.5) * 2.0**-53
    return torch.erfinv(uniform * 2 - 1).mul_(math.sqrt(2))


def _shift(z: Int64[Tensor, " n"], bits: int) -> Int64[Tensor, " n"]:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
