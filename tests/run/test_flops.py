"""Model FLOPs against torch's own counter and against a count by hand; the peak of a device."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import xtf
from xtf import tree
from xtf.model import Model, run
from xtf.models import from_hf
from xtf.ops.cpu import CPU
from xtf.run.flops import (
    AttentionCall,
    ModelFlops,
    attention_flops,
    document_lengths,
    flops_per_token,
    model_flops,
    peak_flops,
    published_peak,
    step_flops,
)
from xtf.run.memory import used_memory
from xtf.testing import random_batch, small_models


def counted(model: Model, batch: Any, *, backward: bool) -> dict[str, int]:
    """FLOPs by operation that torch counts for the plain loss."""
    params = tree.map(lambda leaf: leaf.requires_grad_(), model.init(0))
    with FlopCounterMode(display=False) as counter:
        loss = model.loss(params, batch)
        if backward:
            loss.backward()
    return {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_products_with_matrices_are_what_torch_counts(family: str, backward: bool) -> None:
    model = small_models()[family]
    batch = random_batch(model.vocab)
    seen = sum(n for op, n in counted(model, batch, backward=backward).items() if op in ("aten.mm", "aten.addmm"))
    assert seen == batch["input_ids"].numel() * flops_per_token(model) // (1 if backward else 3)


def test_attention_of_equal_documents_is_what_the_kernel_counts() -> None:
    model = small_models()["qwen3"]
    ids = torch.zeros(1, 24, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "document_ids": torch.arange(24).view(1, -1) // 8}
    consts = model.pack(batch) | {"normalizer": torch.tensor(1.0)}
    with FlopCounterMode(display=False) as counter:
        run(model.build(CPU), model.init(0), consts)
    seen = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert document_lengths(batch).tolist() == [8, 8, 8]
    assert 3 * seen["xtf.attention_cpu"] == attention_flops(model, [8, 8, 8])


def pairs_one_by_one(lengths: list[int], window: int | None) -> int:
    return sum(1 for n in lengths for q in range(n) for k in range(q + 1) if window is None or q - k < window)


@given(st.lists(st.integers(0, 12), max_size=5), st.none() | st.integers(1, 15))
def test_attention_counts_the_pairs_that_see_each_other(lengths: list[int], window: int | None) -> None:
    one = ModelFlops(10, (AttentionCall(7, window), AttentionCall(7, None)))
    expected = 6 * 7 * (pairs_one_by_one(lengths, window) + pairs_one_by_one(lengths, None))
    assert attention_flops(one, lengths) == expected
    assert step_flops(one, torch.tensor(lengths, dtype=torch.int64)) == expected + 10 * sum(lengths)


def test_windows_are_those_of_each_layer() -> None:
    mixed = {name: value for name, value in small_models()["llama"].hf_config.items() if name not in ("attention_bias", "mlp_bias")}
    mixed |= {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    assert [call.window for call in model_flops(from_hf(mixed)).attention] == [None, 4]
    moe = dict(small_models()["qwen3_moe"].hf_config) | {"use_sliding_window": True, "sliding_window": 5}
    assert [call.window for call in model_flops(from_hf(moe)).attention] == [5, 5, 5]


def test_only_active_experts_and_the_head_count() -> None:
    model = small_models()["qwen3_moe"]
    config = model.config
    attention = 2 * config.hidden_size * config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    experts = 2 * (2 * 3 * config.hidden_size * config.moe_intermediate_size + config.num_experts * config.hidden_size)
    dense = 3 * config.hidden_size * config.intermediate_size
    assert flops_per_token(model) == 6 * (3 * attention + experts + dense + config.vocab_size * config.hidden_size)


def test_a_large_model_is_counted_without_its_parameters() -> None:
    before = used_memory()
    model = xtf.models.preset("qwen3-30b-a3b")
    _, active = model.param_count()
    per_token = model_flops(model).per_token
    assert 0.85 < per_token / (6 * active) < 1  # all but the embedding and the norms
    assert used_memory() - before < 500e6


def test_padding_is_no_document() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64)
    documents = torch.tensor([[0, 0, 1, 1, 1], [7, -1, -1, -1, -1]])
    assert document_lengths({"input_ids": ids, "document_ids": documents}).tolist() == [2, 3, 1]
    assert document_lengths({"input_ids": ids}).tolist() == [5, 5]
    assert document_lengths({"input_ids": ids[:, :0]}).tolist() == []


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="lengths has -3"):
        step_flops(ModelFlops(1, ()), [4, -3])


@pytest.mark.parametrize(
    ("name", "bf16", "tf32", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 156, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 494.7, 67),
        ("NVIDIA H100 PCIe", 756, 378, 51),
        ("NVIDIA H800", 989.4, 494.7, 67),
        ("NVIDIA H200", 989.4, 494.7, 67),
        ("NVIDIA H20", 148, 74, 44),
        ("NVIDIA B200", 2250, 1125, 75),
        ("NVIDIA L40S", 362, 183, 91.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6),
    ],
)
def test_published_peaks(name: str, bf16: float, tf32: float, fp32: float) -> None:
    assert published_peak(name, torch.bfloat16) == published_peak(name, torch.float16) == pytest.approx(bf16 * 1e12)
    assert published_peak(name, torch.float32, tf32=True) == pytest.approx(tf32 * 1e12)
    assert published_peak(name, torch.float32) == pytest.approx(fp32 * 1e12)


def test_what_is_not_published_is_measured() -> None:
    assert published_peak("NVIDIA H200 MIG 1g.18gb", torch.bfloat16) is None
    assert published_peak("Some GPU", torch.bfloat16) is None
    assert published_peak("NVIDIA H200", torch.float64) is None
    began = time.perf_counter()
    peak = peak_flops("cpu", torch.float32)
    assert time.perf_counter() - began < 5  # 0.2 s where nothing else runs
    assert 1e8 < peak < 1e15
    assert peak_flops("cpu", torch.float32) == peak  # once per process
    for device, dtype in (("cpu", torch.int64), ("meta", torch.float32)):
        with pytest.raises(ValueError, match="expected a device that computes and a floating dtype"):
            peak_flops(device, dtype)
