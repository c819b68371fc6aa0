"""A small corpus, small models, and what a run amounts to."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from perspectron import presets
from perspectron.data import Shards, Tokenizer, encode, open_corpus
from perspectron.model.config import ModelConfig
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.loop import Trainer
from perspectron.train.metrics import read_metrics
from perspectron.train.optim import OptimConfig

SIZES = {
    "d_model": 32, "layers": 4, "hidden": 32, "rank": 8, "heads": 2, "kv_heads": 1, "window": 16,
    "vocab_size": 300,
}  # fmt: skip
PLAIN = "perspective-tiny-dense"
TIMINGS = ("seconds", "tokens_per_second")


def small(name: str = "perspective-tiny", **overrides: Any) -> ModelConfig:
    own = {key: size for key, size in SIZES.items() if presets.sizes(name).get(key) is not None}
    return presets.get(name, **own | overrides)


@dataclass
class Runs:
    """Makes trainers on one corpus, and compares what they come to."""

    data: Path
    tokenizer: Tokenizer
    shards: Shards
    small: Callable[..., ModelConfig] = field(default=small)

    def config(self, model: str | ModelConfig = PLAIN, clip: float = 1.0, **train: Any) -> RunConfig:
        settings: dict[str, Any] = {
            "steps": 14, "batch_size": 4, "seq_len": 32, "dtype": "float32", "device": "cpu",
            "eval_every": 4, "eval_tokens": 100, "save_every": 3,
            "optim": OptimConfig(lr=3e-3, warmup=3, clip=clip),
        }  # fmt: skip
        model = small(model) if isinstance(model, str) else model
        return RunConfig(model, TrainConfig(**settings | train))

    def trainer(self, run: Path, model: str | ModelConfig = PLAIN, **train: Any) -> Trainer:
        return self.start(run, self.config(model, **train))

    def start(self, run: Path, config: RunConfig, **options: Any) -> Trainer:
        run.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(run / "tokenizer.json")
        return Trainer(run, config, self.tokenizer, self.shards, **options)

    @staticmethod
    def outcome(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Any], list[dict[str, Any]]]:
        """Weights and optimizer state by name; progress; metrics; all of it without timings."""
        tensors = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        for name, parameter in trainer.model.named_parameters():
            for key, value in trainer.optimizer.state[parameter].items():
                tensors[f"{key}.{name}"] = value.clone()
        progress = asdict(trainer.progress) | {"seconds": None, "loader now": trainer.loader.state_dict()}
        progress["best"] = trainer.best
        return tensors, progress, without_timings(trainer.run_dir)

    @staticmethod
    def assert_same(a: Any, b: Any) -> None:
        assert a[0].keys() == b[0].keys()
        assert len(a[0]) >= 3
        different = [name for name in a[0] if not torch.equal(a[0][name], b[0][name])]
        assert different == []
        assert a[1] == b[1]
        assert a[2] == b[2]


def without_timings(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in read_metrics(run)]


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    for i in range(48):
        fox = "the quick brown fox, " * (i % 5 + 1)
        (folder / f"{i:02d}.txt").write_text(f"Document {i} says: {fox}and counts {i * 7919}.\n")
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("corpus")
    corpus = open_corpus(str(write_texts(root / "texts")), heldout=0.2)
    tokenizer = Tokenizer.train((document.text for document in corpus.documents("train")), 300)
    shards = encode(corpus, tokenizer, root / "data")
    tokenizer.save(root / "data" / "tokenizer.json")
    return Runs(root / "data", tokenizer, shards)


@pytest.fixture
def flip() -> Callable[[Path, int, int], None]:
    def flip(path: Path, at: int, bit: int) -> None:
        content = bytearray(path.read_bytes())
        content[at] ^= 1 << bit
        path.write_bytes(content)

    return flip


@pytest.fixture
def index_of() -> Callable[[Path], dict[str, Any]]:
    return lambda path: json.loads((path / "checkpoint.json").read_text())
