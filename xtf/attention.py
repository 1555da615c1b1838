"""Attention as a stage: what a model does before and after tokens see each other is given apart from how they see each other.

As `xtf.experts.RoutedExperts` does for experts, so that a layout may put communication between the parts
(`xtf.transforms.context_parallel`).

Dims: T tokens (packed), H hidden size, D head size, Dv value head size, half = D / 2, bounds = documents + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from jaxtyping import Float, Int32
from torch import Tensor

from xtf.joint import keep
from xtf.ops import Attention
from xtf.stage import Params, Stage, StageFn
from xtf.tree import Path

Project = Callable[[Params, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""``(params, x (T, H), cos (T, half), sin (T, half)) -> (q (T, heads, D), k (T, kv_heads, D), v (T, kv_heads, Dv))``, token by token."""

Output = Callable[[Params, Tensor, Tensor], Tensor]
"""``(params, x (T, H), mixed (T, heads, Dv)) -> x (T, H)``, token by token."""


@dataclass(frozen=True)
class AttentionStage(Stage):
    """The stage of a block's attention; made by `attention_stage`. It reads and writes ``x`` (T, H), and takes the constants ``cos``,
    ``sin`` and ``cu_seqlens``. A parameter that it calls ``sinks`` (heads,) goes to the op (`xtf.ops.Attention`).
    It names (`xtf.joint.keep`) queries, keys and values as they meet ``"qkv"``, and what comes of them ``"attention"``.

    Args:
        project: what comes before.
        output: what comes after.
        after: the stage's names for the parameters that ``output`` uses, none of which ``project`` does.
        scale: factor on the scores.
        window: how many tokens back, itself included, a token sees; ``None`` for all of its document.
        whole: the function that was made of these; a stage whose ``fn`` is another was changed by a transform, which knows no parts.
    """

    project: Project = lambda params, x, cos, sin: (x, x, x)
    output: Output = lambda params, x, mixed: x
    after: tuple[str, ...] = ()
    scale: float = 1.0
    window: int | None = None
    whole: StageFn | None = None


def attention_stage(
    name: str,
    key: Hashable,
    params: Mapping[str, Path],
    op: Attention,
    project: Project,
    output: Output,
    *,
    after: tuple[str, ...],
    scale: float,
    window: int | None = None,
) -> AttentionStage:
    """An `AttentionStage`.

    Args:
        name: of the stage.
        key: see `xtf.stage.Stage`; so is ``params``.
        op: how tokens see each other.
        project, output, after, scale, window: see `AttentionStage`.
    """
    fn = attention_fn(op, project, output, scale=scale, window=window)
    return AttentionStage(
        name,
        "attention",
        fn,
        key,
        params,
        ("x",),
        ("x",),
        ("cos", "sin", "cu_seqlens"),
        named=("qkv", "attention"),
        project=project,
        output=output,
        after=after,
        scale=scale,
        window=window,
        whole=fn,
    )


def attention_fn(op: Attention, project: Project, output: Output, *, scale: float, window: int | None = None) -> StageFn:
    """The function of an attention stage: ``(params, x (T, H), *, cos, sin, cu_seqlens) -> (x,)``."""

    def fn(
        params: Params,
        x: Float[Tensor, "T H"],
        *,
        cos: Float[Tensor, "T half"],
        sin: Float[Tensor, "T half"],
        cu_seqlens: Int32[Tensor, " bounds"],
    ) -> tuple[Float[Tensor, "T H"]]:
        q, k, v = (keep("qkv", t) for t in project(params, x, cos, sin))
        mixed = keep("attention", op(q, k, v, cu_seqlens, scale=scale, window=window, sinks=params.get("sinks")))
        return (output(params, x, mixed),)

    return fn
