"""A file of a state to which later saves append: the state comes back, and what is new is all that is written."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
import torch.utils._pytree as pytree
from safetensors.torch import load_file

import perspectron
from perspectron import presets
from perspectron.model import appended
from perspectron.util.errors import StateError, StorageError
from tests.refusals import refused

T = 300


@pytest.fixture(autouse=True)
def small_files_grow(monkeypatch):
    monkeypatch.setattr(appended, "LEAST", 1000)


@pytest.fixture(scope="module")
def model() -> perspectron.LanguageModel:
    return perspectron.build(presets.small("gpt2", vocab_size=67, d_model=64, layers=2, seq_len=2 * T))


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(67, (1, 2 * T), generator=torch.Generator().manual_seed(0))


def after(model, ids, *ends: int) -> list[perspectron.LMState]:
    """The states of one text after so many tokens."""
    state, start, states = model.init_state(len(ids)), 0, []
    with torch.inference_mode():
        for end in ends:
            state, start = model(ids[:, start:end], state).state, end
            states.append(state.fork())
    return states


def same(a, b) -> bool:
    pairs = zip(pytree.tree_leaves(a.filled()), pytree.tree_leaves(b.filled()), strict=True)
    return all(torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in pairs)


def save(path: Path, model, state, text: object = None) -> int:
    """Bytes by which the file has grown, negative where it was written anew."""
    before = path.stat() if path.exists() else None
    perspectron.save_state(path, state, model, extra={"text": text})
    now = path.stat()
    kept = before is not None and before.st_ino == now.st_ino
    return now.st_size - before.st_size if kept and before is not None else -now.st_size


def test_a_second_save_writes_what_is_new(model, ids, tmp_path):
    path, turns = tmp_path / "s", after(model, ids, T, T + 10, T + 11, T + 80, T + 150)
    first = -save(path, model, turns[0], 0)
    assert load_file(path).keys() >= {"layers[0].k_BHSK", "layers[1].v_BHSV"}, "safetensors"
    per_token, tokens = 2 * 2 * 64 * 4, T
    for turn, state in enumerate(turns[1:], 1):
        new = int(state.layers[0].length_B) - tokens
        tokens += new
        assert 0 < save(path, model, state, turn) <= new * per_token + 2500
        assert same(perspectron.load_state(path, model), state)
        assert perspectron.load_extra(path) == {"text": turn}
    assert path.stat().st_size < first + 150 * per_token + 4 * 2500


def test_a_text_that_went_back_replaces_what_it_had(model, ids, tmp_path):
    path, other = tmp_path / "s", ids.clone()
    other[:, 200:] = (other[:, 200:] + 1) % 67
    states = after(model, ids, 200, T, T + 30) + after(model, other, 200, T + 30) + after(model, ids, T + 60)
    states = [*states[1:3], *states[4:]]
    grown = []
    for state in states:
        grown.append(save(path, model, state))
        assert same(perspectron.load_state(path, model), state)
    assert grown[2] > 0, "a page and what follows"


def test_a_text_that_went_back_behind_a_part_without_slots(model, ids, tmp_path):
    path, (short, long) = tmp_path / "s", after(model, ids, T + 10, T + 20)
    save(path, model, long, 0)
    for turn, state in enumerate((long, long, short, short, long), 1):
        assert save(path, model, state, turn) > 0
        assert same(perspectron.load_state(path, model), state)
        assert perspectron.load_extra(path) == {"text": turn}


def test_a_file_of_which_half_is_no_longer_used_is_written_anew(model, ids, tmp_path):
    path, other = tmp_path / "s", (ids + 1) % 67
    states = [after(model, text, T)[0] for text in (ids, other)]
    save(path, model, states[0])
    assert save(path, model, states[1]) < 0, "nothing is shared"
    sizes, last = [], states[1]
    for turn in range(40):
        sizes.append(save(path, model, last, "x" * 20_000))
        assert path.stat().st_size < 2 * 320_000 + 25_000
        assert perspectron.load_extra(path) == {"text": "x" * 20_000}, turn
    assert min(sizes) < 0 < max(sizes)


def test_rows_of_a_batch_are_kept_by_what_they_hold(model, ids, tmp_path):
    path, both = tmp_path / "s", torch.cat([ids, ids.flip(1)])
    for state in after(model, both, T, T + 40):
        save(path, model, state)
        assert same(perspectron.load_state(path, model), state)


@pytest.fixture
def saved(model, ids, tmp_path):
    """(a file of three parts, the file before the last of them, the states of both)"""
    states, path = after(model, ids, T, T + 20, T + 70), tmp_path / "s.state"
    save(path, model, states[0]), save(path, model, states[1])
    before = path.read_bytes()
    assert save(path, model, states[2]) > 0
    return path, before, states[1], states[2]


def loaded(path: Path, model):
    with contextlib.suppress(StateError):
        return perspectron.load_state(path, model)
    return None


def test_an_append_that_was_cut_anywhere_is_the_old_state_or_the_new(model, saved):
    """What a kill leaves: data up to anywhere, and the field `end` as it was; or all of it."""
    path, before, old, new = saved
    whole, draw = path.read_bytes(), random.Random(0)
    changed = [i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b]
    assert changed[0] >= 32 and changed[-1] < 64, "the field `end` alone"
    for length in (
        len(before),
        len(before) + 1,
        *(draw.randrange(len(before), len(whole)) for _ in range(30)),
    ):
        path.write_bytes(before + whole[len(before) : length])
        assert same(perspectron.load_state(path, model), old)
    save(path, model, new)
    assert same(perspectron.load_state(path, model), new)
    for length in (*range(0, len(whole), 10_007), len(before), len(whole) - 1):
        path.write_bytes(whole[:length])
        assert loaded(path, model) is None, "cut short"


def test_one_other_byte_anywhere_never_loads_other_values(model, saved):
    path, _, _, new = saved
    whole, draw, refused = path.read_bytes(), random.Random(1), 0
    for where in (*range(64), *(draw.randrange(len(whole)) for _ in range(300))):
        damaged = bytearray(whole)
        damaged[where] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        state = loaded(path, model)
        refused += state is None
        assert state is None or same(state, new)
    assert refused > 300


@pytest.mark.parametrize("call", ["pwrite", "fsync", "ftruncate"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_disk_that_fills_up_and_an_interruption_leave_the_old_file(
    call, error, model, ids, saved, monkeypatch
):
    path, _, _, new = saved
    before, later = path.read_bytes(), after(model, ids, T, T + 20, T + 70, T + 110)[-1]
    original, calls = getattr(os, call), []

    def failing(*args):
        calls.append(args)
        if len(calls) == 2 or call == "ftruncate":
            raise error
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StorageError):
            perspectron.save_state(path, later, model)
    if call != "ftruncate":
        assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]
    assert same(perspectron.load_state(path, model), new)
    save(path, model, later)
    assert same(perspectron.load_state(path, model), later)


def test_many_that_save_to_one_file_leave_a_state_of_one_of_them(model, ids, saved):
    path, *_ = saved
    states = after(model, ids, T, T + 20, T + 70, *range(T + 80, T + 140, 10))[3:]
    threads = [
        threading.Thread(target=lambda s=state: [save(path, model, s) for _ in range(5)]) for state in states
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        state = perspectron.load_state(path, model)  # whoever reads meanwhile gets one of them, too
        assert int(state.layers[0].length_B) >= T + 70
    for thread in threads:
        thread.join()
    assert any(same(perspectron.load_state(path, model), state) for state in states)


def test_a_file_of_another_model_or_a_link_is_not_appended_to(model, ids, saved):
    path, *_ = saved
    twin = perspectron.build(
        presets.small("gpt2", vocab_size=67, d_model=64, layers=2, seq_len=2 * T), seed=1
    )
    state = after(twin, ids, T)[0]
    assert save(path, twin, state) < 0 and same(perspectron.load_state(path, twin), state)
    link = path.with_name("link")
    link.symlink_to(path)
    with refused(StorageError, link):
        perspectron.save_state(link, state, twin)


def test_a_reader_that_has_the_file_open_keeps_its_state(model, ids, saved):
    """Parts are never changed, so that what was read of the old file stays."""
    path, before, *_ = saved
    with path.open("rb") as file:
        later = after(model, ids, T, T + 20, T + 70, T + 110)[-1]
        save(path, model, later)
        whole = file.read()
    assert whole[64 : len(before)] == before[64:]


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_one_of_the_states(model, ids, tmp_path):
    """A program that saves after each token, killed several times."""
    path = tmp_path / "s.state"
    program = textwrap.dedent(f"""
        import torch, perspectron
        from perspectron import presets
        from perspectron.model import appended
        appended.LEAST = 1000
        model = perspectron.build(presets.small("gpt2", vocab_size=67, d_model=64, layers=2, seq_len={2 * T}))
        ids = torch.randint(67, (1, {2 * T}), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            state = model(ids[:, :{T}]).state
            print("begun", flush=True)
            for turn in range({T}, {2 * T}):
                state = model(ids[:, turn:turn + 1], state).state
                perspectron.save_state({str(path)!r}, state, model, extra={{"turn": turn}})
    """)
    draw = random.Random(0)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None and process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0.05, 0.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if path.exists():
            turn = perspectron.load_extra(path)["turn"]
            assert int(perspectron.load_state(path, model).layers[0].length_B) == turn + 1
    assert path.exists()
