"""Conversations to tokens, with exactly what the model has to write learned."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from xtf.batch import IGNORE
from xtf.data.codec import Codec, Encoded, Marked, Segment
from xtf.data.conversation import Conversation, Message, parse_row
from xtf.data.documents import Document
from xtf.data.marks import Guard
from xtf.data.rows import RowError, read_rows
from xtf.data.template import ChatTemplate, as_taken, learn_template, own_template, read_template
from xtf.data.turns import MismatchError, learned_spans

_MARK = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


class TextEncoder:
    """Plain texts to documents: the text, then the tokenizer's end-of-sequence token if it has one; all of it is learned.

    A token that the tokenizer itself puts before every text (a beginning-of-sequence token) comes first.

    Args:
        tokenizer: a fast tokenizer of transformers.
        special_tokens_in_text: whether marks as ``<|im_end|>`` in a text become the tokens of that name; else they are encoded as
            the characters they are.
        template: the source of the chat template in use, whose marks are marks here too.

    Raises:
        ValueError: if the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: Any, *, template: str = "", special_tokens_in_text: bool = False) -> None:
        self.codec = Codec(_backend(tokenizer), _guard(tokenizer, frozenset(), template), special_tokens_in_text)
        with_added, alone = self.codec.backend.encode("a").ids, self.codec.backend.encode("a", add_special_tokens=False).ids
        at = next((k for k in range(len(with_added)) if with_added[k : k + len(alone)] == alone), 0)
        end = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self._before, self._after = tuple(with_added[:at]), tuple(with_added[at + len(alone) :]) or end

    def segments(self, text: str) -> list[Segment]:
        """The parts of a text that are encoded by themselves, for ``codec.encode``."""
        guarded = self.codec.guard.protect(text, answer=False)
        around = [[Segment("", False, ((0, 0, 1.0),), ids)] if ids else [] for ids in (self._before, self._after)]
        return [*around[0], *self.codec.segments(Marked(guarded, [(0, len(guarded), 1.0)])), *around[1]]

    def encode(self, text: str) -> Document:
        """One text."""
        return _document(self.codec.encode([self.segments(text)]))


class ChatEncoder:
    """Conversations to documents, in a chat template.

    Learned, with the message's weight, is what the model has to write: for an assistant's message all that follows the
    generation prompt (reasoning with its marks if there is any, text, tool calls) and the template's end mark, and nothing
    else. An empty thought that the template puts where there is no reasoning is a part of the prompt. For other messages that have a
    weight it is their text and the end mark.

    The conversation before a message, rendered with the generation prompt, must be the beginning of the whole, unless the template
    marks what is learned (``{% generation %}``); in both cases the message's text must be found inside. A template that
    writes earlier turns differently (Qwen3 leaves out their reasoning) is followed.

    What a template cannot write (as ChatML's often no tool calls) is put into the texts: tool calls as JSON in ``<tool_call>``,
    tools into the system message, reasoning in ``<think>``.

    Args:
        tokenizer: a fast tokenizer of transformers.
        template: the name of a built-in template ("chatml", "deepseek"), a ``.jinja`` file, or ``None`` for the tokenizer's own.
        special_tokens_in_text: whether marks in texts become the tokens of that name. By default they are encoded as the
            characters they are: all special tokens; in texts that are not the assistant's also every other added token that
            the template contains (``<think>``) or that is written as ``<|name|>``; in an assistant's those that open or
            close turns.

    Raises:
        ValueError: if the tokenizer is not a fast one, there is no template, or it cannot be understood.
    """

    def __init__(self, tokenizer: Any, template: str | Path | None = None, special_tokens_in_text: bool = False) -> None:
        backend = _backend(tokenizer)
        source = own_template(tokenizer) if template is None else read_template(template)
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        self.template: ChatTemplate = learn_template(source, dict(tokenizer.special_tokens_map), added)
        self.codec = Codec(backend, _guard(tokenizer, self.template.structure, source), special_tokens_in_text)

    def segments(self, conversation: Conversation) -> list[Segment]:
        """The parts of a conversation that are encoded by themselves, for ``codec.encode``.

        Raises:
            ValueError: if the template refuses it, or what is learned cannot be found.
        """
        return self.codec.segments(self.marked(conversation))

    def encode(self, conversation: Conversation) -> Document:
        """One conversation."""
        return _document(self.codec.encode([self.segments(conversation)]))

    def marked(self, conversation: Conversation) -> Marked:
        """The rendered text and what of it is learned."""
        given = [self._protected(message) for message in conversation.messages]
        tools = self._protected_tools(conversation.tools)
        messages, tools = as_taken(self.template, given, tools)
        shift = len(messages) - len(given)  # a system message may have been added
        whole = self.template.render(messages, tools, False)
        weights = [*[0.0] * shift, *conversation.weights]
        try:
            return Marked(whole, learned_spans(self.template, self.codec.guard, messages, tools, weights, whole))
        except MismatchError as error:
            raise ValueError(f"message {error.index - shift}: {error.reason}") from error

    def _protected(self, message: Message) -> Message:
        """The message with placeholders. What is the same stays the same object: most texts hold no mark."""
        answer = message["role"] == "assistant"
        return {key: value if key == "role" else self._text(value, answer) for key, value in message.items()}

    def _text(self, value: Any, answer: bool) -> Any:
        # where marks are tokens, only an end mark within an answer has to be told from the one that ends it
        return self.codec.guard.protect_all(value, answer=answer or self.codec.special_in_text)

    def _protected_tools(self, tools: Sequence[Message]) -> list[Message]:
        return [] if not tools else cast(list[Message], self._text(list(tools), False))


def encode_chat(tokenizer: Any, messages: Sequence[Message], max_length: int | None = None) -> tuple[list[int], list[int]]:
    """Ids and labels of one conversation in the tokenizer's own chat template, as `ChatEncoder` makes them.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template.
        messages: the conversation, in any form that `parse_row` takes.
        max_length: ids beyond this many are cut off. A conversation cut before its first answer has no label but -100.

    Returns:
        Two lists of equal length; the label is -100 where nothing is learned. Weights other than 0 count as 1.

    Raises:
        ValueError: if the conversation or the tokenizer is not usable; it says why.
    """
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length is {max_length}, expected at least 2: the first token is never a target")
    conversation = parse_row({"messages": messages})
    assert isinstance(conversation, Conversation)
    _backend(tokenizer)
    document = _encoder(tokenizer, own_template(tokenizer), len(tokenizer)).encode(conversation)
    labels = np.where(document.weights > 0, document.ids, IGNORE)
    return document.ids[:max_length].tolist(), labels[:max_length].tolist()


def read_chat_jsonl(path: str | Path) -> list[list[Message]]:
    """The conversations of a file, in OpenAI's form; see `read_rows` and `parse_row` for what is understood.

    Tools described beside the messages are left out; `xtf.data.tokenize_files` keeps them.

    Raises:
        ValueError: if the file cannot be read, holds no conversation, or a row is wrong; it names file, line and reason.
    """
    found: list[list[Message]] = []
    for row in read_rows(path):
        try:
            conversation = parse_row(row.value)
            if isinstance(conversation, str):
                raise ValueError('is plain text, expected a conversation: an object with the key "messages"')
        except ValueError as error:
            raise RowError(Path(path), row.line, str(error), row.unit) from error
        found.append([_weighted(*pair) for pair in zip(conversation.messages, conversation.weights, strict=True)])
    if not found:
        reason = 'holds no conversation; each line must be one, as {"messages": [{"role": "user", "content": "Hi"}, ...]}'
        raise RowError(Path(path), None, reason)
    return found


def _weighted(message: Message, weight: float) -> Message:
    """The message with its weight, where that is not what its role says."""
    return message if weight == float(message["role"] == "assistant") else {**message, "loss_weight": weight}


@lru_cache(maxsize=4)
def _encoder(tokenizer: Any, source: str, size: int) -> ChatEncoder:
    """The encoder of a tokenizer in its present state: what it takes to make one is spared for every conversation but the first."""
    del source, size
    return ChatEncoder(tokenizer)


def _backend(tokenizer: Any) -> Any:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} is no fast tokenizer of transformers: load one that has a tokenizer.json")
    return tokenizer.backend_tokenizer


def _guard(tokenizer: Any, structure: frozenset[str], template: str) -> Guard:
    """The marks of a tokenizer: special tokens, what opens and closes turns, and in texts of others than the assistant every token
    that the template contains or that is written like a mark."""
    decoder: Mapping[int, Any] = _backend(tokenizer).get_added_tokens_decoder()
    tokens = [token for token in decoder.values() if token.content.strip()]
    answer = structure | {token.content for token in tokens if token.special}
    other = answer | {token.content for token in tokens if token.content in template or _MARK.fullmatch(token.content)}
    return Guard(tuple(sorted(other)), answer, other)


def _document(encoded: Encoded) -> Document:
    return Document(encoded.ids.astype(np.int64), encoded.weights)
