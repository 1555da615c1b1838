"""Decoding with a cache, sampling, streamed text, and the command ``xtf generate``."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import xtf
from xtf import cli, models
from xtf.data import ChatEncoder, demo_tokenizer
from xtf.data.text import TOKENIZER_FILE
from xtf.model import Model
from xtf.run.decoding import NextToken
from xtf.run.generation import GenerateOptions, chat_ids, run, turn_end
from xtf.run.sampling import generate, sample, stream, stream_text
from xtf.run.source import find, load_tokenizer

SIZES = {"vocab_size": 31, "hidden_size": 12, "intermediate_size": 14, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = SIZES | {"num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64, "initializer_range": 0.3}
MOE = DENSE | {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7}
LATENT = SIZES | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 7,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
LONG = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 3.0, 4.0], "original_max_position_embeddings": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": DENSE | {"model_type": "llama", "tie_word_embeddings": True, "mlp_bias": True},
    "qwen2 with windows": DENSE | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": DENSE | {"model_type": "qwen3", "attention_bias": True},
    "qwen3_moe": MOE | {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3_moe with windows": MOE | {"use_sliding_window": True, "sliding_window": 4},
    "deepseek_v3": LATENT,
    "gpt_oss": DENSE | {"model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 4},
    "yarn": DENSE | {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "dynamic": DENSE | {"model_type": "llama", "max_position_embeddings": 8, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "longrope": DENSE | {"model_type": "llama", "rope_scaling": {"rope_type": "longrope", "factor": 8.0, **LONG}},
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
IDS = torch.randint(31, (21,), generator=torch.Generator().manual_seed(5)).tolist()


def small(name: str, dtype: torch.dtype = torch.float64) -> Model:
    return models.from_hf(CONFIGS[name], dtype=dtype)


def whole(model: Model, params: Any, ids: Sequence[int]) -> Tensor:
    return model.logits(params, torch.tensor([list(ids)]))[0, -1]


def near(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert (got - want).abs().max() <= tolerance * want.abs().max()


# ---- the cache ----


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prefill", [1, 5, 12])
def test_every_position_equals_the_whole_sequence(name: str, dtype: torch.dtype, prefill: int) -> None:
    model = small(name, dtype)
    params = model.init(0)
    scores = NextToken(model, params)
    for n in range(prefill, len(IDS) + 1):
        near(scores(IDS[:n]), whole(model, params, IDS[:n]), TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["llama", "qwen3_moe with windows", "gpt_oss"])
def test_a_long_prompt_is_attended_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtf.run.decoding._QUERIES", 4)
    model = small(name)
    params = model.init(0)
    near(NextToken(model, params)(IDS), whole(model, params, IDS), 1e-10)


@pytest.mark.parametrize("name", ["qwen3", "qwen2 with windows", "longrope"])
def test_any_ids_give_what_they_give_alone(name: str) -> None:
    model = small(name)
    params = model.init(0)
    scores = NextToken(model, params)
    other = [*IDS[:6], 3, 1, 4, 1, 5]
    for ids in (IDS[:9], other, other, IDS, IDS[:2], IDS[1:], [7]):
        near(scores(ids), whole(model, params, ids), 1e-10)


def test_what_agrees_is_not_computed_again() -> None:
    model = small("llama")
    scores = NextToken(model, model.init(0))
    counts = []
    for ids in (IDS[:9], IDS[:10], IDS[:10], [*IDS[:6], 0, 0], [*IDS[:6], 0, 0, 1]):
        before = scores.computed
        scores(ids)
        counts.append(scores.computed - before)
    assert counts == [9, 1, 1, 2, 1] and IDS[6] != 0


def test_only_lengths_that_change_the_rotation_are_computed_again() -> None:
    model = small("longrope")
    scores = NextToken(model, model.init(0))
    counts = []
    for n in range(5, 13):
        before = scores.computed
        scores(IDS[:n])
        counts.append(scores.computed - before)
    assert counts == [5, 1, 1, 1, 9, 1, 1, 1]  # once, where it becomes longer than 8


def test_a_failed_call_leaves_nothing_wrong() -> None:
    model = small("qwen3")
    params = model.init(0)
    scores = NextToken(model, params)
    scores(IDS[:8])
    with pytest.raises(ValueError, match="holds the id 99"):
        scores([*IDS[:4], 99, 2])
    near(scores(IDS[:9]), whole(model, params, IDS[:9]), 1e-10)


def test_impossible_models_and_ids_are_refused() -> None:
    model = small("llama")
    params = model.init(0)
    with pytest.raises(ValueError, match="no ids"):
        NextToken(model, params)([])
    with pytest.raises(ValueError, match="not this model's"):
        NextToken(model, {"embed": params["embed"]})

    def mixing(build: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
        def fn(own: Any, x: Tensor, *, cu_seqlens: Tensor) -> tuple[Tensor]:
            return (x.cumsum(0),)

        def built(ops: Any) -> tuple[Any, ...]:
            stages = build(ops)
            return (*stages[:-1], xtf.Stage("sum", "mixer", fn, "sum", {}, ("x",), ("x",), ("cu_seqlens",)), stages[-1])

        return built

    other = dataclasses.replace(model, build=mixing(model.build))
    with pytest.raises(ValueError, match=r"'sum' .* cannot be run token by token"):
        NextToken(other, params)(IDS)


def test_bfloat16_and_weights_of_one_head_run() -> None:
    model = models.from_hf(CONFIGS["llama"] | {"num_key_value_heads": 4}, dtype=torch.bfloat16)
    params = model.init(0)
    got = NextToken(model, params)(IDS)
    assert got.dtype == torch.bfloat16
    assert (got - whole(model, params, IDS)).abs().max() <= 0.1 * whole(model, params, IDS).abs().max()


# ---- ids ----


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_is_the_most_likely_token_each_time(name: str) -> None:
    model = small(name)
    params = model.init(0)
    got = list(stream(model, params, IDS[:5], tokens=10))
    want = list(IDS[:5])
    for _ in range(10):
        want.append(int(whole(model, params, want).argmax()))
    assert got == want[5:]


def test_a_stream_is_a_function_of_its_seed_and_comes_token_by_token() -> None:
    model = small("qwen3")
    params = model.init(0)

    def drawn(seed: int) -> list[int]:
        return list(stream(model, params, IDS[:5], tokens=12, temperature=1.0, top_p=0.9, seed=seed))

    assert drawn(1) == drawn(1) != drawn(2)
    asked: list[int] = []

    def scores(ids: Sequence[int]) -> Tensor:
        asked.append(len(ids))
        return torch.eye(9)[(ids[-1] + 1) % 9]

    came = sample(scores, [3], tokens=5, stop={7})
    assert asked == [] and next(came) == 4 and asked == [1]
    assert list(came) == [5, 6]


def test_a_window_gives_what_the_model_gives_for_the_last_tokens() -> None:
    model = models.preset("tiny-moe")
    params, tokenizer = model.init(0), demo_tokenizer()
    ids = tokenizer.encode("It is a truth", add_special_tokens=False).ids
    begin = len(ids)
    for _ in range(6):
        ids.append(int(whole(model, params, ids[-5:]).argmax()))
    got = generate(model, params, tokenizer, "It is a truth", tokens=6, temperature=0, window=5)
    assert got == tokenizer.decode(ids[begin:])


# ---- text ----


@settings(max_examples=150)
@given(st.text(max_size=30))
def test_pieces_are_final_and_whole(text: str) -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = list(stream_text(tokenizer, ids))
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert all(pieces)


def test_half_a_character_is_held_back() -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode("a😀b", add_special_tokens=False).ids
    assert len(ids) > 3  # the character is several tokens

    def pieces_of(n: int) -> list[str]:
        given: list[str] = []
        source = iter(ids)
        for piece in stream_text(tokenizer, (next(source) for _ in range(n))):
            given.append(piece)
        return given

    came = ["".join(pieces_of(n)) for n in range(1, len(ids) + 1)]
    assert came[0] == "a" and came[-2:] == ["a😀", "a😀b"]
    taken: list[int] = []

    def counted() -> Iterator[int]:
        for token in ids:
            taken.append(token)
            yield token

    assert [(piece, len(taken)) for piece in stream_text(tokenizer, counted())] == [("a", 1), ("😀", len(ids) - 1), ("b", len(ids))]


@pytest.mark.parametrize(
    ("stop", "want"),
    [((), "one two three"), (("two",), "one "), (("three", " t"), "one"), (("none",), "one two three"), (("threes",), "one two three")],
)
def test_stop_texts_end_the_text_and_are_not_part_of_it(stop: tuple[str, ...], want: str) -> None:
    ids = demo_tokenizer().encode("one two three", add_special_tokens=False).ids
    pieces = list(stream_text(demo_tokenizer(), ids, stop))
    assert "".join(pieces) == want and all(pieces)


def test_nothing_is_drawn_after_a_stop_text() -> None:
    ids = demo_tokenizer().encode("one two three four", add_special_tokens=False).ids
    taken: list[int] = []

    def counted() -> Iterator[int]:
        for token in ids:
            taken.append(token)
            yield token

    assert "".join(stream_text(demo_tokenizer(), counted(), ["two"])).strip() == "one"
    assert len(taken) < len(ids)
    with pytest.raises(ValueError, match="stop text is empty"):
        stream_text(demo_tokenizer(), ids, [""])


# ---- the command ----


def written(folder: Path, *args: Any, **options: Any) -> str:
    out = io.StringIO()
    run(GenerateOptions(folder, *args, **options), out=out)
    return out.getvalue()


def test_generate_writes_the_continuation_and_a_newline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models.from_hf(folder)
    params, tokenizer = xtf.load_params(model, folder), load_tokenizer(folder)
    want = generate(model, params, tokenizer, "It is", tokens=7, temperature=0)
    assert cli.main(["generate", str(folder), "It is", "--tokens", "7"]) == 0
    out, err = capsys.readouterr()
    assert out == want + "\n" and err == ""
    drawn = ["generate", str(folder), "It is", "--tokens", "7", "--temperature", "1", "--top-p", "0.9", "--seed"]
    texts = []
    for seed in ("1", "1", "2"):
        assert cli.main([*drawn, seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] == generate(model, params, tokenizer, "It is", tokens=7, temperature=1, top_p=0.9, seed=1) + "\n"


def test_end_ids_of_all_three_files_end_the_text(folder: Path, tmp_path: Path) -> None:
    model = models.from_hf(folder)
    first, second = stream(model, xtf.load_params(model, folder), load_tokenizer(folder)("It is")["input_ids"], tokens=2)
    assert first != second
    for name, stated in (("generation_config.json", [first, 9]), ("config.json", first), ("generation_config.json", first)):
        copy = tmp_path / f"{name}-{isinstance(stated, list)}"
        shutil.copytree(folder, copy)
        file = copy / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | {"eos_token_id": stated}))
        assert written(copy, "It is", tokens=9) == "\n"


def test_a_prompt_is_read_from_standard_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = written(folder, "It is", tokens=5)
    monkeypatch.setattr("sys.stdin", io.StringIO("It is\n"))
    assert written(folder, tokens=5) == want
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    with pytest.raises(ValueError, match="standard input is empty"):
        written(folder)


def test_chat_writes_after_the_generation_prompt(folder: Path) -> None:
    model, tokenizer = models.from_hf(folder), load_tokenizer(folder)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat_ids(ChatEncoder(tokenizer), messages) == ids
    new = list(stream(model, xtf.load_params(model, folder), ids, tokens=6))
    assert written(folder, "Hello", chat=True, system="Be kind.", tokens=6) == tokenizer.decode(new) + "\n"


def test_a_conversation_keeps_what_was_said_and_its_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[NextToken] = []

    class Watched(NextToken):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            kept.append(self)

    monkeypatch.setattr("xtf.run.generation.NextToken", Watched)
    said = iter(["Hello", " ", "And you?"])

    def ask() -> str:
        for line in said:
            return line
        raise EOFError

    out = io.StringIO()
    run(GenerateOptions(folder, chat=True, tokens=4), out=out, terminal=True, ask=ask)
    model, tokenizer = models.from_hf(folder), load_tokenizer(folder)
    params, messages, want = xtf.load_params(model, folder), [], ""
    for text in ("Hello", "And you?"):
        messages.append({"role": "user", "content": text})
        ids = chat_ids(ChatEncoder(tokenizer), messages)
        answer = tokenizer.decode(list(stream(model, params, ids, tokens=4)))
        messages.append({"role": "assistant", "content": answer})
        want += answer + "\n"
    assert out.getvalue() == want + "\n"
    assert len(kept) == 1 and kept[0].computed < len(ids) + 4 + 6  # the first turn was not run again


def test_marks_of_the_template_in_a_text_are_text(folder: Path) -> None:
    encoder = ChatEncoder(load_tokenizer(folder))
    mark = encoder.template.mark.strip()
    (end,) = turn_end(encoder).ids
    plain, marked = (chat_ids(encoder, [{"role": "user", "content": text}]) for text in ("Hello", f"Hello {mark}"))
    assert marked.count(end) == plain.count(end) and len(marked) > len(plain)
    assert mark in encoder.codec.backend.decode(marked, skip_special_tokens=True)


def test_the_end_mark_of_a_template_is_found() -> None:
    tokenizer = load_tokenizer(TOKENIZER_FILE.parent)
    assert turn_end(ChatEncoder(tokenizer)).ids == {tokenizer.eos_token_id}
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n###\n{% endfor %}"
    assert turn_end(ChatEncoder(tokenizer)) == (frozenset(), ("###",))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert turn_end(ChatEncoder(tokenizer)) == (frozenset(), ())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere", "Hi"], "no checkpoint folder at nowhere"),
        (["org/model", "Hi"], "downloads nothing"),
        (["{empty}", "Hi"], "no checkpoint in"),
        (["{bare}", "Hi"], "has no tokenizer"),
        (["{folder}", "Hi", "--tokens", "-1"], "--tokens is -1"),
        (["{folder}", "Hi", "--temperature", "-1"], "--temperature is -1"),
        (["{folder}", "Hi", "--top-p", "0"], "--top-p is 0.0"),
        (["{folder}", "Hi", "--stop", ""], "--stop has an empty text"),
        (["{folder}", "Hi", "--system", "Be kind."], "add --chat"),
        (["{folder}", "Hi", "--device", "nonsense"], "--device nonsense is not here"),
        (["{folder}", ""], "PROMPT is empty"),
        (["{folder}", "Hi", "--template", "chatml"], "--template is for a chat"),
        (["{folder}", "Hi", "--chat", "--template", "none.jinja"], "none.jinja"),
    ],
)
def test_bad_input_is_one_message(args: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder, tmp_path / "bare", ignore=lambda _, names: [name for name in names if name.startswith("tokenizer")])
    places = {"folder": folder, "empty": tmp_path / "empty", "bare": tmp_path / "bare"}
    assert cli.main(["generate", *(arg.format(**places) for arg in args)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("xtf: ") and err.count("\n") == 1


def test_without_a_prompt_on_a_terminal_there_is_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match="there is no PROMPT"):
        run(GenerateOptions(folder), out=io.StringIO(), terminal=True)


# ---- checkpoints of a run ----


def test_the_checkpoint_of_a_run_is_found(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"command": "train"}')  # a run's own
    with pytest.raises(ValueError, match="no checkpoint in"):
        find(tmp_path)
    for name in ("checkpoints/step-00000009", "checkpoints/step-00000010", "checkpoints/.step-00000011.tmp"):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "checkpoints" / "step-00000012").mkdir()  # without a config: not one
    assert find(tmp_path) == find(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-00000010"
    shutil.copytree(folder, tmp_path / "checkpoint")
    assert find(tmp_path) == find(tmp_path, "last") == tmp_path / "checkpoint"
    shutil.copytree(folder, tmp_path / "best")
    assert find(tmp_path) == tmp_path / "best" and find(tmp_path, "last") == tmp_path / "checkpoint"
    step = tmp_path / "checkpoints" / "step-00000009"
    assert find(step) == step
    with pytest.raises(ValueError, match="is a file"):
        find(tmp_path / "config.json")


def test_what_was_chosen_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, tmp_path / "best")
    assert cli.main(["generate", str(tmp_path), "It is", "--tokens", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == f"xtf: checkpoint {tmp_path / 'best'}\n" and out.endswith("\n")


# ---- real weights ----


def test_greedy_tokens_equal_those_of_transformers(real_inputs: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = real_inputs / "smollm2-135m"
    tokenizer: Any = load_tokenizer(path)
    ids = tokenizer("The capital of France is")["input_ids"]
    theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        want = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    del theirs
    model = models.from_hf(path)
    params = xtf.load_params(model, path)
    assert list(stream(model, params, ids, tokens=24)) == want
    scores, sequence = NextToken(model, params), [*ids, *want]
    logits = model.logits(params, torch.tensor([sequence]))[0]
    for n in range(len(ids), len(sequence) + 1):
        near(scores(sequence[:n]), logits[n - 1], 1e-5)
