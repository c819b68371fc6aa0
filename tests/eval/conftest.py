"""A text, models, and what a suite measures."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from perspectron import build, presets
from perspectron.data import Split, Tokenizer, encode, open_corpus
from perspectron.eval.subject import Subject
from perspectron.model.model import LanguageModel
from perspectron.opening import Folder, Opened

VOCAB = 300


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> tuple[Tokenizer, Split]:
    """Documents of some hundred tokens, in letters of one to four bytes."""
    root = tmp_path_factory.mktemp("suites")
    (root / "texts").mkdir()
    draw = random.Random(0)
    words = ["quick", "brown", "größer", "→", "日本語", "🦊", "fox", "and"]
    for i in range(24):
        body = " ".join(draw.choices(words, k=draw.choice([300, 600, 1200])))
        (root / "texts" / f"{i}.txt").write_text(f"Number {i}: {body}.\n", encoding="utf-8")
    corpus = open_corpus(str(root / "texts"), heldout=0.5)
    tokenizer = Tokenizer.train((document.text for document in corpus.documents("train")), VOCAB)
    return tokenizer, encode(corpus, tokenizer, root / "data").split("heldout")


def model_of(design: str, seq_len: int = 64, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Small, of a design, its predictions far from uniform."""
    model = build(presets.small(design, vocab_size=VOCAB, d_model=32, seq_len=seq_len), seed=1).to(dtype)
    with torch.no_grad():
        model.embedding.weight.mul_(20)
    return model


@pytest.fixture(scope="session")
def subject(text) -> Callable[..., Subject]:
    def subject(model: Any = "perspective", **fields: Any) -> Subject:
        dtype = fields.pop("model_dtype", torch.float32)
        fields = {"seq_len": 64} | fields
        if isinstance(model, str):
            model = model_of(model, fields["seq_len"], dtype)
        folder = Folder(Path("run"), model.config, dtype=fields.pop("dtype", None))
        return Subject(Opened(folder, model, text[0]), text[1], **fields)

    return subject


@dataclass(frozen=True)
class Config:
    positions: int = 0


class Periodic:
    """In place of a model: the token of `period` tokens ago comes again with probability 0.9; where there is none yet,
    all are equally likely. The state is what was read."""

    def __init__(self, period: int) -> None:
        self.period, self.config = period, Config()
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def init_state(self, rows: int, *, capacity: int = 0) -> torch.Tensor:
        return torch.zeros(rows, 0, dtype=torch.int64)

    def hidden(self, ids_BT, state_BS, **_):
        seen_BL = torch.cat([state_BS, ids_BT], 1)
        pad_B = seen_BL.new_full((len(ids_BT), self.period - 1), -1)
        earlier_BL = torch.cat([pad_B, seen_BL], 1)[:, : seen_BL.shape[1]]
        return earlier_BL[:, -ids_BT.shape[1] :], seen_BL, {}

    def head(self, token_BT):
        p_BTV = torch.full((*token_BT.shape, VOCAB), 0.1 / (VOCAB - 1))
        known_BT1 = (token_BT >= 0)[..., None]
        p_BTV.scatter_(2, token_BT.clamp_min(0)[..., None], 0.9)
        return torch.where(known_BT1, p_BTV, torch.tensor(1 / VOCAB)).log()


@pytest.fixture(scope="session")
def periodic() -> type[Periodic]:
    return Periodic
