"""The tokenizer that a user asks for: learned from the text, of bytes, of characters, or one that exists."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from perspectron.data.corpus import Corpus
from perspectron.data.tokenizer import Tokenizer
from perspectron.util.errors import DataError
from perspectron.util.files import read_json, write_json

KINDS = ("bpe", "bytes", "characters")
NOTE = "vocabulary.json"
"""Record of what the tokenizer in the same folder was made from."""
BYTES = 257
"""Size of the smallest vocabulary: 256 bytes and the separator."""


def made(kind: str, corpus: Corpus, vocab_size: int) -> Tokenizer:
    """The tokenizer of a kind in KINDS, learned from the training text where it has something to learn, or that of a
    tokenizer.json. DataError: no such kind or file, or a `vocab_size` below BYTES."""
    if kind not in KINDS:
        return Tokenizer.load(_file(kind))
    if vocab_size < BYTES:
        raise DataError(f"vocab_size: {vocab_size} is below {BYTES} (256 bytes and the separator)")
    if kind == "bytes":
        return Tokenizer.spelled([])
    texts = (document.prompt + document.text for document in corpus.documents("train"))
    return characters(texts, vocab_size) if kind == "characters" else Tokenizer.train(texts, vocab_size)


def _file(path: str) -> Path:
    if not Path(path).is_file():
        raise DataError(f"tokenizer: {path!r} is no file, and not one of {', '.join(KINDS)}")
    return Path(path)


def characters(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A token for each character of the texts, the most frequent first, as far as `vocab_size` reaches; other
    characters are spelled in bytes."""
    counts = Counter[str]()
    for text in texts:
        counts.update(text)
    if not counts:
        raise DataError("tokenizer: no text to train on")
    known = {bytes([byte]) for byte in range(256)}
    chosen = []
    for character in sorted(counts, key=lambda c: (-counts[c], c)):
        spelled = character.encode()
        needed = {spelled[:end] for end in range(1, len(spelled) + 1)} - known
        if len(known) + 1 + len(needed) > vocab_size:
            break
        known |= needed
        chosen.append(character)
    return Tokenizer.spelled(chosen)


def made_in(folder: Path, kind: str, corpus: Corpus, vocab_size: int) -> Tokenizer:
    """`made`, kept in FOLDER/tokenizer.json: what was learned there of the same corpus, kind and size is not learned
    again, so that an encoding that goes on need not read the text from its beginning."""
    asked = {"corpus": corpus.fingerprint, "kind": kind, "vocab_size": vocab_size}
    path, note = folder / "tokenizer.json", folder / NOTE
    if kind in KINDS and path.is_file() and note.is_file():
        try:
            tokenizer = Tokenizer.load(path)
            if read_json(note, DataError) == asked | {"tokenizer": tokenizer.fingerprint}:
                return tokenizer
        except DataError:
            pass  # damaged: made again
    tokenizer = made(kind, corpus, vocab_size)
    tokenizer.save(path)
    write_json(note, asked | {"tokenizer": tokenizer.fingerprint})
    return tokenizer
