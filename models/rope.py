"""Rotary position embedding (Su et al. 2021, "RoFormer") and its scalings for longer contexts.

A `Rope` says which one a model uses. `inverse_frequencies` and `attention_scaling` compute what transformers'
``ROPE_INIT_FUNCTIONS`` compute, as plain functions; `tables` makes the constants ``cos`` and ``sin`` of a packed batch.

Two kinds depend on how long the sequence is: ``dynamic`` and ``longrope``. transformers takes the largest position of the whole
batch. Here each *document* has the length that its own largest position says, so that a document is rotated in the same way
whatever it is packed with and on however many ranks. The two agree where every row is one document of the same length, but for
one thing: transformers' ``dynamic`` remembers the longest batch that it has seen, and nothing here remembers.

Dims: T tokens (packed), D head size (the argument ``dim``), half = D / 2, bounds = documents + 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from xtf.models import hf

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""The kinds of scaling that are known."""

_USED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
_NUMBERS = (
    "theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "low_freq_factor",
    "high_freq_factor",
)
_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *(name for names in _USED.values() for name in names)}
_UNSCALED = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True)
class Rope:
    """Which rotary embedding a model uses; the fields are those of transformers' ``rope_parameters``.

    Args:
        theta: base of the wavelengths, which grow from 2π to 2π × theta tokens.
        kind: one of `KINDS`.
        factor: how many times longer the context gets.
        original_max_position_embeddings: tokens of the context before scaling.
        attention_factor: factor on cos and sin; by default what the kind's paper says.
        beta_fast, beta_slow, mscale, mscale_all_dim, truncate: of ``yarn`` (Peng et al. 2023).
        low_freq_factor, high_freq_factor: of ``llama3`` (Llama 3.1).
        short_factor, long_factor: of ``longrope`` (Ding et al. 2024), one number for each pair of dims.

    Raises:
        ValueError: for an unknown kind, a missing field, or one that is no number.

    Example:
        >>> inverse_frequencies(Rope(theta=100.0), 4).tolist()
        [1.0, 0.10000000149011612]
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"rope_type {self.kind!r} is not supported; known are {', '.join(KINDS)}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None:
                hf.check_number(f"rope {name}", value)
        hf.check_flag("rope truncate", self.truncate)
        for name in ("factor", "original_max_position_embeddings"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"rope {name}={value!r}; expected a positive number")
        for name in ("short_factor", "long_factor"):
            for value in getattr(self, name) or ():
                hf.check_number(f"rope {name}", value)
        if not self.theta > 0:
            raise ValueError(f"rope_theta is {self.theta!r}; expected a positive number")
        optional = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
        needed = {*_USED[self.kind], *(("original_max_position_embeddings",) if self.kind == "dynamic" else ())} - optional
        missing = sorted(name for name in needed if getattr(self, name) is None)
        if missing:
            raise ValueError(f"rope_type {self.kind!r} needs {', '.join(missing)}: give them in rope_parameters (or rope_scaling)")

    @staticmethod
    def from_hf(config: Mapping[str, Any], max_position_embeddings: int, theta: float = 10000.0) -> Rope:
        """Read the rotary fields of a ``config.json``, in the old layout (``rope_theta``, ``rope_scaling``) or in that of
        transformers 5 (``rope_parameters``).

        Raises:
            ValueError: for a kind, a field or a layout that is not supported.
        """
        where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        stated: Any = config.get(where) or {}
        if not isinstance(stated, Mapping):
            raise ValueError(
                f'{where}={stated!r} is a {type(stated).__name__}; expected an object, as {{"rope_type": "yarn", "factor": 4.0, ...}}'
            )
        given: dict[str, Any] = dict(cast("Mapping[str, Any]", stated))
        nested = sorted(name for name, value in given.items() if isinstance(value, Mapping))
        if nested:
            raise ValueError(f"{where} differ by layer type ({', '.join(nested)}): one set for all layers is supported")
        unknown = sorted(set(given) - _KNOWN)
        if unknown:
            raise ValueError(f"{where} has unknown fields {', '.join(unknown)}; known are {', '.join(sorted(_KNOWN))}")
        partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor={partial!r} is not supported: the whole head is rotated")
        typed = given.get("rope_type") or given.get("type")
        scaling = sorted(name for name in set(given) - _UNSCALED if given[name] is not None)
        if not typed and scaling:
            raise ValueError(f"{where} gives {', '.join(scaling)} but no rope_type: add one of {', '.join(KINDS)}, or remove the rest")
        kind = str(typed or "default")
        if kind not in KINDS:
            raise ValueError(f"rope_type {kind!r} is not supported; known are {', '.join(KINDS)}")
        used = {name: given[name] for name in _USED[kind] if given.get(name) is not None}
        if kind == "dynamic":
            used["original_max_position_embeddings"] = max_position_embeddings
        elif "original_max_position_embeddings" in _USED[kind]:
            original = config.get("original_max_position_embeddings") or used.get("original_max_position_embeddings")
            used["original_max_position_embeddings"] = original or max_position_embeddings
        if kind == "longrope":
            hf.check_integer("rope original_max_position_embeddings", used["original_max_position_embeddings"], 1)
            used.setdefault("factor", max_position_embeddings / used["original_max_position_embeddings"])
        for name in ("short_factor", "long_factor"):
            if name in used:
                if not isinstance(used[name], (list, tuple)):
                    raise ValueError(f"{where} {name}={used[name]!r} is a {type(used[name]).__name__}; expected a list of numbers")
                used[name] = tuple(used[name])
        base = given.get("rope_theta") or config.get("rope_theta") or theta
        hf.check_number("rope_theta", base)
        return Rope(theta=float(base), kind=kind, **used)

    def to_hf(self) -> dict[str, Any]:
        """The ``rope_parameters`` of transformers 5."""
        out: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        for name in _USED[self.kind]:
            value = getattr(self, name)
            if value is not None and not (name == "truncate" and value):
                out[name] = list(cast("tuple[float, ...]", value)) if isinstance(value, tuple) else value
        return out


def inverse_frequencies(
    rope: Rope, dim: int, length: Int[Tensor, "*lengths"] | None = None, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*_ {dim//2}"]:
    """The angle by which each pair of dims turns per token.

    Args:
        rope: the kind and its numbers.
        dim: head size, even.
        length: tokens of the sequence, any shape, for ``dynamic`` and ``longrope``; ``None`` is a short one.
        dtype: dtype of the result and of the computation.

    Returns:
        (dim / 2,); for the kinds that depend on it, and where it is given, (*length.shape, dim / 2).
    """
    device = None if length is None else length.device
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).to(dtype) / dim
    if rope.kind == "dynamic" and length is not None:
        return 1 / (_dynamic_theta(rope, dim, length, dtype).unsqueeze(-1) ** exponents)
    if rope.kind == "longrope":
        return _longrope(rope, dim, exponents, length)
    inverse = 1 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / _number(rope.factor)
    if rope.kind == "yarn":
        return _yarn(rope, dim, exponents)
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    return inverse


def attention_scaling(rope: Rope) -> float:
    """The factor on cos and sin, so that its square is one on the scores of attention."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "yarn":
        factor = _number(rope.factor)
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_scale(factor, rope.mscale) / _yarn_scale(factor, rope.mscale_all_dim)
        return _yarn_scale(factor, 1.0)
    if rope.kind == "longrope" and _number(rope.factor) > 1:
        return math.sqrt(1 + math.log(_number(rope.factor)) / math.log(_number(rope.original_max_position_embeddings)))
    return 1.0


def tables(
    rope: Rope, dim: int, positions: Int[Tensor, " T"], cu_seqlens: Int32[Tensor, " bounds"], dtype: torch.dtype
) -> tuple[Float[Tensor, "T {dim//2}"], Float[Tensor, "T {dim//2}"]]:
    """``cos`` and ``sin`` of packed tokens, each (T, dim / 2), in ``dtype`` but at least float32.

    Args:
        rope: the kind and its numbers.
        dim: head size.
        positions: (T,) int64.
        cu_seqlens: (documents + 1,) int32, where each document begins, and T.
        dtype: the model's.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    length = _lengths(positions, cu_seqlens) if rope.kind in ("dynamic", "longrope") else None
    angles = positions.to(dtype).unsqueeze(-1) * inverse_frequencies(rope, dim, length, dtype).to(positions.device)
    scaling = attention_scaling(rope)
    return angles.cos() * scaling, angles.sin() * scaling


def rotate(x: Float[Tensor, "T heads D"], cos: Float[Tensor, "T D//2"], sin: Float[Tensor, "T D//2"]) -> Float[Tensor, "T heads D"]:
    """Turn the pairs (i, i + size / 2) of each head by its token's angle.

    Args:
        x: (T, heads, size).
        cos, sin: (T, size / 2), at least float32; the product is made in their dtype.

    Returns:
        (T, heads, size), in the dtype of ``x``.
    """
    first, second = x.to(cos.dtype).chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rotate_pairs(x: Float[Tensor, "T heads D"], cos: Float[Tensor, "T D//2"], sin: Float[Tensor, "T D//2"]) -> Float[Tensor, "T heads D"]:
    """Turn the pairs (2 i, 2 i + 1) of each head by its token's angle; see `rotate`.

    The result has the first of all pairs, then the second of all: queries and keys are scored alike in any order of their dims.
    """
    pairs = x.to(cos.dtype).unflatten(-1, (-1, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rotate_first(x: Float[Tensor, "T heads D"], cos: Float[Tensor, "T half"], sin: Float[Tensor, "T half"]) -> Float[Tensor, "T heads D"]:
    """Turn the first 2 × half dims of each head as `rotate` does; the rest stays."""
    turned = 2 * cos.shape[1]
    return torch.cat([rotate(x[..., :turned], cos, sin), x[..., turned:]], -1)


def score_scaling(rope: Rope) -> float:
    """The factor on the scores of latent attention, of whose heads only a part is rotated: what ``mscale_all_dim`` of ``yarn`` would do
    to the whole head, as in DeepSeek-V2 and V3."""
    if rope.kind != "yarn" or not rope.mscale_all_dim:
        return 1.0
    return _yarn_scale(_number(rope.factor), rope.mscale_all_dim) ** 2


def _lengths(positions: Int[Tensor, " T"], cu_seqlens: Int32[Tensor, " bounds"]) -> Int[Tensor, " T"]:
    """One more than the largest position in the document of each token."""
    tokens = torch.arange(positions.shape[0], device=positions.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
    longest = positions.new_zeros(cu_seqlens.shape[0] - 1).scatter_reduce(0, document, positions, "amax")
    return longest[document] + 1


def _number(value: float | None) -> float:
    assert value is not None  # checked when the Rope was made
    return value


def _dynamic_theta(rope: Rope, dim: int, length: Int[Tensor, "*lengths"], dtype: torch.dtype) -> Float[Tensor, "*lengths"]:
    """The base that stretches with the length beyond the original context ("NTK-aware" scaling)."""
    original, factor = _number(rope.original_max_position_embeddings), _number(rope.factor)
    stretched = factor * length.clamp_min(int(original)).to(dtype) / original - (factor - 1)
    return rope.theta * stretched ** (dim / (dim - 2))


def _longrope(rope: Rope, dim: int, exponents: Float[Tensor, " half"], length: Int[Tensor, "*lengths"] | None) -> Float[Tensor, "*_ half"]:
    factors: list[Tensor] = []
    for name, values in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        assert values is not None
        if len(values) != dim // 2:
            raise ValueError(f"rope {name} has {len(values)} numbers; a head of size {dim} needs {dim // 2}")
        factors.append(torch.tensor(values, dtype=exponents.dtype, device=exponents.device))
    short, long = (1 / (factor * rope.theta**exponents) for factor in factors)
    if length is None:
        return short
    return torch.where((length > _number(rope.original_max_position_embeddings)).unsqueeze(-1), long, short)


def _yarn_scale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(rope: Rope, dim: int, exponents: Float[Tensor, " half"]) -> Float[Tensor, " half"]:
    """Dims that turn often keep their frequency, those that turn rarely are interpolated, with a ramp between (section 3.2)."""
    factor, original = _number(rope.factor), _number(rope.original_max_position_embeddings)

    def dim_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast or 32), dim_of(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=exponents.dtype, device=exponents.device) - low) / (high - low)).clamp(0, 1)
    frequencies = rope.theta**exponents
    keep = 1 - ramp
    return 1 / (factor * frequencies) * (1 - keep) + 1 / frequencies * keep


def _llama3(rope: Rope, inverse: Float[Tensor, " half"]) -> Float[Tensor, " half"]:
    """Long wavelengths are divided by the factor, short ones kept, with a linear passage between."""
    factor, original = _number(rope.factor), _number(rope.original_max_position_embeddings)
    low, high = _number(rope.low_freq_factor), _number(rope.high_freq_factor)
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    is_long, is_short = wavelength > original / low, wavelength < original / high
    return torch.where(is_long, inverse / factor, torch.where(is_short, inverse, between))
