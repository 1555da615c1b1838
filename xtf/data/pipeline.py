"""Data files to tokens: read, rendered and encoded at once, in bounded memory, and kept in the cache."""

from __future__ import annotations

import gc
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from xtf.data.cache import FORMAT, Entry, Skipped, digest, read_entry, write_entry
from xtf.data.chat import ChatEncoder, TextEncoder
from xtf.data.codec import Codec, Encoded, Segment
from xtf.data.conversation import parse_row
from xtf.data.documents import Documents
from xtf.data.rows import RowError, check_file, read_rows
from xtf.data.template import read_template

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes there are."""

_CHUNK = 1 << 16  # characters that are encoded at once; while the first of them are read, nothing else can be done
_THREADS = 4  # more than cores: while some of them hand tokens over, the texts of others are there to be encoded
_AHEAD = 16  # chunks that wait: the first of them may take as long as many others
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
    places = [Path(cache_dir) / digest([common, kind.encode(), path]) for path, kind in zip(files, kinds, strict=True)]
    sizes = [path.stat().st_size for path in files]
    entries = [_entry(path, place, skip_bad_lines) for path, place in zip(files, places, strict=True)]
    missing: dict[Path, _Source] = {}
    for k, place in enumerate(places):
        if entries[k] is None:
            missing.setdefault(place, _Source(files[k], sum(sizes[:k]), []))
    _build(missing, encoders, skip_bad_lines, lambda done: None if progress is None else progress(done, sum(sizes)))
    if progress is not None:
        progress(sum(sizes), sum(sizes))

    parts: list[Part] = []
    found: list[Entry] = []
    for path, place, cached in zip(files, places, entries, strict=True):
        entry = _entry(path, place, skip_bad_lines) if cached is None else cached
        if entry is None:
            raise OSError(f"{place} was written and cannot be read back: is something removing files there?")
        built = missing.pop(place, None)
        parts.append(Part(str(path), sum(part.documents for part in parts), len(entry.documents), entry.documents.tokens, built is None))
        found.append(entry)
    return Tokenized(
        Documents.join([entry.documents for entry in found]),
        tuple(parts),
        tuple(item for entry in found for item in entry.skipped),
        max(entry.max_id for entry in found),
    )


def _entry(path: Path, place: Path, skip: bool) -> Entry | None:
    entry = read_entry(place, str(path))
    if entry is not None and entry.skipped and not skip:
        bad = entry.skipped[0]
        raise RowError(path, bad.line, bad.reason, bad.unit)
    return entry


class _Source(NamedTuple):
    """A file to be tokenised: bytes of the files before it, and its rows that were left out so far."""

    path: Path
    before: int
    skipped: list[Skipped]


class _Chunk(NamedTuple):
    """Documents of one file that are encoded at once: bytes of all files read so far, and whether the file ends here."""

    encode: Callable[[], Encoded]
    done: int
    last: bool


def _build(missing: Mapping[Path, _Source], encoders: _Encoders, skip: bool, report: Callable[[int], None]) -> None:
    """Write the entries of files, one after another. All share one queue: while the end of one file is encoded, the next is read."""
    with _without_collections(), ThreadPoolExecutor(_THREADS) as pool:
        results = _encoded(pool, _chunks(missing.values(), encoders, skip))
        for place, source in missing.items():
            write_entry(place, _of_one_file(results, report), source.skipped)


@contextmanager
def _without_collections() -> Generator[None]:
    """No search for reference cycles meanwhile: encodings are many objects and no cycles, and each search goes through everything that
    the process has imported, which takes a tenth of a second of encoding."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _of_one_file(results: Iterator[tuple[_Chunk, Encoded]], report: Callable[[int], None]) -> Iterator[Encoded]:
    for chunk, encoded in results:
        report(chunk.done)
        yield encoded
        if chunk.last:
            return


def _encoded(pool: Executor, chunks: Iterator[_Chunk]) -> Iterator[tuple[_Chunk, Encoded]]:
    """Chunks and their tokens, in order. One thread reads and renders while others encode what came before, outside of Python's lock."""
    waiting: deque[tuple[_Chunk, Future[Encoded]]] = deque()
    for chunk in chunks:
        waiting.append((chunk, pool.submit(chunk.encode)))
        while len(waiting) > _AHEAD or (waiting and waiting[0][1].done()):
            first, future = waiting.popleft()
            yield first, future.result()
    for chunk, future in waiting:
        yield chunk, future.result()


def _chunks(sources: Iterable[_Source], encoders: _Encoders, skip: bool) -> Iterator[_Chunk]:
    """The chunks of all files. An error is raised where the chunk would be encoded: what was read before it is written first."""
    try:
        for source in sources:
            yield from _chunks_of_file(source, encoders, skip)
    except Exception as error:
        yield _Chunk(partial(_raise, error), 0, True)


def _raise(error: Exception) -> Encoded:
    raise error


def _chunks_of_file(source: _Source, encoders: _Encoders, skip: bool) -> Iterator[_Chunk]:
    """Documents of the same kind, about `_CHUNK` characters at once."""
    path = source.path

    def leave_out(error: RowError) -> None:
        if not skip:
            raise error
        source.skipped.append(Skipped(str(path), error.line or 0, error.reason, error.unit))

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
        if codec is not None and (encoder.codec is not codec or size >= _CHUNK):
            yield _Chunk(partial(codec.encode, documents), source.before + done, False)
            documents, size = [], 0
        codec, done = encoder.codec, row.done
        documents.append(segments)
        size += sum(len(segment.text) for segment in segments)
    if codec is None:
        first = f"; {source.skipped[0].unit} {source.skipped[0].line}: {source.skipped[0].reason}" if source.skipped else ""
        raise RowError(path, None, f"holds no row that can be used, {len(source.skipped)} were left out{first}")
    yield _Chunk(partial(codec.encode, documents), source.before + done, True)


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
