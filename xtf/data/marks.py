"""Marks in texts: what looks like a token of the template in a text is told apart from what the template writes.

Before a conversation is rendered, every mark in its texts is replaced by a placeholder: ``HOLD`` and one character of the private
use area. After rendering the text is cut there, and the mark is encoded as the plain characters it is. The characters used are
themselves marks, so a text that holds them comes back unharmed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from tokenizers import Tokenizer

HOLD, BEGIN, END = "\ufdd0", "\ufdd1", "\ufdd2"
"""Noncharacters: of a placeholder, and around a text whose place in the rendered whole is asked for."""

_CODE = 0xE000
_ROOM = 6400 - 3  # characters of the private use area
_PLACEHOLDER = re.compile(f"{HOLD}([\ue000-\uf8ff])")


@dataclass(frozen=True)
class Guard:
    """Replaces marks by placeholders and back.

    Args:
        marks: everything that may be replaced.
        answer: those replaced in an assistant's text; what a model writes itself (``<think>``) is not among them.
        other: those replaced in any other text.

    Example:
        >>> guard = Guard(("<|end|>", "<think>"), frozenset(["<|end|>"]), frozenset(["<|end|>", "<think>"]))
        >>> guard.restored(guard.protect("<think> <|end|>", answer=True))
        '<think> <|end|>'
        >>> guard.pieces(guard.protect("<think> <|end|>", answer=True))
        [('<think> ', False), ('<|end|>', True)]
    """

    marks: tuple[str, ...]
    answer: frozenset[str]
    other: frozenset[str]

    def __post_init__(self) -> None:
        if len(self.marks) > _ROOM:
            raise ValueError(f"the tokenizer has {len(self.marks)} marks, at most {_ROOM} can be told apart from text")

    @cached_property
    def items(self) -> tuple[str, ...]:
        """Everything that has a placeholder."""
        return (HOLD, BEGIN, END, *self.marks)

    @cached_property
    def _codes(self) -> dict[str, str]:
        return {item: HOLD + chr(_CODE + k) for k, item in enumerate(self.items)}

    @cached_property
    def _patterns(self) -> tuple[tuple[str, re.Pattern[str]], tuple[str, re.Pattern[str]]]:
        return _pattern({*self.answer, HOLD, BEGIN, END}), _pattern({*self.other, HOLD, BEGIN, END})

    def protect(self, text: str, *, answer: bool) -> str:
        """The text with placeholders; ``answer`` says that it is an assistant's."""
        firsts, pattern = self._patterns[0 if answer else 1]
        for first in firsts:
            if first in text:
                return pattern.sub(lambda found: self._codes[found[0]], text)
        return text

    def protect_all(self, value: Any, *, answer: bool) -> Any:
        """Every string of a JSON value, keys included."""
        if isinstance(value, str):
            return self.protect(value, answer=answer)
        if isinstance(value, dict):
            items = cast(dict[str, Any], value).items()
            return {self.protect(key, answer=answer): self.protect_all(item, answer=answer) for key, item in items}
        if isinstance(value, list | tuple):
            return [self.protect_all(item, answer=answer) for item in cast(list[Any], value)]
        return value

    def restored(self, text: str) -> str:
        """The text with every mark in its place again."""
        return _PLACEHOLDER.sub(lambda found: self.items[ord(found[1]) - _CODE], text) if HOLD in text else text

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """The text cut at its placeholders: pieces, and whether each is a mark to be encoded as plain characters."""
        if HOLD not in text:
            return [(text, False)] if text else []
        found: list[tuple[str, bool]] = []
        for k, part in enumerate(_PLACEHOLDER.split(text)):
            item = self.items[ord(part) - _CODE] if k % 2 else part
            plain = bool(k % 2) and item not in (HOLD, BEGIN, END)
            if found and not plain and not found[-1][1]:
                found[-1] = (found[-1][0] + item, False)
            elif item:
                found.append((item, plain))
        return found


def _pattern(items: Iterable[str]) -> tuple[str, re.Pattern[str]]:
    """The first characters, and an expression for the longest item at a place; in groups, as there may be a thousand of them."""
    groups: dict[str, list[str]] = {}
    for item in sorted(items, key=len, reverse=True):
        groups.setdefault(item[:2], []).append(item[2:])
    written = [re.escape(head) + f"(?:{'|'.join(map(re.escape, rest))})" for head, rest in sorted(groups.items(), key=lambda g: -len(g[0]))]
    return "".join(sorted({item[0] for item in groups})), re.compile("|".join(written))


def without_marks(backend: Tokenizer, marks: Iterable[str]) -> Tokenizer:
    """The same tokenizer without added tokens: to it marks are text like any other. The vocabulary is shared, not copied.

    Raises:
        ValueError: if one of the marks still comes out as its own token, because it is a word of the vocabulary.
    """
    plain = Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    for mark in marks:
        if backend.token_to_id(mark) in plain.encode(mark, add_special_tokens=False).ids:
            raise ValueError(
                f"the tokenizer writes the text {mark!r} as the token of that name even as plain characters: take it out of the data, "
                "or allow special tokens in text"
            )
    return plain
