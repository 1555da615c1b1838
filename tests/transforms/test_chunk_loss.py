"""`chunk_loss`: equal to the plain head at every chunk size, and without its memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import laws, memory
from xtf import testing, tree
from xtf.batch import normalizer
from xtf.model import cross_entropy
from xtf.models import from_hf
from xtf.stage import Pair, recompute
from xtf.step import compose, eager, train_step
from xtf.transforms import accumulate, chunk_loss
from xtf.transforms.chunk_loss import DEFAULT_BYTES, chunk_tokens, chunked_pair

TOKENS, VOCAB, HIDDEN = 9, 7, 5


def inputs(
    tokens: int = TOKENS, vocab: int = VOCAB, hidden: int = HIDDEN, *, dtype: torch.dtype = torch.float64, ignored: bool = False
) -> tuple[dict[str, Tensor], tuple[Tensor], dict[str, Tensor]]:
    """Parameters, values and constants of a loss stage; every third target is ignored, or all."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    targets = torch.where(torch.arange(tokens) % 3 == 1, -100, targets) if not ignored else torch.full((tokens,), -100)
    weights = (torch.rand(tokens, generator=generator, dtype=torch.float64) + 0.5) * (targets != -100)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    consts = {"targets": targets, "weights": weights, "normalizer": normalizer(weights.sum())}
    return {"weight": draw(vocab, hidden)}, (draw(tokens, hidden),), consts


def reference(params: Any, reads: Any, consts: Any, z_loss: float, dloss: float) -> tuple[Tensor, Tensor, Tensor]:
    """The plain loss, and its gradients for head and hidden states."""

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return cross_entropy(z_loss)({"weight": weight}, x, **consts)[0] * dloss

    (dweight, dx), value = torch.func.grad_and_value(loss, (0, 1))(params["weight"], reads[0])
    return value / dloss, dweight, dx


def run(pair: Pair, params: Any, reads: Any, consts: Any, dloss: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    (loss, *_), residual = pair.forward(params, reads, consts)
    assert not pair.needs_params
    dparams, (dx,) = pair.backward({}, residual, (torch.full_like(loss, dloss),), consts)
    assert dx is not None
    return loss, dparams["weight"], dx


def close(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    assert got.shape == want.shape
    assert float((got.double() - want.double()).abs().max()) <= tolerance * float(want.double().abs().max())


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, TOKENS])
def test_every_chunk_size_gives_the_plain_loss_and_gradients(tokens: int, ignored: bool, z_loss: float) -> None:
    given = inputs(tokens, ignored=ignored)
    want = reference(*given, z_loss, 2.5)
    for size in range(1, tokens + 2):
        pair = chunked_pair(size, None, z_loss)
        got = run(pair, *given, dloss=2.5)
        assert pair.evaluate is not None
        for one, expected in zip((*got, pair.evaluate(*given)[0]), (*want, want[0]), strict=True):
            close(one, expected)
        if z_loss:
            (entropy,) = cross_entropy()(given[0], given[1][0], **given[2])
            for seen in (pair.forward(*given)[0], pair.evaluate(*given), cross_entropy(z_loss)(given[0], given[1][0], **given[2])):
                close(seen[1], entropy)
        if ignored:
            assert all(not one.any() for one in got)


def test_inputs_are_not_modified() -> None:
    params, reads, consts = inputs()
    before = tree.map(torch.clone, (params, reads, consts))
    run(chunked_pair(4, None, 0.1), params, reads, consts)
    for a, b in zip(tree.leaves(before), tree.leaves((params, reads, consts)), strict=True):
        assert torch.equal(a, b)


def test_no_tokens() -> None:
    loss, dweight, dx = run(chunked_pair(4, None, 0.1), *inputs(0))
    assert loss == 0 and not dweight.any() and dx.shape == (0, HIDDEN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_accumulate_in_float32(dtype: torch.dtype) -> None:
    """The head's gradient is a sum over all chunks: in the inputs' own dtype, many small chunks would lose most of it."""
    params, reads, consts = inputs(2048, 5, 16, dtype=dtype)
    loss, dweight, dx = run(chunked_pair(1, None, 0.0), params, reads, consts)
    assert (loss.dtype, dweight.dtype, dx.dtype) == (torch.float32, torch.float32, dtype)
    wide = tree.map(lambda t: t.double() if t.is_floating_point() else t, (params, reads))
    value, dweight64, dx64 = reference(wide[0], wide[1], consts, 0.0, 1.0)
    eps = torch.finfo(dtype).eps
    close(loss, value, max(eps / 8, 5e-6))
    close(dweight, dweight64, max(eps / 8, 5e-6))
    close(dx, dx64, 4 * eps)


def test_a_narrow_sum_would_be_far_off() -> None:
    """The test above can fail: it would, if chunks were summed in bfloat16."""
    params, reads, consts = inputs(2048, 5, 16, dtype=torch.bfloat16)
    total = torch.zeros(5, 16, dtype=torch.bfloat16)
    for i in range(2048):
        one = {name: value[i : i + 1] if value.dim() else value for name, value in consts.items()}
        total = total + run(chunked_pair(1, None, 0.0), params, (reads[0][i : i + 1],), one)[1].bfloat16()
    wide = tree.map(torch.Tensor.double, (params, reads))
    with pytest.raises(AssertionError):
        close(total, reference(wide[0], wide[1], consts, 0.0, 1.0)[1], torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("size", range(1, 11))
def test_laws_at_every_chunk_size(size: int) -> None:
    """Nine tokens: chunks of 1 to n + 1, behind the walk and before it."""
    batch = {key: value[:3, :3] for key, value in laws.batch("documents").items()}
    for transform in (chunk_loss(tokens=size), compose(accumulate(2), chunk_loss(tokens=size))):
        testing.check(transform, model=laws.model("tiny"), batch=batch)


@pytest.mark.parametrize(
    "case",
    [
        laws.case(**row)
        for row in laws.pairwise(
            layout=[{}, {"data": 2}, {"data": 1}],
            model=laws.MODELS,
            chunk=(1, 7, 64, 65, 66, 1000),
            batch=("documents", "weights", "ignored", "one_rank", "token"),
            micros=(None, 2),
            order=(0, 3),
        )
    ],
    ids=str,
)
def test_laws(case: laws.Case) -> None:
    case.check()


@pytest.mark.full
@pytest.mark.parametrize("layout", [{}, {"data": 3}, {"data": 2, "replicate": 2}], ids=str)
@pytest.mark.parametrize("model", laws.MODELS)
def test_laws_matrix(model: str, layout: dict[str, int]) -> None:
    for row in laws.crossed({"chunk": (1, 2, 7, 64, 65, 66, 1000), "batch": laws.BATCHES}, micros=(None, 3), order=(0, 3)):
        laws.case(layout=layout, model=model, **row).check()


def test_laws_by_bytes_and_by_default() -> None:
    for transform in (chunk_loss(), chunk_loss(bytes=1), chunk_loss(bytes=61 * 8 * 4)):
        testing.check(transform, model=laws.model("llama"))


def test_chunk_tokens() -> None:
    assert chunk_tokens(1000, 4, tokens=7) == 7
    assert chunk_tokens(1000, 4, bytes=4000 * 5 + 3999) == 5
    assert chunk_tokens(1000, 4, bytes=1) == 1
    assert chunk_tokens(151_936, 4) == DEFAULT_BYTES // (151_936 * 4) == 220


def test_chunks_have_the_size_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["xtf.transforms.chunk_loss"]  # the name in the package is that of the function
    seen: list[int] = []
    inner = module._loss_and_dlogits
    monkeypatch.setattr(module, "_loss_and_dlogits", lambda h, *rest: (seen.append(len(h)), inner(h, *rest))[1])
    run(chunked_pair(4, None, 0.0), *inputs())
    run(chunked_pair(None, VOCAB * 8 * 5, 0.0), *inputs())
    assert seen == [4, 4, 1, 5, 4]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"chunk_loss\(tokens=0\): expected an integer of at least 1"):
        chunk_loss(0)
    with pytest.raises(ValueError, match=r"chunk_loss\(bytes=-5\): expected an integer of at least 1"):
        chunk_loss(bytes=-5)
    with pytest.raises(ValueError, match=r"chunk_loss\(tokens=4, bytes=8\): give one of the two"):
        chunk_loss(4, 8)
    with pytest.raises(ValueError, match=r"chunk_loss\(tokens=2.5\): expected an integer"):
        chunk_loss(2.5)  # pyright: ignore[reportArgumentType]


def test_twice_is_refused() -> None:
    step = train_step(laws.model("tiny"), testing.default_optimizer())
    with pytest.raises(ValueError, match="chunk_loss is applied twice"):
        compose(chunk_loss(4), accumulate(2), chunk_loss())(step)


def test_the_stack_says_the_size() -> None:
    step = train_step(laws.model("tiny"), testing.default_optimizer())
    made = [transform(step).stack for transform in (chunk_loss(4), chunk_loss(bytes=9), chunk_loss())]
    assert made == [("chunk_loss(tokens=4)",), ("chunk_loss(bytes=9)",), ("chunk_loss(automatic)",)]


# Memory --------------------------------------------------------------------------------------------------------------------------


def extra_bytes(pair: Pair, tokens: int, vocab: int, hidden: int) -> int:
    """Peak bytes of forward and backward beyond the inputs and the two gradients, which any head has."""
    given = inputs(tokens, vocab, hidden, dtype=torch.float32)
    return memory.peak_bytes(lambda: run(pair, *given)[0]) - 4 * hidden * (tokens + vocab)


def test_extra_memory_is_that_of_a_chunk() -> None:
    tokens, vocab, hidden, chunk = 1024, 4096, 16, 32
    logits = tokens * vocab * 4
    plain: Callable[..., Any] = recompute(cross_entropy(), "loss", eager).backward
    params, reads, consts = inputs(tokens, vocab, hidden, dtype=torch.float32)
    whole = memory.peak_bytes(lambda: plain(params, reads, (torch.ones(()),), consts))
    assert whole > 2 * logits  # the measure sees what the plain head holds
    extra = extra_bytes(chunked_pair(chunk, None, 0.0), tokens, vocab, hidden)
    assert extra < 1.2 * chunk * vocab * 4 < 0.1 * logits
    assert extra_bytes(chunked_pair(chunk, None, 0.1), tokens, vocab, hidden) < 1.2 * chunk * vocab * 4


def test_a_whole_step_never_holds_the_logits() -> None:
    """Through the walk: value_and_grad of a model whose logits outweigh everything else."""
    model = from_hf(laws.TINY | {"vocab_size": 2000}, dtype=torch.float32)
    ids = torch.randint(2000, (2, 500), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    peaks = {}
    for name, transform in {"plain": compose(), "chunked": chunk_loss(tokens=10), "micro": compose(chunk_loss(10), accumulate(2))}.items():
        step = transform(train_step(model, testing.default_optimizer()))
        state = step.init(0)
        peaks[name] = memory.peak_bytes(lambda step=step, state=state: step.value_and_grad(state.params, batch))
    logits = 1000 * 2000 * 4
    assert peaks["plain"] > 2 * logits
    assert peaks["chunked"] < 0.15 * logits and peaks["micro"] < 0.15 * logits


@pytest.mark.full
def test_extra_memory_at_full_size() -> None:
    """32,768 tokens × a vocabulary of 151,936: the logits alone would be 19.9 GB."""
    tokens, vocab, hidden = 32_768, 151_936, 1024
    given = inputs(tokens, vocab, hidden, dtype=torch.float32)
    pair = chunked_pair(None, None, 0.0)
    with memory.Resident() as resident:
        counted = memory.peak_bytes(lambda: run(pair, *given))
    print(f"extra memory: {counted / 1e9:.2f} GB counted, {resident.extra / 1e9:.2f} GB resident; logits {tokens * vocab * 4 / 1e9:.1f} GB")
    assert counted < 2e9  # the gradients of head and hidden states (0.76 GB) included
    assert 0.5e9 < resident.extra < 2e9
