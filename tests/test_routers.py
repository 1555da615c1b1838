"""Routers: the choice of experts, what is counted, the losses and the bias that balances without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from xtf.models import routers
from xtf.models.common import rms_norm
from xtf.models.routers import Router, bias_update, document_constants, router_fn, router_loss, sequence_fn

DEEPSEEK = Router(12, 3, "sigmoid", scale=2.5, groups=4, groups_kept=2, correction=True)
STATISTICS = ("counts", "probs", "z", "entropy", "document_counts", "document_probs")


def params_of(router: Router, hidden: int = 8, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    found = {"norm": torch.rand(hidden, generator=g, dtype=torch.float64) + 0.5}
    found["router"] = torch.randn(router.experts, hidden, generator=g, dtype=torch.float64)
    if router.bias:
        found["router_bias"] = torch.randn(router.experts, generator=g, dtype=torch.float64)
    if router.correction:
        found["correction"] = 0.3 * torch.randn(router.experts, generator=g)
    return found


def tokens(n: int, hidden: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(n, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def everywhere(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.bool)


@pytest.mark.parametrize(
    "router",
    [
        DEEPSEEK,
        Router(12, 3, "sigmoid", normalize=False, scale=1.5, groups=3, groups_kept=1, correction=True),
        Router(6, 2, "sigmoid", correction=True),
    ],
    ids=["groups", "one group, weights as they are", "no groups"],
)
def test_choice_is_that_of_transformers(router: Router) -> None:
    config = DeepseekV3Config(
        hidden_size=8,
        n_routed_experts=router.experts,
        num_experts_per_tok=router.top_k,
        n_group=router.groups,
        topk_group=router.groups_kept,
        norm_topk_prob=router.normalize,
        routed_scaling_factor=router.scale,
    )
    params, x = params_of(router), tokens(64)
    reference = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        reference.weight.copy_(params["router"])
        assert isinstance(reference.e_score_correction_bias, Tensor)
        reference.e_score_correction_bias.copy_(params["correction"])
        h, weights, indices, *_ = router_fn(router, 1e-6)(params, x, valid=everywhere(64))
        _, want_weights, want_indices = reference(h.float())
    torch.testing.assert_close(h, rms_norm(x, params["norm"], 1e-6))
    order, want_order = indices.argsort(1), want_indices.argsort(1)  # transformers leaves them unsorted
    assert torch.equal(indices.gather(1, order), want_indices.gather(1, want_order))
    torch.testing.assert_close(weights.gather(1, order).float(), want_weights.gather(1, want_order), rtol=1e-5, atol=1e-6)
    plain = Router(router.experts, router.top_k, "sigmoid")
    assert not torch.equal(indices, router_fn(plain, 1e-6)(params, x, valid=everywhere(64))[2])  # bias and groups mattered


@pytest.mark.parametrize("normalize", [True, False])
def test_softmax_with_a_bias_and_a_scale_is_the_formula(normalize: bool) -> None:
    router = Router(5, 2, normalize=normalize, scale=0.5, bias=True)
    params, x = params_of(router), tokens(7)
    h, weights, indices, counts, probs, z, entropy = router_fn(router, 1e-6)(params, x, valid=everywhere(7))
    logits = h @ params["router"].T + params["router_bias"]
    want = logits.softmax(-1)
    best, where = want.topk(2)
    assert torch.equal(indices, where) and counts.sum() == 14
    torch.testing.assert_close(weights, 0.5 * (best / best.sum(-1, keepdim=True) if normalize else best))
    torch.testing.assert_close((probs, z), (want.sum(0), logits.logsumexp(-1).square().sum()))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy().sum())


def test_distribution_of_sigmoid_scores() -> None:
    params, x = params_of(DEEPSEEK), tokens(9)
    h, *_, probs, _, entropy = router_fn(DEEPSEEK, 1e-6)(params, x, valid=everywhere(9))
    scores = (h @ params["router"].T).sigmoid()
    shares = scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(probs, shares.sum(0))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(probs=shares).entropy().sum())


def test_correction_is_float32_and_has_no_gradient() -> None:
    from xtf.models.common import Leaves

    specs = DEEPSEEK.specs(Leaves(torch.bfloat16, 0.02), 8)
    assert specs["correction"].dtype == torch.float32 and not specs["correction"].trainable
    assert specs["router"].dtype == torch.bfloat16 and specs["router"].trainable
    params, x = params_of(DEEPSEEK), tokens(9)

    def total(params: dict[str, Tensor]) -> Tensor:
        _, weights, _, _, probs, z, entropy = router_fn(DEEPSEEK, 1e-6)(params, x, valid=everywhere(9))
        return weights.square().sum() + probs.square().sum() + z + entropy

    grads = torch.func.grad(total)(params)
    assert not grads["correction"].any() and grads["router"].any()


@pytest.mark.parametrize("router", [DEEPSEEK, Router(5, 2, normalize=False)], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize("cut", [0, 3, 5, 11])
def test_sums_over_parts_are_the_sums(router: Router, cut: int) -> None:
    """A transform may run the router on some tokens of a document and then on the others."""
    fn, params, x = router_fn(router, 1e-6, documents=True), params_of(router), tokens(11)
    valid = torch.tensor([True] * 4 + [False] * 2 + [True] * 5)
    consts = document_constants({"cu_seqlens": torch.tensor([0, 4, 6, 7, 11], dtype=torch.int32), "valid": valid})
    assert consts["document_tokens"].tolist() == [4, 0, 1, 4]
    counted = consts["document_tokens"]
    whole = fn(params, x, valid=valid, document=consts["document"], document_tokens=counted)[3:]
    parts = [
        fn(params, x[part], valid=valid[part], document=consts["document"][part], document_tokens=counted)[3:]
        for part in (slice(0, cut), slice(cut, 11))
    ]
    for name, want, *got in zip(STATISTICS, whole, *parts, strict=True):
        torch.testing.assert_close(got[0] + got[1], want, rtol=1e-12, atol=1e-14, msg=name)
    counts, document_counts, document_probs = whole[0], whole[4], whole[5]
    assert torch.equal(document_counts.sum(0), counts) and document_counts.sum(1).tolist() == [router.top_k * n for n in (4, 0, 1, 4)]
    torch.testing.assert_close(document_probs.sum(1), counted.double())


def test_balance_of_each_document_is_the_formula() -> None:
    """DeepSeek-V3's equations 17 to 20, document by document; value and gradient."""
    router, lengths = DEEPSEEK, [4, 1, 6]
    x, params = tokens(13), params_of(DEEPSEEK)
    valid = torch.tensor([True] * 11 + [False] * 2)  # the last document is padding
    packed = {"cu_seqlens": torch.tensor([0, 4, 5, 11, 13], dtype=torch.int32), "valid": valid}
    consts = document_constants(packed)

    def ours(params: dict[str, Tensor]) -> Tensor:
        written = router_fn(router, 1e-6, documents=True)(params, x, valid=valid, **consts)
        (sequence,) = sequence_fn(router.top_k)({}, written[-2], written[-1], document_tokens=consts["document_tokens"])
        stats = dict(zip((*routers.statistics(0), routers.sequence_statistic(0)), (*written[3:7], sequence), strict=True))
        loss, metrics = router_loss([0], top_k=3, coefficient=0.0, z_coefficient=0.0, sequence_coefficient=0.1)(stats, valid.sum())
        torch.testing.assert_close(metrics["router_sequence_balance"] * 0.1, loss.detach()[None])
        return loss

    def theirs(params: dict[str, Tensor]) -> Tensor:
        total, begin = torch.zeros((), dtype=torch.float64), 0
        for n in lengths:
            h, _, indices, *_ = router_fn(router, 1e-6)(params, x[begin : begin + n], valid=everywhere(n))
            scores = (h @ params["router"].T).sigmoid()
            f = torch.nn.functional.one_hot(indices, 12).sum((0, 1)).double() * 12 / (3 * n)
            p = (scores / scores.sum(-1, keepdim=True)).mean(0)
            total, begin = total + n * 0.1 * (f * p).sum(), begin + n
        return total / 11

    (got, value), (want, reference) = (torch.func.grad_and_value(fn)(params) for fn in (ours, theirs))
    torch.testing.assert_close(value, reference, rtol=1e-12, atol=0)
    assert want["router"].any()
    for name in ("router", "norm"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-11, atol=1e-14)


def test_no_documents_and_no_tokens() -> None:
    packed = {"cu_seqlens": torch.tensor([0], dtype=torch.int32), "valid": everywhere(0)}
    consts = document_constants(packed)
    written = router_fn(DEEPSEEK, 1e-6, documents=True)(params_of(DEEPSEEK), tokens(0), valid=everywhere(0), **consts)
    assert written[-1].shape == (0, 12)
    (sequence,) = sequence_fn(3)({}, written[-2], written[-1], document_tokens=consts["document_tokens"])
    assert sequence == 0


def stats_of(layers: list[int], experts: int, slots: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for layer in layers:
        counts, probs, z, entropy = routers.statistics(layer)
        found[counts] = torch.bincount(torch.randint(experts, (slots,), generator=g), minlength=experts)
        found[probs] = torch.rand(experts, generator=g)
        found[z], found[entropy] = torch.tensor(7.0), torch.tensor(3.0 + layer)
    return found


def test_metrics() -> None:
    stats = stats_of([0, 2], 6, 40)
    _, metrics = router_loss([0, 2], top_k=2, coefficient=0.1, z_coefficient=0.0)(stats, torch.tensor(20))
    torch.testing.assert_close(metrics["router_entropy"], torch.tensor([3.0, 5.0]) / 20)
    counts = stats["layers.0.router.counts"]
    torch.testing.assert_close(metrics["load_violation"][0], counts.max() / counts.double().mean().float() - 1)
    assert metrics["dropped_tokens"] == 0 and metrics["expert_load"].shape == (2, 6)
    torch.testing.assert_close(metrics["expert_load"].sum(1), torch.ones(2))


def test_update_of_the_correction_evens_the_load() -> None:
    """Without any loss the busiest expert comes close to the mean, as in Wang et al. 2024."""
    params, x = params_of(DEEPSEEK), tokens(512)
    params["router"][0] += 2.0 * params["router"][1]  # uneven to begin with
    update, fn, violations = bias_update([0], 0.01), router_fn(DEEPSEEK, 1e-6), list[float]()
    assert update is not None
    for _ in range(150):
        counts = fn(params, x, valid=everywhere(512))[3]
        violations.append(float(counts.max() * 12 / counts.sum() - 1))
        leaves = update({"layers.0.moe.correction": params["correction"]}, {"layers.0.router.counts": counts})
        assert leaves["layers.0.moe.correction"].dtype == torch.float32
        params["correction"] = leaves["layers.0.moe.correction"]
    assert violations[0] > 0.8 and max(violations[-20:]) < 0.25


def test_update_changes_nothing_without_tokens_or_where_the_load_is_the_mean() -> None:
    update = bias_update([1], 0.5)
    assert update is not None
    before = torch.tensor([0.25, -1.0])
    for counts in ([0, 0], [3, 3]):
        after = update({"layers.1.moe.correction": before}, {"layers.1.router.counts": torch.tensor(counts)})
        assert torch.equal(after["layers.1.moe.correction"], before)
    assert bias_update([1], 0.0) is None and bias_update([], 0.1) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 7}, "top_k=7 is more than experts=6"),
        ({"groups": 4}, "groups=4 must cut experts=6"),
        ({"groups": 6}, "groups=6 must cut experts=6 into equal groups of at least 2"),
        ({"groups": 3, "top_k": 3}, "top_k=3 is more than the 2 experts of the groups that are kept"),
        ({"groups_kept": 2}, "groups_kept=2 is more than groups=1"),
        ({"scoring": "tanh"}, "scoring='tanh'"),
        ({"experts": 0}, "experts=0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"correction": 1}, "correction=1 is a int"),
    ],
)
def test_bad_routers_are_refused(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"experts": 6, "top_k": 2} | change
    with pytest.raises(ValueError, match=message):
        Router(**fields)


def test_bad_losses_and_speeds_are_refused() -> None:
    with pytest.raises(ValueError, match="no layers"):
        router_loss([], top_k=2, coefficient=0.0, z_coefficient=0.0)
    with pytest.raises(ValueError, match=r"sequence_coefficient=-0\.1"):
        router_loss([0], top_k=2, coefficient=0.0, z_coefficient=0.0, sequence_coefficient=-0.1)
    with pytest.raises(ValueError, match=r"bias_update_speed=-1\.0"):
        bias_update([0], -1.0)
