"""The shorter way of a token: which models it takes, and that each row of a batch is that row alone, bit by bit."""

import dataclasses

import pytest
import torch
import torch.utils._pytree as pytree

from perspectron import native, presets
from perspectron.data import Tokenizer
from perspectron.decode.reading import prefill
from perspectron.model.config import BlockConfig, Law5Config
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.stream.engine import load_artifact
from perspectron.stream.step import SUITED, Step, Unsuited, check
from perspectron.stream.synthetic import synthesize
from perspectron.util.config import MixerConfig
from perspectron.util.errors import StateError

pytestmark = pytest.mark.skipif(not native.available(), reason="no native library")

SIZES = {"layers": 5, "d_model": 64, "hidden": 80, "rank": 24, "heads": 4, "kv_heads": 2, "window": 12}


def config(name="perspective-tiny", **changes):
    return presets.get(name, vocab_size=300, **(SIZES | {"torus": [3, 2]} | changes))


def changed(base, **fields):
    """The first block's mixer or network with these fields, wherever they are."""
    block = base.blocks[0]
    for part in ("mixer", "ffn"):
        own = getattr(block, part)
        known = {field.name for field in dataclasses.fields(own)}
        if fields.keys() <= known:
            block = dataclasses.replace(block, **{part: dataclasses.replace(own, **fields)})
            return dataclasses.replace(base, blocks=(block, *base.blocks[1:]))
    raise AssertionError(fields)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat " * 40], 270)


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer):
    """An artifact for each kind of router, with an output norm in one."""
    root, found = tmp_path_factory.mktemp("step"), {}
    for name, changes in {
        "torus": {},
        "switch": {"router": "switch", "smooth": 0.0, "out_norm": True},
    }.items():
        synthesize(config(**changes), root / name, lambda: tokenizer, experts=6, linear="int8")
        found[name] = load_artifact(root / name)[0]
    return found


def test_every_field_of_the_configs_is_decided_about():
    """A new field fails here: list it in `SUITED`, with the values that the step computes."""
    for kind, known in SUITED.items():
        assert known.keys() == {field.name for field in dataclasses.fields(kind)}, kind.__name__


@pytest.mark.parametrize("name", [n for n in presets.names() if n.startswith("perspective-")])
def test_every_perspective_preset_is_taken(name):
    check(presets.get(name))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda c: changed(c, gate="soft"), r"blocks\[0\].ffn.gate = 'soft'"),
        (lambda c: changed(c, renorm_every=7), r"blocks\[0\].mixer.renorm_every = 7"),
        (lambda c: changed(c, gate_rank=4), r"blocks\[0\].mixer.gate_rank = 4"),
        (lambda c: changed(c, fixed_decay=True), r"blocks\[0\].mixer.fixed_decay = True"),
        (lambda c: dataclasses.replace(c, positions=9), "model.positions = 9"),
        (lambda c: dataclasses.replace(c, norm="layer"), "model.norm = 'layer'"),
        (
            lambda c: dataclasses.replace(
                c, blocks=(dataclasses.replace(c.blocks[0], residual=Law5Config()), *c.blocks[1:])
            ),
            r"blocks\[0\].residual is Law5Config",
        ),
        (
            lambda c: dataclasses.replace(
                c, blocks=(*c.blocks, BlockConfig(presets.get("gla-tiny").blocks[0].mixer, None))
            ),
            r"blocks\[5\].mixer is GLAConfig",
        ),
    ],
)
def test_what_it_does_not_compute_is_named(change, cause):
    with pytest.raises(Unsuited, match=cause):
        check(change(config()))


def test_a_field_it_does_not_know_is_not_passed_over(monkeypatch):
    known = {name: value for name, value in SUITED[BlockConfig].items() if name != "ffn"}
    monkeypatch.setitem(SUITED, BlockConfig, known)
    with pytest.raises(Unsuited, match=r"blocks\[0\].ffn"):
        check(config())
    monkeypatch.undo()
    kinds = {type(block.mixer) for block in config().blocks}
    assert all(issubclass(kind, MixerConfig) and kind in SUITED for kind in kinds)


PROMPTS = [list(range(1, 1 + n)) for n in (9, 3, 30, 1, 12, 13, 5)]


@torch.inference_mode()
def run(model, state, rows, steps, pads=None):
    """Hidden states of these rows of the state [B,steps,D] and the state after them, by the shorter way; pads: of
    each row, the steps at which it waits."""
    state, hidden = state.select(torch.tensor(rows)), []
    for t in range(steps):
        ids = torch.tensor([[7 * t + 11 * row] for row in rows])
        pad = None if pads is None else torch.tensor([[t in pads[row]] for row in rows])
        x, state, _ = model.hidden(ids, state, pad_BT=pad, consume_state=True)
        assert isinstance(model._step, Step) and model._step.takes(state)
        hidden.append(x)
    return torch.cat(hidden, 1), state


def assert_same_state(one, other, row=slice(None)):
    """One state is this row of the other, to the last bit."""
    for a, b in zip(one.layers, other.layers, strict=True):
        assert all(torch.equal(x, y[row]) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


@pytest.mark.parametrize("name", ["torus", "switch"])
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


@pytest.mark.parametrize("name", ["torus", "switch"])
def test_rows_of_padding_wait_and_give_zero(made, name):
    model, pads = made[name], [{0, 5, 6}, set(), set(range(8))]
    _, state = prefill(model, PROMPTS[:3])
    together, after = run(model, state, [0, 1, 2], 8, pads)
    for row, own in enumerate(pads):
        alone = state.select(torch.tensor([row]))
        for t in range(8):
            if t in own:
                assert not together[row, t].any()
                continue
            with torch.inference_mode():
                ids = torch.tensor([[7 * t + 11 * row]])
                x, alone, _ = model.hidden(ids, alone, consume_state=True)
            assert torch.equal(x[0, 0], together[row, t])
        assert_same_state(alone, after, slice(row, row + 1))


def test_a_batch_of_nothing_but_padding_changes_nothing(made):
    model = made["torus"]
    with torch.inference_mode():
        _, state = prefill(model, PROMPTS[:2])
        before = state.fork()
        x, after, _ = model.hidden(
            torch.ones(2, 1, dtype=torch.int64),
            state,
            pad_BT=torch.ones(2, 1, dtype=torch.bool),
            consume_state=True,
        )
    assert not x.any()
    assert_same_state(after, before)


def test_a_batch_by_the_step_is_the_batch_by_the_modules_up_to_rounding(made):
    model = made["torus"]
    with torch.inference_mode():
        _, state = prefill(model, PROMPTS)
        ids = torch.arange(len(PROMPTS))[:, None]
        short, _, _ = model.hidden(ids, state)
        modules, _, _ = LanguageModel.hidden(model, ids, state)
    assert (short - modules).norm() < 0.01 * modules.norm()
    assert isinstance(model._step, Step)


def test_hooks_are_called(made):
    model, seen = made["torus"], []
    handle = model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    try:
        with torch.inference_mode():
            _, state = prefill(model, PROMPTS[:1])
            seen.clear()
            model.hidden(torch.ones(1, 1, dtype=torch.int64), state)
    finally:
        handle.remove()
    assert seen == [1]


def test_a_state_of_other_shapes_is_not_written_into(made):
    """The library trusts shapes: one value short and it would write past the end."""
    model = made["torus"]
    step = Step(model)
    _, state = prefill(model, [[1, 2, 3]])
    assert step.takes(state)
    first = state.layers[0]
    short = dataclasses.replace(first, memory_BDR=first.memory_BDR[:, :-1].contiguous())
    twice = dataclasses.replace(first, memory_BDR=first.memory_BDR.repeat(2, 1, 1))
    for layers in ((short, *state.layers[1:]), state.layers[:-1], (twice, *state.layers[1:])):
        assert not step.takes(dataclasses.replace(state, layers=layers))


@pytest.mark.parametrize("length", [-7, -(2**62)])
def test_a_position_before_the_ring_is_refused_and_nothing_is_written(made, length):
    """What a forged state would have to say to write before the ring; `load_state` refuses it too."""
    model = made["torus"]
    state = run(model, prefill(model, PROMPTS[:2])[1], [0, 1], 3)[1]
    lost = pytree.tree_map(lambda x: torch.full_like(x, length) if x.dtype == torch.int64 else x, state)
    lost = dataclasses.replace(lost, model=state.model)
    before = [leaf.clone() for leaf in pytree.tree_leaves(lost)]
    rings = [leaf for leaf in before if leaf.ndim == 4]
    with torch.inference_mode(), pytest.raises(StateError, match="position below 0"):
        model.hidden(torch.tensor([[3], [4]]), lost, consume_state=True)
    after = [leaf for leaf in pytree.tree_leaves(lost) if leaf.ndim == 4]
    assert rings and all(map(torch.equal, rings, after))


def test_counts_of_fewer_rows_are_not_handed_to_the_library(made):
    model = made["torus"]
    state = run(model, prefill(model, PROMPTS[:2])[1], [0, 1], 3)[1]
    short = dataclasses.replace(state.layers[0], length_B=state.layers[0].length_B[:1])
    assert model._step.takes(state)
    assert not model._step.takes(dataclasses.replace(state, layers=(short, *state.layers[1:])))


def test_making_the_step_takes_no_memory_of_a_state(made):
    """In full size a state is a third of a gigabyte."""
    model, asked = made["torus"], []
    real = model.init_state

    def init_state(batch_size, **options):
        asked.append(options.get("device"))
        return real(batch_size, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "init_state", init_state)
        Step(model)
    assert asked == ["meta"]


def test_looking_at_a_state_walks_through_it_once(made, monkeypatch):
    """It is looked at before every token: to ask every tensor's place for the rows cost as much as the token itself."""
    model, asked = made["torus"], []
    state = run(model, prefill(model, PROMPTS[:2])[1], [0, 1], 1)[1]
    rows = LMState.batch_size.fget
    monkeypatch.setattr(LMState, "batch_size", property(lambda self: asked.append(1) or rows(self)))
    assert model._step.takes(state)
    assert len(asked) == 1
