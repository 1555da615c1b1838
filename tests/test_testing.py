"""The checker itself: each way in which an engine can be wrong is put in here, and each is caught, by name and by factor."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import laws
from xtf import optim, testing, tree
from xtf.batch import normalizer
from xtf.collectives import Axis
from xtf.placement import Placed, reduce_transfer
from xtf.stage import Pair, Program, Stage, Transfer
from xtf.step import TrainStep, compose
from xtf.step_loss import StepLoss
from xtf.testing import LawError
from xtf.transforms import accumulate, chunk_loss, shard

EQUAL_ROWS = {key: value[:1].expand(6, -1).contiguous() for key, value in laws.batch("plain").items()}
"""The same row for all ranks and micro-batches: what misses a sum is then a multiple of what is right."""


def caught(transform: Callable[..., Any], *, model: str = "llama", batch: Any = None, **sizes: Any) -> str:
    """The message of the `LawError`."""
    with pytest.raises(LawError) as error:
        testing.check(transform, model=laws.model(model), batch=batch, optimizer=None, **sizes)
    return str(error.value)


def line(message: str, what: str) -> str:
    """The one line of a message that is about this, on whatever ranks."""
    (found,) = [text for text in message.splitlines() if _about(text) == what]
    return found


def named(message: str, start: str) -> list[str]:
    """Everything that begins so and differs."""
    return [what for what in map(_about, message.splitlines()[1:]) if what.startswith(start)]


def _about(text: str) -> str:
    return text.strip().split(":")[0].split(" on ")[0]


def edited(edit: Callable[[Stage], Stage]) -> testing.Transform:
    """A transform that edits stages after everything else has been declared on them, as nothing but a bug could."""

    def transform(step: TrainStep) -> TrainStep:
        changed = dataclasses.replace(step)
        changed.__dict__["program"] = tuple(edit(s) if isinstance(s, Stage) else s for s in step.program)
        return changed

    return transform


def rewritten(name: str, edit: Callable[[Stage], Stage]) -> testing.Transform:
    """A transform that edits one stage of the model's program."""

    def rewrite(step: TrainStep, program: Program) -> Program:
        return tuple(edit(s) if isinstance(s, Stage) and s.name == name else s for s in program)

    return lambda step: step.replace("mutation", rewrites=(*step.rewrites, rewrite))


# Reductions ----------------------------------------------------------------------------------------------------------------------


def test_gradients_that_are_rounding_are_not_differences() -> None:
    """A row of two tokens has one query that sees two keys and no target: gradients of its queries and keys cancel."""
    ids = torch.arange(12).view(6, 2)
    for model in testing.small_models().values():
        testing.check(lambda mesh: shard(mesh["data"]), model=model, batch={"input_ids": ids, "labels": ids}, data=2)


@pytest.mark.parametrize("n", [2, 3])
def test_a_missing_reduction(n: int) -> None:
    broken = edited(lambda stage: dataclasses.replace(stage, reduce=None))
    message = caught(lambda mesh: compose(broken, shard(replicate=mesh["data"])), batch=EQUAL_ROWS, data=n)
    for leaf in ("embed.weight", "layers.1.mlp.down"):
        said = line(message, f"gradient of {leaf}")
        assert f"it is {1 / n:.6g} × the reference (a missing reduction over data={n}, or divided by its size)" in said
    assert f"it is {1 / n:.6g} ×" in line(message, "metric grad_norm")
    assert not named(message, "loss") and not named(message, "metric loss")  # gradients alone are wrong


def test_a_missing_reduction_over_replicas_of_shards() -> None:
    def without_replicas(step: TrainStep) -> TrainStep:
        changed = dataclasses.replace(step)

        def reduce(stage: Stage) -> Transfer | None:
            own = {path: step.placements[path] for path in stage.params.values()}
            return reduce_transfer(stage.name, own, dict.fromkeys(own, step.sharding.axes), None)

        changed.__dict__["program"] = tuple(dataclasses.replace(s, reduce=reduce(s)) for s in step.program if isinstance(s, Stage))
        return changed

    message = caught(
        lambda mesh: compose(without_replicas, shard(mesh["data"], replicate=mesh["copies"])), batch=EQUAL_ROWS, data=2, copies=3
    )
    assert "it is 0.333333 × the reference (a missing reduction over copies=3" in line(message, "gradient of norm.weight")


def again(axis: Axis, only: str | None = None) -> testing.Transform:
    """Sums gradients once more than they should be."""

    def twice(stage: Stage) -> Stage:
        reduce = stage.reduce
        if reduce is None or (only is not None and only not in stage.params.values()):
            return stage

        def wait(handle: Any) -> Any:
            return {path: axis.start_all_reduce(grad).wait() for path, grad in reduce.wait(handle).items()}

        return dataclasses.replace(stage, reduce=Transfer(reduce.start, wait))

    return edited(twice)


def test_a_doubled_reduction() -> None:
    message = caught(lambda mesh: compose(again(mesh["data"]), shard(replicate=mesh["data"])), data=2)
    assert "it is 2 × the reference (the signature of a doubled reduction)" in line(message, "gradient of layers.0.attention.q")
    message = caught(lambda mesh: compose(again(mesh["data"]), shard(replicate=mesh["data"])), data=3)
    assert "it is 3 × the reference (summed once too often over data=3)" in line(message, "gradient of layers.0.attention.q")


def test_one_leaf_that_is_reduced_twice() -> None:
    message = caught(lambda mesh: compose(again(mesh["data"], "norm.weight"), shard(replicate=mesh["data"])), data=2)
    assert named(message, "gradient of") == ["gradient of norm.weight"] and "gradient of norm.weight on every rank" in message


def test_gradients_that_are_averaged_over_ranks() -> None:
    """As many frameworks do: with the loss normalised over all ranks, the mean is 1/n of the sum."""

    def mean(stage: Stage) -> Stage:
        reduce = stage.reduce
        assert reduce is not None
        return dataclasses.replace(stage, reduce=Transfer(reduce.start, lambda h: {p: g / 4 for p, g in reduce.wait(h).items()}))

    message = caught(lambda mesh: compose(edited(mean), shard(mesh["data"], mesh["expert"])), data=2, expert=2)
    assert "it is 0.25 × the reference (a missing reduction over all 4 ranks)" in line(message, "gradient of embed.weight")


def test_a_rank_that_takes_another_ranks_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that keep each other's blocks of the gradient: norms agree, leaves do not."""

    def swapped(mesh: Any) -> testing.Transform:
        def turn(stage: Stage) -> Stage:
            reduce = stage.reduce
            assert reduce is not None

            def wait(handle: Any) -> Any:
                return {
                    p: mesh["data"].start_permute(g.contiguous(), 1).wait() if p == "norm.weight" else g
                    for p, g in reduce.wait(handle).items()
                }

            return dataclasses.replace(stage, reduce=Transfer(reduce.start, wait))

        return compose(edited(turn), shard(mesh["data"]))

    message = caught(swapped, data=2)
    assert "not a multiple of the reference" in line(message, "gradient of norm.weight")
    assert "grad_norm" not in message


# Normalisation -------------------------------------------------------------------------------------------------------------------


def by_local_weight(divided_by: float) -> testing.Transform:
    """The loss over this rank's own weight, divided by a number of ranks: the mean of means."""

    def edit(stage: Stage) -> Stage:
        def fn(params: Any, x: Tensor, *, targets: Tensor, weights: Tensor, normalizer: Tensor) -> Any:
            own = _normalizer(weights.double().sum()) / divided_by
            return stage.fn(params, x, targets=targets, weights=weights, normalizer=own)

        return dataclasses.replace(stage, fn=fn)

    return rewritten("loss", edit)


_normalizer = normalizer


@pytest.mark.parametrize("count", ["the sum of means", "the mean of means"])
def test_a_normaliser_of_local_tokens(count: str) -> None:
    """On equal ranks the sum is n times too large and the mean goes unnoticed; the default batch is made so that nothing does."""
    transform = lambda mesh: compose(by_local_weight(1 if count == "the sum of means" else 2), shard(mesh["data"]))  # noqa: E731
    if count == "the sum of means":
        message = caught(transform, batch=EQUAL_ROWS, data=2)
        assert "it is 2 × the reference" in line(message, "loss")
        assert "it is 2 × the reference" in line(message, "gradient of embed.weight")
    else:
        testing.check(transform, model=laws.model("llama"), batch=EQUAL_ROWS, data=2)
    message = caught(transform, data=2)
    assert "not a multiple of the reference" in line(message, "gradient of layers.0.mlp.gate")
    assert line(message, "loss") and line(message, "evaluated loss")


def test_a_normaliser_of_one_micro_batch() -> None:
    message = caught(compose(by_local_weight(2), accumulate(2)))
    assert "not a multiple" in line(message, "gradient of layers.0.mlp.gate")


def test_weights_that_are_forgotten() -> None:
    """Counts instead of weights, in sum and normaliser alike."""

    def edit(stage: Stage) -> Stage:
        def fn(params: Any, x: Tensor, *, targets: Tensor, weights: Tensor, normalizer: Tensor) -> Any:
            ones = (targets != -100).double()
            return stage.fn(params, x, targets=targets, weights=ones, normalizer=_normalizer(ones.sum()))

        return dataclasses.replace(stage, fn=fn)

    assert line(caught(rewritten("loss", edit)), "loss")
    testing.check(rewritten("loss", edit), model=laws.model("llama"), batch=laws.batch("plain"))  # without weights it is no error


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_a_wrong_token_count(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = StepLoss.metrics

    def counted(self: Any, values: Any) -> Any:
        return metrics(self, values) | {"tokens": torch.stack([m["valid"].sum() for m in self.micros]).sum()}

    monkeypatch.setattr(StepLoss, "metrics", counted)
    assert "max|reference|" in line(caught(lambda step: step, model=model), "metric tokens")


def test_padding_that_counts_in_the_auxiliary_loss() -> None:
    """Padding given documents of its own is routed and counted; the cross-entropy does not see it."""

    def split(batch: Any) -> Any:
        return ({**batch, "document_ids": torch.where(batch["document_ids"] < 0, 99, batch["document_ids"])},)

    message = caught(lambda step: step.replace("mutation", split=split), model="moe_step")
    assert line(message, "loss") and line(message, "gradient of layers.0.moe.router") and line(message, "metric expert_load")
    assert "metric cross_entropy" not in message


def test_tokens_that_are_lost_by_the_batch_seam() -> None:
    drop = lambda step: step.replace("mutation", split=lambda batch: ({k: v[:-2] for k, v in batch.items()},))  # noqa: E731
    assert line(caught(drop), "weight of all targets in the micro-batches")


# The head ------------------------------------------------------------------------------------------------------------------------


def test_a_dropped_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["xtf.transforms.chunk_loss"]
    inner, calls = module._loss_and_dlogits, [0]

    def dropped(h: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        loss, dlogits = inner(h, *rest)
        calls[0] += 1
        return (loss * 0, dlogits * 0) if calls[0] % 10 == 4 else (loss, dlogits)  # 65 tokens: ten chunks of 7

    monkeypatch.setattr(module, "_loss_and_dlogits", dropped)
    message = caught(chunk_loss(tokens=7), model="qwen3")
    assert line(message, "gradient of head.weight") and line(message, "loss")
    assert "evaluated loss" not in message  # evaluation has code of its own, which is right


def test_a_dropped_last_chunk_when_evaluating() -> None:
    """65 tokens in chunks of 7, without the last two; only where nothing is differentiated."""

    def edit(stage: Stage) -> Stage:
        rule = stage.rule

        def dropped(*args: Any) -> Pair:
            pair = rule(*args)
            assert pair.evaluate is not None
            evaluate = pair.evaluate

            def short(params: Any, reads: Any, consts: Any) -> Any:
                cut = {name: value[:63] if value.dim() else value for name, value in consts.items()}
                return evaluate(params, (reads[0][:63],), cut)

            return pair._replace(evaluate=short)

        return dataclasses.replace(stage, rule=dropped)

    message = caught(compose(rewritten("loss", edit), chunk_loss(tokens=7)), batch=laws.batch("plain"))
    assert named(message, "") == ["evaluated loss"]


def test_unsummed_tied_gradients() -> None:
    """The embedding's gradient alone, without that of the head; and the other way round."""

    def silent(stage: Stage) -> Stage:
        rule = stage.rule

        def zeroed(*args: Any) -> Pair:
            pair = rule(*args)

            def backward(*given: Any) -> Any:
                dparams, dreads = pair.backward(*given)
                return {name: torch.zeros_like(grad) for name, grad in dparams.items()}, dreads

            return pair._replace(backward=backward)

        return dataclasses.replace(stage, rule=zeroed)

    for stage in ("embed", "loss"):
        message = caught(rewritten(stage, silent))
        assert named(message, "gradient of") == ["gradient of embed.weight"]
        assert "not a multiple of the reference" in line(message, "gradient of embed.weight")
    testing.check(chunk_loss(9), model=laws.model("llama"))


# Norms, optimizers, metrics ------------------------------------------------------------------------------------------------------


def test_a_clip_norm_that_counts_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = Placed.norm

    def transform(mesh: Any) -> testing.Transform:
        copies = mesh["copies"]

        def counted(self: Placed, grads: Any) -> Tensor:
            return copies.start_all_reduce(norm(self, grads).square()).wait().sqrt()

        def placed(step: TrainStep) -> TrainStep:
            changed = dataclasses.replace(step)
            inner = step.placed
            wrong = lambda **fields: _Counting(inner(**fields), counted)  # noqa: E731
            object.__setattr__(changed, "placed", wrong)
            return changed

        return compose(placed, shard(mesh["data"], replicate=copies))

    message = caught(transform, data=2, copies=2)
    assert "it is 1.41421 × the reference (a norm that counts what lies on several ranks of data=2 once for each)" in line(
        message, "metric grad_norm"
    )
    assert line(message, "norm.weight after the step")  # the clipped update is too small
    assert "gradient of" not in message


@dataclasses.dataclass(frozen=True)
class _Counting:
    inner: Placed
    counted: Callable[[Placed, Any], Tensor]

    @property
    def donate(self) -> bool:
        return self.inner.donate

    def norm(self, grads: Any) -> Tensor:
        return self.counted(self.inner, grads)

    def matrices(self, path: str, local: Tensor) -> Tensor:
        return self.inner.matrices(path, local)

    def cut(self, path: str, whole: Tensor) -> Tensor:
        return self.inner.cut(path, whole)


def test_a_local_clip_norm() -> None:
    """Each rank clips by the norm of what it keeps."""

    def transform(mesh: Any) -> testing.Transform:
        def local(step: TrainStep) -> TrainStep:
            changed = dataclasses.replace(step)
            own = lambda self, grads: optim.UNPLACED.norm(grads)  # noqa: E731
            object.__setattr__(changed, "placed", lambda **fields: _Counting(step.placed(**fields), own))
            return changed

        return compose(local, shard(mesh["data"]))

    message = caught(transform, data=2)
    assert line(message, "metric grad_norm") and "metric grad_norm on every rank" in message


def test_muon_on_cut_matrices() -> None:
    def transform(mesh: Any) -> testing.Transform:
        def cut(step: TrainStep) -> TrainStep:
            changed = dataclasses.replace(step)

            @dataclasses.dataclass(frozen=True)
            class Cut(_Counting):
                def matrices(self, path: str, local: Tensor) -> Tensor:
                    return local

                def cut(self, path: str, whole: Tensor) -> Tensor:
                    return whole

            object.__setattr__(changed, "placed", lambda **fields: Cut(step.placed(**fields), lambda p, g: p.norm(g)))
            return changed

        return compose(cut, shard(mesh["data"]))

    with pytest.raises(LawError) as error:
        testing.check(transform, model=laws.model("llama"), optimizer=laws.OPTIMIZERS["muon"](), data=2)
    assert line(str(error.value), "layers.0.mlp.gate after the step")
    assert "gradient of" not in str(error.value) and "norm.weight after" not in str(error.value)


def test_an_update_that_is_applied_twice() -> None:
    def twice(step: TrainStep) -> TrainStep:
        inner = step.optimizer

        def update(*args: Any) -> Any:
            updates, state = inner.update(*args)
            return tree.map(lambda u: u * 2, updates), state

        return step.replace("mutation", optimizer=inner._replace(update=update))

    message = caught(twice)
    assert line(message, "embed.weight after the step") and "gradient of" not in message


def test_a_metric_that_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part in a billion, on one rank."""
    call = TrainStep.__call__

    def off(self: TrainStep, state: Any, batch: Any) -> Any:
        new, metrics = call(self, state, batch)
        return new, metrics | {"loss": metrics["loss"] * (1 + 1e-9 * self.token_axes[0].index)}

    monkeypatch.setattr(TrainStep, "__call__", off)
    message = caught(lambda mesh: shard(mesh["data"]), data=2)
    assert "metric loss on rank 1: " in message and named(message, "") == ["metric loss"]


def test_initial_values_of_another_seed_or_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from xtf.spec import ParamSpec

    initial = ParamSpec.initial
    wrong = lambda self, seed, path, ranges=None: initial(self, seed, path, [(0, b - a) for a, b in ranges] if ranges else None)  # noqa: E731
    monkeypatch.setattr(ParamSpec, "initial", wrong)  # every rank starts from the first rank's block
    message = caught(lambda mesh: shard(mesh["data"]), data=2)
    assert line(message, "loss")


# The walk ------------------------------------------------------------------------------------------------------------------------


def test_a_stage_that_is_run_with_stale_parameters() -> None:
    """Gathered once and kept for the next micro-batches is right; the neighbour's parameters are not."""

    def stale(stage: Stage) -> Stage:
        gather = stage.gather
        if gather is None or stage.name != "layers.1.mlp":
            return stage
        return dataclasses.replace(stage, gather=Transfer(gather.start, lambda h: tree.map(lambda p: p + 1e-9, gather.wait(h))))

    assert line(caught(lambda mesh: compose(edited(stale), shard(mesh["data"])), data=2), "gradient of layers.1.mlp.down")


def test_a_backward_that_drops_a_path() -> None:
    """The residual stream's gradient alone flows on, not that through the stage."""

    def edit(stage: Stage) -> Stage:
        rule = stage.rule

        def cut(*args: Any) -> Pair:
            pair = rule(*args)
            return pair._replace(backward=lambda params, kept, dwrites, consts: (pair.backward(params, kept, dwrites, consts)[0], dwrites))

        return dataclasses.replace(stage, rule=cut)

    message = caught(rewritten("layers.1.mlp", edit))
    assert line(message, "gradient of layers.0.mlp.up") and "gradient of layers.1.mlp" not in message


def test_auxiliary_gradients_of_another_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds of the statistics doubled: the loss is right, the router's gradient is not."""
    seeds = StepLoss.seeds

    def doubled(self: Any, micro: int, values: Any) -> Any:
        return {name: value * (1 if name == "loss" else 2) for name, value in seeds(self, micro, values).items()}

    monkeypatch.setattr(StepLoss, "seeds", doubled)
    message = caught(lambda step: step, model="qwen3_moe")
    assert line(message, "gradient of layers.0.moe.router") and "metric loss" not in message


# The checker's own interface -----------------------------------------------------------------------------------------------------


def test_reports() -> None:
    reports = testing.check(lambda step: step)
    assert [report.name for report in reports] == [f"{name} on one rank" for name in testing.small_models()]
    assert all(report.worst <= 1e-12 and not report.failures for report in reports)
    assert "gradient of layers.0.moe.router" in reports[2].errors and "metric expert_load" in reports[2].errors
    assert "metric router_sequence_balance" in reports[3].errors and "gradient of layers.1.moe.correction" not in reports[3].errors
    assert str(reports[0]).startswith(f"llama on one rank: holds; {len(reports[0].errors)} quantities, largest relative error")
    (one,) = testing.check(lambda mesh: shard(mesh["data"]), model=[laws.model("tiny")], data=2)
    assert one.name == "llama on data=2"


def test_the_tolerance_is_what_decides() -> None:
    slightly = lambda step: dataclasses.replace(step, model=dataclasses.replace(step.model, z_loss=step.model.z_loss))  # noqa: E731
    testing.check(slightly, model=laws.model("tiny"))
    with pytest.raises(LawError, match=r"llama on data=3: \d+ differ; \d+ quantities, largest relative error"):
        testing.check(lambda mesh: shard(mesh["data"]), model=laws.model("llama"), tolerance=1e-18, data=3)
    # A float32 model holds to float32's rounding, and no further.
    narrow = testing.small_models(torch.float32)["llama"]
    testing.check(chunk_loss(7), model=narrow, tolerance=1e-4)
    with pytest.raises(LawError):
        testing.check(chunk_loss(7), model=narrow, tolerance=1e-12)


def test_nan_and_wrong_shapes_are_failures() -> None:
    def edit(stage: Stage) -> Stage:
        return dataclasses.replace(stage, fn=lambda *args, **consts: (stage.fn(*args, **consts)[0] * torch.nan,))

    message = caught(rewritten("loss", edit))
    assert "max|Δ| nan" in line(message, "loss") and "max|Δ| nan" in line(message, "gradient of embed.weight")
    doubled = lambda step: step.replace("mutation", optimizer=step.optimizer._replace(metrics=lambda state: {"lr": torch.ones(2)}))  # noqa: E731
    assert "shape (2,), expected ()" in line(_with_metrics(doubled), "metric lr")


def _with_metrics(transform: testing.Transform) -> str:
    with pytest.raises(LawError) as error:
        testing.check(transform, model=laws.model("tiny"))
    return str(error.value)


def test_a_gradient_where_none_is_due() -> None:
    model = laws.model("tiny")
    specs = tree.map_with_path(lambda path, spec: dataclasses.replace(spec, trainable=path != "norm.weight"), model.specs)
    frozen = dataclasses.replace(model, specs=specs)
    with pytest.raises(LawError, match=r"gradient of norm.weight: expected one"):
        testing.check(lambda step: dataclasses.replace(step, model=frozen), model=model)
    with pytest.raises(LawError, match=r"gradient of norm.weight: expected none"):
        testing.check(lambda step: dataclasses.replace(step, model=model), model=frozen)


def test_a_zero_reference_is_compared_exactly() -> None:
    """No supervised token: what should be 0 and is 1e-30 is wrong."""

    def edit(stage: Stage) -> Stage:
        return dataclasses.replace(stage, fn=lambda *args, **consts: (stage.fn(*args, **consts)[0] + 1e-30,))

    assert "the reference is zero" in line(caught(rewritten("loss", edit), batch=laws.batch("ignored")), "loss")
