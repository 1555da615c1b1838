"""Trains the demo's tokenizer from the text that ships beside it: ``python -m xtf.data.train_tokenizer``.

Training is deterministic, so the shipped ``tokenizer.json`` is reproduced byte for byte; a test holds that. Byte-level BPE
(Sennrich et al. 2016, "Neural machine translation of rare words with subword units", over bytes as in Radford et al. 2019,
GPT-2): every text can be encoded and comes back exactly.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from xtf.data.text import TOKENIZER_FILE, load_corpus

VOCAB = 2048
"""Size of the vocabulary, the special tokens among it."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The ids 0, 1 and 2: the end of a document, and the marks around a chat message."""

_WORDS = Regex(r"""'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")


def train(text: str, vocab: int = VOCAB) -> Tokenizer:
    """A byte-level BPE tokenizer of ``vocab`` entries.

    Example:
        >>> tokenizer = train("the cat, the hat, the bat. " * 20, vocab=270)
        >>> tokenizer.decode(tokenizer.encode("the rat, né à Paris").ids)
        'the rat, né à Paris'

    Raises:
        ValueError: if ``vocab`` cannot hold the 256 bytes and the special tokens.
    """
    least = 256 + len(SPECIAL)
    if vocab < least:
        raise ValueError(f"vocab is {vocab}, but the 256 bytes and {len(SPECIAL)} special tokens need at least {least}: give a larger one")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


if __name__ == "__main__":
    trained = train(load_corpus())
    TOKENIZER_FILE.write_text(trained.to_str(pretty=True) + "\n", encoding="utf-8")
    print(f"{TOKENIZER_FILE}: {trained.get_vocab_size()} entries")
