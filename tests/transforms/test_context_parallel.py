"""`context_parallel`: the laws on every layout, model and batch; what is sent and when, and how even the work is; bad input."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import xtf
from tests import laws, memory
from xtf import ring, testing
from xtf.attention import AttentionStage
from xtf.collectives import Axis, Call, Work
from xtf.dispatch import DISPATCHERS
from xtf.mesh import Mesh, simulate, split_batch
from xtf.model import Model
from xtf.models import from_hf
from xtf.ops.reference import REFERENCE
from xtf.stage import Params, Program, Stage, Values
from xtf.step import TrainStep, compose, train_step
from xtf.transforms import accumulate, chunk_loss, context_parallel, expert_parallel, remat, shard, swap_activations

LAYOUTS = [{"context": 2}, {"data": 2, "context": 2}, {"context": 3}]
MODELS = ("llama", "qwen3_moe", "deepseek_v3", "moe_step")
FACTORS: dict[str, Any] = {
    "layout": LAYOUTS,
    "model": MODELS,
    "batch": ("documents", "lengths"),
    "micros": (None, 2),
    "chunk": (7, None),
    "sharded": (True, False),
    "order": (0, 17),
}


@pytest.mark.parametrize("case", [laws.case(**row) for row in laws.pairwise(**FACTORS)], ids=str)
def test_laws(case: laws.Case) -> None:
    case.check()


EXPERTS: dict[str, Any] = {
    "layout": [{"context": 2, "expert": 2}, {"context": 3}],
    "model": ("tiny_moe", "deepseek_v3"),
    "dispatcher": ("deduplicated", "all_gather"),
    "overlap": (1, 2),
    "sharded": (True, False),
}


@pytest.mark.parametrize("case", [laws.case(**row) for row in laws.pairwise(**EXPERTS)], ids=str)
def test_laws_with_experts_over_another_axis_or_the_same(case: laws.Case) -> None:
    case.check()


UNCOMMON: dict[str, Any] = {
    "layout": [{"context": 4}, {"context": 8}],
    "batch": ("one_rank", "ignored", "token", "few", "lengths", "weights"),
}


@pytest.mark.parametrize("case", [laws.case(**row, model="tiny") for row in laws.pairwise(**UNCOMMON)], ids=str)
def test_laws_with_fewer_tokens_than_ranks_and_ranks_without_targets(case: laws.Case) -> None:
    case.check()


def test_laws_of_one_rank_and_of_replicas() -> None:
    for layout in ({"context": 1}, {"context": 2, "replicate": 2}):
        laws.case(layout=layout, model="tiny", batch="lengths", chunk=7).check()


@pytest.mark.parametrize("dispatcher", [None, "deduplicated"])
def test_laws_of_routers_on_ranks_without_tokens(dispatcher: str | None) -> None:
    laws.case(layout={"context": 4}, model="tiny_moe", batch="few", dispatcher=dispatcher).check()


@pytest.mark.full
@pytest.mark.parametrize("context", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_laws_matrix(context: int, data: int, model: str) -> None:
    every = {
        "layout": [{"data": data, "context": context}],
        "model": [model],
        "batch": laws.ALL_BATCHES,
        "micros": (None, 2),
    }
    for row in laws.crossed(every, chunk=(7, None), sharded=(True, False), order=range(24), optimizer=("adamw", "muon")):
        laws.case(**row).check()


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [*EXPERTS["layout"], {"context": 4}, {"context": 3, "expert": 2}, {"context": 2, "expert": 4}, {"data": 2, "context": 2, "expert": 2}],
    ids=str,
)
@pytest.mark.parametrize("model", ["tiny_moe", "qwen3_moe", "deepseek_v3", "moe_step"])
def test_laws_matrix_of_experts(layout: dict[str, int], model: str) -> None:
    every = {"layout": [layout], "model": [model], "dispatcher": tuple(DISPATCHERS), "overlap": (1, 2, 3), "micros": (None, 2)}
    for row in laws.crossed(every, order=range(24), sharded=(True, False), batch=("documents", "lengths", "plain"), chunk=(7, None)):
        laws.case(**row).check()


WINDOWS = {
    "model_type": "gpt_oss",
    "vocab_size": 61,
    "hidden_size": 12,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def test_laws_of_windows_and_sinks() -> None:
    model = from_hf(WINDOWS, dtype=torch.float64)
    assert [stage.window for stage in model.build(REFERENCE) if isinstance(stage, AttentionStage)] == [5, None]
    testing.check(lambda mesh: context_parallel(mesh["context"]), model=model, batch=laws.batch("lengths"), context=3)


def test_laws_of_a_layer_that_predicts_the_token_after_the_next() -> None:
    config = testing.small_models()["deepseek_v3"].hf_config
    model = from_hf({**config, "num_nextn_predict_layers": 1}, dtype=torch.float64, mtp_loss=0.3)
    testing.check(lambda mesh: context_parallel(mesh["context"]), model=model, batch=laws.batch("lengths"), context=3)


def test_laws_of_positions_that_the_batch_gives() -> None:
    """They turn queries and keys, and say nothing about which token comes before which."""
    given = laws.batch("lengths") | {"positions": torch.randint(50, (2, 41), generator=torch.Generator().manual_seed(3))}
    testing.check(lambda mesh: context_parallel(mesh["context"]), model=laws.model("llama"), batch=given, context=3)


def test_a_joined_axis_and_swapped_activations() -> None:
    def both(mesh: Mesh) -> testing.Transform:
        return compose(
            swap_activations(lambda stage, bytes: True), context_parallel(mesh.join("a", "b")), shard(mesh["a"], mesh["b"], mesh["data"])
        )

    testing.check(both, model=laws.model("llama"), a=2, b=2, data=2)


@pytest.mark.parametrize("first", [True, False])
def test_what_else_is_kept_or_computed_again(first: bool) -> None:
    """Attention keeps what the ring needs, whatever the policy; names of values in it are known as before."""

    def both(mesh: Mesh) -> testing.Transform:
        return compose(*[context_parallel(mesh["context"]), remat("nothing" if first else ["attention", "gate_up"])][:: 1 if first else -1])

    testing.check(both, model=laws.model("deepseek_v3" if first else "tiny"), batch=laws.batch("lengths"), context=2)


def test_compiled_it_is_the_same() -> None:
    """What is compiled are the projections; the ring stands between."""
    model, batch = laws.model("tiny"), laws.batch("lengths")

    def gradients(backend: Any) -> list[list[Tensor]]:
        def of_rank(mesh: Mesh) -> list[Tensor]:
            step = xtf.compile(context_parallel(mesh["context"])(train_step(model, testing.default_optimizer())), backend=backend)
            return [leaf for leaf in xtf.tree.leaves(step.value_and_grad(step.init(0).params, batch)) if leaf is not None]

        return simulate(of_rank, context=2)

    for eager, compiled in zip(gradients("eager"), gradients("aot_eager"), strict=True):
        for a, b in zip(eager, compiled, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


# Effects ------------------------------------------------------------------------------------------------------------------------


def _issued(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, int, str]]:
    """(rank, primitive, bytes, label) of all that axes issue from now on."""
    seen, issue = list[tuple[int, str, int, str]](), Axis._issue

    def counted(self: Axis, call: Call, bytes: int) -> Work:
        work = issue(self, call, bytes)
        seen.append((self.mesh.rank, call.op, work.bytes, call.label))
        return work

    monkeypatch.setattr(Axis, "_issue", counted)
    return seen


@pytest.mark.parametrize(("name", "n"), [("llama", 2), ("llama", 4), ("deepseek_v3", 3)])
def test_bytes_sent(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = laws.model(name), laws.batch("lengths")
    seen = _issued(monkeypatch)

    def trial(mesh: Mesh) -> None:
        step = context_parallel(mesh["context"])(train_step(model, testing.default_optimizer()))
        step.value_and_grad(step.init(0).params, batch)

    simulate(trial, context=n)
    config, most = model.config, -(-82 // n)
    values = 2 * 6 if name == "llama" else 5 + 4 + 3
    width = config.num_key_value_heads * values
    for rank in range(n):
        sent = [size for at, op, size, _ in seen if at == rank and op == "permute"]
        assert sum(sent) == 3 * config.num_hidden_layers * (n - 1) * most * width * 8
        assert len(sent) == 3 * config.num_hidden_layers * (n - 1)


def test_what_comes_next_is_under_way_while_a_block_is_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward: hop, own block, hop, block, hop, block, block. In backward a rank's own block is last: gradients come home meanwhile."""
    order = list[tuple[int, str]]()
    issue, forward, backward = Axis._issue, ring.attend, ring.attend_backward

    def counted(self: Axis, call: Call, bytes: int) -> Work:
        if call.op == "permute":
            order.append((self.mesh.rank, "gradients" if call.label.endswith(".gradients") else "hop"))
        return issue(self, call, bytes)

    def rank_of_this_thread(fn: Any, name: str) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> None:
            order.append((ranks[threading.get_ident()], name))
            fn(*args, **kwargs)

        return wrapped

    ranks = dict[Any, int]()
    monkeypatch.setattr(Axis, "_issue", counted)
    monkeypatch.setattr(ring, "attend", rank_of_this_thread(forward, "block"))
    monkeypatch.setattr(ring, "attend_backward", rank_of_this_thread(backward, "back"))

    def trial(mesh: Mesh) -> None:
        ranks[threading.get_ident()] = mesh.rank
        step = context_parallel(mesh["context"])(train_step(laws.model("tiny"), testing.default_optimizer()))
        step.value_and_grad(step.init(0).params, laws.batch("lengths"))

    simulate(trial, context=4)
    there = ["hop", "block", "hop", "block", "hop", "block", "block"]
    back = ["hop", "hop", "back", "gradients", "hop", "back", "gradients", "back", "gradients", "back"]
    for rank in range(4):
        assert [what for at, what in order if at == rank] == there + back


def _deep() -> Model:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 16}
    return from_hf(laws.TINY | sizes | {"num_key_value_heads": 2}, dtype=torch.float32)


@pytest.mark.parametrize("n", [2, 4])
def test_activations_of_a_rank(n: int) -> None:
    """One long document on n ranks: a rank's live bytes at most are a little more than 1/n of those of one rank."""
    model = _deep()
    ids = torch.randint(61, (1, 1024), generator=torch.Generator().manual_seed(0))

    def peak(mesh: Mesh) -> int:
        step = compose(chunk_loss(64), context_parallel(mesh["context"]))(train_step(model, testing.default_optimizer()))
        params = step.init(0).params
        grads = sum(leaf.nbytes for leaf in xtf.tree.leaves(params))
        with memory.Live() as live:
            step.value_and_grad(params, {"input_ids": ids, "labels": ids})
        return live.most - grads

    (alone,) = simulate(peak, context=1)
    assert max(simulate(peak, context=n)) < 1.35 * alone / n


# Bad input ----------------------------------------------------------------------------------------------------------------------


def _build(make: Any, **sizes: int) -> None:
    simulate(lambda mesh: make(mesh)(train_step(laws.model("llama"), testing.default_optimizer())).program, **sizes)


def test_what_is_no_axis() -> None:
    with pytest.raises(ValueError, match=r"'context' is not a mesh axis; give mesh\[\"name\"\]"):
        context_parallel("context")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("other", ["context", "data"])
def test_applied_twice(other: str) -> None:
    with pytest.raises(ValueError, match="context_parallel is applied twice: sequences are already split over context"):
        _build(lambda mesh: compose(context_parallel(mesh[other]), context_parallel(mesh["context"])), context=2, data=2)


def _owns_heads(axis: Axis) -> testing.Transform:
    return lambda step: step.replace("heads", owned={**step.owned, "heads": axis})


@pytest.mark.parametrize("order", [1, -1])
def test_an_axis_whose_ranks_see_the_same_tokens(order: int) -> None:
    def both(mesh: Mesh) -> testing.Transform:
        return compose(*[context_parallel(mesh["context"]), _owns_heads(mesh["context"])][::order])

    with pytest.raises(ValueError, match="'heads' of the parameters is split over 'context' too"):
        _build(both, context=2)


@pytest.mark.parametrize("order", [1, -1])
def test_a_transform_that_changes_what_attention_computes(order: int) -> None:
    def rewrite(step: TrainStep, program: Program) -> Program:
        def halved(stage: Stage) -> Stage:
            def fn(params: Params, x: Tensor, **consts: Tensor) -> Values:
                return (stage.fn(params, x, **consts)[0] / 2,)

            return dataclasses.replace(stage, fn=fn)

        return tuple(halved(node) if isinstance(node, Stage) and node.kind == "attention" else node for node in program)

    def change(step: TrainStep) -> TrainStep:
        return step.replace("change", rewrites=(*step.rewrites, rewrite))

    def run(mesh: Mesh, *parts: testing.Transform) -> None:
        step = compose(*parts)(train_step(laws.model("llama"), testing.default_optimizer()))
        step.value_and_grad(step.init(0).params, laws.batch("row"))

    with pytest.raises(ValueError, match=r"another transform changed what the stage 'layers.0.attention' computes"):
        simulate(lambda mesh: run(mesh, *[context_parallel(mesh["context"]), change][::order]), context=2)


def test_a_stage_that_looks_beyond_a_token_in_another_way() -> None:
    def rewrite(step: TrainStep, program: Program) -> Program:
        def fn(params: Params, x: Tensor, *, cu_seqlens: Tensor) -> Values:
            return (x.cumsum(0),)

        return (*program[:1], Stage("running", "mix", fn, "running", {}, ("x",), ("x",), ("cu_seqlens",)), *program[1:])

    def add(step: TrainStep) -> TrainStep:
        return step.replace("add", rewrites=(*step.rewrites, rewrite))

    with pytest.raises(ValueError, match="the stage 'running' takes cu_seqlens, so tokens see each other in a way that is not known"):
        _build(lambda mesh: compose(context_parallel(mesh["context"]), add), context=2)
    with pytest.raises(ValueError, match=r"has no stage made by xtf\.attention\.attention_stage"):
        _build(
            lambda mesh: compose(
                context_parallel(mesh["context"]),
                lambda step: step.replace("none", rewrites=(lambda step, program: tuple(n for n in program if n.kind != "attention"),)),  # pyright: ignore
            ),
            context=2,
        )


@pytest.mark.parametrize("key", ["input_ids", "labels", "loss_weights", "document_ids"])
def test_ranks_that_are_given_different_rows(key: str) -> None:
    def trial(mesh: Mesh) -> None:
        step = context_parallel(mesh["context"])(train_step(laws.model("llama"), testing.default_optimizer()))
        batch = laws.batch("documents")
        if mesh.rank:
            value = batch[key].clone()
            value[0] = value[0].flip(0) if value.is_floating_point() else (value[0] + 1) % 7
            value[0, 3] += 1
            batch[key] = value
        step.loss(step.init(0).params, batch)

    with pytest.raises(ValueError, match="the ranks of 'context' were given different rows, but they share each sequence"):
        simulate(trial, context=2)


def test_rows_split_over_the_context_axis_too() -> None:
    def trial(mesh: Mesh) -> None:
        step = context_parallel(mesh["context"])(train_step(laws.model("llama"), testing.default_optimizer()))
        step.loss(step.init(0).params, split_batch(laws.batch("documents"), mesh))

    with pytest.raises(ValueError, match=r"give them the same, as xtf\.split_batch"):
        simulate(trial, context=2)


def test_the_axes_of_rows() -> None:
    def trial(mesh: Mesh) -> tuple[list[str], list[str], str]:
        transform = compose(accumulate(2), expert_parallel(mesh["expert"]), shard(mesh["data"]), context_parallel(mesh["context"]))
        step = transform(train_step(laws.model("tiny_moe"), testing.default_optimizer()))
        assert step.row_axis is not None
        return [a.name for a in step.row_axes], [a.name for a in step.token_axes], step.row_axis.name

    assert simulate(trial, data=2, context=2, expert=1)[0] == (["data", "expert"], ["context", "data", "expert"], "data,expert")
