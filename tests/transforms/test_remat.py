"""`remat`: the same bits whatever is kept, what is kept is what was asked for, and what was decided is not decided again."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import xtf
from tests import laws
from xtf import testing, tree
from xtf.joint import cut, trace
from xtf.mesh import Mesh
from xtf.record import storage_bytes
from xtf.stage import Pair, Stage
from xtf.step import TrainStep, compose, train_step
from xtf.transforms import accumulate, chunk_loss, expert_parallel, remat, shard, swap_activations
from xtf.transforms.remat import Policy, all_of_forward, named, within

POLICIES: list[Policy] = ["everything", "nothing", ["attention"], ["qkv", "attention"], 0.0, 0.3, 1.0]


def plain(name: str) -> TrainStep:
    return train_step(laws.model(name), testing.default_optimizer())


def bits(step: TrainStep, batch: Any) -> list[Any]:
    state = step.init(0)
    return tree.leaves((step.value_and_grad(state.params, batch), step(state, batch), step.loss(state.params, batch)))


@pytest.mark.parametrize("name", laws.MODELS)
def test_the_same_bits(name: str) -> None:
    step, batch = plain(name), testing.random_batch(61)
    expected = bits(step, batch)
    for policy in ("nothing", ["attention", "qkv"], 0.3):
        for a, b in zip(bits(remat(policy)(step), batch), expected, strict=True):
            assert a is b is None or torch.equal(a, b), policy


def transform(policy: Policy, swap: bool, overlap: int, dispatcher: str, order: bool) -> Any:
    def of(mesh: Mesh) -> testing.Transform:
        parts = [remat(policy), expert_parallel(mesh["expert"], overlap=overlap, dispatcher=dispatcher)]
        parts += [shard(mesh["data"], mesh["expert"]), chunk_loss(7), accumulate(2)]
        parts += [swap_activations(lambda stage, bytes: True)] if swap else []
        return compose(*(parts[::-1] if order else parts))

    return of


FACTORS: dict[str, list[Any]] = {
    "policy": [policy for policy in POLICIES if policy != "everything"],
    "swap": [False, True],
    "overlap": [1, 2],
    "dispatcher": ["deduplicated", "all_to_all", "all_gather"],
    "order": [False, True],
    "sizes": [{"data": 1, "expert": 2}, {"data": 2, "expert": 1}],
}


@pytest.mark.parametrize("case", laws.pairwise(**FACTORS), ids=str)
def test_laws(case: dict[str, Any]) -> None:
    testing.check(transform(**{k: v for k, v in case.items() if k != "sizes"}), model=[laws.model("qwen3_moe")], **case["sizes"])


def test_laws_of_another_family() -> None:
    """Latent attention, shared experts, a router with a correction, on four ranks."""
    testing.check(transform("nothing", True, 2, "deduplicated", False), model=[laws.model("deepseek_v3")], data=2, expert=2)


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("model", laws.MODELS)
def test_laws_matrix(policy: Policy, model: str) -> None:
    sizes = [*FACTORS["sizes"], {"data": 2, "expert": 2}]
    if laws.model(model).active_fraction == 1:  # no experts
        for swap, at in itertools.product([False, True], sizes):
            parts = [remat(policy), *([swap_activations(lambda stage, bytes: True)] if swap else [])]
            testing.check(
                lambda mesh, parts=parts: compose(*parts, shard(mesh["data"], mesh["expert"]), chunk_loss(7)),
                model=[laws.model(model)],
                **at,
            )
        return
    every = {"overlap": FACTORS["overlap"], "dispatcher": FACTORS["dispatcher"], "sizes": sizes}
    for case in laws.crossed(every, swap=FACTORS["swap"], order=FACTORS["order"]):
        of = {key: case[key] for key in ("swap", "overlap", "dispatcher", "order")}
        testing.check(transform(policy, **of), model=[laws.model(model)], **case["sizes"])


class Ops(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def count(step: TrainStep) -> dict[str, int]:
    """Operations of a forward and backward, once everything is traced."""
    params, batch = step.init(0).params, testing.random_batch(61)
    step.value_and_grad(params, batch)
    with Ops() as ops:
        step.value_and_grad(params, batch)
    return ops.counts


def test_what_is_kept_is_not_computed_again() -> None:
    step = chunk_loss(16)(plain("qwen3_moe"))
    layers, sparse = (sum(isinstance(n, Stage) and n.kind == kind for n in step.program) for kind in ("attention", "experts"))
    again, nothing, attention = (count(remat(policy)(step)) for policy in ("everything", "nothing", ["attention"]))
    assert again["xtf::attention_cpu"] == 2 * layers
    assert nothing["xtf::attention_cpu"] == attention["xtf::attention_cpu"] == layers
    assert nothing["xtf::grouped_mm_cpu"] == 2 * sparse
    assert attention["xtf::grouped_mm_cpu"] == again["xtf::grouped_mm_cpu"] == 4 * sparse


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_router_chooses_once(name: str, policy: Policy) -> None:
    step = plain(name)
    routers = sum(isinstance(node, Stage) and node.kind == "router" for node in step.program)
    batch, params = testing.random_batch(61), step.init(0).params
    with Ops() as ops:
        step.loss(params, batch)
    assert count(remat(policy)(step))["aten::topk"] == ops.counts["aten::topk"] >= routers


def attention_stage(step: TrainStep) -> tuple[Stage, Pair, tuple[Tensor, ...], dict[str, Any], dict[str, Tensor]]:
    """The first attention stage of a step, its pair, and what it is given."""
    at, stage = next((at, node) for at, node in enumerate(step.program) if isinstance(node, Stage) and node.kind == "attention")
    pair, consts = step.pairs[at], step.model.pack(testing.random_batch(61))
    assert pair is not None
    params: dict[str, Tensor] = tree.items(step.init(0).params)
    own = {name: params[path] for name, path in stage.params.items()}
    tokens = consts["input_ids"].shape[0]
    x = torch.randn(tokens, step.model.config.hidden_size, dtype=torch.float64)
    return stage, pair, (x,), {name: consts[name] for name in stage.consts}, own


def kept_bytes(policy: Policy) -> int:
    _, pair, reads, consts, params = attention_stage(remat(policy)(plain("llama")))
    _, residual = pair.forward(params, reads, consts)
    return storage_bytes([leaf for leaf in tree.leaves(residual) if isinstance(leaf, Tensor)])


def test_what_is_kept_is_a_list_of_tensors_of_known_sizes() -> None:
    config, tokens = laws.model("llama").config, testing.random_batch(61)["input_ids"].numel()
    row = tokens * 8
    x, heads = config.hidden_size * row, config.num_attention_heads
    q, kv = heads * config.head_dim * row, 2 * config.num_key_value_heads * config.head_dim * row
    assert kept_bytes("everything") == kept_bytes(0.0) == x
    assert kept_bytes(["attention"]) == x + q + heads * row  # and the log-sum-exp of each head
    assert kept_bytes(["qkv", "attention"]) == x + q + kv + q + heads * row
    assert kept_bytes("nothing") > kept_bytes(["qkv", "attention"])
    assert kept_bytes("nothing") >= kept_bytes(1.0) >= kept_bytes(0.3) >= kept_bytes(0.0)


def test_parameters_and_their_views_are_not_kept() -> None:
    _, pair, reads, consts, params = attention_stage(remat("nothing")(plain("llama")))
    _, residual = pair.forward(params, reads, consts)
    theirs = {leaf.untyped_storage().data_ptr() for leaf in params.values()} | {consts["cos"].untyped_storage().data_ptr()}
    assert not theirs & {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(residual) if isinstance(leaf, Tensor)}


def test_a_function_of_the_stage() -> None:
    step = remat(lambda stage: "nothing" if stage.kind == "attention" else "everything")(plain("llama"))
    layers = laws.model("llama").config.num_hidden_layers
    assert count(chunk_loss(16)(step))["xtf::attention_cpu"] == layers
    batch = testing.random_batch(61)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(bits(step, batch), bits(plain("llama"), batch), strict=True))


def test_one_graph_for_all_layers_and_any_documents() -> None:
    from xtf import partition

    step = remat("nothing")(plain("llama"))
    params = step.init(0).params
    batch = testing.random_batch(61)
    step.value_and_grad(params, batch)
    known = sum(map(len, partition._TRACED.values()))
    other = dict(batch, document_ids=torch.zeros_like(batch["input_ids"]))
    step.value_and_grad(params, other)
    remat("nothing")(plain("llama")).value_and_grad(params, batch)
    assert sum(map(len, partition._TRACED.values())) == known
    step.value_and_grad(params, testing.random_batch(61, seq=9))
    assert sum(map(len, partition._TRACED.values())) > known


def test_what_sizes_a_graph_serves() -> None:
    def fn(params: Any, x: Tensor, h: Tensor) -> tuple[Tensor]:
        return ((x + h).sin(),)

    joint = trace(fn, {}, (torch.ones(5, 3), torch.ones(5, 3)), {}, rows=True)
    for rows, columns, served in (((7, 7), 3, True), ((7, 8), 3, False), ((1, 1), 3, False), ((0, 0), 3, False), ((5, 5), 4, False)):
        assert joint.serves([torch.ones(n, columns) for n in rows]) is served
    assert not joint.serves([torch.ones(5, 3, dtype=torch.float64)] * 2)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled(backend: Any) -> None:
    step, batch = remat(["attention", "gate_up"])(chunk_loss(16)(plain("llama"))), testing.random_batch(61)
    compiled = xtf.compile(step, backend=backend)
    params = step.init(0).params
    expected = tree.leaves(step.value_and_grad(params, batch))
    for a, b in zip(tree.leaves(compiled.value_and_grad(params, batch)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled.value_and_grad(params, dict(batch, document_ids=torch.zeros_like(batch["input_ids"])))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_memory_is_freed_while_the_backward_runs() -> None:
    """A stage's residual dies with its backward: live bytes fall from stage to stage."""
    from tests.memory import Live

    step = remat("nothing")(chunk_loss(16)(plain("llama")))
    params, batch = step.init(0).params, testing.random_batch(61)
    step.value_and_grad(params, batch)
    gc.collect()
    with Live() as live:
        loss, grads = step.value_and_grad(params, batch)
    gc.collect()
    assert live.now <= storage_bytes((loss, grads)) * 1.05


# What is refused ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["all", 1.5, -0.1, True, [], [1], None])
def test_a_policy_that_is_none(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"remat\(.*\): expected 'everything', 'nothing', names of values to keep"):
        remat(policy)


def test_an_unknown_name() -> None:
    step = remat(["attention", "scores"])(plain("llama"))
    with pytest.raises(ValueError, match=r"remat: no stage names 'scores'; the program names attention, gate_up, qkv. A stage of your own"):
        _ = step.program


@pytest.mark.parametrize(("name", "x"), [("", torch.ones(1)), (None, torch.ones(1)), ("a", 3), ("a", None)])
def test_what_cannot_be_named(name: Any, x: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a name, and a tensor"):
        xtf.keep(name, x)


def test_a_function_of_the_stage_that_fails() -> None:
    step = remat(lambda: "nothing")(plain("llama"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError) as caught:
        _ = step.program
    assert "called as policy(stage)" in caught.value.__notes__[0]


def test_twice() -> None:
    with pytest.raises(ValueError, match="remat is applied twice"):
        remat("nothing")(remat("nothing")(plain("llama")))


def test_a_stage_that_does_not_name_what_it_says() -> None:
    def fn(params: Any, x: Tensor) -> tuple[Tensor]:
        return (xtf.keep("there", x.sin()).cos(),)

    joint = trace(fn, {}, (torch.ones(3),), {})
    assert len(cut(joint, named(["there"])).forward.graph.nodes) > 0
    with pytest.raises(ValueError, match=r"a stage is said to name \['gone'\], but its function does not; it names \['there'\]"):
        cut(joint, named(["gone"]))


def test_a_function_that_changes_what_it_was_given() -> None:
    def fn(params: Any, x: Tensor) -> tuple[Tensor]:
        y = x * 2
        z = y * 3
        y.add_(1)
        return (y * z,)

    with pytest.raises(RuntimeError, match=r"must not change tensors in place, but this does: .*add_"):
        trace(fn, {}, (torch.ones(3),), {})


@pytest.mark.parametrize("choose", [all_of_forward, within(0.5), within(1.0)])
def test_several_results_and_integers(choose: Any) -> None:
    def fn(params: Any, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        best, which = (x * params["w"]).topk(2)
        a, b = x.sin().split([1, 3], -1)
        return best.exp() * a, which, b.index_select(0, at)

    params, x, at = {"w": torch.randn(4, dtype=torch.float64)}, torch.randn(3, 4, dtype=torch.float64), torch.tensor([2, 0, 2])
    halves = cut(trace(fn, params, (x, at), {}), choose)
    best, which, picked, *kept = halves.forward(params["w"], x, at)
    assert torch.equal(which, (x * params["w"]).topk(2)[1]) and not which.is_floating_point()
    cotangents = (torch.randn_like(best), torch.randn_like(picked))

    def floats(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        out = fn({"w": w}, x, at)
        return out[0], out[2]

    expected = torch.func.vjp(floats, params["w"], x)[1](cotangents)
    got = halves.backward(params["w"], *[(x, at)[i] for i in halves.reads], *kept, *cotangents)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)
    assert not any(node.target == torch.ops.aten.topk.default for node in halves.backward.graph.nodes)


def test_every_model_names_what_its_stages_say() -> None:
    for name in laws.MODELS:
        step = plain(name)
        names = sorted({n for node in step.program if isinstance(node, Stage) for n in node.named})
        assert "attention" in names
        step = remat(names)(step)
        step.value_and_grad(step.init(0).params, testing.random_batch(61))
