"""Configs of published models by name, and a tiny one for demonstrations. Weights come from checkpoints, not from here."""

from __future__ import annotations

from xtf.models.common import DecoderConfig
from xtf.models.llama import Config as Llama
from xtf.models.mixtral import Config as Mixtral
from xtf.models.qwen3 import Config as Qwen3
from xtf.models.qwen3_moe import Config as Qwen3Moe
from xtf.models.rope import Rope

_QWEN3_ROPE = Rope(theta=1e6)

PRESETS: dict[str, DecoderConfig] = {
    "smollm2-135m": Llama(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.041666666666666664,
        max_position_embeddings=8192,
        rope=Rope(theta=1e5),
    ),
    "llama-3.1-8b": Llama(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope=Rope(theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
    ),
    "qwen3-0.6b": Qwen3(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        rope=_QWEN3_ROPE,
    ),
    "qwen3-30b-a3b": Qwen3Moe(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        rope=_QWEN3_ROPE,
    ),
    "qwen3-235b-a22b": Qwen3Moe(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        rope=_QWEN3_ROPE,
    ),
    "mixtral-8x7b": Mixtral(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_local_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.02,
        rms_norm_eps=1e-5,
        max_position_embeddings=32768,
        rope=Rope(theta=1e6),
    ),
    "tiny-moe": Qwen3Moe(  # of `xtf train`: the vocabulary is that of `xtf.data.demo_tokenizer`
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.02,
        max_position_embeddings=2048,
        rope=Rope(theta=1e4),
    ),
}
"""The `Config` of each preset."""
