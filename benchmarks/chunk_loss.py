"""Time of the loss with and without chunks, at a size where both fit.

    python benchmarks/chunk_loss.py --tokens 2048 --vocab 32768 --hidden 512

Prints the median seconds of forward and backward of each, runs of the two taking turns, and their ratio: below 1 the chunks are
faster. A machine that is busy says nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from xtf.batch import normalizer
from xtf.model import cross_entropy
from xtf.stage import Pair, recompute
from xtf.step import eager
from xtf.transforms.chunk_loss import chunked_pair


def seconds(pair: Pair, params: Any, reads: Any, consts: Any) -> float:
    """Time of one forward and backward."""
    begin = time.perf_counter()
    (loss,), residual = pair.forward(params, reads, consts)
    pair.backward(params, residual, (torch.ones_like(loss),), consts)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in {"tokens": 2048, "vocab": 32768, "hidden": 512, "runs": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    targets = torch.randint(args.vocab, (args.tokens,))
    weights = torch.ones(args.tokens)
    consts = {"targets": targets, "weights": weights, "normalizer": normalizer(weights.double().sum())}
    params, reads = {"weight": torch.randn(args.vocab, args.hidden) * 0.02}, (torch.randn(args.tokens, args.hidden),)
    pairs: dict[str, Callable[[], float]] = {
        "plain": lambda: seconds(recompute(cross_entropy(), "loss", eager), params, reads, consts),
        "chunked": lambda: seconds(chunked_pair(None, None, 0.0), params, reads, consts),
    }
    times: dict[str, list[float]] = {name: [] for name in pairs}
    for run in range(args.runs + 1):
        for name, measure in pairs.items():
            spent = measure()
            if run:  # the first warms up
                times[name].append(spent)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{args.tokens} tokens, vocabulary {args.vocab}, hidden {args.hidden}, float32, {torch.get_num_threads()} threads")
    print(f"plain {medians['plain']:.3f} s, chunked {medians['chunked']:.3f} s, ratio {medians['chunked'] / medians['plain']:.2f}")


if __name__ == "__main__":
    main()
