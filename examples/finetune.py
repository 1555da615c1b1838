"""Fine-tune a Hugging Face checkpoint on conversations, sharded over as many ranks as torchrun starts.

    python tests/real_inputs.py real_inputs                    # brings a model and data, once
    python examples/finetune.py                                # one process
    torchrun --nproc-per-node 2 examples/finetune.py           # two, each with half of the parameters

Parameters, gradients and optimizer state are split over the ranks (`shard`), the logits never stand whole (`chunk_loss`), and
each rank reads only its own bytes of the checkpoint. The result is a Hugging Face folder again.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from transformers import AutoTokenizer

import xtf
from xtf.checkpoint import read_config
from xtf.checkpoint.writing import check_target
from xtf.data import encode_chat, pack_documents, read_chat_jsonl
from xtf.transforms import chunk_loss, shard

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Options:
    """Fine-tune a Hugging Face checkpoint on conversations."""

    model: Path = Path("real_inputs/smollm2-135m")
    """Checkpoint folder, with its tokenizer."""
    data: Path = Path("real_inputs/chat/alpaca_en.jsonl")
    """One {"messages": [...]} per line."""
    out: Path = Path("runs/finetune")
    """Where the result goes: a Hugging Face folder."""
    layers: int | None = None
    """Use only the first layers of the model; None for all."""
    steps: int = 30
    rows: int = 4
    """Packed rows per step, over all ranks."""
    seq: int = 512
    """Tokens per row."""
    lr: float = 1e-4
    held_out: int = 64
    """Conversations that are not trained on."""
    seed: int = 0


def main(options: Options, config: dict[str, Any]) -> None:
    mesh = xtf.mesh(data=-1)
    total = config["num_hidden_layers"]
    layers = total if options.layers is None else options.layers
    model = xtf.models.from_hf(config | {"num_hidden_layers": layers})
    optimizer = xtf.optim.chain(
        xtf.optim.clip_by_global_norm(1.0),
        xtf.optim.adamw(xtf.optim.warmup_cosine(options.lr, options.steps // 10, options.steps), weight_decay=0.01),
    )
    step = xtf.compose(shard(mesh["data"]), chunk_loss())(xtf.train_step(model, optimizer))
    unused = [rf"model\.layers\.{i}\..*" for i in range(layers, total)]
    state = xtf.load(step, options.model, ignore=unused)

    train, test = conversations(options)
    before = evaluate(step, state, test, mesh)
    if mesh.rank == 0:
        print(step)
        print(f"held-out loss {before:.4f} before")
    order = torch.randperm(len(train["input_ids"]), generator=torch.Generator().manual_seed(options.seed))
    for i in range(options.steps):
        chosen = order[torch.arange(i * options.rows, (i + 1) * options.rows) % len(order)]
        batch = {name: value[chosen] for name, value in train.items()}
        state, metrics = step(state, xtf.split_batch(batch, mesh))
        if mesh.rank == 0:
            print(
                f"step {i + 1:3d}  loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}  tokens {metrics['tokens']}", flush=True
            )
    after = evaluate(step, state, test, mesh)
    xtf.save(step, state, options.out, tokenizer_from=options.model)
    if mesh.rank == 0:
        print(f"held-out loss {before:.4f} before, {after:.4f} after; saved to {options.out}")


def check(options: Options) -> dict[str, Any]:
    """Raise ValueError, before any work is done, if something is not there or the result could not be saved. Returns the config."""
    missing = [f"--{name} {path}" for name, path in (("model", options.model), ("data", options.data)) if not path.exists()]
    if missing:
        raise ValueError(
            f"there is no {' and no '.join(missing)}: `python tests/real_inputs.py real_inputs` brings those of the defaults, "
            "or give your own checkpoint folder and chat file"
        )
    check_target(options.out, options.model)
    return read_config(options.model)


def conversations(options: Options) -> tuple[Batch, Batch]:
    """Packed rows to train on, and those of the held-out conversations."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    encoded = [encode_chat(tokenizer, messages, options.seq) for messages in read_chat_jsonl(options.data)]
    encoded = [(ids, labels) for ids, labels in encoded if any(label >= 0 for label in labels)]
    return pack_documents(encoded[options.held_out :], seq=options.seq), pack_documents(encoded[: options.held_out], seq=options.seq)


def evaluate(step: xtf.TrainStep, state: xtf.State, batch: Batch, mesh: xtf.Mesh, rows: int = 8) -> float:
    """Mean cross-entropy per supervised token, a few rows at a time."""
    total, count = 0.0, 0
    for begin in range(0, len(batch["input_ids"]), rows):
        part = {name: value[begin : begin + rows] for name, value in batch.items()}
        found = step.evaluate(state.params, xtf.split_batch(part, mesh))
        total, count = total + float(found["cross_entropy"]) * int(found["tokens"]), count + int(found["tokens"])
    return total / count


if __name__ == "__main__":
    chosen = tyro.cli(Options)
    try:
        config = check(chosen)
    except ValueError as error:
        raise SystemExit(f"finetune: {error}") from error
    main(chosen, config)
