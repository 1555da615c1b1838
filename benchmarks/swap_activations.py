"""What swapping activations costs, and whether its copies hide behind kernels.

    python benchmarks/swap_activations.py --layers 8 --tokens 16384            # on the accelerator, in bfloat16
    python benchmarks/swap_activations.py --device cpu --preset tiny-moe --layers 2 --tokens 256

A few layers of a preset (by default Qwen3-30B-A3B's), forward, backward and update; steps that swap and steps that do not take turns.
Prints the median seconds of each and their ratio; bytes to the host and back, by the event record; the most device memory of each; and of
one profiled step, the share of the time of copies in which a kernel ran too. On a CPU a copy is a copy: there only the bytes say something.
**Its part for accelerators has never been run on one.**
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import xtf
from xtf.models import from_hf, preset
from xtf.record import Record
from xtf.state import State
from xtf.step import TrainStep, compose, train_step
from xtf.transforms import chunk_loss, remat, swap_activations

Span = tuple[float, float]


def shared(of: Sequence[Span], others: Sequence[Span]) -> float:
    """The share of the time of some spans in which one of the others goes on too; 0 for no time.

    Example:
        >>> shared([(0, 2), (10, 12)], [(1, 3), (2, 11)])
        0.5
    """
    union: list[Span] = []
    for begin, end in sorted(others):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    total = sum(end - begin for begin, end in of)
    both = sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in of for b, e in union)
    return both / total if total else 0.0


def steps_of(given: argparse.Namespace, device: torch.device) -> dict[str, TrainStep]:
    """The step that keeps activations on the device, and the one that swaps them."""
    whole = preset(given.preset)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = from_hf({**whole.config.to_hf(), "num_hidden_layers": given.layers}, dtype=dtype)
    policy = given.remat if given.remat in ("everything", "nothing") else given.remat.split("+")
    kept = compose(remat(policy), chunk_loss())(train_step(model, xtf.optim.adamw(lr=1e-4), device=device))
    both = {"kept": kept, "swapped": swap_activations()(kept)}
    backend: Any = given.backend
    return {name: xtf.compile(step, backend=backend, donate=True) for name, step in both.items()}


def batch_of(tokens: int, document: int, vocab: int, device: torch.device) -> dict[str, Tensor]:
    """Random tokens in one row, in documents of one length."""
    ids = torch.randint(vocab, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "labels": ids, "document_ids": torch.arange(tokens, device=device).unsqueeze(0) // document}


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(step: TrainStep, state: State, batch: dict[str, Tensor], device: torch.device) -> tuple[State, float]:
    """A step: the new state, and seconds."""
    finish(device)
    begin = time.perf_counter()
    state, _ = step(state, batch)
    finish(device)
    return state, time.perf_counter() - begin


def hidden(step: TrainStep, state: State, batch: dict[str, Tensor], device: torch.device) -> tuple[State, float]:
    """A profiled step: the new state, and the share of the time of copies in which a kernel runs."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        state, _ = step(state, batch)
        finish(device)
    copies, kernels = list[Span](), list[Span]()
    for event in profiler.events() or ():
        if event.device_type.name != "CPU":
            between = ("DtoH" in event.name) or ("HtoD" in event.name)
            (copies if between else kernels).append((event.time_range.start, event.time_range.end))
    return state, shared(copies, kernels)


def main(arguments: list[str] | None = None) -> int:
    """Run as the module says."""
    found = torch.accelerator.current_accelerator(check_available=True)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default=str(found or "cpu"))
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--document", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--remat", default="everything", help="everything, nothing, or names joined by +")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager", "eager"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    steps = steps_of(given, device)
    batch = batch_of(given.tokens, given.document, steps["kept"].model.vocab, device)
    figures: dict[str, Any] = {name: value for name, value in vars(given).items() if name != "json"}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    state = steps["kept"].init(0)
    for turn in range(given.rounds + 2):  # two to compile and to fill pools
        for name, step in steps.items():
            if device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats(device)
            state, took = timed(step, state, batch, device)
            seconds[name] += [took] if turn > 1 else []
            if device.type != "cpu":
                figures[f"{name} bytes"] = torch.accelerator.max_memory_allocated(device)
    record = Record()
    steps["swapped"].value_and_grad(state.params, batch, record=record)
    moved = {what: sum(event.bytes for event in record.select("start", what)) for what in ("store", "fetch")}
    figures |= {"out": moved["store"], "back": moved["fetch"]}
    figures |= {f"{name} seconds": statistics.median(times) for name, times in seconds.items()}
    figures["ratio"] = statistics.median(a / b for a, b in zip(seconds["swapped"], seconds["kept"], strict=True))
    print(f"{given.layers} layers of {given.preset}, {given.tokens:,} tokens in documents of {given.document:,}, on {device}")
    for name in steps:
        memory = f", {figures[f'{name} bytes'] / 1e9:.2f} GB at most" if device.type != "cpu" else ""
        print(f"{name:8} {figures[f'{name} seconds']:8.3f} s a step{memory}")
    print(f"swapped ÷ kept {figures['ratio']:.3f} ({given.rounds} rounds)")
    print(f"{moved['store'] / 1e6:,.1f} MB to the host, {moved['fetch'] / 1e6:,.1f} MB back")
    if device.type != "cpu":
        state, figures["hidden"] = hidden(steps["swapped"], state, batch, device)
        print(f"kernels ran in {figures['hidden']:.0%} of the time of copies")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
