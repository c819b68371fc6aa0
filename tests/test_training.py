"""Training and saving from Python: planned as the command line plans it, and taken by every command."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import perspectron
from perspectron import presets, training
from perspectron.cli.main import main
from perspectron.model.config import ModelConfig
from perspectron.opening import open_model
from perspectron.quant.convert import convert
from perspectron.train.checkpoint import load_config
from perspectron.train.loop import Trainer
from perspectron.util.errors import CheckpointError, ConfigError, DataError, StorageError
from tests.refusals import refused

TEXT = "".join(f"The number {i} comes before {i + 1}, and after {i - 1}. " for i in range(3000))
SIZES = {"layers": 1, "d_model": 16, "hidden": 16, "rank": 4, "heads": 2, "kv_heads": 1, "window": 8}
SMALL = {"preset": "perspective2-tiny", "sizes": SIZES | {"vocab_size": 300}, "seq_len": 16, "batch_size": 2}
SMALL |= {"dtype": "float32", "eval_tokens": 64, "quiet": True}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(
        a.equal(b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def test_it_trains_the_run_that_the_command_line_trains(place, capfd):
    (place / "text.txt").write_text(TEXT)
    trained = perspectron.train(place / "text.txt", steps=6, lr=0.02, **SMALL)
    assert capfd.readouterr() == ("", "")
    assert trained.folder == Path("runs/text") and trained.bits_per_byte > 0
    sizes = [f"{key}={value}" for key, value in SMALL["sizes"].items()]
    words = (
        "--preset perspective2-tiny --seq-len 16 --batch-size 2 --dtype float32 --eval-tokens 64 --steps 6"
    )
    assert main(["train", "--data", "text.txt", *words.split(), "--lr", "0.02", "--set", *sizes]) == 0
    other, tokenizer = perspectron.load("runs/text-2")
    assert same(trained.model, other) and tokenizer.fingerprint == trained.tokenizer.fingerprint
    ours, theirs = (open_model(Path("runs") / name).folder.run for name in ("text", "text-2"))
    assert ours == theirs
    model, _, folder, bits = trained
    assert (model, folder, bits) == (trained.model, trained.folder, trained.bits_per_byte)


def test_it_tells_what_it_does_unless_it_is_to_be_quiet(capfd):
    perspectron.train(text=TEXT, steps=2, out="said", **(SMALL | {"quiet": False}))
    assert "said" in capfd.readouterr().err


def test_texts_are_kept_with_the_run(place):
    perspectron.train(text=TEXT, steps=2, **SMALL)
    assert (place / "runs/text/text.txt").read_text() == TEXT
    documents = [TEXT[at : at + 500] for at in range(0, 40_000, 500)]
    run = perspectron.train(text=iter(documents), steps=2, **SMALL).folder
    assert run == Path("runs/text-2") and len((run / "text.jsonl").read_text().splitlines()) == 80
    assert main(["eval", str(run), "--tokens", "64"]) == 0


def test_a_size_or_a_design_may_be_given_or_follow_from_the_tokens():
    given = {"seq_len": 32, "eval_tokens": 64, "dtype": "float32", "quiet": True}
    run = perspectron.train(text=TEXT, steps=2, design="gla", params=300_000, **given)
    size = sum(p.numel() for p in run.model.parameters())
    assert abs(size - 300_000) < 30_000 and presets.design_of(run.model.config) == "gla"
    run = perspectron.train(text=TEXT, tokens="4k", design="transformer", batch_size=1, **given)
    assert presets.design_of(run.model.config) == "transformer"
    assert open_model(run.folder).folder.of_run().train.steps == 125


def test_sizes_are_those_of_the_design_that_is_named():
    sizes = {"layers": 2, "d_model": 16, "vocab_size": 300}
    for design, shift in {"gla[heads=2]": False, "gla+[heads=2]": True}.items():
        run = perspectron.train(text=TEXT, steps=1, design=design, sizes=sizes, seq_len=16, quiet=True)
        block, _ = run.model.config.blocks
        assert presets.variant_of(run.model.config) == design and block.mixer.heads == 2
        assert run.model.config.d_model == 16 and bool(run.model.config.shift) == shift


def test_a_run_from_anothers_weights_is_called_after_its_text():
    given = {"steps": 1, "seq_len": 16, "batch_size": 2, "quiet": True}
    first = perspectron.train(text=TEXT, out="first", **given | SMALL)
    assert perspectron.train(init=first.folder, **given).folder == Path("runs/text")
    assert perspectron.train(init=first.folder, text=TEXT, **given).folder == Path("runs/text-2")


def test_a_size_of_none_is_the_usual_one():
    sizes = {"layers": np.int64(2), "d_model": np.array(16), "vocab_size": 300, "kv_heads": None}
    made = perspectron.train(text=TEXT, steps=1, design="transformer", sizes=sizes, seq_len=16, quiet=True)
    assert len(made.model.config.blocks) == 2


def test_a_design_may_name_its_optimizer():
    given = {
        "text": TEXT,
        "steps": 1,
        "sizes": {"layers": 1, "d_model": 16, "vocab_size": 300},
        "quiet": True,
    }
    run = perspectron.train(design="gla[optimizer=muon,heads=2]", seq_len=16, **given).folder
    optim = open_model(run).folder.of_run().train.optim
    assert optim.optimizer == "muon"
    with refused(ConfigError, "optimizer", "adamw", "gla[optimizer=muon]"):
        perspectron.train(design="gla[optimizer=muon]", optimizer="adamw", **given)


def test_an_interrupt_saves_the_run_which_resumes_to_the_same_weights(monkeypatch):
    step, before = Trainer.step, signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(trainer):
        if trainer.progress.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt, match="stopped"):
            perspectron.train(text=TEXT, steps=6, out="stopped", **SMALL)
    signal.signal(signal.SIGINT, before)
    assert open_model(Path("stopped")).checkpoint.progress.step == 3
    resumed = perspectron.train(resume="stopped", quiet=True)
    assert same(resumed.model, perspectron.train(text=TEXT, steps=6, out="whole", **SMALL).model)


@pytest.mark.cpu_only
@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot choose")
def test_numbers_too_small_for_full_precision_are_zero_as_in_the_command(monkeypatch):
    left, step = list[int](), Trainer.step

    def counted(trainer):
        small = torch.full((1 << 20,), 3e-36)
        left.append(int(((small * 1e-3).view(torch.int32) != 0).sum()))
        return step(trainer)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert int(((torch.full((1 << 20,), 3e-36) * 1e-3).view(torch.int32) != 0).sum()) == 1 << 20
        monkeypatch.setattr(Trainer, "step", counted)
        perspectron.train(text=TEXT, steps=2, out="flushed", **SMALL)
    finally:
        torch.set_num_threads(before)
    assert left == [0, 0]


def test_it_trains_in_a_thread_beside_the_main_one():
    runs = []
    thread = threading.Thread(
        target=lambda: runs.append(perspectron.train(text=TEXT, steps=2, out="beside", **SMALL))
    )
    thread.start()
    thread.join()
    assert runs[0].folder == Path("beside")


def test_it_starts_from_another_run_and_goes_on_with_one_of_a_constant_rate():
    open_end = perspectron.train(text=TEXT, steps=3, out="open", schedule="constant", **SMALL)
    more = perspectron.train(resume="open", steps=5, quiet=True)
    assert not same(open_end.model, more.model)
    options = {key: SMALL[key] for key in ("seq_len", "batch_size", "dtype", "eval_tokens", "quiet")}
    tuned = perspectron.train(text=TEXT, init="open", steps=2, out="tuned", **options)
    assert tuned.model.config == more.model.config


def test_of_another_runs_text_no_more_is_held_out_than_by_it():
    Path("text.txt").write_text(TEXT)
    perspectron.train("text.txt", steps=1, out="less", heldout=0.02, **SMALL)
    options = {key: SMALL[key] for key in ("seq_len", "batch_size", "dtype", "eval_tokens", "quiet")}
    perspectron.train(init="less", steps=1, out="after", **options)
    assert load_config(Path("after")).train.heldout == 0.02
    with refused(ConfigError, "heldout", 0.1, 0.02):
        perspectron.train("text.txt", init="less", steps=1, heldout=0.1, **options)


@pytest.mark.parametrize(
    ("error", "named", "given"),
    [
        (ConfigError, "data", {}),
        (ConfigError, "data", {"data": "a.txt", "text": TEXT}),
        (ConfigError, "minutes", {"text": TEXT, "minutes": 1, "steps": 2}),
        (ConfigError, "lrr", {"text": TEXT, "lrr": 2}),
        (ConfigError, "lr", {"text": TEXT, "lr": "high"}),
        (ConfigError, "design", {"text": TEXT, "design": "nothing"}),
        (ConfigError, "params", {"text": TEXT, "preset": "perspective2-tiny", "params": 300_000}),
        (ConfigError, "params", {"text": TEXT, "sizes": {"layers": 2}, "params": 300_000, "steps": 1}),
        (ConfigError, "params", {"text": TEXT, "params": 0, "steps": 1}),
        (ConfigError, "params", {"text": TEXT, "init": "none", "params": 300_000, "steps": 1}),
        (ConfigError, "design", {"text": TEXT, "init": "none", "design": "gla", "steps": 1}),
        (ConfigError, "text", {"text": []}),
        (ConfigError, "text", {"text": [3]}),
        (ConfigError, "text", {"text": [TEXT, TEXT[::-1], None]}),
        (ConfigError, "text", {"text": TEXT + "\ud83d"}),
        (ConfigError, "text", {"text": TEXT.encode()}),
        (ConfigError, "data", {"data": 5}),
        (ConfigError, "data", {"data": b"a.txt"}),
        (ConfigError, "out", {"text": TEXT, "out": 5}),
        (ConfigError, "resume", {"resume": 5}),
        (ConfigError, "design", {"text": TEXT, "design": 3}),
        (ConfigError, "sizes", {"text": TEXT, "sizes": ["d_model"]}),
        (ConfigError, "shift", {"text": TEXT, "sizes": {"shift": {"k"}}, "steps": 1}),
        (ConfigError, "layers", {"text": TEXT, "sizes": {"layers": np.arange(2)}, "steps": 1}),
        (ConfigError, "layers", {"text": TEXT, "sizes": {"layers": [np.int64(2)]}, "steps": 1}),
        (ConfigError, "name", {"text": TEXT, "preset": "gla-tiny", "sizes": {"name": "mine"}, "steps": 1}),
        (
            ConfigError,
            "input_conv",
            {"text": TEXT, "sizes": {"input_conv": [], "input_swish": True}, "steps": 1},
        ),
        (ConfigError, "compile", {"text": TEXT, "compile": True, "recompute": True, "steps": 1}),
        (ConfigError, "lora", {"text": TEXT, "init": "none", "lora": "rank=8,rank=4", "steps": 1}),
        (ConfigError, "minutes", {"text": TEXT, "minutes": "1"}),
        (ConfigError, "epochs", {"text": TEXT, "epochs": "1"}),
        (ConfigError, "params", {"text": TEXT, "params": "300k", "steps": 1}),
        (ConfigError, "tokens", {"text": TEXT, "tokens": float("nan")}),
        (ConfigError, "eval_tokens", {"text": TEXT, "eval_tokens": 1, "steps": 1}),
        (DataError, "seq_len", {"text": "too short", "steps": 2}),
        (DataError, "nothing.txt", {"data": "nothing.txt"}),
        (DataError, "a.txt", {"data": ["a.txt", "b.txt"]}),
        (ConfigError, "tokens", {"text": TEXT, "tokens": "many"}),
        (CheckpointError, "none", {"resume": "none"}),
        (ConfigError, "lr", {"resume": "none", "lr": 0.1}),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_leaves_nothing(place, error, named, given):
    with refused(error, named):
        perspectron.train(**{"out": "refused" if "resume" not in given else None, "quiet": True} | given)
    assert not (place / "refused").exists()


def test_a_file_that_a_text_would_replace_stays(place):
    (place / "notes").mkdir()
    (place / "notes/text.txt").write_text("mine")
    with refused(ConfigError, "out", "notes"):
        perspectron.train(text=TEXT, steps=2, out="notes", **SMALL)
    assert [path.name for path in (place / "notes").iterdir()] == ["text.txt"]
    assert (place / "notes/text.txt").read_text() == "mine"


def test_tokens_may_be_a_float(monkeypatch):
    asked = []
    monkeypatch.setattr(training.Train, "__call__", lambda self: asked.append(self.tokens) or 2)
    with pytest.raises(SystemExit):
        perspectron.train(text=TEXT, tokens=2e6, out="many", quiet=True)
    assert asked == ["2000000"]


def test_a_run_that_is_there_is_not_trained_over():
    perspectron.train(text=TEXT, steps=2, out="there", **SMALL)
    for given in ({"text": TEXT}, {"data": "there/text.txt"}):
        with refused(ConfigError, "there", "resume"):
            perspectron.train(**given, steps=2, out="there", **SMALL)


# ---------------------------------------------------------------- saving


def by_hand(vocab_size: int = 300) -> tuple[perspectron.LanguageModel, perspectron.Tokenizer]:
    """A model trained by a plain loop."""
    tokenizer = perspectron.Tokenizer.train([TEXT], 300)
    model = perspectron.build(presets.get("perspective2-tiny", **SIZES, vocab_size=vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    ids = torch.tensor(tokenizer.encode(TEXT))
    for start in range(0, 320, 64):
        window = ids[None, start : start + 65]
        loss = F.cross_entropy(model(window[:, :-1]).logits[0], window[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, tokenizer


def test_a_model_made_by_hand_is_a_run_for_every_command(place):
    model, tokenizer = by_hand()
    folder = perspectron.save(model, tokenizer, "by-hand", seq_len=64)
    loaded, its = perspectron.load(folder)
    assert same(model, loaded) and its.fingerprint == tokenizer.fingerprint
    (place / "text.txt").write_text(TEXT)
    small = "--steps 2 --batch-size 2 --seq-len 16 --eval-tokens 64 --dtype float32"
    for command in (
        "generate by-hand The --max-tokens 4",
        "inspect by-hand",
        "eval by-hand --data text.txt --tokens 64",
        "quantize by-hand --out packed --linear int8 --calibrate text.txt --windows 2",
        "generate packed The --max-tokens 4",
        "export by-hand --hf exported",
        f"train --init by-hand --data text.txt --out tuned {small}",
    ):
        assert main(command.split()) == 0, command


def test_saving_over_something_is_refused_and_a_failure_leaves_nothing(place, monkeypatch):
    model, tokenizer = by_hand()
    perspectron.save(model, tokenizer, "run")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    with refused(ConfigError, "run"):
        perspectron.save(model, tokenizer, "run")
    (place / "file").write_text("mine")
    (place / "full").mkdir()
    (place / "full" / "notes").write_text("mine")
    for taken in ("file", "full"):
        with refused(ConfigError, taken):
            perspectron.save(model, tokenizer, taken)
    assert before == {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    (place / "empty").mkdir()
    perspectron.save(model, tokenizer, place / "empty")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("perspectron.train.checkpoint.save_tensors", full)
    with refused(StorageError, "never"):
        perspectron.save(model, tokenizer, "never")
    assert sorted(path.name for path in place.iterdir()) == ["empty", "file", "full", "run"]


def test_a_vocabulary_that_does_not_fit_and_weights_that_are_no_runs_are_refused():
    model, tokenizer = by_hand()
    large = perspectron.Tokenizer.train([TEXT], 320)
    if large.vocab_size > model.config.vocab_size:
        with refused(ConfigError, "vocab_size", large.vocab_size):
            perspectron.save(model, large, "unfit")
    assert large.vocab_size > 300
    with refused(ConfigError, "model"):
        perspectron.save(model.double(), tokenizer, "double")
    packed = by_hand()[0]
    convert(packed, "int8")
    with refused(ConfigError, "model"):
        perspectron.save(packed, tokenizer, "packed")
    assert (
        isinstance(model.config, ModelConfig) and not Path("unfit").exists() and not Path("packed").exists()
    )


def test_importing_the_package_stays_light_and_its_names_are_there():
    code = (
        "import sys, perspectron; heavy = {'torch', 'numpy', 'tyro', 'rich', 'tokenizers'} & set(sys.modules);"
        "assert not heavy, heavy; perspectron.load; assert callable(perspectron.train);"
        "import perspectron.train.checkpoint; assert callable(perspectron.train)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
