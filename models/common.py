"""What decoder families share: the common fields of their configs, and the parts that layers are made of.

Dims: T tokens (packed), H hidden size, D head size, F intermediate size, V vocabulary, bounds = documents + 1. Weights are (out, in),
as in Hugging Face.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from xtf.attention import Output, Project, attention_stage
from xtf.checkpoint_map import Named, Source
from xtf.joint import keep
from xtf.models import hf
from xtf.models.rope import Rope, rotate, rotate_first
from xtf.ops import Linear, Ops
from xtf.spec import Init, ParamSpec
from xtf.stage import Lower, Pair, Params, Stage, StageFn, Values


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Fields that every family has; their names are those of ``config.json``.

    Args:
        vocab_size: tokens of the vocabulary.
        hidden_size: H, the size of the residual stream.
        intermediate_size: F, the inner size of a dense MLP.
        num_hidden_layers: layers.
        num_attention_heads: query heads; a multiple of ``num_key_value_heads``.
        num_key_value_heads: key and value heads.
        head_dim: D; need not be H / heads.
        rms_norm_eps: added to the mean square in norms.
        tie_word_embeddings: whether the head is the embedding.
        initializer_range: standard deviation of initial weights.
        max_position_embeddings: tokens of context, for transformers and for ``dynamic`` scaling of positions.
        rope: the rotary embedding.
        bos_token_id, eos_token_id, pad_token_id: of the tokenizer, so that what is saved generates, and stops, as what was read;
            ``eos_token_id`` may be several. Training does not use them, and they do not count where two configs are compared.

    Raises:
        ValueError: for a field of a wrong type, and for sizes that do not fit each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    rope: Rope = field(default_factory=Rope)
    bos_token_id: int | None = field(default=None, compare=False)
    eos_token_id: int | tuple[int, ...] | None = field(default=None, compare=False)
    pad_token_id: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            check_count(self, name, 1)
        check_count(self, "num_hidden_layers", 0)
        check_count(self, "max_position_embeddings", 1)
        for name in ("rms_norm_eps", "initializer_range"):
            hf.check_number(name, getattr(self, name))
        if not self.rms_norm_eps > 0:
            raise ValueError(f"rms_norm_eps={self.rms_norm_eps!r}; expected a number above 0, as 1e-6")
        if not self.initializer_range >= 0:
            raise ValueError(f"initializer_range={self.initializer_range!r}; expected a number of at least 0, as 0.02")
        hf.check_flag("tie_word_embeddings", self.tie_word_embeddings)
        for name in TOKEN_IDS:
            value = getattr(self, name)
            several = value if name == "eos_token_id" and isinstance(value, tuple) else (value,)
            for token in several if value is not None else ():
                hf.check_integer(name, token)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: its halves are rotated together")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self.rope, name)
            if factors is not None and len(factors) != self.rotary_dim // 2:
                raise ValueError(f"rope {name} has {len(factors)} numbers; head_dim={self.head_dim} needs {self.rotary_dim // 2}")

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that are rotated; the rest of it stays as it is."""
        return self.head_dim


def check_count(config: Any, name: str, least: int) -> None:
    """Refuse a field that is no integer of at least ``least``."""
    hf.check_integer(name, getattr(config, name), least)


def check_dtype(dtype: object, family: str) -> None:
    """Refuse what is no dtype at all, as the name of one."""
    if not isinstance(dtype, torch.dtype):
        hint = f"torch.{dtype}" if isinstance(dtype, str) and hasattr(torch, dtype) else "torch.float32 or torch.bfloat16"
        raise ValueError(f"{family} got dtype={dtype!r}, a {type(dtype).__name__}; expected a torch.dtype, as {hint}")


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
    "max_position_embeddings",
    *TOKEN_IDS,
)
"""The fields of `DecoderConfig` that a ``config.json`` has under the same name."""


def shared_from_hf(found: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The arguments of `DecoderConfig` from the fields that `xtf.models.hf.read` found. ``head_dim`` and
    ``num_key_value_heads`` must be among them, since families have different defaults."""
    sizes = {name: hf.required(found, name, family) for name in SHARED[:7]}
    rest = {name: found[name] for name in SHARED[7:] if name in found}
    if isinstance(rest.get("eos_token_id"), list):
        rest["eos_token_id"] = tuple(rest["eos_token_id"])
    rope = Rope.from_hf(found, hf.required(found, "max_position_embeddings", family))
    return {**sizes, **rest, "rope": rope}


def shared_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of ``config.json`` that every family has."""
    fields = {name: getattr(config, name) for name in SHARED}
    if isinstance(config.eos_token_id, tuple):
        fields["eos_token_id"] = list(config.eos_token_id)
    return {name: value for name, value in fields.items() if value is not None} | {
        "rope_parameters": config.rope.to_hf(),
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }


class Part(NamedTuple):
    """One half of a layer: an attention, an MLP or a mixture of experts.

    Args:
        name: its key in the layer's dict of parameters.
        specs: its parameters.
        sources: where each of them is found in a checkpoint.
        stages: ``stages(ops, key) -> stages``; ``key`` is what the model adds to the key of each.
    """

    name: str
    specs: dict[str, ParamSpec]
    sources: dict[str, Source]
    stages: Callable[[Ops, Hashable], tuple[Stage, ...]]


class Leaves(NamedTuple):
    """Makes the specs of a model's leaves: all of ``dtype``, matrices of standard deviation ``std``."""

    dtype: torch.dtype
    std: float

    def matrix(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> ParamSpec:
        """Starts normal; also what is no matrix but starts as one."""
        return ParamSpec(shape, self.dtype, axes, Init.normal(self.std))

    def bias(self, size: int, axis: str | None) -> ParamSpec:
        """Starts at 0."""
        return ParamSpec((size,), self.dtype, (axis,), Init.constant(0.0))

    def norm(self, size: int, axis: str | None = "embed") -> ParamSpec:
        """Starts at 1."""
        return ParamSpec((size,), self.dtype, (axis,), Init.constant(1.0))


def rms_norm(x: Float[Tensor, "*batch size"], weight: Float[Tensor, " size"], eps: float) -> Float[Tensor, "*batch size"]:
    """Root mean square norm over the last dim (Zhang and Sennrich 2019), computed in at least float32.

    Args:
        x: (..., size).
        weight: (size,).
        eps: added to the mean square.

    Returns:
        (..., size), in the dtype of ``x``.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0).square().mean().item()
        1.0
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def linear(mm: Linear, params: Params, name: str, x: Float[Tensor, "*batch into"]) -> Float[Tensor, "*batch out"]:
    """``x`` times the parameter ``name``, plus ``name_bias`` where there is one; ``mm`` is the product (`xtf.ops.Ops`)."""
    return mm(x, params[name], params.get(f"{name}_bias"))


def silu_mul(gate: Float[Tensor, "*batch F"], up: Float[Tensor, "*batch F"]) -> Float[Tensor, "*batch F"]:
    """The gated activation of the MLP (Shazeer 2020, "GLU variants")."""
    return F.silu(gate) * up


def attention(
    config: DecoderConfig,
    layer: int,
    leaves: Leaves,
    *,
    window: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    head_norms: bool = False,
    sinks: bool = False,
) -> Part:
    """Norm, grouped-query attention over packed documents with rotary positions, and residual.

    Args:
        config: sizes.
        layer: its number.
        leaves: makes the specs.
        window: tokens that a token sees, itself included; ``None`` for all of its document.
        qkv_bias, output_bias: which projections have biases.
        head_norms: whether each query and key head is normed before it is rotated (Dehghani et al. 2023, "Scaling ViT").
        sinks: whether each query head has a score of its own in the softmax, see `xtf.ops.Attention`.
    """
    hidden, size = config.hidden_size, config.head_dim
    widths = {
        "q": (config.num_attention_heads * size, "heads"),
        "k": (config.num_key_value_heads * size, "kv_heads"),
        "v": (config.num_key_value_heads * size, "kv_heads"),
    }
    specs = {"norm": leaves.norm(hidden)}
    prefix = f"model.layers.{layer}"
    sources: dict[str, Source] = {"norm": Named(f"{prefix}.input_layernorm.weight")}
    for name, (width, axis) in widths.items():
        specs[name] = leaves.matrix((width, hidden), (axis, "embed"))
        if qkv_bias:
            specs[f"{name}_bias"] = leaves.bias(width, axis)
    specs["o"] = leaves.matrix((hidden, widths["q"][0]), ("embed", "heads"))
    if output_bias:
        specs["o_bias"] = leaves.bias(hidden, "embed")
    sources |= _projections(specs, f"{prefix}.self_attn", ("q", "k", "v", "o"))
    if head_norms:
        for name in ("q_norm", "k_norm"):
            specs[name] = leaves.norm(size, None)
            sources[name] = Named(f"{prefix}.self_attn.{name}.weight")
    if sinks:
        specs["sinks"] = leaves.matrix((config.num_attention_heads,), ("heads",))
        sources["sinks"] = Named(f"{prefix}.self_attn.sinks")

    def stages(ops: Ops, key: Hashable) -> tuple[Stage, ...]:
        name = f"layers.{layer}.attention"
        turn = rotate if config.rotary_dim == size else rotate_first
        project, output = project_fn(ops.linear, size, config.rms_norm_eps, head_norms, turn), heads_output(ops.linear)
        own, of = _own(name, specs), (key, "attention", window)
        after = tuple(leaf for leaf in ("o", "o_bias") if leaf in specs)
        return (attention_stage(name, of, own, ops.attention, project, output, after=after, scale=size**-0.5, window=window),)

    return Part("attention", specs, sources, stages)


def project_fn(mm: Linear, size: int, eps: float, head_norms: bool, turn: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate) -> Project:
    """What comes before tokens see each other: a norm, and queries, keys and values of each head; ``turn`` rotates heads."""

    def normed(params: Params, name: str, heads: Float[Tensor, "T heads D"]) -> Float[Tensor, "T heads D"]:
        return rms_norm(heads, params[name], eps)

    def unchanged(params: Params, name: str, heads: Float[Tensor, "T heads D"]) -> Float[Tensor, "T heads D"]:
        return heads

    head_norm = normed if head_norms else unchanged

    def project(
        params: Params, x: Float[Tensor, "T H"], cos: Float[Tensor, "T half"], sin: Float[Tensor, "T half"]
    ) -> tuple[Float[Tensor, "T heads D"], Float[Tensor, "T kv_heads D"], Float[Tensor, "T kv_heads D"]]:
        h = rms_norm(x, params["norm"], eps)
        q, k, v = (rearrange(linear(mm, params, name, h), "T (heads D) -> T heads D", D=size) for name in ("q", "k", "v"))
        return turn(head_norm(params, "q_norm", q), cos, sin), turn(head_norm(params, "k_norm", k), cos, sin), v

    return project


def heads_output(mm: Linear) -> Output:
    """What comes after tokens have seen each other: the last projection, and the residual."""

    def output(params: Params, x: Float[Tensor, "T H"], mixed: Float[Tensor, "T heads D"]) -> Float[Tensor, "T H"]:
        return x + linear(mm, params, "o", rearrange(mixed, "T heads D -> T (heads D)"))

    return output


def mlp(config: DecoderConfig, layer: int, leaves: Leaves, *, bias: bool = False) -> Part:
    """Norm, gated MLP and residual."""
    hidden, inner = config.hidden_size, config.intermediate_size
    specs = {"norm": leaves.norm(hidden)}
    for name, out, into, axes in (
        ("gate", inner, hidden, ("mlp", "embed")),
        ("up", inner, hidden, ("mlp", "embed")),
        ("down", hidden, inner, ("embed", "mlp")),
    ):
        specs[name] = leaves.matrix((out, into), axes)
        if bias:
            specs[f"{name}_bias"] = leaves.bias(out, axes[0])
    prefix = f"model.layers.{layer}"
    sources: dict[str, Source] = {"norm": Named(f"{prefix}.post_attention_layernorm.weight")}
    sources |= _projections(specs, f"{prefix}.mlp", ("gate", "up", "down"))

    def stages(ops: Ops, key: Hashable) -> tuple[Stage, ...]:
        name, eps = f"layers.{layer}.mlp", config.rms_norm_eps
        return (Stage(name, "mlp", mlp_fn(ops.linear, eps), (key, "mlp"), _own(name, specs), ("x",), ("x",), named=("gate_up",)),)

    return Part("mlp", specs, sources, stages)


def mlp_fn(mm: Linear, eps: float) -> StageFn:
    """The function of an MLP stage: ``(params, x (T, H)) -> (x,)``."""

    def fn(params: Params, x: Float[Tensor, "T H"]) -> tuple[Float[Tensor, "T H"]]:
        h = rms_norm(x, params["norm"], eps)
        gate, up = (keep("gate_up", linear(mm, params, name, h)) for name in ("gate", "up"))
        return (x + linear(mm, params, "down", silu_mul(gate, up)),)

    return fn


def norm_fn(eps: float) -> StageFn:
    """The function of the last norm: ``(params, x (T, H)) -> (x,)``."""

    def fn(params: Params, x: Float[Tensor, "T H"]) -> tuple[Float[Tensor, "T H"]]:
        return (rms_norm(x, params["weight"], eps),)

    return fn


def embed_fn(params: Params, *, input_ids: Int[Tensor, " T"]) -> tuple[Float[Tensor, "T H"]]:
    """The function of the embedding: ``(params, *, input_ids (T,)) -> (x (T, H),)``."""
    return (F.embedding(input_ids, params["weight"]),)


def embed_rule(vocab: int, ids: str = "input_ids") -> Callable[[StageFn, Hashable, Lower], Pair]:
    """The rule of an embedding: it keeps nothing, and its backward needs the ids and the size of the vocabulary, no parameters.
    Rows of the same id are summed in at least float32. ``ids`` is the constant that holds them."""

    def gradient(input_ids: Int[Tensor, " T"], dx: Float[Tensor, "T H"]) -> Float[Tensor, "V H"]:
        wide = torch.promote_types(dx.dtype, torch.float32)
        rows = torch.zeros(vocab, dx.shape[1], dtype=wide, device=dx.device)
        return rows.index_add(0, input_ids, dx.to(wide)).to(dx.dtype)

    def rule(fn: StageFn, key: Hashable, lower: Lower) -> Pair:
        run = lower(fn, (key, "forward"))

        def forward(params: Params, reads: Values, consts: Mapping[str, Any]) -> tuple[Values, Any]:
            return run(params, *reads, **consts), ()

        def backward(
            params: Params, residual: Any, dwrites: tuple[Tensor | None, ...], consts: Mapping[str, Any]
        ) -> tuple[dict[str, Tensor], tuple[Tensor | None, ...]]:
            # not lowered: generated code adds rows of one id from several threads, in another order each time
            (dx,) = dwrites
            assert dx is not None  # nothing but the layers reads what the embedding writes
            return {"weight": gradient(consts[ids], dx)}, ()

        return Pair(forward, backward, needs_params=False)

    return rule


def _own(name: str, specs: Mapping[str, ParamSpec]) -> dict[str, str]:
    """A stage's names for its parameters, where the stage has the name of the part that they are in."""
    return {leaf: f"{name}.{leaf}" for leaf in specs}


def _projections(specs: Mapping[str, ParamSpec], prefix: str, names: tuple[str, ...]) -> dict[str, Source]:
    """The checkpoint names of projections and of those biases that ``specs`` has."""
    found: dict[str, Source] = {}
    for name in names:
        found[name] = Named(f"{prefix}.{name}_proj.weight")
        if f"{name}_bias" in specs:
            found[f"{name}_bias"] = Named(f"{prefix}.{name}_proj.bias")
    return found
