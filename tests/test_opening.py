"""Opening a folder: the text that an artifact was trained on, and what is read of a run."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import torch

import perspectron
from perspectron import presets
from perspectron.data import Tokenizer, encode, open_corpus
from perspectron.designs.perspective.adapt.adapter import Adapter
from perspectron.designs.perspective.adapt.gradient import Piece, by_traces, losses
from perspectron.model.model import LanguageModel, build
from perspectron.opening import Folder, Opened, open_model
from perspectron.stream.artifact import Trained
from perspectron.train import checkpoint
from perspectron.train.checkpoint import Progress
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.util.errors import DataError
from tests.refusals import refused


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
    with refused(DataError, own.fingerprint[:12]):
        Opened(folder, model, other).shards(tmp_path / "new")


def test_a_run_is_opened_in_few_rooms_and_its_config_read_once(tmp_path, monkeypatch) -> None:
    """However many checkpoints repeat the config; one that has another is read by itself."""
    place = Path(__file__).parents[1] / "benchmarks" / "stays.py"
    spec = importlib.util.spec_from_file_location("stays", place)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(script := importlib.util.module_from_spec(spec))
    tokenizer = Tokenizer.train(["the quick brown fox " * 40], 280)
    model = build(presets.get("perspective-tiny", vocab_size=280))
    config, run = RunConfig(model.config, TrainConfig(data="x", keep=9)), tmp_path / "run"
    checkpoint.export(run, config, tokenizer, model, Progress(step=1))
    for step in (2, 3, 4):
        checkpoint.save(run, config, tokenizer, model, None, Progress(step=step))
    assert script.stays(lambda: open_model(run)).total() <= 35
    read, own = [], checkpoint.run_config
    monkeypatch.setattr(checkpoint, "run_config", lambda *args: read.append(args) or own(*args))
    assert open_model(run).folder.run == config and len(read) == 1
    other = replace(config, train=replace(config.train, batch_size=3))
    checkpoint.save(run, other, tokenizer, model, None, Progress(step=5))
    read.clear()
    assert open_model(run).folder.run == config and len(read) == 2


def test_a_model_that_was_loaded_drops_nothing_also_with_gradients(tmp_path: Path) -> None:
    """As where an adapter learns while a text is read."""
    tokenizer = Tokenizer.train(["the quick brown fox " * 40], 280)
    sizes = {
        "vocab_size": 280,
        "d_model": 16,
        "layers": 4,
        "hidden": 16,
        "heads": 2,
        "kv_heads": 1,
        "rank": 4,
    }
    model = build(presets.get("perspective-tiny-dense", **sizes, dropout=0.3)).eval()
    perspectron.save(model, tokenizer, tmp_path / "run")
    loaded, _ = perspectron.load(tmp_path / "run")
    ids = list(range(4, 24))
    assert torch.equal(loaded(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)
    adapter = Adapter(loaded)
    piece = Piece(ids, adapter.attach(loaded.init_state(1), traces=True), fresh=True)
    with torch.no_grad():
        plain, _ = losses(model, Piece(ids, model.init_state(1), fresh=True))
    torch.testing.assert_close(by_traces(loaded, piece, adapter.up)[0], plain[0])
