"""Nothing beside a text changes a bit of it, no other text and no cut; where something does, it is said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import perspectron
from perspectron import presets
from perspectron.cli.main import main
from perspectron.data import Tokenizer
from perspectron.decode import batch, verify
from perspectron.ops import fused
from perspectron.util.errors import ConfigError
from tests.decode.conftest import make
from tests.decode.test_steps import ATTENTION, attentive
from tests.decode.test_store import small
from tests.refusals import names, refused

pytestmark = pytest.mark.cpu_only("the same bits alone and together are promised on a CPU")


@pytest.mark.parametrize("design", presets.DESIGNS)
def test_the_same_bits_alone_and_in_any_batch(design: str, tokenizer) -> None:
    found = verify.ways(small(design), tokenizer, batches=(1, 8, 19), pieces=(5,), threads=(1,))
    assert len(found) == 8 and all(way.promised for way in found)
    for together in (False, True):
        assert len({way.digest for way in found if way.together == together}) == 1, found


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_every_kind_has_the_same_bits_alone_and_in_any_batch(name: str, tokenizer) -> None:
    found = verify.ways(attentive(name), tokenizer, batches=(1, 8, 19), pieces=(1, 5), threads=(1,))
    assert all(way.promised for way in found)
    for together in (False, True):
        assert len({way.digest for way in found if way.together == together}) == 1, found


def two_threads(file: str) -> None:
    """At sizes at which torch divides the work: it cuts the keys of one query, and vectors where a piece ends."""
    tokenizer = Tokenizer.load(Path(file))
    for design in ("perspective", "perspective2", "adr", "lens", "gpt2", "transformer", "ssd", "gdn"):
        config = presets.solve(design, 2_000_000, vocab_size=tokenizer.vocab_size, seq_len=512)
        found = verify.ways(perspectron.build(config), tokenizer, batches=(1,), pieces=())
        assert len(found) == 4
        for together in (False, True):
            assert len({way.digest for way in found if way.together == together}) == 1, (design, found)


@pytest.mark.slow
def test_two_threads_have_the_bits_of_one(tokenizer, tmp_path) -> None:
    """In a process of its own: MKL reads once that it is to give products the same bits on any number of threads, which
    on Intel's processors it does not otherwise."""
    tokenizer.save(tmp_path / "tokenizer.json")
    program = "import sys; from tests.decode.test_verify import two_threads; two_threads(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "tokenizer.json")],
        env=os.environ | {"MKL_CBWR": "AUTO,STRICT"}, cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("design", ["perspective", "perspective2", "gla", "hgrn2", "gdn"])
def test_pieces_of_any_length_have_the_bits_of_one_thread_on_two(design: str) -> None:
    """107 × 416 numbers, which torch cuts in two within a vector."""
    sizes = {"vocab_size": 300, "d_model": 416, "layers": 3 if design == "perspective2" else 2, "hidden": 420}
    model = perspectron.build(presets.get(design, **sizes)).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(12)
    ids_BT = torch.randint(1, 300, (1, 107), generator=torch.Generator().manual_seed(7))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with torch.no_grad():
                found.append(model.hidden(ids_BT, model.init_state(1))[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_activations_end_at_no_piece_of_a_thread() -> None:
    x = torch.randn(23, 1500, generator=torch.Generator().manual_seed(1))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with torch.no_grad():
                found.append(fused.batch_invariant(F.silu, x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], F.silu(x))


def test_a_model_of_few_positions_is_verified_and_one_of_too_few_refused(tokenizer) -> None:
    sizes = {"vocab_size": tokenizer.vocab_size, "layers": 1, "d_model": 32, "heads": 2}
    model, short = (
        perspectron.build(presets.get("gpt2-tiny", **sizes, positions=count)).eval() for count in (16, 15)
    )
    found = verify.ways(model, tokenizer, batches=(1, 9), pieces=(3,), threads=(1,))
    assert len({way.digest for way in found if not way.together}) == 1
    with refused(ConfigError, "positions", 15):
        verify.digest(short, tokenizer)


def test_what_differs_is_seen(tokenizer, monkeypatch) -> None:
    """Batches that are not filled up differ, and so does another text."""
    model = make("transformer-tiny")
    told = verify.digest(model, tokenizer, together=True)
    monkeypatch.setattr(batch, "WIDTH", 1)
    assert len({told, *(verify.digest(model, tokenizer, together=True, others=n) for n in (0, 2, 8))}) > 1
    monkeypatch.undo()
    with torch.no_grad():
        model.embedding.weight[7] *= 1 + 1e-5
    assert verify.digest(model, tokenizer, together=True) != told


def test_gates_of_few_heads_depend_on_no_other_row(tokenizer) -> None:
    """torch computes the end of a vector in another way, and a batch decides who stands there."""
    sizes = {"d_model": 48, "layers": 2, "hidden": 64, "vocab_size": tokenizer.vocab_size}
    model = perspectron.build(presets.get("mamba3", **sizes))
    said = [verify.digest(model, tokenizer, together=True, others=n) for n in (0, 15)]
    assert len(set(said)) == 1


def test_the_command_says_which_ways_agree_and_fails_where_one_differs(capsys, monkeypatch) -> None:
    run = "tests/vectors/run"
    for name, few in (("BATCHES", (1, 3)), ("PIECES", (5,))):
        monkeypatch.setattr(verify.ways, "__kwdefaults__", verify.ways.__kwdefaults__ | {name.lower(): few})
    assert main(["verify", run, "--here"]) == 0
    said = capsys.readouterr().out
    assert names(said, 1, 3, 5)
    assert main(["verify", run, "--here", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"]
    monkeypatch.setattr(batch, "WIDTH", 1)
    code = main(["verify", run, "--here"])
    captured = capsys.readouterr()
    assert code == ("differ: batch of 3" in captured.out) and bool(captured.err) == bool(code)
