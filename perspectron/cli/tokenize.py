"""`perspectron tokenize`."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from perspectron.cli.options import Encoding, Json, answer
from perspectron.cli.progress import Work
from perspectron.data import encode, made_in, open_corpus, with_encoding
from perspectron.util.config import require
from perspectron.util.errors import StorageError
from perspectron.util.files import locked


@dataclass(frozen=True)
class Tokenize:
    """Train a tokenizer on a corpus and encode it, once for many runs; an interrupted encoding resumes.

    Example: perspectron tokenize letters.txt --out corpora/letters --vocab-size 2048

    Then: perspectron train --data corpora/letters --minutes 30
    """

    data: tyro.conf.Positional[str]
    """Text as for `perspectron train --data`: a file, a folder, a pattern, hf:NAME, or several with weights."""
    out: Path
    """Folder for the tokenizer and the shards."""
    vocab_size: int = 8192
    """Maximum size of the vocabulary."""
    tokenizer: str = "bpe"
    """ "bpe" is learned from the text; "bytes", "characters", or a tokenizer.json to use."""
    encoding: Encoding = ""
    heldout: float = 0.05
    """Share of the text that is never trained on."""
    dev: float = 0.0
    """Share of the text for the dev split, taken from the training text."""
    json: Json = False

    def __call__(self) -> int:
        return self.within(self.out)

    def within(self, folder: Path) -> int:
        """The command as a part of what is written to `folder`."""
        require(0 < self.heldout < 1, "heldout", self.heldout, "in (0, 1)")
        corpus = open_corpus(with_encoding(self.data, self.encoding), self.heldout, dev=self.dev, out=folder)
        if self.out.exists() and not self.out.is_dir():
            raise StorageError(f"{self.out}: not a folder")
        with locked(self.out):
            with Work("making the tokenizer"):
                tokenizer = made_in(self.out, self.tokenizer, corpus, self.vocab_size)
            with Work("encoding") as work:
                shards = encode(corpus, tokenizer, self.out, tell=work.read)
        splits = {name: shards.split(name) for name in corpus.splits}
        facts = {
            name: {"documents": s.documents, "bytes": s.text_bytes, "tokens": s.tokens}
            for name, s in splits.items()
        }
        extra = {
            "vocab_size": tokenizer.vocab_size,
            "digest": corpus.digest,
            "skipped_count": corpus.skipped_count,
            "skipped": corpus.skipped,
            "notes": corpus.notes(),
        }
        whole = sum(s.text_bytes for s in splits.values()) or 1
        lines = [
            f"{name}: {s.documents:,} documents, {s.text_bytes:,} bytes ({s.text_bytes / whole:.1%}), "
            f"{s.tokens:,} tokens"
            for name, s in splits.items()
        ]
        lines.append(f"vocabulary: {tokenizer.vocab_size:,}; text {corpus.digest}; in {self.out}")
        lines += corpus.notes()
        return answer(self.json, facts | extra, *lines)
