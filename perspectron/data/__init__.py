"""The way from text to batches: corpora, a byte-level tokenizer, shards on disk, and a loader that resumes exactly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perspectron.data.corpus import SPLITS, Corpus, Document, SplitName
    from perspectron.data.encoding import cores, encode
    from perspectron.data.loader import IGNORE, Batch, Loader, windows
    from perspectron.data.named import NAMED
    from perspectron.data.shards import Shards, Split, open_shards
    from perspectron.data.sources import absolute, is_encoded, label, open_corpus, with_encoding
    from perspectron.data.tokenizer import END_OF_TEXT, Tokenizer
    from perspectron.data.vocabulary import made_in

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
    "absolute",
    "cores",
    "encode",
    "is_encoded",
    "label",
    "made_in",
    "open_corpus",
    "open_shards",
    "windows",
    "with_encoding",
]

_MODULES = {
    "corpus": ("SPLITS", "Corpus", "Document", "SplitName"),
    "encoding": ("cores", "encode"),
    "loader": ("IGNORE", "Batch", "Loader", "windows"),
    "named": ("NAMED",),
    "shards": ("Shards", "Split", "open_shards"),
    "sources": ("absolute", "is_encoded", "label", "open_corpus", "with_encoding"),
    "tokenizer": ("END_OF_TEXT", "Tokenizer"),
    "vocabulary": ("made_in",),
}
"""The public names and their modules. Each is imported when it is first used: a process that encodes needs none of
them, and no torch."""

if not TYPE_CHECKING:  # to mypy a module with __getattr__ has every name

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"perspectron.data.{module}"), name)
        raise AttributeError(f"module 'perspectron.data' has no attribute {name!r}")
