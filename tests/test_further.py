"""The layer that predicts the token after the next: against transformers', in laws, and that scores do not depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_layers import MtpModel

from xtf import models, testing, tree
from xtf.checkpoint import load_params, save_params
from xtf.model import Model
from xtf.ops.reference import REFERENCE
from xtf.run.decoding import NextToken
from xtf.run.flops import flops_per_token
from xtf.step import compose
from xtf.transforms import accumulate, chunk_loss, expert_parallel, shard

LAYER = 2  # the number of the layer, the main model has two
SMALL: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 61,
    "hidden_size": 12,
    "intermediate_size": 14,
    "num_hidden_layers": LAYER,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
    "moe_intermediate_size": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 1,
}


def small(dtype: torch.dtype = torch.float64, **options: Any) -> Model:
    return models.from_hf(SMALL, dtype=dtype, **({"mtp_loss": 0.3} | options))


def theirs(dtype: torch.dtype) -> tuple[Any, Any, dict[str, Tensor]]:
    """transformers' model, its extra layer, and the extra layer's tensors under the names that DeepSeek's checkpoint has."""
    reference = hf_models.build(SMALL, dtype)
    reference.config._attn_implementation = "eager"
    make: Any = MtpModel
    extra = make(reference, 1).to(dtype)
    extra.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(5)
    named: dict[str, Tensor] = {}
    for name, value in [*extra.layers[0].named_parameters(), *extra.layers[0].named_buffers()]:
        with torch.no_grad():
            value.copy_(("norm" in name) + 0.2 * torch.randn(value.shape, generator=generator, dtype=torch.float64))
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        named[f"model.layers.{LAYER}.{name}"] = value
    return reference, extra, named


def test_equals_transformers() -> None:
    model = small(torch.float32)
    reference, extra, named = theirs(torch.float32)
    main = dict(reference.named_parameters()) | {n: b for n, b in reference.named_buffers() if n.endswith("e_score_correction_bias")}
    params = hf_models.to_tree(model, {name: value.detach() for name, value in (main | named).items()})
    ids = torch.randint(61, (3, 10), generator=torch.Generator().manual_seed(1))
    hidden = reference.model(input_ids=ids).last_hidden_state
    positions = torch.arange(9)[None].expand(3, -1) + 1
    further = extra.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
    first = F.cross_entropy(reference.lm_head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    second = F.cross_entropy(reference.lm_head(further[:, :-1]).flatten(0, 1), ids[:, 2:].flatten(), reduction="sum")
    want = (first + 0.3 * second) / 27
    want.backward()
    batch = {"input_ids": ids, "labels": ids}
    grads, loss = torch.func.grad_and_value(model.loss)(params, batch)
    torch.testing.assert_close(loss, want.detach(), rtol=1e-6, atol=0)
    expected = {name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in (main | named).items()}
    got = tree.items(grads)
    assert tree.items(hf_models.to_tree(model, named | main))[f"layers.{LAYER}.further.project"].any()
    for path, value in tree.items(hf_models.to_tree(model, expected)).items():
        assert (got[path] - value).abs().max() <= 1e-4 * value.abs().max(), path


def test_scores_do_not_depend_on_it() -> None:
    model, plain = small(), small(mtp_loss=0.0)
    params = model.init(0)
    main = tree.from_items(plain.specs, {path: tree.items(params)[path] for path in tree.paths(plain.specs)})
    batch = testing.random_batch(61)
    assert torch.equal(model.logits(params, batch["input_ids"]), plain.logits(main, batch["input_ids"]))
    assert torch.equal(model.logprobs(params, batch), plain.logprobs(main, batch))
    assert model.loss(params, batch) > plain.loss(main, batch) + 0.1
    ids = [5, 6, 7, 8, 9]
    scores = NextToken(model, params)
    torch.testing.assert_close(scores(ids[:3]), model.logits(params, torch.tensor([ids[:3]]))[0, -1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scores(ids), model.logits(params, torch.tensor([ids]))[0, -1], rtol=1e-12, atol=1e-12)
    assert scores.computed == 5


def test_documents_do_not_see_each_other() -> None:
    model = models.from_hf(SMALL, dtype=torch.float64, mtp_loss=0.5)
    params, lengths = model.init(1), [5, 1, 2, 8]
    whole = {"input_ids": torch.randint(61, (1, 16), generator=torch.Generator().manual_seed(0))}
    whole |= {"labels": whole["input_ids"], "document_ids": torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]}
    want, begin = torch.zeros((), dtype=torch.float64), 0
    for n in lengths:
        part = {key: value[:, begin : begin + n] for key, value in whole.items()}
        want, begin = want + model.loss(params, part) * (n - 1), begin + n
    torch.testing.assert_close(model.loss(params, whole), want / 12, rtol=1e-13, atol=0)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("chunk", [None, 7])
def test_laws(chunk: int | None, z_loss: float) -> None:
    model = small(z_loss=z_loss, sequence_loss=0.1, balance_loss=0.05)
    more = [chunk_loss(tokens=chunk)] if chunk else []
    testing.check(lambda mesh: compose(shard(mesh["data"]), *more, accumulate(2)), model=model, data=2)


def test_laws_with_experts_spread_and_overlapped() -> None:
    model = small(sequence_loss=0.1, balance_loss=0.05)
    testing.check(
        lambda mesh: compose(shard(mesh["expert"]), expert_parallel(mesh["expert"], overlap=2), chunk_loss(tokens=5)), model=model, expert=2
    )


def test_routers_of_it_are_balanced_too() -> None:
    model = small(balance_loss=0.1)
    assert model.update is not None and f"layers.{LAYER}.router.counts" in model.statistics
    leaves = {path: leaf for path, leaf in tree.items(model.init(0)).items() if path.endswith("correction")}
    counts = {f"layers.{i}.router.counts": torch.arange(6) for i in (1, LAYER)}
    assert set(model.update(leaves, counts)) == set(leaves) == {f"layers.{i}.moe.correction" for i in (1, LAYER)}
    names = [stage.name for stage in model.build(REFERENCE)][-9:]
    own = [f"layers.{LAYER}.{part}" for part in ("embed", "project", "attention", "router", "shared", "experts", "norm")]
    assert names == ["norm", *own, "loss"]


def test_products_are_counted() -> None:
    model, plain = small(), small(mtp_loss=0.0)
    specs, active = tree.items(model.specs), 61 * 12  # the head once more
    for path in set(specs) - set(tree.paths(plain.specs)):
        matrix = sum(axis != "expert" for axis in specs[path].axes) >= 2
        active += matrix * specs[path].numel * (2 if "expert" in specs[path].axes else 6) // 6
    assert flops_per_token(model) - flops_per_token(plain) == 6 * active


def test_checkpoint_has_it(tmp_path: Path) -> None:
    model = small(torch.float32)
    params = model.init(0)
    save_params(model, params, tmp_path)
    again = load_params(models.from_hf(tmp_path, mtp_loss=0.3), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(params), strict=True))
    without = tree.items(load_params(models.from_hf(tmp_path), tmp_path))
    assert not [path for path in without if path.startswith(f"layers.{LAYER}.")]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mtp_loss=-0\.1"):
        small(mtp_loss=-0.1)
    with pytest.raises(ValueError, match=r"mtp_loss=0\.3 for a config with num_nextn_predict_layers=0"):
        models.from_hf(SMALL | {"num_nextn_predict_layers": 0}, mtp_loss=0.3)
