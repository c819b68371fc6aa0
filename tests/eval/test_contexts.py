"""States put together at a context, against states that read their way there."""

import pytest
import torch
import torch.utils._pytree as pytree

from perspectron import build
from perspectron.eval import timing
from perspectron.eval.timing import Stepper, decode_model, decoding, filled, noise
from perspectron.model.census import touched
from perspectron.model.config import ModelConfig
from perspectron.presets import DESIGNS, small

CPU = torch.device("cpu")
V, SHORT, LONG = 64, 160, 640
GROWS = {"adr", "adr2", "lens", "lens2", "gpt2", "transformer"}


def config_of(design: str) -> ModelConfig:
    return small(design, vocab_size=V, d_model=32, layers=4, seq_len=64)


def noise_for(model, context: int) -> torch.Tensor:
    return noise(timing.cache_bytes(timing.shapes(model, context)), CPU)


@pytest.mark.parametrize("design", DESIGNS)
@torch.inference_mode()
def test_state_bytes_are_those_of_real_tensors_and_grow_with_attention_alone(design):
    model = decode_model(config_of(design), LONG, CPU)
    sizes = []
    for context in (SHORT, LONG):
        found = decoding({design: model}, context, rounds=1, visit=1)[design]
        real = model.init_state(1, capacity=context)
        assert found.state_bytes == sum(
            leaf.nbytes for leaf in pytree.tree_leaves(real) if isinstance(leaf, torch.Tensor)
        )
        sizes.append(found.state_bytes)
    if design not in GROWS:
        assert sizes[0] == sizes[1]
        return
    per_token = len(model.blocks) * (3 if design in ("lens", "lens2") else 2) * model.config.d_model * 4
    assert sizes[1] - sizes[0] == (LONG - SHORT) * per_token


@pytest.mark.parametrize("design", DESIGNS)
@torch.inference_mode()
def test_a_filled_state_is_like_one_that_read_as_much(design):
    model = decode_model(config_of(design), SHORT, CPU)
    read = model(torch.randint(V, (1, SHORT - 10)), model.init_state(1, capacity=SHORT)).state
    state = filled(model, SHORT, SHORT - 10, noise_for(model, SHORT))
    for (where, real), (_, made) in zip(*map(pytree.tree_leaves_with_path, (read, state)), strict=True):
        if isinstance(real, torch.Tensor):
            assert (real.shape, real.dtype) == (made.shape, made.dtype), pytree.keystr(where)
            assert made.is_floating_point() or torch.equal(real, made), pytree.keystr(where)
            if made.is_floating_point():  # no numbers that take a processor longer
                assert ((made == 0) | (made.abs() >= torch.finfo(made.dtype).tiny)).all(), pytree.keystr(
                    where
                )
        else:
            assert real == made, pytree.keystr(where)
    assert touched(model, state) == touched(model, read)


@pytest.mark.parametrize("design", DESIGNS)
@torch.inference_mode()
def test_steps_end_at_the_context_with_finite_logits(design):
    model = decode_model(config_of(design), SHORT, CPU)
    stepper = Stepper(model, SHORT, 3, noise_for(model, SHORT))
    logits = []
    for _ in range(2):
        stepper.begin()
        logits.append(stepper.step())
        stepper.turn()
        leaves = pytree.tree_leaves_with_path(stepper.state)
        lengths = [leaf for where, leaf in leaves if pytree.keystr(where).endswith(("length_B", "used"))]
        assert {int(length) for length in lengths} <= {SHORT}
        assert stepper.state.nbytes == model.init_state(1, capacity=SHORT).nbytes
    assert logits[0].isfinite().all()
    assert torch.equal(*logits), "a turn begins where the one before began"


def test_a_table_of_positions_goes_on_without_memory():
    config = config_of("gpt2")
    short, model = build(config), decode_model(config, 1 << 24, CPU)
    assert model.positions.weight.untyped_storage().nbytes() == short.positions.weight.nbytes
    assert model.config.positions == 1 << 24 and config.positions < 1 << 24
    with torch.inference_mode():
        after = short(torch.tensor([[3]])).logits
        assert torch.equal(model(torch.tensor([[3]])).logits, after)
    assert decode_model(config, config.positions, CPU).config == config


def test_caches_lie_over_the_same_random_numbers():
    model = decode_model(config_of("transformer"), SHORT, CPU)
    numbers = noise_for(model, SHORT)
    shared = numbers.untyped_storage().data_ptr()
    caches = [
        leaf
        for leaf in pytree.tree_leaves(filled(model, SHORT, 10, numbers))
        if isinstance(leaf, torch.Tensor)
    ]
    assert sum(leaf.untyped_storage().data_ptr() == shared for leaf in caches) == 2 * len(model.blocks)
    whole = noise(4 * timing.BLOCK + 8, CPU).view(torch.float32)
    assert len(whole) >= timing.BLOCK + 2 and whole.isfinite().all() and 0.9 < whole.std() < 1.1


def test_what_does_not_fit_is_left_out_and_says_why(monkeypatch):
    names = ("ssd", "transformer", "lens")
    models = {name: decode_model(config_of(name), LONG, CPU) for name in names}
    sizes = {name: timing.cache_bytes(timing.shapes(model, LONG)) for name, model in models.items()}
    assert sizes["ssd"] == 0 < sizes["transformer"] < sizes["lens"]
    monkeypatch.setattr(timing, "room", lambda device: 2 * sizes["transformer"])
    found = decoding(models, LONG, rounds=2, visit=1)
    assert [len(found[name].seconds) for name in names] == [2, 2, 0]
    assert "half of the free memory" in found["lens"].skipped and not found["transformer"].skipped
    assert found["lens"].state_bytes == models["lens"].init_state(1, capacity=LONG).nbytes
