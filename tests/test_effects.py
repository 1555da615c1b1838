"""What transforms are for, measured: memory from live storages, communication from the record and from what axes issue."""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import xtf.walk
from tests import laws, memory
from xtf import compile, optim, testing, tree
from xtf.collectives import Axis, Call, Work
from xtf.mesh import Mesh, simulate, split_batch
from xtf.model import Model
from xtf.models import from_hf
from xtf.record import Record, storage_bytes
from xtf.stage import Stage, Transfer
from xtf.step import TrainStep, compose, train_step
from xtf.transforms import accumulate, chunk_loss, precision, shard
from xtf.walk import Direction

EVEN = {  # sizes that 2 and 4 divide
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


def even(*, tied: bool = False, moe: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    config = EVEN | {"tie_word_embeddings": tied, "model_type": "llama"}
    if moe:
        config |= {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        config |= {"norm_topk_prob": True, "router_aux_loss_coef": 0.1}
    return from_hf(config, dtype=dtype, **options)


def batch(rows: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(61, (rows, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def recorded(mesh: Mesh, transform: testing.Transform, model: Model, *, evaluate: bool = False) -> Record:
    """The events of one evaluation with gradients (or without)."""
    step = transform(train_step(model, testing.default_optimizer()))
    record, params = Record(), step.init(0).params
    run = step.evaluate if evaluate else step.value_and_grad
    run(params, split_batch(batch(), mesh), record=record)
    return record


# Order of communication ----------------------------------------------------------------------------------------------------------


def check_prefetched(record: Record, walks: int = 1) -> None:
    """Every gather but the first of a walk is under way while the stage before it runs, and waited for only after."""
    started: dict[str, int] = {}
    last_run, first, others = -1, 0, 0
    for at, event in enumerate(record):
        if event.act == "run":
            last_run = at
        elif event.what == "gather" and event.act == "start":
            started[event.stage] = at
        elif event.what == "gather" and event.act == "wait":
            if (event.stage, event.direction, event.micro) == ("embed", "forward", 0):
                first += 1
            else:
                others += 1
                assert started[event.stage] < last_run, f"{event} ({event.direction}): nothing ran since it was started"
            del started[event.stage]
    assert first == walks and others > 4 and not started


MODELS = {"llama": even(), "tied": even(tied=True), "moe": even(moe=True), "moe, step": even(moe=True, aux="step")}


@pytest.mark.parametrize("head", [compose(), chunk_loss(5)], ids=["plain", "chunked"])
@pytest.mark.parametrize("name", MODELS)
def test_each_gather_is_started_before_the_stage_before_it_runs(name: str, head: testing.Transform) -> None:
    def trial(mesh: Mesh) -> Record:
        return recorded(mesh, compose(shard(mesh["data"]), accumulate(2), head), MODELS[name])

    for record in simulate(trial, data=2):
        check_prefetched(record, walks=2 if name == "moe, step" else 1)  # one that counts, one that trains
        assert record.select("wait", "gather", direction="backward")


def test_both_directions_by_name() -> None:
    """`start gather k+1` < `run k` < `wait gather k+1`, spelled out for the layers of a real model."""
    for record in simulate(lambda mesh: recorded(mesh, shard(mesh["data"]), MODELS["llama"]), data=2):
        stages = [f"layers.{i}.{kind}" for i in range(3) for kind in ("attention", "mlp")]
        orders: dict[Direction, list[str]] = {"forward": ["embed", *stages, "norm", "loss"], "backward": ["norm", *stages[::-1]]}
        for direction, names in orders.items():
            for this, following in itertools.pairwise(names):
                started = record.position("start", "gather", following, direction)
                ran = record.position("run", direction, this, direction)
                waited = record.position("wait", "gather", following, direction)
                assert started < ran < waited < record.position("run", direction, following, direction)


def test_the_check_of_the_order_fails_without_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    with_prefetch = xtf.walk.sessions
    late = lambda *args: [s._replace(start=s.first) for s in with_prefetch(*args)]  # noqa: E731
    monkeypatch.setattr(xtf.walk, "sessions", late)
    testing.check(lambda mesh: shard(mesh["data"]), model=laws.model("tiny"), data=2)  # values are right all the same
    for record in simulate(lambda mesh: recorded(mesh, shard(mesh["data"]), MODELS["llama"]), data=2):
        with pytest.raises(AssertionError, match=r"wait gather layers.0.attention \(forward\): nothing ran since it was started"):
            check_prefetched(record)


def test_each_reduction_goes_on_while_the_next_stage_runs_backward() -> None:
    for record in simulate(lambda mesh: recorded(mesh, compose(shard(mesh["data"]), accumulate(2)), MODELS["moe"]), data=2):
        events = list(record)
        starts = [i for i, e in enumerate(events) if (e.act, e.what) == ("start", "reduce")]
        waits = [i for i, e in enumerate(events) if (e.act, e.what) == ("wait", "reduce")]
        assert len(starts) == len(waits) == 2 * (1 + 3 * 3 + 1 + 1)
        for i, (started, waited) in enumerate(zip(starts, waits, strict=True)):
            assert started < waited and events[started].stage == events[waited].stage
            if i + 1 < len(starts):
                assert any(e.act == "run" for e in events[started:waited])
                assert waited < starts[i + 1]  # one at a time


# Memory --------------------------------------------------------------------------------------------------------------------------


class Gathered:
    """Weak references to all that gathers bring: how many stages, and how many bytes, are alive or on their way at once."""

    def __init__(self) -> None:
        self.coming: dict[int, tuple[str, int]] = {}
        self.whole: list[tuple[str, list[weakref.ref[Tensor]]]] = []
        self.most_stages = self.most_bytes = self.count = 0

    def watch(self, step: TrainStep) -> TrainStep:
        watched = dataclasses.replace(step)
        watched.__dict__["program"] = tuple(self._wrap(s) if isinstance(s, Stage) and s.gather else s for s in step.program)
        return watched

    def _wrap(self, stage: Stage) -> Stage:
        gather = stage.gather
        assert gather is not None

        def start(local: Any) -> Any:
            self.count += 1
            self.coming[number := self.count] = (stage.name, sum(leaf.nbytes for leaf in local.values()) * 2)
            handle = (number, {leaf.data_ptr() for leaf in local.values()}, gather.start(local))
            self._measure()
            return handle

        def wait(handle: Any) -> Any:
            number, own, inner = handle
            whole = gather.wait(inner)
            del self.coming[number]
            self.whole.append((stage.name, [weakref.ref(leaf) for leaf in whole.values() if leaf.data_ptr() not in own]))
            self._measure()
            return whole

        return dataclasses.replace(stage, gather=Transfer(start, wait, gather.stream))

    def alive(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for name, references in self.whole:
            leaves = [leaf for leaf in (reference() for reference in references) if leaf is not None]
            found += [(name, storage_bytes(leaves))] if leaves else []
        return found

    def _measure(self) -> None:
        held = [*self.coming.values(), *self.alive()]
        self.most_stages = max(self.most_stages, len(held))
        self.most_bytes = max(self.most_bytes, sum(size for _, size in held))


@pytest.mark.parametrize("regather", [True, False])
@pytest.mark.parametrize("head", [compose(), chunk_loss(5)], ids=["plain", "chunked"])
@pytest.mark.parametrize("name", ["llama", "tied", "moe"])
def test_at_most_two_stages_are_gathered_at_once(name: str, head: testing.Transform, regather: bool) -> None:
    model = MODELS[name]

    def trial(mesh: Mesh) -> tuple[Gathered, int]:
        watch = Gathered()
        step = compose(watch.watch, shard(mesh["data"], regather=regather), accumulate(2), head)(
            train_step(model, testing.default_optimizer())
        )
        step.value_and_grad(step.init(0).params, split_batch(batch(), mesh))
        stages = [sum(step.specs[path].numel * 4 for path in s.params.values()) for s in step.program if isinstance(s, Stage)]
        return watch, max(a + b for a, b in itertools.pairwise(stages))

    for watch, two in simulate(trial, data=2):
        if regather:
            assert watch.most_stages == 2 and watch.most_bytes <= two
        else:  # the same measure sees what is kept
            assert watch.most_stages >= 7
        assert not watch.alive() and not watch.coming


def test_the_record_agrees_about_what_is_gathered() -> None:
    for record in simulate(lambda mesh: recorded(mesh, compose(shard(mesh["data"]), accumulate(2)), MODELS["moe"]), data=2):
        held = most = 0
        for event in record:
            if event.what == "gather":
                held += {"start": 1, "wait": 0, "free": -1}[event.act]
                most = max(most, held)
        assert most == 2 and held == 0
        came = sum(e.bytes for e in record.select("wait", "gather"))
        assert came == sum(e.bytes for e in record.select("free", "gather")) > 0


@pytest.mark.parametrize("sizes", [{"data": 5}, {"data": 2, "expert": 3}, {"data": 3, "replicate": 2}], ids=str)
@pytest.mark.parametrize("model", ["qwen3_moe", "tiny"])
def test_each_rank_keeps_its_part_of_parameters_and_moments(model: str, sizes: dict[str, int]) -> None:
    """1/n of each leaf but for the rounding of its rows, in storages of that size, after a step as at the start."""
    whole = tree.items(laws.model(model).specs)
    n = math.prod(sizes.values()) // sizes.get("replicate", 1)

    def trial(mesh: Mesh) -> list[dict[str, int]]:
        step = laws.case(layout=sizes).transform(mesh)(train_step(laws.model(model), testing.default_optimizer()))
        state, seen = step.init(0), list[dict[str, int]]()
        for _ in range(2):
            moments = state.opt[1]
            for held in (state.params, moments.mean, moments.square):
                seen.append({path: leaf.untyped_storage().nbytes() for path, leaf in tree.items(held).items()})
            assert storage_bytes(state.opt) <= 2 * storage_bytes(state.params) + 1000
            state, _ = step(state, split_batch(laws.batch("documents"), mesh))
        return seen

    ranks = simulate(trial, **sizes)
    for path, spec in whole.items():
        for kind in range(6):
            held = [rank[kind][path] // 8 for rank in ranks]
            assert sum(held) == spec.numel * len(ranks) // n
            assert max(held) - min(held) <= max(spec.numel // rows for rows in spec.shape), path  # one row


def _deep() -> Model:
    return from_hf(
        EVEN | {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 12}, dtype=torch.float32
    )


@pytest.mark.parametrize("n", [2, 4])
def test_peak_memory_of_a_rank(n: int) -> None:
    """Live bytes of a walk over 12 layers: this rank's part of the gradients, and three stages' worth of parameters (two that are
    gathered, and the gradient of one, or the buffer that one travels in); not the model."""
    model = _deep()
    whole, stage = nbytes(model), 3 * 128 * 256 * 4 + 128 * 4

    def peak(mesh: Mesh, transform: testing.Transform) -> tuple[int, int, int]:
        step = compose(transform, chunk_loss(4))(train_step(model, optim.sgd(lr=1e-3)))
        params = step.init(0).params
        with memory.Live() as live:
            _, grads = step.value_and_grad(params, split_batch(batch(), mesh))
        return live.most, live.now, storage_bytes(grads)

    for most, now, kept in simulate(lambda mesh: peak(mesh, shard(mesh["data"])), data=n):
        assert kept == whole // n and kept <= now < kept + 100
        assert most < kept + 3 * stage < 0.8 * whole
    for most, _, kept in simulate(lambda mesh: peak(mesh, shard(mesh["data"], regather=False)), data=n):
        assert kept == whole // n and most > whole
    for most, _, kept in simulate(lambda mesh: peak(mesh, shard(replicate=mesh["data"])), data=n):
        assert kept == whole and most > whole


def test_the_measures_see_what_is_alive_at_once() -> None:
    def fn() -> Tensor:
        a = torch.zeros(1000, dtype=torch.float64)
        for _ in range(5):
            b = a + 1
            del b
        return a

    assert 16_000 <= memory.peak_bytes(fn) < 17_000
    with memory.Live() as live:
        kept = fn()
        view = kept[10:].mul_(2)
    assert (live.most, live.now) == (16_000, 8_000) and len(view) == 990
    del kept, view
    assert live.now == 0


@pytest.mark.parametrize("donate", [True, False])
def test_a_donating_step_holds_no_second_copy(donate: bool) -> None:
    model = _deep()
    step = compile(chunk_loss(4)(train_step(model, optim.adamw(lr=1e-3))), backend="eager", donate=donate)
    state, size = step.init(0), model.param_count()[0] * 4
    state, _ = step(state, batch())
    peak = memory.peak_bytes(lambda: step(state, batch()))
    if donate:
        assert size < peak < 1.35 * size  # the gradients, and what a stage needs
    else:
        assert peak > 3.5 * size  # and new parameters and moments, which this measure sees


# Bytes ---------------------------------------------------------------------------------------------------------------------------


def nbytes(model: Model, *, only: Sequence[str] = ()) -> int:
    """Bytes of all parameters in float32, or of the leaves that ``only`` names."""
    return sum(spec.numel * 4 for path, spec in tree.items(model.specs).items() if not only or path in only)


@pytest.mark.parametrize(
    ("moe", "tied", "head", "n"),
    [
        (False, False, compose(), 2),
        (False, True, chunk_loss(5), 2),
        (True, False, chunk_loss(5), 4),
        (True, True, compose(), 2),
        (False, False, chunk_loss(5), 4),
        (False, True, compose(), 4),
    ],
)
def test_bytes_per_micro_batch(moe: bool, tied: bool, head: testing.Transform, n: int) -> None:
    """(2 all-gathers + 1 reduce-scatter) × (n - 1)/n × bytes of parameters; embedding and head are gathered once each."""
    model = even(tied=tied, moe=moe)
    every, once = nbytes(model), nbytes(model, only=("embed.weight", "head.weight"))
    as_embedding_and_head = 2 * once if tied else once
    gathered, reduced = (2 * (every - once) + as_embedding_and_head) * (n - 1) // n, every * (n - 1) // n

    for micros in (1, 3):
        for record in simulate(lambda mesh: recorded(mesh, compose(shard(mesh["data"]), accumulate(micros), head), model), data=n):  # noqa: B023
            assert record.bytes_sent("gather") == micros * gathered
            assert record.bytes_sent("reduce") == micros * reduced
    for record in simulate(lambda mesh: recorded(mesh, compose(shard(mesh["data"], regather=False), head), model), data=n):
        assert record.bytes_sent("gather") == (every + (once if tied else 0)) * (n - 1) // n
        assert record.bytes_sent("reduce") == reduced
    for record in simulate(lambda mesh: recorded(mesh, compose(shard(mesh["data"]), head), model, evaluate=True), data=n):
        assert record.bytes_sent("gather") == (every + (once if tied else 0)) * (n - 1) // n
        assert record.bytes_sent("reduce") == 0


def test_bytes_of_replicas() -> None:
    """Plain data parallelism: one all-reduce of every gradient. HSDP: an all-reduce of this rank's part besides."""
    model = MODELS["llama"]
    every = nbytes(model)
    for record in simulate(lambda mesh: recorded(mesh, shard(replicate=mesh["data"]), model), data=4):
        assert record.bytes_sent("gather") == 0
        assert record.bytes_sent("reduce") == 2 * every * 3 // 4
    for record in simulate(lambda mesh: recorded(mesh, shard(mesh["data"], replicate=mesh["copies"]), model), data=2, copies=2):
        assert record.bytes_sent("reduce") == every // 2 + 2 * (every // 2) // 2


def test_two_axes_gather_as_one() -> None:
    model = MODELS["moe"]
    (one, *_), (two, *_) = (
        simulate(lambda mesh: recorded(mesh, shard(*(mesh[name] for name in mesh)), model), **sizes)
        for sizes in ({"data": 4}, {"data": 2, "expert": 2})
    )
    assert [(str(e), e.bytes) for e in one] == [(str(e), e.bytes) for e in two]


@pytest.mark.parametrize("micros", [1, 2])
def test_statistics_over_several_micro_batches_cost_one_more_forward(micros: int) -> None:
    """One micro-batch is the whole step: nothing more is run."""
    micro, whole = (
        simulate(lambda mesh, name=name: recorded(mesh, compose(shard(mesh["data"]), accumulate(micros)), MODELS[name]), data=2)
        for name in ("moe", "moe, step")
    )
    for a, b in zip(micro, whole, strict=True):
        assert b.bytes_sent("gather") - a.bytes_sent("gather") == (nbytes(MODELS["moe"]) // 2 * micros if micros > 1 else 0)
        assert b.bytes_sent("reduce") == a.bytes_sent("reduce")


TRANSFORMS: dict[str, Callable[[Mesh], testing.Transform]] = {
    "shard": lambda mesh: shard(mesh["data"], mesh["copies"]),
    "hsdp": lambda mesh: shard(mesh["data"], replicate=mesh["copies"]),
    "replicas": lambda mesh: compose(shard(replicate=mesh.join("data", "copies")), accumulate(2)),
    "mixed": lambda mesh: compose(shard(mesh["data"], replicate=mesh["copies"]), chunk_loss(5), precision(compute=torch.bfloat16)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_record_misses_nothing_that_is_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are those that axes issue, on sizes that nothing divides too; and the step's own sums are few and small."""
    sent: list[tuple[int, str, int]] = []
    issue = Axis._issue  # pyright: ignore[reportPrivateUsage]

    def counted(self: Axis, call: Call, bytes: int) -> Work:
        work = issue(self, call, bytes)
        sent.append((self.mesh.rank, call.label, work.bytes))
        return work

    monkeypatch.setattr(Axis, "_issue", counted)
    for model in (MODELS["moe"], laws.model("qwen3_moe")):
        sent.clear()
        records = simulate(lambda mesh: recorded(mesh, TRANSFORMS[name](mesh), model), data=3, copies=2)  # noqa: B023
        for rank, record in enumerate(records):
            assert record.bytes_sent() == sum(size for at, _, size in sent if at == rank) > 0
            scalars = record.select("start", "scalars")
            assert len(scalars) <= 2 + 2  # weights, loss, and statistics of each micro-batch
            assert sum(e.bytes for e in scalars) < 2000


def test_one_rank_sends_nothing() -> None:
    for record in simulate(lambda mesh: recorded(mesh, shard(mesh["data"]), MODELS["moe"]), data=1):
        assert record.bytes_sent() == 0 and not record.select("start", "gather")
