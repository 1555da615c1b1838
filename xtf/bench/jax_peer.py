"""JAX as a contender: llama, qwen3 and qwen3_moe as functions over a dict of arrays, `jax.jit`, and optax's AdamW.

Written as JAX users write a fast model: layers unrolled under one jit, `jax.nn.dot_product_attention`, and rows moved to experts and
back by gathers in both directions. XLA's threads are the workload's: its pool has as many as ``NPROC`` says. The gradients are one
compiled function and the update, which donates, another, so that its part is seen.

Products of experts have two forms. ``ragged_dot`` is `jax.lax.ragged_dot`; on a CPU it takes several times as long as its FLOPs need.
``blocks`` pads each expert's rows to whole blocks and takes one batched product over these (Gale et al. 2022, "MegaBlocks", is the same
idea): the faster one on a CPU. A model without experts is the same in both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from xtf.bench.contenders import Entry, Taken
from xtf.bench.own import LEARNING_RATE
from xtf.bench.workload import Workload

# no dependency of this project, and without types that pyright sees; absent, `check_entries` says so before this is used
jax: Any = import_module("jax") if find_spec("jax") else None

FAMILIES = ("llama", "qwen3", "qwen3_moe")
_LEAST_BLOCK, _MOST_BLOCK = 8, 128

Array = Any
Params = dict[str, Array]


class Shape(NamedTuple):
    """What is static in the model.

    Args:
        config: the fields of ``config.json``, as xtf writes it.
        lengths: tokens of each document.
        backend: ``"blocks"`` or ``"ragged_dot"``.
    """

    config: dict[str, Any]
    lengths: tuple[int, ...]
    backend: str

    @property
    def block(self) -> int:
        """Rows of a block: a power of two of at most half of what an expert has on average."""
        mean = sum(self.lengths) * self.config["num_experts_per_tok"] // self.config["num_experts"]
        return min(max(_LEAST_BLOCK, 1 << max(0, (mean // 2).bit_length() - 1)), _MOST_BLOCK)


def check(workload: Workload) -> dict[str, Any]:
    """The config, known to be one that this model computes.

    Raises:
        ValueError: for another family, dtype or device, or an option of the config that is not written here.
    """
    model = workload.model()
    config = dict(model.hf_config)
    if model.family not in FAMILIES or config["model_type"] not in FAMILIES:
        raise ValueError(f"jax times {', '.join(FAMILIES)}; got a {config['model_type']}: leave out --against jax")
    if workload.dtype != "float32":
        raise ValueError(f"jax is timed in float32; got --dtype {workload.dtype}")
    if workload.device != "cpu":
        raise ValueError(f"jax is timed on a CPU; got {workload.device}: leave out --against jax")
    odd = [name for name in ("attention_bias", "mlp_bias", "sliding_window") if config.get(name)]
    if config["rope_parameters"]["rope_type"] != "default":
        odd.append("rope_parameters")
    if odd:
        raise ValueError(f"jax times plain models; this config has {', '.join(f'{name}={config[name]!r}' for name in odd)}")
    return config


def open_contender(workload: Workload, entry: Entry) -> JaxPeer:
    """See `xtf.bench.contenders.open_contender`."""
    return JaxPeer(workload, entry)


class JaxPeer:
    """A model in JAX, and its optimizer."""

    def __init__(self, workload: Workload, entry: Entry) -> None:
        config = check(workload)
        if find_spec("optax") is None:
            raise ValueError("--against jax: the package optax is not installed; pip install optax")
        os.environ["NPROC"] = str(workload.threads)  # the size of XLA's pool of threads, read when it is made
        jax.config.update("jax_platforms", "cpu")
        assert workload.weights is not None
        self.params = read_params(workload.weights, config)
        optimizer = import_module("optax").adamw(LEARNING_RATE, weight_decay=0.0)
        self.moments = optimizer.init(self.params)
        self.ids = jax.numpy.asarray(workload.batch()["input_ids"][0].numpy(), dtype="int32")
        self.gradients = jax.jit(jax.value_and_grad(partial(loss_of, Shape(config, workload.lengths, entry.backend))))
        self.update = jax.jit(partial(_update, optimizer), donate_argnums=(0, 1, 2))

    def __call__(self) -> Taken:
        began = time.perf_counter()
        loss, grads = jax.block_until_ready(self.gradients(self.params, self.ids))
        middle = time.perf_counter()
        self.params, self.moments = jax.block_until_ready(self.update(self.params, self.moments, grads))
        ended = time.perf_counter()
        return Taken(ended - began, ended - middle, float(loss))


def _update(optimizer: Any, params: Params, moments: Any, grads: Params) -> tuple[Params, Any]:
    updates, moments = optimizer.update(grads, moments, params)
    return {name: value + updates[name] for name, value in params.items()}, moments


def read_params(folder: str, config: dict[str, Any]) -> Params:
    """Arrays by their names in the checkpoint, linear weights as (in, out); those of experts stacked as (experts, in, out)."""
    load: Callable[[Path], dict[str, Any]] = import_module("safetensors.numpy").load_file
    found: dict[str, Any] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load(file)
    params = {
        name: jax.numpy.asarray((value.T if value.ndim == 2 and "embed_tokens" not in name else value).astype("float32"))
        for name, value in found.items()
        if ".experts." not in name and not (name == "lm_head.weight" and config["tie_word_embeddings"])
    }
    for name in found:
        if ".experts.0." in name:
            each = [found[name.replace(".experts.0.", f".experts.{i}.")].T for i in range(config["num_experts"])]
            params[name.replace(".experts.0.", ".experts.")] = jax.numpy.stack(each).astype("float32")
    return params


def loss_of(shape: Shape, params: Params, ids: Array) -> Array:
    """The mean loss over all tokens but the first of each document, ().

    Args:
        shape: what is static.
        params: of `read_params`.
        ids: (T,) int32.
    """
    np, config, lengths = jax.numpy, shape.config, shape.lengths
    documents = np.repeat(np.arange(len(lengths)), np.asarray(lengths), total_repeat_length=len(ids))
    starts = np.cumsum(np.asarray((0, *lengths[:-1])))
    positions = np.arange(len(ids)) - starts[documents]
    half = config["head_dim"] // 2
    angles = positions[:, None] / config["rope_parameters"]["rope_theta"] ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    mask = (documents[:, None] == documents)[None, None] if len(lengths) > 1 else None
    x = params["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        layer = {name[len(at) :].removesuffix(".weight"): value for name, value in params.items() if name.startswith(at)}
        h = _norm(x, layer["input_layernorm"], config)
        x = x + _attention(config, layer, h, cos, sin, mask)
        h = _norm(x, layer["post_attention_layernorm"], config)
        x = x + (_experts(shape, layer, h) if "mlp.gate" in layer else _mlp(layer, h))
    x = _norm(x, params["model.norm.weight"], config)
    head = params["model.embed_tokens.weight"].T if config["tie_word_embeddings"] else params["lm_head.weight"]
    logits = (x @ head)[:-1]
    each = jax.nn.logsumexp(logits, -1) - np.take_along_axis(logits, ids[1:, None], -1)[:, 0]
    return np.sum(np.where(positions[1:] > 0, each, 0.0)) / (len(ids) - len(lengths))


def _norm(x: Array, weight: Array, config: dict[str, Any]) -> Array:
    return weight * (x * jax.lax.rsqrt(jax.numpy.mean(x * x, -1, keepdims=True) + config["rms_norm_eps"]))


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    a, b = jax.numpy.split(x, 2, -1)
    return jax.numpy.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def _attention(config: dict[str, Any], layer: Params, h: Array, cos: Array, sin: Array, mask: Array | None) -> Array:
    q, k, v = ((h @ layer[f"self_attn.{name}_proj"]).reshape(len(h), -1, config["head_dim"]) for name in "qkv")
    if "self_attn.q_norm" in layer:
        q, k = (_norm(one, layer[f"self_attn.{name}_norm"], config) for one, name in ((q, "q"), (k, "k")))
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    mixed = jax.nn.dot_product_attention(q[None], k[None], v[None], mask=mask, is_causal=True)[0]
    return mixed.reshape(len(h), -1) @ layer["self_attn.o_proj"]


def _mlp(layer: Params, h: Array) -> Array:
    return (jax.nn.silu(h @ layer["mlp.gate_proj"]) * (h @ layer["mlp.up_proj"])) @ layer["mlp.down_proj"]


def _experts(shape: Shape, layer: Params, h: Array) -> Array:
    """A dropless mixture: (T, H) -> (T, H)."""
    np, config = jax.numpy, shape.config
    top_k, experts = config["num_experts_per_tok"], config["num_experts"]
    weights, chosen = jax.lax.top_k(jax.nn.softmax(h @ layer["mlp.gate"], -1), top_k)
    if config["norm_topk_prob"]:
        weights = weights / weights.sum(-1, keepdims=True)
    rows, flat = len(h) * top_k, chosen.reshape(-1)
    order = np.argsort(flat)
    sizes = np.bincount(flat, length=experts)
    if shape.backend == "ragged_dot":
        to = order
        product = partial(jax.lax.ragged_dot, group_sizes=sizes)
    else:
        each = shape.block
        blocks = -(-rows // each) + min(experts, rows)  # each expert may leave one unfilled
        ends = np.cumsum(-(-sizes // each))  # in blocks
        shift = (ends - -(-sizes // each)) * each - (np.cumsum(sizes) - sizes)
        to = np.full(blocks * each, rows).at[np.arange(rows) + shift[flat[order]]].set(order, unique_indices=True)
        of = np.minimum(np.searchsorted(ends, np.arange(blocks), side="right"), experts - 1)

        def product(x: Array, weight: Array) -> Array:
            return np.einsum("brh,bhf->brf", x.reshape(blocks, each, -1), weight[of]).reshape(blocks * each, -1)

    back = np.zeros(rows + 1, to.dtype).at[to].set(np.arange(len(to)))[:rows]  # the last takes what is of no row
    x = _mover()(np.repeat(h, top_k, 0), to, back)
    inner = jax.nn.silu(product(x, layer["mlp.experts.gate_proj"])) * product(x, layer["mlp.experts.up_proj"])
    out = _mover()(product(inner, layer["mlp.experts.down_proj"]), back, to)
    return np.sum(out.reshape(len(h), top_k, -1) * weights[..., None], 1)


def _mover() -> Callable[[Array, Array, Array], Array]:
    """``move(x, to, back)``: the rows ``x[to]``, 0 where ``to`` is beyond; the gradient takes rows ``back`` the same way."""

    @jax.custom_vjp
    def move(x: Array, to: Array, back: Array) -> Array:
        return x.at[to].get(mode="fill", fill_value=0)

    def forward(x: Array, to: Array, back: Array) -> tuple[Array, tuple[Array, Array]]:
        return move(x, to, back), (to, back)

    def backward(kept: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
        to, back = kept
        return move(dy, back, to), None, None

    move.defvjp(forward, backward)
    return move
