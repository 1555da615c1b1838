"""`float8`: the large products of layers with float8 operands, scaled tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xtf.backends import backend_of
from xtf.ops.float8 import E4M3, E5M2, Recipe, float8_ops
from xtf.stage import Program, Stage
from xtf.step import TrainStep

KINDS = ("attention", "mlp", "shared", "experts")
"""The kinds of stages (`xtf.stage.Stage`) that have such products."""


def float8(
    *,
    only: Sequence[str] = KINDS,
    gradients: torch.dtype = E4M3,
    power_of_two: bool = False,
    weight_gradient: bool = True,
) -> Callable[[TrainStep], TrainStep]:
    """Dense and grouped matrix products of layers in float8, as DeepSeek-V3 trains (DeepSeek-AI 2024, section 3.3; see `xtf.ops.float8`).

    These are the projections of attention, the products of MLPs and shared experts, and the grouped products of routed experts, each
    forward and in both of its gradients. Activations have a scale for each tile of 1 × 128, weights for each block of 128 × 128, and
    sums are float32. Embedding, head, routers, norms, attention's scores and mixing, and the projection of a layer that predicts the
    token after the next compute as before. So do parameters and the optimizer: float8 numbers live inside products only.

    Without float8 units the operands are rounded all the same and multiplied as float32 numbers: the same loss curve, slower and with more
    memory than without this transform. So it is on every CPU, and for grouped products everywhere: torch has no grouped kernel for such
    scales. The rest on CUDA was never run on hardware.

    The gradient of a weight sums over tokens, so its tiles are of tokens: how tokens lie together (over ranks, micro-batches, parts that
    overlap) changes by a rounding what it is. With ``weight_gradient=False`` results depend on no layout, as without this transform.

    Args:
        only: the kinds of stages it is applied to: ``"attention"``, ``"mlp"``, ``"shared"``, ``"experts"``.
        gradients: dtype of the gradients of outputs, ``torch.float8_e4m3fn``, or ``torch.float8_e5m2`` of more range and less precision.
        power_of_two: whether scales are rounded up to powers of two, as DeepSeek-V3.1 has them.
        weight_gradient: whether the gradients of weights are such products too.

    Raises:
        ValueError: for a kind that there is not, none, one given twice, or another dtype; and if a step has it already.

    Example:
        >>> import xtf
        >>> step = float8()(xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3)))
        >>> step.stack
        ('float8()',)
    """
    given = [only] if isinstance(only, str) else list(only)
    unknown = [kind for kind in given if kind not in KINDS]
    if unknown or not given or len(set(given)) < len(given):
        raise ValueError(f"float8(only={only!r}): expected one or several of {', '.join(KINDS)}, each once")
    if gradients not in (E4M3, E5M2):
        raise ValueError(f"float8(gradients={gradients!r}): expected torch.float8_e4m3fn or torch.float8_e5m2")
    for name, value in (("power_of_two", power_of_two), ("weight_gradient", weight_gradient)):
        if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"float8({name}={value!r}): expected True or False")
    recipe, kinds = Recipe(gradients, power_of_two, weight_gradient), frozenset(given)

    def rewrite(step: TrainStep, program: Program) -> Program:
        ops = float8_ops(step.ops or backend_of(step.device).ops, recipe)
        rounding = {stage.name: stage for stage in step.model.build(ops) if stage.kind in kinds}
        return tuple(rounding.get(node.name, node) if isinstance(node, Stage) else node for node in program)

    def transform(step: TrainStep) -> TrainStep:
        if any(name.startswith("float8(") for name in step.stack):
            raise ValueError(f"float8 is applied twice: the step has {', '.join(step.stack)}")
        said = "" if kinds == set(KINDS) else f"only={'+'.join(kind for kind in KINDS if kind in kinds)}"
        rest = str(recipe).removeprefix("float8(").removesuffix(")")
        # first of all rewrites, whatever was applied before: the others change the model's stages, and these take their place
        return step.replace(f"float8({', '.join(filter(None, (said, rest)))})", rewrites=(rewrite, *step.rewrites))

    return transform
