"""Files to cached tokens: what is the same, what is kept, and what a broken row, a killed process or a full disk leave behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xtf.data import ChatEncoder, Conversation, RowError, TextEncoder, Tokenized, default_cache_dir, parse_row, read_rows, tokenize_files
from xtf.data import cache as cache_module
from xtf.data import pipeline as pipeline_module
from xtf.data.text import TOKENIZER_FILE, load_corpus

DEMO = TOKENIZER_FILE.parent
CHAT = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Mr. Darcy."}]}
TEXT = {"text": "It is a truth<|im_end|>."}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return lines(tmp_path / "a.jsonl", [CHAT, TEXT, TEXT, CHAT])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A copy of the demo's, that may be changed."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path


def documents(found: Tokenized) -> list[tuple[list[int], list[float]]]:
    every = [found.documents[k] for k in range(len(found.documents))]
    return [(document.ids.tolist(), document.weights.tolist()) for document in every]


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


def test_what_is_cached_is_what_the_encoders_give(file: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(DEMO)
    chat, text = ChatEncoder(loaded), TextEncoder(loaded, template=loaded.chat_template)
    found = tokenize_files([file], DEMO, cache_dir=tmp_path / "cache")
    rows = [parse_row(row.value) for row in read_rows(file)]
    expected = [chat.encode(row) if isinstance(row, Conversation) else text.encode(row) for row in rows]
    assert documents(found) == [(document.ids.tolist(), document.weights.tolist()) for document in expected]
    assert found.documents.lengths.tolist() == [len(document.ids) for document in expected]
    first = found.documents[0]
    assert (first.ids.dtype, first.weights.dtype, first.weights.flags.writeable) == (np.int64, np.float32, True)
    assert found.max_id == max(int(document.ids.max()) for document in expected)
    assert found.skipped == ()


def test_many_chunks_are_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": load_corpus()[k * 50 : k * 50 + 50 + k % 7]} if k % 5 else CHAT for k in range(300)]
    file = lines(tmp_path / "a.jsonl", rows)
    one = tokenize_files([file], DEMO, cache_dir=tmp_path / "one")
    monkeypatch.setattr(pipeline_module, "_CHUNK", 200)
    many = tokenize_files([file], DEMO, cache_dir=tmp_path / "many")
    assert documents(one) == documents(many) and len(one.documents) == 300


def test_plain_texts_keep_no_weights(tmp_path: Path) -> None:
    found = tokenize_files([lines(tmp_path / "a.jsonl", [TEXT, TEXT])], DEMO, cache_dir=tmp_path / "cache")
    (entry,) = entries(tmp_path / "cache")
    assert entries(tmp_path / "cache" / entry) == ["ends.bin", "ids.bin", "meta.json"]
    assert bool((found.documents[1].weights == 1).all())


def test_the_second_call_encodes_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokenize_files([file], DEMO, cache_dir=tmp_path / "cache")

    def refuse(self: object) -> None:
        raise AssertionError("the tokenizer was loaded")

    monkeypatch.setattr(pipeline_module._Encoders, "_loaded", refuse)
    moved = file.rename(tmp_path / "moved.jsonl")
    second = tokenize_files([moved], DEMO, cache_dir=tmp_path / "cache")
    assert documents(first) == documents(second)
    assert [part.from_cache for part in (*first.parts, *second.parts)] == [False, True]


def test_parts_are_the_files(tmp_path: Path) -> None:
    a, b = lines(tmp_path / "a.jsonl", [CHAT, CHAT, TEXT]), lines(tmp_path / "b.json", [TEXT, CHAT])
    found = tokenize_files([a, b, a], DEMO, cache_dir=tmp_path / "cache")
    assert [(part.path, part.first, part.documents) for part in found.parts] == [(str(a), 0, 3), (str(b), 3, 2), (str(a), 5, 3)]
    assert [part.from_cache for part in found.parts] == [False, False, True]
    assert sum(part.tokens for part in found.parts) == found.documents.tokens
    alone = tokenize_files([b], DEMO, cache_dir=tmp_path / "cache")
    assert documents(found)[3:5] == documents(alone)


def test_what_changes_the_entry(file: Path, tokenizer: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )

    def count(**options: Any) -> int:
        tokenize_files([file], tokenizer, cache_dir=cache, **options)
        return len(entries(cache))

    assert [count(), count(), count(skip_bad_lines=True)] == [1, 1, 1]
    assert [count(template="chatml"), count(special_tokens_in_text=True), count(template=own)] == [2, 3, 4]
    own.write_text(own.read_text().replace(": ", " - "))
    assert count(template=own) == 5
    lines(file, [CHAT, TEXT])
    assert count() == 6
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    assert count() == 7
    (tokenizer / "tokenizer.json").write_text((tokenizer / "tokenizer.json").read_text() + "\n")
    assert count() == 8
    (tokenizer / "chat_template.jinja").write_text(own.read_text())
    assert count() == 9


def test_parquet_gives_the_same(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    chats = [CHAT, {"messages": [{**CHAT["messages"][0], "loss_weight": 0.5}, {**CHAT["messages"][1], "train": False}]}]
    message = pyarrow.struct(
        {"role": pyarrow.string(), "content": pyarrow.string(), "loss_weight": pyarrow.float64(), "train": pyarrow.bool_()}
    )
    schema = pyarrow.schema({"messages": pyarrow.list_(message)})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats, schema), tmp_path / "a.parquet")
    shared: dict[str, Any] = {"cache_dir": tmp_path / "cache"}
    one = tokenize_files([tmp_path / "a.parquet"], DEMO, **shared)
    other = tokenize_files([lines(tmp_path / "a.jsonl", chats)], DEMO, **shared)
    assert documents(one) == documents(other)


def test_progress_ends_at_the_size_of_the_files(tmp_path: Path) -> None:
    files = [lines(tmp_path / f"{k}.jsonl", [{"text": load_corpus()[:100_000]}] * 3) for k in range(2)]
    total = sum(file.stat().st_size for file in files)
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        tokenize_files(files, DEMO, cache_dir=tmp_path / "cache", progress=lambda done, of: seen.append((done, of)))
        assert seen[-1] == (total, total) and all(of == total for _, of in seen)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        seen.clear()


# ---- bad rows ----

BAD = [CHAT, "{", {"text": "a"}, {"messages": []}, {"messages": CHAT["messages"][1:]}, {"prompt": "a"}, CHAT]


def test_a_bad_line_raises_and_leaves_nothing(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", BAD)
    with pytest.raises(RowError, match=r"a\.jsonl, line 2: not JSON") as raised:
        tokenize_files([file], DEMO, cache_dir=tmp_path / "cache")
    assert (raised.value.path, raised.value.line) == (file, 2)
    assert entries(tmp_path / "cache") == []


def test_files_before_a_bad_line_are_kept(tmp_path: Path) -> None:
    """The bad file is read while the one before it is still encoded."""
    good, bad, after = lines(tmp_path / "a.jsonl", [CHAT, TEXT]), lines(tmp_path / "b.jsonl", BAD), lines(tmp_path / "c.jsonl", [CHAT])
    with pytest.raises(RowError, match=r"b\.jsonl, line 2: not JSON"):
        tokenize_files([good, bad, after], DEMO, cache_dir=tmp_path / "cache")
    found = tokenize_files([good, after], DEMO, cache_dir=tmp_path / "cache")
    assert [part.from_cache for part in found.parts] == [True, False]


def test_what_was_skipped_belongs_to_its_file(tmp_path: Path) -> None:
    files = [lines(tmp_path / "a.jsonl", BAD), lines(tmp_path / "b.jsonl", [TEXT, CHAT]), lines(tmp_path / "c.jsonl", ["{", CHAT])]
    files.append(lines(tmp_path / "same as a.jsonl", BAD))
    for _ in range(2):  # built, and from the cache
        found = tokenize_files(files, DEMO, cache_dir=tmp_path / "cache", skip_bad_lines=True)
        counts = [[item.line for item in found.skipped if item.path == str(file)] for file in files]
        assert counts == [[2, 4, 5, 6], [], [1], [2, 4, 5, 6]] and len(found.skipped) == 9
        assert [part.documents for part in found.parts] == [3, 2, 1, 3]


def test_bad_lines_are_left_out_and_listed(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", BAD)
    for _ in range(2):  # built, and from the cache
        found = tokenize_files([file], DEMO, cache_dir=tmp_path / "cache", skip_bad_lines=True)
        assert [(item.path, item.line) for item in found.skipped] == [(str(file), line) for line in (2, 4, 5, 6)]
        assert "not JSON" in found.skipped[0].reason and "is empty" in found.skipped[1].reason
        assert len(found.documents) == 3
    with pytest.raises(RowError, match=r"a\.jsonl, line 2: not JSON"):  # what was skipped is not forgotten
        tokenize_files([file], DEMO, cache_dir=tmp_path / "cache")


def test_rows_that_the_template_refuses_are_bad_rows(tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}{% endif %}"
    )
    file = lines(tmp_path / "a.jsonl", [CHAT, {**CHAT, "messages": [{"role": "system", "content": "x"}, *CHAT["messages"]]}])
    with pytest.raises(RowError, match=r"line 2: the chat template refuses the roles .*no system"):
        tokenize_files([file], DEMO, cache_dir=tmp_path / "cache", template=own)
    found = tokenize_files([file], DEMO, cache_dir=tmp_path / "cache", template=own, skip_bad_lines=True)
    assert [item.line for item in found.skipped] == [2]


def test_inputs_that_cannot_be_used(file: Path, tokenizer: Path, tmp_path: Path) -> None:
    def refused(message: str, paths: list[Path], folder: Path = DEMO, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            tokenize_files(paths, folder, cache_dir=tmp_path / "cache", **options)
        assert entries(tmp_path / "cache") == []

    (tmp_path / "empty.jsonl").write_bytes(b"")
    refused("no data file is given", [])
    refused(r"none\.jsonl: cannot be read: No such file", [file, tmp_path / "none.jsonl"])
    refused(r"empty\.jsonl: is empty", [tmp_path / "empty.jsonl"])
    refused("holds no row that can be used", [lines(tmp_path / "blank.jsonl", ["", " "])])
    refused("no row that can be used, 2 were left out; line 1: not JSON", [lines(tmp_path / "b.jsonl", ["{", "["])], skip_bad_lines=True)
    refused("holds no tokenizer.json", [file], tmp_path)
    refused("neither the name of a built-in", [file], template="alpaca")
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    refused("has no chat_template, .*built-in", [file], tokenizer, skip_bad_lines=True)
    (tokenizer / "tokenizer.json").write_text("{")
    refused("the tokenizer in .* cannot be loaded", [file], tokenizer)


def test_plain_texts_need_no_template(tokenizer: Path, tmp_path: Path) -> None:
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    assert len(tokenize_files([lines(tmp_path / "a.jsonl", [TEXT])], tokenizer, cache_dir=tmp_path / "cache").documents) == 1


# ---- what goes wrong outside ----


@pytest.mark.parametrize("damage", ["ids.bin", "weights.bin", "ends.bin", "meta.json", "longer", "meta of nothing", "missing"])
def test_a_damaged_entry_is_made_again(file: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    expected = documents(tokenize_files([file], DEMO, cache_dir=cache))
    (name,) = entries(cache)
    if damage == "longer":
        with open(cache / name / "ids.bin", "ab") as ids:
            ids.write(b"0000")
    elif damage == "meta of nothing":
        (cache / name / "meta.json").write_text("{}")
    elif damage == "missing":
        (cache / name / "ends.bin").unlink()
    else:
        content = (cache / name / damage).read_bytes()
        (cache / name / damage).write_bytes(content[:-3])
    again = tokenize_files([file], DEMO, cache_dir=cache)
    assert documents(again) == expected and not again.parts[0].from_cache
    assert tokenize_files([file], DEMO, cache_dir=cache).parts[0].from_cache
    assert entries(cache) == [name]


KILLED = """
import os, signal, sys
from xtf.data import tokenize_files
tokenize_files([sys.argv[1]], sys.argv[2], cache_dir=sys.argv[3], progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_killed_process_leaves_nothing_valid(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [{"text": load_corpus()[:60_000]}] * 12)
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", KILLED, str(file), str(DEMO), str(cache)]
    process = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, check=False)
    assert process.returncode == -signal.SIGKILL
    (left,) = entries(cache)
    assert left.endswith(".tmp") and not (cache / left / "meta.json").exists() and (cache / left / "ids.bin").exists()
    found = tokenize_files([file], DEMO, cache_dir=cache)
    assert not found.parts[0].from_cache and len(found.documents) == 12
    (name,) = entries(cache)
    assert not name.endswith(".tmp")


def test_what_another_process_writes_stays(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    writing = cache / ".other.tmp"
    writing.mkdir(parents=True)
    with cache_module._alive(writing):
        tokenize_files([file], DEMO, cache_dir=cache)
        assert writing.exists()
        (writing / "lock").touch()
    (writing / "lock").touch()
    tokenize_files([file], DEMO, cache_dir=cache, template="chatml")
    assert not writing.exists()


def test_several_at_once(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [CHAT, TEXT] * 50)
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(documents(tokenize_files([file], DEMO, cache_dir=tmp_path / "cache")))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(one == found[0] for one in found) and len(found[0]) == 100
    assert len(entries(tmp_path / "cache")) == 1


def test_an_entry_that_is_there_is_not_replaced(file: Path, tmp_path: Path) -> None:
    """As when a rank finishes after another: the files that the other has mapped stay."""
    tokenize_files([file], DEMO, cache_dir=tmp_path / "cache")
    (name,) = entries(tmp_path / "cache")
    folder = tmp_path / "cache" / name
    inode = (folder / "ids.bin").stat().st_ino
    ones = cache_module.Encoded(np.ones(3, np.int32), np.ones(3, np.float32), np.array([3]))
    cache_module.write_entry(folder, iter([ones]), [])
    assert (folder / "ids.bin").stat().st_ino == inode and entries(tmp_path / "cache") == [name]


def test_a_full_disk(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_module, "_put", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        tokenize_files([file], DEMO, cache_dir=tmp_path / "cache")
    assert raised.value.errno == errno.ENOSPC and str(tmp_path / "cache") in str(raised.value)
    assert entries(tmp_path / "cache") == []


def test_the_usual_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "xtf"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert default_cache_dir() == tmp_path / "other" / "xtf"


def test_the_real_files(real_inputs: Path, tmp_path: Path) -> None:
    files = [*sorted((real_inputs / "text").iterdir()), *sorted((real_inputs / "chat").iterdir())]
    found = tokenize_files(files, real_inputs / "smollm2-135m", cache_dir=tmp_path / "cache")
    counts = {Path(part.path).name: part.documents for part in found.parts}
    assert counts == {"c4.jsonl": 300, "wiki.jsonl": 30, "alpaca_en.jsonl": 999, "tool_calls.json": 300, "v1_sft.jsonl": 500}
    assert found.skipped == () and found.max_id < 49152
