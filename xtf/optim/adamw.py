"""AdamW."""

from __future__ import annotations

from xtf.optim.blocks import AdamKernel, adam, adam_kernel, last_rate
from xtf.optim.core import Optimizer
from xtf.optim.leaves import Mask
from xtf.optim.schedules import Schedule, as_schedule


def adamw(
    lr: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Mask = None,
    kernel: AdamKernel = adam_kernel,
) -> Optimizer:
    """Adam with decoupled weight decay; the arithmetic of ``torch.optim.AdamW``.

    ``p ← p - lr · (m̂ / (√v̂ + eps) + weight_decay · p)``. Equal to ``chain(scale_by_adam(), add_decayed_weights(),
    scale_by_learning_rate())``, in one pass and rounded once. After Loshchilov and Hutter 2019, "Decoupled Weight Decay
    Regularization".

    Args:
        lr: learning rate, or a schedule of it; the one used last is the metric ``"lr"``.
        betas: decay of the mean and of the mean square of the gradient, each in [0, 1).
        eps: summand of the denominator, positive.
        weight_decay: at least 0; multiplied by the rate.
        mask: which leaves decay: ``(path, param) -> bool`` (`no_decay_1d`), a tree of bools, or ``None`` for all.
        kernel: the formula; by default steps run torch's fused kernel where there is one (`xtf.optim.core.advance`).

    Returns:
        An optimizer with two tensors of state per parameter, in its dtype but at least float32 (`AdamState`).

    Raises:
        ValueError: if an argument is outside its bounds; (of ``init``) if ``mask`` is a tree of another structure, or a leaf
            is not a floating point tensor.

    Example:
        >>> adamw(lr=-1.0)
        Traceback (most recent call last):
        ValueError: adamw: lr must be a number in [0, inf), got -1.0
    """
    rate = as_schedule("adamw", lr)
    return adam("adamw", betas, eps, weight_decay, mask, kernel, rate, last_rate(rate), fused=kernel is adam_kernel)
