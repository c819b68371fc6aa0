"""From a corpus to a tokenizer and shards, once, in the run's folder."""

from pathlib import Path

from perspectron.data import Shards, Tokenizer, encode, open_corpus, open_shards
from perspectron.errors import ConfigError


def prepare(run: Path, source: str, heldout: float, vocab_size: int) -> tuple[Tokenizer, Shards, str]:
    """(tokenizer, shards, a line that says what was read).

    `source` is a corpus, or a folder that `tokenize` wrote (a manifest.json with its tokenizer.json beside
    it). The tokenizer is kept as RUN/tokenizer.json; a corpus is encoded into RUN/data, and an encoding that
    was interrupted goes on. DataError as the data room raises it; ConfigError when `vocab_size` is smaller
    than the tokenizer given.
    """
    if (Path(source) / "manifest.json").is_file():
        shards, tokenizer = open_shards(Path(source)), Tokenizer.load(Path(source) / "tokenizer.json")
        if tokenizer.vocab_size > vocab_size:
            raise ConfigError(f"vocab_size = {vocab_size}, must be ≥ the {tokenizer.vocab_size} of {source}")
        tokenizer.save(run / "tokenizer.json")
        return tokenizer, shards, source
    kept = run / "tokenizer.json"
    if (run / "data" / "manifest.json").is_file() and kept.is_file():
        return Tokenizer.load(kept), open_shards(run / "data"), f"{source}, as encoded before"
    corpus = open_corpus(source, heldout)
    if kept.is_file():
        tokenizer = Tokenizer.load(kept)
    else:
        tokenizer = Tokenizer.train((d.text for d in corpus.documents("train")), vocab_size)
        tokenizer.save(kept)
    shards = encode(corpus, tokenizer, run / "data")
    skipped = (
        f"; {corpus.skipped_count} unreadable, the first {corpus.skipped[0]}" if corpus.skipped_count else ""
    )
    train, held = shards.split("train"), shards.split("heldout")
    summary = f"{source}: {train.documents} documents, {train.text_bytes / 1e6:.1f} MB to train on, "
    return tokenizer, shards, summary + f"{held.text_bytes / 1e6:.2f} MB held out{skipped}"
