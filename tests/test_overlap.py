"""Parts that take turns: where micro-batches are cut, in what order parts run, and what that hides."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import laws
from xtf import testing
from xtf.batch import PER_DOCUMENT, pack
from xtf.mesh import Mesh, simulate
from xtf.models import deepseek_v3, from_hf, preset
from xtf.overlap import Cut, cut_documents, near_ends, part_constants
from xtf.record import Record
from xtf.schedule import Schedule, Slot, schedule, timeline
from xtf.stage import Exchange
from xtf.step import TrainStep, compose, train_step
from xtf.transforms import chunk_loss, expert_parallel, shard

# Where ---------------------------------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), parts=st.integers(1, 6), data=st.data())
@settings(deadline=None, max_examples=200)
def test_cuts_are_near_even_and_part_documents_only_where_they_may(lengths: list[int], parts: int, data: Any) -> None:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    if parts > ends[-1]:
        with pytest.raises(ValueError, match=f"{ends[-1]} tokens cannot run in {parts} parts"):
            near_ends(ends, parts)
        return
    apart = data.draw(st.lists(st.booleans(), min_size=parts - 1, max_size=parts - 1))
    bounds, layout = cut_documents(ends, parts, apart)
    assert bounds[0] == 0 and bounds[-1] == ends[-1] and len(bounds) == parts + 1 and sum(layout) == parts
    assert all(a <= b for a, b in pairwise(bounds))
    assert all(abs(bound - ends[-1] * i / parts) <= max(ends[-1] / parts / 4, 1) for i, bound in enumerate(bounds))
    first = 0
    for size in layout[:-1]:
        first += size
        assert bounds[first] in ends and apart[first - 1]  # groups share no document


def test_constants_of_parts() -> None:
    ids = torch.arange(10)[None]
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]])
    consts = pack({"input_ids": ids, "labels": ids, "document_ids": documents})
    apart = part_constants(consts, Cut((0, 4, 10), (1, 1)))
    assert apart["input_ids#0"].tolist() == [0, 1, 2, 3] and apart["input_ids#1"].tolist() == [4, 5, 6, 7, 8, 9]
    assert apart["cu_seqlens#0"].tolist() == [0, 4] and apart["cu_seqlens#1"].tolist() == [0, 3, 6]
    assert apart["cu_seqlens#1"].dtype == torch.int32
    together = part_constants(consts, Cut((0, 5, 10), (2,)))
    assert together["cu_seqlens#0+1"].tolist() == [0, 4, 7, 10] and together["input_ids#0+1"].tolist() == list(range(10))
    assert together["input_ids#1"].tolist() == [5, 6, 7, 8, 9]
    three = {**consts, "document_tokens": torch.tensor([4, 3, 3])}
    assert part_constants(three, Cut((0, 4, 10), (1, 1)))["document_tokens#1"].tolist() == [4, 3, 3]
    each = pack({"input_ids": ids[:, :3], "document_ids": torch.tensor([[0, 1, 2]])}) | {"document_tokens": torch.ones(3)}
    assert part_constants(each, Cut((0, 1, 3), (1, 1)))["document_tokens#0"].shape == (3,)  # as many documents as tokens
    assert "document_tokens" in PER_DOCUMENT


@pytest.mark.parametrize("documents", [1, 2, 65])
@pytest.mark.parametrize("overlap", [2, 3])
def test_laws_with_documents_of_any_length(documents: int, overlap: int) -> None:
    """One document; ones that end near a cut; every token its own."""
    whole = testing.random_batch(61, rows=2, seq=65)
    batch = whole | {"document_ids": (torch.arange(65) * documents // 65).expand(2, 65)}
    testing.check(
        lambda mesh: compose(shard(mesh["expert"]), expert_parallel(mesh["expert"], overlap=overlap)),
        model=laws.model("tiny_moe"),
        batch=batch,
        expert=2,
    )


def test_ranks_that_could_be_cut_otherwise_cut_alike() -> None:
    """One rank has a document end near the middle, the other one long document: both take the grouped layout."""
    model, whole = laws.model("qwen3_moe"), testing.random_batch(61, rows=2, seq=40)
    documents = torch.stack([(torch.arange(40) >= 20).long(), torch.zeros(40, dtype=torch.int64)])
    batch = whole | {"document_ids": documents}
    testing.check(
        lambda mesh: compose(chunk_loss(7), shard(mesh["expert"]), expert_parallel(mesh["expert"], overlap=2)),
        model=model,
        batch=batch,
        expert=2,
    )

    def stages(mesh: Mesh) -> set[str]:
        step = expert_parallel(mesh["expert"], overlap=2)(train_step(model, testing.default_optimizer()))
        record = Record()
        step.value_and_grad(step.init(0).params, {name: v[mesh.rank : mesh.rank + 1] for name, v in batch.items()}, record=record)
        return {event.stage.partition("#")[2] for event in record.select("run", "forward") if "attention" in event.stage}

    assert simulate(stages, expert=2) == [{"0+1"}] * 2


@pytest.mark.parametrize("layout", [{"expert": 2}, {"data": 2, "expert": 2}])
def test_laws_of_a_model_with_everything(layout: dict[str, int]) -> None:
    """Dense first layer, shared experts, groups, corrections, balance by document, a further layer that predicts."""
    config = testing.small_models()["deepseek_v3"].config
    config = type(config)(**{**config.__dict__, "num_nextn_predict_layers": 1})
    model = deepseek_v3(config, dtype=torch.float64, mtp_loss=0.3, router_z_loss=0.01, balance_loss=0.1, sequence_loss=0.05)
    axes = list(layout)
    testing.check(
        lambda mesh: compose(shard(*(mesh[a] for a in axes)), expert_parallel(mesh["expert"], overlap=2), chunk_loss(5)),
        model=model,
        **layout,  # pyright: ignore[reportArgumentType]  (sizes of the mesh)
    )


# In what order ------------------------------------------------------------------------------------------------------------------


def spread(overlap: int, model: Any = None) -> TrainStep:
    """On two simulated ranks; what is asked of the step afterwards needs no mesh."""
    model = preset("tiny-moe") if model is None else model
    return simulate(
        lambda mesh: expert_parallel(mesh["expert"], overlap=overlap)(train_step(model, testing.default_optimizer())), expert=2
    )[0]


def test_the_order_is_that_of_domino() -> None:
    slots = [(slot.stage.removeprefix("layers."), slot.part, slot.stream) for slot in schedule(spread(2)).slots]
    assert slots[:17] == [
        ("embed", "", "compute"),
        ("split.x", "", "compute"),
        ("0.attention", "0", "compute"),
        ("0.router", "0", "compute"),
        ("0.experts.dispatch", "0", "comm"),
        ("0.attention", "1", "compute"),
        ("0.router", "1", "compute"),
        ("0.experts.dispatch", "1", "comm"),
        ("0.experts", "0", "compute"),
        ("0.experts.combine", "0", "comm"),
        ("0.experts", "1", "compute"),
        ("0.experts.combine", "1", "comm"),
        ("0.experts.add", "0", "compute"),
        ("1.attention", "0", "compute"),
        ("1.router", "0", "compute"),
        ("1.experts.dispatch", "0", "comm"),
        ("0.experts.add", "1", "compute"),
    ]
    text = str(schedule(spread(2)))
    assert text.splitlines()[0].split() == ["forward", "compute", "comm"] and "layers.0.experts.dispatch  1" in text


def test_shared_experts_run_while_tokens_travel() -> None:
    names = [slot.stage for slot in schedule(spread(1, testing.small_models()["deepseek_v3"])).slots if slot.direction == "forward"]
    at = next(i for i, name in enumerate(names) if name.endswith("experts.dispatch"))
    assert names[at + 1 : at + 4] == ["layers.1.statistics", "layers.1.shared", "layers.1.experts"]


@pytest.mark.parametrize(("overlap", "layout"), [(1, (1,)), (2, (1, 1)), (2, (2,)), (3, (1, 2)), (3, (1, 1, 1))])
def test_the_schedule_is_what_the_walk_does(overlap: int, layout: tuple[int, ...]) -> None:
    """Stages in the same order; an exchange starts where the schedule has it."""
    model = laws.model("tiny_moe")
    ends = {(1,): [30], (1, 1): [15], (2,): [30], (1, 2): [10], (1, 1, 1): [10, 20]}[layout]
    documents = torch.zeros(30, dtype=torch.int64)
    for end in ends:
        documents[end:] += 1
    ids = torch.randint(61, (1, 30), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "document_ids": documents[None]}

    def seen(mesh: Mesh) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        step = expert_parallel(mesh["expert"], overlap=overlap)(train_step(model, testing.default_optimizer()))
        record = Record()
        step.value_and_grad(step.init(0).params, batch, record=record)
        does = [
            (event.stage, event.direction)
            for event in record
            if (event.act, event.what) in (("run", "forward"), ("run", "backward"), ("start", "exchange"))
        ]
        return does, [(slot.stage + ("#" + slot.part if slot.part else ""), slot.direction) for slot in schedule(step, layout).slots]

    for does, says in simulate(seen, expert=2):
        assert does == says


def test_an_exchange_is_waited_for_after_the_other_part_has_computed() -> None:
    """From the record of a real run: between the start of a part's dispatch and its wait the other part runs, in both directions."""
    model = laws.model("tiny_moe")
    batch = testing.random_batch(61, rows=4) | {"document_ids": torch.arange(4)[:, None].expand(4, 13)}

    def between(mesh: Mesh) -> list[list[str]]:
        step = expert_parallel(mesh["expert"], overlap=2)(train_step(model, testing.default_optimizer()))
        record = Record()
        step.value_and_grad(step.init(0).params, batch, record=record)
        found: list[list[str]] = []
        for direction, name in (("forward", "layers.1.experts.dispatch#0"), ("backward", "layers.1.experts.dispatch#1")):
            start, wait = (record.position(act, "exchange", name, direction) for act in ("start", "wait"))
            found.append([event.stage for event in list(record)[start:wait] if event.act == "run"])
        return found

    for forward, backward in simulate(between, expert=2):
        assert forward == ["layers.0.experts.add#1", "layers.1.attention#1", "layers.1.router#1"]
        assert backward == ["layers.1.experts#0"]


def test_parts_share_what_is_gathered_and_reduced() -> None:
    """Parameters travel once in each direction, gradients once, however many parts there are."""
    model, batch = laws.model("tiny_moe"), testing.random_batch(61)

    def moved(mesh: Mesh, overlap: int) -> list[tuple[str, str, int]]:
        step = compose(shard(mesh["data"], mesh["expert"]), expert_parallel(mesh["expert"], overlap=overlap))(
            train_step(model, testing.default_optimizer())
        )
        record = Record()
        step.value_and_grad(step.init(0).params, batch, record=record)
        return sorted(
            (event.what, event.stage.partition("#")[0], event.bytes)
            for event in record.select("start")
            if event.what in ("gather", "reduce")
        )

    (plain, *_), (parts, *_) = (simulate(lambda mesh, n=n: moved(mesh, n), data=2, expert=2) for n in (1, 3))
    assert plain == parts and len(plain) > 12


def test_a_layout_must_be_of_the_steps_parts() -> None:
    with pytest.raises(ValueError, match=r"layout \(3,\) is of 3 parts; the step runs in 2"):
        schedule(spread(2), (3,))


def test_without_exchanges_nothing_is_cut() -> None:
    step = train_step(laws.model("tiny_moe"), testing.default_optimizer())
    assert not any(isinstance(node, Exchange) for node in step.program)
    step = step.replace("parts", parts=3)
    assert step.plan((1, 1, 1)).program is step.program


# What it hides ------------------------------------------------------------------------------------------------------------------

COSTS = {"attention": 4.0, "router": 1.0, "experts": 6.0, "combine": 0.2, "shared": 1.5, "exchange": 3.0}


def cost(parts: int) -> Any:
    """Durations of a model whose compute per part exceeds its communication; backward computes twice as long."""

    def of(slot: Slot) -> float:
        share = (slot.part.count("+") + 1) / parts if slot.part else 1.0
        twice = 2.0 if slot.direction == "backward" and slot.kind != "exchange" else 1.0
        return COSTS.get(slot.kind, 0.0) * share * twice

    return of


def test_overlap_hides_communication() -> None:
    deep = from_hf(laws.TINY_MOE | {"num_hidden_layers": 8})
    exposed: dict[int, float] = {}
    for overlap in (1, 2, 4):
        played = timeline(schedule(spread(overlap, deep)), cost(overlap))
        assert played.communication == pytest.approx(8 * 4 * 3.0)
        assert played.idle == 0.0  # no moment at which both streams wait
        exposed[overlap] = played.exposed
    assert exposed[1] == pytest.approx(96.0)  # all of it
    assert exposed[2] < 0.05 * 96  # the last combine and its mirror image, nothing in between
    assert exposed[4] < exposed[2]


def test_a_document_longer_than_a_part_overlaps_too() -> None:
    deep = from_hf(laws.TINY_MOE | {"num_hidden_layers": 8})
    played = timeline(schedule(spread(2, deep), (2,)), cost(2))
    assert played.exposed < 0.4 * played.communication


def test_shared_experts_hide_communication_without_parts() -> None:
    model = testing.small_models()["deepseek_v3"]
    with_shared = timeline(schedule(spread(1, model)), cost(1))
    without = timeline(schedule(spread(1, model)), lambda slot: 0.0 if slot.kind == "shared" else cost(1)(slot))
    assert with_shared.exposed < without.exposed


def test_durations_are_not_negative() -> None:
    with pytest.raises(ValueError, match="duration -1"):
        timeline(Schedule((Slot("a", "", "compute", "forward", "mlp", ()),)), lambda slot: -1.0)
    assert timeline(Schedule(()), lambda slot: 1.0).span == 0.0
    assert str(timeline(Schedule(()), lambda slot: 1.0)).startswith("span 0.000")
