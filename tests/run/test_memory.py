"""What a step will take: exact where it can be, else near what it does take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory import Live, peak_bytes

import xtf
from xtf import tree
from xtf.models import from_hf
from xtf.run.memory import estimate, used_memory
from xtf.testing import random_batch, small_models
from xtf.transforms import accumulate, chunk_loss, precision, shard

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def optimizers() -> dict[str, xtf.optim.Optimizer]:
    return {
        "adamw": xtf.optim.chain(xtf.optim.clip_by_global_norm(1.0), xtf.optim.adamw(lr=1e-3, mask=xtf.optim.no_decay_1d)),
        "muon": xtf.optim.muon_adamw(lr=1e-3),
        "sgd": xtf.optim.sgd(lr=1e-3, momentum=0.9),
    }


def nbytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor))


PLAIN, CHUNKED, MIXED = xtf.compose(), chunk_loss(tokens=7), precision(params=torch.float32, compute=torch.bfloat16)
SMALL = xtf.compose(precision(params=torch.bfloat16, reduce=torch.float32), chunk_loss(tokens=7), accumulate(2))


@pytest.mark.parametrize(
    ("family", "optimizer", "transform"),
    [
        ("llama", "adamw", PLAIN),
        ("llama", "muon", MIXED),
        ("llama", "sgd", SMALL),
        ("qwen3_moe", "adamw", MIXED),
        ("qwen3_moe", "muon", CHUNKED),
        ("qwen3_moe", "sgd", PLAIN),
        ("qwen3_moe", "adamw", SMALL),
        ("deepseek_v3", "adamw", MIXED),
        ("deepseek_v3", "muon", CHUNKED),
    ],
)
def test_parameters_gradients_and_state_are_exact(family: str, optimizer: str, transform: Any) -> None:
    model = small_models(torch.float32)[family]
    step = transform(xtf.train_step(model, optimizers()[optimizer]))
    state = step.init(0)
    _, grads = step.value_and_grad(state.params, {k: v for k, v in random_batch(model.vocab).items() if k != "loss_weights"})
    found = estimate(step, 65)
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (nbytes(state.params), nbytes(grads), nbytes(state.opt))


@pytest.mark.parametrize("name", ["llama", "tiny-moe"])
@pytest.mark.parametrize("transform", [xtf.compose(), chunk_loss(tokens=64)], ids=["plain", "chunk_loss"])
@pytest.mark.parametrize("donate", [False, True])
def test_the_peak_of_a_step_is_near_the_estimate(name: str, transform: Any, donate: bool) -> None:
    model = from_hf(LLAMA) if name == "llama" else xtf.models.preset(name)
    step = xtf.compile(transform(xtf.train_step(model, optimizers()["adamw"])), backend="eager", donate=donate)
    ids = torch.randint(model.vocab, (2, 256), generator=torch.Generator().manual_seed(0))
    found, state = estimate(step, ids.numel()), step.init(0)
    measured = found["parameters"] + found["optimizer"] + peak_bytes(lambda: step(state, {"input_ids": ids, "labels": ids}))
    assert 0.9 < found["peak"] / measured < 1.1


def test_the_peak_of_a_sharded_step_is_near_the_estimate() -> None:
    model = from_hf(LLAMA | {"num_hidden_layers": 4})
    ids = torch.randint(model.vocab, (4, 64), generator=torch.Generator().manual_seed(0))

    def on_rank(mesh: xtf.Mesh) -> tuple[dict[str, int], int, int, int]:
        step = xtf.compile(
            xtf.compose(shard(mesh["data"]), chunk_loss(tokens=32))(xtf.train_step(model, optimizers()["adamw"])),
            backend="eager",
            donate=True,
        )
        state = step.init(0)
        own = nbytes(state.params), nbytes(state.opt)
        part = xtf.split_batch({"input_ids": ids, "labels": ids}, mesh)
        with Live() as live:
            step(state, part)
        return estimate(step, 64), *own, live.most

    for found, params, opt, most in xtf.simulate(on_rank, data=4):
        assert (found["parameters"], found["optimizer"], found["gradients"]) == (params, opt, params)
        assert 0.8 < found["peak"] / (params + opt + most) < 1.5
        assert found["gathered"] > 0


def test_more_micro_batches_keep_their_gradients() -> None:
    step = xtf.compile(xtf.train_step(from_hf(LLAMA), optimizers()["adamw"]), donate=True)
    one, two = (estimate(step, 4096, micro_batches=n) for n in (1, 2))
    assert two["peak"] - one["peak"] == pytest.approx(one["gradients"] + one["batch"], rel=0.01)  # every micro-batch's constants are there
    with pytest.raises(ValueError, match="tokens is 0"):
        estimate(step, 0)
    with pytest.raises(ValueError, match="micro_batches is 0"):
        estimate(step, 1, micro_batches=0)


def test_an_estimate_takes_no_memory() -> None:
    model = from_hf(LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 512, "vocab_size": 32000}, dtype=torch.bfloat16)
    before = used_memory()
    found = estimate(xtf.train_step(model, optimizers()["adamw"]), 8192)
    assert found["parameters"] == 2 * model.param_count()[0] > 400e6
    assert found["peak"] > 3e9 and used_memory() - before < 200e6
