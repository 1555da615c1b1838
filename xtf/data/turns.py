"""Where, in a rendered conversation, the text stands that the model has to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from xtf.data.conversation import short
from xtf.data.marks import BEGIN, END, Guard
from xtf.data.template import ChatTemplate, without_thought

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
"""Half-open range of characters."""


class MismatchError(ValueError):
    """What a message teaches cannot be found.

    Args:
        index: of the message.
        reason: why.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"message {index}: {reason}")
        self.index, self.reason = index, reason


def learned_spans(
    template: ChatTemplate, guard: Guard, messages: Messages, tools: Messages, weights: Sequence[float], whole: str
) -> list[tuple[int, int, float]]:
    """The ranges of ``whole`` that are learned, with their weights, in order.

    Args:
        template: what rendered it.
        guard: what put the placeholders into the texts.
        messages: with placeholders, in the form that the template takes.
        tools: as well.
        weights: of the messages.
        whole: ``messages`` rendered.

    Raises:
        MismatchError: if a range cannot be found.
        ValueError: if the template refuses a part of the conversation.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    marked = None if template.spans is None else dict(zip(answers, _generated(template, messages, tools, answers), strict=True))
    found: list[tuple[int, int, float]] = []
    ends: dict[int, int] = {}
    for i in answers:
        if weights[i]:
            if marked is None:
                span = _by_prefix(template, guard, messages, tools, i, whole, ends.get(i - 2))
                ends[i] = span[1]
            else:
                span = _by_marks(template, guard, messages, i, whole, marked[i])
            found.append((*span, weights[i]))
    others = [i for i, weight in enumerate(weights) if weight and messages[i]["role"] != "assistant"]
    if others:
        spans = _others(template, messages, tools, others, whole)
        found = sorted([*found, *((*span, weights[i]) for i, span in zip(others, spans, strict=True))])
    return found


def _by_prefix(template: ChatTemplate, guard: Guard, messages: Messages, tools: Messages, i: int, whole: str, answered: int | None) -> Span:
    """From the end of the generation prompt to the end of the end mark; ``answered`` is where the answer before the question ends."""
    message = messages[i]
    base, begin = _framed(template, messages, tools, i, whole, answered) or _prompt(template, messages, tools, i, whole)
    begin = _after_empty_thought(template, message, whole, base, begin)
    mark = template.mark_calls if message.get("tool_calls") else template.mark
    content = cast(str, message["content"] or "")
    if not message.get("tool_calls") and not message.get("reasoning_content"):
        for text in (content, content.strip(), content.lstrip(), content.rstrip()):
            if whole.startswith(text + mark, begin):
                return begin, begin + len(text) + len(mark)
    # no text of a message holds the mark, so the first one is the template's
    own = bool(mark) and any(token in mark for token in guard.answer)
    at = whole.find(mark, begin) if own else -1
    if at < 0:
        raise MismatchError(i, _rewritten(guard, content, whole[begin : begin + 200], mark))
    _check(template, guard, messages, i, whole[begin : at + len(mark)])
    return begin, at + len(mark)


def _framed(template: ChatTemplate, messages: Messages, tools: Messages, i: int, whole: str, answered: int | None) -> Span | None:
    """As `_prompt`, without rendering: if the question stands in ``whole`` as such questions do; else ``None``."""
    frame = template.frame
    question = messages[i - 1]
    if question["role"] != "user":
        return None
    if answered is not None and frame.between is not None:
        at, expected = answered, frame.between
    elif i == 1 and not tools:
        at, expected = 0, frame.start
    elif i == 2 and not tools and messages[0]["role"] == "system" and frame.system is not None:
        at, expected = 0, frame.system[0] + messages[0]["content"] + frame.system[1]
    else:
        return None
    expected += question["content"] + frame.ask
    if not whole.startswith(expected, at):
        return None
    end = at + len(expected)
    return end, end + len(frame.thought) if whole.startswith(frame.thought, end) else end


def _prompt(template: ChatTemplate, messages: Messages, tools: Messages, i: int, whole: str) -> Span:
    """Where the generation prompt of message ``i`` ends in ``whole``: without a thought that it opens, and with it."""
    # once more without reasoning: a template may leave it out of turns before a question that is asked only after message i
    for before in (messages[:i], [_without_reasoning(message) for message in messages[:i]]):
        prompt = template.render(before, tools, True)
        base = without_thought(prompt)
        if whole.startswith(base):
            return len(base), len(prompt) if whole.startswith(prompt) else len(base)
    raise MismatchError(
        i,
        "the chat template renders what precedes it differently in the whole conversation, so the answer's beginning is not known; "
        "use a template whose turns do not depend on later ones",
    )


def _without_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] != "assistant" or not _thought(message):
        return message
    content = cast(str, message["content"] or "").rpartition("</think>")[2].lstrip("\n")
    return {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": content}


def _by_marks(template: ChatTemplate, guard: Guard, messages: Messages, i: int, whole: str, marked: Span) -> Span:
    """What stands inside ``{% generation %}``, with the end mark behind it, without space behind that."""
    mark = template.mark_calls if messages[i].get("tool_calls") else template.mark
    begin = _after_empty_thought(template, messages[i], whole, marked[0], marked[0])
    end = marked[1]
    if mark and not whole.endswith(mark, begin, end):
        closed = begin + len(whole[begin:end].rstrip())
        if whole.endswith(mark, begin, closed):
            end = closed
        elif whole.startswith(mark, end):
            end += len(mark)
    _check(template, guard, messages, i, whole[begin:end])
    return begin, end


def _after_empty_thought(template: ChatTemplate, message: Mapping[str, Any], whole: str, first: int, begin: int) -> int:
    """``begin``, or the end of the empty thought that the template puts at ``first`` where there is no reasoning."""
    if template.inserted and not _thought(message) and whole.startswith(template.inserted, first):
        return first + len(template.inserted)
    return begin


def _thought(message: Mapping[str, Any]) -> str:
    """The reasoning of a message, given apart or within its text."""
    content = cast(str, message["content"] or "")
    within = content.rpartition("</think>")[0]
    return str(message.get("reasoning_content") or within).replace("<think>", "").replace("</think>", "").strip()


def _check(template: ChatTemplate, guard: Guard, messages: Messages, i: int, turn: str) -> None:
    """That the text of message ``i`` stands in what was found for it."""
    message = messages[i]
    content = cast(str, message["content"] or "")
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    for text in (content.rpartition("</think>")[2].strip(), *names):
        if text not in turn:
            raise MismatchError(i, _rewritten(guard, text, turn, template.mark))
    thought = _thought(message)
    last = all(later["role"] != "user" for later in messages[i + 1 :])  # reasoning of earlier turns may be left out
    if last and thought not in turn and content.strip() not in turn:
        raise MismatchError(i, f"the chat template leaves out its reasoning {short(guard.restored(thought))}; use one that writes it")


def _rewritten(guard: Guard, text: str, turn: str, mark: str) -> str:
    text, turn = guard.restored(text), guard.restored(turn)
    return (
        f"the chat template rewrites its text {short(text)}: it writes {short(turn)}, expected the text and the end mark {mark!r}; "
        "give the text as the template writes it"
    )


def _generated(template: ChatTemplate, messages: Messages, tools: Messages, answers: Sequence[int]) -> list[Span]:
    """The ranges that the template marks as generated, one for each answer; adjoining ones are one."""
    assert template.spans is not None
    found: list[Span] = []
    for begin, end in template.spans(messages, tools):
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        elif end > begin:
            found.append((begin, end))
    if len(found) != len(answers):
        raise ValueError(
            f"the chat template marks {len(found)} parts as generated for {len(answers)} messages of the assistant, expected one for each: "
            "mend the template, or take its {% generation %} marks out"
        )
    return found


def _others(template: ChatTemplate, messages: Messages, tools: Messages, others: Sequence[int], whole: str) -> list[Span]:
    """Where the texts of messages stand that are not the assistant's: rendered once more with a sign on both sides of each."""
    signed = list(messages)
    for i in others:
        text = cast(str, messages[i]["content"])
        core = text.strip()
        head, _, tail = text.partition(core) if core else ("", "", text)
        signed[i] = {**messages[i], "content": head + BEGIN + core + END + tail}
    parts = template.render(signed, tools, False).replace(END, BEGIN).split(BEGIN)
    if "".join(parts) != whole or len(parts) != 2 * len(others) + 1:
        raise MismatchError(others[0], "the chat template writes its text not at all, more than once, or depending on what it is")
    found: list[Span] = []
    at = 0
    for k, part in enumerate(parts):
        if k % 2:
            rest = parts[k + 1]
            closing = len(rest) - len(rest.lstrip()) + len(template.mark)
            ends = bool(template.mark) and rest.lstrip().startswith(template.mark)
            found.append((at, at + len(part) + (closing if ends else 0)))
        at += len(part)
    return found
