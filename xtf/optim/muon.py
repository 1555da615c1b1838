"""Muon: momentum whose matrices are made orthogonal, and its partner for all that is not a hidden matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from xtf import tree
from xtf.optim import leaves
from xtf.optim.adamw import adamw
from xtf.optim.blocks import last_rate
from xtf.optim.core import Optimizer, partition
from xtf.optim.leaves import Mask
from xtf.optim.placement import UNPLACED, Placement
from xtf.optim.schedules import Schedule, as_schedule
from xtf.tree import Path, Tree

Coefficients = tuple[float, float, float]
AdjustLr = Literal["original", "match_rms_adamw", "spectral_unclamped"]

_COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)
_STACK = 1 << 26  # elements of stacked matrices iterated on at once: bounds the temporaries


class MuonState(NamedTuple):
    """Number of updates so far, and the mean of the gradient: a tree, at least float32."""

    steps: Tensor
    momentum: Tree


def orthogonalize(
    x: Float[Tensor, "*stack rows columns"],
    *,
    steps: int = 5,
    coefficients: Coefficients = _COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Float[Tensor, "*stack rows columns"]:
    """Bring the singular values of each matrix near 1, by Newton-Schulz iterations ``x ← a x + (b xxᵀ + c (xxᵀ)²) x``.

    With the default coefficients they end between about 0.7 and 1.2, not at 1 (Jordan et al. 2024, "Muon: An optimizer for
    hidden layers in neural networks").

    Args:
        x: (..., rows, columns), each matrix of the stack by itself.
        steps: iterations.
        coefficients: a, b and c.
        eps: least norm to divide by.
        dtype: that of the iteration.

    Returns:
        The shape of ``x``, in ``dtype``.

    Example:
        >>> s = torch.linalg.svdvals(orthogonalize(torch.randn(3, 8, 4, dtype=torch.float64), dtype=torch.float64))
        >>> s.shape, bool(((s > 0.6) & (s < 1.3)).all())
        (torch.Size([3, 4]), True)
    """
    rows, columns = x.shape[-2:]
    stack = x.to(dtype).reshape(math.prod(x.shape[:-2]), rows, columns)
    count = max(1, _STACK // max(1, rows * columns))
    if len(stack) <= count:
        return _newton_schulz(stack, steps, coefficients, eps).view(x.shape)
    out = torch.empty_like(stack)
    for begin in range(0, len(stack), count):
        out[begin : begin + count] = _newton_schulz(stack[begin : begin + count], steps, coefficients, eps)
    return out.view(x.shape)


def _newton_schulz(
    x: Float[Tensor, "matrices rows columns"], steps: int, coefficients: Coefficients, eps: float
) -> Float[Tensor, "matrices rows columns"]:
    """`orthogonalize` of one stack. Contiguous."""
    a, b, c = coefficients
    if wide := x.shape[-2] > x.shape[-1]:  # the smaller of the two Gram matrices
        x = x.transpose(-2, -1)
    x = x / _norms(x).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.transpose(-2, -1)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.transpose(-2, -1) if wide else x).contiguous()


def _norms(x: Float[Tensor, "matrices rows columns"]) -> Float[Tensor, "matrices 1 1"]:
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def muon(
    lr: float | Schedule,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    ns_steps: int = 5,
    ns_coefficients: Coefficients = _COEFFICIENTS,
    ns_dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
    adjust_lr_fn: AdjustLr = "original",
    mask: Mask = None,
) -> Optimizer:
    """Muon, for leaves (..., rows, columns) with rows = outputs; the arithmetic of ``torch.optim.Muon``.

    ``b ← momentum · b + (1 - momentum) · g``; ``o`` is `orthogonalize` of ``b``, or of ``momentum · b + (1 - momentum) · g``
    with ``nesterov``; ``p ← p - lr · (ratio · o + weight_decay · p)``. Leading dims are a stack (experts): each matrix is taken
    by itself. The momentum is kept as the parameter is placed; only what is made orthogonal is gathered, in ``ns_dtype``.
    After Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".

    Args:
        lr: learning rate, or a schedule of it; the one used last is the metric ``"lr"``.
        momentum: in [0, 1).
        nesterov: look one step ahead.
        weight_decay: at least 0; decoupled, multiplied by the rate.
        ns_steps: Newton-Schulz iterations, 1 to 99.
        ns_coefficients: their polynomial.
        ns_dtype: their dtype.
        eps: least norm that a matrix is divided by before them, positive.
        adjust_lr_fn: the ratio, of the whole matrix's size: ``"original"`` √max(1, rows / columns); ``"match_rms_adamw"``
            0.2 · √max(rows, columns), which gives updates the size of AdamW's, so that one rate serves both (Liu et al. 2025,
            "Muon is Scalable for LLM Training"); ``"spectral_unclamped"`` √(rows / columns).
        mask: which leaves decay: ``(path, param) -> bool``, a tree of bools, or ``None`` for all.

    Raises:
        ValueError: if an argument is outside its bounds; (of ``init``) if a leaf has fewer than 2 dims (`muon_adamw` and
            `partition` give those to another optimizer), is no floating point tensor, or ``mask`` has another structure.
    """
    rate = as_schedule("muon", lr)
    leaves.check("muon", "momentum", momentum, 0, 1)
    leaves.check("muon", "weight_decay", weight_decay, 0)
    leaves.check("muon", "ns_steps", ns_steps, 1, 100)
    leaves.check("muon", "eps", eps, 0, low_open=True)
    if len(ns_coefficients) != 3:
        raise ValueError(f"muon: ns_coefficients must be three numbers, got {ns_coefficients!r}")
    if not ns_dtype.is_floating_point:
        raise ValueError(f"muon: ns_dtype must be a floating point dtype, got {ns_dtype}")
    if adjust_lr_fn not in get_args(AdjustLr):
        raise ValueError(f"muon: adjust_lr_fn must be one of {get_args(AdjustLr)}, got {adjust_lr_fn!r}")

    def init(params: Tree, placement: Placement = UNPLACED) -> MuonState:
        for path, p in tree.items(params).items():
            if p is not None and p.ndim < 2:
                raise ValueError(f"muon: leaf {path!r} of shape {tuple(p.shape)} has no matrix: use muon_adamw or partition")
        leaves.masked(mask, params)
        return MuonState(leaves.zero_count(), leaves.zeros_state(params, placement))

    def update(grads: Tree, state: MuonState, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, MuonState]:
        lr = rate(leaves.as_int(state.steps))

        def leaf(path: Path, g: Tensor, p: Tensor, mean: Tensor, decays: bool) -> tuple[Tensor, Tensor]:
            u, mean = leaves.own_update(g, p, placement), leaves.own(mean, placement)
            for part, mean_part in leaves.blocks(u, mean):
                wide = part.to(mean.dtype)
                mean_part.lerp_(wide, 1 - momentum)
                part.copy_(wide.lerp_(mean_part, momentum) if nesterov else mean_part)
            whole = placement.matrices(path, u.to(ns_dtype))
            scale = -lr * _ratio(adjust_lr_fn, whole.shape[-2], whole.shape[-1])
            whole = orthogonalize(whole, steps=ns_steps, coefficients=ns_coefficients, eps=eps, dtype=ns_dtype)
            for part, o, p_part in leaves.blocks(u, placement.cut(path, whole), p):
                wide = o.to(mean.dtype).mul(scale)
                part.copy_(wide.add_(p_part, alpha=-lr * weight_decay) if decays else wide)
            return u, mean

        updates, (mean,) = leaves.leafwise(leaf, grads, params, (state.momentum,), (leaves.masked(mask, params),), placement)
        return updates, MuonState(leaves.add_one(state.steps, placement), mean)

    return Optimizer(init, update, last_rate(rate))


def _ratio(adjust: AdjustLr, rows: int, columns: int) -> float:
    rows, columns = max(rows, 1), max(columns, 1)
    if adjust == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(rows / columns)


def hidden_matrix(path: Path, param: Tensor) -> bool:
    """Whether a leaf is for Muon: at least 2 dims, and no embedding, head or (stacked) bias by its path.

    Example:
        >>> w = torch.ones(2, 2)
        >>> [hidden_matrix(path, w) for path in ("layers.0.attention.q", "embed", "lm_head", "layers.0.experts.bias")]
        [True, False, False, False]
    """
    return param.ndim >= 2 and not any(word in path for word in ("embed", "head", "bias"))


def muon_adamw(
    lr: float | Schedule,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_dtype: torch.dtype = torch.bfloat16,
    adjust_lr_fn: AdjustLr = "match_rms_adamw",
    adamw_lr: float | Schedule | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    mask: Mask = None,
    matrices: Callable[[Path, Tensor], bool] = hidden_matrix,
) -> Optimizer:
    """Muon for the hidden matrices, AdamW for all else; one rate serves both, as Muon's updates have the size of AdamW's.

    Args:
        lr: learning rate, or a schedule of it.
        momentum: of Muon.
        nesterov: of Muon.
        ns_steps: of Muon.
        ns_dtype: of Muon.
        adjust_lr_fn: of Muon; with another one than the default, give ``adamw_lr`` too.
        adamw_lr: AdamW's own rate, if not ``lr``.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of both; decoupled.
        mask: which leaves decay: ``(path, param) -> bool`` (`no_decay_1d`), a tree of bools, or ``None`` for all.
        matrices: ``(path, param) -> bool``, which leaves are Muon's.

    Returns:
        An optimizer with the state ``{"muon": …, "adamw": …}`` and the metrics ``"muon/lr"`` and ``"adamw/lr"``.

    Raises:
        ValueError: as `muon` and `adamw` do.
    """
    by_label = {
        "muon": muon(
            lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            ns_steps=ns_steps,
            ns_dtype=ns_dtype,
            adjust_lr_fn=adjust_lr_fn,
            mask=mask,
        ),
        "adamw": adamw(lr if adamw_lr is None else adamw_lr, betas=betas, eps=eps, weight_decay=weight_decay, mask=mask),
    }
    return partition(lambda path, p: "muon" if matrices(path, p) else "adamw", by_label)
