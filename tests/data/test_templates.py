"""Templates of other shapes than those of the real tokenizers at hand, and tokenizers that put a space before a text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xtf.data import ChatEncoder, Conversation, Document, TextEncoder, load_corpus, parse_row
from xtf.data.text import TOKENIZER_FILE

SYSTEM, ASK, ANSWER = ({"role": r, "content": c} for r, c in (("system", "Be brief."), ("user", "Who?"), ("assistant", "Mr. Darcy.")))
SECOND = {"role": "assistant", "content": "Bingley."}
THOUGHT = {**ANSWER, "reasoning_content": "He is proud."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": {"a": "é"}}}]}
OUTPUT = {"role": "tool", "content": "Darcy"}


@pytest.fixture(scope="module")
def demo() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZER_FILE.parent)


def with_template(tokenizer: Any, template: str) -> Any:
    other = copy.copy(tokenizer)
    other.chat_template = template
    return other


def conversation(messages: list[dict[str, Any]], **row: Any) -> Conversation:
    found = parse_row({"messages": messages, **row})
    assert isinstance(found, Conversation)
    return found


def learned(tokenizer: Any, document: Document) -> list[str]:
    cuts = np.flatnonzero(np.diff(document.weights)) + 1
    runs = zip(np.split(document.ids, cuts), np.split(document.weights, cuts), strict=True)
    return [tokenizer.decode(ids.tolist()) for ids, weights in runs if weights[0] > 0]


HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
TAIL = "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
LAST = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
SHAPES = {
    # what is marked may leave out the end mark, hold the newline behind it, or be all there is
    "generation": HEAD + "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n" + TAIL + "{% endif %}",
    "generation without end": HEAD + "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n" + TAIL + "{% endif %}",
    "generation with newline": HEAD + "{%- generation -%}{{ m.content }}<|im_end|>{{ '\n' }}{%- endgeneration -%}" + TAIL + "{% endif %}",
    "strip": HEAD + "{{ m.content | trim }}<|im_end|>\n" + TAIL + "{% endif %}",
    # as Phi: a token after the last turn only
    "end of all": HEAD + "{{ m.content }}<|im_end|>\n" + TAIL + "{% else %}<|endoftext|>{% endif %}",
    # as Qwen3
    "empty thought": LAST
    + HEAD
    + "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    + TAIL
    + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    # as Qwen3-Thinking: the prompt opens the thought
    "opened thought": LAST
    + HEAD
    + "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    + TAIL
    + "<think>\n{% endif %}",
    # as DeepSeek V3.1: the prompt closes a thought
    "closed thought": HEAD + "</think>{{ m.content }}<|im_end|>\n" + TAIL + "</think>{% endif %}",
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + HEAD
    + "{{ m.content }}<|im_end|>\n"
    + TAIL
    + "{% endif %}",
    "plain marks": "{% for m in messages %}### {{ m.role }}: {{ m.content }} ###\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant: {% endif %}",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_learned_in_other_shapes(demo: Any, shape: str) -> None:
    tokenizer = with_template(demo, SHAPES[shape])
    messages = [ASK, ANSWER, ASK, SECOND]
    end = " ###" if shape == "plain marks" else "<|im_end|>"
    document = ChatEncoder(tokenizer).encode(conversation(messages))
    assert learned(tokenizer, document) == ["Mr. Darcy." + end, "Bingley." + end]
    assert tokenizer.decode(document.ids.tolist()) == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize(("shape", "opened"), [("empty thought", "<think>\n"), ("opened thought", "")])
def test_reasoning_in_other_shapes(demo: Any, shape: str, opened: str) -> None:
    tokenizer = with_template(demo, SHAPES[shape])
    found = learned(tokenizer, ChatEncoder(tokenizer).encode(conversation([ASK, THOUGHT, ASK, THOUGHT])))
    assert found == ["Mr. Darcy.<|im_end|>", opened + "He is proud.\n</think>\n\nMr. Darcy.<|im_end|>"]


def test_space_that_a_template_takes_off(demo: Any) -> None:
    tokenizer = with_template(demo, SHAPES["strip"])
    found = conversation([ASK, {"role": "assistant", "content": "  Darcy \n"}, ASK, {"role": "assistant", "content": "\n"}])
    assert learned(tokenizer, ChatEncoder(tokenizer).encode(found)) == ["Darcy<|im_end|>", "<|im_end|>"]


CALLS = {
    "object": "{{ m.tool_calls[0].function.arguments | tojson }}",
    "json": "{{ '' + m.tool_calls[0].function.arguments }}",
    "null": "{% if m.content is none %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}",
}


@pytest.mark.parametrize("form", CALLS)
def test_forms_of_tool_calls(demo: Any, form: str) -> None:
    """A turn with calls may end otherwise than one without, as Llama 3's does."""
    write = (
        "{% if m.tool_calls %}CALL {{ m.tool_calls[0].function.name }} "
        + CALLS[form]
        + "<|endoftext|>{% else %}{{ m.content }}<|im_end|>{% endif %}"
    )
    tokenizer = with_template(demo, HEAD + write + "\n" + TAIL + "{% endif %}")
    encoder = ChatEncoder(tokenizer)
    assert (encoder.template.mark, encoder.template.mark_calls) == ("<|im_end|>", "<|endoftext|>")
    found = learned(tokenizer, encoder.encode(conversation([ASK, CALL, OUTPUT, ANSWER, ASK, CALL])))
    called = 'CALL find {"a": "é"}<|endoftext|>'
    assert found == [called, "Mr. Darcy.<|im_end|>", called]


def test_what_a_template_leaves_out_becomes_text(demo: Any) -> None:
    encoder = ChatEncoder(demo)
    tools = [{"name": "find", "description": "Finds."}]
    both = {**CALL, "content": "Wait.", "reasoning_content": "Hm."}
    for messages in ([SYSTEM, ASK, both, OUTPUT, ANSWER], [ASK, both, OUTPUT, ANSWER]):
        document = encoder.encode(conversation(messages, tools=tools))
        written = '<think>\nHm.\n</think>\n\nWait.\n<tool_call>\n{"name": "find", "arguments": {"a": "é"}}\n</tool_call><|im_end|>'
        assert learned(demo, document) == [written, "Mr. Darcy.<|im_end|>"]
        text = demo.decode(document.ids.tolist())
        assert text.startswith("<|im_start|>system\n" + ("Be brief.\n\n" if messages[0] is SYSTEM else ""))
        assert '<tools>\n{"type": "function", "function": {"name": "find", "description": "Finds."}}\n</tools>' in text


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (
            HEAD + "{{ m.content | replace('Mr', 'Mrs') }}<|im_end|>\n" + TAIL + "{% endif %}",
            [ASK, ANSWER],
            "message 1: .*rewrites its text 'Mr. Darcy.'",
        ),
        (
            "{{ messages | length }}" + HEAD + "{{ m.content }}<|im_end|>\n" + TAIL + "{% endif %}",
            [ASK, ANSWER],
            "message 1: .*what precedes it differently",
        ),
        ("{{ raise_exception('closed') }}", [ASK, ANSWER], "refuses the roles .*closed"),
        ("{% for m in messages %}{{ m.content", [ASK, ANSWER], "cannot be read"),
        ("Hello", [ASK, ANSWER], "each text should stand there once"),
        (SHAPES["no system"], [SYSTEM, ASK, ANSWER], r"refuses the roles \['system', 'user', 'assistant'\]: no system role"),
        (
            HEAD + "{{ m.content.split('</think>')[-1] }}<|im_end|>\n" + TAIL + "{% endif %}",
            [ASK, THOUGHT],
            "leaves out its reasoning 'He is proud.'",
        ),
        (
            HEAD + "{% generation %}{{ m.role }}{% endgeneration %}{{ m.content }}<|im_end|>\n" + TAIL + "{% endif %}",
            [ASK, ANSWER],
            "message 1: .*rewrites its text",
        ),
        (
            HEAD + "{{ m.content }}<|im_end|>{% generation %}{% endgeneration %}\n" + TAIL + "{% endif %}",
            [ASK, ANSWER],
            "marks 0 parts as generated for 1",
        ),
        (HEAD + "{{ m.content }}<|im_end|>\n" + TAIL + "{% endif %}", [{**ASK, "train": True}, ANSWER], None),
        (
            "{% for m in messages %}"
            "{% if m.role == 'user' and m.content != 'Who?' or m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
            [{**ASK, "train": True}, ANSWER],
            "message 0: the chat template writes its text not at all",
        ),
    ],
)
def test_templates_that_cannot_be_followed(demo: Any, template: str, messages: list[dict[str, Any]], message: str | None) -> None:
    tokenizer = with_template(demo, template)
    if message is None:
        assert learned(tokenizer, ChatEncoder(tokenizer).encode(conversation(messages))) == ["Who?<|im_end|>", "Mr. Darcy.<|im_end|>"]
        return
    with pytest.raises(ValueError, match=message):
        ChatEncoder(tokenizer).encode(conversation(messages))


def test_templates_by_name_and_file(demo: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(SHAPES["plain marks"], encoding="utf-8")
    found = conversation([ASK, ANSWER])
    assert (
        learned(demo, ChatEncoder(demo, file).encode(found))
        == learned(demo, ChatEncoder(demo, str(file)).encode(found))
        == ["Mr. Darcy. ###"]
    )
    with pytest.raises(ValueError, match=r"'alpaca' is neither the name of a built-in \(chatml, deepseek\) nor a readable \.jinja file"):
        ChatEncoder(demo, "alpaca")
    named = with_template(demo, "")
    named.chat_template = {"default": SHAPES["strip"], "tool_use": "x"}
    assert learned(demo, ChatEncoder(named).encode(found)) == ["Mr. Darcy.<|im_end|>"]
    named.chat_template = {"tool_use": "x"}
    with pytest.raises(ValueError, match="the parts tool_use and none called 'default'"):
        ChatEncoder(named)


# ---- tokenizers whose tokens depend on what stands before ----

LLAMA = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}{% else %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module", params=["always", "first"])
def metaspace(request: pytest.FixtureRequest) -> Any:
    """In the manner of SentencePiece: a space is put before the text, and newlines are tokens like any other."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=request.param)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    bytes_ = [f"<0x{k:02X}>" for k in range(256)]
    special: list[str | AddedToken] = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(
        load_corpus()[:50_000].split("\n"),
        trainers.BpeTrainer(vocab_size=800, special_tokens=[*special, *bytes_], show_progress=False),  # pyright: ignore[reportArgumentType]
    )
    described = tokenizer.to_str()
    import json

    state = json.loads(described)
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=LLAMA)


def test_conversations_where_a_space_is_put_before_texts(metaspace: Any) -> None:
    encoder = ChatEncoder(metaspace)
    assert not encoder.codec.independent
    messages = [ASK, ANSWER, ASK, SECOND]
    document = encoder.encode(conversation(messages))
    assert document.ids.tolist() == metaspace.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert [text.strip() for text in learned(metaspace, document)] == ["Mr. Darcy.</s>", "Bingley.</s>"]


def test_marks_in_texts_where_a_space_is_put_before_texts(metaspace: Any) -> None:
    messages = [{**ASK, "content": "a</s>b <s>"}, {**ANSWER, "content": "He</s> said"}]
    document = ChatEncoder(metaspace).encode(conversation(messages))
    assert [text.strip() for text in learned(metaspace, document)] == ["He</s> said</s>"]
    end = metaspace.eos_token_id
    assert (document.ids == end).sum() == 1 and (document.ids == metaspace.bos_token_id).sum() == 1
    asked = ChatEncoder(metaspace, special_tokens_in_text=True).encode(conversation(messages))
    assert (asked.ids == end).sum() == 3
    assert asked.ids.tolist() == metaspace.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert (asked.ids[asked.weights > 0] == end).sum() == 2


def test_plain_text_where_a_space_is_put_before_texts(metaspace: Any) -> None:
    document = TextEncoder(metaspace).encode("It is a truth")
    assert document.ids.tolist() == [*metaspace.encode("It is a truth"), metaspace.eos_token_id]
    assert document.ids[0] == metaspace.bos_token_id and bool((document.weights == 1).all())
