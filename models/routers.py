"""Routers: which experts a token goes to, with what weights, and what is counted on the way.

A `Router` describes one; `router_fn` makes the function of its stage; `router_loss` is what routers add to the loss, and
`bias_update` balances the load without any loss. Scores are in at least float32.

What routers count are sums over valid tokens, so that sums over ranks, micro-batches and parts of a micro-batch are exact. What is
not linear in tokens, the balance of each document, is computed from such sums by a stage of its own (`sequence_fn`).

Dims: T tokens, H hidden size, E experts, k experts per token, G groups of experts, N documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from xtf.model import AuxLoss, Update
from xtf.models import hf
from xtf.models.common import Leaves, rms_norm
from xtf.spec import Init, ParamSpec
from xtf.stage import Params, StageFn, Values
from xtf.tree import Path

_TINY = 1e-20  # keeps a sum of scores that all vanish from dividing by 0


@dataclass(frozen=True)
class Router:
    """How tokens are routed.

    Args:
        experts: E.
        top_k: k.
        scoring: scores of the logits, ``"softmax"`` over all experts, or ``"sigmoid"`` of each (DeepSeek-V3).
        normalize: whether the weights of a token's experts are made to sum to one.
        scale: factor on the weights.
        groups: G, the groups of equal size that experts stand in.
        groups_kept: groups among which a token's experts are chosen: those with the largest sum of their two best scores
            (DeepSeek-V3 2024, "node-limited routing").
        correction: whether a bias that no gradient reaches is added to the scores for the choice, not in the weights (Wang et al. 2024,
            "Auxiliary-loss-free load balancing"); see `bias_update`.
        bias: whether the logits have a trained bias.

    Raises:
        ValueError: for sizes that do not fit each other, and an unknown scoring.
    """

    experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    correction: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "groups", "groups_kept"):
            hf.check_integer(f"router {name}", getattr(self, name), 1)
        for name in ("normalize", "correction", "bias"):
            hf.check_flag(f"router {name}", getattr(self, name))
        hf.check_number("router scale", self.scale)
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"router scoring={self.scoring!r}; expected 'softmax' or 'sigmoid'")
        if self.groups > 1 and (self.experts % self.groups or self.experts // self.groups < 2):
            raise ValueError(f"router groups={self.groups} must cut experts={self.experts} into equal groups of at least 2")
        if self.groups_kept > self.groups:
            raise ValueError(f"router groups_kept={self.groups_kept} is more than groups={self.groups}")
        reach = self.experts // self.groups * self.groups_kept
        if self.top_k > reach:
            where = f"experts={self.experts}" if reach == self.experts else f"the {reach} experts of the groups that are kept"
            raise ValueError(f"router top_k={self.top_k} is more than {where}")

    def specs(self, leaves: Leaves, hidden: int) -> dict[str, ParamSpec]:
        """The router's parameters: ``router`` (E, H), ``router_bias`` (E,), and ``correction`` (E,), which is float32 in models of
        any dtype and is not trained. No logical axis is ``"expert"``: every token needs all of them."""
        found = {"router": leaves.matrix((self.experts, hidden), (None, "embed"))}
        if self.bias:
            found["router_bias"] = leaves.bias(self.experts, None)
        if self.correction:
            found["correction"] = ParamSpec((self.experts,), torch.float32, (None,), Init.constant(0.0), trainable=False)
        return found


def router_fn(router: Router, eps: float, *, documents: bool = False) -> StageFn:
    """The function of a router stage.

    ``(params, x (T, H), *, valid (T,)) -> (h (T, H), weights (T, k), indices (T, k), counts (E,), probs (E,), z (), entropy ())``: the
    tokens normed by ``params["norm"]``; the weights and int64 indices of each token's experts; then over valid tokens the int64 slots
    that each expert gets, and the sums of each token's distribution over experts (its scores, made to sum to one), of logsumexp² of
    the logits, and of the distribution's entropy in nats, which carries no gradient.

    Args:
        router: which.
        eps: of the norm.
        documents: also write, for each document, counts (N, E) and probs (N, E). The function then takes the constants ``document``
            (T,) and ``document_tokens`` (N,), see `document_constants`.

    Given the constant ``chosen`` (T, k), the function takes those experts instead of choosing (`xtf.experts.RoutesOnce`).
    """
    score = _SCORES[router.scoring]
    choose = _chooser(router)
    finish = _finisher(router)
    sums = _document_statistics if documents else _no_statistics

    def fn(
        params: Params, x: Float[Tensor, "T H"], *, valid: Bool[Tensor, " T"], chosen: Int64[Tensor, "T k"] | None = None, **consts: Tensor
    ) -> Values:
        h = rms_norm(x, params["norm"], eps)
        wide = torch.promote_types(h.dtype, torch.float32)
        bias = params.get("router_bias")
        logits = F.linear(h.to(wide), params["router"].to(wide), None if bias is None else bias.to(wide))
        scores, distribution = score(logits)
        weights, indices = choose(params, scores) if chosen is None else (scores.gather(1, chosen), chosen)
        counted = distribution * valid.to(wide).unsqueeze(-1)
        slots = valid.long().unsqueeze(-1).expand_as(indices)
        counts = torch.zeros(router.experts, dtype=torch.int64, device=x.device).scatter_add(0, indices.flatten(), slots.flatten())
        z = (logits.logsumexp(-1).square() * valid.to(wide)).sum()
        shares = distribution.detach()
        entropy = -(shares * shares.clamp_min(torch.finfo(wide).tiny).log() * valid.to(wide).unsqueeze(-1)).sum()
        return h, finish(weights), indices, counts, counted.sum(0), z, entropy, *sums(indices, slots, counted, **consts)

    return fn


def _softmax(logits: Float[Tensor, "T E"]) -> tuple[Float[Tensor, "T E"], Float[Tensor, "T E"]]:
    probs = logits.softmax(-1)
    return probs, probs


def _sigmoid(logits: Float[Tensor, "T E"]) -> tuple[Float[Tensor, "T E"], Float[Tensor, "T E"]]:
    scores = logits.sigmoid()
    return scores, scores / (scores.sum(-1, keepdim=True) + _TINY)


_SCORES: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"softmax": _softmax, "sigmoid": _sigmoid}
"""Scores, and the distribution over experts that statistics are taken of."""


def _chooser(router: Router) -> Callable[[Params, Tensor], tuple[Tensor, Tensor]]:
    """``(params, scores (T, E)) -> (scores of the chosen (T, k), which these are (T, k))``."""

    def best(params: Params, scores: Float[Tensor, "T E"]) -> tuple[Float[Tensor, "T k"], Int64[Tensor, "T k"]]:
        weights, indices = scores.topk(router.top_k, -1)
        return weights, indices

    def unbiased(params: Params, scores: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
        return scores.detach()

    def biased(params: Params, scores: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
        return scores.detach() + params["correction"].detach().to(scores.dtype)

    ranks = biased if router.correction else unbiased

    def everywhere(rank: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
        return rank

    def in_groups(rank: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
        grouped = rank.unflatten(-1, (router.groups, -1))
        kept = grouped.topk(2, -1)[0].sum(-1).topk(router.groups_kept, -1)[1]
        open_ = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=rank.device).scatter(1, kept, True)
        return grouped.masked_fill(~open_.unsqueeze(-1), -torch.inf).flatten(1)

    restrict = in_groups if router.groups_kept < router.groups else everywhere

    def by_rank(params: Params, scores: Float[Tensor, "T E"]) -> tuple[Float[Tensor, "T k"], Int64[Tensor, "T k"]]:
        indices = restrict(ranks(params, scores)).topk(router.top_k, -1)[1]
        return scores.gather(1, indices), indices

    return by_rank if router.correction or router.groups_kept < router.groups else best


def _finisher(router: Router) -> Callable[[Tensor], Tensor]:
    """From the scores of a token's experts to their weights."""

    def as_they_are(weights: Float[Tensor, "T k"]) -> Float[Tensor, "T k"]:
        return weights

    def sum_to_one(weights: Float[Tensor, "T k"]) -> Float[Tensor, "T k"]:
        return weights / (weights.sum(-1, keepdim=True) + _TINY)

    normalized = sum_to_one if router.normalize else as_they_are

    def scaled(weights: Float[Tensor, "T k"]) -> Float[Tensor, "T k"]:
        return normalized(weights) * router.scale

    return normalized if router.scale == 1 else scaled


# Documents ----------------------------------------------------------------------------------------------------------------------


def document_constants(packed: Mapping[str, Any]) -> dict[str, Tensor]:
    """What routers that count by document read, of a packed batch (`xtf.batch.pack`): ``document`` (T,) int64, which document a token
    is of, in ascending order, and ``document_tokens`` (N,) int64, how many valid tokens each document has.

    Example:
        >>> packed = {"cu_seqlens": torch.tensor([0, 2, 3], dtype=torch.int32), "valid": torch.tensor([True, True, False])}
        >>> {name: value.tolist() for name, value in document_constants(packed).items()}
        {'document': [0, 0, 1], 'document_tokens': [2, 0]}
    """
    cu_seqlens, valid = packed["cu_seqlens"], packed["valid"]
    tokens = torch.arange(valid.shape[0], device=valid.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
    count = torch.zeros(cu_seqlens.shape[0] - 1, dtype=torch.int64, device=valid.device)
    return {"document": document, "document_tokens": count.scatter_add(0, document, valid.long())}


class _DocumentSum(torch.autograd.Function):
    """Sums over the tokens of each document: ``(values (T, E), document (T,) ascending, document_tokens (N,)) -> (N, E)``.

    Differences of running sums in float64, and a gather backward: scattered additions of floats would come out otherwise each time.
    """

    @staticmethod
    def forward(values: Tensor, document: Tensor, document_tokens: Tensor) -> Tensor:
        running = torch.cat([values.new_zeros(1, values.shape[1], dtype=torch.float64), values.double().cumsum(0)])
        every = torch.arange(document_tokens.shape[0] + 1, dtype=document.dtype, device=document.device)
        at = running.index_select(0, torch.searchsorted(document, every))
        return (at[1:] - at[:-1]).to(values.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (document,) = ctx.saved_tensors
        return grads[0].index_select(0, document), None, None


def _document_statistics(
    indices: Int64[Tensor, "T k"],
    slots: Int64[Tensor, "T k"],
    counted: Float[Tensor, "T E"],
    *,
    document: Int64[Tensor, " T"],
    document_tokens: Int64[Tensor, " N"],
) -> tuple[Int64[Tensor, "N E"], Float[Tensor, "N E"]]:
    documents, experts = document_tokens.shape[0], counted.shape[1]
    places = (document.unsqueeze(-1) * experts + indices).flatten()
    counts = torch.zeros(documents * experts, dtype=torch.int64, device=indices.device).scatter_add(0, places, slots.flatten())
    return counts.view(documents, experts), _DocumentSum.apply(counted, document, document_tokens)


def _no_statistics(indices: Tensor, slots: Tensor, counted: Tensor) -> tuple[()]:
    return ()


def sequence_fn(top_k: int) -> StageFn:
    """The function of a statistics stage: ``(params, counts (N, E), probs (N, E), *, document_tokens (N,)) -> (balance (),)``.

    The balance of a document of n valid tokens is ``E × Σ (c / (n k)) × (p / n)`` (DeepSeek-V3 2024, section 2.1.2), 1 where its load is
    even; the result is its sum over documents, each weighted by n: divided by the tokens of all ranks it is their mean.
    """

    def fn(
        params: Params, counts: Int64[Tensor, "N E"], probs: Float[Tensor, "N E"], *, document_tokens: Int64[Tensor, " N"]
    ) -> tuple[Float[Tensor, ""]]:
        each = (counts.to(probs.dtype) * probs).sum(1) / document_tokens.clamp_min(1).to(probs.dtype)
        return (each.sum() * (counts.shape[1] / top_k),)

    return fn


# The loss -----------------------------------------------------------------------------------------------------------------------


def statistics(layer: int) -> tuple[str, str, str, str]:
    """The names under which a layer's router writes its counts, and its sums of probabilities, of logsumexp² and of entropy."""
    name = f"layers.{layer}.router"
    return f"{name}.counts", f"{name}.probs", f"{name}.z", f"{name}.entropy"


def document_statistics(layer: int) -> tuple[str, str]:
    """The names under which a layer's router writes counts and sums of probabilities of each document."""
    return f"layers.{layer}.router.document_counts", f"layers.{layer}.router.document_probs"


def sequence_statistic(layer: int) -> str:
    """The name of a layer's sum of the balances of documents."""
    return f"layers.{layer}.router.sequence"


def router_loss(
    layers: Sequence[int], *, top_k: int, coefficient: float, z_coefficient: float, pooled: bool = False, sequence_coefficient: float = 0.0
) -> AuxLoss:
    """What routers add to the loss.

    With c the slots and p the sum of probabilities of each expert over T tokens, a layer's balance is
    ``E × Σ (c / (T k)) × (p / T)`` (Fedus et al. 2021, "Switch Transformers"): 1 where the load is even. The loss is
    ``coefficient × Σ balance + z_coefficient × Σ z / T`` over layers (z: Zoph et al. 2022, "ST-MoE"), plus
    ``sequence_coefficient × Σ s / T`` with s of `sequence_fn`.

    Args:
        layers: the numbers of the sparse layers, at least one.
        top_k: k.
        coefficient: of the balance.
        z_coefficient: of the z-loss.
        pooled: take transformers' formula instead, ``E × Σ c̄ × p̄`` with c̄ and p̄ the means over all layers' tokens together:
            not divided by k, and one number whatever the number of layers.
        sequence_coefficient: of the balance of each document; above 0 the routers must count by document.

    Returns:
        An `xtf.model.AuxLoss`. Its metrics: ``aux_loss`` (), what is added; ``router_balance`` (layers,); ``router_z`` (layers,),
        the mean of logsumexp²; ``router_entropy`` (layers,), the mean entropy of a token's distribution over experts, in nats;
        ``expert_load`` (layers, E), the share of slots of each expert; ``load_violation`` (layers,), the largest load over the mean
        load, minus 1; ``dropped_tokens`` (), 0: every token reaches all experts that it is routed to; and with a
        ``sequence_coefficient``, ``router_sequence_balance`` (layers,).

    Raises:
        ValueError: for no layers, or a negative coefficient.
    """
    if not layers:
        raise ValueError("router_loss got no layers: a model without routers has no auxiliary loss")
    given = {"coefficient": coefficient, "z_coefficient": z_coefficient, "sequence_coefficient": sequence_coefficient}
    for name, value in given.items():
        if not value >= 0:
            raise ValueError(f"router_loss got {name}={value!r}; expected a number of at least 0")
    combined: Callable[[Tensor, Tensor], Tensor] = _pooled(top_k) if pooled else _per_layer
    by_sequence = [sequence_statistic(layer) for layer in layers] if sequence_coefficient else []

    def aux(stats: Mapping[str, Tensor], tokens: Int[Tensor, ""]) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        counts, probs, z, entropy = (torch.stack([stats[name] for name in names]) for names in zip(*map(statistics, layers), strict=True))
        total = tokens.clamp_min(1).to(probs.dtype)
        load, probs, z = counts.to(probs.dtype) / (total * top_k), probs / total, z / total
        loss = coefficient * combined(load, probs) + z_coefficient * z.sum()
        metrics = {
            "router_balance": load.shape[1] * (load * probs).sum(1),
            "router_z": z,
            "router_entropy": entropy / total,
            "expert_load": load,
            "load_violation": load.amax(1) * load.shape[1] - 1,
            "dropped_tokens": torch.zeros_like(total),
        }
        if by_sequence:
            sequence = torch.stack([stats[name] for name in by_sequence]) / total
            loss = loss + sequence_coefficient * sequence.sum()
            metrics["router_sequence_balance"] = sequence
        return loss, {name: value.detach() for name, value in (metrics | {"aux_loss": loss}).items()}

    return aux


def _per_layer(load: Float[Tensor, "layers E"], probs: Float[Tensor, "layers E"]) -> Float[Tensor, ""]:
    return load.shape[1] * (load * probs).sum()


def _pooled(top_k: int) -> Callable[[Tensor, Tensor], Tensor]:
    def pooled(load: Float[Tensor, "layers E"], probs: Float[Tensor, "layers E"]) -> Float[Tensor, ""]:
        return load.shape[1] * (load.mean(0) * top_k * probs.mean(0)).sum()

    return pooled


# The bias -----------------------------------------------------------------------------------------------------------------------


def bias_update(layers: Sequence[int], speed: float) -> Update | None:
    """The update of routers' corrections: experts that got less than the mean get a little more, those that got more a little less.

    ``b + speed × sign(mean count - count)`` after every step, with the counts of all its tokens (Wang et al. 2024, "Auxiliary-loss-free
    load balancing strategy for mixture-of-experts"; DeepSeek-V3's speed is 0.001).

    Args:
        layers: the numbers of the sparse layers.
        speed: by how much a bias changes in a step; 0 switches it off.

    Returns:
        An `xtf.model.Update`, or ``None`` for speed 0 or no layers.

    Raises:
        ValueError: for a speed that is no number of at least 0.

    Example:
        >>> update = bias_update([0], 0.1)
        >>> leaves, counts = {"layers.0.moe.correction": torch.zeros(3)}, {"layers.0.router.counts": torch.tensor([4, 2, 0])}
        >>> update(leaves, counts)["layers.0.moe.correction"].tolist()
        [-0.10000000149011612, 0.0, 0.10000000149011612]
    """
    hf.check_number("bias_update_speed", speed)
    if not speed >= 0:
        raise ValueError(f"bias_update_speed={speed!r}; expected a number of at least 0, as 1e-3; 0 switches the update off")
    if not speed or not layers:
        return None

    def update(leaves: Mapping[Path, Tensor], counted: Mapping[str, Tensor]) -> dict[Path, Tensor]:
        found: dict[Path, Tensor] = {}
        for layer in layers:
            path, counts = f"layers.{layer}.moe.correction", counted[statistics(layer)[0]]
            short = (counts.sum() - counts.shape[0] * counts).sign()  # in integers: a count that is the mean changes nothing
            found[path] = leaves[path] + speed * short.to(leaves[path].dtype)
        return found

    return update
