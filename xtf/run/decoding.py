"""Scores of the next token with a key-value cache: what was run through the model once is not run again.

The model's own stages run, built with an attention op that appends keys and values to buffers and attends new tokens to all
that is there. To the caller `NextToken` is a pure function of the ids; what it remembers only saves work.

Dims: n new tokens, S all tokens, D head size, Dv value head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int32, Shaped
from torch import Tensor

from xtf import tree
from xtf.backends import backend_of
from xtf.batch import pack
from xtf.model import Model, scoring
from xtf.ops import Ops
from xtf.ops.reference import attend_with_sinks, check_attention
from xtf.stage import Stage
from xtf.tree import Tree

_QUERIES = 256  # at a time, so that neither mask nor scores of a long prompt are ever square


class NextToken:
    """``scores(ids) -> (V,)``: the model's scores of the token that follows ``ids``, in the parameters' dtype.

    Equal to ``model.logits(params, ids)[0, -1]``, for any ids. Only what follows the prefix that agrees with the ids of the
    call before is run through the model. Rotary tables that depend on how long the document is (``dynamic``, ``longrope``)
    change what was cached: where they do, everything is run again. For ``dynamic`` that is every token beyond the original
    context.

    Args:
        model: any model whose tokens see each other through ``ops.attention`` only.
        params: whole parameters; their device is where it runs.

    Raises:
        ValueError: if the parameters are not this model's.

    Example:
        >>> from xtf.models import preset
        >>> model = preset("tiny-moe")
        >>> scores = NextToken(model, model.init(0))
        >>> scores([5, 6, 7]).shape, scores([5, 6, 7, 8]).shape, scores.computed
        (torch.Size([2048]), torch.Size([2048]), 4)
    """

    def __init__(self, model: Model, params: Tree) -> None:
        leaves: dict[str, Tensor] = tree.items(params)
        self._model, self._device = model, next(iter(leaves.values())).device
        self._cache = _Cache()
        stages = model.build(Ops("cached", self._cache.attention, backend_of(self._device).ops.grouped_mm))
        missing = sorted({path for stage in stages for path in stage.params.values()} - leaves.keys())
        if missing:
            raise ValueError(f"the parameters have no {missing[:5]}: they are not this model's (of a state, give state.params)")
        self._stages = [(stage, {name: leaves[path] for name, path in stage.params.items()}) for stage in scoring(stages)]
        self._head, self._read = leaves[stages[-1].params["weight"]], stages[-1].reads[0]
        self._seen: list[int] = []
        self._probed: list[Any] = []
        self.computed = 0
        """Tokens that were run through the model, in all calls together."""

    def __call__(self, ids: Sequence[int]) -> Float[Tensor, " V"]:
        """See `NextToken`.

        Raises:
            ValueError: for no ids, an id outside the vocabulary, or a model that cannot be run token by token.
        """
        ids = list(ids)
        if not ids:
            raise ValueError("there are no ids to continue: give at least one")
        with torch.no_grad():
            probed = self._probe(len(ids))
            start = min(_agreeing(ids, self._seen), len(ids) - 1) if _equal(probed, self._probed) else 0
            self._seen, self._probed = ids[:start], probed  # if it fails half way, what is half done is not taken for done
            hidden = self._run(ids[start:], start)
            self._seen = ids
            self.computed += len(ids) - start
            return F.linear(hidden[-1], self._head)

    def _run(self, ids: list[int], start: int) -> Float[Tensor, "n H"]:
        positions = torch.arange(start, start + len(ids), device=self._device)
        consts = self._model.pack({"input_ids": torch.tensor([ids], device=self._device), "positions": positions[None]}, supervised=False)
        self._cache.begin(start)
        values: dict[str, Tensor] = {}
        for stage, params in self._stages:
            before = self._cache.calls
            written = stage(params, tuple(values[name] for name in stage.reads), consts)
            if "cu_seqlens" in stage.consts and self._cache.calls == before:
                raise _not_by_token(stage)
            values.update(zip(stage.writes, written, strict=True))
        return values[self._read]

    def _probe(self, length: int) -> list[Any]:
        """What the family's constants are for the token at position 1 of a document of this length: equal as long as what is cached
        holds. (Position 0 would not do: it is rotated by nothing.)"""
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self._device)
        positions = torch.tensor([[1, max(1, length - 1)]], device=self._device)
        packed = pack({"input_ids": ids, "positions": positions})
        found = self._model.constants(packed)
        return [value[0] if isinstance(value, Tensor) and value.dim() else value for _, value in sorted(found.items())]


class _Cache:
    """Keys and values of every call of attention in the order of calls, which is that of the layers."""

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._start = 0
        self.calls = 0

    def begin(self, start: int) -> None:
        """The next run of the stages brings the tokens from ``start`` on; those before it are kept."""
        self._start, self.calls = start, 0

    def attention(
        self,
        q: Float[Tensor, "n heads D"],
        k: Float[Tensor, "n kv_heads D"],
        v: Float[Tensor, "n kv_heads Dv"],
        cu_seqlens: Int32[Tensor, " bounds"],
        *,
        scale: float,
        window: int | None = None,
        sinks: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "n heads Dv"]:
        """`xtf.ops.Attention` of new tokens to themselves and to all that came before; they are one document."""
        check_attention(q, k, v, window, sinks)
        start, layer = self._start, self.calls
        self.calls += 1
        if layer == len(self._layers):
            self._layers.append((k[:0], v[:0]))
        keys, values = (_put(old, new, start) for old, new in zip(self._layers[layer], (k, v), strict=True))
        self._layers[layer] = keys, values
        parts = enumerate(torch.split(q, _QUERIES))
        return torch.cat([_attend(part, keys, values, start + i * _QUERIES, scale, window, sinks) for i, part in parts])


def _put(
    buffer: Shaped[Tensor, "capacity kv_heads D"], new: Shaped[Tensor, "n kv_heads D"], start: int
) -> Shaped[Tensor, "larger kv_heads D"]:
    """The buffer with ``new`` from row ``start`` on; where it is too small, one at least twice as large."""
    end = start + new.shape[0]
    if end > buffer.shape[0]:
        larger = new.new_empty(max(end, 2 * buffer.shape[0]), *new.shape[1:])
        larger[:start] = buffer[:start]
        buffer = larger
    buffer[start:end] = new
    return buffer


def _attend(
    q: Float[Tensor, "n heads D"],
    keys: Float[Tensor, "capacity kv_heads D"],
    values: Float[Tensor, "capacity kv_heads Dv"],
    start: int,
    scale: float,
    window: int | None,
    sinks: Float[Tensor, " heads"] | None,
) -> Float[Tensor, "n heads Dv"]:
    """Queries at positions ``start`` to ``start + n``, keys at positions from 0."""
    n, end = q.shape[0], start + q.shape[0]
    begin = 0 if window is None else max(0, start - window + 1)
    if sinks is not None:
        seen = _mask(start, end, begin, window, q.device)
        return attend_with_sinks(q, keys[begin:end], values[begin:end], seen, sinks, scale)
    mask = None if n == 1 else _mask(start, end, begin, window, q.device)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, keys[begin:end], values[begin:end]))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def _mask(start: int, end: int, begin: int, window: int | None, device: torch.device) -> Bool[Tensor, "n S"]:
    """Which keys from ``begin`` each query from ``start`` sees."""
    back = torch.arange(start, end, device=device)[:, None] - torch.arange(begin, end, device=device)
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def _equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True))


def _not_by_token(stage: Stage) -> ValueError:
    return ValueError(
        f"the stage {stage.name!r} reads where documents begin but does not use ops.attention: tokens see each other in a way that has "
        "no cache here, so the model cannot be run token by token; run model.logits on the whole sequence"
    )
