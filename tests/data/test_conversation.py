"""Rows in the forms they are published in, and what is wrong with those that cannot be used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xtf.data import Conversation, parse_row

U, A = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, None]}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def conversation(row: dict[str, Any]) -> Conversation:
    found = parse_row(row)
    assert isinstance(found, Conversation)
    return found


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [U, A]},
        {"messages": [U, A], "id": 7, "text": "also"},
        {"messages": [U, {**A, "tool_calls": None, "reasoning_content": None}], "tools": None},
        {"messages": [U, {**A, "reasoning_content": " \n"}], "tools": "[]"},
        {"messages": [{"role": "user", "content": [{"type": "text", "value": "Hi"}]}, A]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, "i"]}, A]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello"}], "tools": "", "system": ""},
        {"messages": None, "conversations": [U, A]},
    ],
)
def test_forms_of_the_same_conversation(row: dict[str, Any]) -> None:
    assert conversation(row) == Conversation((U, A), (), (0.0, 1.0))


def test_plain_text() -> None:
    assert parse_row({"content": " a\n"}) == parse_row({"text": " a\n", "id": 1}) == parse_row({"content": None, "text": " a\n"}) == " a\n"


CALLED = [
    {"messages": [U, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "3"}, A], "tools": [TOOL]},
    {
        "messages": [
            U,
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": [2, null]}'}}]},
            {"role": "function", "content": "3"},
            A,
        ],
        "tools": json.dumps([TOOL["function"]]),
    },
    {
        "messages": [
            U,
            {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": {"a": 1, "b": [2, None]}}},
            {"role": "tool", "content": "3"},
            A,
        ],
        "tools": [TOOL],
    },
    {
        "conversations": [
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "Hello"},
        ],
        "tools": json.dumps([TOOL["function"]]),
    },
]


@pytest.mark.parametrize("row", CALLED)
def test_tool_calls(row: dict[str, Any]) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert conversation(row) == Conversation((U, called, {"role": "tool", "content": "3"}, A), (TOOL,), (0.0, 1.0, 0.0, 1.0))


def test_function_calls_in_a_row_are_one_message() -> None:
    call = {"from": "function_call", "value": json.dumps(CALL["function"])}
    both = {"from": "function_call", "value": json.dumps([CALL["function"], CALL["function"]])}
    found = conversation({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Let me"}, call, both]})
    assert found.messages[1:] == ({"role": "assistant", "content": "Let me", "tool_calls": [CALL] * 3},)
    apart = conversation({"conversations": [{"from": "human", "value": "Hi"}, call, {**call, "train": False}]})
    assert apart.weights == (0.0, 1.0, 0.0)


def test_system_beside_the_messages() -> None:
    found = conversation({"conversations": [U, A], "system": "Be brief."})
    assert found.messages[0] == {"role": "system", "content": "Be brief."} and found.weights == (0.0, 0.0, 1.0)
    assert conversation({"messages": [{"role": "developer", "content": "x"}, U, A]}).messages[0]["role"] == "system"


def test_reasoning_under_its_names() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert conversation({"messages": [U, {**A, name: "Hm"}]}).messages[1] == {**A, "reasoning_content": "Hm"}


@pytest.mark.parametrize(
    ("user", "assistant", "weights"),
    [
        ({}, {}, (0, 1)),
        ({"train": True}, {}, (1, 1)),
        ({"loss_weight": 0.25}, {"train": False}, (0.25, 0)),
        ({"loss_weight": 0}, {"loss_weight": 2}, (0, 2)),
        ({"loss_weight": None}, {"weight": 0.5}, (0, 0.5)),
        ({}, {"loss_weight": 0.5, "train": True}, (0, 0.5)),
        ({"train": True}, {"loss_weight": 0.5, "train": False}, (1, 0)),
    ],
)
def test_weights(user: dict[str, Any], assistant: dict[str, Any], weights: tuple[float, float]) -> None:
    assert conversation({"messages": [{**U, **user}, {**A, **assistant}]}).weights == weights


def with_answer(**fields: object) -> dict[str, Any]:
    return {"messages": [U, {**A, **fields}]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "expected an object, got \\[1\\]"),
        ({"prompt": "a"}, "expected one of the keys .* got \\['prompt'\\]"),
        ({"text": 3}, '"text" must be a string'),
        ({"text": " "}, '"text" is empty'),
        ({"text": "\ud800"}, "half of a surrogate pair"),
        ({"messages": "Hi"}, '"messages" must be a list'),
        ({"messages": []}, '"messages" is empty'),
        ({"conversations": [], "system": "x"}, '"conversations" is empty'),
        ({"messages": ["Hi"]}, "message 0: must be an object"),
        ({"messages": [{"content": "Hi"}]}, 'message 0: needs a "role"'),
        ({"messages": [U, {"role": "bot", "content": "Hi"}]}, "message 1: has the unknown role 'bot'"),
        ({"messages": [{"role": "user"}]}, 'message 0: "content" must be a string'),
        ({"messages": [{"role": "user", "content": 3}]}, 'message 0: "content" must be a string'),
        ({"messages": [{"role": "user", "content": "\udfff"}, A]}, "message 0: .*surrogate"),
        ({"messages": [U, {"role": "assistant", "content": None}]}, 'message 1: "content" must be a string'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, A]}, "part 0 has the type 'image_url'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}, A]}, 'message 0: part 0 needs "text"'),
        ({"messages": [A]}, "message 0: is the assistant's: a conversation must begin with a system or user message"),
        ({"messages": [U, A, {"role": "tool", "content": "3"}]}, "message 2: has the role 'tool' and follows no tool call"),
        ({"messages": [{"role": "tool", "content": "3"}, A]}, "message 0: has the role 'tool'"),
        ({"messages": [U]}, "nothing to train on: no message is the assistant's"),
        (with_answer(train=False), "nothing to train on: every message has the loss weight 0"),
        (with_answer(loss_weight=-1), 'message 1: "loss_weight" must be a finite number of at least 0, got -1'),
        (with_answer(loss_weight=True), '"loss_weight" must be'),
        (with_answer(loss_weight=float("nan")), '"loss_weight" must be'),
        (with_answer(train=1), 'message 1: "train" must be true or false, got 1'),
        (with_answer(reasoning_content=["a"]), "its reasoning must be a string"),
        (with_answer(tool_calls="x"), '"tool_calls" must be a list'),
        (with_answer(tool_calls=[{"function": {}}]), "a tool call needs a name"),
        (with_answer(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "the arguments of 'f' must be JSON"),
        (with_answer(tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]), "the arguments of 'f' must be an object"),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "f(x)"}]},
            "message 1: a function_call must be",
        ),
        ({"messages": [U, A], "tools": "["}, '"tools" must be JSON'),
        ({"messages": [U, A], "tools": {"name": "f"}}, '"tools" must be a list'),
        ({"messages": [U, A], "tools": [{"description": "x"}]}, "tool 0 needs a name"),
    ],
)
def test_rows_that_cannot_be_used(row: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_row(row)
