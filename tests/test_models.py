"""Families as records of stages: packing, edges, auxiliary losses, configs, and each stage compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import hf_models
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import xtf
from xtf import experts, models, tree
from xtf.batch import normalizer
from xtf.model import Model, run
from xtf.models import moe, routers
from xtf.models.common import rms_norm
from xtf.models.qwen3_moe import Config, qwen3_moe
from xtf.ops.cpu import CPU
from xtf.ops.reference import REFERENCE

SIZES = {"vocab_size": 31, "hidden_size": 12, "intermediate_size": 14, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = SIZES | {"num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64, "initializer_range": 0.3}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": DENSE | {"model_type": "llama", "tie_word_embeddings": True, "mlp_bias": True},
    "qwen2": DENSE | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": DENSE | {"model_type": "qwen3", "attention_bias": True},
    "qwen3_moe": DENSE
    | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.1,
    },
    "mixtral": DENSE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1},
    "gpt_oss": DENSE
    | {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 3,
        "router_aux_loss_coef": 0.1,
    },
    "deepseek_v3": SIZES
    | {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "initializer_range": 0.3,
        "max_position_embeddings": 64,
        "q_lora_rank": 9,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "moe_intermediate_size": 7,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe": DENSE
    | {
        "model_type": "glm4_moe",
        "head_dim": 8,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "moe_intermediate_size": 7,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
    },
}
FAMILIES = list(CONFIGS)


def small(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Model:
    return models.from_hf(CONFIGS[name], dtype=dtype, **options)


def batch_of(lengths: list[int], vocab: int = 31) -> dict[str, Tensor]:
    """One row of documents."""
    total = sum(lengths)
    ids = torch.randint(vocab, (1, total), generator=torch.Generator().manual_seed(total))
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]) if lengths else torch.zeros(0, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids, "document_ids": documents[None]}


def near(got: Tensor, want: Tensor, tolerance: float, what: str = "") -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, what
    if want.numel():
        assert (got - want).abs().max() <= tolerance * want.abs().max(), what


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_equal_documents_alone(name: str) -> None:
    model = small(name)
    params = model.init(0)
    lengths = [5, 1, 5, 9]
    batch = batch_of(lengths)
    got = model.logits(params, batch["input_ids"], document_ids=batch["document_ids"])
    alone = [model.logits(params, ids) for ids in batch["input_ids"].split(lengths, 1)]
    near(got, torch.cat(alone, 1), 1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_gradients_equal_those_of_documents_alone(name: str) -> None:
    model = small(name)
    model = type(model)(**{f: getattr(model, f) for f in model.__dataclass_fields__ if f not in ("_reference", "aux")})
    params, lengths = model.init(0), [5, 1, 8]
    batch = batch_of(lengths)
    got = torch.func.grad(model.loss)(params, batch)
    parts = [{k: v[:, a : a + n] for k, v in batch.items()} for a, n in zip((0, 5, 6), lengths, strict=True)]
    targets = [n - 1 for n in lengths]
    want = tree.map(
        lambda *g: sum(w * part for w, part in zip(targets, g, strict=True)) / sum(targets),
        *(torch.func.grad(model.loss)(params, part) for part in parts),
    )
    for path, value in tree.items(want).items():
        near(tree.items(got)[path], value, 1e-12, path)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("lengths", [[], [1], [7], [1, 1, 1]], ids=["none", "one token", "one document", "single tokens"])
def test_edges(name: str, lengths: list[int]) -> None:
    model = small(name)
    params, batch = model.init(0), batch_of(lengths)
    logits = model.logits(params, batch["input_ids"], document_ids=batch["document_ids"])
    assert logits.shape == (1, sum(lengths), 31) and bool(logits.isfinite().all())
    grads, loss = torch.func.grad_and_value(model.loss)(params, batch)
    assert all(bool(g.isfinite().all()) for g in tree.leaves(grads))
    supervised = max(lengths, default=0) > 1
    assert bool(loss > 0) == supervised
    assert supervised or not any(bool(g.any()) for g in tree.leaves(grads))


@pytest.mark.parametrize("name", FAMILIES)
def test_cpu_ops_give_the_same_model(name: str) -> None:
    model = small(name)
    params, batch = model.init(0), batch_of([4, 4, 7])
    consts = model.pack(batch) | {"normalizer": torch.tensor(1.0)}

    def loss(params: Any, ops: Any) -> Tensor:
        return run(model.build(ops), params, consts)["loss"]

    got, want = (torch.func.grad(loss)(params, ops) for ops in (CPU, REFERENCE))
    near(loss(params, CPU), loss(params, REFERENCE), 1e-13)
    for path, value in tree.items(want).items():
        near(tree.items(got)[path], value, 1e-12, path)


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_may_be_given(name: str) -> None:
    model = small(name)
    params, ids = model.init(0), batch_of([6])["input_ids"]
    counted = model.logits(params, ids)
    near(model.logits(params, ids, positions=torch.arange(6)[None]), counted, 1e-15)
    near(model.logits(params, ids, positions=torch.arange(6)[None] + 3), counted, 1e-11)  # only distances matter
    assert (model.logits(params, ids, positions=2 * torch.arange(6)[None]) - counted).abs().max() > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_equal_shape_share_a_key(name: str) -> None:
    stages = small(name).build(CPU)
    assert len({stage.name for stage in stages}) == len(stages)
    keys: dict[Any, list[str]] = {}
    for stage in stages:
        keys.setdefault(stage.key, []).append(stage.name)
    shared = sorted(len(names) for names in keys.values())
    expected = {
        "llama": [1, 1, 1, 2, 2],
        "qwen2": [1, 1, 1, 1, 1, 2],  # one layer has a window
        "qwen3": [1, 1, 1, 2, 2],
        "qwen3_moe": [1, 1, 1, 1, 2, 2, 3],
        "mixtral": [1, 1, 1, 2, 2, 2],
        "gpt_oss": [1, 1, 1, 1, 2, 3, 3],  # one layer of three has no window
        "deepseek_v3": [1, 1, 1, 1, 2, 2, 2, 3],
        "glm4_moe": [1, 1, 1, 1, 1, 1, 1, 2],
    }
    assert shared == expected[name]
    others = {stage.key for ops in (REFERENCE,) for stage in small(name).build(ops)}
    others |= {stage.key for stage in small(name, torch.float32).build(CPU)}
    assert not others & set(keys)


def vjp_of(stage: Any) -> Any:
    """Forward and backward in one function, as an engine compiles them. ``torch.func.vjp`` takes floating outputs only."""

    def both(params: Mapping[str, Tensor], reads: tuple[Tensor, ...], consts: Mapping[str, Any], dwrites: tuple[Tensor, ...]) -> Any:
        def differentiable(params: Mapping[str, Tensor], floats: tuple[Tensor, ...]) -> Any:
            rest = iter(floats)
            written = stage.fn(params, *[next(rest) if r.is_floating_point() else r for r in reads], **consts)
            return tuple(w for w in written if w.is_floating_point()), written

        floats = tuple(r for r in reads if r.is_floating_point())
        out = torch.func.vjp(differentiable, dict(params), floats, has_aux=True)
        return out[-1], out[1](dwrites)

    return both


def compiled_equals_eager(name: str, backend: str) -> None:
    model = small(name, torch.float32, z_loss=0.1, **({"sequence_loss": 0.1} if name == "deepseek_v3" else {}))
    params, seen = tree.items(model.init(0)), set()
    consts = model.pack(batch_of([4, 4, 7])) | {"normalizer": torch.tensor(0.1)}
    values: dict[str, Tensor] = {}
    for stage in model.build(CPU):
        own = {name: params[path] for name, path in stage.params.items()}
        reads = tuple(values[name] for name in stage.reads)
        mine = {name: consts[name] for name in stage.consts}
        writes = stage.fn(own, *reads, **mine)
        values.update(zip(stage.writes, writes, strict=True))
        if stage.key in seen:
            continue
        seen.add(stage.key)
        dwrites = tuple(torch.ones((), dtype=w.dtype).expand(w.shape) for w in writes if w.is_floating_point())
        both = vjp_of(stage)
        want = both(own, reads, mine, dwrites)
        torch.compiler.reset()  # every stage's ``both`` has the same code, and dynamo counts recompilations by code
        got = torch.compile(both, fullgraph=True, backend=backend)(own, reads, mine, dwrites)
        assert tree.same_structure(got, want)
        for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3_moe", "deepseek_v3", "gpt_oss"]
)  # between them they have every kind of stage, with and without windows
def test_stages_trace_without_breaks(name: str) -> None:
    compiled_equals_eager(name, "aot_eager")


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_stages_compile_with_inductor(name: str) -> None:
    compiled_equals_eager(name, "inductor")


def test_embedding_backward_needs_no_parameters() -> None:
    model = small("qwen3", torch.bfloat16)
    stage = model.build(CPU)[0]
    consts = {"input_ids": torch.tensor([3, 3, 3, 0])}
    weight = tree.items(model.init(0))["embed.weight"]
    pair = stage.rule(stage.fn, stage.key, lambda fn, key: fn)
    (x,), residual = pair.forward({"weight": weight}, (), consts)
    assert torch.equal(x, weight[consts["input_ids"]]) and not pair.needs_params
    assert not [leaf for leaf in tree.leaves(residual) if isinstance(leaf, Tensor)]
    dx = torch.tensor([256.0, 1.0, 1.0, 5.0], dtype=torch.bfloat16)[:, None].expand(4, 12)
    grads, dreads = pair.backward({}, residual, (dx,), consts)
    assert dreads == () and grads["weight"].dtype == torch.bfloat16 and grads["weight"].shape == weight.shape
    assert grads["weight"][3, 0] == 258 and grads["weight"][0, 0] == 5  # summed in bfloat16, 256 + 1 + 1 stays 256
    assert grads["weight"].count_nonzero() == 24


# Mixture of experts


def test_dispatch_and_combine_undo_each_other() -> None:
    indices = torch.tensor([[4, 1], [1, 0], [4, 0]])
    order = experts.dispatch_order(indices, 5)
    assert order.offsets.tolist() == [2, 4, 4, 4, 6] and order.offsets.dtype == torch.int32
    assert indices.flatten()[order.order].tolist() == [0, 0, 1, 1, 4, 4]
    assert order.tokens.tolist() == [1, 2, 0, 1, 0, 2]
    rows = torch.randn(3, 7, dtype=torch.float64)
    weights = torch.rand(3, 2, dtype=torch.float64)
    near(experts.combine(rows[order.tokens], weights, order), rows * weights.sum(1, keepdim=True), 1e-15)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_corrections_are_updated_from_what_the_model_counts(name: str) -> None:
    model = small(name, bias_update_speed=0.25)
    assert small(name, bias_update_speed=0.0).update is None and model.update is not None
    params = model.init(0)
    stats, _ = stats_of(model, params, batch_of([9, 4]))
    fixed = {path: leaf for path, leaf in tree.items(params).items() if not tree.items(model.specs)[path].trainable}
    new = model.update(fixed, {name: value for name, value in stats.items() if not value.is_floating_point()})
    assert set(new) == set(fixed) == {f"layers.{i}.moe.correction" for i in model.config.sparse_layers}
    for i in model.config.sparse_layers:
        counts = stats[f"layers.{i}.router.counts"].double()
        assert torch.equal(new[f"layers.{i}.moe.correction"], 0.25 * (counts.mean() - counts).sign().float()), i


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_shared_experts_are_added(name: str) -> None:
    """Without them the model is what it is with shared experts that give nothing."""
    model, without = small(name), models.from_hf(CONFIGS[name] | {"n_shared_experts": 0}, dtype=torch.float64)
    params, batch = model.init(0), batch_of([9, 4])
    silent = tree.map_with_path(lambda path, leaf: torch.zeros_like(leaf) if path.endswith("shared_down") else leaf, params)
    fewer = tree.from_items(without.specs, {path: tree.items(params)[path] for path in tree.paths(without.specs)})
    near(model.loss(silent, batch), without.loss(fewer, batch), 1e-15)
    assert (model.loss(params, batch) - without.loss(fewer, batch)).abs() > 1e-4
    kinds = [stage.kind for stage in model.build(REFERENCE) if stage.name.startswith("layers.1.")]
    assert kinds == ["attention", "router", "shared", "experts"]
    assert "shared" not in [stage.kind for stage in without.build(REFERENCE)]


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_moe"])
def test_balance_of_documents_is_a_stage_of_its_own(name: str) -> None:
    """The loss of documents packed together is that of each, weighted by its tokens; padding does not count."""
    config = CONFIGS[name] | ({"router_aux_loss_coef": 0.0} if name == "qwen3_moe" else {})
    model, plain = (models.from_hf(config, dtype=torch.float64, sequence_loss=c) for c in (0.3, 0.0))
    assert model.aux is not None
    assert [stage.kind for stage in model.build(REFERENCE)].count("statistics") == len(model.config.sparse_layers)
    params, lengths = model.init(0), [5, 1, 8]
    batch = batch_of(lengths)
    batch["document_ids"] = torch.cat([batch["document_ids"], torch.full((1, 3), -1)], 1)
    batch |= {key: torch.cat([batch[key], torch.zeros(1, 3, dtype=torch.int64)], 1) for key in ("input_ids", "labels")}
    whole, metrics = model.aux(*stats_of(model, params, batch))
    want = torch.zeros((), dtype=torch.float64)
    for begin, n in zip((0, 5, 6), lengths, strict=True):
        part = {key: value[:, begin : begin + n] for key, value in batch.items()}
        want += n / 14 * model.aux(*stats_of(model, params, part))[0]
    near(whole, want, 1e-14)
    assert metrics["router_sequence_balance"].shape == (len(model.config.sparse_layers),)
    near(model.loss(params, batch) - plain.loss(params, batch), whole, 1e-12)


def test_experts_are_the_formula() -> None:
    model = small("qwen3_moe")
    params = {k.removeprefix("layers.0.moe."): v for k, v in tree.items(model.init(3)).items() if k.startswith("layers.0.moe.")}
    x = torch.randn(11, 12, dtype=torch.float64)
    h, weights, indices, *_ = routers.router_fn(routers.Router(5, 2), 1e-6)(params, x, valid=torch.ones(11, dtype=torch.bool))
    stage = experts.routed_experts("experts", "key", {}, 5, moe.expert_mlp(REFERENCE.grouped_mm))
    (got,) = stage(params, (x, h, weights, indices), {})
    want = x.clone()
    for t in range(11):
        normed = rms_norm(x[t], params["norm"], 1e-6)
        probs = torch.softmax(params["router"] @ normed, 0)
        best = probs.argsort(descending=True)[:2]
        for e in best:
            gate, up = (params["gate_up"][e] @ normed).chunk(2)
            want[t] += probs[e] / probs[best].sum() * (params["down"][e] @ (F.silu(gate) * up))
    near(got, want, 1e-13)


def test_router_statistics_count_valid_tokens_only() -> None:
    fn = routers.router_fn(routers.Router(5, 2, normalize=False), 1e-6)
    g = torch.Generator().manual_seed(0)
    params = {"norm": torch.ones(4), "router": torch.randn(5, 4, generator=g)}
    x, valid = torch.randn(6, 4, generator=g), torch.tensor([True, False, True, True, False, True])
    *_, counts, probs, z, entropy = fn(params, x, valid=valid)
    *_, want_counts, want_probs, want_z, want_entropy = fn(params, x[valid], valid=torch.ones(4, dtype=torch.bool))
    assert counts.dtype == torch.int64 and counts.sum() == 8 and torch.equal(counts, want_counts)
    torch.testing.assert_close((probs, z, entropy), (want_probs, want_z, want_entropy))
    assert probs.sum().item() == pytest.approx(4)


def test_router_is_in_float32_for_16_bit_models() -> None:
    fn = routers.router_fn(routers.Router(5, 2), 1e-6)
    params = {"norm": torch.ones(4, dtype=torch.bfloat16), "router": torch.randn(5, 4).bfloat16()}
    h, weights, indices, _, probs, z, _ = fn(params, torch.randn(6, 4).bfloat16(), valid=torch.ones(6, dtype=torch.bool))
    assert h.dtype == torch.bfloat16 and weights.dtype == probs.dtype == z.dtype == torch.float32 and indices.dtype == torch.int64
    torch.testing.assert_close(weights.sum(1), torch.ones(6))


def stats_of(model: Model, params: Any, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    consts = model.pack(batch) | {"normalizer": torch.tensor(1.0)}
    values = run(model.build(REFERENCE), params, consts)
    return {name: values[name] for name in model.statistics}, consts["valid"].sum()


def test_auxiliary_loss_is_the_formula() -> None:
    model = small("qwen3_moe", router_z_loss=0.01)
    assert model.aux is not None and model.aux_scope == "microbatch"
    stats, tokens = stats_of(model, model.init(1), batch_of([9, 4]))
    loss, metrics = model.aux(stats, tokens)
    want, balances = torch.zeros((), dtype=torch.float64), []
    for i in (0, 2):
        counts, probs, z = (stats[f"layers.{i}.router.{name}"] for name in ("counts", "probs", "z"))
        balances.append(5 * (counts.double() / (13 * 2) * (probs / 13)).sum())
        want += 0.1 * balances[-1] + 0.01 * z / 13
    near(loss, want, 1e-14)
    near(metrics["aux_loss"], want, 1e-14)
    near(metrics["router_balance"], torch.stack(balances), 1e-14)
    load = torch.stack([stats[f"layers.{i}.router.counts"].double() / 26 for i in (0, 2)])
    near(metrics["expert_load"], load, 1e-15)
    near(metrics["load_violation"], load.amax(1) * 5 - 1, 1e-14)
    assert metrics["router_z"].shape == (2,)


def test_pooled_auxiliary_loss_is_that_of_transformers() -> None:
    hf = CONFIGS["qwen3_moe"]
    model = small("qwen3_moe", aux="pooled")
    assert model.aux is not None and model.aux_scope == "microbatch"
    reference = hf_models.build(hf, torch.float64)
    batch = batch_of([12])
    out = reference(input_ids=batch["input_ids"], output_router_logits=True)
    want = 0.1 * load_balancing_loss_func(out.router_logits, 5, 2)
    assert isinstance(want, Tensor)
    got, _ = model.aux(*stats_of(model, hf_models.parameters(model, reference), batch))
    torch.testing.assert_close(got, want.detach().double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("aux", "scope"), [("microbatch", "microbatch"), ("step", "step"), ("pooled", "microbatch")])
def test_auxiliary_scope(aux: Literal["microbatch", "step", "pooled"], scope: str) -> None:
    assert small("qwen3_moe", aux=aux).aux_scope == scope


def test_gradient_of_the_balance_evens_the_load() -> None:
    model = qwen3_moe(Config.from_hf(CONFIGS["qwen3_moe"] | {"router_aux_loss_coef": 1.0}), dtype=torch.float64)
    params, batch = model.init(0), batch_of([40])

    def aux(params: Any) -> Tensor:
        assert model.aux is not None
        return model.aux(*stats_of(model, params, batch))[0]

    before, grads = aux(params), torch.func.grad(aux)(params)
    assert grads["layers"][0]["moe"]["router"].abs().max() > 0
    assert aux(tree.map(lambda p, g: p - 0.01 * g, params, grads)) < before


# Configs


def test_counts_of_published_models() -> None:
    """Sizes as their authors state them; nothing is allocated."""
    assert models.preset("smollm2-135m").param_count() == (134_515_008, 134_515_008)
    assert models.preset("llama-3.1-8b").param_count()[0] == 8_030_261_248
    assert models.preset("qwen3-0.6b").param_count()[0] == 596_049_920
    total, active = models.preset("qwen3-30b-a3b").param_count()
    assert total == 30_532_122_624 and round(active / 1e9, 1) == 3.4
    total, active = models.preset("qwen3-235b-a22b").param_count()
    assert total == 235_093_634_560 and round(active / 1e9) == 22
    total, active = models.preset("mixtral-8x7b").param_count()
    assert total == 46_702_792_704 and round(active / 1e9, 1) == 12.9
    for name, billions, published in (("gpt-oss-20b", 20.91, 3.61), ("gpt-oss-120b", 116.83, 5.13)):
        total, active = models.preset(name).param_count()
        embedding = 201088 * 2880  # its authors count the head as active, not the embedding
        assert (round(total / 1e9, 2), round((active - embedding) / 1e9, 2)) == (billions, published)
    published = {  # total, active in billions, and how many of embedding and head their authors leave out of the active ones
        "deepseek-v3": (671_026_419_200, 37, 1),
        "kimi-k2": (1_026_408_232_448, 32, 1),
        "glm-4.5": (352_797_829_024, 32, 2),
        "glm-4.5-air": (106_852_251_264, 12, 2),
    }
    for name, (want, billions, left_out) in published.items():
        total, active = models.preset(name).param_count()
        config = models.PRESETS[name]
        assert total == want and round((active - left_out * config.vocab_size * config.hidden_size) / 1e9) == billions, name


@pytest.mark.parametrize("name", models.PRESETS)
def test_presets_are_what_transformers_reads(name: str) -> None:
    model = models.preset(name)
    assert models.from_hf(model.hf_config).config == model.config and hash(model.config) is not None
    fields = dict(model.hf_config)
    kind = fields.pop("model_type").replace("kimi_k2", "deepseek_v3")  # which transformers does not know by this name
    theirs = transformers.AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(theirs)
    corrections = [b for name, b in reference.named_buffers() if name.endswith("e_score_correction_bias")]
    assert sum(p.numel() for p in [*reference.parameters(), *corrections]) == model.param_count()[0]


def test_initial_values() -> None:
    for path, leaf in tree.items(small("qwen3").init(0)).items():
        if path.endswith("norm") or path == "norm.weight":
            assert bool((leaf == 1).all()), path
        elif path.endswith("_bias"):
            assert not bool(leaf.any()), path
        else:
            assert 0.2 < leaf.std() < 0.4, path


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"rope_scaling": {"rope_type": "spiral"}}, "'spiral' is not supported"),
        ("llama", {"head_dim": 5}, "head_dim=5 must be even"),
        ("llama", {"num_key_value_heads": 3}, "multiple of num_key_value_heads=3"),
        ("llama", {"hidden_size": None}, "needs the config field 'hidden_size'"),
        ("llama", {"sliding_window": 4}, "does not know the config field sliding_window=4"),
        ("llama", {"vocab_size": 0}, "vocab_size=0"),
        ("llama", {"hidden_size": "20"}, "hidden_size='20' is a str; expected an integer"),
        ("llama", {"head_dim": None, "hidden_size": 20}, "hidden_size=20 / num_attention_heads=4, from which it is derived"),
        ("qwen3_moe", {"head_dim": None, "hidden_size": 18}, "hidden_size=18 / num_attention_heads=4, from which it is derived"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps=0; expected a number above 0"),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' is a str; expected a number"),
        ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps=nan; expected a finite number"),
        ("llama", {"initializer_range": -1.0}, "initializer_range=-1.0"),
        ("llama", {"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is a str; expected true or false"),
        ("llama", {"rope_scaling": "yarn"}, "rope_scaling='yarn' is a str; expected an object"),
        ("qwen2", {"sliding_window": "3"}, "sliding_window='3' is a str"),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types='full_attention' is a str; expected a list"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob=1 is a int; expected true or false"),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers='1' is a str"),
        ("qwen3_moe", {"num_experts": None}, "needs the config field 'num_experts'"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("qwen3", {"layer_types": ["linear_attention"] * 2}, "'linear_attention'"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is not set"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias=True"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "more than num_experts=5"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size=8"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers has \[3\]"),
        ("gpt_oss", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 is more than num_local_experts=5"),
        ("gpt_oss", {"experts_per_token": 4}, "experts_per_token=4 and num_experts_per_tok=2, which must be equal"),
        ("gpt_oss", {"initial_context_length": 8}, "initial_context_length=8 and original_max_position_embeddings=4096"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit=0.0"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window=0"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("gpt_oss", {"num_hidden_layers": None}, "needs the config field 'num_hidden_layers'"),
        ("gpt_oss", {"mlp_bias": True}, "does not know the config field mlp_bias=True"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than num_local_experts=4"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0"),
        ("mixtral", {"sliding_window": 0}, "sliding_window=0"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ("mixtral", {"attention_bias": True}, "does not know the config field attention_bias=True"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "needs the config field 'moe_intermediate_size'"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim=1.0 of rope_type 'linear'",
        ),
        ("deepseek_v3", {"n_group": 3}, "n_group=3 must cut n_routed_experts=8"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group=5 is more than n_group=4"),
        ("deepseek_v3", {"topk_group": 1}, "top_k=3 is more than the 2 experts of the groups"),
        ("deepseek_v3", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than n_routed_experts=8"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 must be num_attention_heads=4"),
        ("deepseek_v3", {"qk_head_dim": 8}, "qk_head_dim=8 must be qk_nope_head_dim"),
        ("deepseek_v3", {"head_dim": 8}, "head_dim=8 must be qk_rope_head_dim=4"),
        ("deepseek_v3", {"qk_rope_head_dim": 3}, "head_dim=3 must be even"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' in the config; only 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"kv_lora_rank": None}, "needs the config field 'kv_lora_rank'"),
        ("deepseek_v3", {"n_group": None}, "needs the config field 'n_group'"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank=0; expected an integer of at least 1"),
        ("glm4_moe", {"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4 of head_dim=8 is 3 dims"),
        ("glm4_moe", {"partial_rotary_factor": 2}, "partial_rotary_factor=2 of head_dim=8"),
        ("glm4_moe", {"use_qk_norm": 1}, "use_qk_norm=1 is a int; expected true or false"),
        ("glm4_moe", {"n_shared_experts": None}, "needs the config field 'n_shared_experts'"),
        ("glm4_moe", {"scoring_func": "sigmoid"}, "does not know the config field scoring_func='sigmoid'"),
        ("deepseek_v3", {"sliding_window": 8}, "does not know the config field sliding_window=8"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.from_hf(CONFIGS[name] | change)


def test_bookkeeping_is_passed_over() -> None:
    extra = {"transformers_version": "5.0", "torch_dtype": "bfloat16", "use_cache": True, "sep_token_id": 1, "_name_or_path": "x"}
    assert models.from_hf(CONFIGS["llama"] | extra | {"rope_interleaved": False, "mystery": None}).config == small("llama").config


def test_deepseek_config_as_published() -> None:
    """The fields of the ``config.json`` that its authors publish, which is not what transformers writes."""
    published = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    assert models.from_hf(published).config == models.PRESETS["deepseek-v3"]
    other = models.from_hf(published | {"model_type": "kimi_k2"})
    assert other.hf_config["model_type"] == "kimi_k2" and models.from_hf(other.hf_config).family == "deepseek_v3"
    without = {name: value for name, value in published.items() if name != "q_lora_rank"}
    with pytest.raises(ValueError, match="needs the config field 'q_lora_rank'"):
        models.from_hf(without)


def test_unknown_names_list_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'mamba' is not supported; known are .*gpt_oss, .*llama, mixtral, qwen2, qwen3, qwen3_moe"):
        models.from_hf({"model_type": "mamba"})
    with pytest.raises(ValueError, match=r"no preset 'qwen3-30b'; did you mean .*qwen3-30b-a3b or .*\?"):
        models.preset("qwen3-30b")
    with pytest.raises(ValueError, match=r"no preset '\?'; known are smollm2-135m"):
        models.preset("?")
    with pytest.raises(ValueError, match="model_type is missing in the config"):
        models.from_hf({"hidden_size": 8})
    for build in (lambda: small("qwen3", twist=1), lambda: models.preset("qwen3-0.6b", twist=1)):
        with pytest.raises(ValueError, match="qwen3 does not know the option twist; known are dtype, z_loss"):
            build()


@pytest.mark.parametrize(
    ("make", "source", "message"),
    [
        (None, "nowhere/at/all", "no checkpoint folder at nowhere/at/all: xtf reads local folders"),
        (None, "some-org/Model-1.5", "at some-org/Model-1.5; .* xtf downloads nothing.*hf download some-org/Model-1.5"),
        (None, "config.json", "config.json is missing"),
        ("folder", "folder", "folder/config.json is missing"),
        ("folder/config.json", "folder", r"folder/config.json is not valid JSON \("),
        ("folder/config.json", "folder/config.json", r"folder/config.json is not valid JSON \("),
    ],
)
def test_what_cannot_be_read_is_named(make: str | None, source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if make is not None:
        Path("folder").mkdir()
    if make == "folder/config.json":
        Path(make).write_text('{"model_type": "lla')
    with pytest.raises(xtf.CheckpointError, match=message):
        models.from_hf(source)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("eos", [2, [2, 7]], ids=["one", "several"])
def test_token_ids_are_kept(name: str, eos: Any) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": eos, "pad_token_id": 0}
    model = models.from_hf(CONFIGS[name] | ids)
    assert {key: model.hf_config[key] for key in ids} == ids
    assert models.from_hf(model.hf_config).hf_config == model.hf_config
    assert model.config == small(name).config and hash(model.config) == hash(small(name).config)  # the same is computed
    assert not set(ids) & set(small(name).hf_config)
    with pytest.raises(ValueError, match="eos_token_id='</s>' is a str; expected an integer"):
        models.from_hf(CONFIGS[name] | {"eos_token_id": "</s>"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aux": "rows"}, "aux='rows'"),
        ({"router_z_loss": -1.0}, "router_z_loss=-1.0"),
        ({"sequence_loss": -1.0}, "sequence_loss=-1.0"),
        ({"z_loss": -1.0}, "z_loss=-1.0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small("qwen3_moe", **options)
    with pytest.raises(ValueError, match=r"dtype=torch\.int64"):
        small("qwen3_moe", torch.int64)
    name: Any = "bfloat16"
    for family in FAMILIES:
        with pytest.raises(ValueError, match=r"dtype='bfloat16', a str; expected a torch\.dtype, as torch\.bfloat16"):
            small(family, name)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("option", ["z_loss", "router_z_loss", "balance_loss", "sequence_loss", "bias_update_speed"])
def test_bad_coefficients_are_refused(name: str, option: str) -> None:
    options: dict[str, Any] = {option: -0.5}
    with pytest.raises(ValueError, match=rf"{option}=-0\.5"):
        small(name, **options)
    with pytest.raises(ValueError, match=f"{name} got aux='pooled'"):
        small(name, aux="pooled")


def test_z_loss_is_added() -> None:
    plain, with_z = small("qwen3"), small("qwen3", z_loss=0.01)
    params, batch = plain.init(0), batch_of([8])
    logits = plain.logits(params, batch["input_ids"])[0, :-1]
    near(with_z.loss(params, batch) - plain.loss(params, batch), 0.01 * logits.logsumexp(-1).square().mean(), 1e-12)
    assert normalizer(plain.pack(batch)["weights"].sum()) == pytest.approx(1 / 7)
