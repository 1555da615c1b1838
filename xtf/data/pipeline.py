"""Data files to tokens: read, rendered and encoded at once, in bounded memory, and kept in the cache."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from xtf.data.cache import FORMAT, EmptyError, Entry, Skipped, digest, read_entry, write_entry
from xtf.data.chat import ChatEncoder, TextEncoder
from xtf.data.codec import Codec, Encoded, Segment
from xtf.data.conversation import parse_row
from xtf.data.documents import Documents
from xtf.data.rows import RowError, check_file, read_rows
from xtf.data.template import read_template

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes there are."""

_CHUNK = 1 << 19  # characters that are encoded at once
_AHEAD = 2  # chunks that wait
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """The documents of one file.

    Args:
        path: the file.
        first: index of its first document among all.
        documents: how many it has.
        tokens: of all of them.
        from_cache: whether they were there already.
    """

    path: str
    first: int
    documents: int
    tokens: int
    from_cache: bool


@dataclass(frozen=True)
class Tokenized:
    """The documents of files, in order.

    Args:
        documents: all of them; `Documents.select` with ``range(part.first, part.first + part.documents)`` gives those of one file.
        parts: one for each file.
        skipped: the rows that were left out.
        max_id: the highest token id; a model's vocabulary must be larger.
    """

    documents: Documents
    parts: tuple[Part, ...]
    skipped: tuple[Skipped, ...]
    max_id: int


def tokenize_files(
    paths: Sequence[str | Path],
    tokenizer_folder: str | Path,
    *,
    cache_dir: str | Path,
    template: str | Path | None = None,
    skip_bad_lines: bool = False,
    special_tokens_in_text: bool = False,
    progress: Progress | None = None,
) -> Tokenized:
    """The tokens of data files, from the cache where it has them.

    Each file is one entry of the cache, which depends on the content of the file, the tokenizer, the template and the options, and
    is written once. Several processes may do the same at once. What a killed process left is removed by the next that writes.

    Args:
        paths: ``.jsonl``, ``.json`` or ``.parquet`` files; see `parse_row` for what a row may be. Plain texts become documents as
            `TextEncoder` makes them, conversations as `ChatEncoder` does; one file may hold both.
        tokenizer_folder: a folder with ``tokenizer.json``, as a checkpoint of Hugging Face is.
        cache_dir: where the cache is; `default_cache_dir` gives the usual place.
        template: as for `ChatEncoder`.
        skip_bad_lines: leave out rows that cannot be used, instead of raising at the first.
        special_tokens_in_text: as for `ChatEncoder`.
        progress: called now and then.

    Raises:
        RowError: naming file, line and reason, if a file or a row cannot be used, or no row of a file can.
        ValueError: if the tokenizer or the template cannot be used.
        OSError: if the cache cannot be written.
    """
    if not paths:
        raise ValueError("no data file is given: name at least one .jsonl, .json or .parquet file")
    files = [Path(path) for path in paths]
    kinds = [check_file(path) for path in files]
    folder = Path(tokenizer_folder)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} holds no tokenizer.json: name a folder with a tokenizer, as of a checkpoint of Hugging Face")
    given = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    names = json.dumps([FORMAT, [path.name for path in given], special_tokens_in_text])
    common = digest([names.encode(), *given, b"" if template is None else read_template(template).encode()]).encode()

    encoders = _Encoders(folder, template, special_tokens_in_text)
    sizes = [path.stat().st_size for path in files]
    parts: list[Part] = []
    entries: list[Entry] = []
    for k, (path, kind) in enumerate(zip(files, kinds, strict=True)):
        report = _reporter(progress, sum(sizes[:k]), sum(sizes))
        place = Path(cache_dir) / digest([common, kind.encode(), path])
        entry = read_entry(place, str(path))
        cached = entry is not None
        if entry is None:
            entry = _build(path, place, encoders, skip_bad_lines, report)
        if entry.skipped and not skip_bad_lines:
            bad = entry.skipped[0]
            raise RowError(path, bad.line, bad.reason, bad.unit)
        report(sizes[k])
        parts.append(Part(str(path), sum(part.documents for part in parts), len(entry.documents), entry.documents.tokens, cached))
        entries.append(entry)
    return Tokenized(
        Documents.join([entry.documents for entry in entries]),
        tuple(parts),
        tuple(item for entry in entries for item in entry.skipped),
        max(entry.max_id for entry in entries),
    )


def _reporter(progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    return lambda done: None if progress is None else progress(before + done, total)


def _build(path: Path, place: Path, encoders: _Encoders, skip: bool, report: Callable[[int], None]) -> Entry:
    skipped: list[Skipped] = []

    def leave_out(error: RowError) -> None:
        if not skip:
            raise error
        skipped.append(Skipped(str(path), error.line or 0, error.reason, error.unit))

    try:
        write_entry(place, _encoded(path, encoders, leave_out, report), skipped)
    except EmptyError as error:
        first = f"; {skipped[0].unit} {skipped[0].line}: {skipped[0].reason}" if skipped else ""
        raise RowError(path, None, f"holds no row that can be used, {len(skipped)} were left out{first}") from error
    entry = read_entry(place, str(path))
    if entry is None:
        raise OSError(f"{place} was written and cannot be read back: is something removing files there?")
    return entry


def _encoded(path: Path, encoders: _Encoders, leave_out: Callable[[RowError], None], report: Callable[[int], None]) -> Iterator[Encoded]:
    """The documents of a file. One thread reads and renders while another encodes what came before, outside of Python's lock."""
    waiting: deque[tuple[Future[Encoded], int]] = deque()
    with ThreadPoolExecutor(2) as pool:
        try:
            for codec, documents, done in _chunks(path, encoders, leave_out):
                waiting.append((pool.submit(codec.encode, documents), done))
                while len(waiting) > _AHEAD or (waiting and waiting[0][0].done()):
                    yield _next(waiting, report)
            while waiting:
                yield _next(waiting, report)
        finally:
            for future, _ in waiting:
                future.cancel()


def _next(waiting: deque[tuple[Future[Encoded], int]], report: Callable[[int], None]) -> Encoded:
    future, done = waiting.popleft()
    encoded = future.result()
    report(done)
    return encoded


def _chunks(path: Path, encoders: _Encoders, leave_out: Callable[[RowError], None]) -> Iterator[tuple[Codec, list[list[Segment]], int]]:
    """Documents of the same kind, as segments, about `_CHUNK` characters at once."""
    codec: Codec | None = None
    documents: list[list[Segment]] = []
    size, done = 0, 0
    for row in read_rows(path, on_error=leave_out):
        try:
            parsed = parse_row(row.value)
        except ValueError as error:
            leave_out(RowError(path, row.line, str(error), row.unit))
            continue
        encoder = encoders.text if isinstance(parsed, str) else encoders.chat
        try:
            segments = encoder.segments(cast(Any, parsed))
        except ValueError as error:
            leave_out(RowError(path, row.line, str(error), row.unit))
            continue
        if documents and codec is not None and (encoder.codec is not codec or size >= _CHUNK):
            yield codec, documents, done
            documents, size = [], 0
        codec, done = encoder.codec, row.done
        documents.append(segments)
        size += sum(len(segment.text) for segment in segments)
    if documents and codec is not None:
        yield codec, documents, done


class _Encoders:
    """Made when the first row needs them: a run whose tokens are in the cache loads no tokenizer, and plain texts need no template."""

    def __init__(self, folder: Path, template: str | Path | None, special_tokens_in_text: bool) -> None:
        self._folder, self._template, self._special = folder, template, special_tokens_in_text
        self._tokenizer: Any = None
        self._chat: ChatEncoder | None = None
        self._text: TextEncoder | None = None

    @property
    def chat(self) -> ChatEncoder:
        if self._chat is None:
            self._chat = ChatEncoder(self._loaded(), self._template, self._special)
        return self._chat

    @property
    def text(self) -> TextEncoder:
        if self._text is None:
            tokenizer = self._loaded()
            source = read_template(self._template) if self._template is not None else str(getattr(tokenizer, "chat_template", None) or "")
            self._text = TextEncoder(tokenizer, template=source, special_tokens_in_text=self._special)
        return self._text

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            try:
                self._tokenizer = cast(Any, AutoTokenizer).from_pretrained(self._folder)
            except Exception as error:
                raise ValueError(f"the tokenizer in {self._folder} cannot be loaded: {error}") from error
        return self._tokenizer
