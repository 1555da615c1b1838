"""`context_parallel`: sequences longer than one rank's memory, spread over ranks token by token.

Dims: T tokens of this rank, H hidden size, D head size, Dv value head size, half = D / 2, N documents, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from xtf import ring
from xtf.attention import AttentionStage, Project
from xtf.batch import PER_DOCUMENT
from xtf.collectives import Axis
from xtf.ring import Ring, Seen
from xtf.stage import Lower, Pair, PairRule, Params, Program, Stage, StageFn, Values
from xtf.step import TrainStep
from xtf.zigzag import zigzag

_SHARES = "context"
"""The constant that says which tokens each rank has (`xtf.zigzag.Shares`)."""

_DOCUMENTS = ("cu_seqlens", "document_tokens")
"""Constants about documents: a stage that takes one looks beyond a token."""


def context_parallel(axis: Axis) -> Callable[[TrainStep], TrainStep]:
    """Context parallelism: the ranks of an axis share every sequence, and attention is ring attention (Liu et al. 2023; `xtf.ring`).

    **Batch.** The ranks of the axis are given the *same* rows: ``split_batch(batch, mesh, axes=[...])`` with the other axes, which are
    ``step.row_axes``. Each takes its own tokens of them once everything that needs the whole sequence is known: targets (the token after a
    chunk's end is another rank's), positions, rotary tables, documents. Which tokens is said in `xtf.zigzag`: of each document chunks i
    and 2n - 1 - i of 2n, so that tokens and causal work are even whatever the documents' lengths. From then on the axis carries
    distinct tokens, as every other: all but attention runs on a rank's own tokens, losses and gradients are summed over it, `shard`
    and `expert_parallel` may use it too.

    **Attention.** Each attention stage stays one stage with the name, the values and the parameters that it has, so that other transforms
    see it as before; its rule is by hand. Projections before and after are lowered (compiled) as two functions; between them the ring runs
    as plain code, since a collective cannot be inside a compiled stage, nor need it: what costs time there are kernels that are compiled
    anyway. (Declared as exchanges between stages, the keys and values of every hop would be residuals: the whole sequence's, on every
    rank.) Packed documents, windows, sinks, grouped queries and value heads of another size are those of `xtf.ops.Attention`.

    **Memory.** An attention keeps x, the mixed values and their softmax's sums, of this rank's tokens; q, k and v are projected again in
    backward. Beyond that a rank has the keys and values of two others at a time: activations are little more than 1/n of the plain step's.
    `remat` decides for all other stages.

    **Bytes** that a rank sends per layer and micro-batch, with M = ⌈tokens ÷ n⌉ and W = kv_heads × (D + Dv): ``(n - 1) × M × W`` values in
    forward; in backward as many, and ``(n - 1) × M × W`` of at least float32. (Latent attention sends its expanded heads.) Per micro-batch
    there is one all-reduce of two integers: ranks that were given different rows raise.
    Where routers count by document (``sequence_loss``), each such layer sums N × E integers over the axis.

    Args:
        axis: the mesh axis, or several joined. Of size 1 the transform changes nothing.

    Raises:
        ValueError: for what is no mesh axis, a step whose sequences are split already, an axis that another transform splits matrices
            over, stages that look beyond a token in a way that is not known here, and ranks that are given different rows.

    Example:
        >>> import xtf
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> xtf.simulate(lambda mesh: context_parallel(mesh["context"])(step).stack, context=2)[0]
        ('context_parallel(context=2)',)
    """
    if not isinstance(axis, Axis):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f'context_parallel: {axis!r} is not a mesh axis; give mesh["name"]')

    def rewrite(step: TrainStep, program: Program) -> Program:
        for logical, owner in step.owned.items():
            if logical != "expert" and set(owner.names) & set(axis.names):
                raise ValueError(
                    f"context_parallel: {logical!r} of the parameters is split over {owner.name!r} too, whose ranks then see the same "
                    f"tokens; the ranks of {axis.name!r} have different ones: use two axes"
                )
        if not any(isinstance(node, AttentionStage) for node in program):
            raise ValueError(f"context_parallel: the model {step.model.family!r} has no stage made by xtf.attention.attention_stage")
        return tuple(_spread(node, axis) if isinstance(node, Stage) else node for node in program)

    def transform(step: TrainStep) -> TrainStep:
        if step.sequence_axes:
            held = ", ".join(other.name for other in step.sequence_axes)
            raise ValueError(f"context_parallel is applied twice: sequences are already split over {held}; join axes to use several")
        name, single = f"context_parallel({axis.name}={axis.size})", tuple(axis.mesh[name] for name in axis.names)
        inner, token_axes = step.tokens, step.with_token_axes(single)
        if axis.size == 1:
            return step.replace(name, token_axes=token_axes, sequence_axes=single)
        return step.replace(
            name,
            token_axes=token_axes,
            sequence_axes=single,
            tokens=lambda consts: _own_tokens(inner(consts), axis),
            rewrites=(*step.rewrites, rewrite),
        )

    return transform


# Tokens -------------------------------------------------------------------------------------------------------------------------


def _own_tokens(consts: Mapping[str, Any], axis: Axis) -> dict[str, Any]:
    """The constants of this rank's tokens, and which tokens all have. To stages that run token by token they are one document."""
    _check_same(consts, axis)
    ends: list[int] = consts["cu_seqlens"].tolist()
    shares = zigzag(ends, axis.size)
    tokens = shares.tokens(axis.index).to(consts["input_ids"].device)

    def own(name: str, value: Any) -> Any:
        per_token = name not in PER_DOCUMENT and isinstance(value, Tensor) and value.shape[:1] == (ends[-1],)
        return value.index_select(0, tokens) if per_token else value

    bounds = torch.tensor([0, shares.counts[axis.index]], dtype=torch.int32, device=consts["cu_seqlens"].device)
    return {name: own(name, value) for name, value in consts.items()} | {"cu_seqlens": bounds, _SHARES: shares}


def _check_same(consts: Mapping[str, Any], axis: Axis) -> None:
    """Refuse rows that differ from rank to rank: what is trained on would be pieces of different sequences."""
    if consts["input_ids"].is_meta:  # no values, as where memory is planned
        return
    total = torch.zeros((), dtype=torch.int64, device=consts["input_ids"].device)
    for name in ("input_ids", "positions", "targets", "weights", "cu_seqlens"):
        value: Tensor = consts[name]
        bits = value.double().view(torch.int64) if value.is_floating_point() else value.long()
        factors = torch.arange(1, bits.shape[0] + 1, device=bits.device) * 0x9E3779B97F4A7C1  # sums of integers wrap: a hash of order too
        total = total * 31 + ((bits ^ (bits >> 17)) * factors).sum() + bits.shape[0]
    total = total & ((1 << 62) - 1)
    largest = axis.start_all_reduce(torch.stack([total, -total]), "max", label="context_parallel").wait()
    if int(largest.sum()):
        raise ValueError(
            f"context_parallel: the ranks of {axis.name!r} were given different rows, but they share each sequence: give them the same, as "
            "xtf.split_batch(batch, mesh, axes=[axis.name for axis in step.row_axes])"
        )


# Stages -------------------------------------------------------------------------------------------------------------------------


def _spread(stage: Stage, axis: Axis) -> Stage:
    """The stage on tokens of which other ranks have some."""
    if isinstance(stage, AttentionStage):
        if stage.fn is not stage.whole:
            raise _changed(stage.name)
        return dataclasses.replace(
            stage,
            fn=_by_itself,
            rule=_ring_rule(stage, axis),
            key=(stage.key, "context_parallel"),
            consts=(*stage.consts, _SHARES),
        )
    if stage.kind == "statistics" and stage.consts == ("document_tokens",):
        return dataclasses.replace(stage, rule=_summed_counts(stage, axis), key=(stage.key, "context_parallel"))
    if set(stage.consts) & set(_DOCUMENTS) and stage.kind != "router":
        taken = ", ".join(sorted(set(stage.consts) & set(_DOCUMENTS)))
        raise ValueError(
            f"context_parallel: the stage {stage.name!r} takes {taken}, so tokens see each other in a way that is not known here: make it "
            "with xtf.attention.attention_stage"
        )
    return stage


def _by_itself(params: Params, *reads: Tensor, **consts: Any) -> Values:
    raise ValueError(
        "an attention stage under context_parallel runs by its own rule, which sends keys and values: it has no other function"
    )


def _changed(name: str) -> ValueError:
    return ValueError(
        f"context_parallel: another transform changed what the stage {name!r} computes, and its parts are not known: the two cannot be "
        "combined"
    )


def _ring_rule(stage: AttentionStage, axis: Axis) -> PairRule:
    """The rule of an attention stage whose keys and values travel."""
    project, output = stage.project, stage.output

    def project_back(
        params: Params,
        x: Float[Tensor, "T H"],
        cos: Float[Tensor, "T half"],
        sin: Float[Tensor, "T half"],
        dq: Float[Tensor, "T heads D"],
        dk: Float[Tensor, "T kv_heads D"],
        dv: Float[Tensor, "T kv_heads Dv"],
    ) -> Any:
        pullback: Any = torch.func.vjp(_of_x(project, cos, sin), dict(params), x)[1]
        return pullback((dq, dk, dv))

    def output_back(params: Params, x: Float[Tensor, "T H"], mixed: Float[Tensor, "T heads Dv"], dy: Float[Tensor, "T H"]) -> Any:
        pullback: Any = torch.func.vjp(output, dict(params), x, mixed)[1]
        return pullback(dy)

    def rule(fn: StageFn, key: Hashable, lower: Lower) -> Pair:
        if fn is not _by_itself:
            raise _changed(stage.name)
        run_project, run_output = lower(project, (key, "project")), lower(output, (key, "output"))
        run_project_back, run_output_back = lower(project_back, (key, "project", "back")), lower(output_back, (key, "output", "back"))

        def of(consts: Mapping[str, Any]) -> Ring:
            return Ring(axis, consts[_SHARES], stage.scale, stage.window, stage.name)

        def parts(params: Params) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            """The parameters before and after the ring."""
            after = {name: params[name] for name in stage.after}
            return {name: leaf for name, leaf in params.items() if name not in after and name != "sinks"}, after

        def forward(params: Params, reads: Values, consts: Mapping[str, Any]) -> tuple[Values, Any]:
            (x,), (before, after), around = reads, parts(params), of(consts)
            q, k, v = run_project(before, x, consts["cos"], consts["sin"])
            seen = ring.forward(around, ring.start(around, k, v), q, k, v, params.get("sinks"))
            return (run_output(after, x, seen.out),), (x, *seen)

        def backward(params: Params, residual: Any, dwrites: tuple[Tensor | None, ...], consts: Mapping[str, Any]) -> Any:
            (x, out, logsumexp), (dy,), (before, after), around = residual, dwrites, parts(params), of(consts)
            assert dy is not None
            q, k, v = run_project(before, x, consts["cos"], consts["sin"])
            coming = ring.start(around, k, v)  # under way while the output's gradients are made
            dafter, dx, dmixed = run_output_back(after, x, out, dy)
            dq, dk, dv, dsinks = ring.backward(around, coming, q, k, v, Seen(out, logsumexp), dmixed, params.get("sinks"))
            dbefore, through = run_project_back(before, x, consts["cos"], consts["sin"], dq, dk, dv)
            return {**dbefore, **dafter, **({} if dsinks is None else {"sinks": dsinks})}, (dx + through,)

        return Pair(forward, backward)

    return rule


def _of_x(project: Project, cos: Tensor, sin: Tensor) -> Callable[[Params, Tensor], Values]:
    def of(params: Params, x: Tensor) -> Values:
        return project(params, x, cos, sin)

    return of


def _summed_counts(stage: Stage, axis: Axis) -> PairRule:
    """The rule of the statistics of documents: what it makes of counts × probabilities is a sum over tokens of the latter, so it needs all
    ranks' counts, integers without a gradient, and this rank's probabilities."""

    def rule(fn: StageFn, key: Hashable, lower: Lower) -> Pair:
        pair = stage.rule(fn, key, lower)

        def forward(params: Params, reads: Values, consts: Mapping[str, Any]) -> tuple[Values, Any]:
            counts, *rest = reads
            return pair.forward(params, (axis.start_all_reduce(counts, label=stage.name).wait(), *rest), consts)

        return pair._replace(forward=forward, evaluate=None)

    return rule
