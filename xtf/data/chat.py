"""Conversations: read from a file, and turned into ids and labels by the tokenizer's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from xtf.batch import IGNORE

Message = Mapping[str, str]
"""``{"role": ..., "content": ...}``."""


def read_chat_jsonl(path: str | Path) -> list[list[Message]]:
    """The conversations of a file with one JSON object per line: ``{"messages": [{"role": ..., "content": ...}, ...]}``.

    Other keys of a line and of a message are left out; empty lines are passed over.

    Raises:
        ValueError: if the file cannot be read, holds no conversation, or a line is wrong; it names file, line and reason.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    found: list[list[Message]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found.append(_conversation(json.loads(line)))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}") from error
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ValueError(f'{path}: holds no conversation; each line must be one, as {{"messages": [{{"role": "user", "content": "Hi"}}]}}')
    return found


def encode_chat(tokenizer: Any, messages: Sequence[Message], max_length: int | None = None) -> tuple[list[int], list[int]]:
    """Ids and labels of one conversation in the tokenizer's chat template.

    Learned is what the model has to write: all that stands between the end of the generation prompt and the end of the
    template's end mark, for every assistant message; everything else has the label -100. The generation prompt's end is where
    the conversation before the message, rendered with ``add_generation_prompt=True``, ends; it must be a prefix of the
    whole. The message's text must then be found in the whole, followed by the same end mark as when it is the last message.
    So templates that write earlier turns differently from the last (Qwen3 drops their thinking) are handled, and one
    that rewrites a message is refused.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template.
        messages: the conversation.
        max_length: ids beyond this many are cut off. A conversation cut before its first answer has no label but -100.

    Returns:
        Two lists of equal length.

    Raises:
        ValueError: if the tokenizer has no template or cannot tell where tokens stand in the text, if no message is the
            assistant's, or if an answer cannot be found in the rendered text.
    """
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length is {max_length}, expected at least 2: the first token is never a target")
    messages = _conversation({"messages": messages})
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} gives no character offsets: load a fast tokenizer (one with a tokenizer.json)")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{type(tokenizer).__name__} has no chat_template: set one, or use an instruction-tuned model's tokenizer")
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError(f"no message has the role 'assistant', so nothing would be learned; roles are {[m['role'] for m in messages]}")
    whole = _render(tokenizer, messages)
    spans = [_answer(tokenizer, messages, i, whole) for i, message in enumerate(messages) if message["role"] == "assistant"]
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = list(encoded["input_ids"])
    labels = [IGNORE] * len(ids)
    rest = iter(spans)
    span = next(rest, None)
    for t, (begin, end) in enumerate(encoded["offset_mapping"]):
        while span is not None and begin >= span[1]:
            span = next(rest, None)
        if span is not None and span[0] <= begin < end <= span[1]:
            labels[t] = ids[t]
    return ids[:max_length], labels[:max_length]


def _answer(tokenizer: Any, messages: list[Message], index: int, whole: str) -> tuple[int, int]:
    """The half-open range of characters of ``whole`` that message ``index`` teaches."""
    if index == 0:
        raise ValueError("the first message is the assistant's: a conversation must begin with a system or user message")
    before = _render(tokenizer, messages[:index], add_generation_prompt=True)
    if not whole.startswith(before):
        raise ValueError(
            f"message {index}: the chat template renders what precedes it differently in the whole conversation, "
            "so the answer's beginning is not known; use a template whose turns do not depend on later ones"
        )
    text = messages[index]["content"].strip()
    alone = _render(tokenizer, messages[: index + 1])
    at, at_alone = whole.find(text, len(before)), alone.rfind(text)
    if at < 0 or at_alone < len(before):
        raise ValueError(f"message {index}: the chat template rewrites its text {_short(text)}; give the text as the template writes it")
    mark = alone[at_alone + len(text) :].rstrip()
    end = at + len(text)
    if not whole.startswith(mark, end):
        raise ValueError(
            f"message {index}: the chat template ends it with {_short(whole[end : end + len(mark)])} in the whole conversation "
            f"and with {_short(mark)} as the last message; the end mark must be the same"
        )
    return len(before), end + len(mark)


def _render(tokenizer: Any, messages: Sequence[Message], **options: bool) -> str:
    try:
        return cast(str, tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:  # templates raise jinja2's errors for conversations that they do not take
        raise ValueError(f"the chat template refuses the roles {[m['role'] for m in messages]}: {error}") from error


def _conversation(row: object) -> list[Message]:
    """The messages of a row, checked."""
    if not isinstance(row, Mapping) or "messages" not in row:
        raise ValueError(f'expected an object with the key "messages", got {_short(cast(object, row))}')
    messages = cast(object, row["messages"])
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f'"messages" must be a non-empty list, got {_short(cast(object, messages))}')
    return [_message(index, message) for index, message in enumerate(cast(Sequence[object], messages))]


def _message(index: int, message: object) -> Message:
    found: dict[str, str] = {}
    for key in ("role", "content"):
        value = cast(Mapping[str, object], message).get(key) if isinstance(message, Mapping) else None
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f'message {index}: "{key}" must be a non-empty string, got {_short(cast(object, message))}')
        found[key] = value
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
