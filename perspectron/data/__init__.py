"""The way from text to batches: corpora, a byte-level tokenizer, shards on disk, and a loader that resumes exactly.

The loader's names are imported from its own module: it needs torch, and a process that encodes does not."""

from perspectron.data.corpus import SPLITS, Corpus, Document, SplitName
from perspectron.data.encoding import cores, encode
from perspectron.data.named import NAMED
from perspectron.data.shards import Shards, Split, open_shards
from perspectron.data.sources import absolute, is_encoded, label, open_corpus, with_encoding
from perspectron.data.tokenizer import END_OF_TEXT, Tokenizer
from perspectron.data.vocabulary import made_in

__all__ = [
    "END_OF_TEXT", "NAMED", "SPLITS", "Corpus", "Document", "Shards", "Split", "SplitName", "Tokenizer", "absolute",
    "cores", "encode", "is_encoded", "label", "made_in", "open_corpus", "open_shards", "with_encoding",
]  # fmt: skip
