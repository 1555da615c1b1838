"""How full and how even batches are: balanced ones beside the usual ways, by ranks.

    python benchmarks/plan_batches.py --documents 20000 --max-tokens 8192 --ranks 8 64

Lengths are drawn from a log-normal (median 600 tokens, sigma 1, cut at the tokens of a pack, or at 8192), or read from a file with
--lengths (one integer a line; longer ones are split). Each row is a method and a number of ranks: how full packs are; the mean over full
steps of the slowest rank ÷ the mean rank, by full attention alone and by the FLOPs of a model; beside each what the slowest ranks of all
steps cost together ÷ the least that they cost in any plan (`least_time`; 1 cannot be beaten); how random the lengths in a step are
(1 is random order, 0 one length only); documents of the step that is not full; seconds of the processor. The balanced plans are made for
the cost in whose column they stand.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from xtf.data import (
    Cost,
    Plan,
    best_fit_packing,
    concatenate_and_cut,
    document_cost,
    greedy_packing,
    least_time,
    length_grouped,
    plan_batches,
)
from xtf.models import preset


def methods(model: Cost) -> dict[str, Callable[..., tuple[Plan, Plan]]]:
    """Plans by name, one for each of the two costs."""

    def both(plan: Plan) -> tuple[Plan, Plan]:
        return plan, plan

    return {
        "concatenate and cut": lambda lengths, **layout: both(concatenate_and_cut(lengths, **layout)),
        "greedy": lambda lengths, **layout: both(greedy_packing(lengths, too_long="split", **layout)),
        "best fit": lambda lengths, **layout: both(best_fit_packing(lengths, too_long="split", **layout)),
        "length grouped": lambda lengths, **layout: both(length_grouped(lengths, too_long="split", **layout)),
        "balanced": lambda lengths, **layout: (
            plan_batches(lengths, too_long="split", **layout),
            plan_batches(lengths, too_long="split", cost=model, **layout),
        ),
    }


def over_least(plan: Plan, cost: Cost) -> float:
    """All slowest ranks together ÷ the least that any plan of these pieces has."""
    pieces = plan.flat.lengths
    slowest = float(plan.totals(cost(pieces)).sum(axis=2).max(axis=1).sum())
    least = least_time(pieces, max_tokens=plan.max_tokens, data_ranks=plan.ranks, accumulate=plan.accumulate, cost=cost)
    return slowest / least


def main() -> None:
    """Plan, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--lengths", type=Path, help="a file with the tokens of each document, in place of drawn ones")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a preset of xtf.models")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.lengths:
        lengths = np.loadtxt(args.lengths, dtype=np.int64, ndmin=1)
    else:
        drawn = np.rint(600 * np.exp(np.random.default_rng(args.seed).standard_normal(args.documents)))
        lengths = np.clip(drawn, 1, min(8192, args.max_tokens)).astype(np.int64)
    model = document_cost(preset(args.model))
    print(f"{len(lengths)} documents, {int(lengths.sum())} tokens, packs of {args.max_tokens}, {args.accumulate} for each rank in a step")
    print(f"{'':20}  ranks  steps     fill  attention ÷ least  {args.model:>13} ÷ least  random  left  seconds")
    for ranks in args.ranks:
        for name, method in methods(model).items():
            layout: dict[str, Any] = {"max_tokens": args.max_tokens, "data_ranks": ranks, "accumulate": args.accumulate, "seed": args.seed}
            begin = time.process_time()
            plans = method(lengths, **layout)
            seconds = (time.process_time() - begin) / len({id(plan) for plan in plans})
            alone, whole = plans[0].balance(), plans[1].balance(model)
            fill, alike = min(alone.fill, whole.fill), min(alone.alike, whole.alike)
            print(
                f"{name:20}  {ranks:5}  {alone.steps:5}  {fill:.5f}  {alone.imbalance:9.4f}  {over_least(plans[0], Cost.attention()):6.4f}"
                f"  {whole.imbalance:13.4f}  {over_least(plans[1], model):6.4f}  {alike:6.3f}  {alone.remainder:4}  {seconds:7.2f}"
            )


if __name__ == "__main__":
    main()
