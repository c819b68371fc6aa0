"""A saved state comes back whole or not at all."""

import builtins
import contextlib
import dataclasses
import errno
import json
import math
import os
import pickle
import random
import resource
from pathlib import Path

import pytest
import torch
import torch.utils._pytree as pytree
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import perspectron
import perspectron.model.state as state_module
from perspectron import presets
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.model import appended, narrow
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.mixer import mixers
from perspectron.util.errors import StateError, StorageError
from perspectron.util.files import MAX_JSON
from tests.long import some
from tests.refusals import refused
from tests.states import sealed

CONFIG = ModelConfig(
    "every mixer", 11, 16, tuple(BlockConfig(entry.small, SwiGLUConfig(8)) for entry in mixers().values())
)
EXTRA = {"prompt": "Ein Schluß → 終\n", "tokens": [3, 1, 4], "seed": 12345, "temperature": 0.7, "stop": None}


@pytest.fixture(scope="module")
def model() -> perspectron.LanguageModel:
    return perspectron.build(CONFIG)


def ids(T: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(11, (2, T), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def state(model) -> perspectron.LMState:
    with torch.inference_mode():
        return model(ids(20)).state


@pytest.fixture
def path(model, state, tmp_path) -> Path:
    perspectron.save_state(tmp_path / "chat.state", state, model, extra=EXTRA)
    return tmp_path / "chat.state"


def continued(model, state) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids(9, seed=1), state.fork().to(model.device)).logits


def unread(path: Path, model) -> None:
    """Neither the state nor what was saved with it loads, and the error is one line that names the file."""
    for call in (lambda: perspectron.load_state(path, model), lambda: perspectron.load_extra(path)):
        with refused(StateError, path):
            call()


def test_a_saved_state_comes_back_whole(model, state, path):
    loaded = perspectron.load_state(path, model)
    assert torch.equal(continued(model, loaded), continued(model, state))
    assert perspectron.load_extra(path) == EXTRA
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in state.layers]
    assert loaded.nbytes == state.nbytes
    assert os.listdir(path.parent) == ["chat.state"]


def test_extra_is_empty_unless_given(model, state, tmp_path):
    perspectron.save_state(tmp_path / "a", state, model)
    assert perspectron.load_extra(tmp_path / "a") == {}


def test_saving_replaces_and_makes_folders(model, state, path):
    later = path.parent / "new" / "folder" / "chat.state"
    for target in (path, later):
        with torch.inference_mode():
            other = model(ids(3)).state
        perspectron.save_state(target, other, model, extra={"turn": 2})
        assert torch.equal(continued(model, perspectron.load_state(target, model)), continued(model, other))
        assert perspectron.load_extra(target) == {"turn": 2}


def test_saving_with_gradients_and_detaching(model, tmp_path):
    state = model(ids(20)).state
    assert any(leaf.requires_grad for leaf in pytree.tree_leaves(state) if torch.is_tensor(leaf))
    perspectron.save_state(tmp_path / "a", state, model)
    loaded = perspectron.load_state(tmp_path / "a", model)
    for kept in (loaded, state.detach()):
        assert not any(leaf.requires_grad for leaf in pytree.tree_leaves(kept) if torch.is_tensor(leaf))
        assert torch.equal(continued(model, kept), continued(model, state))


# ---------------------------------------------------------------- rows


SINGLE = {
    name: ModelConfig(name, 11, 16, (BlockConfig(entry.small, SwiGLUConfig(8)),))
    for name, entry in mixers().items()
}
every_mixer = pytest.mark.parametrize("name", SINGLE)


def leaves(state) -> list:
    return pytree.tree_leaves(state)


def same(a, b) -> None:
    assert len(leaves(a)) == len(leaves(b))
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype if torch.is_tensor(x) else x == y


def prefix(model, T: int, seed: int) -> perspectron.LMState:
    """One row that has read T tokens."""
    with torch.inference_mode():
        return model(ids(T, seed)[:1]).state if T else model.init_state(1)


def goes_on(model, state, steps: int = 6) -> torch.Tensor:
    """Logits of one row, token by token and then in a chunk."""
    state, text, outputs = state.fork(), ids(2 * steps, seed=9)[:1].expand(state.batch_size, -1), []
    with torch.inference_mode():
        for t in range(steps):
            out = model(text[:, t : t + 1], state)
            state, outputs = out.state, [*outputs, out.logits]
        outputs.append(model(text[:, steps:], state).logits)
    return torch.cat(outputs, 1)


@every_mixer
def test_a_stack_of_its_rows_is_the_state(name):
    model = perspectron.build(SINGLE[name])
    with torch.inference_mode():
        state = model(torch.cat([ids(20), ids(20, seed=1)])).state
    same(perspectron.LMState.stack([state.take(row) for row in range(4)]), state)
    same(perspectron.LMState.stack([state.select([0, 1]), state.select(torch.tensor([2, 3]))]), state)
    same(state.put(2, state.take(2)), state)
    same(state.select([3, 1, 1]).take(2), state.take(1))


@every_mixer
def test_rows_of_any_lengths_go_on_in_a_stack_as_alone(name):
    model = perspectron.build(SINGLE[name]).double()
    alone = [prefix(model, T, seed=T) for T in (3, 40, 0, 17)]
    stacked = perspectron.LMState.stack(alone)
    together = goes_on(model, stacked)
    for row, state in enumerate(alone):
        expected = goes_on(model, state)
        torch.testing.assert_close(together[row : row + 1], expected, rtol=0, atol=1e-9)
        assert torch.equal(goes_on(model, stacked.take(row)), expected), "bit for bit, once it is out"
    swapped = stacked.put(1, prefix(model, 9, seed=5))
    assert torch.equal(goes_on(model, swapped.take(1)), goes_on(model, prefix(model, 9, seed=5)))
    assert torch.equal(goes_on(model, swapped.take(3)), goes_on(model, alone[3]))


@every_mixer
def test_a_short_row_taken_from_a_long_batch_is_a_short_row(name):
    model = perspectron.build(SINGLE[name])
    short, long = prefix(model, 5, seed=1), prefix(model, 300, seed=2)
    both = perspectron.LMState.stack([short, long])
    with torch.inference_mode():
        for t in range(3):
            short, both = (
                model(ids(9, seed=3)[:1, t : t + 1].expand(state.batch_size, -1), state).state
                for state in (short, both)
            )
    taken = both.take(0)
    assert taken.nbytes == short.select([0]).nbytes < long.nbytes + 1
    whole = [leaf.untyped_storage().nbytes() for leaf in leaves(taken) if torch.is_tensor(leaf)]
    assert sum(whole) == taken.nbytes, "nothing larger is kept alive"
    assert [leaf for leaf in leaves(taken) if not torch.is_tensor(leaf)] == [
        leaf for leaf in leaves(short) if not torch.is_tensor(leaf)
    ]


@every_mixer
def test_rows_that_wait_count_no_slots(name):
    """Two rows that take turns in reading, one padded: no counter runs ahead of the longer row."""
    model = perspectron.build(SINGLE[name])
    with torch.inference_mode():
        state = model.init_state(2)
        for turn in range(6):
            pad = torch.zeros(2, 8, dtype=torch.bool)
            pad[turn % 2] = True
            state = model(ids(8), state, pad_BT=pad).state
    assert all(leaf <= 24 for leaf in leaves(state) if not torch.is_tensor(leaf))


@every_mixer
def test_a_row_waits_at_a_full_cache_while_another_begins_anew(name):
    model, text = perspectron.build(SINGLE[name]), ids(3, seed=7)
    with torch.inference_mode():
        state = model(ids(20)).state
        expected = [model(text[:1], state.take(0)).logits, model(text[1:]).logits]
        pad, reset = torch.tensor([[True], [False]]), torch.tensor([[False], [True]])
        begun = model(text[:, :1], state, pad_BT=pad, reset_BT=reset)
        torch.testing.assert_close(begun.logits[1], expected[1][0, :1])
        waited, after = begun.state.take(0), begun.state.take(1)
        torch.testing.assert_close(model(text[:1], waited).logits, expected[0])
        torch.testing.assert_close(model(text[1:, 1:], after).logits, expected[1][:, 1:])


def test_matrices_of_16_bits_count_as_in_float32_and_packed_ones_as_they_are():
    config = ModelConfig("m", 11, 16, (BlockConfig(AttentionConfig(2), None),))
    half = torch.tensor([0.5, -1.25], dtype=torch.bfloat16)
    weights = [{"a.weight": x} for x in (half, half.float())]
    scales = [{"a.scales": x} for x in (half.half(), half.float())]
    assert len({state_module.fingerprint(config, own) for own in weights}) == 1
    assert len({state_module.fingerprint(config, own) for own in scales}) == 2, "as in files of packed models"


def test_what_is_selected_is_a_copy(model, state):
    kept = state.fork()
    with torch.inference_mode():
        for own in (state.take(0), state.select([0, 1]), state.put(0, state.take(1))):
            model(ids(1)[: own.batch_size], own)
    same(state, kept)


def test_a_row_that_is_not_there_is_an_error(state):
    for row in (2, -1, 10**9):
        for call in (
            state.take,
            lambda row: state.select([0, row]),
            lambda row: state.put(row, state.take(0)),
        ):
            with refused(StateError, "row", row, 2):
                call(row)
    with refused(StateError, 2):
        state.put(0, state)
    with refused(StateError):
        perspectron.LMState.stack([])


@pytest.mark.parametrize(
    "other",
    [
        perspectron.build(CONFIG, seed=1),
        perspectron.build(dataclasses.replace(CONFIG, blocks=CONFIG.blocks[:-1])),
        perspectron.build(dataclasses.replace(CONFIG, d_model=32)),
        perspectron.build(CONFIG).double(),
    ],
    ids=["weights", "blocks", "width", "dtype"],
)
def test_states_of_different_models_do_not_stack(model, state, other):
    strange = other.init_state(1)
    for alien in (strange, dataclasses.replace(strange, model=None)):
        if alien.model is None and other.config == CONFIG and other.dtype == torch.float32:
            continue  # only its model tells
        for call in (lambda s: perspectron.LMState.stack([state, s]), lambda s: state.put(0, s)):
            with refused(StateError):
                call(alien)


def test_a_loaded_state_stacks_with_those_of_its_model(model, state, path):
    loaded = perspectron.load_state(path, model)
    same(perspectron.LMState.stack([loaded, state]).select([0, 1]), state)
    assert loaded.model == model.number


# ---------------------------------------------------------------- another model


def test_a_state_of_other_weights_is_refused(model, path):
    with refused(StateError, path):
        perspectron.load_state(path, perspectron.build(CONFIG, seed=1))
    touched = perspectron.build(CONFIG)
    perspectron.load_state(path, touched)
    with torch.no_grad():
        touched.blocks[0].mixer_norm.weight[3] += 1e-6
    with refused(StateError, path):
        perspectron.load_state(path, touched)


@pytest.mark.parametrize(
    "other",
    [
        ModelConfig("every mixer", 11, 16, CONFIG.blocks, norm_eps=1e-5),
        ModelConfig("every mixer", 11, 16, CONFIG.blocks[:-1]),
        ModelConfig("every mixer", 12, 16, CONFIG.blocks),
    ],
    ids=["norm_eps", "blocks", "vocab_size"],
)
def test_a_state_of_another_config_is_refused(path, other):
    with refused(StateError, path):
        perspectron.load_state(path, perspectron.build(other))


def test_a_state_of_another_precision_is_refused(path):
    with refused(StateError, path):
        perspectron.load_state(path, perspectron.build(CONFIG).double())


# ---------------------------------------------------------------- damage


def test_a_truncated_file_is_refused(model, path):
    whole = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        unread(path, model)
    path.write_bytes(whole + b"\0")  # what an append that was cut short leaves
    perspectron.load_state(path, model)


def test_one_flipped_bit_anywhere_is_refused(model, path):
    """Every byte of the header (300 of them in the short form), and 40 of the tensors."""
    whole, draw = path.read_bytes(), random.Random(0)
    tensors = 8 + int.from_bytes(whole[:8], "little")
    for position in [
        *range(8),
        *some(range(8, tensors), 300, 0),
        *draw.sample(range(tensors, len(whole)), 40),
    ]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        unread(path, model)
    path.write_bytes(whole)
    perspectron.load_state(path, model)


def test_one_other_byte_anywhere_never_loads_other_values(model, state, path):
    """Any byte for any other: refused, or (blanks that pad the header) the same state."""
    whole, draw, expected = path.read_bytes(), random.Random(1), continued(model, state)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            loaded, extra = perspectron.load_state(path, model), perspectron.load_extra(path)
        except StateError:
            continue
        assert torch.equal(continued(model, loaded), expected) and extra == EXTRA


def test_a_missing_file_and_a_folder_are_refused(model, tmp_path):
    unread(tmp_path / "nothing", model)
    unread(tmp_path, model)


def test_other_files_are_refused(model, tmp_path):
    tensors = {"0.memory_BDR": torch.zeros(1, 16, 4)}
    good = {"format": "perspectron-state-1", "model": model.fingerprint(), "numbers": "{}", "extra": "{}"}
    headers = [
        None,
        {},
        {"format": "pt"},
        {"format": "perspectron-state-0"},
        {"format": "perspectron-state-1"},
        good,
        good | {"digest": "0" * 64},
        good | {"numbers": "{garbage", "digest": "garbage"},
        good | {"extra": "\x00\xff", "digest": ""},
    ]
    for i, header in enumerate(headers):
        save_file(tensors, tmp_path / str(i), header)
        unread(tmp_path / str(i), model)
    for i, content in enumerate([b"", b"{}", b"\xff" * 100, json.dumps(good).encode(), os.urandom(1000)]):
        (tmp_path / f"other{i}").write_bytes(content)
        unread(tmp_path / f"other{i}", model)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


def test_nothing_is_unpickled(model, path, tmp_path, monkeypatch):
    mark = tmp_path / "exploded"
    (tmp_path / "pickle").write_bytes(pickle.dumps(Bomb(mark)))
    torch.save(Bomb(mark), tmp_path / "torch")
    pickle.loads((tmp_path / "pickle").read_bytes()).close()
    assert mark.exists(), "the bomb works"
    mark.unlink()
    for name in ("pickle", "torch"):
        unread(tmp_path / name, model)
    assert not mark.exists()
    for target in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(target, lambda *_, **__: pytest.fail("unpickled"))
    for name in ("eval", "exec"):
        monkeypatch.setattr(builtins, name, lambda *_: pytest.fail("executed"))
    perspectron.load_state(path, model)
    perspectron.load_extra(path)


# ---------------------------------------------------------------- a save that fails


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def quota(size: int):
    """Files of this process cannot grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def still_there(model, state, path: Path, before: bytes) -> None:
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name], "no temporary file is left"
    assert torch.equal(continued(model, perspectron.load_state(path, model)), continued(model, state))


def test_a_disk_that_fills_up_while_writing_leaves_the_old_file(model, state, path):
    before = path.read_bytes()
    with torch.inference_mode():
        other = model(ids(30)).state
    with refused(StorageError, path), quota(4096):
        perspectron.save_state(path, other, model)
    still_there(model, state, path, before)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fills_up_at_the_end_leaves_the_old_file(model, state, path, monkeypatch, call):
    before = path.read_bytes()
    with torch.inference_mode():
        other = model(ids(30)).state
    monkeypatch.setattr(os, call, full)
    with refused(StorageError, path):
        perspectron.save_state(path, other, model)
    monkeypatch.undo()
    still_there(model, state, path, before)


def test_an_interrupted_save_leaves_the_old_file(model, state, path, monkeypatch):
    before = path.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        perspectron.save_state(path, state, model)
    monkeypatch.undo()
    still_there(model, state, path, before)


def test_an_extra_that_is_no_json_leaves_the_old_file(model, state, path):
    before = path.read_bytes()
    for value in (object(), torch.tensor(1), {1}):
        with refused(StateError, path, "extra"):
            perspectron.save_state(path, state, model, extra={"a": value})
    still_there(model, state, path, before)


@pytest.mark.parametrize("rows", [torch.tensor([False, True]), [1.0]])
def test_rows_are_chosen_by_their_numbers(rows):
    state = perspectron.build("drm-104k").init_state(2)
    with refused(StateError):
        state.select(rows)


def forged(path: Path, change) -> Path:
    """The file with other metadata and tensors, and a digest that fits them."""
    with safe_open(path, framework="pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    save_file(tensors, path, sealed(header, tensors))
    return path


def put(name: str, value: torch.Tensor):
    return lambda header, tensors: tensors.update({name: value})


def numbers(text: str):
    return lambda header, tensors: header.update(numbers=text)


KINDS = {entry.small.kind: i for i, entry in enumerate(mixers().values())}
PDR, RING, CACHE, DRM = (f"layers[{KINDS[kind]}]" for kind in ("pdr", "window_gqa", "attention", "drm"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put(f"{PDR}.memory_BDR", torch.zeros(4, dtype=torch.uint8)), []),
        (put(f"{PDR}.memory_BDR", torch.zeros(2, 1)), ["memory_BDR", "torch.float32"]),
        (put(f"{PDR}.memory_BDR", torch.zeros(2, 16, 5)), ["memory_BDR", 5]),
        (put(f"{PDR}.memory_BDR", torch.zeros(2, 16, 4, dtype=torch.float64)), ["memory_BDR", "torch.float64"]),
        (put(f"{PDR}.memory_BDR", torch.zeros(3, 16, 4)), [3]),
        (put(f"{PDR}.length_B", torch.full((2,), -7)), ["length_B", -7]),
        (put(f"{PDR}.length_B", torch.full((2,), 1 << 62)), ["length_B"]),
        (put(f"{PDR}.length_B", torch.full((2,), 21)), []),
        (put(f"{PDR}.length_B", torch.full((2,), 20, dtype=torch.int32)), ["length_B", "torch.int32"]),
        (put(f"{RING}.k_BGWK", torch.zeros(2, 2, 1, 4)), ["k_BGWK"]),
        (put(f"{RING}.k_BGWK", torch.zeros(2, 2, 0, 4)), [0, 8]),
        (put(f"{CACHE}.k_BHSK", torch.zeros(2, 2, 3, 8)), ["k_BHSK"]),
        (put(f"{DRM}.z_BD", torch.zeros(2, 8)), ["z_BD"]),
        (put("layers[99].memory", torch.zeros(2)), ["layers[99].memory"]),
        (lambda header, tensors: tensors.pop(f"{DRM}.z_BD"), ["z_BD"]),
        (numbers("{}"), ["used"]),
        (numbers("[]"), ["numbers"]),
        (numbers('{"a": 1, "a": 2}'), ["numbers", "'a'"]),
        (numbers('{"a": NaN}'), ["numbers", "NaN"]),
        (numbers("[" * 100_000), ["numbers"]),
        (lambda header, tensors: header.pop("numbers"), ["numbers"]),
        (lambda header, tensors: header.pop("model"), []),
        (lambda header, tensors: tensors.update({n: t[:0] for n, t in tensors.items()}), [0]),
        *(
            (
                lambda header, tensors, value=value: header.update(
                    numbers=json.dumps(dict.fromkeys(json.loads(header["numbers"]), value))
                ),
                ["used", value],
            )
            for value in (-1, True, 2**62, 19, 21, "20", 20.0)
        ),
    ],
)  # fmt: skip
def test_a_state_that_was_forged_is_refused(model, path, change, named):
    """Whoever passes a state on can write any digest: it has to be what the model's own states are."""
    with refused(StateError, path, *named):
        perspectron.load_state(forged(path, change), model)


@pytest.mark.parametrize("of", ["model", "shape"])
def test_a_state_of_another_model_is_refused_before_its_tensors_are_read(model, path, monkeypatch, of):
    """They may take half of the memory."""
    other = {"model": "0" * 64}
    forged(
        path,
        (lambda header, _: header.update(other)) if of == "model" else put(f"{DRM}.z_BD", torch.zeros(2, 8)),
    )
    monkeypatch.setattr(appended, "read_tensor", lambda *_: pytest.fail("read"))
    with refused(StateError, path):
        perspectron.load_state(path, model)


def test_what_a_forged_state_may_hold_other_than_it_does_is_numbers(model, path):
    """Other numbers in the tensors are another memory, which no check can tell."""
    forged(path, put(f"{PDR}.memory_BDR", torch.ones(2, 16, 4)))
    assert continued(model, perspectron.load_state(path, model)).isfinite().all()


@pytest.mark.parametrize("rows", [1, 3])
def test_states_of_any_rows_and_room_load(model, tmp_path, rows):
    for name, T, capacity in (("empty", 0, 0), ("roomy", 0, 50), ("short", 3, 0), ("long", 30, 70)):
        state = model.init_state(rows, capacity=capacity)
        if T:
            with torch.inference_mode():
                state = model(ids(T)[:1].expand(rows, T), state).state
        perspectron.save_state(tmp_path / name, state, model)
        loaded = perspectron.load_state(tmp_path / name, model)
        filled = pytree.tree_leaves(state.filled())  # free slots are not written
        assert [leaf.shape for leaf in pytree.tree_leaves(loaded) if isinstance(leaf, torch.Tensor)] == [
            leaf.shape for leaf in filled if isinstance(leaf, torch.Tensor)
        ]


def test_a_state_made_under_autocast_loads(model, tmp_path):
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        state = model(ids(12)).state
    perspectron.save_state(tmp_path / "bf16", state, model)
    perspectron.load_state(tmp_path / "bf16", model)


def test_a_pipe_is_refused_at_once(model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    unread(tmp_path / "pipe", model)


@pytest.mark.parametrize(
    ("dtype", "size", "error"), [("float16", 0.55, 1e-3), ("bfloat16", 0.55, 4e-3), ("int8", 0.5, 1e-2)]
)
def test_fewer_bits_come_back_near(model, state, tmp_path, dtype, size, error):
    full, small = tmp_path / "full.state", tmp_path / "small.state"
    for path, kind in ((full, "full"), (small, dtype)):
        perspectron.save_state(path, state, model, extra=EXTRA, dtype=kind)
    held = {path: sum(t.nbytes for t in load_file(path).values()) for path in (full, small)}
    assert held[small] < size * held[full] + 400
    loaded = perspectron.load_state(small, model)
    for a, b in zip(pytree.tree_leaves(loaded), pytree.tree_leaves(state), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.shape == b.shape
            if a.is_floating_point():
                bound = error * b.abs().amax(-1, keepdim=True) if b.numel() else 0
                assert ((a - b).abs() <= bound + 1e-7).all()
            else:
                assert torch.equal(a, b)
    assert state_module.load_extra(small) == EXTRA
    assert (continued(model, loaded) - continued(model, state)).abs().max() < 0.2
    perspectron.save_state(full, state, model, extra=EXTRA)
    assert torch.equal(continued(model, perspectron.load_state(full, model)), continued(model, state))


@pytest.mark.parametrize("design", ["drm", "drm2"])
def test_a_state_with_a_part_of_no_width_comes_back_from_8_bits(tmp_path, design):
    model = perspectron.build(presets.small(design, vocab_size=11, d_model=32, layers=2, seq_len=16))
    state = model.init_state(3)
    assert any(x.is_floating_point() and 0 in x.shape for x in pytree.tree_leaves(state))
    perspectron.save_state(tmp_path / "a.state", state, model, dtype="int8")
    loaded = perspectron.load_state(tmp_path / "a.state", model)
    for a, b in zip(pytree.tree_leaves(loaded), pytree.tree_leaves(state), strict=True):
        assert a.shape == b.shape and torch.allclose(a, b, atol=1e-2)


def test_numbers_beyond_float32_are_refused_in_8_bits(tmp_path):
    held = {"a": torch.tensor([[1.0, 1e38]], dtype=torch.float64)}
    narrow.tensors(tmp_path / "x", held, header := {}, "int8")
    narrow.widened(tmp_path / "x", held, header, {"a": torch.float64})
    assert held["a"].tolist() == [[0, pytest.approx(1e38)]]
    with refused(StateError, "a", "int8"):
        narrow.tensors(tmp_path / "x", {"a": torch.tensor([[1e39]], dtype=torch.float64)}, {}, "int8")


@pytest.mark.parametrize("dtype", ["int4", "fp16", "FULL", "", None, 16, torch.float16])
def test_a_dtype_that_there_is_not_is_refused_by_name(model, state, tmp_path, dtype):
    with refused(StateError, "dtype"):
        perspectron.save_state(tmp_path / "x", state, model, dtype=dtype)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("extra", [[1], "text", 0, {"a": math.nan}])
def test_what_would_be_refused_when_it_is_read_is_not_written(model, state, tmp_path, extra):
    with refused(StateError, tmp_path / "x", "extra"):
        perspectron.save_state(tmp_path / "x", state, model, extra=extra)
    twin = perspectron.build(CONFIG, seed=1)
    for other in (twin.init_state(1), None, {"length": 3}):
        with refused(StateError):
            perspectron.save_state(tmp_path / "x", other, model)
    assert not list(tmp_path.iterdir())


def test_a_scale_of_another_shape_does_not_spread_the_numbers(model, state, tmp_path):
    """Numbers in 8 bits and their scales are multiplied: of two files' lines a square of memory would come."""
    held, header = {"a": torch.zeros(3000, 1, dtype=torch.int8)}, {"stored": '{"a": "torch.float32"}'}
    held["a/scale"] = torch.ones(1, 3000)
    with refused(StateError, tmp_path / "x", "stored"):
        narrow.widened(tmp_path / "x", held, header, {"a": torch.float32})


def test_a_header_that_would_be_refused_is_not_written(model, state, tmp_path):
    """One number, of those who write, read and list: 16 MiB."""
    with refused(StateError, MAX_JSON):
        perspectron.save_state(tmp_path / "x", state, model, extra={"text": "a" * MAX_JSON})
    assert not list(tmp_path.iterdir())
    room = MAX_JSON - header_bytes(model, state, tmp_path / "small", "")
    perspectron.save_state(tmp_path / "x", state, model, extra={"text": "a" * room})
    assert perspectron.load_extra(tmp_path / "x") == {"text": "a" * room}
    with refused(StateError, MAX_JSON):
        perspectron.save_state(tmp_path / "y", state, model, extra={"text": "a" * (room + 8)})
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes((MAX_JSON + 8).to_bytes(8, "little") + data[8:])
    for read in (
        lambda: perspectron.load_state(tmp_path / "x", model),
        lambda: perspectron.load_extra(tmp_path / "x"),
    ):
        with refused(StateError, tmp_path / "x", MAX_JSON):
            read()


def header_bytes(model, state, path, text: str) -> int:
    perspectron.save_state(path, state, model, extra={"text": text})
    return int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_numbers_that_do_not_fit_a_dtype_are_refused(model, state, tmp_path, dtype):
    value = 1e6 if dtype == "float16" else math.inf
    leaves, spec = pytree.tree_flatten(state)
    at = next(
        i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()
    )
    leaves[at] = torch.full_like(leaves[at], value)
    with refused(StateError, dtype):
        perspectron.save_state(tmp_path / "x", pytree.tree_unflatten(leaves, spec), model, dtype=dtype)


@pytest.mark.parametrize("stored", ["[]", '{"layers[0].none": "torch.float32"}', '{"length": 3}', "{"])
def test_a_list_of_dtypes_that_does_not_fit_is_refused(model, state, tmp_path, stored):
    path = tmp_path / "small.state"
    perspectron.save_state(path, state, model, dtype="int8")
    with safe_open(path, "pt") as file:
        header = dict(file.metadata())
    tensors = load_file(path)
    header["stored"] = stored
    save_file(tensors, path, sealed(header, tensors))
    with refused(StateError, path, "stored"):
        perspectron.load_state(path, model)


def test_a_fork_and_a_file_hold_the_tokens_that_are_there(tmp_path):
    config = ModelConfig(
        "groups", 67, 32, (BlockConfig(AttentionConfig(4, kv_heads=2, head_dim=10), SwiGLUConfig(16)),) * 2
    )
    model = perspectron.build(config)
    with torch.inference_mode():
        state = model(ids(30)[:1] % 67, model.init_state(1, capacity=4000)).state
        kept = state.fork()
        perspectron.save_state(tmp_path / "state", state, model)
        loaded = perspectron.load_state(tmp_path / "state", model)
        again = model.init_state(1, capacity=100)
        into = state.fork(again)
        _, _, _ = model.hidden(ids(1)[:1] % 67, state, consume_state=True)
        said = [model(ids(5)[:1] % 67, one).logits for one in (kept, loaded, into)]
    keys_and_values = 2 * 2 * 2 * 10 * 4
    assert keys_and_values * 30 <= (tmp_path / "state").stat().st_size <= keys_and_values * 30 + 2000
    assert all(torch.equal(one, said[0]) for one in said)
    assert into.layers[0].k_BHSK.data_ptr() == again.layers[0].k_BHSK.data_ptr()


def test_a_state_of_inference_is_trained_after_once_it_is_detached() -> None:
    model = perspectron.build(presets.get("perspective2-tiny", vocab_size=40, layers=2))
    ids = torch.randint(0, 40, (1, 6))
    with torch.inference_mode():
        state = model(ids).state
    model(ids, state.detach(), targets=ids).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    with refused(StateError, "select"):
        state.select(torch.tensor(0))
