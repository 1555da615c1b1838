"""Texts to tokens: the parts that are learned and those that are not are encoded as a model meets them, one after the other."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from xtf.data.marks import Guard, without_marks


class Marked(NamedTuple):
    """A text with placeholders (see `xtf.data.marks`), and what of it is learned.

    Args:
        text: the whole of a document.
        spans: ``(begin, end, weight)`` of characters, in order, none of which overlap; outside the weight is 0.
    """

    text: str
    spans: Sequence[tuple[int, int, float]]


class Segment(NamedTuple):
    """Text that is encoded by itself.

    Args:
        text: without placeholders.
        plain: whether it is a mark that is to be no token of its own.
        spans: as in `Marked`, of this text.
        ids: the tokens, if they are known; there is no text then.
    """

    text: str
    plain: bool
    spans: Sequence[tuple[int, int, float]]
    ids: tuple[int, ...] = ()


class Encoded(NamedTuple):
    """Documents one after another.

    Args:
        ids: (tokens,) int32.
        weights: (tokens,) float32.
        lengths: (documents,) int64.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Codec:
    """A tokenizer, and how texts with marks go through it.

    Where a text's tokens do not depend on what stands before it (byte-level tokenizers: Qwen, DeepSeek, Llama 3, GPT), a text is cut at the
    borders of what is learned and each part encoded by itself, so that no token reaches over a border: at inference the
    prompt is encoded by itself too. Elsewhere (tokenizers that put a space before a text) the text is encoded as a whole, and
    learned are the tokens that lie wholly inside.

    Args:
        backend: the tokenizer.
        guard: its marks.
        special_in_text: whether marks in texts are the tokens of that name.
    """

    backend: Tokenizer
    guard: Guard
    special_in_text: bool = False

    @cached_property
    def independent(self) -> bool:
        """Whether the tokens of a text do not depend on what stands before it."""
        added, known = self.backend.get_added_tokens_decoder().values(), frozenset(self.guard.marks)
        stripping = any(token.lstrip or token.rstrip for token in added if token.content in known)
        texts = (("a\n", "b"), ("a\n", " b"), ("\n", "b\n"), ("é\n", "日本"))
        marks = [(mark, text) for mark in self.guard.marks[:4] for text in ("b", "\nb")]
        return not stripping and all(self._ids(a) + self._ids(b) == self._ids(a + b) for a, b in (*texts, *marks))

    @cached_property
    def plain(self) -> Tokenizer:
        """The tokenizer to which marks are text."""
        return without_marks(self.backend, [mark for mark in self.guard.marks if self.backend.token_to_id(mark) is not None])

    def segments(self, marked: Marked) -> list[Segment]:
        """What is encoded by itself; this is the part that needs no tokenizer."""
        if self.independent:
            found: list[Segment] = []
            at = 0
            for begin, end, weight in marked.spans:
                self._cut(marked.text[at:begin], 0.0, found)
                self._cut(marked.text[begin:end], weight, found)
                at = end
            self._cut(marked.text[at:], 0.0, found)
            return found
        return self._whole(marked)

    def encode(self, documents: Sequence[Sequence[Segment]]) -> Encoded:
        """The tokens of documents, from their segments. Runs in parallel, and without Python for most of the time."""
        segments = list(chain.from_iterable(documents))
        if self.independent:
            parts = self.backend.encode_batch_fast([segment.text for segment in segments], add_special_tokens=False)
            ids = [part.ids for part in parts]
            for k, segment in enumerate(segments):
                if segment.ids:
                    ids[k] = list(segment.ids)
                elif segment.plain:
                    ids[k] = self.plain.encode(segment.text, add_special_tokens=False).ids
            lengths = np.fromiter(map(len, ids), np.int64, len(ids))
            flat = np.frombuffer(array("i", chain.from_iterable(ids)), np.int32)
            weights = np.repeat(np.fromiter((s.spans[0][2] if s.spans else 0.0 for s in segments), np.float32, len(segments)), lengths)
        else:
            both = list(chain.from_iterable(self._with_weights(document) for document in documents))
            lengths = np.fromiter((len(part) for part, _ in both), np.int64, len(both))
            flat = np.fromiter(chain.from_iterable(part for part, _ in both), np.int32)
            weights = np.fromiter(chain.from_iterable(part for _, part in both), np.float32)
        bounds = np.cumsum([0, *map(len, documents)])
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return Encoded(flat, weights, np.diff(ends[bounds]))

    def _ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def _cut(self, text: str, weight: float, found: list[Segment]) -> None:
        if text:
            for piece, plain in self._pieces(text):
                found.append(Segment(piece, plain, ((0, len(piece), weight),) if weight else ()))

    def _pieces(self, text: str) -> list[tuple[str, bool]]:
        return [(self.guard.restored(text), False)] if self.special_in_text else self.guard.pieces(text)

    def _whole(self, marked: Marked) -> list[Segment]:
        """Cut at marks only; spans are moved to the characters of the segments."""
        spans: list[tuple[int, int, float]] = []
        for begin, end, weight in marked.spans:
            moved = len(self.guard.restored(marked.text[:begin]))
            spans.append((moved, moved + len(self.guard.restored(marked.text[begin:end])), weight))
        found: list[Segment] = []
        at = 0
        for piece, plain in self._pieces(marked.text):
            inside = [(max(b - at, 0), min(e - at, len(piece)), w) for b, e, w in spans if b < at + len(piece) and e > at]
            found.append(Segment(piece, plain, inside))
            at += len(piece)
        return found

    def _with_weights(self, document: Sequence[Segment]) -> list[tuple[list[int], list[float]]]:
        found: list[tuple[list[int], list[float]]] = []
        first = True
        for segment in document:
            if segment.ids:
                found.append((list(segment.ids), [segment.spans[0][2]] * len(segment.ids)))
                continue
            encoded, skip, moved = self._continued(segment, first=first)
            first = False
            ids, offsets = encoded.ids[skip:], cast(list[tuple[int, int]], encoded.offsets)[skip:]
            weights = [0.0] * len(ids)
            for begin, end, weight in segment.spans:
                for t, (a, b) in enumerate(offsets):
                    # an end mark may take the space after it into its token
                    over = segment.text[end : b - moved]
                    if begin <= a - moved < end and (not over or over.isspace()):
                        weights[t] = weight
            found.append((ids, weights))
        return found

    def _continued(self, segment: Segment, *, first: bool) -> tuple[Any, int, int]:
        """A segment encoded as a later part of a text: behind something whose tokens it does not change, which is then left out."""
        tokenizer = self.plain if segment.plain else self.backend
        if first:
            return tokenizer.encode(segment.text, add_special_tokens=False), 0, 0
        for anchor in ("\n", ".", "a"):
            before = tokenizer.encode(anchor, add_special_tokens=False).ids
            encoded = tokenizer.encode(anchor + segment.text, add_special_tokens=False)
            if encoded.ids[: len(before)] == before and len(encoded.ids) > len(before):
                return encoded, len(before), len(anchor)
        raise ValueError(f"the tokenizer gives the text {segment.text[:40]!r} no tokens of its own: allow special tokens in text")
