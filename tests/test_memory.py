"""The timeline of a step's memory: it equals what a step that runs is measured to take, on one rank and on many, and answers what fits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import xtf
from tests.memory import Live, peak_bytes
from xtf import tree
from xtf.collectives.planned import even, uneven
from xtf.dispatch import DISPATCHERS, Moves
from xtf.host import HostMemory
from xtf.memory import KINDS, Timeline, fit_tokens, measure, rehearse
from xtf.memory.measure import Meter, read_between
from xtf.mesh import Mesh, plan_mesh, simulate
from xtf.models import from_hf, preset
from xtf.record import Event
from xtf.step import TrainStep
from xtf.transforms import accumulate, chunk_loss, expert_parallel, precision, shard, swap_activations, swap_optimizer

SEQ = 256
MOE = preset("tiny-moe")
Make = Callable[[Mesh], TrainStep]


def llama(layers: int) -> xtf.Model:
    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"intermediate_size": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": True}
    return from_hf({"model_type": "llama", "num_hidden_layers": layers, **sizes})


class Aside(HostMemory):
    """Host buffers of numpy's: neither the profiler nor a mode sees them, what is left is the device's."""

    def allocate(self, bytes: int, device: torch.device) -> Tensor:
        return torch.from_numpy(np.empty(bytes, dtype=np.uint8))


def built(transform: Callable[[TrainStep], TrainStep], *, donate: bool = False, model: xtf.Model = MOE) -> TrainStep:
    return xtf.compile(transform(xtf.train_step(model, xtf.optim.adamw(lr=1e-3))), backend="eager", donate=donate)


def batch(rows: int, vocab: int = MOE.vocab) -> dict[str, Tensor]:
    ids = torch.randint(vocab, (rows, SEQ), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def state_bytes(step: TrainStep, state: xtf.State) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves((state.params, state.opt)))


def evenly(name: str) -> Any:
    """A dispatcher that sends tokens where `even` says, whatever the router chose: what planned ranks take for granted."""

    def dispatcher(axis: Any, experts: int, label: str) -> Moves:
        moves = DISPATCHERS[name](axis, experts, label)

        def start(reads: tuple[Tensor, ...]) -> Any:
            h, weights, indices = reads
            chosen = indices if indices.is_meta else even(indices.shape[0], indices.shape[1], experts)
            return moves.dispatch.start((h, weights, chosen))

        return moves._replace(dispatch=moves.dispatch._replace(start=start))

    return dispatcher


def close(found: int, real: int, rel: float = 0.05) -> bool:
    return abs(found - real) <= rel * real


# One rank: the profiler sees every allocation, those inside operations too -------------------------------------------------------


@pytest.mark.parametrize(
    "transform",
    [
        xtf.compose(),
        chunk_loss(tokens=64),
        swap_activations(host=Aside()),
        xtf.compose(accumulate(2), precision(compute=torch.bfloat16)),
    ],
    ids=["plain", "chunk_loss", "swap_activations", "accumulate"],
)
@pytest.mark.parametrize("donate", [False, True])
def test_the_peak_is_what_the_profiler_measures(transform: Any, donate: bool) -> None:
    step = built(transform, donate=donate)
    given = batch(2)
    micro = step.split(given)
    line = rehearse(step, micro[0]["input_ids"].numel(), micro_batches=len(micro))
    state = step.init(0)
    measured = state_bytes(step, state) + peak_bytes(lambda: step(state, given))
    assert close(line.peak.peak, measured), (line.peak.peak, measured)


@pytest.mark.parametrize(
    "transform", [xtf.compose(), chunk_loss(tokens=64), swap_activations(host=Aside())], ids=["plain", "chunk_loss", "swap_activations"]
)
def test_every_kind_is_what_a_step_holds(transform: Any) -> None:
    step = built(transform)
    planned = rehearse(step, SEQ)
    real, state = measure(step, step.init(0), batch(1))
    assert [str(m.event) for m in planned.moments] == [str(m.event) for m in real.moments]
    assert int(state.step) == 1 and real.measured and not planned.measured
    for a, b in zip(planned.moments, real.moments, strict=True):
        for kind in KINDS:
            assert abs(a.live[kind] - b.live[kind]) <= 0.01 * b.live[kind] + 2048, (a.event, kind)
            assert abs(a.most[kind] - b.most[kind]) <= 0.01 * b.most[kind] + 2048, (a.event, kind)
    assert planned.most["parameters"] == 2 * 4 * MOE.param_count()[0]  # nothing is donated
    assert planned.most["gradients"] == 4 * MOE.param_count()[0]


def test_host_buffers_are_no_device_memory() -> None:
    host = HostMemory()
    step = built(swap_activations(host=host))
    first, again = rehearse(step, SEQ), rehearse(step, SEQ)
    assert first.most["host"] == again.most["host"] > 0
    assert host.held == host.out == 0  # the pool that steps use is not touched
    step(step.init(0), batch(1))
    assert close(first.most["host"], host.held, 0.01)
    limited = built(swap_activations(host=HostMemory(first.most["host"] // 2)))
    line = rehearse(limited, SEQ)  # nothing warns: nothing ran
    assert 0 < line.most["host"] <= first.most["host"] // 2
    assert line.most["activations"] > first.most["activations"]


def test_later_micro_batches_add_constants_only() -> None:
    """Their gradients are added to those of the first, and nothing of them is kept or copied."""
    step = built(xtf.compose(), donate=True)
    peaks = [rehearse(step, 128, micro_batches=n).peak.peak for n in (2, 3, 4, 5)]
    first, *rest = [after - before for before, after in pairwise(peaks)]
    assert rest == [first, first] and 0 < first < 40_000


# Many ranks: threads, each of which a mode watches; the planned rank stands for all ---------------------------------------------


MANY: dict[str, Make] = {
    "shard": lambda mesh: built(shard(mesh["data"]), donate=True),
    "experts": lambda mesh: built(expert_parallel(mesh["data"], dispatcher=evenly("deduplicated")), donate=True),
    "all_to_all": lambda mesh: built(expert_parallel(mesh["data"], dispatcher=evenly("all_to_all")), donate=True),
    "all_gather": lambda mesh: built(expert_parallel(mesh["data"], dispatcher=evenly("all_gather")), donate=True),
    "everything": lambda mesh: built(
        xtf.compose(
            shard(mesh["data"]),
            expert_parallel(mesh["data"], overlap=2, dispatcher=evenly("deduplicated")),
            chunk_loss(tokens=64),
            swap_activations(host=Aside()),
        ),
        donate=True,
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_a_planned_rank_takes_what_a_simulated_one_does(name: str) -> None:
    make = MANY[name]

    def on_rank(mesh: Mesh) -> tuple[int, Timeline]:
        step = make(mesh)
        state, part = step.init(0), xtf.split_batch(batch(4), mesh)
        before = state_bytes(step, state)
        with Live() as live:
            step(state, part)
        return before + live.most, measure(step, step.init(0), part)[0]

    for rank, (peak, real) in enumerate(simulate(on_rank, data=4)):
        line = rehearse(make(plan_mesh(data=4, rank=rank)), SEQ)
        assert close(line.peak.peak, peak) and close(line.peak.peak, real.peak.peak), (line.peak.peak, peak, real.peak.peak)
        assert [str(m.event) for m in line.moments] == [str(m.event) for m in real.moments]
        for kind in KINDS:
            assert close(line.most[kind], real.most[kind]) or real.most[kind] < 200_000, kind


def test_any_mesh_plans_for_itself() -> None:
    def on_rank(mesh: Mesh) -> int:
        # one rank asks, and none has to answer
        return rehearse(MANY["everything"](mesh), SEQ).peak.peak if mesh.rank == 0 else 0

    assert simulate(on_rank, data=4)[0] == rehearse(MANY["everything"](plan_mesh(data=4)), SEQ).peak.peak


def test_a_popular_expert_costs_its_rank() -> None:
    def peak(mesh: Mesh) -> int:
        return rehearse(built(expert_parallel(mesh["expert"]), donate=True), 2048).peak.peak

    experts = 8
    crowded = uneven([20.0, *[1.0] * (experts - 1)])
    middle, busy = peak(plan_mesh(expert=4)), peak(plan_mesh(expert=4, routing=crowded))
    idle = peak(plan_mesh(expert=4, routing=crowded, rank=3))
    assert idle < middle < busy


def test_sixty_four_ranks_on_one() -> None:
    mesh = plan_mesh(data=8, expert=8)
    step = built(xtf.compose(shard(mesh["data"], mesh["expert"]), expert_parallel(mesh["expert"], overlap=2), chunk_loss()), donate=True)
    line = rehearse(step, 1024)
    assert line.moments[0].live["parameters"] < 4 * MOE.param_count()[0] / 60
    with pytest.raises(ValueError, match="planned, they hold no values"):
        step(step.init(0), batch(1))


# Depth ---------------------------------------------------------------------------------------------------------------------------


def test_swapped_activations_do_not_grow_with_depth() -> None:
    def activations(layers: int, *transforms: Any) -> int:
        return rehearse(built(xtf.compose(*transforms), model=llama(layers)), 1024).most["activations"]

    swapped = [activations(n, swap_activations()) for n in (4, 16, 64)]
    assert max(swapped) < 1.05 * min(swapped)
    kept = {n: activations(n) for n in (4, 16, 64)}
    each = (kept[16] - kept[4]) / 12
    assert each > 1024 * 64 * 4  # at least what a block reads
    assert close(kept[64] - kept[16], round(48 * each), 0.01)


# What fits ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("transform", [xtf.compose(), chunk_loss(tokens=100)], ids=["plain", "chunk_loss"])
def test_what_fits_is_exact(multiple: int, transform: Any) -> None:
    step = built(transform, donate=True, model=llama(2))
    calls: list[int] = []
    for budget in (4_000_000, 10_000_000):
        tokens = fit_tokens(step, budget, multiple=multiple)
        calls.append(tokens)
        assert tokens % multiple == 0
        assert rehearse(step, tokens).peak.peak <= budget < rehearse(step, tokens + multiple).peak.peak
    assert calls[0] < calls[1]
    assert fit_tokens(step, 10_000_000, multiple=multiple, micro_batches=2) < calls[1]


def test_few_rehearsals_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step, asked = built(xtf.compose(), donate=True, model=llama(2)), list[int]()

    def counted(step: TrainStep, tokens: int, *, micro_batches: int = 1) -> Timeline:
        asked.append(tokens)
        return rehearse(step, tokens, micro_batches=micro_batches)

    monkeypatch.setattr("xtf.memory.fit.rehearse", counted)
    fit_tokens(step, 100_000_000, multiple=1)
    assert len(asked) < 12, asked
    asked.clear()
    assert fit_tokens(step, 10**12, multiple=64, most=1000) == 960
    assert max(asked) <= 960


def test_what_does_not_fit_says_why() -> None:
    step = built(xtf.compose(), model=llama(2))
    with pytest.raises(ValueError, match=r"64 tokens does not fit 100\.0 kB: .*optimizer .* MB, .*order: swap_optimizer, .*, donate, take"):
        fit_tokens(step, 100_000)
    with pytest.raises(ValueError, match="does not fit 2 bytes: ") as error:
        fit_tokens(built(swap_optimizer(), donate=True, model=llama(2)), 2)
    assert "donate" not in str(error.value) and "swap_optimizer" not in str(error.value)
    for wrong in ({"bytes": 0}, {"bytes": 1, "multiple": 0}, {"bytes": 1, "micro_batches": 0}, {"bytes": 1, "most": 1}):
        with pytest.raises(ValueError, match="fit_tokens: "):
            fit_tokens(step, **wrong)


# The rest -----------------------------------------------------------------------------------------------------------------------


def test_a_timeline_is_written_as_json() -> None:
    line = rehearse(built(xtf.compose()), SEQ)
    told = json.loads(json.dumps(line.json()))
    assert told["peak"]["bytes"] == line.peak.peak == sum(told["peak"]["by_kind"].values())
    assert told["moments"][told["peak"]["event"]]["most"] == told["peak"]["by_kind"]
    assert len(told["moments"]) == len(line.moments) and told["tokens"] == SEQ


def test_a_meter_is_read_between_events() -> None:
    """What an accelerator's allocator would say, by one that is made up: 1000 bytes more at each reading."""
    readings = iter(range(10**9, 10**12, 1000))
    step = built(xtf.compose(), model=llama(1))
    resets: list[int] = []
    meter = Meter(lambda: next(readings), lambda: next(readings), lambda: resets.append(1))
    stages = {node.name: getattr(node, "kind", "") for node in step.program}
    moments, state = read_between(step, step.init(0), batch(1, 256), meter, stages)
    assert int(state.step) == 1 and len(resets) == len(moments) + 1
    assert moments[-1].event == Event("run", "update", "parameters", "update")
    for moment in moments:
        assert sum(moment.live.values()) >= 10**9 and moment.peak >= sum(moment.live.values())
    loss = next(m for m in moments if m.kind == "loss")
    assert loss.live["logits"] > 10**8  # nothing else of this device is held


def test_bad_questions() -> None:
    step = built(xtf.compose())
    with pytest.raises(ValueError, match="tokens is 0"):
        rehearse(step, 0)
    with pytest.raises(ValueError, match="must be 1 or more"):
        plan_mesh(data=0)
    with pytest.raises(ValueError, match="rank must be 0 to 3"):
        plan_mesh(data=4, rank=4)
    with pytest.raises(ValueError, match="positive weight"):
        uneven([1.0, 0.0])
    with pytest.raises(ValueError, match="2 weights, the layer 4 experts"):
        uneven([1.0, 2.0])(3, 1, 4)

    def nosy(axis: Any, experts: int, label: str) -> Moves:
        moves = DISPATCHERS["all_to_all"](axis, experts, label)
        return moves._replace(dispatch=moves.dispatch._replace(start=lambda reads: reads[2].tolist()))

    with pytest.raises(ValueError, match="cannot be rehearsed"):
        rehearse(built(expert_parallel(plan_mesh(expert=2)["expert"], dispatcher=nosy)), SEQ)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: rehearse(built(xtf.compose()), 1.5), r"tokens is 1\.5, expected a whole number from 1 to"),  # pyright: ignore
        (lambda: rehearse(built(xtf.compose()), "x"), "tokens is 'x', expected a whole"),  # pyright: ignore
        (lambda: rehearse(built(xtf.compose()), None), "tokens is None, expected a whole"),  # pyright: ignore
        (lambda: rehearse(built(xtf.compose()), math.nan), "tokens is nan, expected a whole"),  # pyright: ignore
        (lambda: rehearse(built(xtf.compose()), 10**12), "tokens is 1000000000000, expected a whole number from 1 to 67,108,864"),
        (lambda: rehearse(built(xtf.compose()), 8, micro_batches=10**12), "micro_batches is 1000000000000"),
        (lambda: rehearse(MOE, 8), r"rehearse takes a step, got .*: make one by xtf\.train_step"),  # pyright: ignore
        (lambda: fit_tokens(MOE, 8), r"fit_tokens takes a step, got .*: make one by xtf\.train_step"),  # pyright: ignore
        (lambda: fit_tokens(built(xtf.compose()), "2GB"), "bytes is '2GB', expected a number of at least 1"),  # pyright: ignore
        (lambda: fit_tokens(built(xtf.compose()), None), "bytes is None, expected"),  # pyright: ignore
        (lambda: fit_tokens(built(xtf.compose()), math.inf), "bytes is inf, expected"),  # pyright: ignore
        (lambda: fit_tokens(built(xtf.compose()), math.nan), "bytes is nan, expected"),  # pyright: ignore
        (lambda: fit_tokens(built(xtf.compose()), 10**9, multiple=1.5), r"multiple is 1\.5, expected a whole"),  # pyright: ignore
        (lambda: plan_mesh(data="2"), "'data' must be 1 or more, got '2': give a whole number"),  # pyright: ignore
        (lambda: plan_mesh(data=1.5), r"'data' must be 1 or more, got 1\.5"),  # pyright: ignore
        (lambda: plan_mesh(data=2, rank="a"), "rank must be 0 to 1, got 'a'"),  # pyright: ignore
        (lambda: plan_mesh(expert=4, routing=5), "routing is 5, expected"),  # pyright: ignore
        (lambda: plan_mesh(expert=4, routing="even"), "routing is 'even', expected"),  # pyright: ignore
        (lambda: plan_mesh(data=1_000_000), "1,000,000 ranks, expected 16,384 at most"),
        (lambda: xtf.simulate(lambda m: m, data="a"), "'data' must be 1 or more, got 'a'"),  # pyright: ignore
        (lambda: xtf.simulate(lambda m: m, data=1.5), r"'data' must be 1 or more, got 1\.5"),  # pyright: ignore
        (lambda: xtf.mesh(data=1.5), r"'data' must be 1 or more, .* got 1\.5"),  # pyright: ignore
        (lambda: uneven(["a"]), r"uneven\(\['a'\]\): expected a positive weight"),  # pyright: ignore
        (lambda: uneven(None), r"uneven\(None\): expected a positive weight"),  # pyright: ignore
        (lambda: uneven([math.nan] * 8), "expected a positive weight"),
        (lambda: uneven([math.inf, 1.0]), "expected a positive weight"),
    ],
)
def test_bad_input_is_one_value_error(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()


def test_tables_that_do_not_fit_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000000000 bytes")

    monkeypatch.setattr("xtf.memory.rehearsal.run", full)
    with pytest.raises(ValueError, match="tokens is 4,096, whose positions and tables do not fit this machine's memory"):
        rehearse(built(xtf.compose()), 4096)


def test_even_routing_is_even() -> None:
    chosen = even(4000, 2, 8)
    counts = torch.bincount(chosen.flatten(), minlength=8)
    assert chosen.shape == (4000, 2) and counts.min() > 900 and counts.max() < 1100
    assert bool((chosen[:, 0] != chosen[:, 1]).all()) and torch.equal(chosen, even(4000, 2, 8))
    assert even(0, 2, 8).shape == (0, 2)
