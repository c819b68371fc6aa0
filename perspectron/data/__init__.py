"""The way from text to batches: corpora, a byte-level tokenizer, shards on disk, and a loader that resumes exactly."""

from perspectron.data.corpus import NAMED, SPLITS, Corpus, Document, SplitName, open_corpus
from perspectron.data.loader import IGNORE, Batch, Loader, windows
from perspectron.data.shards import Shards, Split, encode, open_shards
from perspectron.data.tokenizer import END_OF_TEXT, Tokenizer

__all__ = [
    "END_OF_TEXT",
    "IGNORE",
    "NAMED",
    "SPLITS",
    "Batch",
    "Corpus",
    "Document",
    "Loader",
    "Shards",
    "Split",
    "SplitName",
    "Tokenizer",
    "encode",
    "open_corpus",
    "open_shards",
    "windows",
]
