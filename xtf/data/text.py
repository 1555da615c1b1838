"""The text that ships with the package, its tokenizer, and batches cut from one long sequence of tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

_HERE = Path(__file__).parent
CORPUS_FILE = _HERE / "pride_and_prejudice.txt"
TOKENIZER_FILE = _HERE / "tokenizer.json"
TOKENIZER_CONFIG_FILE = _HERE / "tokenizer_config.json"


@cache
def load_corpus() -> str:
    """The demo's text: Jane Austen, "Pride and Prejudice" (1813), 680 kB of English prose in the public domain.

    Each paragraph is one line, an empty line between two. ``PROVENANCE.md`` beside the file says where it comes from.

    Example:
        >>> load_corpus()[35:86].strip()
        'Chapter 1\\n\\nIt is a truth universally acknowledged'
    """
    return CORPUS_FILE.read_text(encoding="utf-8")


@cache
def demo_tokenizer() -> Tokenizer:
    """The demo's tokenizer: byte-level BPE with 2,048 entries, trained on the text of `load_corpus`.

    `xtf.data.train_tokenizer` reproduces it. For transformers, ``AutoTokenizer.from_pretrained(TOKENIZER_FILE.parent)``
    loads the same with a chat template.

    Example:
        >>> tokenizer = demo_tokenizer()
        >>> tokenizer.decode(tokenizer.encode("Mr. Darcy smiled.").ids)
        'Mr. Darcy smiled.'
    """
    return Tokenizer.from_file(str(TOKENIZER_FILE))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of ``text`` without special tokens added, from a tokenizer of `tokenizers` or of transformers."""
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(encoded, "ids", encoded))


def tokenize(text: str, tokenizer: Any | None = None) -> Tensor:
    """Ids of a whole text, shape (tokens,) int64. Without ``tokenizer`` it is the demo's.

    Example:
        >>> demo_tokenizer().decode(tokenize("A single man").tolist())
        'A single man'

    Raises:
        ValueError: if the text is empty.
    """
    if not text:
        raise ValueError("the text is empty: there is nothing to tokenize")
    return torch.tensor(encode(demo_tokenizer() if tokenizer is None else tokenizer, text), dtype=torch.int64)


@dataclass(frozen=True)
class Tokens:
    """A tokenized text: what is trained on, and its tail, which is never trained on.

    Args:
        train: (tokens,) int64.
        held_out: (tokens,) int64, the contiguous end of the text.
        vocab: size of the vocabulary.
    """

    train: Tensor
    held_out: Tensor
    vocab: int

    @staticmethod
    def of(tokens: Tensor, *, vocab: int, held_out: float = 0.05) -> Tokens:
        """Split a sequence of tokens: the last ``held_out`` of it is kept back.

        Example:
            >>> split = Tokens.of(torch.arange(100), vocab=100)
            >>> len(split.train), split.held_out.tolist()
            (95, [95, 96, 97, 98, 99])

        Raises:
            ValueError: if ``tokens`` is not one sequence, or a part would be empty.
        """
        _check_sequence(tokens)
        if not 0 < held_out < 1:
            raise ValueError(f"held_out is {held_out}, expected a share between 0 and 1, as 0.05")
        keep = round(len(tokens) * held_out)
        if not 0 < keep < len(tokens):
            raise ValueError(f"{len(tokens)} tokens cannot be split with held_out={held_out}: one part is empty; give a longer text")
        return Tokens(tokens[:-keep], tokens[-keep:], vocab)

    @staticmethod
    def demo() -> Tokens:
        """The tokens of `load_corpus` under `demo_tokenizer`."""
        return Tokens.of(tokenize(load_corpus()), vocab=demo_tokenizer().get_vocab_size())


def batches(tokens: Tensor, *, batch: int, seq: int, seed: int) -> Callable[[int], dict[str, Tensor]]:
    """Random windows of a text, as a pure function of the step: ``batches(...)(step)`` is the same whenever it is asked.

    A resumed run needs the number of its step and nothing else.

    Args:
        tokens: (tokens,) integers.
        batch: rows of a batch.
        seq: tokens of a row.
        seed: together with the step, the only source of randomness.

    Returns:
        ``step -> {"input_ids": (batch, seq), "labels": (batch, seq)}``, int64; labels equal ids, the model shifts them.

    Example:
        >>> at = batches(torch.arange(50), batch=2, seq=4, seed=0)
        >>> at(7)["input_ids"].shape, bool((at(7)["input_ids"] == at(7)["labels"]).all())
        (torch.Size([2, 4]), True)

    Raises:
        ValueError: if ``batch`` or ``seq`` is not possible, or the text is shorter than one row.
    """
    _check_sequence(tokens)
    _check_sizes(tokens, batch, seq)
    offsets = torch.arange(seq)

    def at(step: int) -> dict[str, Tensor]:
        key = hashlib.sha256(f"{seed}/{step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        starts = torch.randint(0, len(tokens) - seq + 1, (batch, 1), generator=generator)
        ids = tokens[starts + offsets].long()
        return {"input_ids": ids, "labels": ids.clone()}

    return at


def windows(tokens: Tensor, *, batch: int, seq: int) -> Iterator[dict[str, Tensor]]:
    """The whole text once, in order, as batches of neighbouring windows: what an evaluation runs over.

    Each window begins on the last token of the one before, so that every token but the text's first is a target exactly
    once. The end that fills no window is filled up with ignored labels; a last batch with fewer windows has rows that are
    ignored as a whole, so all batches have one shape.

    Example:
        >>> [b["labels"].tolist() for b in windows(torch.arange(6), batch=2, seq=3)]
        [[[0, 1, 2], [2, 3, 4]], [[4, 5, -100], [-100, -100, -100]]]
    """
    _check_sequence(tokens)
    _check_sizes(tokens, batch, seq)
    rows = max(1, math.ceil((len(tokens) - 1) / (seq - 1)))
    rows = math.ceil(rows / batch) * batch
    index = torch.arange(rows)[:, None] * (seq - 1) + torch.arange(seq)
    inside = index < len(tokens)
    ids = torch.where(inside, tokens[index.clamp_max(len(tokens) - 1)].long(), 0)
    # a row whose only token inside is the shared one has no target; it may keep that label, the first is never a target
    labels = torch.where(inside & (index[:, 1:2] < len(tokens)), ids, -100)
    for begin in range(0, rows, batch):
        yield {"input_ids": ids[begin : begin + batch], "labels": labels[begin : begin + batch]}


def unigram_entropy(held_out: Tensor, train: Tensor, vocab: int) -> float:
    """Cross-entropy, in nats per token, of ``held_out`` under the frequencies of single tokens in ``train``.

    Frequencies have one added to each count (Laplace), so that a token that ``train`` lacks costs a finite amount. It is
    what a model reaches that has learned how common each token is and nothing about their order: a loss well below it
    shows that context is used.

    Example:
        >>> even = torch.arange(4).repeat(1000)
        >>> round(unigram_entropy(even, even, 4), 4) == round(math.log(4), 4)
        True

    Raises:
        ValueError: if a part is empty or holds an id outside the vocabulary.
    """
    for name, tokens in (("held_out", held_out), ("train", train)):
        _check_sequence(tokens, name)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab:
            raise ValueError(f"{name} holds the id {low if low < 0 else high}, outside the vocabulary of {vocab}")
    counts = torch.bincount(train.long(), minlength=vocab).double() + 1
    return float(-(counts / counts.sum()).log()[held_out.long()].mean())


def _check_sequence(tokens: Tensor, name: str = "tokens") -> None:
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool or not len(tokens):
        raise ValueError(f"{name} must be one non-empty sequence of integer ids, got shape {tuple(tokens.shape)} of {tokens.dtype}")


def _check_sizes(tokens: Tensor, batch: int, seq: int) -> None:
    if batch < 1 or seq < 2:
        raise ValueError(f"batch is {batch} and seq is {seq}: a batch needs at least 1 row of 2 tokens (the first is never a target)")
    if len(tokens) < seq:
        raise ValueError(f"the text has {len(tokens)} tokens, a row needs {seq}: give a longer text or a smaller seq")
