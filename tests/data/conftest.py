from pathlib import Path

import pytest

from perspectron.data import Shards, Tokenizer, encode, open_corpus


def sentence(i: int) -> str:
    return f"Document {i} says: {'the quick brown fox, ' * (i % 5 + 1)}and counts {i * 7919}.\n"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train((sentence(i) for i in range(300)), 400)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 small files and one far longer than the shards that tests ask for."""
    root = tmp_path_factory.mktemp("texts")
    for i in range(120):
        (root / f"{i:03d}.txt").write_text(sentence(i))
    (root / "060-long.txt").write_text("".join(sentence(i) for i in range(40)))
    return root


@pytest.fixture(scope="session")
def shards(text_folder: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    out = tmp_path_factory.mktemp("encoded") / "shards"
    return encode(open_corpus(str(text_folder), heldout=0.2), tokenizer, out, shard_tokens=256)
