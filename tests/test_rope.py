"""Rotary embeddings equal transformers' in every kind, and do not depend on how documents are packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from xtf.models.rope import KINDS, Rope, attention_scaling, inverse_frequencies, rotate, tables

DIM, CONTEXT = 8, 64
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 4.0, 8.0, 16.0]}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.1, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25, "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16, **LONG},
    {"rope_type": "longrope", "original_max_position_embeddings": 16, "attention_factor": 1.5, **LONG},
    {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, **LLAMA3},
    {"rope_type": "llama3", "factor": 2.0, **LLAMA3},
]


def llama_config(scaling: dict[str, Any], layout: str) -> Any:
    fields = {"hidden_size": 16, "num_attention_heads": 2, "head_dim": DIM, "max_position_embeddings": CONTEXT}
    if layout == "old":
        return fields | {"rope_theta": 5000.0, "rope_scaling": dict(scaling)}
    return fields | {"rope_parameters": {"rope_theta": 5000.0, **scaling}}


@pytest.mark.parametrize("layout", ["old", "new"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
def test_frequencies_equal_transformers(scaling: dict[str, Any], layout: str) -> None:
    theirs = transformers.LlamaConfig(**llama_config(scaling, "new"))
    rope = Rope.from_hf(llama_config(scaling, layout), CONTEXT)
    for length in (None, 5, 16, 17, CONTEXT + 40):
        want, want_scaling = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, None, seq_len=length)
        got = inverse_frequencies(rope, DIM, None if length is None else torch.tensor(length))
        torch.testing.assert_close(got, want, rtol=3e-7, atol=0)
        assert attention_scaling(rope) == pytest.approx(want_scaling, rel=1e-12)
    assert Rope.from_hf({"rope_parameters": rope.to_hf()}, CONTEXT) == rope


def test_default_is_the_formula() -> None:
    got = inverse_frequencies(Rope(theta=1e4), 6, dtype=torch.float64)
    torch.testing.assert_close(got, torch.tensor([1.0, 1e4 ** (-1 / 3), 1e4 ** (-2 / 3)], dtype=torch.float64))


@pytest.mark.parametrize("scaling", [s for s in SCALINGS if s["rope_type"] in ("dynamic", "longrope")], ids=lambda s: s["rope_type"])
def test_length_is_the_documents_own(scaling: dict[str, Any]) -> None:
    """A long document (beyond the original context), an empty one and a short one, packed and alone."""
    rope = Rope.from_hf(llama_config(scaling, "new"), CONTEXT)
    lengths = (CONTEXT + 30, 0, 9)
    positions = torch.cat([torch.arange(n) for n in lengths])
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = tables(rope, DIM, positions, bounds, torch.float64)
    for part, n in zip(zip(*(t.split(lengths) for t in packed), strict=True), lengths, strict=True):
        alone = tables(rope, DIM, torch.arange(n), torch.tensor([0, n], dtype=torch.int32), torch.float64)
        for a, b in zip(part, alone, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(packed[0][:9], packed[0][-9:])  # the scaling did depend on the length


def test_tables_are_at_least_float32() -> None:
    empty = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        cos, sin = tables(Rope(), DIM, *empty, dtype)
        assert cos.dtype == sin.dtype == expected and cos.shape == (0, DIM // 2)


def test_rotation_keeps_scores_of_equal_distance() -> None:
    cos, sin = tables(Rope(theta=100.0), DIM, torch.arange(6), torch.tensor([0, 6], dtype=torch.int32), torch.float64)
    q, k = torch.randn(2, 1, 1, DIM, dtype=torch.float64)
    scores = torch.einsum("thd,shd->ts", rotate(q.expand(6, 1, DIM), cos, sin), rotate(k.expand(6, 1, DIM), cos, sin))
    for distance in range(-5, 6):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "mrope"}}, "'mrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "needs factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "needs high_freq_factor, low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, "rope_parameters has unknown fields twist"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, "rope_scaling has unknown fields twist"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling gives factor but no rope_type"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "rope_parameters gives factor but no rope_type"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' is a str; expected an object"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16}}, "'yarn' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope factor='2' is a str; expected a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor=0; expected a positive number"),
        ({"rope_scaling": {"type": "longrope", **LONG, "short_factor": 2.0}}, "rope_scaling short_factor=2.0 is a float; expected a list"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4' is a str; expected a number"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    ],
)
def test_what_is_not_supported_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rope.from_hf(fields, CONTEXT)


def test_every_kind_is_tested() -> None:
    assert {s["rope_type"] for s in SCALINGS} | {"default"} == set(KINDS)
