"""`precision`: the dtypes that parameters are stored in, computed with, and whose gradients are summed in."""

from __future__ import annotations

from collections.abc import Callable

import torch

from xtf.step import Precision, TrainStep


def precision(
    *, params: torch.dtype | None = None, compute: torch.dtype | None = None, reduce: torch.dtype | None = None
) -> Callable[[TrainStep], TrainStep]:
    """Mixed precision (Micikevicius et al. 2018, "Mixed precision training").

    Parameters are cast to ``compute`` before they are gathered, so what travels is as small as what is computed with; gradients
    are cast to ``reduce`` before they are summed over ranks, and accumulate over micro-batches in the wider of ``reduce`` and
    ``params``. Losses, routers and norms compute in at least float32 whatever is chosen. Where one is ``None``, the model's
    own dtype stays.

    Args:
        params: dtype in which parameters are stored (the master copy that the optimizer updates).
        compute: dtype of parameters and activations in stages.
        reduce: dtype in which gradients are summed over ranks.

    Raises:
        ValueError: if a dtype is not a floating one.

    Example:
        >>> precision(params=torch.float32, compute=torch.bfloat16, reduce=torch.float32)  # doctest: +ELLIPSIS
        <function precision...>
    """
    given = {"params": params, "compute": compute, "reduce": reduce}
    for name, dtype in given.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"precision({name}={dtype!r}): expected a floating dtype such as torch.bfloat16")

    def transform(step: TrainStep) -> TrainStep:
        if step.precision != Precision():
            raise ValueError(f"precision is applied twice: the step has {step.precision}")
        said = ", ".join(f"{name}={str(dtype).removeprefix('torch.')}" for name, dtype in given.items() if dtype is not None)
        return step.replace(f"precision({said})", precision=Precision(params, compute, reduce))

    return transform
