"""Dispatchers: how tokens reach experts that lie on several ranks, and how results come back.

A `Dispatcher` gives the two moves around the experts of a rank as transfers with their transposes. Three are here, by name in
`DISPATCHERS`: ``"deduplicated"`` sends a token once to each rank that has experts of it, ``"all_to_all"`` once for each expert,
``"all_gather"`` sends every token to every rank. Nothing is padded and nothing is dropped. What is chosen is sent as it was routed:
the backward moves gradients along the same way and routes nothing.

What arrives is R rows and N slots: slot s is row ``source[s]`` seen by one local expert, slots are sorted by expert, and
``weights[s]`` is what the result counts. The combining move sums a row's results where the experts are, so that its own transpose
needs nothing but the way back.

Dims: T tokens of this rank, H hidden size, k experts per token, n ranks on the axis, E experts, Em those of this rank, P pairs of
a token of this rank and a rank that has experts of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from xtf.collectives import Axis, Work
from xtf.collectives.planned import read
from xtf.experts import sum_rows
from xtf.placement import part
from xtf.record import Extra
from xtf.stage import Transfer

READS = ("h", "router_weights", "router_indices")
"""What a dispatch takes: tokens (T, H), weights (T, k) and int64 indices (T, k) of their experts."""

ARRIVED = ("moe.rows", "moe.weights", "moe.source", "moe.offsets")
"""What the experts take of what a dispatch gives: rows (R, H), weights (N,), int64 source (N,), int32 offsets (Em,)."""

WAY = ("moe.way", "moe.ticket")
"""The rest of what it gives, for the way back: int64 on the device, and int64 on the host."""

COMPUTED = "moe.computed"
"""What the experts give: (R, H), the weighted sum of each row's results."""

COMBINED = "moe.combined"
"""What comes back: (T, H), the sum of each token's results."""


class Moves(NamedTuple):
    """The transfers of a dispatcher; see `xtf.stage.Exchange` for what each takes and gives.

    Args:
        dispatch: `READS` to `ARRIVED` and `WAY`.
        dispatch_back: its transpose.
        combine: `COMPUTED` and `WAY` to `COMBINED`.
        combine_back: its transpose.
    """

    dispatch: Transfer
    dispatch_back: Transfer
    combine: Transfer
    combine_back: Transfer


class Dispatcher(Protocol):
    """Makes the `Moves` of one stage.

    Args:
        axis: the ranks that the experts are spread over; rank i has the experts ``part((0, experts), n, i)``.
        experts: E, any number.
        label: the name of the stage.
    """

    def __call__(self, axis: Axis, experts: int, label: str) -> Moves: ...


def deduplicated(axis: Axis, experts: int, label: str) -> Moves:
    """A token goes once to each rank that has experts of it, and comes back once, its results there summed by their weights.

    Per layer and step all ranks together send, with P' the pairs of a token and *another* rank that has experts of it:
    ``4 × P' × H`` values of the tokens' dtype (there and back, in forward and in backward), ``2 × P' × k`` weights and their
    gradients, ``P' × k`` int32 expert numbers, and ``16 × n × (n - 1)`` bytes of counts. Used by DeepSeek-V3 (arXiv 2412.19437,
    3.2.2) between nodes.
    """
    n, (begin, end) = axis.size, part((0, experts), axis.size, axis.index)
    starts = [part((0, experts), n, i)[0] for i in range(n)]

    def count(mine: Tensor) -> Tensor:
        """(n, 2): to each rank, pairs and slots."""
        return torch.stack([mine.any(-1).sum(1), mine.sum((1, 2))], 1)

    def start(reads: tuple[Tensor, ...]) -> Any:
        h, weights, indices = reads
        tokens, k = indices.shape
        owner = _owner(indices, starts)
        mine = _of_ranks(owner, n)
        hits = mine.any(-1)
        received, (send, receive, slots) = _exchange(
            axis,
            count(mine),
            label,
            lambda sent, got: (sent[:, 0], got[:, 0], got[:, 1]),
            lambda: count(_of_ranks(_owner(axis.mesh.routing(tokens, k, experts), starts), n)),
        )
        rank, token = torch.nonzero_static(hits, size=sum(send)).unbind(1)  # by rank, then by token
        here = owner.index_select(0, token) == rank.unsqueeze(1)  # (P, k)
        first = torch.tensor(starts, device=indices.device).index_select(0, rank)
        local = (indices.index_select(0, token) - first.unsqueeze(1)).masked_fill(~here, -1).to(torch.int32)
        works = [
            axis.start_all_to_all(x, send, receive, label=label)
            for x in (h.index_select(0, token), weights.index_select(0, token).masked_fill(~here, 0), local)
        ]
        return works, received, token, _ticket([tokens, k, sum(slots)], send, receive)

    def wait(handle: Any) -> Any:
        (rows, weights, local), _, token, ticket = [w.wait() for w in handle[0]], *handle[1:]
        slots, offsets = _sorted(local.flatten(), end - begin, int(ticket[2]))
        source = slots // max(local.shape[1], 1)
        writes = (rows, weights.flatten().index_select(0, slots), source, offsets, token, ticket)
        return writes, (slots, token, ticket)

    def start_back(given: Any) -> Any:
        (slots, token, ticket), (drows, dweights, *_) = given
        (_, k, _), send, receive = _read(ticket, n)
        by_slot = dweights.new_zeros(sum(receive) * k).scatter_(0, slots, dweights).view(-1, k)
        works = [axis.start_all_to_all(x, receive, send, label=label) for x in (drows, by_slot)]
        return works, token, ticket

    def wait_back(handle: Any) -> Any:
        (drows, by_pair), token, ticket = [w.wait() for w in handle[0]], *handle[1:]
        tokens = int(ticket[0])
        # a slot's gradient comes from one rank, the others give 0
        return sum_rows(drows, token, tokens), sum_rows(by_pair, token, tokens), None

    def combine(reads: tuple[Tensor, ...]) -> Any:
        computed, token, ticket = reads
        _, send, receive = _read(ticket, n)
        return axis.start_all_to_all(computed, receive, send, label=label), token, ticket

    def combined(handle: Any) -> Any:
        work, token, ticket = handle
        return (sum_rows(work.wait(), token, int(ticket[0])),), (token, ticket)

    def combine_back(given: Any) -> Work:
        (token, ticket), (dcombined,) = given
        _, send, receive = _read(ticket, n)
        return axis.start_all_to_all(dcombined.index_select(0, token), send, receive, label=label)

    return Moves(Transfer(start, wait), Transfer(start_back, wait_back), Transfer(combine, combined), Transfer(combine_back, _returned))


def all_to_all(axis: Axis, experts: int, label: str) -> Moves:
    """A token goes to each of its experts.

    Per layer and step all ranks together send, with S' the slots (a token and one of its experts) of experts on *another* rank:
    ``4 × S' × H`` values of the tokens' dtype, ``2 × S'`` weights and their gradients, and ``8 × n × (n - 1) × ceil(E / n)``
    bytes of counts. Lepikhin et al. 2020, "GShard", without its capacity.
    """
    n, (begin, end) = axis.size, part((0, experts), axis.size, axis.index)
    starts, ends = zip(*(part((0, experts), n, i) for i in range(n)), strict=True)
    sizes = [stop - start for start, stop in zip(starts, ends, strict=True)]
    most = max(sizes)

    def count(by_expert: Tensor) -> Tensor:
        """(n, most): to each expert of each rank, slots; they are given by their experts, in order."""
        until = torch.searchsorted(by_expert, torch.arange(experts, device=by_expert.device), right=True)
        per_expert = until.diff(prepend=until.new_zeros(1))
        counts = per_expert.new_zeros(n, most)
        for i, first in enumerate(starts):
            counts[i, : sizes[i]] = per_expert[first : first + sizes[i]]
        return counts

    def start(reads: tuple[Tensor, ...]) -> Any:
        h, weights, indices = reads
        tokens, k = indices.shape
        by_expert, way = indices.flatten().sort(stable=True)
        received, (send, receive) = _exchange(
            axis,
            count(by_expert),
            label,
            lambda sent, got: (sent.sum(1), got.sum(1)),
            lambda: count(axis.mesh.routing(tokens, k, experts).flatten().sort().values),
        )
        works = [
            axis.start_all_to_all(x, send, receive, label=label)
            for x in (h.index_select(0, way // max(k, 1)), weights.flatten().index_select(0, way))
        ]
        return works, received, way, _ticket([tokens, k], send, receive)

    def wait(handle: Any) -> Any:
        (rows, weights), (counts, _), way, ticket = [w.wait() for w in handle[0]], *handle[1:]
        runs = counts.flatten().cumsum(0)  # where the rows of each sender's each expert end
        every = torch.arange(rows.shape[0], device=rows.device)
        local = torch.searchsorted(runs, every, right=True) % most
        source, offsets = _sorted(local, end - begin, rows.shape[0])
        return (rows, weights.index_select(0, source), source, offsets, way, ticket), (source, way, ticket)

    def start_back(given: Any) -> Any:
        (source, way, ticket), (drows, dweights, *_) = given
        _, send, receive = _read(ticket, n)
        by_row = torch.empty_like(dweights).scatter_(0, source, dweights)
        works = [axis.start_all_to_all(x, receive, send, label=label) for x in (drows, by_row)]
        return works, way, ticket

    def wait_back(handle: Any) -> Any:
        (drows, dweights), way, ticket = [w.wait() for w in handle[0]], *handle[1:]
        tokens, k = (int(v) for v in ticket[:2])
        return _sum_slots(drows, way, tokens, k), torch.empty_like(dweights).scatter_(0, way, dweights).view(tokens, k), None

    def combine(reads: tuple[Tensor, ...]) -> Any:
        computed, way, ticket = reads
        _, send, receive = _read(ticket, n)
        return axis.start_all_to_all(computed, receive, send, label=label), way, ticket

    def combined(handle: Any) -> Any:
        work, way, ticket = handle
        return (_sum_slots(work.wait(), way, int(ticket[0]), int(ticket[1])),), (way, ticket)

    def combine_back(given: Any) -> Work:
        (way, ticket), (dcombined,) = given
        (_, k), send, receive = _read(ticket, n)
        return axis.start_all_to_all(dcombined.index_select(0, way // max(k, 1)), send, receive, label=label)

    return Moves(Transfer(start, wait), Transfer(start_back, wait_back), Transfer(combine, combined), Transfer(combine_back, _returned))


def all_gather(axis: Axis, experts: int, label: str) -> Moves:
    """Every rank gets all tokens of the axis, computes its own experts on those that want them, and the results are summed by a
    reduce-scatter. For small axes, where most tokens go to most ranks anyway.

    Per layer and step all ranks together send, with T' the tokens of all ranks of the axis: ``4 × (n - 1) × T' × H`` values of the
    tokens' dtype, ``2 × (n - 1) × T' × k`` weights and their gradients, ``(n - 1) × T' × k`` int32 expert numbers, and
    ``16 × n × (n - 1)`` bytes of counts.
    """
    n, (begin, end) = axis.size, part((0, experts), axis.size, axis.index)
    starts = [part((0, experts), n, i)[0] for i in range(n)]

    def count(indices: Tensor) -> Tensor:
        """(n, 2): to each rank, all tokens and its slots."""
        slots = _of_ranks(_owner(indices, starts), n).sum((1, 2))
        return torch.stack([torch.full_like(slots, indices.shape[0]), slots], 1)

    def start(reads: tuple[Tensor, ...]) -> Any:
        h, weights, indices = reads
        received, (sizes, wanted) = _exchange(
            axis,
            count(indices),
            label,
            lambda sent, got: (got[:, 0], got[:, 1]),
            lambda: count(axis.mesh.routing(indices.shape[0], indices.shape[1], experts)),
        )
        works = [_gather(axis, x, sizes, label) for x in (h, weights, indices.to(torch.int32))]
        return works, received, (h.shape[1], indices.shape[1]), _ticket([*indices.shape, sum(wanted)], sizes, sizes)

    def wait(handle: Any) -> Any:
        works, _, (width, k), ticket = handle
        rows, weights, indices = (w.wait() for w in works)
        slots, offsets = _sorted(torch.where((indices >= begin) & (indices < end), indices - begin, -1), end - begin, int(ticket[2]))
        writes = (rows.view(-1, width), weights.index_select(0, slots), slots // max(k, 1), offsets, slots, ticket)
        return writes, (slots, ticket)

    def start_back(given: Any) -> Any:
        (slots, ticket), (drows, dweights, *_) = given
        (_, k, _), sizes, _ = _read(ticket, n)
        by_slot = dweights.new_zeros(sum(sizes) * k).scatter_(0, slots, dweights)
        return [_scatter(axis, x, sizes, label) for x in (drows, by_slot.view(-1, k))], drows.shape[1], k

    def wait_back(handle: Any) -> Any:
        (drows, dweights), width, k = handle
        return drows.wait().view(-1, width), dweights.wait().view(-1, k), None

    def combine(reads: tuple[Tensor, ...]) -> Any:
        computed, _, ticket = reads
        _, sizes, _ = _read(ticket, n)
        return _scatter(axis, computed, sizes, label), computed.shape[1], ticket

    def combined(handle: Any) -> Any:
        work, width, ticket = handle
        return (work.wait().view(-1, width),), ticket

    def combine_back(given: Any) -> Any:
        ticket, (dcombined,) = given
        _, sizes, _ = _read(ticket, n)
        return _gather(axis, dcombined, sizes, label), dcombined.shape[1]

    def combined_back(handle: Any) -> Any:
        work, width = handle
        return work.wait().view(-1, width), None, None

    return Moves(Transfer(start, wait), Transfer(start_back, wait_back), Transfer(combine, combined), Transfer(combine_back, combined_back))


DISPATCHERS: Mapping[str, Dispatcher] = {"deduplicated": deduplicated, "all_to_all": all_to_all, "all_gather": all_gather}
"""The dispatchers by name."""


def _returned(work: Work) -> tuple[Tensor, None, None]:
    return work.wait(), None, None


def _owner(indices: Int64[Tensor, "T k"], starts: list[int]) -> Int64[Tensor, "T k"]:
    """The rank on the axis that has each expert; ``starts`` is the first expert of each rank, and ranks may have none."""
    return torch.bucketize(indices, torch.tensor(starts[1:], device=indices.device, dtype=indices.dtype), right=True)


def _of_ranks(owner: Int64[Tensor, "T k"], n: int) -> Bool[Tensor, "n T k"]:
    """Which choices are experts of each rank."""
    return owner.unsqueeze(0) == torch.arange(n, device=owner.device)[:, None, None]


def _exchange(
    axis: Axis,
    counts: Int64[Tensor, "n m"],
    label: str,
    wanted: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    stated: Callable[[], Tensor],
) -> tuple[tuple[Tensor, Extra], list[list[int]]]:
    """Exchange the counts of what goes to each rank; ``wanted(sent, received)``, each (n,), comes to the host in one synchronisation.
    Where counts have no values they are those of a ``stated`` routing, and every rank sends what this one sends."""
    received = axis.exchange_counts(counts, label=label)

    def planned() -> Tensor:
        sent = stated()
        return torch.stack(wanted(sent, sent[axis.index].expand_as(sent)))

    rows: list[list[int]] = read(torch.stack(wanted(counts, received)), planned)
    return (received, Extra(bytes=counts.nbytes // axis.size * (axis.size - 1), syncs=1)), rows


def _ticket(first: list[int], send: list[int], receive: list[int]) -> Int64[Tensor, " numbers"]:
    return torch.tensor([*first, *send, *receive])


def _read(ticket: Any, n: int) -> tuple[list[int], list[int], list[int]]:
    numbers: list[int] = ticket.tolist()
    return numbers[: -2 * n], numbers[-2 * n : -n], numbers[-n:]


def _sorted(local: Tensor, experts: int, slots: int) -> tuple[Int64[Tensor, " N"], Int32[Tensor, " Em"]]:
    """The places of ``local`` that are an expert's number (not negative), sorted by expert, and where each expert's end. There are
    ``slots`` of them."""
    by_expert, places = torch.where(local < 0, experts, local).sort(stable=True)
    every = torch.arange(experts, device=local.device, dtype=by_expert.dtype)
    return places[:slots], torch.searchsorted(by_expert, every, right=True, out_int32=True)


def _sum_slots(rows: Float[Tensor, "S H"], way: Int64[Tensor, " S"], tokens: int, k: int) -> Float[Tensor, "T H"]:
    """The sum of each token's rows; row i is slot ``way[i]``. In at least float32."""
    place = torch.empty_like(way).scatter_(0, way, torch.arange(way.shape[0], device=way.device))
    by_token = rows.index_select(0, place).view(tokens, k, rows.shape[1])
    return by_token.sum(1, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)


def _gather(axis: Axis, x: Tensor, sizes: list[int], label: str) -> Work:
    width = x.shape[1]
    return axis.start_all_gather(x.reshape(-1), [size * width for size in sizes], label=label)


def _scatter(axis: Axis, x: Tensor, sizes: list[int], label: str) -> Work:
    width = x.shape[1]
    return axis.start_reduce_scatter(x.reshape(-1), [size * width for size in sizes], label=label)
