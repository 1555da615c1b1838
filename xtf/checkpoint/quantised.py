"""Quantised weights as they are published, read as plain ones: block-wise FP8 and MXFP4.

A tensor that a checkpoint stores in such a form stands under its plain name, with its plain shape, and gives any block of it as
floats: only the codes and scales of the block are read. Which tensors these are is found by what the checkpoint holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from xtf.checkpoint_map import Range

FP8_SCALE = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
"""Values that share a scale in MXFP4."""

_FP8 = "F8_E4M3"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOATS = ("F64", "F32", "F16", "BF16")
_HOW = "dequantise it first (with transformers: load it, `model.dequantize()` where there is one, and save it)"


class Stored(Protocol):
    """A tensor in a checkpoint, not read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str:
        """The name that safetensors has for it."""
        ...

    @property
    def file(self) -> FilePath: ...
    def read(self, ranges: Sequence[Range]) -> Tensor:
        """A block of it."""
        ...


@dataclass(frozen=True)
class BlockFP8:
    """A weight in float8_e4m3fn with a scale for each block of its last two dims (DeepSeek-AI 2024, "DeepSeek-V3").

    Args:
        weight: (..., out, in) F8_E4M3.
        scale: (..., ceil(out / block[0]), ceil(in / block[1])), floating: a weight is its code times the scale of its block.
        block: rows and columns of a block.
    """

    weight: Stored
    scale: Stored
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def file(self) -> FilePath:
        return self.weight.file

    def read(self, ranges: Sequence[Range]) -> Tensor:
        """A block of the weight, float32."""
        (start, stop), columns = ranges[-2:]
        height, width = self.block
        scale = self.scale.read([*ranges[:-2], _around((start, stop), height), _around(columns, width)]).float()
        scale = scale.index_select(-1, torch.arange(*columns) // width - columns[0] // width)
        weight = self.weight.read(ranges).float()
        for i, top in enumerate(range(start - start % height, stop, height)):  # no second tensor of the weight's size
            weight[..., max(top - start, 0) : top - start + height, :].mul_(scale[..., i : i + 1, :])
        return weight


@dataclass(frozen=True)
class MXFP4:
    """A weight in 4-bit floats with a scale for each 32 of them (OCP 2023, "Microscaling formats"), as GPT-OSS is published.

    The codes of an output lie along the last dims, (..., out, in / 32, 16), two a byte, the low half first; the weight itself, as in
    transformers, is (..., in, out).

    Args:
        blocks: (..., out, in / 32, 16) U8: a code is a sign and an index of 0, 0.5, 1, 1.5, 2, 3, 4, 6.
        scales: (..., out, in / 32) U8: values are multiplied by 2^(scale - 127); 255 is not a number.
    """

    blocks: Stored
    scales: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, out, groups, _ = self.blocks.shape
        return (*lead, groups * GROUP, out)

    @property
    def dtype(self) -> str:
        return "BF16"

    @property
    def file(self) -> FilePath:
        return self.blocks.file

    def read(self, ranges: Sequence[Range]) -> Tensor:
        """A block of the weight, bfloat16, in which all its values are exact: a transposed view, since the codes lie by output."""
        *lead, (start, stop), out = ranges
        groups = _around((start, stop), GROUP)
        codes, scales = self.blocks.read([*lead, out, groups, (0, GROUP // 2)]), self.scales.read([*lead, out, groups])
        signed = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16)
        pairs = torch.stack([signed.repeat(16), signed.repeat_interleave(16)], -1)  # of each byte its two values, the low half first
        powers = torch.tensor([*(2.0 ** (scale - 127) for scale in range(255)), math.nan], dtype=torch.bfloat16)
        values = _looked_up(pairs.view(torch.int32).flatten(), codes).view(torch.bfloat16).flatten(-2)  # both values of a byte at once
        values.view(*values.shape[:-1], -1, GROUP).mul_(_looked_up(powers, scales).unsqueeze(-1))
        return values[..., start - GROUP * groups[0] : stop - GROUP * groups[0]].mT


def refused(config: Mapping[str, Any]) -> str | None:
    """Why the kind of quantisation that a ``config.json`` states is not read, or ``None`` where it is, or there is none.

    Example:
        >>> refused({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}) is None
        True
        >>> print(refused({"quantization_config": {"quant_method": "awq", "bits": 4}}).split(";")[0])
        quantization_config says the weights are quantised by 'awq'
    """
    found = _quantisation(config)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        return f"quantization_config={found!r} is a {type(found).__name__}; expected an object"
    stated = cast("Mapping[str, Any]", found)
    method = stated.get("quant_method")
    if method == "mxfp4":
        return None
    if method != "fp8":
        return (
            f"quantization_config says the weights are quantised by {method!r}; plain weights are read, block-wise 'fp8' "
            f"as in DeepSeek-V3, and 'mxfp4' as in GPT-OSS: take a checkpoint in one of these, or {_HOW}"
        )
    block, scheme, form = stated.get("weight_block_size", [128, 128]), stated.get("activation_scheme", "dynamic"), stated.get("fmt", "e4m3")
    if not _is_block(block):
        return f"quantization_config has weight_block_size={block!r}; expected two sizes, as [128, 128]; if there are no blocks: {_HOW}"
    if scheme != "dynamic" or form not in ("e4m3", "float8_e4m3fn"):
        return f"quantization_config has activation_scheme={scheme!r}, fmt={form!r}; of 'fp8' only 'dynamic' and 'e4m3' are read: {_HOW}"
    return None


def dequantised(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a checkpoint as if none were quantised, and what is wrong with those that cannot be read so.

    Args:
        tensors: all of them, by name.
        config: the ``config.json``, for the size of FP8's blocks; 128 × 128 where it states none.

    Returns:
        ``(plain, wrong)``: quantised weights stand in ``plain`` under their plain names, their scales not at all; ``wrong`` says of
        a quantised weight without fitting scales what is the matter. It stands in ``plain`` nevertheless.
    """
    stated = _quantisation(config)
    block: Any = cast("Mapping[str, Any]", stated).get("weight_block_size") if isinstance(stated, Mapping) else None
    size = (int(block[0]), int(block[1])) if _is_block(block) else (128, 128)
    plain, wrong = dict(tensors), dict[str, str]()
    for name, tensor in tensors.items():
        if tensor.dtype == _FP8:
            scale = plain.pop(name + FP8_SCALE, None)
            expected = (*tensor.shape[:-2], *(-(-n // b) for n, b in zip(tensor.shape[-2:], size, strict=False)))
            problem = _problem(name, "float8_e4m3fn", name + FP8_SCALE, scale, expected, _FLOATS)
            if scale is None or problem:
                wrong[name] = problem
            else:
                plain[name] = BlockFP8(tensor, scale, size)
        elif tensor.dtype == "U8" and name.endswith(BLOCKS) and len(tensor.shape) >= 3:
            base = name.removesuffix(BLOCKS)
            scales = plain.pop(base + SCALES, None)
            problem = _problem(base, "MXFP4", base + SCALES, scales, tensor.shape[:-1], ("U8",))
            if tensor.shape[-1] != GROUP // 2:
                problem = f"{name} has shape {tensor.shape}; the last dim of MXFP4 is {GROUP // 2} bytes, {GROUP} values"
            del plain[name]
            plain[base] = MXFP4(tensor, tensor if scales is None else scales)
            if problem:
                wrong[base] = problem
    return plain, wrong


def _problem(name: str, kind: str, scale_name: str, scale: Stored | None, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
    expected = f"expected {scale_name} {shape} in {dtypes[0] if len(dtypes) == 1 else 'F32'}"
    if len(shape) < 2:
        return f"{name} is {kind} of {len(shape)} dims, expected a matrix in blocks: {_HOW}"
    if scale is None:
        return f"{name} is {kind} without scales: {expected}; copy the checkpoint again, or {_HOW}"
    if scale.shape != shape or scale.dtype not in dtypes:
        return f"{name} is {kind}, and its scales are {scale.shape} in {scale.dtype}: {expected} (block size: see quantization_config)"
    return ""


def _quantisation(config: Mapping[str, Any]) -> object:
    """``quantization_config``, of the whole model or of the text model in it."""
    inner = config.get("text_config")
    own = config.get("quantization_config")
    return cast("Mapping[str, Any]", inner).get("quantization_config") if own is None and isinstance(inner, Mapping) else own


def _is_block(block: object) -> bool:
    sizes = cast("Sequence[object]", block) if isinstance(block, (list, tuple)) else ()
    return len(sizes) == 2 and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes)


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _around(span: Range, size: int) -> Range:
    """The blocks of this size that a range touches."""
    return span[0] // size, -(-span[1] // size)
