"""Faults of gradients and of their norm: the loss is right and the training is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.silent.record import case, equal_rows, moe, replaced, sinks, tied
from xtf import step as step_module
from xtf import testing, tree
from xtf.dispatch import DISPATCHERS, deduplicated
from xtf.mesh import Mesh
from xtf.optim import leaves
from xtf.placement import Placed, Placement, reduce_transfer
from xtf.stage import Transfer
from xtf.step import compose
from xtf.transforms import expert_parallel, shard

LOSSES = (r"^\s*(evaluated |metric )?loss\b", r"metric cross_entropy")
"""What a message says where a loss is wrong."""


def experts_on_two(batch: Any = None) -> Any:
    return testing.check(lambda mesh: expert_parallel(mesh["expert"]), model=moe(), batch=batch, steps=2, expert=2)


def experts_and_shards() -> Any:
    return testing.check(lambda mesh: compose(expert_parallel(mesh["expert"]), shard(*_axes(mesh))), model=moe(), data=2, expert=2)


def _axes(mesh: Mesh) -> list[Any]:
    return [mesh[name] for name in mesh]


@case(
    "expert gradients doubled at expert-parallel 2",
    experts_on_two,
    says=[
        r"step 1, gradient of layers\.0\.moe\.gate_up on every rank: .* it is 2 × the reference \(the signature of a doubled reduction\)",
        r"step 1, gradient of layers\.2\.moe\.down on every rank: .* it is 2 × the reference",
    ],
    right=[*LOSSES, r"gradient of (embed|head|norm)", r"gradient of layers\.\d\.(attention|moe\.router)"],
    reported=["pytorch/pytorch#160285", "deepspeedai/DeepSpeed#5259", "databricks/megablocks#86"],
)
def doubled() -> Generator[None]:
    """`xtf.step.reduce_transfer` sums experts' gradients as if a rank's own experts were replicas: times the size of the axis."""

    def wrong(stage: str, placements: Any, *args: Any) -> Any:
        transfer = reduce_transfer(stage, placements, *args)

        def owners(path: str) -> int:
            sizes = [split.axis.size for split in placements[path].splits if not split.gathered]
            return sizes[0] if sizes else 1

        def wait(handle: Any) -> Any:
            whole = handle if transfer is None else transfer.wait(handle)
            return {path: grad * owners(path) for path, grad in whole.items()}

        return Transfer((lambda whole: dict(whole)) if transfer is None else transfer.start, wait)

    with replaced((step_module, "reduce_transfer", wrong)):
        yield


@case(
    "gradients of parameters below the experts missing a reduction while the loss is right",
    partial(experts_on_two, equal_rows(2)),
    says=[
        r"gradient of layers\.0\.attention\.q on every rank: .* it is 0\.5 × the reference \(a missing reduction over expert=2",
        r"gradient of embed\.weight on every rank: .* it is 0\.5 × the reference",
        r"metric grad_norm",
    ],
    right=[*LOSSES, r"gradient of layers\.\d\.moe\.(gate_up|down)"],
    reported=["NVIDIA/Megatron-LM#5916", "NVIDIA/Megatron-LM#7452"],
)
def unsummed() -> Generator[None]:
    """`xtf.step.reduce_transfer` leaves out the expert axis for all leaves but experts, as if the axis carried no tokens of its own."""

    def wrong(stage: str, placements: Any, sum_over: Any, *args: Any) -> Any:
        kept = {path: [axis for axis in axes if "expert" not in axis.names] for path, axes in sum_over.items()}
        return reduce_transfer(stage, placements, kept, *args)

    with replaced((step_module, "reduce_transfer", wrong)):
        yield


@case(
    "router gradient lost in the exchange of tokens",
    experts_on_two,
    says=[r"step 1, gradient of layers\.0\.moe\.router", r"step 1, gradient of layers\.2\.moe\.router"],
    right=[*LOSSES, r"gradient of layers\.2\.moe\.(gate_up|down)", r"gradient of (head|norm)\."],
    reported=["NVIDIA-NeMo/Automodel#2995", "huggingface/transformers#48687"],
)
def detached() -> Generator[None]:
    """`xtf.dispatch.deduplicated` brings back no gradient of the routing weights, as a plain all-gather of them would."""

    def wrong(*args: Any) -> Any:
        moves = deduplicated(*args)

        def wait(handle: Any) -> Any:
            dtokens, dweights, rest = moves.dispatch_back.wait(handle)
            return dtokens, torch.zeros_like(dweights), rest

        return moves._replace(dispatch_back=Transfer(moves.dispatch_back.start, wait))

    before = DISPATCHERS["deduplicated"]
    DISPATCHERS["deduplicated"] = wrong  # pyright: ignore[reportIndexIssue]
    try:
        yield
    finally:
        DISPATCHERS["deduplicated"] = before  # pyright: ignore[reportIndexIssue]


@case(
    "gradients averaged over ranks that should be summed",
    experts_and_shards,
    says=[
        r"gradient of layers\.0\.moe\.gate_up on every rank: .* it is 0\.5 × the reference \(a missing reduction over data=2",
        r"gradient of embed\.weight on every rank: .* it is 0\.25 × the reference \(a missing reduction over all 4 ranks",
    ],
    right=LOSSES,
    reported=["InternLM/xtuner#1968", "databricks/megablocks#20"],
)
def averaged() -> Generator[None]:
    """`xtf.step.reduce_transfer` divides by the ranks that it sums over, as FSDP does by default: experts by fewer than all else."""

    def wrong(stage: str, placements: Any, *args: Any) -> Any:
        transfer = reduce_transfer(stage, placements, *args)
        if transfer is None:
            return None

        def ranks(placement: Placement) -> int:
            return 1 if placement.gathered is None else placement.gathered.axis.size

        return Transfer(transfer.start, lambda h: {path: grad / ranks(placements[path]) for path, grad in transfer.wait(h).items()})

    with replaced((step_module, "reduce_transfer", wrong)):
        yield


# Norms ---------------------------------------------------------------------------------------------------------------------------


@case(
    "clip norm that differs between expert groups",
    experts_and_shards,
    says=[r"metric grad_norm on every rank", r"embed\.weight after the step", r"layers\.0\.moe\.gate_up after the step"],
    right=[*LOSSES, "gradient of"],
    reported=["NVIDIA-NeMo/Automodel#3816", "deepspeedai/DeepSpeed#8475", "hpcaitech/ColossalAI#2192", "NVIDIA/Megatron-LM#5916"],
)
def of_own_experts() -> Generator[None]:
    """`Placed.norm` does not sum over the axis that experts are spread over: each expert group clips by a norm of its own."""
    norm = Placed.norm

    def wrong(self: Placed, grads: Any) -> Tensor:
        kept = {path: dataclasses.replace(p, splits=tuple(s for s in p.splits if s.gathered)) for path, p in self.leaves.items()}
        return norm(Placed(kept, self.donate), grads)

    with replaced((Placed, "norm", wrong)):
        yield


@case(
    "clip norm that counts replicas once for each rank",
    lambda: testing.check(lambda mesh: shard(replicate=mesh["copies"]), model=tied(), copies=2),
    says=[
        r"metric grad_norm on every rank: .* it is 1\.41421 × the reference \(a norm that counts what lies on several ranks of copies=2",
        r"norm\.weight after the step",
    ],
    right=[*LOSSES, "gradient of"],
    reported=["sgl-project/SpecForge#882", "ROCm/TransformerEngine#715"],
)
def of_replicas() -> Generator[None]:
    """`Placed.norm` sums squares over all ranks, also of leaves that each of them holds whole."""
    norm, placements = Placed.norm, step_module.TrainStep.placed

    def placed(self: Any, **fields: Any) -> Any:
        right = placements(self, **fields)
        return _Counting(right.leaves, right.donate, self.token_axis)

    class _Counting(Placed):
        def __init__(self, leaves: Any, donate: bool, axis: Any) -> None:
            super().__init__(leaves, donate)
            object.__setattr__(self, "axis", axis)

        def norm(self, grads: Any) -> Tensor:
            axis: Any = vars(self)["axis"]
            return axis.start_all_reduce(norm(self, grads).square()).wait().sqrt()

    with replaced((step_module.TrainStep, "placed", placed)):
        yield


@case(
    "tied embeddings counted twice in the norm",
    lambda: testing.check(lambda mesh: shard(mesh["data"]), model=tied(), data=2),
    says=[
        r"metric grad_norm on every rank: .* it is 1\.\d+ × the reference",
        r"embed\.weight after the step",
        r"norm\.weight after the step",
    ],
    right=[*LOSSES, "gradient of"],
    reported=["NVIDIA/Megatron-LM#7227", "NVIDIA/Megatron-LM#7228"],
)
def of_both() -> Generator[None]:
    """`Placed.norm` counts the gradient of ``embed.weight`` as the embedding's and as the head's."""
    norm = Placed.norm

    def wrong(self: Placed, grads: Any) -> Tensor:
        shared = tree.map_with_path(lambda path, grad: grad if path == "embed.weight" else None, grads)
        return (norm(self, grads).square() + norm(self, shared).square()).sqrt()

    with replaced((Placed, "norm", wrong)):
        yield


@case(
    "attention sinks left out of the norm",
    lambda: testing.check(lambda mesh: shard(mesh["data"]), model=sinks(), data=2),
    says=[r"metric grad_norm on every rank: .* it is 0\.9\d+ × the reference", r"embed\.weight after the step"],
    right=[*LOSSES, "gradient of"],
    reported=["NVIDIA/Megatron-LM#7452"],
)
def without_sinks() -> Generator[None]:
    """`Placed.norm` passes over leaves that are called ``sinks``."""
    norm = Placed.norm

    def wrong(self: Placed, grads: Any) -> Tensor:
        return norm(self, tree.map_with_path(lambda path, grad: None if path.endswith("sinks") else grad, grads))

    with replaced((Placed, "norm", wrong)):
        yield


def idle_experts() -> Any:
    batch = {name: value[:1, :3] for name, value in testing.random_batch(61).items()}
    batch["labels"] = batch["input_ids"]
    return testing.check(lambda mesh: expert_parallel(mesh["expert"]), model=moe(), batch=batch, steps=2, expert=3)


@case(
    "experts without tokens left out of the update",
    idle_experts,
    says=[r"step 1, layers\.2\.moe\.gate_up after the step", r"step 1, layers\.2\.moe\.down after the step"],
    right=[*LOSSES, "gradient of", r"(embed|norm|head|attention\.\w+|router) after the step"],
    reported=["NVIDIA-NeMo/Automodel#2995"],
)
def left_out() -> Generator[None]:
    """`xtf.optim.leaves.leafwise` takes a gradient that is zero for none: such a leaf does not decay, and its moments stay."""
    leafwise = leaves.leafwise

    def wrong(fn: Any, grads: Any, *args: Any, **options: Any) -> Any:
        return leafwise(fn, tree.map(lambda g: g if g is not None and g.any() else None, grads), *args, **options)

    with replaced((leaves, "leafwise", wrong)):
        yield
