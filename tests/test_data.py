"""The shipped text and tokenizer, batches of them, and packing."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xtf.batch import IGNORE, check_batch, pack
from xtf.data import (
    Tokens,
    batches,
    demo_tokenizer,
    load_corpus,
    pack_documents,
    tokenize,
    unigram_entropy,
    windows,
)
from xtf.data.text import CORPUS_FILE, TOKENIZER_FILE
from xtf.data.train_tokenizer import SPECIAL, VOCAB, train

# ---- the text and its tokenizer ----


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TOKENIZER_FILE.parent)


def test_corpus_is_the_work_alone() -> None:
    text = load_corpus()
    assert len(text) > 600_000
    assert text.startswith("PRIDE AND PREJUDICE\n\nBy Jane Austen\n\nChapter 1\n\nIt is a truth universally acknowledged")
    assert text.endswith("had been the means of uniting them.\n")
    assert not any(word in text.lower() for word in ("gutenberg", "ebook", "e-text", "copyright", "license", "http"))


def test_provenance_names_the_file_that_ships() -> None:
    note = (CORPUS_FILE.parent / "PROVENANCE.md").read_text(encoding="utf-8")
    assert hashlib.sha256(CORPUS_FILE.read_bytes()).hexdigest() in note


def test_tokenizer_is_reproduced_byte_for_byte() -> None:
    assert train(load_corpus()).to_str(pretty=True) + "\n" == TOKENIZER_FILE.read_text(encoding="utf-8")


def test_tokenizer_refuses_a_vocabulary_without_room_for_bytes() -> None:
    with pytest.raises(ValueError, match="at least 259"):
        train("text", vocab=258)


def test_corpus_comes_back_from_its_tokens() -> None:
    tokens = tokenize(load_corpus())
    assert demo_tokenizer().decode(tokens.tolist()) == load_corpus()
    assert len(tokens) < len(load_corpus()) / 3.5
    assert demo_tokenizer().get_vocab_size() == VOCAB
    assert [demo_tokenizer().token_to_id(token) for token in SPECIAL] == [0, 1, 2]


@given(st.text(min_size=1))
def test_any_text_comes_back(text: str) -> None:
    assert demo_tokenizer().decode(tokenize(text).tolist(), skip_special_tokens=False) == text


def test_transformers_loads_the_same_tokenizer(hf_tokenizer: Any) -> None:
    text = 'He said, "Mrs. Long\'s   niece — née Élise — is 27."\n\n'
    assert hf_tokenizer.encode(text, add_special_tokens=False) == tokenize(text).tolist()
    assert tokenize(text, hf_tokenizer).tolist() == tokenize(text).tolist()
    assert hf_tokenizer.decode(tokenize(text).tolist()) == text
    assert (hf_tokenizer.eos_token, hf_tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_tokenize_refuses_nothing() -> None:
    with pytest.raises(ValueError, match="empty"):
        tokenize("")


# ---- batches ----


def test_held_out_is_the_contiguous_tail() -> None:
    tokens = tokenize(load_corpus())
    split = Tokens.demo()
    assert torch.equal(torch.cat([split.train, split.held_out]), tokens)
    assert len(split.held_out) == round(0.05 * len(tokens))


@pytest.mark.parametrize(
    ("tokens", "held_out", "message"),
    [
        (torch.zeros(3, 3, dtype=torch.int64), 0.05, "shape"),
        (torch.zeros(30), 0.05, "integer"),
        (torch.zeros(0, dtype=torch.int64), 0.05, "non-empty"),
        (torch.zeros(30, dtype=torch.int64), 0.0, "between 0 and 1"),
        (torch.zeros(30, dtype=torch.int64), 1.0, "between 0 and 1"),
        (torch.zeros(4, dtype=torch.int64), 0.05, "longer text"),
    ],
)
def test_impossible_splits_are_refused(tokens: torch.Tensor, held_out: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokens.of(tokens, vocab=10, held_out=held_out)


def test_batches_are_a_pure_function_of_seed_and_step() -> None:
    text = torch.arange(1000)
    at = batches(text, batch=3, seq=16, seed=5)
    torch.manual_seed(1)
    first = [at(step) for step in (0, 7, 8)]
    torch.manual_seed(2)
    again = [batches(text, batch=3, seq=16, seed=5)(step) for step in (8, 7, 0)][::-1]
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(one[k], other[k]) for k in ("input_ids", "labels"))
    assert not torch.equal(at(7)["input_ids"], at(8)["input_ids"])
    assert not torch.equal(at(7)["input_ids"], batches(text, batch=3, seq=16, seed=6)(7)["input_ids"])


def test_batch_rows_are_windows_of_the_text_and_reach_all_of_it() -> None:
    at = batches(torch.arange(40), batch=8, seq=4, seed=0)
    seen: set[int] = set()
    for step in range(40):
        batch = at(step)
        check_batch(batch, 40)
        assert bool((batch["input_ids"].diff(dim=1) == 1).all())
        assert torch.equal(batch["input_ids"], batch["labels"])
        seen |= set(batch["input_ids"].reshape(-1).tolist())
    assert seen == set(range(40))


def test_a_text_of_one_row_has_one_batch() -> None:
    assert batches(torch.arange(4), batch=2, seq=4, seed=0)(9)["input_ids"].tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(("batch", "seq"), [(0, 4), (1, 1), (1, 41)])
def test_impossible_batches_are_refused(batch: int, seq: int) -> None:
    with pytest.raises(ValueError, match="row"):
        batches(torch.arange(40), batch=batch, seq=seq, seed=0)
    with pytest.raises(ValueError, match="row"):
        list(windows(torch.arange(40), batch=batch, seq=seq))


@pytest.mark.parametrize("length", [2, 3, 4, 5, 17, 40])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seq", [2, 3])
def test_windows_make_every_token_but_the_first_a_target_once(length: int, batch: int, seq: int) -> None:
    if length < seq:
        length = seq
    targets: list[int] = []
    for rows in windows(torch.arange(length) + 5, batch=batch, seq=seq):
        check_batch(rows, length + 5)
        assert rows["input_ids"].shape == (batch, seq)
        packed = pack(rows)
        found = packed["targets"] != IGNORE
        assert torch.equal(packed["targets"][found], packed["input_ids"][found] + 1)
        targets += packed["targets"][found].tolist()
    assert targets == list(range(6, length + 5))


def test_unigram_entropy_by_hand() -> None:
    train, held_out = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2])
    expected = -(math.log(4 / 8) + math.log(2 / 8) + math.log(1 / 8)) / 3  # add-one counts 4, 2, 1, 1 of 8
    assert unigram_entropy(held_out, train, 4) == pytest.approx(expected, rel=1e-12)


def test_unigram_entropy_of_the_demo_is_below_uniform() -> None:
    split = Tokens.demo()
    assert 5.5 < unigram_entropy(split.held_out, split.train, split.vocab) < math.log(split.vocab)


@pytest.mark.parametrize(("held_out", "train"), [([4], [0]), ([0], [-1]), ([], [0])])
def test_unigram_entropy_refuses_foreign_ids(held_out: list[int], train: list[int]) -> None:
    with pytest.raises(ValueError, match=r"vocabulary of 4|non-empty"):
        unigram_entropy(torch.tensor(held_out, dtype=torch.int64), torch.tensor(train), 4)


# ---- packing ----


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_every_document_stands_whole_in_one_row(lengths: list[int]) -> None:
    documents = [([100 * i + t for t in range(n)], [IGNORE] + [100 * i + t for t in range(1, n)]) for i, n in enumerate(lengths)]
    rows = pack_documents(documents, seq=9, pad_id=7)
    check_batch(rows, 100 * len(lengths))
    for index, (ids, labels) in enumerate(documents):
        where = (rows["document_ids"] == index).nonzero()
        assert len(set(where[:, 0].tolist())) == 1
        assert torch.equal(where[:, 1], torch.arange(len(ids)) + where[0, 1])
        assert rows["input_ids"][rows["document_ids"] == index].tolist() == ids
        assert rows["labels"][rows["document_ids"] == index].tolist() == labels
    padding = rows["document_ids"] == -1
    assert int((~padding).sum()) == sum(lengths)
    assert set(rows["input_ids"][padding].tolist()) <= {7}
    assert set(rows["labels"][padding].tolist()) <= {IGNORE}
    filled = (~padding).sum(1)
    # no two rows could have been one: that is what any fit, best or first, guarantees
    assert len(filled) == 1 or int(filled.sort().values[:2].sum()) > 9


@pytest.mark.parametrize(
    ("documents", "seq", "message"),
    [
        ([], 4, "no document"),
        ([([1], [1])], 0, "seq is 0"),
        ([([1], [1]), ([], [])], 4, "document 1 has 0 tokens"),
        ([([1, 2], [1])], 4, "document 0 has 2 ids and 1 labels"),
        ([([1] * 5, [1] * 5)], 4, "document 0 has 5 tokens, a row holds 1 to 4"),
    ],
)
def test_impossible_packings_are_refused(documents: list[tuple[list[int], list[int]]], seq: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_documents(documents, seq=seq)
