"""A short run of the fuzzer over every format, four times as long in `.ci/nightly`; `python -m tests.fuzz` is as long
as it is told to be."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.formats import FORMATS
from tests.fuzz.memory import CASES, ROOM
from tests.fuzz.mutate import header_of, mutated, with_header
from tests.long import length

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = {
    10: ["results"],
    80: ["artifact"],
    90: ["template"],
    100: ["hf-perspectron", "hf-gpt2", "hf-llama", "hf-mamba2", "hf-bamba", "hf-gguf"],
    150: ["run-config", "checkpoint"],
    200: ["adapter", "polytope", "session-parts"],
    250: ["metrics", "trace", "experts", "packed-state", "state", "session", "shards", "tokenizer"],
}
ALIKE = (
    "200,000 empty tensors",
    "86 MiB of extra",
    "nested lists in extra",
    "fields in extra",
    "texts in extra",
)
ALIKE += ("equal numbers in extra",)
"""Cases of memory that are larger than another of their kind, or a variant of it."""


def test_every_format_is_among_them():
    assert sorted(itertools.chain(*MUTANTS.values())) == sorted(FORMATS)


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("mutants", MUTANTS)
def test_mutants_are_refused_in_a_line_or_read(mutants):
    """In processes of its own, so that a crash is told and not suffered. The seed is drawn, and printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    count = length(mutants, -(-mutants // 4))
    command = [sys.executable, "-m", "tests.fuzz", "--mutants", str(count), "--formats", *MUTANTS[mutants]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.nightly
def test_reading_takes_no_more_than_the_file_and_64_MiB():
    """Whatever its header claims, whether it is refused or not."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    cases = [name for name in CASES if length(True, name not in ALIKE)]
    done = subprocess.run([sys.executable, "-m", "tests.fuzz.memory", *cases], cwd=ROOT, env=environment,
                          capture_output=True, text=True)  # fmt: skip
    found = dict(line.split("\t") for line in done.stdout.splitlines())
    assert {json.loads(name) for name in found} == set(cases), done.stdout[-4000:] + done.stderr[-4000:]
    for name, line in found.items():
        about = json.loads(line)
        assert about["took"] <= about["bytes"] + ROOM, (name, about)


@pytest.mark.parametrize("kind", ["json", "lines", "safetensors", "bytes", "template"])
def test_mutants_differ_and_can_be_made_again(kind):
    header = {"__metadata__": {"a": "1"}, "x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    good = {
        "json": json.dumps({"a": [1, 2.5, "x"], "b": {"c": None}}).encode(),
        "lines": b'{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n',
        "safetensors": with_header(header, bytes(16)),
        "bytes": bytes(range(256)),
        "template": b"{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}",
    }[kind]
    made = [mutated(good, Random(seed), kind) for seed in range(100)]
    assert made == [mutated(good, Random(seed), kind) for seed in range(100)]
    assert sum(mutant != good for mutant in made) > 83
    assert len(set(made)) > 50


def test_a_reader_that_believes_is_caught(tmp_path, capfd):
    """Of the fuzzer itself: it tells a traceback, a signal, a hang and contents that were changed and believed."""
    from tests.fuzz.formats import Format, digest
    from tests.fuzz.run import fuzz

    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / "file").write_bytes(b"0123456789" * 5)

    def read(path: Path) -> str:
        data = path.read_bytes()
        if len(data) > 50:
            os.kill(os.getpid(), 11)
        if len(data) < 50:
            raise ValueError(len(data))
        while data.startswith(b"1"):
            pass
        return digest(data)

    made = Format(
        "believer", tmp_path / "sample", tmp_path / "sample" / "file", {"file": "bytes"}, True, read
    )
    outcome = fuzz(made, 60, 1, tmp_path)
    assert outcome.mutants == 60 or len(outcome.failures) >= 50
    assert min(outcome.counts[kind] for kind in ("tracebacks", "signals", "believed")) > 0, outcome.counts
    assert header_of(with_header({"a": {}}, b"x"))[0] == {"a": {}}
