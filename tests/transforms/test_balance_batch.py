"""`balance_batch`: a step of documents is the step of their batch, however they are packed and spread; ranks that cannot agree raise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import gloo
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_lengths import QWEN3_30B, log_normal
from torch import Tensor

from tests import laws
from xtf import testing, tree
from xtf.data import Cost, Documents, plan_step
from xtf.mesh import Mesh, simulate
from xtf.step import TrainStep, compose, train_step
from xtf.testing import documents_batch
from xtf.transforms import accumulate, balance_batch, chunk_loss, context_parallel, expert_parallel, shard

LENGTHS = (13, 1, 7, 2, 21, 3, 3, 16, 5, 2, 9, 1)


def documents(lengths: Sequence[int] = LENGTHS, taught: Sequence[int] | None = None, vocab: int = 61) -> Documents:
    """Unequal documents with weights that differ, some 0; of ``taught`` documents alone anything is learned."""
    random = np.random.default_rng(0)
    ids = [random.integers(vocab, size=n).tolist() for n in lengths]
    weights = [np.where(random.random(n) < 0.3, 0, random.random(n) + 0.5) for n in lengths]
    if taught is not None:
        weights = [w * (i in taught) for i, w in enumerate(weights)]
    return Documents.of(ids, [w.tolist() for w in weights])


def every_axis(mesh: Mesh) -> list[Any]:
    return [mesh[name] for name in mesh]


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "moe_step", "deepseek_v3"])
@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 2, "expert": 2}], ids=str)
def test_laws(model: str, sizes: dict[str, int]) -> None:
    def transform(mesh: Mesh) -> testing.Transform:
        parts = [balance_batch(*every_axis(mesh), max_tokens=24), shard(*every_axis(mesh)), chunk_loss(tokens=7)]
        if "expert" in sizes and model != "llama":
            parts.insert(2, expert_parallel(mesh["expert"]))
        return compose(*parts)

    mesh: Any = sizes
    testing.check(transform, model=laws.model(model), batch=documents(), **mesh)


@pytest.mark.parametrize("order", range(6))
def test_laws_in_any_order(order: int) -> None:
    def transform(mesh: Mesh) -> testing.Transform:
        parts = [balance_batch(mesh["data"], max_tokens=40, pad=order % 2 == 1), shard(mesh["data"]), accumulate(2)]
        return compose(*list(itertools.permutations(parts))[order])

    testing.check(transform, model=laws.model("tiny_moe"), batch=documents(), data=3)


@pytest.mark.parametrize("taught", [(4,), ()], ids=["one", "none"])
@pytest.mark.parametrize("count", [12, 2], ids=["more", "fewer than ranks"])
def test_laws_where_ranks_have_no_target_or_no_document(taught: tuple[int, ...], count: int) -> None:
    docs = documents((LENGTHS[4], *LENGTHS[1:])[:count], [0 if taught else -1])
    testing.check(
        lambda mesh: compose(balance_batch(mesh["data"], max_tokens=21), shard(mesh["data"]), chunk_loss(tokens=5)),
        model=laws.model("qwen3_moe"),
        batch=docs,
        data=4,
    )


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("count", [12, 1], ids=["more", "fewer than ranks"])
def test_laws_with_overlapped_experts(pad: bool, count: int) -> None:
    testing.check(
        lambda mesh: compose(balance_batch(mesh["expert"], max_tokens=60, pad=pad), expert_parallel(mesh["expert"], overlap=2)),
        model=laws.model("qwen3_moe"),
        batch=documents(LENGTHS[:count]),
        expert=2,
    )


def test_laws_on_one_rank() -> None:
    testing.check(compose(chunk_loss(tokens=5), balance_batch(max_tokens=22)), model=laws.model("llama"), batch=documents())


@given(st.lists(st.integers(1, 30), min_size=1, max_size=14), st.integers(1, 4), st.integers(30, 70), st.integers(0, 3))
@settings(max_examples=12)
def test_loss_and_gradients_do_not_depend_on_the_spread(lengths: list[int], ranks: int, max_tokens: int, seed: int) -> None:
    model, docs = laws.model("tiny"), documents(lengths)
    params = model.init(0)
    grads, loss = torch.func.grad_and_value(model.loss)(params, documents_batch(docs))

    def rank(mesh: Mesh) -> tuple[Tensor, Any]:
        step = balance_batch(mesh["data"], max_tokens=max_tokens, seed=seed)(train_step(model, testing.default_optimizer()))
        return step.value_and_grad(params, docs)

    for found, tree_of in simulate(rank, data=ranks):
        assert abs(found - loss) <= 1e-12 * abs(loss)
        for got, want in zip(tree.leaves(tree_of), tree.leaves(grads), strict=True):
            assert (got - want).abs().max() <= 1e-12 * max(want.abs().max(), 1e-4)


def rank_of(mesh: Mesh, docs: Documents, **settings: Any) -> list[dict[str, Tensor]]:
    return [dict(micro) for micro in balance_batch(mesh["data"], **settings)(plain()).split(docs)]


def plain() -> TrainStep:
    return train_step(laws.model("tiny"), testing.default_optimizer())


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5), st.sampled_from([Cost.attention(), Cost(1.0), None]))
@settings(max_examples=40)
def test_a_step_has_every_document_once_in_as_many_packs_on_each_rank(lengths: list[int], ranks: int, cost: Cost | None) -> None:
    plan = plan_step(lengths, max_tokens=50, data_ranks=ranks, cost=cost)
    assert len(plan) == 1 and plan.ranks == ranks
    assert sorted(plan.flat.documents.tolist()) == list(range(len(lengths)))
    assert plan.totals(plan.flat.lengths).max() <= 50
    assert plan.same(plan_step(lengths, max_tokens=50, data_ranks=ranks, cost=cost))
    assert plan.accumulate <= max(1, -(-2 * sum(lengths) // (50 * ranks)) + 1)  # packs are at least about half full


def test_each_rank_fetches_only_its_own_documents() -> None:
    whole, asked = documents(), dict[int, list[int]]()

    def rank(mesh: Mesh) -> list[dict[str, Tensor]]:
        def fetch(indices: Any) -> Any:
            asked.setdefault(mesh.rank, []).extend(indices.tolist())
            return whole.fetch(indices)

        return rank_of(mesh, Documents(whole.lengths, fetch), max_tokens=24)

    found = simulate(rank, data=3)
    assert len({len(micros) for micros in found}) == 1
    assert sorted(i for part in asked.values() for i in part) == list(range(len(LENGTHS)))
    for micros, mine in zip(found, (asked[r] for r in range(3)), strict=True):
        assert sum(int((m["document_ids"] >= 0).sum()) for m in micros) == sum(LENGTHS[i] for i in mine)
        assert all(m["input_ids"].shape[0] == 1 and m["input_ids"].shape[1] <= 24 for m in micros)


def test_documents_come_as_ids_as_tensors_or_as_mappings() -> None:
    ids = [[5, 6, 7], [8, 9], [10, 11, 12]]
    given: list[Any] = [ids[0], torch.tensor(ids[1]), {"input_ids": ids[2], "labels": [-100, 11, 50], "loss_weights": [1, 1, 0.5]}]
    docs = Documents([3, 2, 3], lambda indices: [given[i] for i in indices])
    (micro,) = balance_batch(max_tokens=8)(plain()).split(docs)
    assert sorted(micro["labels"][0].tolist()) == sorted([*ids[0], *ids[1], -100, 11, 50])  # 8 tokens: the row is full
    at = micro["input_ids"][0].tolist().index(10)
    assert micro["labels"][0, at : at + 3].tolist() == [-100, 11, 50] and micro["loss_weights"][0, at : at + 3].tolist() == [0, 1, 0.5]


def test_rows_are_filled_up_where_one_shape_is_wanted() -> None:
    shapes = {
        m["input_ids"].shape
        for micros in simulate(lambda mesh: rank_of(mesh, documents(), max_tokens=30, pad=True), data=2)
        for m in micros
    }
    assert shapes == {(1, 30)}


def test_long_documents_are_refused_dropped_or_split() -> None:
    docs = documents((30, 4, 11))
    with pytest.raises(ValueError, match="document 0 has 30 tokens"):
        balance_batch(max_tokens=12)(plain()).split(docs)
    kept = {how: balance_batch(max_tokens=12, too_long=how)(plain()).split(docs) for how in ("drop", "split")}
    assert {how: sum(int((m["document_ids"] >= 0).sum()) for m in micros) for how, micros in kept.items()} == {"drop": 15, "split": 45}
    ids = [m["input_ids"][0, m["document_ids"][0] == d].tolist() for m in kept["split"] for d in m["document_ids"].unique() if d >= 0]
    whole = docs[0].ids.tolist()
    assert all(piece in ids for piece in (whole[:12], whole[12:24], whole[24:]))


def test_a_batch_of_tensors_goes_through() -> None:
    batch = laws.batch("documents")
    step = compose(balance_batch(max_tokens=9), accumulate(2))(plain())
    params = step.init(0).params
    assert float(step.loss(params, batch)) == pytest.approx(float(plain().loss(params, batch)), rel=1e-12)


@pytest.mark.parametrize(
    ("docs", "message"),
    [
        (Documents([], lambda indices: []), "lengths is empty"),
        (documents((3, 0, 2)), "document 1 has the length 0"),
        (Documents([3], lambda indices: [[1, 2]]), "document 0 has 2 ids as fetch gave it; lengths says 3"),
        (Documents([3, 3], lambda indices: [[1, 2, 3]]), "fetch was asked for 2 documents and gave 1"),
        (Documents([2], lambda indices: [{"input_ids": [1, 2], "loss_weights": [1, -1]}]), "a loss weight of a document is -1.0"),
        (Documents([2], lambda indices: [{"ids": [1, 2]}]), r"a document has \['ids'\]; expected input_ids"),
        (Documents([2], lambda indices: [[0.5, 1.0]]), "input_ids of a document is of float64, expected integers"),
        (Documents([2], lambda indices: [{"input_ids": [1, 2], "labels": [1]}]), r"labels of a document has the shape \(1,\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_documents_are_refused(docs: Documents, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_batch(max_tokens=8)(plain()).split(docs)


def test_bad_arguments_are_refused() -> None:
    axis: Any = "data"
    with pytest.raises(ValueError, match="'data' is not a mesh axis"):
        balance_batch(axis, max_tokens=8)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        balance_batch(max_tokens=0)
    with pytest.raises(ValueError, match="too_long is 'cut'"):
        balance_batch(max_tokens=8, too_long="cut")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"seed is 0\.5"):
        balance_batch(max_tokens=8, seed=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="applied twice"):
        compose(balance_batch(max_tokens=8), balance_batch(max_tokens=8))(plain())
    with pytest.raises(ValueError, match="a step takes documents after xtf"):
        plain().loss(plain().init(0).params, documents())


def test_an_axis_that_is_left_out_is_refused() -> None:
    def rank(mesh: Mesh) -> Any:
        return compose(balance_batch(mesh["data"], max_tokens=24), shard(mesh["data"], mesh["expert"]))(plain()).program

    with pytest.raises(ValueError, match=r"ranks that differ on expert .* balance_batch\(mesh\['data'\], mesh\['expert'\], \.\.\.\)"):
        simulate(rank, data=1, expert=2)


def failing(mesh: Mesh, what: str) -> str:
    """What a rank raises where rank 1 is given other documents, or cannot fetch its own."""

    def fetch(indices: Any) -> Any:
        raise OSError("the disk is gone")

    docs = documents((LENGTHS[0], *LENGTHS[2:]) if mesh.rank and what == "other" else LENGTHS)
    docs = Documents(docs.lengths, fetch) if mesh.rank and what == "fetch" else docs
    try:
        rank_of(mesh, docs, max_tokens=24)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.parametrize("kind", ["simulated", "gloo"])
def test_ranks_that_cannot_agree_raise_and_do_not_hang(kind: str) -> None:
    def all_ranks(what: str) -> list[str]:
        return simulate(lambda mesh: failing(mesh, what), data=2) if kind == "simulated" else gloo.run(failing, what, ranks=2, data=2)

    assert all("ValueError: balance_batch: ranks plan different steps" in said for said in all_ranks("other"))
    first, second = all_ranks("fetch")
    assert first == "ValueError: balance_batch: another rank could not make its micro-batches; the message of that rank says why"
    assert second == "OSError: the disk is gone"


def on_gloo(mesh: Mesh) -> tuple[float, list[Tensor]]:
    step = compose(balance_batch(mesh["data"], max_tokens=24), shard(mesh["data"]), chunk_loss(tokens=7))(plain())
    state, metrics = step(step.init(0), documents())
    return float(metrics["loss"]), tree.leaves(step.full(state.params))


def test_real_ranks_train_as_one_does() -> None:
    step = plain()
    state, metrics = step(step.init(0), documents_batch(documents()))
    for loss, params in gloo.run(on_gloo, ranks=2, data=2):
        assert loss == pytest.approx(float(metrics["loss"]), rel=1e-12)
        for got, want in zip(params, tree.leaves(state.params), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("tokens", [8192, 5000])
def test_a_step_of_many_documents_is_even(tokens: int) -> None:
    """Where documents in turn to ranks are not, in steps that nearly fill their packs, and in steps that do not."""
    for seed in range(4):
        lengths = np.minimum(log_normal(8 * 4 * tokens // 970, seed), 4096)
        ranks, in_turn = costs(lengths), [float(QWEN3_30B(lengths[rank::8]).sum()) for rank in range(8)]
        assert ranks.sum(axis=1).max() / ranks.sum(axis=1).mean() < 1.01 < 1.04 < max(in_turn) / np.mean(in_turn)
        assert ranks.max(axis=0).sum() / ranks.mean(axis=0).sum() < 1.015  # also where ranks wait after every micro-batch


def test_heavy_documents_of_a_step_stand_in_one_micro_batch() -> None:
    """Else a rank that has one would make all others wait; when it runs they have full packs too, and less later."""
    lengths = np.concatenate([np.full(5, 8000), np.full(400, 300)])
    ranks = costs(lengths)
    heavy = ranks.max(axis=0).argmax()
    assert (ranks[:, heavy] > 1.3 * np.delete(ranks, heavy, axis=1).max()).all()
    assert ranks.max(axis=0).sum() < 1.07 * ranks.sum(axis=1).mean()


def costs(lengths: Any) -> Any:
    """Of each micro-batch of each rank, (8, micro-batches)."""
    plan = plan_step(lengths, max_tokens=8192, data_ranks=8, cost=QWEN3_30B)
    return plan.totals(QWEN3_30B(plan.flat.lengths))[0]


def test_laws_with_shared_sequences() -> None:
    """Ranks of the axis that shares sequences are given the same documents."""

    def transform(mesh: Mesh) -> testing.Transform:
        parts = balance_batch(mesh["data"], max_tokens=24), context_parallel(mesh["context"]), shard(mesh["data"], mesh["context"])
        return compose(*parts)

    testing.check(transform, model=laws.model("qwen3_moe"), batch=documents(), data=2, context=2)


def test_a_cost_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"balance_batch\(cost='x'\): expected a function"):
        balance_batch(max_tokens=8, cost="x")  # pyright: ignore[reportArgumentType]


def test_documents_in_memory_are_ids_or_mappings() -> None:
    documents = Documents.of([[5, 6, 7], {"input_ids": [8, 9], "labels": [-100, 9]}])
    assert documents.lengths.tolist() == [3, 2] and documents[1].weights.tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="a loss weight of a document is inf"):
        Documents.of([{"input_ids": [1, 2], "loss_weights": [1.0, float("inf")]}])
    with pytest.raises(ValueError, match="fetch is a list, expected a function"):
        Documents([1], [[5]])  # pyright: ignore[reportArgumentType]
