"""Chat templates: where they come from, how they are rendered, and what a few trial conversations tell about them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

Messages = Sequence[Mapping[str, Any]]
BUILT_IN = ("chatml", "deepseek")
"""Templates that ship with the package; `read_template` takes their names."""

_FOLDER = Path(__file__).parent / "templates"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THOUGHT = re.compile(r"\s*(?:<think>\s*)?(?:</think>\s*)?\Z")  # how a generation prompt may end beyond the role


class Frame(NamedTuple):
    """What the template writes around plain questions and answers. Where it is found again, a generation prompt need not be rendered.

    Args:
        start: before a question that comes first.
        system: before a system message, and between that and the question; ``None`` if it takes none.
        ask: from a question's end to the end of the generation prompt, without a thought.
        thought: what the prompt opens or closes of a thought.
        between: from an answer's end mark to the next question; ``None`` if that depends on what came before.
    """

    start: str
    system: tuple[str, str] | None
    ask: str
    thought: str
    between: str | None


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and what was found out about it.

    Args:
        source: its text.
        render: ``render(messages, tools, prompt)`` gives the text, with the generation prompt if ``prompt``.
        spans: ``spans(messages, tools)`` gives the ranges inside ``{% generation %}``; ``None`` if the template has no such marks.
        mark: what ends an assistant's turn.
        mark_calls: what ends one with tool calls.
        frame: what stands around plain questions and answers.
        inserted: the empty thought that stands before an answer without reasoning, and that is no part of it; often empty.
        structure: added tokens that open or close turns.
        calls: how the template takes the arguments of a tool call: as an object, as JSON, or (``"text"``) not at all.
        null: whether it takes tool calls only where the content is ``None``.
        reasoning: whether it writes ``reasoning_content``.
        tools: whether it writes the descriptions of tools.
    """

    source: str
    render: Callable[[Messages, Messages, bool], str]
    spans: Callable[[Messages, Messages], list[tuple[int, int]]] | None
    mark: str
    mark_calls: str
    frame: Frame
    inserted: str
    structure: frozenset[str]
    calls: str
    null: bool
    reasoning: bool
    tools: bool


def read_template(template: str | Path) -> str:
    """The text of a template: one of `BUILT_IN`, or a ``.jinja`` file.

    Raises:
        ValueError: if there is no such name or file.

    Example:
        >>> "<|im_start|>" in read_template("chatml")
        True
    """
    path = _FOLDER / f"{template}.jinja" if template in BUILT_IN else Path(template)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ValueError(
            f"the template {str(template)!r} is neither the name of a built-in ({', '.join(BUILT_IN)}) nor a readable .jinja file: {reason}"
        ) from error


def own_template(tokenizer: Any) -> str:
    """The tokenizer's own template.

    Raises:
        ValueError: if it has none.
    """
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        named = cast(dict[str, str], own)
        own = named.get("default")
        if own is None:
            raise ValueError(f"the tokenizer's chat_template has the parts {', '.join(named)} and none called 'default': give a template")
    if not own:
        raise ValueError(
            f"{type(tokenizer).__name__} has no chat_template, which conversations need: give a template, either the name of a built-in "
            f"({', '.join(BUILT_IN)}) or a .jinja file, or use an instruction-tuned model's tokenizer"
        )
    return cast(str, own)


def learn_template(source: str, constants: Mapping[str, Any], added: Iterable[str]) -> ChatTemplate:
    """A template and what trial conversations tell about it.

    Args:
        source: its text.
        constants: names that it may use, as ``bos_token``.
        added: the tokenizer's added tokens.

    Raises:
        ValueError: if it cannot be read, or cannot write a question and an answer.
    """
    render, spans = _renderer(source, constants)
    tokens = sorted((token for token in added if token.strip()), key=len, reverse=True)
    cut = re.compile("(" + "|".join(map(re.escape, tokens)) + ")") if tokens else re.compile("(?!)")

    whole = render([_user("Ask alpha"), _answer("Reply beta"), _user("Ask gamma"), _answer("Reply delta")], (), False)
    parts = re.split("Ask alpha|Reply beta|Ask gamma|Reply delta", whole)
    if len(parts) != 5:
        raise ValueError(f"the chat template writes a question and an answer as {whole[:200]!r}: each text should stand there once")
    last = parts[4]
    mark = _common(cut.split(parts[2]), cut.split(last)).rstrip()

    prompt = render([_user("Ask alpha")], (), True)
    base = without_thought(prompt)
    before, _, _ = render([_user("Ask alpha"), _answer("Reply beta")], (), False).partition("Reply beta")
    inserted = before[len(base) :] if before.startswith(base) and _THOUGHT.fullmatch(before, len(base)) else ""
    inserted = inserted if "think>" in inserted else ""
    calls, null, called, output = _calls(render)
    opening = _tried(render, [{"role": "system", "content": "Rule zeta"}, _user("Ask alpha")], (), True)
    again = render([_user("Ask alpha"), _answer("Reply beta"), _user("Ask gamma")], (), True)
    return ChatTemplate(
        source=source,
        render=render,
        spans=spans,
        mark=mark,
        mark_calls=_last_mark(called, last, mark, tokens),
        frame=_frame(prompt, base, opening, again, mark),
        inserted=inserted,
        structure=frozenset(cut.findall(base + opening + mark + output)) - {"<think>", "</think>"},
        calls=calls,
        null=null,
        reasoning="Idea eta" in _tried(render, [_user("Ask alpha"), _answer("Reply beta") | {"reasoning_content": "Idea eta"}], (), False),
        tools="probe_name" in _tried(render, [_user("Ask alpha")], [_TOOL], False),
    )


def without_thought(prompt: str) -> str:
    """A generation prompt without the opened or empty thought it may end with; space stays if there is none.

    Example:
        >>> without_thought("<|im_start|>assistant\\n<think>\\n")
        '<|im_start|>assistant\\n'
    """
    at = prompt.rfind("<think>")
    at = prompt.rfind("</think>") if at < 0 else at
    return prompt[:at] if at >= 0 and _THOUGHT.fullmatch(prompt, at) else prompt


def as_taken(template: ChatTemplate, messages: Messages, tools: Messages) -> tuple[list[Mapping[str, Any]], Messages]:
    """Messages and tools in the form that the template takes; what it would leave out becomes a part of the texts."""
    found = [_as_taken(template, message) for message in messages]
    if tools and not template.tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = (
            f"Functions that you may call, one JSON schema per line:\n<tools>\n{lines}\n</tools>\nTo call a function, write its name and "
            'arguments as JSON:\n<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
        )
        if found and found[0]["role"] == "system":
            found[0] = {**found[0], "content": found[0]["content"] + "\n\n" + text}
        else:
            found.insert(0, {"role": "system", "content": text})
        tools = ()
    return found, tools


def _as_taken(template: ChatTemplate, message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] != "assistant":
        return message
    calls, reasoning = message.get("tool_calls"), message.get("reasoning_content")
    if calls and template.calls == "json":
        written = [{**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}} for call in calls]
        message = {**message, "tool_calls": written}
    elif calls and template.calls == "text":
        texts = [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls]
        message = {**message, "content": "\n".join([message["content"], *texts] if message["content"] else texts), "tool_calls": None}
    if reasoning and not template.reasoning:
        content = f"<think>\n{reasoning.strip(chr(10))}\n</think>\n\n{message['content']}"
        message = {**message, "content": content, "reasoning_content": None}
    if calls and template.null and not message["content"]:
        message = {**message, "content": None}
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _renderer(source: str, constants: Mapping[str, Any]) -> tuple[Callable[[Messages, Messages, bool], str], Any]:
    from transformers.utils import chat_template_utils  # seconds of import that data without conversations need not wait for

    try:
        # the step of transformers' own renderer that compiles; what it does beside at every call costs more than rendering
        compiled = _quickened(cast(Any, chat_template_utils)._compile_jinja_template(source), source)
    except Exception as error:
        raise ValueError(f"the chat template cannot be read: {error}") from error

    def render(messages: Messages, tools: Messages, prompt: bool) -> str:
        try:
            return compiled.render(messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt, **constants)
        except Exception as error:  # templates raise jinja2's errors, and Python's, for conversations that they do not take
            raise ValueError(f"the chat template refuses the roles {[m['role'] for m in messages]}: {error}") from error

    def spans(messages: Messages, tools: Messages) -> list[tuple[int, int]]:
        mark_up = cast(Any, chat_template_utils).render_jinja_template
        _, found = mark_up([list(messages)], list(tools) or None, chat_template=source, return_assistant_tokens_mask=True, **constants)
        return [(int(begin), int(end)) for begin, end in found[0]]

    return render, spans if _GENERATION.search(source) else None


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe_name", "description": "Probe", "parameters": {"type": "object", "properties": {}}},
}


_TEXT_METHODS = frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split"})
_OF_DICTS = frozenset(dir(dict))


def _quickened(compiled: Any, source: str) -> Any:
    """The same template, where looking something up in a message, a loop or a namespace goes without the sandbox's checks. These let
    all of it pass; they took half of the time of rendering."""
    environment = compiled.environment.overlay()
    checked, undefined, missing = environment.getattr, environment.undefined, object()

    def look_up(value: object, name: str) -> Any:
        kind = type(value)
        if kind is dict:
            if name not in _OF_DICTS:
                found = cast("dict[str, Any]", value).get(name, missing)
                return undefined(obj=value, name=name) if found is missing else found
        elif kind is str:
            if name in _TEXT_METHODS:
                return getattr(value, name)
        elif (kind is LoopContext or issubclass(kind, Namespace)) and name[:1] != "_":
            found = getattr(value, name, missing)
            if found is not missing:
                return found
        return checked(value, name)

    environment.getattr = look_up
    return environment.from_string(source)


def _tried(render: Callable[[Messages, Messages, bool], str], messages: Messages, tools: Messages, prompt: bool) -> str:
    try:
        return render(messages, tools, prompt)
    except ValueError:
        return ""


def _frame(prompt: str, base: str, opening: str, again: str, mark: str) -> Frame:
    start, _, ask = base.partition("Ask alpha")
    thought = prompt[len(base) :]
    first = re.split("Rule zeta|Ask alpha", opening)
    second = re.split("Reply beta|Ask gamma", again)
    system = (first[0], first[1]) if len(first) == 3 and first[2] == ask + thought else None
    same = len(second) == 3 and second[2] == ask + thought and second[1].startswith(mark)
    return Frame(start, system, ask, thought, second[1][len(mark) :] if same else None)


def _calls(render: Callable[[Messages, Messages, bool], str]) -> tuple[str, bool, str, str]:
    """How the template takes a tool call: the form of its arguments, whether content must be null; what it then writes, and after it
    for the tool's output."""
    for null in (False, True):
        for form, arguments in (("object", {"probe_key": "probe_value"}), ("json", '{"probe_key": "probe_value"}')):
            call = {"type": "function", "function": {"name": "probe_name", "arguments": arguments}}
            answer = {"role": "assistant", "content": None if null else "", "tool_calls": [call]}
            text = _tried(render, [_user("Ask alpha"), answer], (), False)
            # a dict written as Python writes it, or a string made JSON once more, is the wrong form
            wrong = "'probe_key'" in text or '\\"probe_key' in text
            if not wrong and all(part in text for part in ("probe_name", "probe_key", "probe_value")):
                longer = _tried(render, [_user("Ask alpha"), answer, {"role": "tool", "content": "Found", "name": "probe_name"}], (), False)
                return form, null, text, longer[len(text) :] if longer.startswith(text) else ""
    return "text", False, "", ""


def _common(one: Sequence[str], other: Sequence[str]) -> str:
    """What two texts, cut at their marks, begin with together; marks are equal or not, other text may be so in part."""
    found = ""
    for k, (a, b) in enumerate(zip(one, other, strict=False)):
        if a == b:
            found += a
            continue
        if k % 2 == 0:
            same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found += a[:same]
        break
    return found


def _last_mark(called: str, tail: str, mark: str, tokens: Sequence[str]) -> str:
    """What ends a turn with tool calls: as a rule what ends any."""
    if not called or called.endswith(tail):
        return mark
    return next((token for token in tokens if called.rstrip().endswith(token)), mark)
