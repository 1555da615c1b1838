"""What is checked where nothing else is given: small models of each family, a batch that is unlike what is easy, an optimizer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from xtf import optim
from xtf.data.batches import fill
from xtf.data.documents import Documents
from xtf.model import Model


def documents_batch(documents: Documents) -> dict[str, Tensor]:
    """Each document in a row of its own, filled up with padding: (documents, tokens of the longest)."""
    return fill(documents, [np.array([i]) for i in range(len(documents))], rows=len(documents), seq=int(documents.lengths.max()))


def default_optimizer() -> optim.Optimizer:
    """AdamW behind clipping. Its eps is large: where a gradient is rounding noise around zero, AdamW would otherwise make the
    noise as large as the learning rate, and no law could hold."""
    return optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(lr=1e-2, eps=1e-3, weight_decay=0.1))


def random_batch(vocab: int, *, rows: int = 5, seq: int = 13, seed: int = 0) -> dict[str, Tensor]:
    """A batch that is unlike what is easy: documents of unequal length, some padding, weights, and a row without targets."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (rows, seq), generator=generator)
    labels = torch.where(torch.rand(rows, seq, generator=generator) < 0.3, -100, ids)
    labels[min(1, rows - 1)] = -100  # not the last row: a transform that drops that one must be caught
    documents = (torch.rand(rows, seq, generator=generator) < 0.25).long().cumsum(1)
    documents[0, seq - 2 :] = -1
    weights = torch.rand(rows, seq, generator=generator, dtype=torch.float64) + 0.5
    return {"input_ids": ids, "labels": labels, "document_ids": documents, "loss_weights": weights}


def small_models(dtype: torch.dtype = torch.float64) -> dict[str, Model]:
    """One small model of each family, of sizes that little divides."""
    from xtf.models import from_hf

    common = {
        "vocab_size": 61,
        "hidden_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
    }
    dense = common | {"intermediate_size": 28, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "initializer_range": 0.3}
    tied = dense | {"model_type": "llama", "tie_word_embeddings": True}
    moe = dense | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.1,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
    }
    latent = common | {
        "model_type": "deepseek_v3",
        "head_dim": None,
        "num_key_value_heads": 4,
        "intermediate_size": 18,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "first_k_dense_replace": 1,
        "q_lora_rank": 9,
        "kv_lora_rank": 7,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 4,
        "v_head_dim": 3,
        "moe_intermediate_size": 5,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    }
    return {
        "llama": from_hf(tied, dtype=dtype),
        "qwen3": from_hf(dense | {"model_type": "qwen3"}, dtype=dtype, z_loss=0.01),
        "qwen3_moe": from_hf(moe, dtype=dtype, router_z_loss=0.01),
        "deepseek_v3": from_hf(latent, dtype=dtype, balance_loss=0.05, sequence_loss=0.1, bias_update_speed=0.02),
    }


def small_model(name: str, dtype: torch.dtype = torch.float64) -> Model:
    """One of `small_models`. As ``functools.partial(small_model, "llama")`` it can be sent to other processes, where a model cannot.

    Raises:
        ValueError: for a name that none of them has.
    """
    models = small_models(dtype)
    if name not in models:
        raise ValueError(f"small_model: no model {name!r}; there are {', '.join(models)}")
    return models[name]
