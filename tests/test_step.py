"""The step: pure, deterministic, its state the same on every layout; and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import xtf
from tests import laws
from xtf import optim, testing, tree
from xtf.describe import fold
from xtf.mesh import Mesh, simulate, split_batch
from xtf.placement import Placement, Split, place
from xtf.spec import Init, ParamSpec
from xtf.stage import Program, Stage
from xtf.step import TrainStep, compose, merge_axes, train_step
from xtf.transforms import accumulate, chunk_loss, precision, shard

Transform = testing.Transform


def made(transform: Transform = lambda step: step, name: str = "tiny", optimizer: optim.Optimizer | None = None) -> TrainStep:
    return transform(train_step(laws.model(name), testing.default_optimizer() if optimizer is None else optimizer))


def copied(value: Any) -> Any:
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    pairs = list(zip(tree.leaves(a), tree.leaves(b), strict=True))
    return tree.paths(a) == tree.paths(b) and all(x is y if x is None else x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


STACKS: dict[str, Any] = {
    "plain": lambda mesh: compose(),
    "shard": lambda mesh: shard(mesh["data"]),
    "everything": lambda mesh: compose(shard(mesh["data"]), accumulate(2), chunk_loss(7), precision(reduce=torch.float64)),
}


# Purity and determinism ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", ["tiny", "qwen3_moe"])
def test_a_step_is_pure(name: str, stack: str) -> None:
    """State and batch are as they were, the result is the same at every call, bit for bit, and shares no memory with the input."""

    def trial(mesh: Mesh) -> None:
        step = made(STACKS[stack](mesh), name)
        state = step.init(0)
        batch = split_batch(laws.batch("documents"), mesh, axes=[n for a in step.token_axes for n in a.names])
        state, _ = step(state, batch)  # moments are not zero any more
        before = copied((state, batch))
        first = step(state, batch)
        assert same((state, batch), before)
        again = step(state, batch)
        assert same(first, again) and same((state, batch), before)
        assert int(first[0].step) == 2
        old = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(state) if leaf.numel()}
        assert not old & {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(first[0]) if leaf.numel()}
        first[0].params["embed"]["weight"].zero_()
        assert same((state, batch), before)

    simulate(trial, data=2)


@pytest.mark.parametrize("stack", STACKS)
def test_evaluating_and_differentiating_change_nothing(stack: str) -> None:
    def trial(mesh: Mesh) -> None:
        step = made(STACKS[stack](mesh), "qwen3_moe")
        state = step.init(0)
        batch = split_batch(laws.batch("documents"), mesh, axes=[n for a in step.token_axes for n in a.names])
        before = copied((state, batch))
        loss = step.loss(state.params, batch)
        metrics = step.evaluate(state.params, batch)
        value, _ = step.value_and_grad(state.params, batch)
        assert same((state, batch), before)
        assert torch.equal(loss, metrics["loss"]) and torch.equal(loss, step.loss(state.params, batch))
        assert abs(value - loss) <= 1e-14 * loss  # the chunked head may sum in another order when it differentiates

    simulate(trial, data=2)


def steps(transform: Any, name: str, optimizer: optim.Optimizer, count: int = 3, **sizes: int) -> list[tuple[Any, list[Tensor]]]:
    """Whole parameters after some steps on different batches, and the losses, of each rank."""

    def run(mesh: Mesh) -> tuple[Any, list[Tensor]]:
        step = made(transform(mesh), name, optimizer)
        state, losses = step.init(0), list[Tensor]()
        for i in range(count):
            batch = testing.random_batch(61, seed=i)
            state, metrics = step(state, split_batch(batch, mesh, axes=[n for a in step.token_axes for n in a.names]))
            losses.append(metrics["loss"])
        assert int(state.step) == count
        return step.full(state.params), losses

    return simulate(run, **sizes)


@pytest.mark.parametrize("name", ["tiny", "qwen3_moe"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_three_steps_are_those_of_a_plain_loop(name: str, optimizer: str) -> None:
    """State goes on from step to step: moments, step count, schedules. The reference has no engine code."""
    used = optim.chain(laws.OPTIMIZERS[optimizer](), optim.scale_by_schedule(lambda step: 1.0 / (int(step) + 1)))
    model = laws.model(name)
    params = model.init(0)
    state, losses = used.init(params), list[Tensor]()
    for i in range(3):
        grads, loss = torch.func.grad_and_value(model.loss)(params, testing.random_batch(61, seed=i))
        updates, state = used.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        losses.append(loss)
    parallel = lambda mesh: compose(shard(mesh["data"], replicate=mesh["copies"]), chunk_loss(7))  # noqa: E731
    for got, values in steps(parallel, name, used, data=2, copies=2):
        for value, want in zip(values, losses, strict=True):
            assert abs(value - want) <= 1e-12 * want
        for path, want in tree.items(params).items():
            assert float((tree.items(got)[path] - want).abs().max()) <= 1e-11 * float(want.abs().max()), path


def test_three_steps_twice_are_the_same_bits() -> None:
    first, second = (steps(STACKS["everything"], "qwen3_moe", testing.default_optimizer(), data=3) for _ in range(2))
    assert same([params for params, _ in first], [params for params, _ in second])
    assert same([losses for _, losses in first], [losses for _, losses in second])
    assert same(first[0][0], first[1][0])  # and on every rank


@pytest.mark.parametrize("batch", ["documents", "plain", "ignored", "weights", "token"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_evaluate_is_the_models_loss(name: str, batch: str) -> None:
    model, given = laws.model(name), laws.batch(batch)
    metrics = made(name=name).evaluate(model.init(0), given)
    want = model.loss(model.init(0), given)
    assert abs(metrics["loss"] - want) <= 1e-14 * want
    if batch in ("ignored", "token"):
        assert metrics["loss"] == 0 and metrics["tokens"] == 0
    else:
        assert metrics["tokens"] > 0


def test_metrics_have_shape_and_dtype() -> None:
    _, metrics = made(name="qwen3_moe")(made(name="qwen3_moe").init(0), laws.batch("documents"))
    scalars = {"loss", "cross_entropy", "grad_norm", "tokens", "aux_loss", "lr"}
    assert scalars <= set(metrics)
    assert all(metrics[name].shape == () for name in scalars)
    assert metrics["tokens"].dtype == torch.int64
    assert metrics["expert_load"].shape == (2, 6)
    torch.testing.assert_close(metrics["expert_load"].sum(1), torch.ones(2, dtype=torch.float64))


# Placement -----------------------------------------------------------------------------------------------------------------------

LAYOUTS: list[dict[str, int]] = [{"data": 1}, {"data": 3}, {"data": 8}, {"data": 2, "expert": 2}, {"data": 2, "replicate": 3}]


def parallel(mesh: Mesh) -> Transform:
    return laws.case(layout=dict(mesh.sizes)).transform(mesh)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["tiny", "qwen3_moe"])
def test_initial_values_are_the_models_on_every_layout(name: str, layout: dict[str, int]) -> None:
    want = laws.model(name).init(7)

    def trial(mesh: Mesh) -> None:
        step = made(parallel(mesh), name)
        state = step.init(7)
        assert same(step.full(state.params), want)
        assert same(step.place(want), state.params)
        assert int(state.step) == 0 and state.step.dtype == torch.int64
        for path, leaf in tree.items(state.params).items():
            assert tuple(leaf.shape) == step.placements[path].shape()

    simulate(trial, **layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_place_and_full_are_inverse_for_any_tree_of_that_structure(layout: dict[str, int]) -> None:
    model = laws.model("qwen3_moe")
    generator = torch.Generator().manual_seed(0)
    trees: list[Any] = [
        tree.map(lambda s: torch.randn(s.shape, generator=generator, dtype=torch.float32), model.specs),  # moments, of another dtype
        tree.map(lambda s: torch.randint(100, s.shape, generator=generator), model.specs),
        tree.map_with_path(lambda path, s: None if "norm" in path else torch.ones(s.shape), model.specs),  # gradients
    ]

    def trial(mesh: Mesh) -> list[Any]:
        step = made(parallel(mesh), "qwen3_moe")
        for whole in trees:
            before = copied(whole)
            placed = step.place(whole)
            assert same(step.full(placed), whole) and same(whole, before)
            assert same(step.place(step.full(placed)), placed)
            for path, leaf in tree.items(placed).items():
                assert leaf is None or tuple(leaf.shape) == step.placements[path].shape()
        return step.place(trees[1])

    parts = simulate(trial, **layout)
    ranks = len(parts) // layout.get("replicate", 1)
    count = sum(leaf.numel() for part in parts for leaf in tree.leaves(part))
    assert count == len(parts) // ranks * sum(leaf.numel() for leaf in tree.leaves(trees[1]))  # no element twice, none missing


def test_placed_blocks_are_copies() -> None:
    """A placed tree that were a view would keep the whole one alive."""
    whole = laws.model("tiny").init(0)

    def trial(mesh: Mesh) -> None:
        for leaf in tree.leaves(made(parallel(mesh)).place(whole)):
            assert leaf.is_contiguous() and leaf.untyped_storage().nbytes() == leaf.nbytes

    simulate(trial, data=2)
    simulate(trial, data=1)


def test_muon_sees_whole_matrices_and_the_norm_counts_each_element_once() -> None:
    model = laws.model("qwen3_moe")
    whole = model.init(3)
    norm = torch.stack([leaf.square().sum() for leaf in tree.leaves(whole)]).sum().sqrt()

    def trial(mesh: Mesh) -> None:
        step = made(parallel(mesh), "qwen3_moe")
        local = step.place(whole)
        placed = step.placed()
        assert abs(placed.norm(local) - norm) <= 1e-14 * norm
        for path, leaf in tree.items(local).items():
            if leaf.dim() < 2:
                continue
            matrices = placed.matrices(path, leaf)
            assert matrices.shape[-2:] == tree.items(whole)[path].shape[-2:]
            assert torch.equal(placed.cut(path, matrices), leaf)

    for layout in LAYOUTS:
        simulate(trial, **layout)

    def owning(mesh: Mesh) -> None:
        """Leaves on different axes: some on both, some on one, and the untrained on none."""
        specs = tree.map_with_path(lambda path, s: dataclasses.replace(s, trainable="k_norm" not in path), laws.model("qwen3").specs)
        step = shard(mesh["data"])(train_step(dataclasses.replace(laws.model("qwen3"), specs=specs), testing.default_optimizer()))
        step = step.replace("owning", owned={"mlp": mesh["tensor"], "kv_heads": mesh["tensor"]})
        every = laws.model("qwen3").init(3)
        want = torch.stack([leaf.square().sum() for leaf in tree.leaves(every)]).sum().sqrt()
        assert len({tuple(sorted(placement.axes)) for placement in step.placements.values()}) == 3
        assert abs(step.placed().norm(step.place(every)) - want) <= 1e-14 * want
        assert same(step.full(step.place(every)), every)

    simulate(owning, data=2, tensor=3)


def test_the_norm_of_a_large_float32_leaf_is_exact() -> None:
    """Summed one by one in float32, this is off by much more."""
    leaf = torch.full((1 << 24,), 0.1)
    step = dataclasses.replace(made(), model=dataclasses.replace(laws.model("tiny"), specs={"w": _spec((1 << 24,))}))
    want = 0.1 * 2**12
    assert abs(float(step.placed().norm({"w": leaf})) - want) < 1e-6 * want
    assert step.placed().norm({"w": None}) == 0


def _spec(shape: tuple[int, ...], axes: tuple[str | None, ...] | None = None) -> ParamSpec:
    return ParamSpec(shape, torch.float32, axes if axes is not None else (None,) * len(shape), Init.constant(1.0))


def test_rules_that_split_a_leaf_twice_over_one_axis_are_refused() -> None:
    spec = _spec((4, 4), ("heads", "mlp"))

    def trial(mesh: Mesh) -> None:
        with pytest.raises(ValueError, match=r"\('heads', 'mlp'\) would be split twice over one mesh axis.*'heads': 'data'.*'mlp': 'data'"):
            place(spec, {"heads": mesh["data"], "mlp": mesh["data"]}, ())

    simulate(trial, data=2)


def test_owned_then_sharded_blocks() -> None:
    spec = _spec((7, 5), ("heads", None))

    def trial(mesh: Mesh) -> tuple[Placement, list[tuple[int, int]], list[tuple[int, int]]]:
        placement = place(spec, {"heads": mesh["tensor"]}, (mesh["data"],))
        return placement, placement.ranges(), placement.ranges(owned_only=True)

    seen = simulate(trial, data=2, tensor=2)
    assert [block for _, block, _ in seen] == [[(0, 1), (0, 5)], [(3, 5), (0, 5)], [(1, 3), (0, 5)], [(5, 7), (0, 5)]]
    assert [owned for _, _, owned in seen] == [[(0, 3), (0, 5)], [(3, 7), (0, 5)]] * 2
    placement = seen[0][0]
    assert placement.axes == {"tensor", "data"} and isinstance(placement.gathered, Split) and placement.gathered.axis.name == "data"


def test_gradients_that_need_no_sum_have_memory_of_their_own() -> None:
    """Two owned leaves whose gradient autograd returns as one tensor: each accumulates by itself."""

    def fn(params: Any, *, input_ids: Tensor) -> tuple[Tensor]:
        return (((params["a"] + params["b"]) * input_ids.sum()).sum() + params["c"].sum(),)

    paths = {"a": "a", "b": "b", "c": "c"}
    specs = {"a": _spec((4,), ("mlp",)), "b": _spec((4,), ("mlp",)), "c": _spec((4,))}
    program = (Stage("out", "loss", fn, "k", paths, (), ("loss",), ("input_ids",)),)
    model = dataclasses.replace(laws.model("tiny"), specs=specs, build=lambda ops: program, constants=lambda packed: {})

    def trial(mesh: Mesh) -> Any:
        step = accumulate(3)(train_step(model, optim.sgd(lr=1.0)))
        step = step.replace("toy", owned={"mlp": mesh["expert"]}, token_axes=(mesh["expert"],))
        ids = torch.ones(3, 1, dtype=torch.int64)
        return step.value_and_grad(step.init(0).params, {"input_ids": ids, "labels": ids})[1]

    for grads in simulate(trial, expert=2):
        assert grads["a"].tolist() == [3.0, 3.0] and grads["b"].tolist() == [3.0, 3.0]  # not 6: owned, three micro-batches
        assert grads["c"].tolist() == [6.0] * 4  # summed over two ranks
        assert grads["a"].data_ptr() != grads["b"].data_ptr()


# Donation ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [compose(), precision(params=torch.float32, compute=torch.bfloat16)])
def test_a_donated_state_is_reused_and_cannot_be_read(transform: Transform) -> None:
    kept, donating = made(transform), xtf.compile(made(transform), backend="eager", donate=True)
    batch = laws.batch("documents")
    state, other = donating.init(0), kept.init(0)
    for _ in range(2):
        old = [leaf.data_ptr() for leaf in tree.leaves((state.params, state.opt))]
        given = state
        state, metrics = donating(given, batch)
        other, want = kept(other, batch)
        assert [leaf.data_ptr() for leaf in tree.leaves((state.params, state.opt))] == old
        assert same((state.params, state.opt, state.step), (other.params, other.opt, other.step)) and same(metrics, want)
        for name in ("params", "opt", "step"):
            with pytest.raises(RuntimeError, match="this state was donated"):
                getattr(given, name)
        with pytest.raises(RuntimeError, match="this state was donated"):
            donating(given, batch)
        with pytest.raises(RuntimeError, match="this state was donated"):
            tree.leaves(given)
        assert repr(given) == "State(donated)"


def test_a_step_that_fails_donates_nothing() -> None:
    step = xtf.compile(made(), backend="eager", donate=True)
    state = step.init(0)
    before = copied(state)
    with pytest.raises(ValueError, match="unknown keys"):
        step(state, {"input": laws.batch("plain")["input_ids"]})
    assert same(state, before)


# What is refused -----------------------------------------------------------------------------------------------------------------


def test_parameters_of_another_layout_are_refused() -> None:
    batch = laws.batch("plain")

    def trial(mesh: Mesh) -> None:
        step = made(shard(mesh["data"]))
        whole, local = laws.model("tiny").init(0), step.init(0).params
        for call in (step.loss, step.value_and_grad, step.evaluate):
            with pytest.raises(
                ValueError, match=r"embed.weight is torch.float64 of shape \(61, 6\); this rank keeps .*\(3[01], 6\).*step.place"
            ):
                call(whole, batch)
        with pytest.raises(ValueError, match=r"embed.weight has shape \(61, 6\); full takes what this rank keeps, of shape \(3[01], 6\)"):
            step.full(whole)
        with pytest.raises(ValueError, match=r"embed.weight has shape \(3[01], 6\); place takes whole leaves, of shape \(61, 6\)"):
            step.place(local)
        with pytest.raises(ValueError, match=r"embed.weight is torch.float32"):
            step.loss(tree.map(torch.Tensor.float, local), batch)

    simulate(trial, data=2)


def test_another_tree_is_refused() -> None:
    step = made()
    params = step.init(0).params
    wrong = {**params, "extra": torch.zeros(1)}
    del wrong["norm"]
    for call in (step.place, step.full, lambda p: step.loss(p, laws.batch("plain"))):
        with pytest.raises(ValueError, match=r"missing \['norm.weight'\], unknown \['extra'\]"):
            call(wrong)


def test_batches_are_checked() -> None:
    step = made()
    params, ids = step.init(0).params, laws.batch("plain")["input_ids"]
    for batch, message in (
        ({"input_ids": ids, "mask": ids}, r"unknown keys \['mask'\]; known are \["),
        ({"input_ids": ids}, r"batch has no 'labels', so there is no loss; it has \['input_ids'\]: give labels, -100 where"),
        ({"input_ids": ids.float()}, r"batch\['input_ids'\] must be integer, got torch.float32"),
        ({"input_ids": ids + 1000}, r"holds the id 10\d\d, outside the model's vocabulary of 61 \(0 to 60\)"),
    ):
        for call in (step.loss, step.value_and_grad):
            with pytest.raises(ValueError, match=message):
                call(params, batch)


def program_of(edit: Any) -> TrainStep:
    return made().replace("edit", rewrites=(lambda step, program: edit(program),))


def changed(program: Program, name: str, **fields: Any) -> Program:
    return tuple(dataclasses.replace(node, **fields) if node.name == name else node for node in program)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: changed(p, "norm", reads=("y",)), r"stage norm reads \['y'\], which no earlier stage writes; written so far: \['x'\]"),
        (lambda p: p[::-1], r"stage loss reads \['x'\], which no earlier stage writes; written so far: \[\]"),
        (lambda p: (*p[:2], *p[1:]), r"stage names must be unique; twice: \['layers.0.attention'\]"),
        (lambda p: p[:-1], r"no stage writes 'loss'; the program writes \['x'\]"),
        (lambda p: (), r"no stage writes 'loss'; the program writes \[\]"),
    ],
)
def test_programs_that_cannot_run_are_refused(edit: Any, message: str) -> None:
    step = program_of(edit)
    with pytest.raises(ValueError, match=message):
        _ = step.program
    with pytest.raises(ValueError, match=message):
        step.loss(step.init(0).params, laws.batch("plain"))


def test_stages_that_disagree_about_a_shared_parameter_are_refused() -> None:
    def trial(mesh: Mesh) -> None:
        step = program_of(lambda program: changed(program, "loss", partial_over=(mesh["tensor"],)))
        with pytest.raises(
            ValueError, match=r"embed.weight is shared by embed \(gradient partial over \(\)\) and loss \(partial over \('tensor',\)\)"
        ):
            _ = step.program

    simulate(trial, tensor=2)


def test_merging_axes() -> None:
    def trial(mesh: Mesh) -> None:
        data, expert = mesh["data"], mesh["expert"]
        assert merge_axes((data, expert, data)) == (data, expert)
        assert merge_axes(()) == ()
        with pytest.raises(ValueError, match="axes 'data' and 'data,expert' overlap: name each mesh axis by itself"):
            merge_axes((data, mesh.join("data", "expert")))

    simulate(trial, data=2, expert=1)


def test_compose_is_right_to_left_and_checks_its_arguments() -> None:
    name = lambda text: lambda step: step.replace(text)  # noqa: E731
    assert made(compose(name("a"), compose(name("b"), name("c")))).stack == ("c", "b", "a")
    assert made(compose()).stack == ()
    with pytest.raises(TypeError, match=r"compose: argument 1 is 3, not a transform: give functions TrainStep -> TrainStep"):
        compose(chunk_loss(), 3)  # pyright: ignore[reportArgumentType]


# repr ----------------------------------------------------------------------------------------------------------------------------


def test_repr_says_what_each_seam_is() -> None:
    def trial(mesh: Mesh) -> str:
        parts = (shard(mesh["data"], mesh["expert"]), chunk_loss(tokens=7), accumulate(2), precision(compute=torch.bfloat16))
        return repr(made(compose(*parts), "llama"))

    total = laws.model("llama").param_count()[0]
    kept = [int(text.split("parameters  ")[1].split(" ")[0].replace(",", "")) for text in simulate(trial, data=2, expert=2)]
    assert sum(kept) == total
    assert simulate(trial, data=2, expert=2)[0].splitlines() == [
        "TrainStep",
        f"  model       llama, {total:,} parameters, {total:,} active per token",
        "  transforms  shard(data=2, expert=2) · chunk_loss(tokens=7) · accumulate(2) · precision(compute=bfloat16)",
        "  tokens over data (2), expert (2)",
        f"  parameters  {kept[0]:,} on this rank",
        "  precision   compute torch.bfloat16",
        "  program     7 stages: embed, 2 × (attention, mlp), norm, loss",
        "  transfers   7 × gather, 7 × reduce",
        "  backend     eager",
    ]


def test_repr_of_a_plain_step() -> None:
    text = repr(xtf.compile(made(name="qwen3_moe"), backend="eager", donate=True))
    for part in (
        "qwen3_moe, ",
        "transforms  none",
        "tokens over one rank",
        "precision   torch.float64",
        "transfers   none",
        "eager, donating",
    ):
        assert part in text
    assert "attention, router, experts, attention, mlp, attention, router, experts, norm, loss" in text


def test_fold() -> None:
    assert fold([]) == ""
    assert fold(["a"]) == "a"
    assert fold(["a", "a", "a"]) == "3 × a"
    assert fold(list("xababccab")) == "x, 2 × (a, b), 2 × c, a, b"


# What a newcomer gets wrong ------------------------------------------------------------------------------------------------------


def test_a_batch_without_labels_or_with_impossible_weights_is_refused() -> None:
    step, given = made(name="qwen3"), laws.batch("plain")
    params = step.init(0).params
    with pytest.raises(ValueError, match="batch has no 'labels', so there is no loss"):
        step.loss(params, {"input_ids": given["input_ids"]})
    for bad in (-1.0, math.inf, math.nan):
        weights = torch.ones(given["labels"].shape)
        weights[0, 3] = bad
        with pytest.raises(ValueError, match="negative or non-finite values; expected weights of at least 0"):
            step.loss(params, given | {"loss_weights": weights})
    with pytest.raises(ValueError, match=r"a batch is a dict of tensors .*, got Tensor"):
        step.loss(params, given["input_ids"])  # pyright: ignore[reportArgumentType]


def test_wrong_objects_are_named() -> None:
    step, given = made(name="qwen3"), laws.batch("plain")
    state = step.init(0)
    with pytest.raises(ValueError, match=r"takes a State, got dict: make one with step.init"):
        step(state.params, given)
    with pytest.raises(ValueError, match=r"got a State: give state.params"):
        step.value_and_grad(state, given)
    with pytest.raises(ValueError, match="model is a Optimizer, expected a xtf Model"):
        train_step(step.optimizer, step.model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"call it first, as chunk_loss\(\)"):
        compose(chunk_loss)(step)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="returned a NoneType, not a TrainStep"):
        compose(lambda step: None)(step)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"no seam \['rewrite'\]"):
        step.replace("mine()", rewrite=())
    with pytest.raises(ValueError, match=r"no \['.*'\]: they are not this model's"):
        step.model.loss(laws.model("tiny").init(0), given)


def test_parameters_that_require_gradients_are_taken_as_values() -> None:
    step, given = chunk_loss(7)(made(name="qwen3")), laws.batch("plain")
    params = step.init(0).params
    loss, _ = step.value_and_grad(tree.map(lambda leaf: leaf.requires_grad_(), params), given)
    assert torch.equal(loss, step.value_and_grad(tree.map(torch.Tensor.detach, params), given)[0]) and not loss.requires_grad
