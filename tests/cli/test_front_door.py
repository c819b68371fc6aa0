"""What a newcomer meets in every command: progress of what takes long, and ablations of any run."""

import io
import re
from pathlib import Path

import pytest

from perspectron.cli.main import main
from perspectron.cli.progress import Work

SMALL = ["--set", "d_model=32", "layers=3", "heads=2", "kv_heads=1", "hidden=32", "rank=4", "vocab_size=300"]
QUICK = ["--steps", "2", "--seq-len", "32", "--batch-size", "2", "--eval-every", "0", "--eval-tokens", "64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a text and a run of the default design on it."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "play.txt").write_text("".join(f"KING {i}: The cat sat on mat {i * 7}.\n" for i in range(300)))
    data, out = str(folder / "play.txt"), str(folder / "run")
    assert main(["train", "--data", data, "--out", out, "--dtype", "float32", *QUICK, *SMALL]) == 0
    return folder


def test_any_run_can_be_ablated_and_each_ablation_is_described(folder, capsys):
    assert main(["ablate", str(folder / "run")]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"no_shift", "no_first_values", "no_gqa", "no_embedding_norm", "half_depth"} <= lines.keys()
    assert all(len(about.split()) > 2 for about in lines.values())


TAKES_LONG = {
    "train": (
        ["train", "--data", "{}/play.txt", "--out", "{}/again", *QUICK, *SMALL],
        ["reading and encoding the text", "timing this machine", "building perspective2", "a first pass"],
    ),
    "a long prompt": (
        ["generate", "{}/run", "KING", "--max-tokens", "1"],
        ["loading {}/run", "reading the prompt"],
    ),
    "the loss": (["eval", "{}/run"], ["reading the text", "measuring perplexity"]),
    "a suite": (
        ["eval", "{}/run", "--suite", "calibration", "--tokens", "64"],
        ["loading {}/run", "measuring calibration"],
    ),
    "packing": (
        ["quantize", "{}/run", "--out", "{}/packed", "--windows", "2", "--tokens", "64"],
        ["loading {}/run", "measuring the held-out loss", "packing perspective2"],
    ),
}


@pytest.mark.parametrize(("arguments", "said"), TAKES_LONG.values(), ids=TAKES_LONG)
def test_what_may_take_long_reports_progress(arguments, said, folder, monkeypatch, capsys):
    begun: list[str] = []
    enter = Work.__enter__

    def recorded(self: Work) -> Work:
        begun.append(self.what)
        return enter(self)

    monkeypatch.setattr(Work, "__enter__", recorded)
    assert main([word.format(folder) for word in arguments]) == 0
    missing = [what for what in said if not any(work.startswith(what.format(folder)) for work in begun)]
    assert missing == [], begun


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("coloured", [False, True])
def test_help_on_a_terminal_of_forty_columns_and_without_colours(coloured, monkeypatch):
    """The list of options fits; examples are left whole, so that they can be copied."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    (monkeypatch.delenv if coloured else monkeypatch.setenv)(*("NO_COLOR", False if coloured else "1"))
    said = Terminal()
    monkeypatch.setattr("sys.stdout", said)
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    assert ("\x1b[" in said.getvalue()) == coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())
    rest = [line for line in plain.splitlines() if "perspectron chat" not in line]
    assert len(rest) > 30 and max(map(len, rest)) <= 40
