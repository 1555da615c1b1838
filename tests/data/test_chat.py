"""What is learned of a conversation, token for token, under the templates of real tokenizers."""

from __future__ import annotations

import copy
import json
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtf.batch import IGNORE
from xtf.data import (
    ChatEncoder,
    Conversation,
    Document,
    Documents,
    TextEncoder,
    demo_tokenizer,
    encode_chat,
    parse_row,
    read_chat_jsonl,
    read_rows,
)
from xtf.data.text import TOKENIZER_FILE

Messages = list[dict[str, Any]]


class Case(NamedTuple):
    """A tokenizer with its template, and what its template makes of an answer, written down independently."""

    tokenizer: Any
    encoder: ChatEncoder
    answer: Callable[[Mapping[str, Any], bool], str]
    end: str
    template: str | None


def json_of(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def qwen3_answer(message: Mapping[str, Any], last: bool) -> str:
    """``last``: whether no question follows."""
    calls = [
        f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {json_of(call["function"]["arguments"])}}}\n</tool_call>'
        for call in message.get("tool_calls", ())
    ]
    thought = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if last and message.get("reasoning_content") else ""
    return thought + "\n".join([message["content"], *calls] if message["content"] else calls)


def chatml_answer(message: Mapping[str, Any], last: bool) -> str:
    return qwen3_answer(message, True)


def deepseek_answer(message: Mapping[str, Any], last: bool) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call['function']['name']}\n```json\n{json_of(call['function']['arguments'])}\n```"
        "<｜tool▁call▁end｜>"
        for call in message.get("tool_calls", ())
    ]
    thought = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if last and message.get("reasoning_content") else ""
    return thought + message["content"] + ("<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>" if calls else "")


@pytest.fixture(scope="module", params=["qwen3", "deepseek", "smollm2", "smollm2 with the built-in template"])
def case(request: pytest.FixtureRequest, real_inputs: Path) -> Case:
    from transformers import AutoTokenizer

    folder, template, answer, end = {
        "qwen3": ("qwen3-tokenizer", None, qwen3_answer, "<|im_end|>"),
        "deepseek": ("deepseek-tokenizer", "deepseek", deepseek_answer, "<｜end▁of▁sentence｜>"),
        "smollm2": ("smollm2-135m", None, chatml_answer, "<|im_end|>"),
        "smollm2 with the built-in template": ("smollm2-135m", "chatml", chatml_answer, "<|im_end|>"),
    }[request.param]
    tokenizer = AutoTokenizer.from_pretrained(real_inputs / folder)
    return Case(tokenizer, ChatEncoder(tokenizer, template), answer, end, template)


@pytest.fixture(scope="module")
def demo() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZER_FILE.parent)


def conversation(messages: Messages, **row: Any) -> Conversation:
    found = parse_row({"messages": messages, **row})
    assert isinstance(found, Conversation)
    return found


def learned(tokenizer: Any, document: Document) -> list[str]:
    """The texts of the runs of tokens that are learned."""
    assert document.ids.shape == document.weights.shape
    cuts = np.flatnonzero(np.diff(document.weights)) + 1
    runs = zip(np.split(document.ids, cuts), np.split(document.weights, cuts), strict=True)
    return [tokenizer.decode(ids.tolist()) for ids, weights in runs if len(weights) and weights[0] > 0]


def expected(case: Case, found: Conversation) -> list[str]:
    asked = [i for i, message in enumerate(found.messages) if message["role"] == "user"]
    return [
        case.answer(message, i > asked[-1]) + case.end
        for i, message in enumerate(found.messages)
        if message["role"] == "assistant" and found.weights[i]
    ]


SYSTEM = {"role": "system", "content": "Be brief."}
ASK, ANSWER = {"role": "user", "content": "What is 2+3?"}, {"role": "assistant", "content": "It is 5."}
THOUGHT = {"role": "assistant", "content": "It is 5.", "reasoning_content": "Two and three.\n\nFive."}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [3, "é"]}}},
        {"type": "function", "function": {"name": "add", "arguments": {}}},
    ],
}
OUTPUT = {"role": "tool", "content": '{"sum": 5}'}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}}]

CONVERSATIONS: dict[str, Messages] = {
    "one turn": [ASK, ANSWER],
    "system": [SYSTEM, ASK, ANSWER],
    "several turns": [SYSTEM, ASK, ANSWER, ASK, ANSWER, ASK, {"role": "assistant", "content": "Still 5."}],
    "empty answers": [ASK, {"role": "assistant", "content": ""}, ASK, {"role": "assistant", "content": ""}],
    "answer like the role": [{"role": "user", "content": "assistant"}, {"role": "assistant", "content": "assistant"}],
    "answer like the mark": [ASK, {"role": "assistant", "content": "im_end"}, ASK, {"role": "assistant", "content": "end"}],
    "the same text everywhere": [{**SYSTEM, "content": "a"}, {**ASK, "content": "a"}, {**ANSWER, "content": "a"}],
    "reasoning": [ASK, THOUGHT],
    "reasoning in earlier turns": [ASK, THOUGHT, ASK, THOUGHT, ASK, ANSWER],
    "tool calls": [ASK, CALLS, OUTPUT, OUTPUT, ANSWER],
    "text with tool calls": [SYSTEM, ASK, {**CALLS, "content": "I add."}, OUTPUT, ANSWER, ASK, {**CALLS, "content": "Again."}],
    "reasoning with tool calls": [ASK, {**CALLS, "reasoning_content": "Adding."}, OUTPUT, OUTPUT, THOUGHT],
    "earlier reasoning with tool calls": [ASK, {**CALLS, "reasoning_content": "Adding."}, OUTPUT, OUTPUT, THOUGHT, ASK, ANSWER],
    "two questions": [ASK, ASK, ANSWER],
    "question left open": [ASK, ANSWER, ASK],
    "space inside": [ASK, {"role": "assistant", "content": "a\n\n  b \n\n\tc"}],
}


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_learned_are_answers_and_end_marks(case: Case, name: str, tools: list[dict[str, Any]]) -> None:
    found = conversation(CONVERSATIONS[name], tools=tools)
    document = case.encoder.encode(found)
    assert learned(case.tokenizer, document) == expected(case, found)
    assert set(document.weights.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_are_those_of_the_template(case: Case, name: str) -> None:
    if case.encoder.template.calls == "text" and ("tool" in name or "reasoning" in name):
        case = case._replace(encoder=ChatEncoder(case.tokenizer, "chatml"))  # its own template writes neither
    ids = case.tokenizer.apply_chat_template(
        CONVERSATIONS[name], chat_template=case.encoder.template.source, tokenize=True, return_dict=False
    )
    assert case.encoder.encode(conversation(CONVERSATIONS[name])).ids.tolist() == ids


@pytest.mark.parametrize("name", ["chat/alpaca_en.jsonl", "chat/v1_sft.jsonl", "chat/tool_calls.json"])
def test_every_row_of_the_real_files(case: Case, real_inputs: Path, name: str) -> None:
    rows = [parse_row(row.value) for row in read_rows(real_inputs / name)]
    encoded = case.encoder.codec.encode([case.encoder.segments(row) for row in rows if isinstance(row, Conversation)])
    assert len(encoded.lengths) == len(rows) >= 300
    ends = np.cumsum(encoded.lengths)
    for row, end, length in zip(rows, ends.tolist(), encoded.lengths.tolist(), strict=True):
        assert isinstance(row, Conversation)
        part = slice(end - length, end)
        assert learned(case.tokenizer, Document(encoded.ids[part].astype(np.int64), encoded.weights[part])) == expected(case, row)


# ---- marks in texts ----


def test_marks_in_texts_are_plain(case: Case) -> None:
    own = f"x{case.end}\n<|im_start|>system\n<｜User｜>y"
    messages: Messages = [
        {"role": "system", "content": own},
        {"role": "user", "content": own + "</tool_call><think>"},
        {"role": "assistant", "content": own},
        {"role": "user", "content": own},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a" + own: own}}}]},
        {"role": "tool", "content": own},
        {"role": "assistant", "content": own, "reasoning_content": own},
    ]
    tools = [{"name": "f", "description": own, "parameters": {"type": "object", "properties": {own: {"type": "string"}}}}]
    found = conversation(messages, tools=tools)
    document = case.encoder.encode(found)
    assert learned(case.tokenizer, document) == expected(case, found)
    # as many marks as without them in the texts
    clean = [
        {**m, "content": "x" if m["content"] else "", **({"reasoning_content": "x"} if "reasoning_content" in m else {})} for m in messages
    ]
    clean[4] = {**clean[4], "tool_calls": [{"function": {"name": "f", "arguments": {"a": "x"}}}]}
    tools[0] |= {"description": "x", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
    plain = case.encoder.encode(conversation(clean, tools=tools))
    for mark in case.encoder.codec.guard.marks:
        token = case.tokenizer.convert_tokens_to_ids(mark)
        assert (document.ids == token).sum() == (plain.ids == token).sum(), mark


def test_marks_in_texts_are_tokens_if_asked(case: Case) -> None:
    encoder = ChatEncoder(case.tokenizer, case.template, special_tokens_in_text=True)
    own = f"x{case.end}y"
    document = encoder.encode(conversation([{"role": "user", "content": own}, {"role": "assistant", "content": own}]))
    end = case.tokenizer.convert_tokens_to_ids(case.end)
    plain = case.encoder.encode(conversation([{"role": "user", "content": "xy"}, {"role": "assistant", "content": "xy"}]))
    assert (document.ids == end).sum() == (plain.ids == end).sum() + 2
    assert learned(case.tokenizer, document) == [own + case.end]


def test_reasoning_within_the_text_keeps_its_marks(case: Case) -> None:
    written = "<think>\nHm.\n</think>\n\nIt is 5."
    document = case.encoder.encode(conversation([ASK, {"role": "assistant", "content": written}]))
    assert learned(case.tokenizer, document) == [written + case.end]
    if "</think>" in case.tokenizer.get_added_vocab():
        assert case.tokenizer.convert_tokens_to_ids("</think>") in document.ids[document.weights > 0]


MARKS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "\ufdd0",
    "\ue000",
    "\ufdd1\ufdd2",
]
CHARACTERS = st.characters(
    exclude_categories=("Cs", "Cn", "Cc")
)  # SmolLM2 has no tokens for some controls; new ones are normalised here or there
TEXT = st.lists(st.text(CHARACTERS, max_size=8) | st.sampled_from([*MARKS, "\n", "\n\n", " ", "<think>", "im_end"]), max_size=5).map(
    "".join
)


@settings(max_examples=60)
@given(texts=st.lists(TEXT, min_size=2, max_size=6))
def test_any_text(case: Case, texts: list[str]) -> None:
    messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts[: len(texts) // 2 * 2])]
    found = conversation(messages)
    document = case.encoder.encode(found)
    answers = expected(case, found)
    if case.end == "<|im_end|>" and case.encoder.template.inserted:
        answers[-1] = messages[-1]["content"].lstrip("\n") + case.end  # Qwen3's template takes it off before the last answer
    normal = [unicodedata.normalize("NFC", text) for text in answers]
    assert [unicodedata.normalize("NFC", text) for text in learned(case.tokenizer, document)] == normal
    end = case.tokenizer.convert_tokens_to_ids(case.end)
    assert (document.ids[document.weights > 0] == end).sum() == len(answers)


def test_space_that_would_merge_with_the_prompt_is_learned(case: Case) -> None:
    for text in ("\nHello", "\n\nHello", " Hello", "Hello\n", "Hello \n\n"):
        messages = [ASK, {"role": "assistant", "content": text}, ASK, ANSWER]
        assert learned(case.tokenizer, case.encoder.encode(conversation(messages)))[0] == text + case.end


# ---- weights, lengths ----


def test_weights_of_messages(case: Case) -> None:
    messages = [
        {**SYSTEM, "loss_weight": 0.5},
        {**ASK, "train": True},
        {**ANSWER, "loss_weight": 0.25},
        {**ASK, "content": " again\n", "loss_weight": 2},
        {**ANSWER, "train": False},
        {**ASK, "content": "", "loss_weight": 3},
        ANSWER,
    ]
    document = case.encoder.encode(conversation(messages))
    texts = {weight: case.tokenizer.decode(document.ids[document.weights == weight].tolist()) for weight in (0.5, 1.0, 0.25, 2.0)}
    closing = "" if case.end.startswith("<｜") else case.end  # DeepSeek's questions have no end mark
    assert texts == {
        0.5: SYSTEM["content"] + closing,
        1.0: ASK["content"] + closing + ANSWER["content"] + case.end,
        0.25: ANSWER["content"] + case.end,
        2.0: ("again\n" if closing else "again") + closing,
    }
    assert (document.weights == 3).sum() == bool(closing)


def test_cut_documents_keep_what_is_left_right(case: Case) -> None:
    document = case.encoder.encode(conversation(CONVERSATIONS["several turns"]))
    whole = Documents.of([document.ids.tolist()], [document.weights.tolist()])
    for length in range(2, len(document.ids) + 1):
        cut = whole.limited(length)[0]
        assert cut.ids.tolist() == document.ids[:length].tolist()
        for full, part in zip(learned(case.tokenizer, document), learned(case.tokenizer, cut), strict=False):
            assert full.startswith(part)


# ---- plain text ----


def test_plain_text_and_its_end(case: Case) -> None:
    encoder = TextEncoder(case.tokenizer, template=case.encoder.template.source)
    text = f"Once{case.end} upon\n<think><|im_start|>\ufdd0 a time"
    document = encoder.encode(text)
    assert case.tokenizer.decode(document.ids.tolist()) == text + case.tokenizer.eos_token
    assert (document.ids == case.tokenizer.eos_token_id).sum() == 1 and bool((document.weights == 1).all())
    asked = TextEncoder(case.tokenizer, special_tokens_in_text=True).encode(text)
    assert case.tokenizer.decode(asked.ids.tolist()) == text + case.tokenizer.eos_token
    assert (asked.ids == case.tokenizer.eos_token_id).sum() == 2


# ---- the functions for one conversation ----

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is his name?"},
    {"role": "assistant", "content": "Bingley."},
    {"role": "user", "content": "Is he married or single? Bingley."},
    {"role": "assistant", "content": "Oh! Single, my dear."},
]


def test_ids_and_labels_of_one_conversation(demo: Any) -> None:
    ids, labels = encode_chat(demo, CHAT)
    assert demo.decode(ids) == demo.apply_chat_template(CHAT, tokenize=False)
    assert all(label in (IGNORE, id_) for id_, label in zip(ids, labels, strict=True))
    weights = np.array([label != IGNORE for label in labels], np.float32)
    assert learned(demo, Document(np.array(ids), weights)) == ["Bingley.<|im_end|>", "Oh! Single, my dear.<|im_end|>"]
    for length in (2, 20, len(ids), 10_000):
        assert encode_chat(demo, CHAT, length) == (ids[:length], labels[:length])
    with pytest.raises(ValueError, match="max_length is 1"):
        encode_chat(demo, CHAT, 1)


def test_a_changed_template_is_noticed(demo: Any) -> None:
    tokenizer = copy.copy(demo)
    before, _ = encode_chat(tokenizer, CHAT)
    tokenizer.chat_template = demo.chat_template.replace("<|im_start|>", "<|im_start|> ")
    assert encode_chat(tokenizer, CHAT)[0] != before


def test_tokenizers_that_cannot_encode_conversations(demo: Any) -> None:
    with pytest.raises(ValueError, match="no fast tokenizer"):
        encode_chat(demo_tokenizer(), CHAT)
    bare = copy.copy(demo)
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"has no chat_template.*built-in \(chatml, deepseek\)"):
        encode_chat(bare, CHAT)
    assert ChatEncoder(bare, "chatml").encode(conversation(CHAT)).ids.tolist() == encode_chat(demo, CHAT)[0]


def test_chat_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    row = {"messages": CHAT, "id": 3}
    weighted = [CHAT[1], {**CHAT[2], "loss_weight": 0.5}]
    file.write_text("\ufeff" + json.dumps(row) + "\n\n" + json.dumps({"messages": weighted}) + "\n", encoding="utf-8")
    assert read_chat_jsonl(file) == [CHAT, weighted]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n \n", "holds no conversation"),
        ('{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]}\n{"messages": [', "line 2: not JSON"),
        ('\n{"messages": []}', 'line 2: "messages" is empty'),
        ('{"text": "Hi"}', "line 1: is plain text, expected a conversation"),
    ],
)
def test_wrong_chat_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as raised:
        read_chat_jsonl(file)
    assert str(file) in str(raised.value)
