"""Loss and log-probabilities on documents, and the command ``xtf eval``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
import torch
from torch import Tensor

import xtf
from xtf import cli, models
from xtf.data.documents import Documents
from xtf.data.text import demo_tokenizer
from xtf.model import Model
from xtf.run.evaluate import EvalOptions, run
from xtf.run.scoring import Result, Scored, evaluate_documents, score_documents

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 31,
    "hidden_size": 12,
    "intermediate_size": 14,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def small() -> tuple[Model, Any]:
    model = models.from_hf(CONFIG, dtype=torch.float64)
    return model, model.init(0)


def documents(lengths: Sequence[int], weights: bool = False) -> Documents:
    random = np.random.default_rng(sum(lengths))
    ids = [random.integers(31, size=n).tolist() for n in lengths]
    return Documents.of(ids, [random.choice([0.0, 0.5, 1.0, 2.0], size=n).tolist() for n in lengths] if weights else None)


def alone(model: Model, params: Any, ids: Sequence[int]) -> Tensor:
    """The log-probability of each id but the first, plainly."""
    logits = model.logits(params, torch.tensor([list(ids)]))[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


LENGTHS = [5, 1, 0, 12, 2, 7]


@pytest.mark.parametrize("batch_tokens", [12, 15, 4096])
@pytest.mark.parametrize("weights", [False, True], ids=["ones", "weights"])
def test_the_loss_is_that_of_each_document_alone(batch_tokens: int, weights: bool) -> None:
    model, params = small()
    docs = documents(LENGTHS, weights)
    nats, weight = 0.0, 0.0
    for index in range(len(docs)):
        ids, w, _ = docs[index]
        if len(ids) > 1:
            nats -= float((alone(model, params, ids.tolist()) * torch.from_numpy(w[1:])).sum())
            weight += float(w[1:].sum())
    got = evaluate_documents(model, params, docs, batch_tokens=batch_tokens)
    assert got.loss == pytest.approx(nats / weight, rel=1e-12) and got.weight == weight
    assert got.perplexity == pytest.approx(math.exp(nats / weight), rel=1e-12)
    assert (got.documents, got.all_tokens) == (6, sum(LENGTHS))
    assert got.tokens == sum(int((docs[i].weights[1:] > 0).sum()) for i in range(6))
    assert got.bits_per_byte is None


def test_the_loss_equals_that_of_transformers() -> None:
    hf = hf_models.build(CONFIG, torch.float64)
    model = models.from_hf(CONFIG, dtype=torch.float64)
    params, docs = hf_models.parameters(model, hf), documents([9, 9, 9])
    ids = torch.tensor(np.stack([docs[i].ids for i in range(3)]))
    with torch.no_grad():
        want = float(hf(ids, labels=ids).loss)
    assert evaluate_documents(model, params, docs, batch_tokens=20).loss == pytest.approx(want, rel=1e-6)  # theirs is float32


def test_each_document_comes_in_order_with_its_log_probabilities() -> None:
    model, params = small()
    docs = documents(LENGTHS, weights=True)
    found = list(score_documents(model, params, docs, batch_tokens=12))
    assert [done.number for done in found] == list(range(len(LENGTHS)))
    for done in found:
        ids, weights, _ = docs[done.number]
        assert done.ids.tolist() == ids.tolist() and done.weights[1:].tolist() == weights[1:].tolist() and not done.weights[:1].any()
        if len(ids) > 1:
            want = alone(model, params, ids.tolist()).numpy()
            assert np.allclose(done.logprobs[1:], np.where(weights[1:] > 0, want, 0), rtol=1e-12)
    seen: list[Scored] = []
    evaluate_documents(model, params, docs, each=seen.append)
    assert [done.number for done in seen] == list(range(len(LENGTHS)))


@pytest.mark.parametrize("length", [9, 10, 11])
def test_long_documents_are_split_or_cut(length: int) -> None:
    model, params = small()
    docs = documents([length, 3])
    ids = docs[0].ids.tolist()
    (split, rest) = score_documents(model, params, docs, batch_tokens=10, seq=5)
    assert split.ids.tolist() == ids and rest.ids.tolist() == docs[1].ids.tolist()
    assert np.flatnonzero(~split.targets).tolist() == [0, 5, 10][: -(-length // 5)]
    assert np.allclose(split.logprobs[6 : min(10, length)], alone(model, params, ids[5:10]).numpy(), rtol=1e-12)
    (cut, _) = score_documents(model, params, docs, batch_tokens=10, seq=5, long="cut")
    assert cut.ids.tolist() == ids[:5] and np.allclose(cut.logprobs[1:], alone(model, params, ids[:5]).numpy(), rtol=1e-12)


def test_no_batch_has_more_tokens_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = small()
    sizes: list[int] = []
    plain = Model.logprobs

    def watched(self: Model, params: Any, batch: Any, **options: Any) -> Tensor:
        sizes.append(batch["input_ids"].numel())
        return plain(self, params, batch, **options)

    monkeypatch.setattr(Model, "logprobs", watched)
    evaluate_documents(model, params, documents([30, 3, 4, 8, 20]), batch_tokens=12)
    assert sum(sizes) == 65 and max(sizes) <= 12 and len(sizes) <= 8


def test_bits_per_byte_count_the_text_of_targets() -> None:
    text = "naïve 😀 text"
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    model = models.preset("tiny-moe")
    params = model.init(0)
    got = evaluate_documents(model, params, Documents.of([ids]), text=tokenizer.decode)
    assert got.bytes == len(text.encode()) - len(tokenizer.decode(ids[:1]).encode())
    assert got.bits_per_byte == pytest.approx(got.nats / math.log(2) / got.bytes)
    doubled = evaluate_documents(model, params, Documents.of([ids], [[2.0] * len(ids)]), text=tokenizer.decode)
    assert doubled.bits_per_byte == pytest.approx(got.bits_per_byte)
    assert (got + doubled).bytes == 2 * got.bytes and (got + doubled).loss == pytest.approx(got.loss)


def test_results_without_targets_have_no_loss() -> None:
    model, params = small()
    for docs in (Documents.of([]), Documents.of([[3]]), Documents.of([[3, 4]], [[1.0, 0.0]])):
        got = evaluate_documents(model, params, docs)
        assert math.isnan(got.loss) and got.tokens == 0 and got.row()["loss"] is None
    assert Result(nats=2000.0, weight=1.0).perplexity == math.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_tokens": 1}, "batch_tokens is 1"),
        ({"seq": 1}, "seq is 1"),
        ({"batch_tokens": 8, "seq": 9}, "seq is 9, expected 2 to batch_tokens=8"),
        ({"documents": Documents.of([[3, 99]])}, "the id 99, outside the model's vocabulary of 31"),
    ],
)
def test_impossible_evaluations_are_refused(changes: dict[str, Any], message: str) -> None:
    model, params = small()
    with pytest.raises(ValueError, match=message):
        evaluate_documents(**{"model": model, "params": params, "documents": documents([4])} | changes)


def test_a_broken_model_is_told() -> None:
    model, params = small()
    params["norm"]["weight"].fill_(math.nan)
    with pytest.raises(ValueError, match="not numbers"):
        evaluate_documents(model, params, documents([4]))


# ---- the command ----


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    text, chat = tmp_path / "text.jsonl", tmp_path / "chat.jsonl"
    text.write_text("".join(json.dumps({"content": line}) + "\n" for line in ("It is a truth.", "So it is, and so it was.")))
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day to you."}]
    chat.write_text(json.dumps({"messages": messages}) + "\n")
    return text, chat


def test_eval_prints_json_and_writes_log_probabilities(
    folder: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    args = ["eval", str(folder), *map(str, files), "--json", "--logprobs", str(out), "--cache", str(tmp_path / "cache")]
    assert cli.main(args) == 0
    shown = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["file"], line["document"]) for line in lines] == [(str(files[0]), 0), (str(files[0]), 1), (str(files[1]), 0)]
    every = [value for line in lines for value in line["logprobs"] if value is not None]
    assert all(len(line["ids"]) == len(line["logprobs"]) and line["logprobs"][0] is None for line in lines)
    assert shown["total"]["loss"] == pytest.approx(-sum(every) / len(every), rel=1e-6)
    assert shown["total"]["tokens"] == len(every) and shown["total"]["documents"] == 3
    assert set(shown["files"]) == {str(file) for file in files}
    model = models.from_hf(folder)
    params = xtf.load_params(model, folder)
    for line in lines:
        want = alone(model, params, line["ids"]).tolist()
        got = line["logprobs"][1:]
        assert all(g is None or g == pytest.approx(w, abs=1e-4) for g, w in zip(got, want, strict=True))
    answer = [token for token, value in zip(lines[2]["ids"], lines[2]["logprobs"], strict=True) if value is not None]
    assert demo_tokenizer().decode(answer, skip_special_tokens=True).strip() == "Good day to you."


def test_eval_prints_a_table(folder: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run(EvalOptions(folder, files, cache=tmp_path / "cache"))
    out = capsys.readouterr().out
    assert f"{results['total'].loss:.4f}" in out and "bits/byte" in out and "total" in out
    assert results[str(files[0])] + results[str(files[1])] == results["total"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["{folder}", "nowhere.jsonl"], "nowhere.jsonl"),
        (["{folder}", "{text}", "--batch-tokens", "1"], "--batch-tokens is 1"),
        (["{folder}", "{text}", "--seq", "9999"], "--seq is 9999"),
        (["{folder}", "{text}", "--logprobs", "{text}"], "would overwrite"),
        (["nowhere", "{text}"], "no checkpoint folder at nowhere"),
        (["{folder}", "{chat}", "--seq", "2", "--long", "cut"], "no document has a token to predict"),
    ],
)
def test_bad_input_is_one_message(
    args: list[str], message: str, folder: Path, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"folder": folder, "text": files[0], "chat": files[1]}
    before = files[0].read_text()
    given = [arg.format(**places) for arg in args]
    assert cli.main(["eval", *given, "--cache", str(tmp_path / "cache")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("xtf: ") and err.count("\n") == 1
    assert files[0].read_text() == before


def test_a_failed_evaluation_leaves_the_old_file(folder: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    model = models.from_hf(folder)
    params = xtf.load_params(model, folder)
    params["norm"]["weight"].fill_(math.nan)
    xtf.save_params(model, params, broken, tokenizer_from=folder)
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    with pytest.raises(ValueError, match="not numbers"):
        run(EvalOptions(broken, files, logprobs=out, cache=tmp_path / "cache"))
    shutil.rmtree(tmp_path / "cache")
    assert out.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"broken", "out.jsonl", "text.jsonl", "chat.jsonl"}


# ---- real weights ----


def test_the_loss_of_real_weights_equals_that_of_transformers(real_inputs: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = real_inputs / "smollm2-135m"
    texts = [json.loads(line)["content"][:600] for line in (real_inputs / "text" / "wiki.jsonl").read_text().splitlines()[:3]]
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        losses = [float(theirs(torch.tensor([row]), labels=torch.tensor([row])).loss) for row in ids]
    del theirs
    want = sum(loss * (len(row) - 1) for loss, row in zip(losses, ids, strict=True)) / sum(len(row) - 1 for row in ids)
    model = models.from_hf(path)
    got = evaluate_documents(model, xtf.load_params(model, path), Documents.of(ids), batch_tokens=256)
    assert got.loss == pytest.approx(want, abs=1e-4) and got.tokens == sum(len(row) - 1 for row in ids)
