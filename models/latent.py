"""Multi-head latent attention (DeepSeek-V2 2024, section 2.1): keys and values of all heads come from one small latent of each token.

Queries and keys have two parts, one that is rotated by its position and one that is not; the rotated part of the keys is the same
for all heads. Training expands the latent to keys and values of each head.

Dims: T tokens, H hidden size, heads, N size of a head's part that is not rotated, R of the rotated part, V of its values, C size of the
latent of keys and values, Q of that of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from xtf.attention import Project, attention_stage
from xtf.checkpoint_map import Named, Source
from xtf.models.common import DecoderConfig, Leaves, Part, check_count, heads_output, linear, rms_norm
from xtf.models.hf import check_flag
from xtf.models.rope import rotate, rotate_pairs, score_scaling
from xtf.ops import Linear, Ops
from xtf.stage import Params, Stage

_LATENT_EPS = 1e-6  # of the norms of latents, whatever the config says of the others

_PROJECTIONS = {"q": "q_proj", "q_a": "q_a_proj", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa", "kv_b": "kv_b_proj", "o": "o_proj"}
_NORMS = {"q_norm": "q_a_layernorm", "kv_norm": "kv_a_layernorm"}


@dataclass(frozen=True, kw_only=True)
class LatentConfig(DecoderConfig):
    """A decoder with latent attention; for the common fields see `xtf.models.common.DecoderConfig`. ``head_dim`` is not given: it is
    ``qk_rope_head_dim``, what positions rotate.

    Args:
        q_lora_rank: Q, or ``None`` where queries are projected directly.
        kv_lora_rank: C.
        qk_nope_head_dim: N.
        qk_rope_head_dim: R, even.
        v_head_dim: V.
        attention_bias: biases on the projections to latents and on the last one.
        rope_interleave: whether neighbours are rotated together, (0, 1), (2, 3), ..., or the halves of the rotated part.

    Raises:
        ValueError: as `DecoderConfig`.
    """

    head_dim: int = 0
    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attention_bias: bool = False
    rope_interleave: bool = True

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            check_count(self, name, 1)
        if self.q_lora_rank is not None:
            check_count(self, "q_lora_rank", 1)
        for name in ("attention_bias", "rope_interleave"):
            check_flag(name, getattr(self, name))
        if self.head_dim not in (0, self.qk_rope_head_dim):
            raise ValueError(f"head_dim={self.head_dim} must be qk_rope_head_dim={self.qk_rope_head_dim}: leave it out")
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        super().__post_init__()
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must be num_attention_heads={self.num_attention_heads}: "
                "every head has keys and values of its own"
            )


def latent_attention(config: LatentConfig, layer: int, leaves: Leaves) -> Part:
    """Norm, latent attention over packed documents, and residual: the stage ``layers.i.attention``.

    Args:
        config: sizes.
        layer: its number.
        leaves: makes the specs.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = config.qk_nope_head_dim + config.qk_rope_head_dim
    specs = {"norm": leaves.norm(hidden)}
    if config.q_lora_rank is None:
        specs["q"] = leaves.matrix((heads * size, hidden), ("heads", "embed"))
    else:
        specs["q_a"] = leaves.matrix((config.q_lora_rank, hidden), (None, "embed"))
        specs["q_norm"] = leaves.norm(config.q_lora_rank, None)
        specs["q_b"] = leaves.matrix((heads * size, config.q_lora_rank), ("heads", None))
    specs["kv_a"] = leaves.matrix((config.kv_lora_rank + config.qk_rope_head_dim, hidden), (None, "embed"))
    specs["kv_norm"] = leaves.norm(config.kv_lora_rank, None)
    specs["kv_b"] = leaves.matrix((heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank), ("heads", None))
    specs["o"] = leaves.matrix((hidden, heads * config.v_head_dim), ("embed", "heads"))
    for name in ("q_a", "kv_a", "o") if config.attention_bias else ():
        if name in specs:
            specs[f"{name}_bias"] = leaves.bias(specs[name].shape[0], specs[name].axes[0])
    prefix = f"model.layers.{layer}"
    sources: dict[str, Source] = {"norm": Named(f"{prefix}.input_layernorm.weight")}
    sources |= {name: Named(f"{prefix}.self_attn.{theirs}.weight") for name, theirs in (_PROJECTIONS | _NORMS).items()}
    sources |= {f"{name}_bias": Named(f"{prefix}.self_attn.{theirs}.bias") for name, theirs in _PROJECTIONS.items()}

    def stages(ops: Ops, key: Hashable) -> tuple[Stage, ...]:
        name = f"layers.{layer}.attention"
        own, after = {leaf: f"{name}.{leaf}" for leaf in specs}, tuple(leaf for leaf in ("o", "o_bias") if leaf in specs)
        scale = size**-0.5 * score_scaling(config.rope)
        project = latent_project_fn(ops.linear, config)
        output = heads_output(ops.linear)
        return (attention_stage(name, (key, "attention"), own, ops.attention, project, output, after=after, scale=scale),)

    return Part("attention", specs, {leaf: sources[leaf] for leaf in specs}, stages)


def latent_project_fn(mm: Linear, config: LatentConfig) -> Project:
    """What comes before tokens see each other: queries, and keys and values of each head, expanded from the latent."""
    eps, heads = config.rms_norm_eps, config.num_attention_heads
    fixed, turned, latent_size = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    turn = rotate_pairs if config.rope_interleave else rotate

    def direct(params: Params, h: Float[Tensor, "T H"]) -> Float[Tensor, "T out"]:
        return linear(mm, params, "q", h)

    def through_latent(params: Params, h: Float[Tensor, "T H"]) -> Float[Tensor, "T out"]:
        return linear(mm, params, "q_b", rms_norm(linear(mm, params, "q_a", h), params["q_norm"], _LATENT_EPS))

    query: Callable[[Params, Tensor], Tensor] = direct if config.q_lora_rank is None else through_latent

    def project(
        params: Params, x: Float[Tensor, "T H"], cos: Float[Tensor, "T half"], sin: Float[Tensor, "T half"]
    ) -> tuple[Float[Tensor, "T heads D"], Float[Tensor, "T heads D"], Float[Tensor, "T heads V"]]:
        h = rms_norm(x, params["norm"], eps)
        q_fixed, q_turned = rearrange(query(params, h), "T (heads D) -> T heads D", heads=heads).split([fixed, turned], -1)
        latent, k_turned = linear(mm, params, "kv_a", h).split([latent_size, turned], -1)
        expanded = linear(mm, params, "kv_b", rms_norm(latent, params["kv_norm"], _LATENT_EPS))
        k_fixed, v = rearrange(expanded, "T (heads D) -> T heads D", heads=heads).split([fixed, config.v_head_dim], -1)
        k_turned = turn(k_turned.unsqueeze(1), cos, sin).expand(-1, heads, -1)
        q, k = torch.cat([q_fixed, turn(q_turned, cos, sin)], -1), torch.cat([k_fixed, k_turned], -1)
        return q, k, v.contiguous()

    return project
