"""One long sequence through a small mixture of experts: forward, backward and update, and what it takes of memory.

    python benchmarks/long_sequence.py --inputs real_inputs                        # one document of 65,536 tokens
    python benchmarks/long_sequence.py --inputs real_inputs --document 2048        # the same tokens as documents of 2,048

The text is that of ``text/wiki.jsonl``, end to end, in Qwen3's tokens; the model has hidden size 256, 4 heads, 2 layers and Qwen3's
vocabulary. Prints what a plain step would hold at once (counted on tensors without values) and what is left of it when stages compute
again what they need (`remat`) and when logits are made in chunks (`chunk_loss`); then runs a step, with activations swapped, and prints the
largest resident size of the process. On a CPU host and device are one memory: swapping gains nothing there, it is only seen to work.

With --document, also the time per token of forward and backward over that of sequences of a document's length, in one run: not above 1,
for attention costs the square of a document, not of the pack.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

import xtf
from xtf.data import encode, parse_row, read_rows
from xtf.model import Model
from xtf.models import from_hf
from xtf.run.memory import estimate
from xtf.state import State
from xtf.step import TrainStep, compose, train_step
from xtf.transforms import chunk_loss, remat, swap_activations


def mixture(vocab: int) -> Model:
    """Hidden size 256, 4 heads, 2 layers, 8 experts of which a token takes 2."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2}
    rest = {"vocab_size": vocab, "max_position_embeddings": 1 << 20, "tie_word_embeddings": False, "norm_topk_prob": True}
    return from_hf({"model_type": "qwen3_moe", **sizes, **heads, **rest})


def real_tokens(inputs: Path, count: int) -> tuple[list[int], int]:
    """The first tokens of the text, again from the start where it ends, and the size of the vocabulary, as Qwen3's models have it."""
    tokenizer = AutoTokenizer.from_pretrained(inputs / "qwen3-tokenizer")
    found: list[int] = []
    for row in read_rows(inputs / "text" / "wiki.jsonl"):
        text = parse_row(row.value)
        assert isinstance(text, str)
        found += encode(tokenizer, text)
        if len(found) >= count:
            break
    return (found * -(-count // len(found)))[:count], 151_936


def batch_of(ids: list[int], document: int | None) -> dict[str, Tensor]:
    """One row; documents of the given length, or one."""
    tokens = torch.tensor([ids])
    of = torch.zeros_like(tokens) if document is None else torch.arange(len(ids)).unsqueeze(0) // document
    return {"input_ids": tokens, "labels": tokens, "document_ids": of}


def steps_of(model: Model) -> dict[str, TrainStep]:
    """From a plain step to the one that runs."""
    plain = train_step(model, xtf.optim.adamw(lr=1e-3))
    again = remat("everything")(plain)
    return {"plain: everything kept": remat("nothing")(plain), "remat": again, "remat, chunk_loss": chunk_loss()(again)}


def peak(step: TrainStep, tokens: int) -> int:
    """Bytes at once, the update's own copies left out: steps that run donate."""
    return estimate(xtf.compile(step, backend="eager", donate=True), tokens)["peak"]


def seconds(step: TrainStep, state: State, batch: dict[str, Tensor]) -> float:
    """Of a forward and backward."""
    begin = time.perf_counter()
    step.value_and_grad(state.params, batch)
    return time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> int:
    """Run as the module says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--inputs", type=Path, required=True, help="folder of real inputs, as tests/real_inputs.py fetches them")
    parser.add_argument("--tokens", type=int, default=65_536, help="of the sequence (default 65536)")
    parser.add_argument("--document", type=int, help="tokens of a document; by default the sequence is one")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    given = parser.parse_args(arguments)
    ids, vocab = real_tokens(given.inputs, given.tokens)
    model = mixture(vocab)
    found: dict[str, Any] = {"tokens": len(ids), "document": given.document or len(ids)}
    found["bytes"] = {name: peak(step, len(ids)) for name, step in steps_of(model).items()}
    before = None
    for name, size in found["bytes"].items():
        print(f"{name:24} {size / 1e9:7.2f} GB" + ("" if before is None else f"   {(before - size) / 1e9:7.2f} GB less"))
        before = size
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    step = compose(swap_activations(), chunk_loss())(train_step(model, xtf.optim.adamw(lr=1e-3)))
    step = xtf.compile(step, backend="eager", donate=True)
    state, batch = step.init(0), batch_of(ids, given.document)
    begin = time.perf_counter()
    state, metrics = step(state, batch)
    found |= {"loss": float(metrics["loss"]), "seconds": time.perf_counter() - begin}
    found["peak_rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"largest resident size    {found['peak_rss'] / 1e9:7.2f} GB, of which {base / 1e9:.2f} GB before the step")
    print(f"loss {found['loss']:.3f}; a step of {found['seconds']:.0f} s, {len(ids) / found['seconds']:.0f} tokens/s")
    if given.document is not None:
        alone = [batch_of(ids[at : at + given.document], None) for at in range(0, len(ids), given.document)][:8]
        short = statistics.median(seconds(step, state, part) / given.document for part in alone)
        found["over_short"] = seconds(step, state, batch) / len(ids) / short
        print(f"time per token over that of sequences of {given.document:,}: {found['over_short']:.2f}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
