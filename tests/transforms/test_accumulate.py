"""`accumulate`: one update from several micro-batches, however unequal."""

from __future__ import annotations

import pytest
import torch

from tests import laws, memory
from xtf import testing
from xtf.mesh import simulate, split_batch
from xtf.models import from_hf
from xtf.step import compose, train_step
from xtf.transforms import accumulate, chunk_loss, shard


@pytest.mark.parametrize(
    "case",
    [
        laws.case(**row)
        for row in laws.pairwise(
            layout=[{}, {"data": 2}],
            model=laws.MODELS,
            micros=(2, 1, 3, 7),
            batch=("documents", "weights", "one_rank", "ignored", "row", "token"),
            chunk=(None, 7),
            order=range(6),
        )
    ],
    ids=str,
)
def test_laws(case: laws.Case) -> None:
    case.check()


@pytest.mark.full
@pytest.mark.parametrize("layout", [{}, {"data": 3}, {"data": 2, "replicate": 2}], ids=str)
@pytest.mark.parametrize("model", laws.MODELS)
def test_laws_matrix(model: str, layout: dict[str, int]) -> None:
    for row in laws.crossed(
        {"micros": (1, 2, 3, 4, 5, 7), "batch": laws.BATCHES}, chunk=(None, 7), order=(0, 3), optimizer=("adamw", "muon")
    ):
        laws.case(layout=layout, model=model, **row).check()


def test_applied_twice_multiplies() -> None:
    both = compose(accumulate(2), accumulate(3))
    step = both(train_step(laws.model("tiny"), testing.default_optimizer()))
    assert len(step.split(laws.batch("documents"))) == 6
    testing.check(both, model=laws.model("qwen3_moe"))


def test_unequal_micro_batches_are_not_averaged() -> None:
    """The mean of micro-batch means is another loss: here one of two micro-batches holds nearly all targets."""
    model, batch = laws.model("tiny"), laws.batch("plain")
    labels = batch["labels"].clone()
    labels[3:, 2:] = -100
    batch = batch | {"labels": labels}
    step = accumulate(2)(train_step(model, testing.default_optimizer()))
    params = model.init(0)
    halves = [model.loss(params, half) for half in step.split(batch)]
    mean_of_means = torch.stack(halves).mean()
    whole = model.loss(params, batch)
    assert abs(step.loss(params, batch) - whole) < 1e-12 * whole < 1e-3 * abs(mean_of_means - whole)


def test_more_micro_batches_than_rows_adds_ignored_rows() -> None:
    step = accumulate(7)(train_step(laws.model("tiny"), testing.default_optimizer()))
    micros = step.split(laws.batch("documents"))
    assert [len(m["input_ids"]) for m in micros] == [1] * 7
    for blank in micros[5:]:
        assert (blank["labels"] == -100).all() and (blank["document_ids"] == -1).all() and not blank["loss_weights"].any()


def test_micro_batches_of_a_walk_are_of_one_global_batch() -> None:
    """With two ranks and two micro-batches, each auxiliary loss is over both ranks' tokens of one micro-batch, and metrics say
    so: they are the same on both ranks and differ from those over the whole batch."""
    model, batch = laws.model("qwen3_moe"), laws.batch("documents")

    def metrics(mesh: object) -> dict[str, torch.Tensor]:
        step = compose(shard(mesh["data"]), accumulate(2))(train_step(model, testing.default_optimizer()))  # pyright: ignore[reportIndexIssue]
        return step.evaluate(step.init(0).params, split_batch(batch, mesh))  # pyright: ignore[reportArgumentType]

    first, second = simulate(metrics, data=2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    whole = train_step(model, testing.default_optimizer()).evaluate(model.init(0), batch)
    torch.testing.assert_close(first["cross_entropy"], whole["cross_entropy"], rtol=1e-12, atol=0)
    assert abs(first["aux_loss"] - whole["aux_loss"]) > 1e-4


def test_memory_does_not_grow_with_the_number_of_micro_batches() -> None:
    """Gradients are summed into one tree, and a micro-batch's activations are gone when the next one runs. Here each row is a
    micro-batch; what stays of it are its constants."""
    model = from_hf(laws.TINY | {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}, dtype=torch.float32)
    ids = torch.randint(61, (16, 32), generator=torch.Generator().manual_seed(0))
    params, peaks = model.init(0), dict[int, int]()
    for n in (2, 16):
        step = compose(accumulate(n), chunk_loss(8))(train_step(model, testing.default_optimizer()))
        peaks[n] = memory.peak_bytes(lambda step=step, n=n: step.value_and_grad(params, {"input_ids": ids[:n], "labels": ids[:n]}))
    activations = 32 * 64 * 4 * 2 * 2  # of one micro-batch: what 2 layers of 2 stages read
    assert peaks[2] > 2 * activations
    assert peaks[16] - peaks[2] < 14 * 2500 < 2 * activations


@pytest.mark.parametrize("n", [0, -3, 1.5])
def test_bad_arguments(n: float) -> None:
    with pytest.raises(ValueError, match=rf"accumulate\({n}\): expected an integer number of micro-batches, at least 1"):
        accumulate(n)  # pyright: ignore[reportArgumentType]


def test_a_batch_that_is_none_is_refused_as_without_micro_batches() -> None:
    step = accumulate(2)(train_step(laws.model("tiny"), testing.default_optimizer()))
    params = step.init(0).params
    with pytest.raises(ValueError, match=r"batch has no 'input_ids'; it has \['labels'\]"):
        step.loss(params, {"labels": torch.zeros(2, 3, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"batch\['labels'\] has shape \(2, 4\), input_ids has \(2, 3\)"):
        step.loss(params, {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "labels": torch.zeros(2, 4, dtype=torch.int64)})


def test_a_split_without_micro_batches_is_refused() -> None:
    step = train_step(laws.model("tiny"), testing.default_optimizer()).replace("nothing", split=lambda batch: ())
    with pytest.raises(ValueError, match="gave no micro-batch; a step needs at least one"):
        step.loss(step.init(0).params, laws.batch("plain"))
