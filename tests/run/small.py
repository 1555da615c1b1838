"""A small checkpoint and small data files, for tests of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xtf
from xtf.data.text import TOKENIZER_FILE, load_corpus

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def checkpoint(folder: Path, **config: Any) -> Path:
    """A llama of 2 layers with the demo's tokenizer."""
    model = xtf.models.from_hf(CONFIG | config)
    xtf.save_params(model, model.init(0), folder, tokenizer_from=TOKENIZER_FILE.parent)
    return folder


def chat(path: Path, rows: int = 60) -> Path:
    """Conversations out of neighbouring paragraphs of the demo's text, of very different lengths."""
    paragraphs = [text for text in load_corpus().split("\n\n") if len(text) > 20][: 2 * rows]
    turns = zip(paragraphs[::2], paragraphs[1::2], strict=True)
    lines = [json.dumps({"messages": [{"role": "user", "content": a[:200]}, {"role": "assistant", "content": b}]}) for a, b in turns]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def text(path: Path, rows: int = 40) -> Path:
    """Documents out of paragraphs of the demo's text."""
    paragraphs = [part for part in load_corpus().split("\n\n") if len(part) > 20][:rows]
    path.write_text("\n".join(json.dumps({"text": part}) for part in paragraphs), encoding="utf-8")
    return path
