"""Data: the text that ships with the package, conversations, and batches of either."""

from xtf.data.balance import plan_batches, stream_batches
from xtf.data.baselines import best_fit_packing, concatenate_and_cut, greedy_packing, length_grouped
from xtf.data.batches import PackedBatches, held_out_batches
from xtf.data.cache import Skipped
from xtf.data.calibrate import measure_cost
from xtf.data.chat import ChatEncoder, TextEncoder, encode_chat, read_chat_jsonl
from xtf.data.conversation import Conversation, Message, parse_row
from xtf.data.cost import Cost, CostFunction, document_cost, fit_cost
from xtf.data.documents import Document, Documents
from xtf.data.mix import Mixture, Source
from xtf.data.packing import pack_documents
from xtf.data.pipeline import Part, Tokenized, tokenize_files
from xtf.data.plan import Balance, Pieces, Plan, Step
from xtf.data.plan_bounds import independence, least_time
from xtf.data.plan_step import plan_step
from xtf.data.rows import RowError, read_rows
from xtf.data.text import Tokens, batches, demo_tokenizer, encode, load_corpus, tokenize, unigram_entropy, windows
from xtf.files import default_cache_dir

__all__ = [
    "Balance",
    "ChatEncoder",
    "Conversation",
    "Cost",
    "CostFunction",
    "Document",
    "Documents",
    "Message",
    "Mixture",
    "PackedBatches",
    "Part",
    "Pieces",
    "Plan",
    "RowError",
    "Skipped",
    "Source",
    "Step",
    "TextEncoder",
    "Tokenized",
    "Tokens",
    "batches",
    "best_fit_packing",
    "concatenate_and_cut",
    "default_cache_dir",
    "demo_tokenizer",
    "document_cost",
    "encode",
    "encode_chat",
    "fit_cost",
    "greedy_packing",
    "held_out_batches",
    "independence",
    "least_time",
    "length_grouped",
    "load_corpus",
    "measure_cost",
    "pack_documents",
    "parse_row",
    "plan_batches",
    "plan_step",
    "read_chat_jsonl",
    "read_rows",
    "stream_batches",
    "tokenize",
    "tokenize_files",
    "unigram_entropy",
    "windows",
]
