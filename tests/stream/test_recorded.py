"""Steps of an artifact by a recording: what it gives, that each row of a batch is that row alone, bit by bit, and that
making it asks for no experts."""

import dataclasses

import pytest
import torch
import torch.utils._pytree as pytree

from perspectron import native, presets
from perspectron.data import Tokenizer
from perspectron.decode import steps as steps_module
from perspectron.decode.reading import prefill
from perspectron.decode.steps import Steps, stepped, steps_of
from perspectron.stream.engine import load_artifact
from perspectron.stream.synthetic import synthesize

pytestmark = pytest.mark.skipif(not native.available(), reason="no native library")

SIZES = {"layers": 5, "d_model": 64, "hidden": 80, "rank": 24, "heads": 4, "kv_heads": 2, "window": 12}
KINDS = {
    "torus": {},
    "switch": {"router": "switch", "smooth": 0.0, "out_norm": True},
    "soft": {"gate": "soft", "offsets": False},
}
PROMPTS = [list(range(1, 1 + n)) for n in (9, 3, 30, 1, 12, 13, 5)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An artifact for each kind of router, with an output norm in one."""
    root, tokenizer = tmp_path_factory.mktemp("step"), Tokenizer.train(["the cat sat on the mat " * 40], 270)
    for name, changes in KINDS.items():
        config = presets.get("perspective-tiny", vocab_size=300, **(SIZES | {"torus": [3, 2]} | changes))
        synthesize(config, root / name, lambda: tokenizer, experts=6, linear="int8")
    return root


@pytest.fixture(scope="module")
def made(folders):
    return {name: load_artifact(folders / name)[0] for name in KINDS}


@torch.inference_mode()
def run(model, state, rows, count, *, recorded=True):
    """What the head reads of these rows of the state [B,count,D] and the state after them."""
    state, hidden = state.select(torch.tensor(rows)), []
    steps = steps_of(model) if recorded else None
    for t in range(count):
        ids = torch.tensor([[7 * t + 11 * row] for row in rows])
        if recorded:
            assert isinstance(steps, Steps)
            done = steps.step(ids, state)
            assert done is not None
            x, _, state = done
        else:
            x, _, state = stepped(model, None, ids, state)
        hidden.append(x)
    return torch.stack(hidden, 1), state.fork()


def assert_same_state(one, other, row=slice(None)):
    """One state is this row of the other, to the last bit."""
    for a, b in zip(one.layers, other.layers, strict=True):
        assert all(torch.equal(x, y[row]) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_a_batch_is_that_row_alone_bit_by_bit(made, name, threads):
    model, every = made[name], list(range(len(PROMPTS)))
    _, state = prefill(model, PROMPTS)
    native.set_threads(threads)
    try:
        together, after = run(model, state, every, 20)  # beyond the window
        for row in every:
            alone, own = run(model, state, [row], 20)
            assert torch.equal(alone[0], together[row])
            assert_same_state(own, after, slice(row, row + 1))
    finally:
        native.set_threads(None)


@pytest.mark.parametrize("name", KINDS)
def test_a_recording_gives_what_the_modules_give(made, name):
    model, every = made[name], list(range(len(PROMPTS)))
    _, state = prefill(model, PROMPTS)
    recorded, _ = run(model, state, every, 1)
    modules, _ = run(model, state, every, 1, recorded=False)
    assert (recorded - modules).norm() < 0.01 * modules.norm()


def test_hooks_are_called(made):
    model, seen = made["torus"], []
    _, state = prefill(model, PROMPTS[:1])
    handle = model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    try:
        with torch.inference_mode():
            assert steps_of(model) is None
            stepped(model, steps_of(model), torch.ones(1, 1, dtype=torch.int64), state)
    finally:
        handle.remove()
    assert seen == [1]


def test_a_state_of_other_shapes_has_a_recording_of_its_own(made):
    """The library trusts shapes: one value short and it would write past the end."""
    model = made["torus"]
    _, state = prefill(model, PROMPTS[:1])
    first = state.layers[0]
    short = dataclasses.replace(first, memory_BDR=first.memory_BDR[:, :-1].contiguous())
    lost = dataclasses.replace(state, layers=(short, *state.layers[1:]))
    steps = steps_of(model)
    with torch.inference_mode():
        assert steps is not None and steps.step(torch.ones(1, 1, dtype=torch.int64), lost) is None


@pytest.mark.parametrize("length", [-7, -(2**62)])
def test_a_position_before_the_ring_writes_inside_it(made, length):
    """What a forged state would have to say to write before the ring; `load_state` refuses it."""
    model = made["torus"]
    _, state = run(model, prefill(model, PROMPTS[:2])[1], [0, 1], 3)
    lost = pytree.tree_map(lambda x: torch.full_like(x, length) if x.dtype == torch.int64 else x, state)
    run(model, dataclasses.replace(lost, model=state.model), [0, 1], 2)


def test_making_a_recording_reads_no_expert(folders):
    """From disk, an expert that no text wants would cost a read and the place of one that it wants."""
    size = next((folders / "torus" / "experts").iterdir()).stat().st_size // 6
    model, _ = load_artifact(folders / "torus", cache_bytes=4 * size)
    assert model.cache is not None and not model.cache.resident
    _, state = prefill(model, PROMPTS[:1])
    steps, before = steps_of(model), model.cache.counters
    with torch.inference_mode():
        assert steps is not None and steps._taken(state) is not None
    after = model.cache.counters
    assert (after.hits, after.misses) == (before.hits, before.misses)
    assert not model.cache.resident


def test_the_layers_of_a_large_state_are_checked_in_one_memory(made, folders, monkeypatch):
    """In full size a state is a third of a gigabyte, and a recording is checked with three of them."""
    model = made["torus"]
    _, state = prefill(model, PROMPTS)
    whole, _ = run(model, state, [0, 1], 3)
    sizes, real = [], steps_module.overlaid
    monkeypatch.setattr(steps_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(steps_module, "overlaid", lambda *given: sizes.append(1) or real(*given))
    again = load_artifact(folders / "torus")[0]
    _, state = prefill(again, PROMPTS)
    overlaid, _ = run(again, state, [0, 1], 3)
    assert len(sizes) == 2 and torch.equal(overlaid, whole)
