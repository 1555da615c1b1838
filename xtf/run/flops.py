"""Model FLOPs of a training step, and the most a device can do: what MFU is made of.

Model FLOPs utilisation is the rate of the FLOPs that the model's mathematics needs, forward and backward, over the device's peak
(Chowdhery et al. 2022, "PaLM", appendix B): what is computed again to save memory does not count. Backward takes two products for
each one of forward, so a step is 3 × its forward. Unlike there, attention counts only the pairs of tokens that see each other.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from xtf import tree
from xtf.backends import backend_of
from xtf.batch import Batch, pack
from xtf.model import Model, run
from xtf.ops.cpu import CPU
from xtf.ops.reference import REFERENCE
from xtf.spec import ParamSpec
from xtf.tree import Path

Lengths = Sequence[int] | Int64[Tensor, " documents"]
"""Tokens of each document of a step, over all ranks."""

_TRAIN = 3  # forward, and two products for each of its own in backward
_MAC = 2  # a multiplication and an addition


class AttentionCall(NamedTuple):
    """One layer's attention: query heads × (head size + value head size), and how many tokens back a token sees."""

    width: int
    window: int | None


@dataclass(frozen=True)
class ModelFlops:
    """What a model computes, counted once with `model_flops` and used for every step.

    Args:
        per_token: FLOPs of a training step for each token, but those of attention's pairs.
        attention: each layer's attention.
    """

    per_token: int
    attention: tuple[AttentionCall, ...]

    def attention_flops(self, lengths: Lengths) -> int:
        """See `attention_flops`."""
        tokens = _lengths(lengths)
        by_window: dict[int | None, int] = {}
        for width, window in self.attention:
            by_window[window] = by_window.get(window, 0) + width
        return sum(_TRAIN * _MAC * width * _pairs(tokens, window) for window, width in by_window.items())

    def step_flops(self, lengths: Lengths) -> int:
        """See `step_flops`."""
        return self.per_token * int(_lengths(lengths).sum()) + self.attention_flops(lengths)


def model_flops(model: Model) -> ModelFlops:
    """Count a model. Nothing is allocated: its stages run once, forward, on one token without values.

    Counted are the products with every matrix that a stage reads, but the embedding's lookup; of a leaf with the axis ``"expert"``
    the share that a token uses. A head tied to the embedding is a product and counts.

    Example:
        >>> from xtf.testing import small_models
        >>> counted = model_flops(small_models()["llama"])
        >>> counted.per_token, counted.attention
        (44760, (AttentionCall(width=48, window=None), AttentionCall(width=48, window=None)))
    """
    specs: dict[Path, ParamSpec] = tree.items(model.specs)
    active = 0.0
    for stage in model.build(REFERENCE):
        times = len(stage.reads) if stage.kind == "loss" else 1  # the head is a product for each value that is scored
        for path in stage.params.values() if stage.kind != "embed" else ():
            spec = specs[path]
            if sum(axis != "expert" for axis in spec.axes) >= 2:
                active += times * spec.numel * (model.active_fraction if "expert" in spec.axes else 1.0)
    return ModelFlops(_TRAIN * _MAC * round(active), _attention_calls(model))


def flops_per_token(model: Model | ModelFlops) -> int:
    """FLOPs of a training step for each token, but those of attention's pairs: 6 for each active parameter of a matrix.

    Args:
        model: the model, or for many steps what `model_flops` counted.
    """
    return _counted(model).per_token


def attention_flops(model: Model | ModelFlops, lengths: Lengths) -> int:
    """FLOPs of a training step in the products of attention, scores and mixing, of packed documents.

    A document of n tokens has n (n + 1) / 2 pairs of a token and one that it sees; with a sliding window, fewer.

    Args:
        model: the model, or for many steps what `model_flops` counted.
        lengths: (documents,), tokens of each document (`document_lengths`).

    Raises:
        ValueError: for a negative length.

    Example:
        >>> one_layer = ModelFlops(0, (AttentionCall(width=10, window=None),))
        >>> attention_flops(one_layer, [2, 3]) == 3 * 2 * 10 * (3 + 6)
        True
    """
    return _counted(model).attention_flops(lengths)


def step_flops(model: Model | ModelFlops, lengths: Lengths) -> int:
    """Model FLOPs of a training step on documents of these lengths: forward and backward, over all ranks.

    Args:
        model: the model, or for many steps what `model_flops` counted.
        lengths: (documents,), tokens of each document; padding is no document (`document_lengths`).

    Raises:
        ValueError: for a negative length.

    Example:
        >>> step_flops(ModelFlops(600, ()), [2, 3])
        3000
    """
    return _counted(model).step_flops(lengths)


def document_lengths(batch: Batch) -> Int64[Tensor, " documents"]:
    """Tokens of each document of a batch (`xtf.batch`), without padding.

    Example:
        >>> ids = torch.zeros(2, 4, dtype=torch.int64)
        >>> document_lengths({"input_ids": ids, "document_ids": torch.tensor([[0, 0, 0, 1], [0, 0, -1, -1]])}).tolist()
        [3, 1, 2]
    """
    packed = pack(batch)
    bounds: Tensor = packed["cu_seqlens"].long()
    lengths = bounds.diff()
    return lengths[packed["valid"][bounds[:-1]]] if len(lengths) else lengths


def _counted(model: Model | ModelFlops) -> ModelFlops:
    return model if isinstance(model, ModelFlops) else model_flops(model)


def _lengths(lengths: Lengths) -> Int64[Tensor, " documents"]:
    found = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    if found.numel() and int(found.min()) < 0:
        raise ValueError(f"lengths has {int(found.min())}; expected the tokens of each document, none negative")
    return found


def _pairs(lengths: Int64[Tensor, " documents"], window: int | None) -> int:
    """Pairs of a token and one that it sees, itself included."""
    inside = lengths if window is None else lengths.clamp(max=window)  # the first tokens see all before them
    return int((inside * (inside + 1) // 2 + (lengths - inside) * inside).sum())


def _attention_calls(model: Model) -> tuple[AttentionCall, ...]:
    """Each attention that the model's stages compute, as they ask for it: whatever the family, no field of a config is guessed."""
    calls: list[AttentionCall] = []

    def attention(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, scale: float, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        calls.append(AttentionCall(q.shape[1] * (q.shape[2] + v.shape[2]), window))
        return CPU.attention(q, k, v, cu_seqlens, scale=scale, window=window, sinks=sinks)

    stages = model.build(dataclasses.replace(CPU, name="counting", attention=attention))
    run(stages[:-1], meta_params(model), meta_constants(model, 1))
    return tuple(calls)


def meta_params(model: Model) -> tree.Tree:
    """The model's parameters without values, on the device ``"meta"``."""

    def empty(spec: ParamSpec) -> Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    return tree.map(empty, model.specs)


def meta_constants(model: Model, tokens: int) -> dict[str, Tensor]:
    """The constants of a batch of one document, without values, on the device ``"meta"``."""
    ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    return model.pack({"input_ids": ids, "labels": ids}) | {"normalizer": torch.ones((), dtype=torch.float64, device="meta")}


# The peak of a device -----------------------------------------------------------------------------------------------------------

_PUBLISHED: tuple[tuple[str, tuple[float, float, float]], ...] = (
    # dense TFLOP/s by the vendor's data sheets: 16-bit, tf32, fp32; the first pattern that fits the device's name counts
    (r"\bGB200\b", (2500.0, 1250.0, 80.0)),
    (r"\bB200\b", (2250.0, 1125.0, 75.0)),
    (r"\bH[12]00 NVL\b", (835.5, 417.5, 60.0)),
    (r"\bH[18]00 PCIe\b", (756.0, 378.0, 51.0)),
    (r"\b(H100|H800|G?H200)\b", (989.4, 494.7, 67.0)),
    (r"\bH20\b", (148.0, 74.0, 44.0)),
    (r"\b[AB]?A[18]00\b", (312.0, 156.0, 19.5)),
    (r"\bL40S\b", (362.0, 183.0, 91.6)),
    (r"\bL4\b", (121.0, 60.5, 30.3)),
    (r"\bA10\b", (125.0, 62.5, 31.2)),
    (r"\bRTX 4090\b", (165.2, 82.6, 82.6)),
    (r"\bRTX 3090\b", (71.2, 35.6, 35.6)),
)
_SECONDS = 0.2  # of a measurement, at most
_SIZES = {"cpu": (128, 1024)}  # of its matrices: the first, which is quick on any device, and the largest
_LARGE = (1024, 8192)


def peak_flops(device: torch.device | str, dtype: torch.dtype) -> float:
    """The most FLOPs per second that matrix products of a dtype reach on one device.

    For well-known NVIDIA GPUs the published dense peak; float32 counts as tf32 where torch is set to use it. For everything else,
    a CPU and a part of a GPU (MIG) among them, what a short product reaches now (within 0.2 s, the best of several), with
    torch's present number of threads; measured once per process.

    Args:
        device: as ``"cpu"`` or ``"cuda:0"``.
        dtype: of the factors, a floating one.

    Returns:
        FLOPs per second.

    Raises:
        ValueError: for a dtype that is not floating, or the device ``"meta"``.
    """
    device = torch.device(device)
    if not dtype.is_floating_point or device.type == "meta":
        raise ValueError(f"peak_flops({str(device)!r}, {dtype}): expected a device that computes and a floating dtype, as torch.float32")
    known = published_peak(backend_of(device).name(device), dtype, tf32=torch.backends.cuda.matmul.fp32_precision == "tf32")
    return _measured(device, dtype, torch.get_num_threads()) if known is None else known


def published_peak(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """The published dense peak of a GPU in FLOPs per second, ``None`` where it is not known here.

    Args:
        name: as ``torch.cuda.get_device_name`` gives it.
        dtype: float16, bfloat16 or float32; others are not known.
        tf32: whether float32 products are computed in tf32.

    Example:
        >>> published_peak("NVIDIA H200", torch.bfloat16), published_peak("NVIDIA H20", torch.float32, tf32=True)
        (989400000000000.0, 74000000000000.0)
    """
    column = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1 if tf32 else 2}.get(dtype)
    if column is None or "MIG" in name:
        return None
    return next((peaks[column] * 1e12 for pattern, peaks in _PUBLISHED if re.search(pattern, name)), None)


@functools.cache
def _measured(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """The best rate of square products that grow as long as they are quick."""
    size, largest = _SIZES.get(device.type, _LARGE)
    best = 0.0
    factor = torch.ones(size, size, dtype=dtype, device=device)
    _seconds(factor)  # the first call also sets up the library, which may take longer than the measurement
    began = time.perf_counter()
    while True:
        seconds = _seconds(factor)
        best = max(best, 2 * size**3 / seconds)
        left = _SECONDS - (time.perf_counter() - began)
        if size < largest and 10 * seconds < left:
            size *= 2
            factor = torch.ones(size, size, dtype=dtype, device=device)
        elif seconds > left:
            return best


def _seconds(factor: Tensor) -> float:
    backend_of(factor.device).synchronize(factor.device)
    began = time.perf_counter()
    torch.mm(factor, factor)
    backend_of(factor.device).synchronize(factor.device)
    return max(time.perf_counter() - began, 1e-9)
