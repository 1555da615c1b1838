"""The walk: orders what is declared, and nothing about a transform is written into it.

The toy swap and the toy overlap here are what `swap_activations` and `expert_parallel` will be at heart: declarations only.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from xtf import testing, tree
from xtf.record import Record
from xtf.stage import Exchange, Program, Stage, Transfer, recompute
from xtf.step import TrainStep, eager, train_step
from xtf.walk import Direction, Plan, walk


def chain(depth: int, **fields: Any) -> tuple[Program, dict[str, Tensor]]:
    """x -> tanh(x @ w) `depth` times, then the sum of squares."""
    stages: list[Stage] = [Stage("in", "embed", lambda params, *, data: (data * 1,), "in", {}, (), ("x",), ("data",))]
    for i in range(depth):
        fn = lambda params, x: (torch.tanh(x @ params["w"]),)  # noqa: E731
        stages.append(Stage(f"layers.{i}", "mlp", fn, "layer", {"w": f"{i}.w"}, ("x",), ("x",), **fields))
    stages.append(Stage("out", "loss", lambda params, x: (x.square().sum(),), "out", {}, ("x",), ("loss",)))
    generator = torch.Generator().manual_seed(0)
    params = {f"{i}.w": torch.randn(5, 5, generator=generator, dtype=torch.float64) for i in range(depth)}
    return tuple(stages), params


def run(program: Program, params: dict[str, Tensor], micros: int = 1) -> tuple[dict[str, Tensor], Tensor, Record]:
    pairs = [recompute(s.fn, s.key, eager) if isinstance(s, Stage) else None for s in program]
    record = Record()
    outcome = walk(
        [Plan(program, pairs)] * micros,
        params,
        [{"data": data(i)} for i in range(micros)],
        keep=("loss",),
        seeds=lambda micro, values: {"loss": torch.ones_like(values["loss"])},
        trained=frozenset(params),
        record=record,
    )
    return outcome.grads, torch.stack([v["loss"] for v in outcome.values]).sum(), record


def data(micro: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(micro), dtype=torch.float64)


def reference(params: dict[str, Tensor], micros: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    def loss(params: dict[str, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in range(micros):
            x = data(i)
            for w in params.values():
                x = torch.tanh(x @ w)
            total = total + x.square().sum()
        return total

    return torch.func.grad_and_value(loss)(params)


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("depth", [1, 4])
def test_gradients_equal_the_reference(depth: int, micros: int) -> None:
    program, params = chain(depth)
    grads, loss, _ = run(program, params, micros)
    expected, value = reference(params, micros)
    torch.testing.assert_close(loss, value, rtol=1e-13, atol=0)
    for path, want in expected.items():
        torch.testing.assert_close(grads[path], want, rtol=1e-12, atol=1e-13)


def logging_transfer(log: list[str], name: str) -> Transfer:
    def start(value: Any) -> Any:
        log.append(f"start {name}")
        return value

    def wait(value: Any) -> Any:
        log.append(f"wait {name}")
        return value

    return Transfer(start, wait)


def test_next_gather_starts_before_this_stage_runs_in_both_directions() -> None:
    program, params = chain(4, gather=Transfer(dict, lambda own: own))
    _, _, record = run(program, params, micros=2)
    order = [0, 1, 2, 3]
    for micro in range(2):
        both: list[tuple[Direction, list[int]]] = [("forward", order), ("backward", order[::-1])]
        for direction, stages in both:
            for this, following in itertools.pairwise(stages):
                if direction == "backward" and this == 3:
                    continue  # kept from the forward: nothing lies between
                start = record.position("start", "gather", f"layers.{following}", direction, micro)
                ran = record.position("run", direction, f"layers.{this}", direction, micro)
                wait = record.position("wait", "gather", f"layers.{following}", direction, micro)
                assert start < ran < wait


def test_at_most_two_stages_are_gathered_at_once() -> None:
    program, params = chain(6, gather=Transfer(dict, lambda own: own))
    _, _, record = run(program, params, micros=2)
    held, most = 0, 0
    for event in record:
        if event.what == "gather":
            held += {"start": 1, "wait": 0, "free": -1}[event.act]
            most = max(most, held)
    assert most == 2 and held == 0


def test_last_stage_is_gathered_once_and_others_twice() -> None:
    program, params = chain(3, gather=Transfer(dict, lambda own: own))
    program = (*program[:-2], dataclasses.replace(program[-2], name="last"), program[-1])
    _, _, record = run(program, params)
    assert [len(record.select("start", "gather", name)) for name in ("layers.0", "layers.1", "last")] == [2, 2, 1]


def test_without_regather_each_stage_is_gathered_once() -> None:
    program, params = chain(4, gather=Transfer(dict, lambda own: own), regather=False)
    _, _, record = run(program, params, micros=2)
    assert [len(record.select("start", "gather", f"layers.{i}")) for i in range(4)] == [2] * 4
    assert len(record.select("free", "gather")) == 8


def test_one_reduction_is_under_way_at_a_time_and_all_are_waited_for() -> None:
    program, params = chain(4, reduce=Transfer(dict, lambda grads: grads))
    grads, _, record = run(program, params)
    events = [(e.act, e.stage) for e in record if e.what == "reduce"]
    assert events == [(act, f"layers.{i}") for i in (3, 2, 1, 0) for act in ("start", "wait")]
    for i in (3, 2, 1):  # the wait stands behind the next stage's backward
        run_next = record.position("run", "backward", f"layers.{i - 1}", "backward")
        assert record.position("wait", "reduce", f"layers.{i}", "backward") > run_next
    assert set(grads) == set(params)


def test_shared_parameters_are_summed_before_one_reduction() -> None:
    program, params = chain(3, reduce=Transfer(dict, lambda grads: grads))
    shared = tuple(dataclasses.replace(s, params={"w": "0.w"}) if s.name.startswith("layers") else s for s in program)
    grads, _, record = run(shared, {"0.w": params["0.w"]})
    expected, _ = torch.func.grad_and_value(lambda p: _tied(p))(params["0.w"])
    torch.testing.assert_close(grads["0.w"], expected, rtol=1e-12, atol=1e-13)
    assert [e.stage for e in record.select("start", "reduce")] == ["layers.0"]


def _tied(w: Tensor) -> Tensor:
    x = data(0)
    for _ in range(3):
        x = torch.tanh(x @ w)
    return x.square().sum()


def test_one_tensor_returned_for_two_parameters_is_not_shared_memory() -> None:
    fn = lambda params, *, data: ((data + params["a"] + params["b"]).square().sum(),)  # noqa: E731
    program = (Stage("out", "loss", fn, "k", {"a": "a", "b": "b"}, (), ("loss",), ("data",)),)
    params = {"a": torch.zeros(3, 5, dtype=torch.float64), "b": torch.zeros(3, 5, dtype=torch.float64)}
    grads, _, _ = run(program, params, micros=2)
    assert grads["a"].data_ptr() != grads["b"].data_ptr()
    torch.testing.assert_close(grads["a"], 2 * (data(0) + data(1)))
    torch.testing.assert_close(grads["b"], grads["a"])


# A toy swap: residuals leave when the next stage has run and come back one stage early -------------------------------------------


class Host:
    """Host memory of the toy: clones, and weak references to what they were made of."""

    def __init__(self) -> None:
        self.out = self.back = 0
        self.alive: list[weakref.ref[Tensor]] = []

    def store(self, residual: Any) -> Any:
        self.out += 1
        self.alive += [weakref.ref(t) for t in tree.leaves(residual)]
        return tree.map(torch.clone, residual)

    def fetch(self, stored: Any) -> Any:
        self.back += 1
        return tree.map(torch.clone, stored)


def toy_swap(host: Host) -> testing.Transform:
    store, fetch = Transfer(host.store, lambda h: h, "copy"), Transfer(host.fetch, lambda h: h, "copy")

    def declare(step: TrainStep, stage: Stage) -> Stage:
        return dataclasses.replace(stage, store=store, fetch=fetch) if stage.kind in ("attention", "mlp") else stage

    return lambda step: step.replace("toy_swap()", declarations=(*step.declarations, declare))


def test_toy_swap_holds_the_laws() -> None:
    host = Host()
    testing.check(toy_swap(host), model=testing.small_models()["llama"])
    assert host.out == host.back == 2 * 2 * 2  # two layers of two stages; value_and_grad and the step


def test_toy_swap_orders_copies_around_the_stages() -> None:
    model = testing.small_models()["llama"]
    host, record = Host(), Record()
    step = toy_swap(host)(train_step(model, testing.default_optimizer()))
    step.value_and_grad(step.init(0).params, testing.random_batch(model.vocab), record=record)
    assert all(ref() is None for ref in host.alive)
    first, second = "layers.0.attention", "layers.0.mlp"
    stored = record.position("start", "store", first, "forward")
    assert record.position("run", "forward", first, "forward") < stored < record.position("run", "forward", second, "forward")
    assert record.position("wait", "store", first, "forward") > record.position("run", "forward", second, "forward")
    fetched = record.position("start", "fetch", first, "backward")
    assert fetched < record.position("run", "backward", second, "backward") < record.position("wait", "fetch", first, "backward")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda x: x, "gave no (values, residual), but a Tensor"),
        (lambda x: ((x, x), None), "wait gave 2 values, expected 1: x"),
        (lambda x: (x, None), "wait gave None values, expected 1: x"),
    ],
)
def test_what_an_exchange_gives_is_checked(given: Any, message: str) -> None:
    back = Transfer(lambda d: d[1], lambda d: d)
    stages, params = chain(2)
    program = (*stages[:2], Exchange("move", ("x",), ("x",), Transfer(lambda reads: reads[0], given), back), *stages[2:])
    with pytest.raises(ValueError, match=re.escape(message)):
        run(program, params)


# A toy overlap: two parts of the tokens, each computed on the next rank while the other travels -----------------------------------


def toy_overlap(axis: Any) -> testing.Transform:
    """Splits the tokens before each mlp; each part goes to the neighbour, is computed there and comes back. What is on its way
    runs beside what computes."""

    def there(name: str, shift: int) -> Exchange:
        def send(by: int) -> Transfer:
            return Transfer(lambda x: axis.start_permute(x, by), lambda work: work.wait())

        forward = Transfer(lambda reads: send(shift).start(reads[0].contiguous()), lambda work: ((work.wait(),), None))
        backward = Transfer(lambda given: send(-shift).start(given[1][0].contiguous()), lambda work: (work.wait(),))
        return Exchange(name, (name.split("@")[0],), (name.split("@")[0],), forward, backward)

    def rewrite(step: TrainStep, program: Program) -> Program:
        out: list[Stage | Exchange] = []
        for node in program:
            if not (isinstance(node, Stage) and node.kind == "mlp"):
                out.append(node)
                continue
            a, b = f"{node.name}#0", f"{node.name}#1"
            cut = lambda params, x: tuple(part.contiguous() for part in x.tensor_split(2))  # noqa: E731
            join = lambda params, *parts: (torch.cat(parts),)  # noqa: E731
            piece = {n: dataclasses.replace(node, name=n, reads=(n,), writes=(n,)) for n in (a, b)}
            out += [
                Stage(f"{node.name}.split", "split", cut, "split", {}, ("x",), (a, b)),
                there(f"{a}@go", 1),
                there(f"{b}@go", 1),
                piece[a],
                there(f"{a}@return", -1),
                piece[b],
                there(f"{b}@return", -1),
                Stage(f"{node.name}.join", "join", join, "join", {}, (a, b), ("x",)),
            ]
        return tuple(out)

    return lambda step: step.replace("toy_overlap()", rewrites=(*step.rewrites, rewrite), token_axes=step.with_token_axes((axis,)))


def test_toy_overlap_holds_the_laws() -> None:
    testing.check(lambda mesh: toy_overlap(mesh["data"]), model=testing.small_models()["llama"], data=3)


def test_toy_overlap_computes_while_the_other_part_travels() -> None:
    from xtf.mesh import Mesh, simulate, split_batch

    model = testing.small_models()["llama"]

    def record_of(mesh: Mesh) -> Record:
        record = Record()
        step = toy_overlap(mesh["data"])(train_step(model, testing.default_optimizer()))
        step.value_and_grad(step.init(0).params, split_batch(testing.random_batch(model.vocab), mesh), record=record)
        return record

    for record in simulate(record_of, data=2):
        a, b = "layers.0.mlp#0", "layers.0.mlp#1"
        both: list[tuple[Direction, str, str]] = [("forward", a, b), ("backward", b, a)]
        for direction, first, second in both:
            leaves = "return" if direction == "forward" else "go"
            started = record.position("start", "exchange", f"{first}@{leaves}", direction)
            waited = record.position("wait", "exchange", f"{first}@{leaves}", direction)
            assert started < record.position("run", direction, second, direction) < waited
