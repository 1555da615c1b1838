"""Text written by a model: one token after another, by plain sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from xtf.data.text import encode
from xtf.model import Model
from xtf.run.decoding import NextToken
from xtf.tree import Tree

Scores = Callable[[Sequence[int]], Tensor]
"""``scores(ids) -> (vocab,)``: of the token that follows, as `xtf.run.decoding.NextToken`."""


class HasLogits(Protocol):
    """The least that `generate` needs of a model: it is then run on all tokens for every new one."""

    @property
    def vocab(self) -> int: ...

    @property
    def logits(self) -> Callable[[Tree, Tensor], Tensor]: ...


def generate(
    model: Model | HasLogits,
    params: Tree,
    tokenizer: Any,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    window: int | None = None,
    stop: int | Collection[int] | None = None,
) -> str:
    """Continue a prompt. The same arguments give the same text. See `sample` for how tokens are drawn.

    Args:
        model: a model; keys and values are cached.
        params: whole parameters.
        tokenizer: of `tokenizers` or of transformers.
        prompt: the text to continue, at least one token.
        tokens: how many to add, at most.
        temperature, top_p, seed: see `sample`.
        window: tokens the model sees at most, counted from the end: for a model trained on short rows. Once the text is longer, all
            of the window is run for every token, for its positions have changed.
        stop: the ids that end the text early and are not part of it.

    Returns:
        The continuation, without the prompt.

    Raises:
        ValueError: if an argument is out of its range, the prompt is empty or the tokenizer has ids that the model lacks.
    """
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, expected 1 or more")
    ids = encode(tokenizer, prompt)
    check_prompt(ids, model.vocab)
    ends = {stop} if isinstance(stop, int) else set(stop or ())
    scores = _scores(model, params)
    last = slice(None) if window is None else slice(-window, None)

    def windowed(ids: Sequence[int]) -> Tensor:
        return scores(ids[last])

    return decode(tokenizer, list(sample(windowed, ids, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed, stop=ends)))


def stream(
    model: Model,
    params: Tree,
    ids: Sequence[int],
    *,
    tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """The ids that follow ``ids``, each as soon as it is drawn; keys and values are cached. See `sample`.

    Example:
        >>> from xtf.models import preset
        >>> model = preset("tiny-moe")
        >>> params = model.init(0)
        >>> new = list(stream(model, params, [5, 6, 7], tokens=4))
        >>> new == [int(model.logits(params, torch.tensor([[5, 6, 7, *new[:i]]]))[0, -1].argmax()) for i in range(4)]
        True
    """
    check_prompt(ids, model.vocab)
    return sample(NextToken(model, params), ids, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop)


def sample(
    scores: Scores,
    ids: Sequence[int],
    *,
    tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """The ids that follow ``ids``, each as soon as it is drawn. The same arguments give the same ids.

    Each is drawn from the distribution at ``temperature``, cut to the smallest set of tokens with at least the probability
    ``top_p`` (nucleus sampling, Holtzman et al. 2020, "The curious case of neural text degeneration").

    Args:
        scores: gives the scores of the next token.
        ids: what to continue.
        tokens: how many to add, at most.
        temperature: 0 takes the most likely token each time.
        top_p: in (0, 1]; 1 cuts nothing.
        seed: of the draws.
        stop: ids that end it and are not given.

    Raises:
        ValueError: if an argument is out of its range (at once), or scores are not numbers.

    Example:
        >>> list(sample(lambda ids: torch.eye(9)[(ids[-1] + 1) % 9], [3], tokens=9, stop=[7]))
        [4, 5, 6]
    """
    check_sampling(tokens, temperature, top_p)

    def drawn() -> Iterator[int]:
        generator = torch.Generator().manual_seed(seed)
        sequence = list(ids)
        for _ in range(tokens):
            choice = _draw(scores(sequence).double().cpu(), temperature, top_p, generator)
            if choice in stop:
                return
            sequence.append(choice)
            yield choice

    return drawn()


def check_sampling(tokens: int, temperature: float, top_p: float, prefix: str = "") -> None:
    """Refuse numbers out of their ranges; ``prefix`` stands before the name in the message, as ``"--"``."""
    for name, value, good, expected in (
        ("tokens", tokens, tokens >= 0, "0 or more"),
        ("temperature", temperature, 0 <= temperature < float("inf"), "0 or more"),
        ("top_p", top_p, 0 < top_p <= 1, "more than 0 and at most 1"),
    ):
        if not good:
            raise ValueError(f"{prefix}{name.replace('_', '-') if prefix else name} is {value}, expected {expected}")


def check_prompt(ids: Sequence[int], vocab: int) -> None:
    """Refuse a prompt without ids, or with one that the model lacks."""
    if not ids:
        raise ValueError("the prompt is empty: give at least one word to continue")
    if max(ids) >= vocab:
        raise ValueError(f"the tokenizer gives the id {max(ids)}, the model's vocabulary is {vocab}: they do not belong together")


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of ids as it is, special tokens included, from a tokenizer of `tokenizers` or of transformers."""
    return tokenizer.decode(list(ids), skip_special_tokens=False)


def stream_text(tokenizer: Any, ids: Iterable[int], stop: Collection[str] = ()) -> Iterator[str]:
    """The text of ids piece by piece, each piece final: together they are what decoding all ids at once gives.

    Held back is what the next token may still change: a character of which only the first bytes have come, and what may be the
    beginning of a text in ``stop``. The first of those that appears ends the text, and is not part of it.

    Args:
        tokenizer: of `tokenizers` or of transformers.
        ids: the ids as they come.
        stop: texts that end it.

    Raises:
        ValueError: for an empty text in ``stop``.

    Example:
        >>> from xtf.data import demo_tokenizer
        >>> ids = demo_tokenizer().encode("naïve: the end, and more").ids
        >>> "".join(stream_text(demo_tokenizer(), ids, stop=["end"]))
        'naïve: the '
    """
    if "" in stop:
        raise ValueError("a stop text is empty: it would end every text at once; leave it out")
    return _until(_pieces(tokenizer, ids), stop) if stop else _pieces(tokenizer, ids)


def _pieces(tokenizer: Any, ids: Iterable[int]) -> Iterator[str]:
    """Decoded with the ids of the piece before as context, since some decoders treat the first id of a text in their own way."""
    known: list[int] = []
    context, given = 0, 0  # known[context:given] was given last
    for token in ids:
        known.append(token)
        before, text = (decode(tokenizer, known[context:end]) for end in (given, len(known)))
        if len(text) > len(before) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(before) :]
            context, given = given, len(known)
    before, text = (decode(tokenizer, known[context:end]) for end in (given, len(known)))
    if len(text) > len(before):
        yield text[len(before) :]


def _until(pieces: Iterable[str], stop: Collection[str]) -> Iterator[str]:
    held = ""
    for piece in pieces:
        held += piece
        found = [at for at in (held.find(text) for text in stop) if at >= 0]
        if found:
            if min(found):
                yield held[: min(found)]
            return
        keep = max(n for text in stop for n in range(len(text)) if held.endswith(text[:n]))
        if len(held) > keep:
            yield held[: len(held) - keep]
            held = held[len(held) - keep :]
    if held:
        yield held


def _scores(model: Model | HasLogits, params: Tree) -> Scores:
    if isinstance(model, Model):
        return NextToken(model, params)

    def scores(ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return model.logits(params, torch.tensor([ids]))[0, -1]

    return scores


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
