"""The text that an artifact was trained on."""

from pathlib import Path

import pytest
import torch

from perspectron import presets
from perspectron.data import Tokenizer, encode, open_corpus
from perspectron.model.model import LanguageModel
from perspectron.opening import Folder, Opened
from perspectron.stream.artifact import Trained
from perspectron.util.errors import DataError


def test_shards_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox counts to seven. " * 40)
    corpus = open_corpus(str(tmp_path / "text.txt"), heldout=0.2)
    own, other = (Tokenizer.train([text * 40], 280) for text in ("the quick brown fox ", "one, two, three, "))
    data = tmp_path / "data"
    encode(corpus, own, data)
    with torch.device("meta"):
        model = LanguageModel(presets.get("transformer-tiny", vocab_size=280))
    folder = Folder(tmp_path / "artifact", model.config, trained=Trained(str(data), 0.2, 16))
    assert Opened(folder, model, own).shards(tmp_path / "new").tokenizer_fingerprint == own.fingerprint
    with pytest.raises(
        DataError, match=f"encoded with tokenizer {own.fingerprint[:12]}, that of .*artifact is"
    ):
        Opened(folder, model, other).shards(tmp_path / "new")
