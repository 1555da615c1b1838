"""What compiling costs: the first step less a later one, at several depths, with nothing on disk and again in a second process.

    python benchmarks/compile_time.py --layers 4 64 [--keep] [--against transformers] [--json FILE]

Every figure is of a process of its own; the cold ones have an empty folder for torch's compiled code, the warm ones that of the cold
one before. A small Qwen3-MoE shape: what is compiled does not depend on sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

VOCAB = 512


def config(layers: int, hidden: int, experts: int) -> dict[str, Any]:
    """The ``config.json`` of the shape."""
    return {
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": hidden // 2,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
    }


def own(args: argparse.Namespace) -> Callable[[torch.Tensor], object]:
    """A step of ours on ids (1, seq)."""
    import xtf

    model = xtf.models.from_hf(config(args.layers[0], args.hidden, args.experts), dtype=torch.float32)
    step = xtf.transforms.chunk_loss()(xtf.train_step(model, xtf.optim.adamw(1e-3)))
    step = xtf.compile(xtf.transforms.remat("nothing")(step) if args.keep else step, backend=args.backend, unit=args.unit, donate=True)
    state = step.init(0)

    def run(ids: torch.Tensor) -> None:
        nonlocal state
        state, _ = step(state, {"input_ids": ids, "labels": ids})

    return run


def transformers(args: argparse.Namespace) -> Callable[[torch.Tensor], object]:
    """A step of the compiled model of transformers, on ids (1, seq)."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    fields = {k: v for k, v in config(args.layers[0], args.hidden, args.experts).items() if k != "model_type"}
    peer: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields))
    peer.set_experts_implementation("grouped_mm" if args.backend == "eager" else "batched_mm")  # grouped_mm has no fp32 meta kernel
    optimizer = torch.optim.AdamW(peer.parameters(), 1e-3, fused=True)
    compiled: Any = torch.compile(peer, backend=args.backend)

    def run(ids: torch.Tensor) -> None:
        compiled(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


PEERS = {"xtf": own, "transformers": transformers}


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the first step and of a later one, in this process."""
    run = PEERS[args.worker](args)
    seconds: list[float] = []
    for seed in range(args.steps):
        ids = torch.randint(VOCAB, (1, args.seq), generator=torch.Generator().manual_seed(seed))
        start = time.perf_counter()
        run(ids)
        seconds.append(time.perf_counter() - start)
    return {"first": seconds[0], "later": min(seconds[1:])}


def in_process(args: argparse.Namespace, peer: str, layers: int, folder: str) -> float:
    """Seconds of compiling in a new process: its first step less a later one."""
    sizes = [f"--{name}={getattr(args, name)}" for name in ("hidden", "experts", "seq", "steps", "backend", "unit")]
    command = [sys.executable, __file__, "--worker", peer, "--layers", str(layers), *sizes, *(["--keep"] if args.keep else [])]
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    return figures["first"] - figures["later"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 64], help="depths; ratios are of the last to the first")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=4, help="at least 2")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--unit", default="stage", choices=["stage", "step"])
    parser.add_argument("--keep", action="store_true", help="keep what stages compute, instead of computing it again")
    parser.add_argument("--against", choices=["transformers"], help="measure its compiled model too")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", choices=sorted(PEERS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: expected at least 2, the first and a later one")
    if args.worker:
        print(json.dumps(measure(args)))
        return
    figures: dict[str, dict[str, Any]] = {}
    for peer in ["xtf", *([args.against] if args.against else [])]:
        depths: dict[str, dict[str, float]] = {}
        for layers in args.layers:
            with tempfile.TemporaryDirectory() as folder:
                depths[str(layers)] = {kind: in_process(args, peer, layers, folder) for kind in ("cold", "warm")}
            cold, warm = depths[str(layers)].values()
            print(f"{peer:12} {layers:4} layers: {cold:7.1f} s cold, {warm:6.1f} s warm, warm ÷ cold {warm / cold:.2f}", flush=True)
        first, last = (depths[str(layers)]["cold"] for layers in (args.layers[0], args.layers[-1]))
        print(f"{peer:12} {args.layers[-1]} layers ÷ {args.layers[0]} layers, cold: {last / first:.2f}", flush=True)
        figures[peer] = {"seconds": depths, "deeper": last / first}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
