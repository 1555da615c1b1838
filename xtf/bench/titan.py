"""torchtitan as a contender: its qwen3 and qwen3_moe, in one process, with torch's fused AdamW.

The model is built of torchtitan's own configs and loaded by its own state-dict adapter. The loss is its cross-entropy,
summed and divided by the number of targets. No process group is needed. It runs eagerly: under torch.compile torch's grouped product
(``aten::_grouped_mm``, torch 2.14) takes no float32.

What differs from torchtitan as it trains on GPUs:

* Its attention for language models is compiled (flex, whose CPU form has no backward) or of flash kernels (varlen, 16 bits). Here it is its
  `ScaledDotProductAttention`, of which `_Attention` also takes a mask of packed documents, and without its list of CUDA kernels.
* Its experts cast to bfloat16 whatever the model is in; `_Experts` is the same without casts, on the same grouped product of torch.
* No FSDP and no trainer: one process shards nothing. ``load_balance_coeff`` is off, since nothing updates its biases here.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtf.bench.clock import seconds_now
from xtf.bench.contenders import Entry, Taken
from xtf.bench.own import LEARNING_RATE
from xtf.bench.workload import Workload

FAMILIES = ("qwen3", "qwen3_moe")


def open_contender(workload: Workload, entry: Entry) -> Titan:
    """See `xtf.bench.contenders.open_contender`."""
    return Titan(workload)


def check(workload: Workload) -> dict[str, Any]:
    """The config, known to be one that torchtitan's qwen3 computes.

    Raises:
        ValueError: for another family, or an option of the config that torchtitan has not.
    """
    config = dict(workload.model().hf_config)
    if config["model_type"] not in FAMILIES:
        raise ValueError(f"torchtitan is timed on {', '.join(FAMILIES)}; got a {config['model_type']}: leave out --against torchtitan")
    odd = [name for name in ("attention_bias", "sliding_window") if config.get(name)]
    if config["rope_parameters"]["rope_type"] != "default":
        odd.append("rope_parameters")
    if odd:
        raise ValueError(f"torchtitan times plain models; this config has {', '.join(f'{name}={config[name]!r}' for name in odd)}")
    return config


class Titan:
    """A model of torchtitan, and its optimizer."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        config = check(workload)
        made = model_config(config, workload.tokens)
        self.model: Any = made.build()
        assert workload.weights is not None
        load: Any = import_module("safetensors.torch").load_file
        weights: dict[str, Tensor] = {}
        for file in sorted(Path(workload.weights).glob("*.safetensors")):
            weights |= load(file)
        adapter = import_module("torchtitan.models.qwen3.state_dict_adapter").Qwen3StateDictAdapter(made, None)
        self.model.load_state_dict(adapter.from_hf(weights))
        self.model.to(workload.device, getattr(torch, workload.dtype)).train()
        self.loss: Any = import_module("torchtitan.components.loss").cross_entropy_loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        batch = workload.batch()
        self.ids = batch["input_ids"]
        self.positions = torch.cat([torch.arange(n) for n in workload.lengths])[None].to(workload.device)
        self.labels = torch.full_like(self.ids, -100)
        self.labels[:, :-1] = self.ids[:, 1:].masked_fill(self.positions[:, 1:] == 0, -100)
        self.targets = workload.tokens - len(workload.lengths)
        documents = batch["document_ids"][0]
        seen = (documents[:, None] == documents).tril() if len(workload.lengths) > 1 else None
        for block in self.model.layers.values():
            block.attention.inner_attention.seen = seen

    def __call__(self) -> Taken:
        device = self.workload.device
        began = seconds_now(device)
        loss = self.loss(self.model(self.ids, self.positions), self.labels) / self.targets
        loss.backward()
        middle = seconds_now(device)
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        self.optimizer.zero_grad(set_to_none=True)
        ended = seconds_now(device)
        return Taken(ended - began, ended - middle, float(loss.detach()))


def model_config(config: dict[str, Any], tokens: int) -> Any:
    """torchtitan's ``Qwen3Model.Config`` of a ``config.json`` as xtf writes it, for so many tokens."""
    common, blocks = import_module("torchtitan.models.common"), import_module("torchtitan.models.qwen3.model")
    make, norms = import_module("torchtitan.models.common.config_utils"), import_module("torchtitan.models.common.nn_modules")
    hidden, size, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    start: dict[str, Any] = {"weight": nn.init.zeros_}  # of no use: weights are loaded
    attention, experts = _patched()

    def norm(width: int) -> Any:
        return norms.RMSNorm.Config(normalized_shape=width, eps=config["rms_norm_eps"], param_init=start)

    def second(layer: int) -> dict[str, Any]:
        sparse = "num_experts" in config and (layer + 1) % config["decoder_sparse_step"] == 0 and layer not in config["mlp_only_layers"]
        if not sparse:
            inner = config["intermediate_size"]
            return {"feed_forward": make.make_ffn_config(dim=hidden, hidden_dim=inner, w1_param_init=start, w2w3_param_init=start)}
        count, top_k = config["num_experts"], config["num_experts_per_tok"]
        router = make.make_router_config(
            dim=hidden, num_experts=count, gate_param_init=start, top_k=top_k, score_func="softmax", route_norm=config["norm_topk_prob"]
        )
        routed = make.make_routed_experts_config(
            dim=hidden,
            hidden_dim=config["moe_intermediate_size"],
            num_experts=count,
            top_k=top_k,
            param_init={},
            comm_backend="standard",
        )
        routed.inner_experts = experts.Config(dim=hidden, hidden_dim=config["moe_intermediate_size"], num_experts=count)
        return {"moe": make.make_moe_config(num_experts=count, router=router, routed_experts=routed, load_balance_coeff=None)}

    def block(layer: int) -> Any:
        mixing = make.make_gqa_config(
            dim=hidden,
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=size,
            wqkv_param_init=start,
            wo_param_init=start,
            inner_attention=attention.Config(),
            fuse_qkv=True,
            rope=common.CosSinRoPE.Config(dim=size, max_seq_len=tokens, theta=config["rope_parameters"]["rope_theta"]),
            qk_norm=norm(size),
        )
        return blocks.Qwen3TransformerBlock.Config(attention_norm=norm(hidden), ffn_norm=norm(hidden), attention=mixing, **second(layer))

    return blocks.Qwen3Model.Config(
        vocab_size=vocab,
        dim=hidden,
        norm=norm(hidden),
        enable_weight_tying=config["tie_word_embeddings"],
        tok_embeddings=common.Embedding.Config(num_embeddings=vocab, embedding_dim=hidden, param_init=start),
        lm_head=common.Linear.Config(in_features=hidden, out_features=vocab, param_init=start),
        layers=[block(i) for i in range(config["num_hidden_layers"])],
    )


def _patched() -> tuple[Any, Any]:
    """torchtitan's attention with a mask, and its experts without bfloat16: the two patches of the module's docstring."""
    import dataclasses

    base: Any = import_module("torchtitan.models.common.attention").ScaledDotProductAttention
    experts: Any = import_module("torchtitan.models.common.moe").GroupedExperts

    class _Attention(base):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(base.Config):
            pass

        seen: Tensor | None = None

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, enable_gqa: bool = False, **_: Any) -> Tensor:
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            causal = self.seen is None
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen, is_causal=causal, scale=scale, enable_gqa=enable_gqa)
            return mixed.transpose(1, 2)

    class _Experts(experts):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(experts.Config):
            pass

        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            ends = torch.cumsum(counts, 0, dtype=torch.int32)
            gate, up, down = (weight.transpose(-2, -1) for weight in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
            inner = F.silu(self._grouped_mm(A=x, B_t=gate, offs=ends)) * self._grouped_mm(A=x, B_t=up, offs=ends)
            return self._grouped_mm(A=inner, B_t=down, offs=ends)

    return _Attention, _Experts
