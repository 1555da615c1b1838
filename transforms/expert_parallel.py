"""`expert_parallel`: experts spread over ranks, tokens sent to them, and the sending hidden behind compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from xtf.collectives import Axis
from xtf.dispatch import ARRIVED, COMBINED, COMPUTED, DISPATCHERS, READS, WAY, Dispatcher, Moves
from xtf.experts import ArrivedExperts, RoutedExperts
from xtf.stage import Exchange, Lower, Pair, Params, Program, Stage, StageFn, Values, recompute
from xtf.step import TrainStep


def expert_parallel(axis: Axis, *, overlap: int = 1, dispatcher: str | Dispatcher = "deduplicated") -> Callable[[TrainStep], TrainStep]:
    """Expert parallelism: each rank of an axis has a part of every layer's experts, and tokens travel to them.

    The ranks of the axis hold distinct tokens, as those of every other; attention, router and all else stay data-parallel over it.
    Under `xtf.transforms.shard` over both axes those leaves are split over all ranks, and the experts' over the other axes inside
    their part. A layer becomes dispatch (an exchange), experts (a grouped product on what arrived), and combine (an exchange and
    a sum). Every token reaches each of its experts, and none is padded.

    With ``overlap=n`` the tokens of a micro-batch run in n parts, interleaved so that one part's exchange is under way while
    another computes, in forward and in backward; see `xtf.overlap`, and `xtf.schedule` to print the order. This is Domino
    (Wang et al. 2024, arXiv 2409.15241) for expert parallelism, as XTuner V1 has it.

    Args:
        axis: the mesh axis, or several joined. Of size 1 the transform changes nothing.
        overlap: n, the parts; at least 1, and at most the tokens of a micro-batch.
        dispatcher: how tokens travel: a name in `xtf.dispatch.DISPATCHERS`, or a function like those. What each sends is said there.
            ``"deduplicated"`` sends least; ``"all_to_all"`` spares the bookkeeping where a token rarely has two experts on one rank;
            ``"all_gather"`` suits small axes.

    Any number of experts works: ``xtf.placement.part((0, experts), n, i)`` are those of rank i, as even as can be. A rank may have
    none, and then has nothing to compute in that stage.

    Raises:
        ValueError: for what is no mesh axis, an overlap below 1, an unknown dispatcher, a model without experts, or a step whose
            experts are spread already.

    Example:
        >>> import xtf
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> xtf.simulate(lambda mesh: expert_parallel(mesh["expert"], overlap=2)(step).stack, expert=2)[0]
        ('expert_parallel(expert=2, overlap=2)',)
    """
    if not isinstance(axis, Axis):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f'expert_parallel: {axis!r} is not a mesh axis; give mesh["name"]')
    if not isinstance(overlap, int) or isinstance(overlap, bool) or overlap < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"expert_parallel(overlap={overlap!r}): expected a whole number of parts, at least 1")
    if isinstance(dispatcher, str) and dispatcher not in DISPATCHERS:
        raise ValueError(f"expert_parallel(dispatcher={dispatcher!r}): expected one of {', '.join(map(repr, DISPATCHERS))}")
    moves: Dispatcher = DISPATCHERS[dispatcher] if isinstance(dispatcher, str) else dispatcher
    if not callable(moves):
        raise ValueError(f"expert_parallel(dispatcher={dispatcher!r}): expected a name or a function like xtf.dispatch.deduplicated")

    def rewrite(step: TrainStep, program: Program) -> Program:
        for node in [node for node in program if isinstance(node, RoutedExperts)]:
            program = _spread(program, node, axis, moves)
        return program

    def transform(step: TrainStep) -> TrainStep:
        if not any("expert" in spec.axes for spec in step.specs.values()):
            raise ValueError(f"expert_parallel: the model {step.model.family!r} has no experts; leave this transform out")
        if "expert" in step.owned:
            raise ValueError(f"expert_parallel is applied twice: experts are already spread over {step.owned['expert'].name!r}")
        said = [f"{axis.name}={axis.size}"] + ([f"overlap={overlap}"] if overlap > 1 else [])
        called = repr(dispatcher) if isinstance(dispatcher, str) else getattr(dispatcher, "__qualname__", type(dispatcher).__name__)
        said += [f"dispatcher={called}"] if dispatcher != "deduplicated" else []
        name, token_axes = f"expert_parallel({', '.join(said)})", step.with_token_axes((axis,))
        if axis.size == 1:
            return step.replace(name, token_axes=token_axes)
        return step.replace(
            name,
            token_axes=token_axes,
            owned={**step.owned, "expert": axis},
            rewrites=(*step.rewrites, rewrite),
            parts=overlap,
        )

    return transform


def _spread(program: Program, node: RoutedExperts, axis: Axis, dispatcher: Dispatcher) -> Program:
    """The program with one experts stage spread over ranks. The dispatch starts as soon as the router has run: what stands between
    the two (shared experts) runs while tokens travel."""
    at = program.index(node)
    x, *taken = node.reads
    routed = max(i for i, other in enumerate(program[:at]) if set(other.writes) & set(taken))
    moves = dispatcher(axis, node.experts, node.name)
    if not isinstance(moves, Moves):  # pyright: ignore[reportUnnecessaryIsInstance]
        called = getattr(dispatcher, "__qualname__", type(dispatcher).__name__)
        raise ValueError(f"the dispatcher {called} returned a {type(moves).__name__} for {node.name}, expected xtf.dispatch.Moves")
    dispatch = Exchange(f"{node.name}.dispatch", tuple(taken), (*ARRIVED, *WAY), moves.dispatch, moves.dispatch_back)
    rule = ArrivedExperts(node.compute, getattr(node.rule, "base", recompute))
    experts = Stage(node.name, "experts", node.fn, (node.key, "arrived"), node.params, ARRIVED, (COMPUTED,), rule=rule, named=node.named)
    combine = Exchange(f"{node.name}.combine", (COMPUTED, *WAY), (COMBINED,), moves.combine, moves.combine_back)
    add = Stage(f"{node.name}.add", "combine", _add, "add", {}, (x, COMBINED), (x,), rule=_add_rule)
    assert len(taken) == len(READS)
    return (*program[: routed + 1], dispatch, *program[routed + 1 : at], experts, combine, add, *program[at + 1 :])


def _add(params: Params, x: Tensor, combined: Tensor) -> Values:
    return (x + combined,)


def _add_rule(fn: StageFn, key: object, lower: Lower) -> Pair:
    """A sum keeps nothing."""

    def backward(
        params: Params, residual: Any, dwrites: tuple[Tensor | None, ...], consts: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], tuple[Tensor | None, ...]]:
        return {}, (dwrites[0], dwrites[0])

    return Pair(lambda params, reads, consts: (fn(params, *reads), None), backward, needs_params=False)
