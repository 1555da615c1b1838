"""``xtf generate``: a checkpoint continues a text, or answers in its chat template."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

import tyro

from xtf.data import ChatEncoder
from xtf.data.codec import Marked
from xtf.run.decoding import NextToken
from xtf.run.sampling import Scores, check_prompt, check_sampling, sample, stream_text
from xtf.run.source import DtypeName, Loaded, Prefer, end_ids, find, load_checkpoint, load_tokenizer, note

Message = Mapping[str, str]


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a text with a trained model, or talk to it. Only what the model writes goes to standard output."""

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """A Hugging Face folder, the folder of a run, or a training checkpoint."""
    prompt: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="PROMPT")] = None
    """The text to continue; with --chat, what the user says. Without it, it is read from standard input; with --chat in a
    terminal, a conversation begins that Ctrl-D ends."""
    chat: bool = False
    """Answer in the tokenizer's chat template instead of continuing the text."""
    template: str | None = None
    """The chat template: a .jinja file or the name of one that ships with xtf. By default the tokenizer's own."""
    system: str | None = None
    """The system message of the chat. By default the template's own, if it has one."""
    tokens: int = 256
    """The most tokens to write, for each answer."""
    temperature: float = 0.0
    """Of the distribution that tokens are drawn from. 0, the default, takes the most likely token each time (greedy)."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with at least this probability; 1 cuts nothing."""
    seed: int = 0
    """Of the draws: the same seed writes the same text."""
    stop: tuple[str, ...] = field(default=())
    """Texts that end the writing; they are not written."""
    prefer: Prefer = "best"
    """Which checkpoint of a run's folder: the one of the lowest held-out loss, or the last."""
    dtype: DtypeName | None = None
    """Of the parameters. By default float32 on a CPU, and the checkpoint's own on a GPU."""
    device: str | None = None
    """As cpu, cuda or cuda:1. By default a GPU where there is one."""

    def check(self) -> None:
        """Raise `ValueError` for options that are not possible together or out of their range."""
        check_sampling(self.tokens, self.temperature, self.top_p, prefix="--")
        for name in ("system", "template"):
            if getattr(self, name) is not None and not self.chat:
                raise ValueError(f"--{name} is for a chat: add --chat, or leave it out")
        if "" in self.stop:
            raise ValueError("--stop has an empty text, which would end every text at once: leave it out")
        if self.prompt is not None and not self.prompt:
            raise ValueError("PROMPT is empty: give at least one word")


class Ends(NamedTuple):
    """What ends a text.

    Args:
        ids: none of which is written.
        texts: none of which is written.
    """

    ids: frozenset[int]
    texts: tuple[str, ...]


def run(options: GenerateOptions, *, out: TextIO | None = None, terminal: bool | None = None, ask: Callable[[], str] | None = None) -> None:
    """Write what the model writes to ``out``, as it comes.

    Args:
        options: what to do.
        out: by default standard output.
        terminal: whether someone can type; by default whether standard input is a terminal.
        ask: gives what the user says next, raises ``EOFError`` at the end; by default a prompt in the terminal.

    Raises:
        ValueError: for options that are not possible, or a checkpoint or tokenizer that cannot be read or used.
    """
    options.check()
    to: TextIO = out or sys.stdout
    typed = sys.stdin.isatty() if terminal is None else terminal
    folder = find(options.checkpoint, options.prefer)
    if options.prompt is None and typed and not options.chat:
        raise ValueError("there is no PROMPT: give the text to continue, or --chat for a conversation")
    prompt = options.prompt if options.prompt is not None or typed else _from_stdin()
    if folder != options.checkpoint:
        note(f"checkpoint {folder}")
    tokenizer = load_tokenizer(folder)
    ends = Ends(end_ids(folder, tokenizer), options.stop)
    encoder = ChatEncoder(tokenizer, options.template) if options.chat else None
    if encoder is not None:
        mark = turn_end(encoder)
        ends = Ends(ends.ids | mark.ids, ends.texts + mark.texts)
    loaded = load_checkpoint(folder, dtype=options.dtype, device=options.device)
    scores = NextToken(loaded.model, loaded.params)

    def text(ids: Sequence[int]) -> Iterator[str]:
        return _text(scores, loaded, tokenizer, ids, options, ends)

    if encoder is None:
        _write(to, text(list(tokenizer(prompt)["input_ids"])))
    elif prompt is not None:
        _write(to, text(chat_ids(encoder, [*_system(options), {"role": "user", "content": prompt}])))
    else:
        _converse(text, encoder, _system(options), to, ask or (lambda: input("> ")))


def _converse(
    text: Callable[[Sequence[int]], Iterator[str]], encoder: ChatEncoder, messages: list[Message], out: TextIO, ask: Callable[[], str]
) -> None:
    """Turn after turn, until there is no more input. Ctrl-C ends an answer; between answers it ends the command."""
    note("Ctrl-D ends the conversation, Ctrl-C an answer")
    while True:
        try:
            said = ask()
        except EOFError:
            out.write("\n")
            return
        if not said.strip():
            continue
        messages.append({"role": "user", "content": said})
        answer: list[str] = []
        pieces = text(chat_ids(encoder, messages))
        with contextlib.suppress(KeyboardInterrupt):
            for piece in pieces:
                answer.append(piece)
                out.write(piece)
                out.flush()
        out.write("\n")
        out.flush()
        messages.append({"role": "assistant", "content": "".join(answer)})


def _text(scores: Scores, loaded: Loaded, tokenizer: Any, ids: Sequence[int], options: GenerateOptions, ends: Ends) -> Iterator[str]:
    """The text that follows ``ids``, piece by piece."""
    check_prompt(ids, loaded.model.vocab)
    context = getattr(loaded.model.config, "max_position_embeddings", None)
    if context is not None and len(ids) + options.tokens > context:
        note(f"{len(ids)} tokens and up to {options.tokens} more: beyond the {context} that the model was made for, it may write nonsense")
    new = sample(scores, ids, tokens=options.tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed, stop=ends.ids)
    return stream_text(tokenizer, new, ends.texts)


def chat_ids(encoder: ChatEncoder, messages: Sequence[Message]) -> list[int]:
    """The ids of a conversation in a chat template, up to where the assistant's answer begins.

    What a text holds of the template's own marks is text to the model, as it was in training, and ends no turn.

    Raises:
        ValueError: if the template refuses the conversation.
    """
    protect = encoder.codec.guard.protect_all
    given = [{"role": m["role"], "content": protect(m["content"], answer=m["role"] == "assistant")} for m in messages]
    text = encoder.template.render(given, (), True)
    return encoder.codec.encode([encoder.codec.segments(Marked(text, []))]).ids.tolist()


def turn_end(encoder: ChatEncoder) -> Ends:
    """How the chat template ends an answer: as a token of its own where it is one, otherwise as text.

    A template may end answers with another token than the tokenizer's ``eos_token``, as where a base model was tuned to chat.
    """
    mark, backend = encoder.template.mark.strip(), encoder.codec.backend
    if not mark:
        return Ends(frozenset(), ())
    first: int = backend.encode(mark, add_special_tokens=False).ids[0]
    own = first in backend.get_added_tokens_decoder()
    return Ends(frozenset({first}), ()) if own else Ends(frozenset(), (mark,))


def _system(options: GenerateOptions) -> list[Message]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def _from_stdin() -> str:
    text = sys.stdin.read().removesuffix("\n")
    if not text.strip():
        raise ValueError("there is no PROMPT, and standard input is empty: give the text to continue")
    return text


def _write(out: TextIO, pieces: Iterator[str]) -> None:
    for piece in pieces:
        out.write(piece)
        out.flush()
    out.write("\n")
    out.flush()
