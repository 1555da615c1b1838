"""`chunk_loss`: cross-entropy through the head a few tokens at a time, so that the logits never stand whole.

Dims: T tokens (packed, or of one chunk), H hidden size, V vocabulary, losses 2: loss and cross-entropy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from xtf.model import loss_terms, loss_writes
from xtf.stage import Lower, Pair, Params, Program, Stage, StageFn, Values
from xtf.step import TrainStep

DEFAULT_BYTES = 128 * 2**20
"""Logits of one chunk by default, in bytes: far above what a matmul needs to run at full rate, far below what a head otherwise costs."""


def chunk_loss(tokens: int | None = None, bytes: int | None = None) -> Callable[[TrainStep], TrainStep]:
    """Compute the loss, and its gradients for hidden states and head, in one pass over chunks of tokens.

    Only one chunk's logits exist at a time. Since loss and logits gradient come from the same chunk, nothing is recomputed: three
    matrix products in all, as many as the plain head. The loss stage keeps the two gradients for the backward, which scales
    them. The idea is that of Liger-Kernel's fused linear cross-entropy (Hsu et al. 2024) and of cut cross-entropy (Wijmans et
    al. 2024), as a hand-written VJP over plain matrix products.

    Softmax and loss are in at least float32; the head's gradient accumulates in at least float32.

    Args:
        tokens: tokens per chunk. Any number works; the last chunk may be smaller.
        bytes: bytes of one chunk's logits, from which the number of tokens is computed. By default 128 MiB. Only one of the
            two may be given.

    Raises:
        ValueError: if both are given, or one is less than 1.
    """
    if isinstance(tokens, TrainStep):
        raise ValueError("chunk_loss was given a step; it makes a transform: call it first, as chunk_loss()")
    if tokens is not None and bytes is not None:
        raise ValueError(f"chunk_loss(tokens={tokens}, bytes={bytes}): give one of the two, or none for an automatic size")
    for name, value in {"tokens": tokens, "bytes": bytes}.items():
        if value is not None and (not isinstance(value, int) or value < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"chunk_loss({name}={value!r}): expected an integer of at least 1")

    def transform(step: TrainStep) -> TrainStep:
        z_loss = step.model.z_loss

        def rule(fn: StageFn, key: Hashable, lower: Lower) -> Pair:
            return chunked_pair(tokens, bytes, z_loss)

        def rewrite(step: TrainStep, program: Program) -> Program:
            return tuple(
                dataclasses.replace(node, rule=rule, key=(node.key, "chunk_loss", tokens, bytes))
                if isinstance(node, Stage) and node.kind == "loss"
                else node
                for node in program
            )

        if any(name.startswith("chunk_loss") for name in step.stack):
            raise ValueError("chunk_loss is applied twice")
        said = f"tokens={tokens}" if tokens is not None else f"bytes={bytes}" if bytes is not None else "automatic"
        return step.replace(f"chunk_loss({said})", rewrites=(*step.rewrites, rewrite))

    return transform


def chunk_tokens(vocab: int, itemsize: int, *, tokens: int | None = None, bytes: int | None = None) -> int:
    """Tokens per chunk: ``tokens`` if given, else as many as have logits of ``bytes`` (default `DEFAULT_BYTES`), at least one."""
    return tokens if tokens is not None else max(1, (bytes or DEFAULT_BYTES) // (vocab * itemsize))


def chunked_pair(tokens: int | None, bytes: int | None, z_loss: float) -> Pair:
    """The loss stage over chunks: the stage's own values and constants, see `xtf.model.cross_entropy`."""

    def chunks(weight: Float[Tensor, "V H"], x: Float[Tensor, "T H"], terms: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor, Tensor]]:
        targets, weights, normalizer = terms
        dtype = _wide(x.dtype)
        size = chunk_tokens(weight.shape[0], dtype.itemsize, tokens=tokens, bytes=bytes)
        scale = weights.to(dtype) * normalizer.to(dtype)
        return list(zip(x.split(size), targets.split(size), scale.split(size), strict=True))

    def written(losses: list[Float[Tensor, " losses"]]) -> Values:
        """Further values add to the loss, and not to the cross-entropy."""
        total = losses[0][0]
        for more in losses[1:]:
            total = total + more[0]
        return (total, losses[0][1])[: len(loss_writes(z_loss, len(losses) - 1))]

    def forward(params: Params, reads: Values, consts: Mapping[str, Any]) -> tuple[Values, tuple[list[Tensor], Tensor]]:
        weight = params["weight"]
        dtype = _wide(reads[0].dtype)
        losses = [x.new_zeros(2, dtype=dtype) for x in reads]
        dreads = [torch.empty_like(x) for x in reads]
        dweight = None
        for x, dx, own, terms in zip(reads, dreads, losses, loss_terms(consts, len(reads)), strict=True):
            for (h, targets, scale), out in zip(chunks(weight, x, terms), dx.split(_size(x, weight, tokens, bytes)), strict=True):
                part, dlogits = _loss_and_dlogits(h, weight, targets, scale, z_loss)
                own += part
                dlogits = dlogits.to(x.dtype)
                torch.mm(dlogits, weight, out=out)
                dweight = _add_product(dweight, dlogits, h, dtype)
                del dlogits  # before the next chunk's are made
        return written(losses), (dreads, torch.zeros_like(weight, dtype=dtype) if dweight is None else dweight)

    def backward(
        params: Params, residual: tuple[list[Tensor], Tensor], dwrites: tuple[Tensor | None, ...], consts: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], tuple[Tensor | None, ...]]:
        dreads, dweight = residual
        dloss = dwrites[0]
        assert dloss is not None
        # In place: the walk hands a residual to one backward only, and the head's gradient is large.
        return {"weight": dweight.mul_(dloss)}, tuple([dx.mul_(dloss.to(dx.dtype)) for dx in dreads])

    def evaluate(params: Params, reads: Values, consts: Mapping[str, Any]) -> Values:
        weight = params["weight"]
        losses = [x.new_zeros(2, dtype=_wide(x.dtype)) for x in reads]
        for x, own, terms in zip(reads, losses, loss_terms(consts, len(reads)), strict=True):
            for h, targets, scale in chunks(weight, x, terms):
                own += _losses_and_exponentials(h, weight, targets, scale, z_loss)[0]
        return written(losses)

    return Pair(forward, backward, needs_params=False, evaluate=evaluate)


def _size(x: Float[Tensor, "T H"], weight: Float[Tensor, "V H"], tokens: int | None, bytes: int | None) -> int:
    return chunk_tokens(weight.shape[0], _wide(x.dtype).itemsize, tokens=tokens, bytes=bytes)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _losses_and_exponentials(
    h: Float[Tensor, "T H"], weight: Float[Tensor, "V H"], targets: Int[Tensor, " T"], scale: Float[Tensor, " T"], z_loss: float
) -> tuple[Float[Tensor, " losses"], Float[Tensor, "T V"], Float[Tensor, "T 1"], Float[Tensor, "T 1"]]:
    """The summed loss and cross-entropy of a chunk; and, in the memory of the logits, their exponentials, with the sums and
    logsumexps of the rows.

    Rows are shifted by their largest logit: the exponentials cannot overflow, and the loss is a difference of small numbers.
    What stands at ignored targets has the scale 0.
    """
    logits = F.linear(h, weight).to(_wide(h.dtype))
    largest = logits.amax(-1, keepdim=True)
    logits.sub_(largest)
    picked = logits.gather(-1, targets.clamp_min(0)[:, None])
    exponentials = logits.exp_()
    total = exponentials.sum(-1, keepdim=True)
    log_total = total.log()
    entropy, lse = log_total - picked, log_total + largest
    loss = entropy + z_loss * lse.square() if z_loss else entropy
    return scale @ torch.cat([loss, entropy], 1), exponentials, total, lse


def _loss_and_dlogits(
    h: Float[Tensor, "T H"], weight: Float[Tensor, "V H"], targets: Int[Tensor, " T"], scale: Float[Tensor, " T"], z_loss: float
) -> tuple[Float[Tensor, " losses"], Float[Tensor, "T V"]]:
    """The summed loss and cross-entropy of a chunk, and the loss's gradient for the logits, in the memory of the logits."""
    losses, exponentials, total, lse = _losses_and_exponentials(h, weight, targets, scale, z_loss)
    factor = scale[:, None] * (1 + 2 * z_loss * lse) if z_loss else scale[:, None]
    dlogits = exponentials.mul_(factor / total)
    dlogits.scatter_add_(1, targets.clamp_min(0)[:, None], -scale[:, None])
    return losses, dlogits


def _add_product(total: Float[Tensor, "V H"] | None, dlogits: Float[Tensor, "T V"], h: Float[Tensor, "T H"], dtype: torch.dtype) -> Tensor:
    """``total + dlogits.T @ h`` in ``dtype``, in the total's memory; without one the product."""
    if dlogits.dtype != dtype and dlogits.is_cuda:
        product = torch.mm(dlogits.T, h, out_dtype=dtype)
        return product if total is None else total.add_(product)
    dlogits, h = dlogits.to(dtype), h.to(dtype)
    return torch.mm(dlogits.T, h) if total is None else total.addmm_(dlogits.T, h)
