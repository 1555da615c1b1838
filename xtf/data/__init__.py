"""Data: the text that ships with the package, conversations, and batches of either."""

from xtf.data.chat import Message, encode_chat, read_chat_jsonl
from xtf.data.packing import pack_documents
from xtf.data.text import Tokens, batches, demo_tokenizer, encode, load_corpus, tokenize, unigram_entropy, windows

__all__ = [
    "Message",
    "Tokens",
    "batches",
    "demo_tokenizer",
    "encode",
    "encode_chat",
    "load_corpus",
    "pack_documents",
    "read_chat_jsonl",
    "tokenize",
    "unigram_entropy",
    "windows",
]
