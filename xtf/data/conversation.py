"""Rows as conversations or plain text, whatever form they are published in."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` in OpenAI's form."""

ROLES = ("system", "user", "assistant", "tool")

_ROLE = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_call": "assistant",
}  # fmt: skip
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    """A conversation in OpenAI's form, and what of it is learned.

    Args:
        messages: dicts with ``role`` (system, user, assistant or tool) and ``content`` (a string, possibly empty); an assistant's
            may have ``reasoning_content`` (a string) and ``tool_calls``
            (``{"type": "function", "function": {"name": str, "arguments": dict}}``).
        tools: descriptions of the functions that may be called, ``{"type": "function", "function": {...}}``.
        weights: the loss weight of each message, at least 0.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    weights: tuple[float, ...]


def parse_row(row: object) -> Conversation | str:
    """The conversation, or the plain text, that a row of a data file holds.

    Understood are OpenAI's ``messages`` (content as string or as parts of text; tool calls with arguments as object or as
    JSON), ``conversations`` in the form called ShareGPT (``from``: system, human, gpt, function_call, observation; ``value``), both
    with ``tools`` and ``system`` beside them, and plain text under ``content`` or ``text``. The first of these keys that is there and
    not null counts.

    Learned are the assistant's messages, with the weight 1. A message's ``loss_weight`` (or ``weight``, at least 0), or ``train`` (true is
    1, false is 0), overrides that, for any role.

    Order of roles: an assistant's message never comes first; a tool's message follows a tool call or another tool's message.
    Everything else is left to the chat template. A ShareGPT ``function_call`` that follows an assistant's message of the same
    weight becomes a part of it.

    Raises:
        ValueError: naming the message and the reason.

    Example:
        >>> parse_row({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}).messages
        ({'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'})
        >>> parse_row({"text": "Once upon a time"})
        'Once upon a time'
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object, got {short(row)}")
    fields = cast(Mapping[str, object], row)
    for key in ("messages", "conversations"):
        if fields.get(key) is not None:
            return _conversation(fields, key)
    for key in ("content", "text"):
        text = fields.get(key)
        if text is not None:
            if not isinstance(text, str):
                raise ValueError(f'"{key}" must be a string, got {short(text)}')
            if not text.strip():
                raise ValueError(f'"{key}" is empty: there is nothing to train on')
            return _whole(text, f'"{key}"')
    raise ValueError(f'expected one of the keys "messages", "conversations", "content" and "text", got {short(list(fields))}')


def short(value: object) -> str:
    """What an error shows of a value."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _conversation(row: Mapping[str, object], key: str) -> Conversation:
    given = row[key]
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f'"{key}" must be a list of messages, got {short(given)}')
    messages: list[dict[str, Any]] = []
    weights: list[float] = []
    system = row.get("system")
    if isinstance(system, str) and system.strip():
        messages.append({"role": "system", "content": _whole(system, '"system"')})
        weights.append(0.0)
    for index, item in enumerate(cast(Sequence[object], given)):
        try:
            if not isinstance(item, Mapping):
                raise ValueError(f"must be an object, got {short(item)}")
            fields = cast(Mapping[str, object], item)
            message, called = _message(fields)
            weight = _weight(fields, message["role"])
            last = messages[-1] if messages else None
            if message["role"] == "assistant" and last is None:
                raise ValueError("is the assistant's: a conversation must begin with a system or user message")
            if message["role"] == "tool" and not _has_call(last):
                raise ValueError("has the role 'tool' and follows no tool call")
            if called and last is not None and last["role"] == "assistant" and weights[-1] == weight:
                messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
                continue
        except ValueError as error:
            raise ValueError(f"message {index}: {error}") from error
        messages.append(message)
        weights.append(weight)
    if not given or not messages:
        raise ValueError(f'"{key}" is empty: a conversation needs messages')
    if not any(weights):
        if all(message["role"] != "assistant" for message in messages):
            raise ValueError(f"there is nothing to train on: no message is the assistant's, roles are {[m['role'] for m in messages]}")
        raise ValueError("there is nothing to train on: every message has the loss weight 0")
    return Conversation(tuple(messages), _tools(row.get("tools")), tuple(weights))


def _has_call(message: Mapping[str, Any] | None) -> bool:
    if message is None:
        return False
    if message["role"] == "assistant":  # a call may also be written out in the text, as Hermes' data sets do
        return bool(message.get("tool_calls")) or "tool_call" in message["content"] or "tool▁call" in message["content"]
    return message["role"] == "tool"


def _message(fields: Mapping[str, object]) -> tuple[dict[str, Any], bool]:
    """A message in OpenAI's form, and whether it is a ShareGPT function call."""
    named, text = ("role", "content") if fields.get("role") is not None else ("from", "value")
    role = fields.get(named)
    if not isinstance(role, str):
        raise ValueError(f'needs a "role" (or "from") that is a string, got {short(dict(fields))}')
    if role not in _ROLE:
        raise ValueError(f"has the unknown role {role!r}, expected one of {', '.join(_ROLE)}")
    if role == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _written_calls(fields.get(text))}, True
    found: dict[str, Any] = {"role": _ROLE[role]}
    calls = fields.get("tool_calls") or ([{"function": call}] if (call := fields.get("function_call")) else None)
    content = fields.get(text)
    if content is None and (found["role"] != "assistant" or not calls):
        raise ValueError(f'"{text}" must be a string or a list of text parts, got {short(dict(fields))}')
    found["content"] = "" if content is None else _content(content, text)
    if found["role"] == "assistant":
        reasoning = next((fields[key] for key in _REASONING if fields.get(key) is not None), None)
        if reasoning is not None:
            if not isinstance(reasoning, str):
                raise ValueError(f"its reasoning must be a string, got {short(reasoning)}")
            if reasoning.strip():
                found["reasoning_content"] = _whole(reasoning, "its reasoning")
        if calls:
            if not isinstance(calls, Sequence) or isinstance(calls, str):
                raise ValueError(f'"tool_calls" must be a list, got {short(calls)}')
            found["tool_calls"] = [_call(call) for call in cast(Sequence[object], calls)]
    for key in ("name", "tool_call_id"):
        if isinstance(fields.get(key), str):
            found[key] = fields[key]
    return found, False


def _content(content: object, key: str) -> str:
    if isinstance(content, str):
        return _whole(content, f'"{key}"')
    if not isinstance(content, Sequence):
        raise ValueError(f'"{key}" must be a string or a list of text parts, got {short(content)}')
    texts: list[str] = []
    for number, part in enumerate(cast(Sequence[object], content)):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise ValueError(f"part {number} must be an object, got {short(part)}")
        fields = cast(Mapping[str, object], part)
        if fields.get("type", "text") not in ("text", "input_text", "output_text"):
            raise ValueError(f"part {number} has the type {fields['type']!r}: only text can be trained on")
        text = fields.get("text") if fields.get("text") is not None else fields.get("value")
        if not isinstance(text, str):
            raise ValueError(f'part {number} needs "text" (or "value") that is a string, got {short(dict(fields))}')
        texts.append(_whole(text, f"part {number}"))
    return "".join(texts)


def _whole(text: str, what: str) -> str:
    """The text, if it is Unicode: JSON can write one half of a surrogate pair, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} holds half of a surrogate pair (character {error.start}), which is no text") from error
    return text


def _json(text: object, what: str) -> object:
    """The value, parsed if it is a string."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(_whole(text, what))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be JSON, got {short(text)}") from error


def _written_calls(value: object) -> list[dict[str, Any]]:
    parsed = _json(value, "a function_call")
    calls = cast(list[object], parsed) if isinstance(parsed, list) else [parsed]
    if not calls:
        raise ValueError("a function_call must hold at least one call, got none")
    return [_call(call) for call in calls]


def _call(call: object) -> dict[str, Any]:
    fields = _object(call)
    function = _object(fields.get("function", fields))
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"a tool call needs a name that is a string, got {short(call)}")
    given = function.get("arguments")
    arguments = _json({} if given is None or given == "" else given, f"the arguments of {name!r}")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {name!r} must be an object, or JSON of one, got {short(given)}")
    _whole(json.dumps(arguments, ensure_ascii=False), f"the arguments of {name!r}")
    known = {"id": fields["id"]} if isinstance(fields.get("id"), str) else {}
    written = {"name": _whole(name, "the name of a tool"), "arguments": dict(cast(Mapping[str, Any], arguments))}
    return {**known, "type": "function", "function": written}


def _object(value: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], value) if isinstance(value, Mapping) else {}


def _tools(tools: object) -> tuple[Message, ...]:
    if tools is None or tools == "":
        return ()
    parsed = _json(tools, '"tools"')
    if isinstance(parsed, str) or not isinstance(parsed, Sequence):
        raise ValueError(f'"tools" must be a list, or JSON of one, got {short(cast(object, parsed))}')
    found: list[Message] = []
    for number, tool in enumerate(cast(Sequence[object], parsed)):
        fields = _object(tool)
        if not isinstance(_object(fields.get("function", fields)).get("name"), str):
            raise ValueError(f"tool {number} needs a name that is a string, got {short(tool)}")
        found.append(fields if "function" in fields else {"type": "function", "function": dict(fields)})
    _whole(json.dumps(found, ensure_ascii=False), '"tools"')
    return tuple(found)


def _weight(fields: Mapping[str, object], role: str) -> float:
    train = fields.get("train")
    if train is not None and not isinstance(train, bool):
        raise ValueError(f'"train" must be true or false, got {short(train)}')
    if train is False:
        return 0.0
    for key in ("loss_weight", "weight"):
        weight = fields.get(key)
        if weight is not None:
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
                raise ValueError(f'"{key}" must be a finite number of at least 0, got {short(weight)}')
            return float(weight)
    return 1.0 if train or role == "assistant" else 0.0
