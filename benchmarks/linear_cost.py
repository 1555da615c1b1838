"""Does the cost of a step grow with the work, and with nothing else?

    python benchmarks/linear_cost.py

Two rows of measurements, each beside its first: tokens per second for more and more packed documents of 512 tokens (attention sees its
document only, so a token costs the same), and for more and more experts of which a token has as many as before (the same FLOPs; only
routing, smaller groups and the update of more parameters are more; the last is set apart). Each size has a process of its own, and they
take a step in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from xtf.bench.contenders import Entry
from xtf.bench.process import Worker
from xtf.bench.workload import Workload, document_lengths, shape_config
from xtf.files import write_atomically


def seconds_of(workloads: Sequence[Workload], entry: Entry, rounds: int) -> list[list[float]]:
    """Seconds of each round's step before its update, for each workload."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(entry, workload)) for workload in workloads]
        for worker, workload in zip(workers, workloads, strict=True):
            worker.ask("open", workload=workload.json(), entry=list(entry))
            worker.ask("first")
            worker.ask("warm", steps=1)
        taken = [list[float]() for _ in workers]
        for _ in range(rounds):
            for at, worker in enumerate(workers):
                step = worker.ask("step")
                taken[at].append(step["seconds"] - step["update_seconds"])
        return taken


def main(args: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small-moe", help="a shape of xtf bench")
    parser.add_argument("--layers", type=int, help="of it")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192, 16384])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--expert-tokens", type=int, default=4096, help="tokens of a step where experts differ")
    parser.add_argument("--document", type=int, default=512, help="tokens of each document")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager", "eager"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args(args)

    def workload(tokens: int, experts: int | None) -> Workload:
        config = shape_config(given.model, {"layers": given.layers, "experts": experts})
        lengths = document_lengths(str(given.document), tokens, 0)
        return Workload(config, lengths, threads=torch.get_num_threads())

    entry = Entry("xtf", "xtf", given.backend, "remat=nothing,chunk_loss")
    rows = {
        "tokens": (given.tokens, [workload(n, None) for n in given.tokens]),
        "experts": (given.experts, [workload(given.expert_tokens, n) for n in given.experts]),
    }
    figures: dict[str, dict[str, float]] = {}
    for name, (sizes, workloads) in rows.items():
        taken = seconds_of(workloads, entry, given.rounds)
        each = [[second / work.tokens for second in seconds] for seconds, work in zip(taken, workloads, strict=True)]
        ratios = [statistics.median(first / one for first, one in zip(each[0], later, strict=True)) for later in each]
        figures[name] = {str(size): ratio for size, ratio in zip(sizes, ratios, strict=True)}
        table = Table(box=None, padding=(0, 2), pad_edge=False)
        for column in (name, "tokens/s", "÷ the first"):
            table.add_column(column, justify="right")
        for size, per_token, ratio in zip(sizes, each, ratios, strict=True):
            table.add_row(f"{size:,}", f"{1 / statistics.median(per_token):,.0f}", f"{ratio:.2f}")
        Console(highlight=False).print(table, "")
    if given.json is not None:
        with write_atomically(given.json) as file:
            file.write((json.dumps(figures, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
