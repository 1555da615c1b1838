"""Text written by a model: one token after another, by plain sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from xtf.data.text import encode
from xtf.tree import Tree


class HasLogits(Protocol):
    """What `generate` needs of a model."""

    @property
    def vocab(self) -> int: ...

    @property
    def logits(self) -> Callable[[Tree, Tensor], Tensor]: ...


def generate(
    model: HasLogits,
    params: Tree,
    tokenizer: Any,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    window: int = 256,
    stop: int | None = None,
) -> str:
    """Continue a prompt. The same arguments give the same text.

    Each token is drawn from the model's distribution at ``temperature``, cut to the smallest set of tokens with at least the
    probability ``top_p`` (nucleus sampling, Holtzman et al. 2020, "The curious case of neural text degeneration"). The model is
    run on the last ``window`` tokens for every new one: there is no key-value cache.

    Args:
        model: anything with ``logits(params, input_ids) -> (1, seq, vocab)``, as `xtf.model.Model`.
        params: whole parameters.
        tokenizer: of `tokenizers` or of transformers.
        prompt: the text to continue, at least one token.
        tokens: how many to add.
        temperature: 0 takes the most likely token each time.
        top_p: in (0, 1]; 1 cuts nothing.
        seed: of the draws.
        window: tokens the model sees at most.
        stop: the id that ends the text early and is not part of it.

    Returns:
        The continuation, without the prompt.

    Raises:
        ValueError: if an argument is out of its range, the prompt is empty or the tokenizer has ids that the model lacks.
    """
    for name, value, good, expected in (
        ("tokens", tokens, tokens >= 0, "0 or more"),
        ("temperature", temperature, temperature >= 0, "0 or more"),
        ("top_p", top_p, 0 < top_p <= 1, "more than 0 and at most 1"),
        ("window", window, window >= 1, "1 or more"),
    ):
        if not good:
            raise ValueError(f"{name} is {value}, expected {expected}")
    ids = encode(tokenizer, prompt)
    if not ids:
        raise ValueError("the prompt is empty: give at least one word to continue")
    if max(ids) >= model.vocab:
        raise ValueError(f"the tokenizer gives the id {max(ids)}, the model's vocabulary is {model.vocab}: they do not belong together")
    generator = torch.Generator().manual_seed(seed)
    begin = len(ids)
    with torch.no_grad():
        for _ in range(tokens):
            logits = model.logits(params, torch.tensor([ids[-window:]]))[0, -1]
            choice = _draw(logits.double().cpu(), temperature, top_p, generator)
            if choice == stop:
                break
            ids.append(choice)
    return tokenizer.decode(ids[begin:])


def _draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One id from scores of shape (vocab,)."""
    if not bool(logits.isfinite().any()) or bool(logits.isnan().any()):
        raise ValueError("the model's scores are not numbers: its parameters are broken (a diverged run, or a wrong checkpoint)")
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = (logits / temperature).softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.where(before < top_p, 0)
    return int(order[torch.multinomial(kept, 1, generator=generator)])
