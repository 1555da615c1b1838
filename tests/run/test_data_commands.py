"""`xtf data inspect` and `xtf data preview`: what they say is what the documents are, and bad input is one message."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from run.small import chat, checkpoint, text

from xtf import cli
from xtf.data import Document, document_cost, plan_batches, tokenize_files
from xtf.models import from_hf
from xtf.run.inspect_data import InspectOptions, waits
from xtf.run.inspect_data import run as inspect
from xtf.run.preview_data import PreviewOptions, painted
from xtf.run.preview_data import run as preview
from xtf.run.source import load_tokenizer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    checkpoint(folder / "model")
    chat(folder / "chat.jsonl")
    text(folder / "text.jsonl")
    return folder


def test_inspect_says_what_documents_are_and_what_packing_does(inputs: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    files = (inputs / "chat.jsonl", inputs / "text.jsonl")
    options = InspectOptions(
        str(inputs / "model"), seq=256, cache=inputs / "cache", files=files, ranks=(2, 8, 512), out=tmp_path / "lengths.png"
    )
    found = inspect(options, console=Console(file=out, width=140))
    said, tokenized = out.getvalue(), tokenize_files(files, inputs / "model", cache_dir=inputs / "cache")
    for part in tokenized.parts:
        assert f"{part.documents:,}" in said and f"{part.tokens:,}" in said
    assert "chat.jsonl" in said and "over 256" in said and "FLOPs of model" in said and "less than one full step" in said
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert found["balanced"][512].steps == 0
    for ranks in (2, 8):
        balanced = found["balanced"][ranks]
        assert balanced.fill > 0.95 and balanced.bubble < 0.1
        assert all(balanced.imbalance <= found[other][ranks].imbalance for other in found)
    pieces = tokenized.documents.limited(256, long="auto").lengths
    cost = document_cost(from_hf(inputs / "model"))
    assert found["balanced"][8] == waits(plan_batches(pieces[pieces > 1], max_tokens=256, data_ranks=8, cost=cost), cost)


def test_the_bubble_is_the_time_that_is_waited() -> None:
    cost = document_cost(from_hf({"model_type": "llama", **SMALL}))
    plan = plan_batches([4, 4, 2], max_tokens=4, data_ranks=2, cost=cost)
    assert waits(plan, cost).bubble == pytest.approx(0) and waits(plan, cost).steps == 1
    uneven = plan_batches([64, 2, 2], max_tokens=64, data_ranks=3, cost=cost)
    assert waits(uneven, cost).steps == 0  # less than one full step


SMALL = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
    "vocab_size": 32,
}  # fmt: skip


def test_preview_shows_the_text_and_what_is_learned(inputs: Path) -> None:
    out = io.StringIO()
    options = PreviewOptions(str(inputs / "model"), seq=256, cache=inputs / "cache", file=inputs / "chat.jsonl", row=1)
    preview(options, console=Console(file=out, width=100))
    said = out.getvalue()
    rows = [json.loads(line)["messages"] for line in (inputs / "chat.jsonl").read_text().splitlines()]
    shown = [messages for messages in rows if messages[1]["content"] in said]
    assert shown and said.count("⟦") == len(shown) and "chat.jsonl, row 1 of 256 tokens" in said
    for messages in shown:
        assert f"⟦{messages[1]['content']}" in said and messages[0]["content"] in said.replace("⟦", "").replace("⟧", "")
    coloured = io.StringIO()
    preview(options, console=Console(file=coloured, width=100, force_terminal=True, color_system="standard"))
    assert "⟦" not in coloured.getvalue() and "\x1b[1;32m" in coloured.getvalue()


def test_what_is_painted_is_every_token_with_its_weight(inputs: Path) -> None:
    tokenizer = load_tokenizer(inputs / "model")
    ids = np.asarray(tokenizer.encode("Elizabeth smiled at [bold]him[/bold]."))
    weights = np.zeros(len(ids), np.float32)
    weights[[0, 2, 3, 5]] = 1, 1, 1, 0.5
    document = Document(ids, weights)
    decode = tokenizer.decode
    assert painted(document, tokenizer).plain == decode(ids)
    marked = painted(document, tokenizer, marks=True).plain
    learned, half = f"⟦{decode(ids[2:4])}⟧", f"⟦{decode(ids[5:6])}⟧×0.5"  # the first is no target
    assert marked == f"{decode(ids[:2])}{learned}{decode(ids[4:5])}{half}{decode(ids[6:])}"
    assert painted(document, tokenizer, tokens=True).plain.split("│") == [decode([i]) for i in ids]
    escape = Document(np.asarray(tokenizer.encode("a\x1b[31mb")), np.zeros(99, np.float32))
    assert "\x1b" not in painted(escape, tokenizer).plain


BAD: list[tuple[list[str], str]] = [
    (["inspect"], "there is no FILE"),
    (["preview"], "there is no FILE"),
    (["inspect", "no.jsonl"], "no.jsonl"),
    (["inspect", "CHAT", "--ranks", "0"], "--ranks is 0: expected numbers of at least 1"),
    (["inspect", "CHAT", "--out", "a.pdf"], "--out a.pdf: expected a file name that ends in .png"),
    (["inspect", "CHAT", "--seq", "1"], "--seq is 1, expected at least 2"),
    (["inspect", "CHAT", "--model", "tiny-mo"], "did you mean tiny-moe"),
    (["preview", "CHAT", "--row", "-1"], "--row is -1, expected at least 0"),
    (["preview", "CHAT", "--tokenizer", "nowhere"], "nowhere"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(given) for given, _ in BAD])
def test_bad_input_is_one_message(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [str(inputs / "chat.jsonl") if part == "CHAT" else part for part in arguments]
    model = [] if "--model" in given else ["--model", str(inputs / "model")]
    assert cli.main(["data", *given, *model, "--cache", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


def test_without_a_picture(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["data", "inspect", str(inputs / "text.jsonl"), "--ranks", "1", "--out", "None", "--cache", str(inputs / "cache")]
    assert cli.main(arguments) == 0
    assert "1 rank" in capsys.readouterr().out and not list(tmp_path.iterdir())
    assert cli.main(["data", "inspect", str(inputs / "text.jsonl"), "--ranks", "4096", "--cache", str(inputs / "cache")]) == 0
    assert "too few documents for a full step" in capsys.readouterr().out and (tmp_path / "lengths.png").exists()
