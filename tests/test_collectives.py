"""Collectives, on simulated ranks and on gloo alike: values, gradients, bytes; and what simulated ranks find out by themselves."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import gloo
from xtf.collectives import Axis, Work
from xtf.mesh import Mesh, simulate

Names = tuple[str, ...]

SIMULATED: Sequence[tuple[dict[str, int], Names]] = [
    *[({"data": n}, ("data",)) for n in range(1, 9)],
    ({"data": 2, "expert": 4}, ("expert",)),
    ({"data": 3, "expert": 2}, ("data",)),
    ({"data": 3, "expert": 2}, ("data", "expert")),
    ({"data": 3, "expert": 2}, ("expert", "data")),
    ({"pod": 2, "data": 2, "expert": 2}, ("expert", "pod")),
]
GLOO: Sequence[tuple[dict[str, int], Names]] = [
    *[({"data": n}, ("data",)) for n in (2, 3, 4)],
    ({"data": 2, "expert": 2}, ("expert",)),
    ({"data": 2, "expert": 2}, ("data", "expert")),
    ({"data": 2, "expert": 2}, ("expert", "data")),
]
WHERE = [pytest.param("simulated", *case, id=f"simulated-{case}") for case in SIMULATED] + [
    pytest.param("gloo", *case, id=f"gloo-{case}") for case in GLOO
]


def run(where: str, fn: Callable[..., Any], *args: Any, sizes: dict[str, int]) -> list[Any]:
    """``fn(mesh, *args)`` on every rank, in rank order."""
    if where == "simulated":
        return simulate(lambda mesh: fn(mesh, *args), **sizes)
    ranks = 1
    for size in sizes.values():
        ranks *= size
    return gloo.run(fn, *args, ranks=ranks, **sizes)


def members(sizes: dict[str, int], rank: int, names: Names) -> list[int]:
    """The ranks on the axis through ``rank``, in axis order, by listing every coordinate."""
    places = [dict(zip(sizes, place, strict=True)) for place in itertools.product(*(range(size) for size in sizes.values()))]
    on_axis = [r for r, place in enumerate(places) if all(place[n] == places[rank][n] for n in sizes if n not in names)]
    return sorted(on_axis, key=lambda r: [places[r][n] for n in names])


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small whole numbers, different on each rank; their sums are exact in every dtype."""
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 5 + 3 * rank) % 13 - 6).to(dtype).reshape(shape)


def piece_sizes(n: int, kind: str) -> list[int]:
    return {"equal": [3] * n, "uneven": [(2 * i + 1) % 5 for i in range(n)], "one": [0] * (n - 1) + [4], "empty": [0] * n}[kind]


def rows(i: int, j: int, kind: str) -> int:
    """Rows that the rank at place i sends to the one at place j."""
    return {"equal": 2, "uneven": (i + 2 * j) % 4, "one": 3 * (i == 0), "empty": 0}[kind]


def _primitives(mesh: Mesh, names: Names, dtype: torch.dtype, kind: str) -> dict[str, tuple[Tensor, int]]:
    """Every primitive once, all under way together and waited for backwards; the result and bytes of each."""
    axis, rank, n = mesh.join(*names), mesh.rank, mesh.join(*names).size
    sizes = piece_sizes(n, kind)
    send, receive = [rows(axis.index, j, kind) for j in range(n)], [rows(i, axis.index, kind) for i in range(n)]
    xs = {
        "all_gather": data(rank, sizes[axis.index], dtype=dtype),
        "reduce_scatter": data(rank, sum(sizes), dtype=dtype),
        "all_reduce": data(rank, 2, 3, dtype=dtype),
        "max": data(rank, 5, dtype=dtype),
        "scalar": data(rank, dtype=dtype),
        "all_to_all": data(rank, sum(send), 3, dtype=dtype),
        "broadcast": data(rank, 3, 2, dtype=dtype).t(),  # not contiguous
        "permute": data(rank, 3, dtype=dtype),
        "permute back": data(rank, 3, dtype=dtype),
    }
    before = {name: x.clone() for name, x in xs.items()}
    works: dict[str, Work] = {
        "all_gather": axis.start_all_gather(xs["all_gather"], sizes, label="gather"),
        "reduce_scatter": axis.start_reduce_scatter(xs["reduce_scatter"], sizes),
        "all_reduce": axis.start_all_reduce(xs["all_reduce"]),
        "max": axis.start_all_reduce(xs["max"], "max"),
        "scalar": axis.start_all_reduce(xs["scalar"]),
        "all_to_all": axis.start_all_to_all(xs["all_to_all"], send, receive),
        "broadcast": axis.start_broadcast(xs["broadcast"], n - 1),
        "permute": axis.start_permute(xs["permute"], 1),
        "permute back": axis.start_permute(xs["permute back"], -2),
    }
    counts = axis.exchange_counts(torch.tensor(send))
    results = {name: works[name].wait() for name in reversed(works)}
    axis.barrier()
    assert counts.tolist() == receive
    assert all(works[name].wait() is result for name, result in results.items())
    assert all(torch.equal(xs[name], x) for name, x in before.items())
    assert works["all_gather"].op == "all_gather" and works["all_gather"].axis is axis and works["all_gather"].label == "gather"
    return {name: (result, works[name].bytes) for name, result in results.items()}


def expected(group: list[int], i: int, dtype: torch.dtype, kind: str) -> dict[str, tuple[Tensor, int]]:
    """What `_primitives` gives at place ``i`` of ``group``, by formula."""
    n, item = len(group), dtype.itemsize
    sizes = piece_sizes(n, kind)
    start = sum(sizes[:i])

    def total(*shape: int) -> Tensor:
        return torch.stack([data(r, *shape, dtype=dtype) for r in group]).sum(0).to(dtype)

    def sent(source: int, to: int) -> Tensor:
        table = [rows(source, j, kind) for j in range(n)]
        x = data(group[source], sum(table), 3, dtype=dtype)
        return x[sum(table[:to]) : sum(table[: to + 1])]

    reduced = {name: round(2 * (n - 1) / n * size * item) for name, size in (("all_reduce", 6), ("max", 5), ("scalar", 1))}
    alone = n == 1
    return {
        "all_gather": (torch.cat([data(r, s, dtype=dtype) for r, s in zip(group, sizes, strict=True)]), (sum(sizes) - sizes[i]) * item),
        "reduce_scatter": (total(sum(sizes))[start : start + sizes[i]], (sum(sizes) - sizes[i]) * item),
        "all_reduce": (total(2, 3), reduced["all_reduce"]),
        "max": (torch.stack([data(r, 5, dtype=dtype) for r in group]).amax(0), reduced["max"]),
        "scalar": (total(), reduced["scalar"]),
        "all_to_all": (torch.cat([sent(j, i) for j in range(n)]), sum(rows(i, j, kind) for j in range(n) if j != i) * 3 * item),
        "broadcast": (data(group[-1], 3, 2, dtype=dtype).t(), 0 if alone else 6 * item),
        "permute": (data(group[(i - 1) % n], 3, dtype=dtype), 0 if alone else 3 * item),
        "permute back": (data(group[(i + 2) % n], 3, dtype=dtype), 3 * item if 2 % n else 0),
    }


@pytest.mark.parametrize(("where", "sizes", "names"), WHERE)
@pytest.mark.parametrize("kind", ["equal", "uneven", "one", "empty"])
def test_primitives(where: str, sizes: dict[str, int], names: Names, kind: str) -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
    for dtype in dtypes:
        for rank, found in enumerate(run(where, _primitives, names, dtype, kind, sizes=sizes)):
            group = members(sizes, rank, names)
            for name, (value, bytes) in expected(group, group.index(rank), dtype, kind).items():
                assert found[name][0].dtype == dtype, name
                assert found[name][0].shape == value.shape and torch.equal(found[name][0], value), (name, rank)
                assert found[name][1] == bytes, (name, rank)


def _own_primitives(mesh: Mesh, names: Names) -> tuple[Tensor, Tensor]:
    """Equal pieces by the primitives that other backends have for them, and gloo too."""
    axis = mesh.join(*names)
    axis._gloo = False  # pyright: ignore[reportAttributeAccessIssue]
    try:
        whole = axis.start_all_gather(data(mesh.rank, 3), [3] * axis.size).wait()
        return whole, axis.start_reduce_scatter(data(mesh.rank, 3 * axis.size), [3] * axis.size).wait()
    finally:
        axis._gloo = True  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("sizes", "names"), GLOO)
def test_primitives_of_other_backends(sizes: dict[str, int], names: Names) -> None:
    for rank, found in enumerate(run("gloo", _own_primitives, names, sizes=sizes)):
        group = members(sizes, rank, names)
        reference = expected(group, group.index(rank), torch.float64, "equal")
        assert torch.equal(found[0], reference["all_gather"][0]) and torch.equal(found[1], reference["reduce_scatter"][0])


# Gradients. Each case is a function of this rank's tensor; the loss is the sum over ranks of `_value` of each rank's result.


def _all_gather_exchanged(axis: Axis, x: Tensor) -> Tensor:
    return axis.all_gather(x, dim=1)


def _all_gather_given(axis: Axis, x: Tensor) -> Tensor:
    return axis.all_gather(x, -1, [axis_width(j) for j in range(axis.size)])


def _reduce_scatter(axis: Axis, x: Tensor) -> Tensor:
    return axis.reduce_scatter(x)


def _reduce_scatter_uneven(axis: Axis, x: Tensor) -> Tensor:
    return axis.reduce_scatter(x, 0, [0] * (axis.size - 1) + [x.shape[0]])


def _all_reduce(axis: Axis, x: Tensor) -> Tensor:
    return axis.all_reduce(x)


def _all_to_all(axis: Axis, x: Tensor) -> Tensor:
    n = axis.size
    return axis.all_to_all(x, [rows(axis.index, j, "uneven") for j in range(n)], [rows(i, axis.index, "uneven") for i in range(n)])


def _broadcast(axis: Axis, x: Tensor) -> Tensor:
    return axis.broadcast(x, axis.size - 1)


def _permute(axis: Axis, x: Tensor) -> Tensor:
    return axis.permute(x, 1)


def axis_width(i: int) -> int:
    return (2 * i + 1) % 4


def _shape_wide(i: int, n: int) -> tuple[int, ...]:
    return 2, axis_width(i)


def _shape_divisible(i: int, n: int) -> tuple[int, ...]:
    return 2 * n, 3


def _shape_fixed(i: int, n: int) -> tuple[int, ...]:
    return 4, 3


def _shape_sent(i: int, n: int) -> tuple[int, ...]:
    return sum(rows(i, j, "uneven") for j in range(n)), 2


def _of_wide(xs: list[Tensor], i: int) -> Tensor:
    return torch.cat(xs, 1)


def _of_divisible(xs: list[Tensor], i: int) -> Tensor:
    return torch.stack(xs).sum(0)[2 * i : 2 * i + 2]


def _of_uneven(xs: list[Tensor], i: int) -> Tensor:
    return torch.stack(xs).sum(0)[: 4 if i == len(xs) - 1 else 0]


def _of_reduce(xs: list[Tensor], i: int) -> Tensor:
    return torch.stack(xs).sum(0)


def _of_sent(xs: list[Tensor], i: int) -> Tensor:
    n = len(xs)
    blocks = [x.split([rows(j, k, "uneven") for k in range(n)]) for j, x in enumerate(xs)]
    return torch.cat([block[i] for block in blocks])


def _of_broadcast(xs: list[Tensor], i: int) -> Tensor:
    return xs[-1]


def _of_permute(xs: list[Tensor], i: int) -> Tensor:
    return xs[(i - 1) % len(xs)]


Shape = Callable[[int, int], tuple[int, ...]]
CASES: list[tuple[Callable[[Axis, Tensor], Tensor], Shape, Callable[[list[Tensor], int], Tensor]]] = [
    (_all_gather_exchanged, _shape_wide, _of_wide),
    (_all_gather_given, _shape_wide, _of_wide),
    (_reduce_scatter, _shape_divisible, _of_divisible),
    (_reduce_scatter_uneven, _shape_fixed, _of_uneven),
    (_all_reduce, _shape_fixed, _of_reduce),
    (_all_to_all, _shape_sent, _of_sent),
    (_broadcast, _shape_fixed, _of_broadcast),
    (_permute, _shape_fixed, _of_permute),
]


def _input(rank: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def _value(y: Tensor, rank: int) -> Tensor:
    """Not linear, and different on each rank."""
    return ((y * (rank + 1)).sin() * (1 + torch.arange(y.numel(), dtype=y.dtype)).view(y.shape)).sum()


def _gradients(mesh: Mesh, names: Names, form: Callable[[Axis, Tensor], Tensor], shape: Shape) -> list[Tensor]:
    """The gradient by torch.func.grad, by torch.func.vjp and by autograd, and the gradient of its product with a fixed vector."""
    axis = mesh.join(*names)
    x = _input(mesh.rank, shape(axis.index, axis.size))

    def value(x: Tensor) -> Tensor:
        return _value(form(axis, x), mesh.rank)

    def product(x: Tensor) -> Tensor:
        return (torch.func.grad(value)(x) * x.detach().cos()).sum()

    by_grad = torch.func.grad(value)(x)
    out, pullback = torch.func.vjp(value, x)  # pyright: ignore[reportAssignmentType]
    leaf = x.clone().requires_grad_()
    value(leaf).backward()
    assert leaf.grad is not None and out.shape == ()
    return [by_grad, *pullback(torch.ones_like(out)), leaf.grad, torch.func.grad(product)(x)]


def _reference(sizes: dict[str, int], names: Names, shape: Shape, of: Callable[[list[Tensor], int], Tensor]) -> list[list[Tensor]]:
    """The same on one process, as a function of all ranks' tensors."""
    world = 1
    for size in sizes.values():
        world *= size
    groups = [members(sizes, rank, names) for rank in range(world)]
    xs = [_input(rank, shape(group.index(rank), len(group))) for rank, group in enumerate(groups)]

    def loss(xs: list[Tensor]) -> Tensor:
        return torch.stack([_value(of([xs[r] for r in g], g.index(rank)), rank) for rank, g in enumerate(groups)]).sum()

    def product(varied: list[Tensor]) -> Tensor:
        return torch.stack([(g * x.cos()).sum() for g, x in zip(torch.func.grad(loss)(varied), xs, strict=True)]).sum()

    return [[first, first, first, second] for first, second in zip(torch.func.grad(loss)(xs), torch.func.grad(product)(xs), strict=True)]


@pytest.mark.parametrize(("where", "sizes", "names"), [case for i, case in enumerate(WHERE) if i not in (3, 5, 6)])
def test_gradients(where: str, sizes: dict[str, int], names: Names) -> None:
    for form, shape, of in CASES:
        found = run(where, _gradients, names, form, shape, sizes=sizes)
        for rank, (ours, theirs) in enumerate(zip(found, _reference(sizes, names, shape, of), strict=True)):
            for mine, reference in zip(ours, theirs, strict=True):
                torch.testing.assert_close(
                    mine, reference, rtol=1e-12, atol=1e-12, msg=f"{form.__name__}, rank {rank}: {mine} and {reference}"
                )


def _tensor_parallel(mesh: Mesh, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Two layers of which each rank has some of the hidden columns."""
    axis = mesh["data"]

    def value(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (axis.sum((axis.copy(x) @ up).tanh() @ down) ** 3).sum()

    own = slice(axis.index * 2, axis.index * 2 + 2)
    gradients, loss = torch.func.grad_and_value(value, argnums=(0, 1, 2))(x, up[:, own], down[own])  # pyright: ignore[reportAssignmentType]
    return loss, gradients


@pytest.mark.parametrize(("where", "ranks"), [("simulated", 1), ("simulated", 4), ("gloo", 2)])
def test_tensor_parallel_pair(where: str, ranks: int) -> None:
    x, up, down = _input(0, (5, 3)), _input(1, (3, 2 * ranks)), _input(2, (2 * ranks, 4))
    reference, loss = torch.func.grad_and_value(lambda x, up, down: (((x @ up).tanh() @ down) ** 3).sum(), argnums=(0, 1, 2))(x, up, down)
    found = run(where, _tensor_parallel, x, up, down, sizes={"data": ranks})
    for value, (dx, _, _) in found:
        torch.testing.assert_close(value, loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(dx, reference[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([g[1] for _, g in found], 1), reference[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([g[2] for _, g in found], 0), reference[2], rtol=1e-12, atol=1e-12)


def test_simulated_sums_are_in_rank_order() -> None:
    xs = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 10.0**rank for rank in range(7)]
    total = xs[0].clone()
    for x in xs[1:]:
        total += x

    def body(mesh: Mesh) -> tuple[Tensor, Tensor]:
        axis, x = mesh["data"], xs[mesh.rank]
        return axis.all_reduce(x), axis.all_gather(axis.reduce_scatter(x, 0, [100, 0, 300, 1, 2, 97, 500]))

    for reduced, scattered in simulate(body, data=7):
        assert torch.equal(reduced, total) and torch.equal(scattered, total)


def test_simulated_input_is_free_after_wait() -> None:
    """A rank that overwrites its input as soon as its own wait returns changes nobody's result."""

    def body(mesh: Mesh) -> Tensor:
        x = torch.full((1000,), float(mesh.rank))
        result = mesh["data"].start_all_gather(x, [1000] * 4).wait()
        x.fill_(-1)
        mesh["data"].barrier()
        result[mesh.rank] += 1  # results are each rank's own
        return result

    for rank, result in enumerate(simulate(body, data=4)):
        reference = torch.arange(4.0).repeat_interleave(1000)
        reference[rank] += 1
        assert torch.equal(result, reference)


def test_simulated_start_does_not_block() -> None:
    order: list[str] = []

    def body(mesh: Mesh) -> None:
        axis, turn = mesh["data"], mesh.rank == 0
        if turn:
            work = axis.start_all_reduce(torch.ones(1))
            order.append("started")
            started.set()
            assert work.wait().item() == 2
        else:
            assert started.wait(10)
            order.append("joins")
            axis.all_reduce(torch.ones(1))

    started = threading.Event()
    simulate(body, data=2)
    assert order == ["started", "joins"]


Body = Callable[[Mesh], Any]


def _caught(body: Body, **sizes: int) -> list[str]:
    """What each rank raises."""

    def catch(mesh: Mesh) -> str:
        with pytest.raises(RuntimeError) as caught:
            body(mesh)
        return str(caught.value)

    found = simulate(catch, **sizes)
    with pytest.raises(RuntimeError) as caught:
        simulate(body, **sizes)
    assert str(caught.value).split(":")[0] == found[0].split(":")[0]
    return found


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (
            [
                lambda a: a.start_all_reduce(torch.ones(3), label="loss"),
                lambda a: a.start_all_gather(torch.ones(2), [2, 2], label="layer.1"),
            ],
            ["all_reduce 'loss' of float32[3]", "all_gather 'layer.1' of float32[2] sizes=(2, 2)"],
        ),
        (
            [lambda a: a.start_all_reduce(torch.ones(3), label="a"), lambda a: a.start_all_reduce(torch.ones(3), label="b")],
            ["all_reduce 'a'", "all_reduce 'b'"],
        ),
        ([lambda a: a.start_all_reduce(torch.ones(3)), lambda a: a.start_all_reduce(torch.ones(4))], ["float32[3]", "float32[4]"]),
        (
            [lambda a: a.start_all_reduce(torch.ones(3)), lambda a: a.start_all_reduce(torch.ones(3).double())],
            ["float32[3]", "float64[3]"],
        ),
        (
            [lambda a: a.start_all_reduce(torch.ones(3)), lambda a: a.start_all_reduce(torch.ones(3), "max")],
            ["reduction=sum", "reduction=max"],
        ),
        (
            [lambda a: a.start_all_gather(torch.ones(1), [1, 2]), lambda a: a.start_all_gather(torch.ones(3), [1, 3])],
            ["sizes=(1, 2)", "sizes=(1, 3)"],
        ),
        (
            [
                lambda a: a.start_all_to_all(torch.ones(3, 2), [1, 2], [1, 1]),
                lambda a: a.start_all_to_all(torch.ones(2, 2), [1, 1], [1, 1]),
            ],
            ["send=(1, 2) receive=(1, 1)", "send=(1, 1) receive=(1, 1)"],
        ),
        (
            [
                lambda a: a.start_all_to_all(torch.ones(2, 2), [1, 1], [1, 1]),
                lambda a: a.start_all_to_all(torch.ones(2, 3), [1, 1], [1, 1]),
            ],
            ["float32[2, 2]", "float32[2, 3]"],
        ),
        ([lambda a: a.start_broadcast(torch.ones(1), 0), lambda a: a.start_broadcast(torch.ones(1), 1)], ["root=0", "root=1"]),
        ([lambda a: a.start_permute(torch.ones(1), 0), lambda a: a.start_permute(torch.ones(1), 1)], ["shift=0", "shift=1"]),
        (
            [lambda a: a.barrier(), lambda a: a.exchange_counts(torch.ones(2, dtype=torch.int64))],
            ["barrier", "exchange_counts of int64[2]"],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value[0], str) else "",
)
def test_different_collectives_raise_on_all(calls: list[Callable[[Axis], Work | Tensor | None]], words: list[str]) -> None:
    def body(mesh: Mesh) -> None:
        work = calls[mesh.rank % 2](mesh["data"])
        if isinstance(work, Work):
            work.wait()
        mesh["expert"].barrier()

    found = _caught(body, expert=2, data=2)
    assert len(set(found)) == 1
    assert "different collectives on the axis 'data'" in found[0]
    assert all(word in found[0] for word in words)
    assert ("rank 0" in found[0] and "rank 1" in found[0]) or ("rank 2" in found[0] and "rank 3" in found[0])


def test_deadlock_of_crossed_axes_raises_on_all() -> None:
    """0 waits for 2, 2 for 3, 3 for 1, 1 for 0."""
    axes = ["data", "expert", "expert", "data"]

    def body(mesh: Mesh) -> None:
        mesh[axes[mesh.rank]].all_reduce(torch.ones(2), label=f"of {mesh.rank}")

    found = _caught(body, data=2, expert=2)
    assert len(set(found)) == 1 and found[0].startswith("deadlock")
    for rank, other in ((0, 2), (1, 0), (2, 3), (3, 1)):
        place = f"rank {rank} waits on the axis {axes[rank]!r} in all_reduce 'of {rank}' of float32[2] reduction=sum for ranks [{other}]"
        assert place in found[0]


def test_deadlock_is_found_while_others_run() -> None:
    """0 waits for 3, 3 for 4 (and 5), 4 for 1, 1 for 0 (and 2): the cycle stands, whatever 2 and 5 do."""
    axes = {0: "data", 1: "expert", 3: "expert", 4: "data"}

    def body(mesh: Mesh) -> None:
        while mesh.rank not in axes:
            time.sleep(0.01)
        mesh[axes[mesh.rank]].barrier()

    with pytest.raises(RuntimeError, match=r"^deadlock: rank 0 waits.*rank 2 runs.*rank 4 waits.*rank 5 runs") as caught:
        simulate(body, data=2, expert=3)
    assert "simulated rank" in caught.value.__notes__[0]


@pytest.mark.parametrize("late", [False, True])
def test_deadlock_with_a_finished_rank(late: bool) -> None:
    def body(mesh: Mesh) -> None:
        if mesh.rank == 1:
            time.sleep(0.1 * late)
            return
        if mesh.rank == 2:
            while True:
                time.sleep(0.01)
        time.sleep(0.1 * (not late))
        mesh.join("a", "b").all_reduce(torch.ones(1), label="norm")

    with pytest.raises(
        RuntimeError, match=r"^deadlock: rank 0 waits on the axis 'a,b' in all_reduce 'norm'.*rank 1 has finished; rank 2 runs"
    ):
        simulate(body, a=3, b=1)


class Special(Exception):
    pass


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_exception_ends_the_others(failing: int) -> None:
    """Those that wait, those that come later to a collective, and those that never do."""
    before = threading.active_count()
    error = Special("this one")
    ended: set[int] = set()

    def body(mesh: Mesh) -> None:
        try:
            if mesh.rank == failing:
                time.sleep(0.05)
                raise error
            if mesh.rank == 2:
                while True:
                    pass
            mesh["data"].all_reduce(torch.ones(1))
        finally:
            ended.add(mesh.rank)

    with pytest.raises(Special) as caught:
        simulate(body, data=4)
    assert caught.value is error and f"simulated rank {failing} of 4" in caught.value.__notes__[0]
    assert ended == {0, 1, 2, 3} and threading.active_count() == before


def test_value_error_of_one_rank_is_the_one_raised() -> None:
    with pytest.raises(ValueError, match="sum\\(sizes\\) = 4 elements"):
        simulate(lambda mesh: mesh["data"].start_reduce_scatter(torch.ones(4 + mesh.rank), [2, 2]).wait(), data=2)


def test_keyboard_interrupt_ends_the_ranks() -> None:
    before, main = threading.active_count(), threading.main_thread().ident
    assert main is not None and threading.current_thread() is threading.main_thread()

    def body(mesh: Mesh) -> None:
        if mesh.rank == 0:
            signal.pthread_kill(main, signal.SIGINT)
        while True:
            mesh["data"].barrier()

    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            simulate(body, data=3)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert threading.active_count() == before


def test_one_thread_each_and_grad_mode() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            assert simulate(lambda mesh: (torch.get_num_threads(), torch.is_grad_enabled()), data=3) == [(1, False)] * 3
        assert torch.get_num_threads() == 2
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.start_all_gather(torch.ones(3), [2, 2]), r"sizes\[0\] elements of sizes=\(2, 2\), got \[3\]"),
        (lambda a: a.start_all_gather(torch.ones(2, 1), [2, 2]), r"one dim"),
        (lambda a: a.start_all_gather(torch.ones(2), [2]), r"each of the 2 ranks of the axis 'data', got \(2,\)"),
        (lambda a: a.start_all_gather(torch.ones(2), [2, -1]), r"0 or more"),
        (lambda a: a.start_reduce_scatter(torch.ones(3), [2, 2]), r"sum\(sizes\) = 4 elements, got \[3\]"),
        (lambda a: a.start_all_reduce(torch.ones(3), "mean"), r"'sum' or 'max', got 'mean'"),
        (lambda a: a.start_all_to_all(torch.ones(3), [2, 2], [2, 2]), r"sum\(send\) = 4 rows, got the shape \[3\]"),
        (lambda a: a.start_all_to_all(torch.tensor(1.0), [0, 0], [0, 0]), r"the shape \[\]"),
        (lambda a: a.start_all_to_all(torch.ones(3), [1, 2], [2, 1]), r"must be equal, got 1 and 2"),
        (lambda a: a.start_all_to_all(torch.ones(3), [1, 2], [1]), r"receive must hold"),
        (lambda a: a.start_broadcast(torch.ones(3), 2), r"root must be 0 to 1 .* got 2"),
        (lambda a: a.exchange_counts(torch.ones(3, dtype=torch.int64)), r"\(2, \.\.\.\) int64"),
        (lambda a: a.exchange_counts(torch.ones(2)), r"\(2, \.\.\.\) int64"),
        (lambda a: a.all_gather(torch.ones(3), 1), r"dim must be"),
        (lambda a: a.all_gather(torch.tensor(1.0)), r"dim must be"),
        (lambda a: a.all_gather(torch.ones(3), 0, [4, 4]), r"size 3, expected sizes\[0\]"),
        (lambda a: a.all_gather(torch.ones(3), 0, [3]), r"all_gather: sizes must hold"),
        (lambda a: a.reduce_scatter(torch.ones(3)), r"size 3, which the 2 ranks of the axis 'data' do not divide"),
        (lambda a: a.reduce_scatter(torch.ones(3), 0, [1, 1]), r"size 3, but sizes \(1, 1\) sum to 2"),
        (lambda a: torch.func.grad(lambda x: a.start_all_reduce(x).wait().sum())(torch.ones(3)), r"use the differentiable form"),
    ],
)
def test_bad_arguments(call: Callable[[Axis], object], message: str) -> None:
    def body(mesh: Mesh) -> None:
        if mesh.rank == 0:
            with pytest.raises(ValueError, match=message):
                call(mesh["data"])

    simulate(body, data=2)


def _raises(mesh: Mesh, failing: int) -> int:
    if mesh.rank == failing:
        raise Special("on purpose")
    return mesh.rank


def test_gloo_pool_reports_and_recovers() -> None:
    with pytest.raises(Special, match="on purpose") as caught:
        gloo.run(_raises, 1, ranks=3)
    assert "on rank 1" in caught.value.__notes__[0] and "in _raises" in caught.value.__notes__[0]
    assert gloo.run(_raises, -1, ranks=3) == [0, 1, 2]
    with pytest.raises(ValueError, match="ranks must be 1 to 4, got 5"):
        gloo.run(_raises, -1, ranks=5)


def _die(mesh: Mesh) -> None:
    if mesh.rank == 1:
        os._exit(1)


def test_gloo_pool_is_made_anew_when_a_worker_dies() -> None:
    with pytest.raises(RuntimeError, match="gloo rank 1 of 2 died"):
        gloo.run(_die, ranks=2)
    assert gloo.run(_raises, -1, ranks=4) == [0, 1, 2, 3]


def _wrong_on_gloo(mesh: Mesh) -> list[str]:
    try:
        mesh["data"].all_reduce(torch.ones(2, dtype=torch.int16), label="stage")
    except RuntimeError as error:
        return error.__notes__
    return []


def test_gloo_errors_name_the_collective() -> None:
    for notes in gloo.run(_wrong_on_gloo, ranks=2):
        assert len(notes) == 1 and notes[0].endswith("all_reduce 'stage' of int16[2] reduction=sum on the axis 'data'")
