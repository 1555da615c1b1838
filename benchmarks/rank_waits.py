"""How long real ranks wait at collectives, before and after balancing.

    python benchmarks/rank_waits.py real_inputs/text/c4.jsonl real_inputs/text/wiki.jsonl

Two processes that speak gloo train a small model on the documents of files, sharded. Each global step has the same documents both times.
Before: documents in the order of the file go in turn to the ranks, each of which packs its own, next fit. After: `balance_batch`. What is
measured on each rank is the time inside the waits of all collectives, of which what a collective itself takes is the same both
times; and the time of the steps. Ranks begin a step together. Printed are sums over steps, the slower way ÷ the faster, and what the cost
model says: the share of all ranks' time that is waited. Steps of both kinds take turns, so that other load meets both.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import xtf
from xtf.collectives import Axis, Call
from xtf.data import Cost, Documents, default_cache_dir, document_cost, measure_cost, plan_step, tokenize_files
from xtf.data.plan import Pieces
from xtf.data.text import TOKENIZER_FILE
from xtf.transforms import balance_batch, chunk_loss, shard
from xtf.transforms.balance_batch import rows

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 2048, "tie_word_embeddings": True,
}  # fmt: skip
"""Small and long: attention, whose cost grows with the square of a document, is most of it, as in large models at long sequences."""


class Clock:
    """Sums the time inside waits of an axis' collectives."""

    def __init__(self, axis: Axis) -> None:
        self.waited, launch = 0.0, axis.launch

        def timed(call: Call) -> Callable[[], Tensor]:
            finish = launch(call)

            def wait() -> Tensor:
                begin = time.perf_counter()
                out = finish()
                self.waited += time.perf_counter() - begin
                return out

            return wait

        axis.launch = timed


def in_turn(lengths: Any, max_tokens: int, ranks: int) -> list[tuple[Pieces, ...]]:
    """For each rank its documents in the order they come, next fit; all ranks get as many packs as the one with most."""
    packs: list[list[list[int]]] = [[[]] for _ in range(ranks)]
    for index, tokens in enumerate(lengths.tolist()):
        own = packs[index % ranks]
        if sum(int(lengths[i]) for i in own[-1]) + tokens > max_tokens:
            own.append([])
        own[-1].append(index)
    most = max(map(len, packs))
    columns = [[np.array(pack, np.int64) for pack in own + [[]] * (most - len(own))] for own in packs]
    return [tuple(Pieces(pack, np.zeros_like(pack), lengths[pack]) for pack in own) for own in columns]


def rank(index: int, args: argparse.Namespace) -> None:
    """What one process does."""
    os.environ |= {"RANK": str(index), "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port)}
    torch.set_num_threads(1)
    mesh = xtf.mesh(data=args.ranks)
    tokenized = tokenize_files(args.files, args.tokenizer, cache_dir=args.cache)
    documents = tokenized.documents.limited(args.max_tokens, long="split")
    documents = documents.select(np.flatnonzero(documents.lengths > 1))
    model = xtf.models.from_hf(CONFIG | {"max_position_embeddings": args.max_tokens})
    plain = xtf.compose(shard(mesh["data"]), chunk_loss())(xtf.train_step(model, xtf.optim.sgd(lr=1e-3)))
    params = plain.init(0).params
    cost: Cost = measure_cost(plain, params, max_tokens=args.max_tokens) if args.measure else document_cost(model)
    balanced = balance_batch(mesh["data"], max_tokens=args.max_tokens, cost=cost)(plain)
    clock, axis = Clock(mesh["data"]), mesh["data"]
    order = np.random.default_rng(args.seed).permutation(len(documents))
    waited, took, predicted = np.zeros((2, args.steps)), np.zeros((2, args.steps)), np.zeros((2, args.steps))
    begin = 0
    for step in range(-1, args.steps):  # the first is not counted
        chosen = order[np.arange(begin, begin + args.documents) % len(order)]
        begin += args.documents
        part: Documents = documents.select(chosen)
        before = in_turn(part.lengths, args.max_tokens, args.ranks)
        unbalanced = plain.replace("in_turn", split=lambda given, packs=before[index]: rows(given, packs))
        plan = plan_step(part.lengths, max_tokens=args.max_tokens, data_ranks=args.ranks, cost=cost)
        costs = [[sum(float(cost(p.lengths).sum()) for p in own) for own in before], plan.totals(cost(plan.flat.lengths))[0].sum(axis=1)]
        for way, run in enumerate((unbalanced, balanced)):
            axis.start_all_reduce(torch.zeros(1)).wait()
            clock.waited, start = 0.0, time.perf_counter()
            run.value_and_grad(params, part)
            if step >= 0:
                waited[way, step], took[way, step] = clock.waited, time.perf_counter() - start
                predicted[way, step] = 1 - float(np.mean(costs[way]) / np.max(costs[way]))
    sums = axis.start_all_reduce(torch.tensor(np.stack([waited.sum(1), took.sum(1)]))).wait() / args.ranks
    if index == 0:
        (w0, w1), (t0, t1) = sums.tolist()
        print(f"{args.steps} steps of {args.documents} documents, packs of {args.max_tokens} tokens, {args.ranks} ranks; cost {cost}")
        print(f"{'':10}  waited, s  share of the step  predicted  step, s")
        for name, w, t, p in (("in turn", w0, t0, predicted[0]), ("balanced", w1, t1, predicted[1])):
            print(f"{name:10}  {w:9.2f}  {w / t:17.1%}  {p.mean():9.1%}  {t / args.steps:7.3f}")
        print(f"waited before ÷ after: {w0 / w1:.2f}; time of a step before ÷ after: {t0 / t1:.2f}")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER_FILE.parent, help="of at most 2048 ids")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=32, help="of a global step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="fit the cost to this machine; by default FLOPs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    args = parser.parse_args()
    tokenize_files(args.files, args.tokenizer, cache_dir=args.cache)  # once, before the ranks want it
    spawn(rank, (args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
