"""Optimizers: equal to torch.optim's in float64, the same bits in place and not, every leaf treated by its own rule."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

from xtf import optim, tree
from xtf.optim import UNPLACED, Optimizer, Unplaced
from xtf.optim import leaves as optim_leaves
from xtf.tree import Tree

DONATED = Unplaced(donate=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_params(dtype: torch.dtype = torch.float64, seed: int = 0) -> Tree:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    return {"embed": normal(7, 4), "layers": [{"w": normal(4, 5), "norm": normal(5)}, {"experts": normal(3, 4, 2), "gain": normal()}]}


def make_matrices() -> Tree:
    """Square, wide and tall."""
    g = torch.Generator().manual_seed(1)
    return {name: torch.randn(*shape, generator=g, dtype=torch.float64) for name, shape in {"a": (4, 4), "b": (3, 8), "c": (8, 3)}.items()}


def make_grads(params: Tree, step: int, dtype: torch.dtype | None = None) -> Tree:
    g = torch.Generator().manual_seed(100 + step)

    def grad(p: Tensor | None) -> Tensor | None:
        return None if p is None else torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype or p.dtype)

    return tree.map(grad, params)


def clone(of: Tree) -> Tree:
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, of)


def run(
    optimizer: Optimizer, params: Tree, steps: int = 20, *, donate: bool = False, grad_dtype: torch.dtype | None = None
) -> tuple[Tree, Any]:
    """Parameters and state after ``steps`` updates."""
    placement = Unplaced(donate)
    params = clone(params)
    state = optimizer.init(params, placement)
    for step in range(steps):
        updates, state = optimizer.update(make_grads(params, step, grad_dtype), state, params, placement)
        params = optim.apply_updates(params, updates, placement)
    return params, state


def run_torch(make: Callable[[list[Tensor]], torch.optim.Optimizer], params: Tree, steps: int = 20) -> Tree:
    """Parameters after ``steps`` of a torch optimizer on the same gradients."""
    params = tree.map(lambda p: p.clone().requires_grad_(), params)
    optimizer = make(tree.leaves(params))
    for step in range(steps):
        for p, g in zip(tree.leaves(params), tree.leaves(make_grads(params, step)), strict=True):
            p.grad = g
        optimizer.step()
    return tree.map(lambda p: p.detach(), params)


def assert_close(got: Tree, want: Tree, tolerance: float = 1e-12) -> None:
    assert tree.same_structure(got, want)
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, path
        if b.numel():
            assert (a - b).abs().max() <= tolerance * b.abs().max(), f"{path}: {a} is not {b}"


def assert_same(got: Tree, want: Tree) -> None:
    assert tree.same_structure(got, want)
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert (a is None) == (b is None), path
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), path


# ---------------------------------------------------------------------------------------------------- against torch.optim


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-8), ((0.0, 0.5), 1e-2), ((0.5, 0.0), 1e-4)])
def test_adamw_is_torchs(weight_decay: float, betas: tuple[float, float], eps: float) -> None:
    got, state = run(optim.adamw(0.05, betas=betas, eps=eps, weight_decay=weight_decay), make_params())
    assert_close(got, run_torch(lambda p: torch.optim.AdamW(p, 0.05, betas, eps, weight_decay), make_params()))
    assert int(state.steps) == 20


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.4, False), (0.9, 0.0, True), (0.5, 1.0, False)]
)
def test_sgd_is_torchs(momentum: float, dampening: float, nesterov: bool, weight_decay: float) -> None:
    kwargs: Any = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": weight_decay}
    got, _ = run(optim.sgd(0.05, **kwargs), make_params())
    assert_close(got, run_torch(lambda p: torch.optim.SGD(p, 0.05, **kwargs), make_params()))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_is_torchs(adjust: Any, nesterov: bool) -> None:
    """The iteration is in bfloat16 on both sides; all else in float64."""
    kwargs: Any = {"weight_decay": 0.3, "momentum": 0.8, "nesterov": nesterov, "ns_steps": 4, "adjust_lr_fn": adjust}
    got, _ = run(optim.muon(0.05, **kwargs), make_matrices())
    assert_close(got, run_torch(lambda p: torch.optim.Muon(p, 0.05, **kwargs), make_matrices()))


def test_muon_has_torchs_defaults() -> None:
    got, _ = run(optim.muon(1e-3), make_matrices())
    assert_close(got, run_torch(lambda p: torch.optim.Muon(p), make_matrices()))


def reference_muon(p: Tensor, lr: float, ratio: Callable[[int, int], float], nesterov: bool) -> Tensor:
    """20 steps on one matrix of the tree's path "x", all in float64: (gradients of a stack are cut by the caller)."""
    momentum = torch.zeros_like(p)
    for step in range(20):
        g = make_grads({"x": torch.empty(2, 3, *p.shape, dtype=p.dtype)}, step)["x"][1, 2]
        momentum = 0.95 * momentum + 0.05 * g
        x = 0.95 * momentum + 0.05 * g if nesterov else momentum
        x = x / x.square().sum().sqrt()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        p = p - lr * (ratio(*p.shape) * x + 0.1 * p)
    return p


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (8, 3)])
@pytest.mark.parametrize(
    ("adjust", "ratio"),
    [
        ("original", lambda rows, columns: math.sqrt(max(1, rows / columns))),
        ("match_rms_adamw", lambda rows, columns: 0.2 * math.sqrt(max(rows, columns))),
        ("spectral_unclamped", lambda rows, columns: math.sqrt(rows / columns)),
    ],
)
def test_muon_takes_each_matrix_of_a_stack_by_itself(adjust: Any, ratio: Any, shape: tuple[int, int], nesterov: bool) -> None:
    params = {"x": torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}
    got, _ = run(optim.muon(0.05, nesterov=nesterov, adjust_lr_fn=adjust, ns_dtype=torch.float64), params)
    assert_close(got["x"][1, 2], reference_muon(params["x"][1, 2], 0.05, ratio, nesterov), 1e-10)


def test_orthogonalize_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = optim.orthogonalize(x, dtype=torch.float64)
    monkeypatch.setattr(sys.modules["xtf.optim.muon"], "_STACK", 24)
    assert_close(optim.orthogonalize(x, dtype=torch.float64), whole, 1e-14)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_orthogonalize_of_nothing(shape: tuple[int, ...]) -> None:
    assert optim.orthogonalize(torch.empty(shape)).shape == shape


@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_clipping_is_torchs(max_norm: float) -> None:
    params = make_params()
    grads = make_grads(params, 0)
    optimizer = optim.clip_by_global_norm(max_norm)
    got, state = optimizer.update(grads, optimizer.init(params), params)
    for p, g in zip(tree.leaves(params), tree.leaves(clone(grads)), strict=True):
        p.grad = g
    norm = torch.nn.utils.clip_grad_norm_(tree.leaves(params), max_norm)
    assert_close(got, tree.map(lambda p: p.grad, params))
    assert optimizer.metrics(state)["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-6)


def test_norm_is_at_least_float32_and_skips_none() -> None:
    norm = UNPLACED.norm({"a": torch.full((2, 500), 0.1, dtype=torch.bfloat16), "b": None, "c": torch.tensor(-3.0)})
    assert norm.dtype == torch.float32 and norm.shape == ()
    assert norm.item() == pytest.approx(math.sqrt(1000 * float(torch.tensor(0.1, dtype=torch.bfloat16)) ** 2 + 9), rel=1e-6)
    assert UNPLACED.norm({"a": None}).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_many_elements_is_exact(dtype: torch.dtype) -> None:
    x = torch.full((3_000_001,), 0.01, dtype=dtype)
    want = x[0].double().item() * math.sqrt(x.numel())
    assert UNPLACED.norm({"x": x}).item() == pytest.approx(want, rel=3e-6)
    assert abs(torch.linalg.vector_norm(x, dtype=torch.float32).item() - want) > 1e-4 * want  # why torch's is not used
    assert optim.vector_norm(x.view(1, -1).T[::3]).item() == pytest.approx(want / math.sqrt(3), rel=3e-6)


# -------------------------------------------------------------------------------------------------------------- schedules


def torch_rates(make: Callable[[torch.optim.Optimizer], Any], peak: float, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    scheduler = make(optimizer)
    rates: list[float] = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_schedules_are_torchs(kind: str) -> None:
    peak, warmup, total, final = 0.3, 5, 17, 0.06
    lr = torch.optim.lr_scheduler

    def make(optimizer: torch.optim.Optimizer) -> Any:
        up = lr.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
        down = {
            "cosine": lambda: lr.CosineAnnealingLR(optimizer, total - warmup, final),
            "linear": lambda: lr.LinearLR(optimizer, 1.0, final / peak, total - warmup),
            "constant": lambda: lr.ConstantLR(optimizer, 1.0),
        }[kind]()
        return lr.SequentialLR(optimizer, [up, down], [warmup])

    ours = {
        "cosine": lambda: optim.warmup_cosine(peak, warmup, total, final),
        "linear": lambda: optim.warmup_linear(peak, warmup, total, final),
        "constant": lambda: optim.warmup_constant(peak, warmup),
    }[kind]()
    assert [ours(step) for step in range(total + 1)] == pytest.approx(torch_rates(make, peak, total + 1), rel=1e-12)


@pytest.mark.parametrize("make", [optim.warmup_cosine, optim.warmup_linear])
def test_schedule_edges(make: Callable[..., optim.Schedule]) -> None:
    schedule = make(0.3, 4, 10, 0.1)
    assert [schedule(step) for step in (0, 3, 4, 10, 11, 10**9)] == [0.3 / 4, 0.3, 0.3, 0.1, 0.1, 0.1]
    assert schedule(torch.tensor(7)) == schedule(7) == pytest.approx(0.2)
    assert make(0.3, 0, 10)(0) == 0.3
    assert [make(0.3, 2, 2, 0.1)(step) for step in range(3)] == [0.15, 0.3, 0.1]


def test_a_schedule_sets_the_rate_of_each_update_and_the_metric() -> None:
    schedule = optim.warmup_linear(0.1, 3, 10)
    params = {"w": torch.zeros(3, dtype=torch.float64)}
    for make in (optim.adamw, optim.sgd, optim.scale_by_learning_rate):
        optimizer = make(schedule)
        state = optimizer.init(params)
        assert optimizer.metrics(state)["lr"].item() == schedule(0)
        for step in range(12):
            before = state
            updates, state = optimizer.update(make_grads(params, step), before, params)
            fixed, _ = make(schedule(step)).update(make_grads(params, step), before, params)
            assert_same(updates, fixed)
            assert optimizer.metrics(state)["lr"].item() == schedule(step)


# --------------------------------------------------------------------------------------------------- memory and precision

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: optim.adamw(0.05, weight_decay=0.1, mask=optim.no_decay_1d),
    "sgd": lambda: optim.sgd(0.05, weight_decay=0.1),
    "sgd momentum": lambda: optim.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd dampened": lambda: optim.sgd(0.05, momentum=0.9, dampening=0.5),
    "muon_adamw": lambda: optim.muon_adamw(0.05, mask=optim.no_decay_1d),
    "chain": lambda: optim.chain(
        optim.clip_by_global_norm(0.5),
        optim.scale_by_adam(),
        optim.add_decayed_weights(0.1, optim.no_decay_1d),
        optim.scale_by_schedule(lambda step: 1 / (1 + int(step))),
        optim.scale_by_learning_rate(0.05),
    ),
}
DTYPES = [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
DTYPES += [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_dtype = pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)


@every_optimizer
@every_dtype
def test_donated_is_the_same_bits(name: str, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    optimizer = OPTIMIZERS[name]()
    donated = run(optimizer, make_params(dtype), 4, donate=True, grad_dtype=grad_dtype)
    assert_same(donated, run(optimizer, make_params(dtype), 4, grad_dtype=grad_dtype))
    assert not any(torch.equal(a, b) for a, b in zip(tree.leaves(donated[0]), tree.leaves(make_params(dtype)), strict=True))


@every_optimizer
@every_dtype
def test_not_donated_modifies_nothing(name: str, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    optimizer, params = OPTIMIZERS[name](), make_params(dtype)
    _, state = run(optimizer, params, 2, grad_dtype=grad_dtype)
    given = {"grads": make_grads(params, 2, grad_dtype), "state": state, "params": params}
    before = clone(given)
    updates, new = optimizer.update(**given)
    optim.apply_updates(params, updates)
    assert_same(given, before)
    given_memory = {leaf.data_ptr() for leaf in tree.leaves(given) if leaf is not None}
    assert given_memory.isdisjoint(leaf.data_ptr() for leaf in tree.leaves((updates, new)) if leaf is not None)


@every_optimizer
@every_dtype
def test_donated_allocates_no_second_copy(name: str, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    optimizer, params = OPTIMIZERS[name](), make_params(dtype)
    state = optimizer.init(params, DONATED)

    def memory(of: Tree) -> list[int | None]:
        return [None if leaf is None else leaf.data_ptr() for leaf in tree.leaves(of)]

    for step in range(3):
        grads = make_grads(params, step, grad_dtype)
        updates, new = optimizer.update(grads, state, params, DONATED)
        assert memory(new) == memory(state)
        if torch.promote_types(dtype, grad_dtype) == grad_dtype:
            assert memory(updates) == memory(grads)
        after = optim.apply_updates(params, updates, DONATED)
        assert memory(after) == memory(params)
        params, state = after, new


@every_optimizer
@every_dtype
def test_dtypes(name: str, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    optimizer, params = OPTIMIZERS[name](), make_params(dtype)
    state = optimizer.init(params)
    for leaf in tree.leaves(state):
        if leaf is not None and leaf.is_floating_point() and leaf.ndim:
            assert leaf.dtype == torch.promote_types(dtype, torch.float32)
    updates, new = optimizer.update(make_grads(params, 0, grad_dtype), state, params)
    assert {u.dtype for u in tree.leaves(updates)} == {torch.promote_types(dtype, grad_dtype)}
    assert {p.dtype for p in tree.leaves(optim.apply_updates(params, updates))} == {dtype}
    for a, b in zip(tree.leaves(state), tree.leaves(new), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)


@pytest.mark.parametrize("name", ["adamw", "sgd momentum"])
def test_narrow_parameters_are_updated_in_float32_and_rounded_once(name: str) -> None:
    """A bfloat16 update is the rounding of what float32 copies of the same parameters and gradients give."""
    optimizer, params = OPTIMIZERS[name](), make_params(torch.bfloat16)
    wide = tree.map(lambda p: p.float(), params)
    state, wide_state = optimizer.init(params), optimizer.init(wide)
    for step in range(4):
        grads = make_grads(params, step)
        updates, state = optimizer.update(grads, state, params)
        wide_updates, wide_state = optimizer.update(tree.map(lambda g: g.float(), grads), wide_state, wide)
        assert_same(updates, tree.map(lambda u: u.bfloat16(), wide_updates))
        assert_same(state, wide_state)


@every_optimizer
def test_blocks_do_not_change_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = OPTIMIZERS[name]()
    whole = run(optimizer, make_params(), 3)
    monkeypatch.setattr(optim_leaves, "_CPU_BLOCK", 3)
    assert_same(run(optimizer, make_params(), 3), whole)
    assert_same(run(optimizer, make_params(), 3, donate=True), whole)


@every_optimizer
@pytest.mark.parametrize("donate", [False, True])
def test_any_memory_layout(name: str, donate: bool) -> None:
    """Transposed parameters, expanded gradients and empty leaves."""
    optimizer = OPTIMIZERS[name]()
    params = {"t": make_params()["embed"].T, "w": make_params()["layers"][0]["w"], "none": torch.empty(0, 4, dtype=torch.float64)}
    grads = {
        "t": torch.randn(7, 4, dtype=torch.float64).T,
        "w": torch.tensor(2.0, dtype=torch.float64).expand(4, 5),
        "none": params["none"],
    }
    plain = [tree.map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), t) for t in (grads, params)]
    want, _ = optimizer.update(plain[0], optimizer.init(params), plain[1])
    placement = Unplaced(donate)
    got, _ = optimizer.update(grads, optimizer.init(params), params, placement)
    assert_close(got, want)
    assert_close(optim.apply_updates(params, got, placement), optim.apply_updates(plain[1], want))


@every_optimizer
def test_leaves_without_gradient_stay(name: str) -> None:
    """A leaf that ``init`` saw as ``None`` has no state; one whose gradient is ``None`` keeps parameter and state."""
    optimizer, params = OPTIMIZERS[name](), make_params()
    trained = make_params() | {"embed": None}
    state = optimizer.init(trained)
    embed_states = [leaf for path, leaf in tree.items(state).items() if path.endswith("embed")]
    assert all(leaf is None for leaf in embed_states)
    grads = make_grads(params, 0) | {"embed": None}
    grads["layers"][1]["experts"] = None
    updates, new = optimizer.update(grads, state, params)
    assert updates["embed"] is None and updates["layers"][1]["experts"] is None and updates["layers"][0]["w"] is not None
    for path, leaf in tree.items(new).items():
        if path.endswith(("embed", "experts")):
            assert_same(leaf, tree.items(state)[path])
    after = optim.apply_updates(params, updates)
    assert after["embed"] is params["embed"] and not torch.equal(after["layers"][0]["w"], params["layers"][0]["w"])
    if name != "chain" and name != "sgd":
        with pytest.raises(ValueError, match=r"leaf 'embed' has a gradient, but no optimizer state"):
            optimizer.update(make_grads(params, 0), state, params)


def test_a_rate_of_zero_changes_nothing() -> None:
    for optimizer in (optim.adamw(0.0, weight_decay=0.1), optim.sgd(0.0, momentum=0.9), optim.muon_adamw(0.0)):
        assert_same(run(optimizer, make_params(), 2)[0], make_params())


@every_optimizer
def test_state_has_the_same_leaves_to_torch_and_optree(name: str) -> None:
    _, state = run(OPTIMIZERS[name](), make_params(), 1)
    mine, theirs = tree.leaves(state), torch_pytree.tree_leaves(state)
    assert len(mine) == len(theirs) and {id(leaf) for leaf in mine} == {id(leaf) for leaf in theirs}
    counts = [leaf for leaf in mine if leaf is not None and leaf.dtype == torch.int64]
    assert counts and all(c.shape == () and c.device.type == "cpu" and int(c) == 1 for c in counts)


@every_optimizer
@pytest.mark.parametrize("donate", [False, True])
def test_runs_on_tensors_without_values(name: str, donate: bool) -> None:
    """What a planned rank does."""
    optimizer, placement = OPTIMIZERS[name](), Unplaced(donate)
    with FakeTensorMode():
        params = make_params(torch.bfloat16)
        state = optimizer.init(params, placement)
        for step in range(2):
            updates, state = optimizer.update(make_grads(params, step), state, params, placement)
            params = optim.apply_updates(params, updates, placement)
    assert [p.shape for p in tree.leaves(params)] == [p.shape for p in tree.leaves(make_params())]


def test_adam_kernel_compiles_once() -> None:
    counter = CompileCounter()
    params = {"w": make_params()["embed"]}
    compiled = optim.adamw(
        optim.warmup_cosine(0.1, 2, 20), weight_decay=0.1, kernel=torch.compile(optim.adam_kernel, backend=counter, fullgraph=True)
    )
    eager = optim.adamw(optim.warmup_cosine(0.1, 2, 20), weight_decay=0.1)
    assert_close(run(compiled, params, 6), run(eager, params, 6))
    assert counter.frame_count == 1


# ------------------------------------------------------------------------------------------- masks, chains and partitions


@pytest.mark.parametrize("make", [optim.adamw, optim.sgd, optim.muon])
def test_mask(make: Callable[..., Optimizer]) -> None:
    params = make_matrices()
    by_path, _ = run(make(0.05, weight_decay=0.5, mask=lambda path, p: path == "a"), params, 3)
    by_tree, _ = run(make(0.05, weight_decay=0.5, mask={"a": True, "b": False, "c": False}), params, 3)
    decayed, _ = run(make(0.05, weight_decay=0.5), params, 3)
    free, _ = run(make(0.05, weight_decay=0.0), params, 3)
    assert_same(by_path, by_tree)
    assert_same(by_path, {"a": decayed["a"], "b": free["b"], "c": free["c"]})
    assert not torch.equal(decayed["b"], free["b"])


def test_no_decay_1d() -> None:
    picked = tree.map_with_path(optim.no_decay_1d, make_params())
    assert picked == {"embed": True, "layers": [{"w": True, "norm": False}, {"experts": True, "gain": False}]}


def test_adamw_is_its_chain() -> None:
    schedule = optim.warmup_cosine(0.1, 3, 20)
    parts = (optim.scale_by_adam(eps=1e-3), optim.add_decayed_weights(0.2, optim.no_decay_1d), optim.scale_by_learning_rate(schedule))
    fused = optim.adamw(schedule, eps=1e-3, weight_decay=0.2, mask=optim.no_decay_1d)
    assert_close(run(optim.chain(*parts), make_params())[0], run(fused, make_params())[0])


PARTS: list[Callable[[], Optimizer]] = [
    lambda: optim.clip_by_global_norm(0.7),
    lambda: optim.scale_by_adam(betas=(0.5, 0.9)),
    lambda: optim.add_decayed_weights(0.1, optim.no_decay_1d),
    lambda: optim.scale_by_schedule(lambda step: 0.5 + int(step)),
    lambda: optim.sgd(0.3, momentum=0.6),
]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=4), st.booleans(), st.integers(1, 3))
def test_chain_is_the_manual_loop(makers: list[Callable[[], Optimizer]], donate: bool, steps: int) -> None:
    parts = [make() for make in makers]
    got, state = run(optim.chain(*parts), make_params(), steps, donate=donate)
    params = make_params()
    states = [part.init(params) for part in parts]
    for step in range(steps):
        updates = make_grads(params, step)
        for i, part in enumerate(parts):
            updates, states[i] = part.update(updates, states[i], params)
        params = optim.apply_updates(params, updates)
    assert_same(got, params)
    assert_same(state, tuple(states))


PATHS = tree.paths(make_params())
CHOICES = {"adamw": lambda: optim.adamw(0.1), "sgd": lambda: optim.sgd(0.1, momentum=0.9), "unused": lambda: optim.sgd(1.0)}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["adamw", "sgd"]), min_size=len(PATHS), max_size=len(PATHS)), st.booleans(), st.booleans())
def test_partition_is_separate_optimizers(labels: list[str], as_tree: bool, donate: bool) -> None:
    by_path = dict(zip(PATHS, labels, strict=True))
    choice = tree.from_items(make_params(), by_path) if as_tree else lambda path, p: by_path[path]
    got, state = run(optim.partition(choice, {label: make() for label, make in CHOICES.items()}), make_params(), 3, donate=donate)
    alone = {label: run(CHOICES[label](), make_params(), 3) for label in ("adamw", "sgd")}
    assert_same(got, tree.from_items(got, {path: tree.items(alone[label][0])[path] for path, label in by_path.items()}))
    for label, (_, whole_state) in alone.items():
        kept = tree.items(state[label])
        for path, leaf in tree.items(whole_state).items():
            mine = path == "0" or any(path.endswith(p) for p in PATHS if by_path[p] == label)
            assert_same(kept[path], leaf if mine else None)


def test_muon_adamw_routes() -> None:
    optimizer = optim.muon_adamw(optim.warmup_constant(0.1, 10), adamw_lr=0.3)
    _, state = run(optimizer, make_params(), 3)
    by_muon = {path for path, leaf in tree.items(state["muon"].momentum).items() if leaf is not None}
    by_adamw = {path for path, leaf in tree.items(state["adamw"].mean).items() if leaf is not None}
    assert by_muon == {"layers.0.w", "layers.1.experts"}
    assert by_adamw == {"embed", "layers.0.norm", "layers.1.gain"}
    assert {k: v.item() for k, v in optimizer.metrics(state).items()} == pytest.approx({"muon/lr": 0.03, "adamw/lr": 0.3})
    assert not optim.hidden_matrix("lm_head", torch.ones(2, 2)) and not optim.hidden_matrix("experts.up_bias", torch.ones(2, 2))


# -------------------------------------------------------------------------------------------------------------- placement


class Rows:
    """A placement for tests: ``ranks`` threads, each with its rows of every matrix; other leaves are whole on each."""

    donate = False

    def __init__(self, rank: int, ranks: int, board: dict[Any, Any], barrier: threading.Barrier) -> None:
        self.rank, self.ranks, self.board, self.barrier = rank, ranks, board, barrier

    def exchange(self, key: str, value: Tensor) -> list[Tensor]:
        self.board[key, self.rank] = value.clone()  # the owner goes on and overwrites its own
        self.barrier.wait()
        values = [self.board[key, rank] for rank in range(self.ranks)]
        self.barrier.wait()
        return values

    def norm(self, grads: Tree) -> Tensor:
        own = sum((g.square().sum() for g in tree.leaves(grads) if g.ndim >= 2 or self.rank == 0), torch.zeros((), dtype=torch.float64))
        return torch.stack(self.exchange("norm", torch.as_tensor(own))).sum().sqrt()

    def matrices(self, path: str, local: Tensor) -> Tensor:
        return torch.cat(self.exchange(path, local), -2)

    def cut(self, path: str, whole: Tensor) -> Tensor:
        return whole.tensor_split(self.ranks, -2)[self.rank] if whole.ndim >= 2 else whole


@pytest.mark.parametrize("ranks", [2, 5])
def test_sharded_is_whole(ranks: int) -> None:
    """Uneven and empty shards too: the update is that of whole matrices, clipped by the norm of all elements."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.muon_adamw(0.1, ns_dtype=torch.float64))
    want, want_state = run(optimizer, make_params(), 3)
    board, barrier, results = dict[Any, Any](), threading.Barrier(ranks, timeout=20), dict[int, Any]()

    def rank_main(rank: int) -> None:
        placement = Rows(rank, ranks, board, barrier)
        params = tree.map_with_path(placement.cut, make_params())
        state = optimizer.init(params, placement)
        for step in range(3):
            grads = tree.map_with_path(placement.cut, make_grads(make_params(), step))
            updates, state = optimizer.update(grads, state, params, placement)
            params = optim.apply_updates(params, updates, placement)
        results[rank] = params, optimizer.metrics(state)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(ranks):
        params, metrics = results[rank]
        assert_close(params, tree.map_with_path(Rows(rank, ranks, board, barrier).cut, want))
        assert metrics["grad_norm"].item() == pytest.approx(optimizer.metrics(want_state)["grad_norm"].item(), rel=1e-6)


# ----------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.adamw(-0.1), r"adamw: lr must be a number in \[0, inf\), got -0.1"),
        (lambda: optim.adamw(math.nan), r"lr must be .* got nan"),
        (lambda: optim.adamw(math.inf), r"lr must be .* got inf"),
        (lambda: optim.adamw("fast"), r"lr must be .* got 'fast'"),  # pyright: ignore[reportArgumentType]
        (lambda: optim.adamw(0.1, betas=(1.0, 0.9)), r"adamw: betas\[0\] must be a number in \[0, 1\), got 1.0"),
        (lambda: optim.adamw(0.1, betas=(0.9, -0.1)), r"betas\[1\] .* got -0.1"),
        (lambda: optim.adamw(0.1, eps=0.0), r"eps must be a number in \(0, inf\), got 0.0"),
        (lambda: optim.adamw(0.1, weight_decay=-1.0), r"weight_decay .* got -1.0"),
        (lambda: optim.scale_by_adam(eps=-1.0), r"scale_by_adam: eps .* got -1.0"),
        (lambda: optim.sgd(-0.1), r"sgd: lr .* got -0.1"),
        (lambda: optim.sgd(0.1, momentum=1.0), r"momentum must be a number in \[0, 1\), got 1.0"),
        (lambda: optim.sgd(0.1, momentum=0.9, dampening=1.5), r"dampening must be a number in \[0, 1\], got 1.5"),
        (lambda: optim.sgd(0.1, nesterov=True), r"nesterov needs momentum > 0 and dampening = 0, got momentum=0.0"),
        (lambda: optim.sgd(0.1, momentum=0.5, dampening=0.5, nesterov=True), r"nesterov needs .* dampening=0.5"),
        (lambda: optim.sgd(0.1, weight_decay=-1.0), r"sgd: weight_decay .* got -1.0"),
        (lambda: optim.muon(-0.1), r"muon: lr .* got -0.1"),
        (lambda: optim.muon(0.1, momentum=-0.1), r"muon: momentum .* got -0.1"),
        (lambda: optim.muon(0.1, ns_steps=0), r"ns_steps must be a number in \[1, 100\), got 0"),
        (lambda: optim.muon(0.1, eps=0.0), r"muon: eps .* got 0.0"),
        (lambda: optim.muon(0.1, ns_coefficients=(1.0, 2.0)), r"ns_coefficients must be three numbers"),  # pyright: ignore[reportArgumentType]
        (lambda: optim.muon(0.1, ns_dtype=torch.int32), r"ns_dtype must be a floating point dtype, got torch.int32"),
        (lambda: optim.muon(0.1, adjust_lr_fn="no"), r"adjust_lr_fn must be one of .*'original'.* got 'no'"),  # pyright: ignore[reportArgumentType]
        (lambda: optim.clip_by_global_norm(0.0), r"max_norm must be a number in \(0, inf\), got 0.0"),
        (lambda: optim.add_decayed_weights(-0.1), r"weight_decay .* got -0.1"),
        (lambda: optim.scale_by_learning_rate(-0.1), r"scale_by_learning_rate: lr .* got -0.1"),
        (lambda: optim.constant(-0.1), r"constant: lr .* got -0.1"),
        (lambda: optim.warmup_cosine(0.1, 11, 10), r"warmup must be at most total, got warmup=11 and total=10"),
        (lambda: optim.warmup_linear(0.1, -1, 10), r"warmup must be a whole number of steps, at least 0, got -1"),
        (lambda: optim.warmup_linear(0.1, 0, 0), r"total must be a whole number of steps, at least 1, got 0"),
        (lambda: optim.warmup_constant(0.1, 2.5), r"warmup must be a whole number .* got 2.5"),  # pyright: ignore[reportArgumentType]
        (lambda: optim.warmup_cosine(0.1, 1, 10, -0.1), r"final .* got -0.1"),
        (lambda: optim.warmup_cosine(-0.1, 1, 10), r"peak .* got -0.1"),
        (lambda: optim.warmup_cosine(0.1, 1, 10)(-1), r"step must be at least 0, got -1"),
        (lambda: optim.partition(lambda path, p: 0, {}), r"optimizers is empty"),
    ],
)
def test_bad_arguments_are_refused_when_given(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_trees_are_refused() -> None:
    params = make_params()
    adamw = optim.adamw(0.1)
    state = adamw.init(params)
    with pytest.raises(ValueError, match=r"only in grads: \['bad'\], only in params: \['embed', "):
        adamw.update({"bad": torch.ones(1)}, state, params)
    with pytest.raises(ValueError, match=r"state is not of the structure of params"):
        adamw.update({"w": torch.ones(1)}, state, {"w": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'embed': the gradient has shape \(4, 7\), the parameter \(7, 4\)"):
        adamw.update(make_grads(params, 0) | {"embed": torch.ones(4, 7)}, state, params)
    with pytest.raises(ValueError, match=r"leaf 'embed' has a gradient, but no parameter"):
        adamw.update(make_grads(params, 0), state, params | {"embed": None})
    with pytest.raises(ValueError, match=r"leaf 'ids' is torch.int64, not a floating point tensor"):
        adamw.init({"ids": torch.ones(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"mask is not of the structure of params"):
        optim.adamw(0.1, mask={"w": True}).init(params)
    with pytest.raises(ValueError, match=r"muon: leaf 'layers.0.norm' of shape \(5,\) has no matrix: use muon_adamw or partition"):
        optim.muon(0.1).init({"layers": [{"norm": torch.ones(5)}]})
    with pytest.raises(ValueError, match=r"leaf 'embed' has the label 'x', but optimizers are given for \['y'\]"):
        optim.partition(lambda path, p: "x", {"y": adamw}).init(params)
    with pytest.raises(ValueError, match=r"partition: labels is not of the structure of params"):
        optim.partition({"w": "y"}, {"y": adamw}).init(params)
    with pytest.raises(ValueError, match=r"grads is not of the structure of params"):
        optim.apply_updates(params, {"w": torch.ones(1)})
    twice = optim.chain(adamw, optim.scale_by_learning_rate(0.1))
    with pytest.raises(ValueError, match=r"metric 'lr' is reported twice"):
        twice.metrics(twice.init(params))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_advance_is_update_and_apply(donate: bool, dtype: torch.dtype) -> None:
    """The fused form gives the same to rounding, for leaves that decay, that do not, without gradient, and (bfloat16) not fused at all;
    nothing that is not donated is modified."""
    generator = torch.Generator().manual_seed(0)

    def copied(values: Tree) -> Any:
        return tree.map(lambda leaf: None if leaf is None else leaf.clone(), values)

    def draw() -> dict[str, Tensor]:
        return {"w": torch.randn(33, 7, generator=generator).to(dtype), "b": torch.randn(5, generator=generator).to(dtype)}

    params = {**draw(), "fixed": torch.ones(3, dtype=dtype)}
    optimizer = optim.chain(
        optim.clip_by_global_norm(0.5), optim.adamw(lr=optim.warmup_constant(0.1, 3), weight_decay=0.1, mask=optim.no_decay_1d)
    )
    trained = {**params, "fixed": None}
    plain, plain_state = copied(params), optimizer.init(trained)
    fused, fused_state = copied(params), optimizer.init(trained)
    for _ in range(4):
        grads = {**draw(), "fixed": None}
        updates, plain_state = optimizer.update(copied(grads), plain_state, plain)
        plain = optim.apply_updates(plain, updates)
        given = copied((grads, fused_state, fused))
        before = tree.leaves((grads, fused_state, fused))
        fused, fused_state = optim.advance(optimizer, grads, fused_state, fused, Unplaced(donate))
        if not donate:
            for had, now in zip(tree.leaves(given), before, strict=True):
                assert had is None or torch.equal(had, now)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]
    for want, got in zip(tree.leaves((plain, plain_state)), tree.leaves((fused, fused_state)), strict=True):
        assert want is None or torch.allclose(want.double(), got.double(), rtol=tolerance, atol=tolerance)
    assert torch.equal(fused["fixed"], params["fixed"])


def test_who_replaces_an_update_replaces_its_fused_form() -> None:
    """An optimizer whose update is wrapped must not go on by the unwrapped fast path."""
    inner = optim.adamw(lr=0.1)

    def nothing(grads: Any, state: Any, params: Any, placement: Any = None) -> Any:
        return tree.map(torch.zeros_like, grads), state

    params = {"w": torch.ones(3)}
    changed, _ = optim.advance(inner._replace(update=nothing), params, inner.init(params), params)
    assert torch.equal(changed["w"], params["w"])
