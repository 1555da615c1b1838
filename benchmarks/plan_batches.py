"""How full and how even batches are: balanced ones beside the usual ways, by ranks.

    python benchmarks/plan_batches.py --documents 20000 --max-tokens 8192 --ranks 8 64
    python benchmarks/plan_batches.py --cases equal two-valued heavy-tail
    python benchmarks/plan_batches.py --files real_inputs/text/*.jsonl --tokenizer real_inputs/smollm2-135m

Lengths are drawn: by default from a log-normal (median 600 tokens, sigma 1), all equal (600), of two values (8,000 and 100), or with a
heavy tail (Pareto, exponent 1.2, from 100 on), all cut at the tokens of a pack, or at 8192. Or they are read: with --lengths from a file
(one integer a line; longer ones are split), with --files those of the documents of each data file, repeated until they fill ten steps.

Each row is a method and a number of ranks: how full packs are; the mean over full steps of the slowest rank ÷ the mean rank, by full
attention alone and by the FLOPs of a model; beside each what the slowest ranks of all steps cost together ÷ the least that they cost in
any plan (`least_time`; 1 cannot be beaten); how random the lengths in a step are (1 is random order, 0 one length only); documents of
the step that is not full; seconds of the processor. The balanced plans are made for the cost in whose column they stand.
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
    default_cache_dir,
    document_cost,
    greedy_packing,
    least_time,
    length_grouped,
    plan_batches,
    tokenize_files,
)
from xtf.data.plan import Ints
from xtf.data.text import TOKENIZER_FILE
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


def drawn(case: str, count: int, seed: int, most: int) -> Ints:
    """Lengths by name."""
    random = np.random.default_rng(seed)
    found = {
        "log-normal": lambda: 600 * np.exp(random.standard_normal(count)),
        "equal": lambda: np.full(count, 600.0),
        "two-valued": lambda: random.choice(np.array([8000.0, 100.0]), count),
        "heavy-tail": lambda: 100 * (1 + random.pareto(1.2, count)),
    }[case]()
    return np.clip(np.rint(found), 1, most).astype(np.int64)


def of_files(files: list[Path], tokenizer: Path) -> dict[str, Ints]:
    """The lengths of the documents of each file."""
    found = tokenize_files(files, tokenizer, cache_dir=default_cache_dir())
    return {Path(part.path).name: found.documents.lengths[part.first : part.first + part.documents] for part in found.parts}


def main() -> None:
    """Plan, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument(
        "--cases", nargs="*", choices=["log-normal", "equal", "two-valued", "heavy-tail"], help="drawn; by default log-normal"
    )
    parser.add_argument("--lengths", type=Path, help="a file with the tokens of each document")
    parser.add_argument("--files", type=Path, nargs="*", default=[], help="data files")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER_FILE.parent, help="of --files")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a preset of xtf.models")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = args.cases if args.cases is not None else [] if args.lengths or args.files else ["log-normal"]
    most = min(8192, args.max_tokens)
    cases: dict[str, Ints] = {name: drawn(name, args.documents, args.seed, most) for name in names}
    if args.lengths:
        cases[args.lengths.name] = np.loadtxt(args.lengths, dtype=np.int64, ndmin=1)
    real = of_files(args.files, args.tokenizer) if args.files else {}
    model = document_cost(preset(args.model))
    for name, lengths in (cases | real).items():
        layout = f"packs of {args.max_tokens}, {args.accumulate} for each rank in a step"
        print(f"{name}: {len(lengths)} documents, {int(lengths.sum())} tokens, {layout}")
        print(f"{'':20}  ranks  steps     fill  attention ÷ least  {args.model:>13} ÷ least  random  left  seconds")
        for ranks in args.ranks:
            room = 10 * ranks * args.accumulate * args.max_tokens
            show(np.tile(lengths, -(-room // int(lengths.sum()))) if name in real else lengths, ranks, model, args)


def show(lengths: Ints, ranks: int, model: Cost, args: argparse.Namespace) -> None:
    """A row for each method."""
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
