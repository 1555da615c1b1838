"""Faults of routers: their auxiliary losses, the counts that they keep, and the choice that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.silent.gradients import LOSSES
from tests.silent.record import Fault, case, latent, moe, not_finite_at, poisoned, replaced
from xtf import model as model_module
from xtf import testing, tree
from xtf.batch import pack
from xtf.experts import RoutesOnce
from xtf.stage import Lower, Pair, Program, Stage, StageFn, recompute
from xtf.step import TrainStep, compose, train_step
from xtf.step_loss import StepLoss
from xtf.testing import LawError
from xtf.transforms import accumulate, chunk_loss, expert_parallel, remat, shard

# Auxiliary losses ----------------------------------------------------------------------------------------------------------------

ROUTERS = [r"gradient of layers\.0\.moe\.router", r"gradient of layers\.2\.moe\.router"]
NOT_ROUTERS = [*LOSSES, r"metric aux_loss", r"gradient of layers\.2\.moe\.(gate_up|down)", r"gradient of (head|norm)\."]
"""Nothing behind the last router has a part in what its auxiliary loss gives."""


def auxiliary() -> Any:
    """Two ranks, two micro-batches of unequal weight."""
    layout = lambda mesh: compose(expert_parallel(mesh["expert"]), accumulate(2))  # noqa: E731
    return testing.check(layout, model=moe(), expert=2)


def scaled(name: str, factor: Callable[[StepLoss], float], how: str, *reported: str) -> Fault:
    """A case in which cotangents of router statistics are multiplied."""

    def fault() -> Generator[None]:
        seeds = StepLoss.seeds

        def wrong(self: StepLoss, micro: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: seed * (1 if name == "loss" else factor(self)) for name, seed in seeds(self, micro, values).items()}

        with replaced((StepLoss, "seeds", wrong)):
            yield

    fault.__doc__ = f"`StepLoss.seeds` gives the cotangents of router statistics {how}."
    named = f"router auxiliary-loss gradient {name}"
    return case(named, auxiliary, says=ROUTERS, right=NOT_ROUTERS, reported=reported)(fault)


def _ranks(loss: StepLoss) -> int:
    assert loss.step.token_axis is not None
    return loss.step.token_axis.size


by_ranks = scaled(
    "scaled by the number of ranks",
    lambda loss: 1 / _ranks(loss),
    "divided by the number of ranks, as an average over them would",
    "NVIDIA/Megatron-LM#3672",
    "NVIDIA/Megatron-LM#1652",
    "NVIDIA/Megatron-LM#5047",
    "NVIDIA-NeMo/Automodel#1412",
)
by_micros = scaled(
    "scaled by the number of micro-batches",
    lambda loss: len(loss.micros),
    "times the number of micro-batches, as if each had a loss of its own",
    "InternLM/xtuner#1101",
)
not_at_all = scaled("missing", lambda loss: 0, "as zero: the loss is reported and trains nothing", "NVIDIA-NeMo/Automodel#1408")


@case(
    "load-balancing statistics of each rank alone",
    lambda: testing.check(lambda mesh: shard(mesh["data"]), model=latent(), steps=2, data=2),
    says=[r"step 1, metric expert_load on every rank", r"step 1, metric aux_loss", r"step 1, gradient of layers\.1\.moe\.router"],
    right=[r"metric cross_entropy", r"step 2"],
    reported=["pytorch/torchtitan#3000"],
)
def local_statistics() -> Generator[None]:
    """`StepLoss._global` does not sum the statistics of routers over ranks."""
    whole = StepLoss._global

    def wrong(self: StepLoss, values: Mapping[str, Tensor]) -> Any:
        with replaced((self, "sum", lambda value: value)):
            return whole(self, values)

    with replaced((StepLoss, "_global", wrong)):
        yield


def padded() -> Any:
    """A batch as it is, against the same with padding: in front of no document, behind each row, and in a row of its own."""

    def pad(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        blank = {"labels": -100, "document_ids": -1}
        wider = {name: torch.nn.functional.pad(value, (0, 3, 0, 1), value=blank.get(name, 0)) for name, value in batch.items()}
        return wider | {"input_ids": wider["input_ids"].masked_fill(wider["document_ids"] < 0, 7)}

    batch = testing.random_batch(61)
    batch["document_ids"] = batch["document_ids"].clamp_min(0)  # no padding of its own
    return testing.check(lambda step: step.replace("padded", split=lambda given: (pad(given),)), model=[moe(), latent()], batch=batch)


@case(
    "padded tokens counted in the load and in the auxiliary loss",
    padded,
    says=[r"metric expert_load", r"metric aux_loss", r"metric router_z", r"gradient of layers\.0\.moe\.router"],
    right=[r"metric cross_entropy", r"metric tokens"],
    reported=["huggingface/transformers#28505", "NVIDIA/Megatron-LM#2121", "pytorch/torchtitan#4594"],
)
def padding_counts() -> Generator[None]:
    """`xtf.batch.pack`, as a model calls it, says that every token is valid."""

    def wrong(batch: Any) -> dict[str, Any]:
        packed = pack(batch)
        return packed | {"valid": torch.ones_like(packed["valid"])}

    with replaced((model_module, "pack", wrong)):
        yield


# Counts --------------------------------------------------------------------------------------------------------------------------


def recomputed() -> Any:
    return testing.check(compose(accumulate(2), remat("everything")), model=latent(), steps=2)


@case(
    "auxiliary counters advanced twice by recomputation",
    recomputed,
    says=[r"step 1, metric expert_load: .* it is 2 × the reference", r"step 1, metric load_violation"],
    right=[r"metric cross_entropy", r"metric router_z", "step 2"],
    reported=["pytorch/torchtitan#1593", "NVIDIA-NeMo/Automodel#3247"],
)
def counted_twice() -> Generator[None]:
    """`StepLoss._global` adds the counts of the forward that is run again in backward to those of the forward."""
    whole = StepLoss._global

    def wrong(self: StepLoss, values: Mapping[str, Tensor]) -> Any:
        return whole(self, {name: value if value.is_floating_point() else value * 2 for name, value in values.items()})

    with replaced((StepLoss, "_global", wrong)):
        yield


@case(
    "router bias updated for each micro-batch",
    recomputed,
    says=[r"step 1, layers\.1\.moe\.correction after the step: .* it is 2 × the reference"],
    right=[*LOSSES, "gradient of", "metric"],
    reported=["pytorch/torchtitan#1304"],
)
def each_micro() -> Generator[None]:
    """`TrainStep._update_untrained` runs once for each micro-batch of a step."""
    once = TrainStep._update_untrained

    def wrong(self: TrainStep, params: Any, run: StepLoss) -> Any:
        for _ in run.micros:
            params = once(self, params, run)
        return params

    with replaced((TrainStep, "_update_untrained", wrong)):
        yield


@case(
    "router bias updated on a skipped step",
    lambda: testing.check(lambda mesh: shard(mesh["data"]), model=not_finite_at(60, latent()), batch=poisoned(60), data=2),
    says=[r"step 2, layers\.1\.moe\.correction after the step on every rank"],
    right=["step [13]", "metric skipped", r"(embed|router|gate_up)\S* after the step"],
    reported=["marin-community/levanter#973"],
)
def of_skipped() -> Generator[None]:
    """`TrainStep.__call__` updates what is not trained also where loss or gradients are not finite."""
    call = TrainStep.__call__

    def wrong(self: TrainStep, state: Any, batch: Any) -> Any:
        new, metrics = call(self, state, batch)
        if metrics["skipped"]:
            run = StepLoss(self, batch, None)
            self._differentiate(state.params, run, None)
            new = new.replace(params=self._update_untrained(new.params, run))
        return new, metrics

    with replaced((TrainStep, "__call__", wrong)):
        yield


def evaluated_between() -> None:
    """Steps with and without an evaluation of other data before each: the same parameters, and the same metrics."""
    step = accumulate(2)(train_step(latent(), testing.default_optimizer()))
    plain = other = step.init(0)
    for at in range(4):
        batch, held_out = (testing.random_batch(61, seed=at + more) for more in (0, 100))
        plain, metrics = step(plain, batch)
        step.evaluate(other.params, held_out)
        other, with_evaluation = step(other, batch)
        same = {name: (value, with_evaluation[name]) for name, value in metrics.items()}
        same |= {f"{path} after": (leaf, tree.items(other.params)[path]) for path, leaf in tree.items(plain.params).items()}
        if different := [name for name, (a, b) in same.items() if not torch.equal(a, b)]:
            raise LawError(f"step {at + 1} with an evaluation before it: {', '.join(different)} differ")


@case(
    "evaluation that leaks into load statistics",
    evaluated_between,
    says=[r"step \d with an evaluation before it: layers\.1\.moe\.correction after differ"],
    right=["loss", "grad_norm", "embed"],
    reported=["pytorch/torchtitan#4148", "databricks/megablocks#69"],
)
def leaks() -> Generator[None]:
    """`StepLoss` counts into a buffer that lives as long as the step, and that only an update empties: an evaluation fills it too."""
    begin, counts, buffers = StepLoss.__init__, StepLoss.counts, dict[int, dict[str, Tensor]]()

    def shared(self: StepLoss, step: TrainStep, *args: Any) -> None:
        begin(self, step, *args)
        self.totals = buffers.setdefault(id(step), {})

    def emptied(self: StepLoss) -> dict[str, Tensor]:
        found = dict(counts(self))
        self.totals.clear()
        return found

    with replaced((StepLoss, "__init__", shared), (StepLoss, "counts", emptied)):
        yield


# The choice ----------------------------------------------------------------------------------------------------------------------


def rerouted() -> Any:
    """Routers that would choose other experts when they run again, as kernels do that round differently: here all others, so that it
    shows. `RoutesOnce` is what keeps the choice."""

    def elsewhere(fn: StageFn, key: Hashable, lower: Lower) -> Pair:
        def again(params: Any, x: Tensor, *, chosen: Tensor | None = None, **consts: Any) -> Any:
            if chosen is None:
                counts = fn(params, x, **consts)[3]
                chosen = (fn(params, x, **consts)[2] + 1) % counts.shape[0]
            return fn(params, x, chosen=chosen, **consts)

        return recompute(fn, key, lower)._replace(backward=recompute(again, (key, "again"), lower).backward)

    def rewrite(step: TrainStep, program: Program) -> Program:
        def edited(stage: Stage) -> Stage:
            return dataclasses.replace(stage, rule=dataclasses.replace(stage.rule, base=elsewhere))  # pyright: ignore[reportArgumentType]

        return tuple(edited(node) if isinstance(node, Stage) and node.kind == "router" else node for node in program)

    unsteady = lambda step: step.replace("unsteady", rewrites=(*step.rewrites, rewrite))  # noqa: E731
    return testing.check(lambda mesh: compose(unsteady, chunk_loss(9), expert_parallel(mesh["expert"])), model=moe(), expert=2)


@case(
    "recomputation that routes differently from the forward",
    rerouted,
    says=[r"gradient of layers\.2\.moe\.router", r"gradient of layers\.0\.moe\.router"],
    right=[*LOSSES, r"metric expert_load", r"gradient of layers\.2\.moe\.(gate_up|down)", r"gradient of head"],
    reported=["NVIDIA-NeMo/Automodel#3140", "NVIDIA-NeMo/Automodel#2635", "pytorch/torchtitan#1117"],
)
def routes_again() -> Generator[None]:
    """`RoutesOnce` does not give the choice of the forward to the backward."""

    def wrong(self: RoutesOnce, fn: StageFn, key: Hashable, lower: Lower) -> Pair:
        return self.base(fn, key, lower)

    with replaced((RoutesOnce, "__call__", wrong)):
        yield
