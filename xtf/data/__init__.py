"""Data: the text that ships with the package, conversations, and batches of either."""

from xtf.data.batches import PackedBatches, held_out_batches
from xtf.data.cache import Skipped, default_cache_dir
from xtf.data.chat import ChatEncoder, TextEncoder, encode_chat, read_chat_jsonl
from xtf.data.conversation import Conversation, Message, parse_row
from xtf.data.documents import Document, Documents
from xtf.data.packing import pack_documents
from xtf.data.pipeline import Part, Tokenized, tokenize_files
from xtf.data.rows import RowError, read_rows
from xtf.data.text import Tokens, batches, demo_tokenizer, encode, load_corpus, tokenize, unigram_entropy, windows

__all__ = [
    "ChatEncoder",
    "Conversation",
    "Document",
    "Documents",
    "Message",
    "PackedBatches",
    "Part",
    "RowError",
    "Skipped",
    "TextEncoder",
    "Tokenized",
    "Tokens",
    "batches",
    "default_cache_dir",
    "demo_tokenizer",
    "encode",
    "encode_chat",
    "held_out_batches",
    "load_corpus",
    "pack_documents",
    "parse_row",
    "read_chat_jsonl",
    "read_rows",
    "tokenize",
    "tokenize_files",
    "unigram_entropy",
    "windows",
]
