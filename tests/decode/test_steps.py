"""A step that is recorded gives what the modules give, for every design, in every batch, and each row alone."""

import copy
import dataclasses
import functools
import gc
import logging
import subprocess
import sys
import weakref

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from perspectron import native, presets
from perspectron.decode import steps as steps_module
from perspectron.decode.operations import HANDLERS
from perspectron.decode.rows import Rows
from perspectron.decode.steps import Steps, stepped, steps_of
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.model import half
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.model import LanguageModel, build
from perspectron.model.state import LMState, load_state, save_state
from perspectron.native import tape
from perspectron.ops.rope import RopeScaling
from perspectron.quant.convert import convert
from perspectron.quant.linear import QuantLinear
from perspectron.util.errors import ConfigError
from tests.decode.test_rows import prompt_of
from tests.decode.test_store import small
from tests.refusals import refused

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=str(native.reason())),
    pytest.mark.cpu_only("recordings are steps on the CPU"),
]
DESIGNS = list(presets.DESIGNS)
FORMATS = ("2bit", "4bit", "int8")
VARIANTS = [
    "perspective2[gated=true]", "perspective2[shift=false,first_values=false]",
    "transformer[shift=true,first_values=true]", "transformer[shift=k+v+network]", "gdn[shift=q+k]",
    "ssd[shift=v+g]", "transformer[input_conv=k+v+network]", "gdn[input_conv=q+k,input_swish=true]",
    "perspective2[shift=k]", "gdn[negative=true]", "kda[negative=true,shift=true]", "mamba3[shift=true]",
    "lens2[output_gate=false]", "perspective[embedding_norm=false]",
]  # fmt: skip


def read(model: LanguageModel, rows: int, length: int = 12) -> LMState:
    ids = torch.tensor([prompt_of(length + row % 3, row)[:length] for row in range(rows)])
    with torch.inference_mode():
        return model.hidden(ids)[1]


def tokens(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 300, (count, rows, 1), generator=torch.Generator().manual_seed(seed))


def recorded(model: LanguageModel) -> Steps:
    found = steps_of(model)
    assert found is not None
    return found


def go_on(
    steps: Steps | None, model: LanguageModel, ids_NB1: Tensor, state: LMState
) -> tuple[list[Tensor], LMState]:
    """The logits after each token, and the state after all."""
    said = []
    with torch.inference_mode():
        for ids_B1 in ids_NB1:
            if steps is not None:
                done = steps.step(ids_B1, state)
                assert done is not None
                _, logits, state = done
            else:
                _, logits, state = stepped(model, None, ids_B1, state)
            said.append(logits)
    return said, state


def near(found: LMState, wanted: LMState) -> None:
    rows = range(found.batch_size)
    pairs = zip(pytree.tree_leaves(found.select(rows)), pytree.tree_leaves(wanted.select(rows)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.few(2, each="design")
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("design", [*DESIGNS, *VARIANTS])
def test_a_recording_gives_what_the_modules_give(design, rows):
    model = small(design)
    ids, before = tokens(rows, 40), read(model, rows)
    found, after = go_on(recorded(model), model, ids, before.fork())
    wanted, modules = go_on(None, model, ids, before.fork())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    near(after, modules)


@pytest.mark.few(5, each="design")
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("design", DESIGNS)
def test_a_packed_model_is_recorded(design, format, rows):
    model = small(design)
    convert(model, format)
    ids, before = tokens(rows, 20), read(model, rows)
    found, _ = go_on(recorded(model), model, ids, before.fork())
    wanted, _ = go_on(None, model, ids, before.fork())
    for one, other in zip(found, wanted, strict=True):
        apart = (one - other).abs().max() / other.abs().max()
        assert apart <= 2e-2, "what a matrix reads may round another way"


def test_a_packed_recording_takes_the_packed_matrices(monkeypatch):
    model = small("perspective2")
    convert(model, "4bit")
    written = []
    own = tape.packed
    monkeypatch.setattr(tape, "packed", lambda *a: (written.append(a[-1]), own(*a))[1])
    go_on(recorded(model), model, tokens(1, 1), read(model, 1))
    assert written.count("4bit") == sum(
        m.format == "4bit" for m in model.modules() if isinstance(m, QuantLinear)
    )
    assert written.count("int8") == 1, "the head"


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_that_is_no_giant_is_recorded(name):
    config = presets.get(name)
    with torch.device("meta"):
        size = sum(x.numel() for x in LanguageModel(config).parameters())
    if size > 6e6:
        pytest.skip("a giant")
    model = build(config).eval()
    ids = tokens(1, 18) % config.vocab_size
    with torch.inference_mode():
        before = model.hidden(ids[:12, :, 0].T)[1]
    ids = ids[12:]
    found, _ = go_on(recorded(model), model, ids, before.fork())
    wanted, _ = go_on(None, model, ids, before.fork())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("design", "format"),
    [*((design, None) for design in DESIGNS), *(("perspective2", format) for format in FORMATS)],
)
def test_a_row_has_its_bits_in_any_batch(design, format):
    model = small(design)
    if format is not None:
        convert(model, format)
    ids, before = tokens(24, 9), read(model, 24)
    whole, after = go_on(recorded(model), model, ids, before.fork())
    order = [3, 17, 0, 23, 8, 5, 2, 11]
    some, few = go_on(recorded(model), model, ids[:, order], before.select(order))
    for one, other in zip(whole, some, strict=True):
        assert torch.equal(one[order], other)
    for one, other in zip(
        pytree.tree_leaves(after.select(order)), pytree.tree_leaves(few.select(range(8))), strict=True
    ):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("design", ["perspective2", "transformer", "adr", "lens"])
def test_a_state_that_was_kept_goes_on_with_the_same_bits(design, tmp_path):
    model = small(design)
    steps, ids = recorded(model), tokens(1, 30)
    whole, after = go_on(steps, model, ids, read(model, 1))
    _, half = go_on(steps, model, ids[:13], read(model, 1))
    save_state(tmp_path / "half.state", half, model)
    go_on(steps, model, tokens(1, 5, 1), half)  # it is used up, and its memory taken
    rest, end = go_on(steps, model, ids[13:], load_state(tmp_path / "half.state", model))
    assert all(torch.equal(one, other) for one, other in zip(whole[13:], rest, strict=True))
    for one, other in zip(pytree.tree_leaves(after.take(0)), pytree.tree_leaves(end.take(0)), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_states_that_take_turns_do_not_meet():
    model = small("transformer")
    steps, ids = recorded(model), tokens(1, 12)
    alone = [go_on(steps, model, tokens(1, 12, n), read(model, 1))[0] for n in range(3)]
    states = [read(model, 1) for _ in range(3)]
    for at in range(len(ids)):
        for n, state in enumerate(states):
            said, states[n] = go_on(steps, model, tokens(1, 12, n)[at : at + 1], state)
            assert torch.equal(said[0], alone[n][at])


ATTENTION = {
    "groups": AttentionConfig(4, kv_heads=2, head_dim=10, bias=True, out_bias=False),
    "norms": AttentionConfig(
        4,
        rope_share=0.5,
        kv_heads=1,
        head_dim=10,
        qk_norm="head",
        rope_scaling=RopeScaling("llama3", 4.0, 16),
    ),
    "cap and gate": AttentionConfig(
        4,
        kv_heads=2,
        qk_norm="all",
        scale=0.4,
        cap=1.5,
        gate="sigmoid",
        rope_scaling=RopeScaling("yarn", 4.0, 16),
    ),
    "window": AttentionConfig(4, kv_heads=2, window=5, cap=2.0),
    "brief cache": AttentionConfig(4, kv_heads=2, cache="bfloat16"),
}


@functools.cache
def attentive(name: str) -> LanguageModel:
    model = build(ModelConfig(name, 300, 32, (BlockConfig(ATTENTION[name], SwiGLUConfig(40)),) * 3), 1).eval()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=draw)
    return model


@pytest.mark.few(2, each="name")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_every_kind_is_recorded(name, rows, dtype):
    model = copy.deepcopy(attentive(name)).to(dtype)
    ids, before = tokens(rows, 60), read(model, rows, 9)
    found, after = go_on(recorded(model), model, ids, before.fork())
    wanted, modules = go_on(None, model, ids, before.fork())
    brief = torch.bfloat16 if name == "brief cache" else dtype
    assert all(
        x.dtype is brief for x in pytree.tree_leaves(after) if torch.is_floating_point(torch.as_tensor(x))
    )
    if dtype is torch.float32:
        tolerance = 1e-2 if name == "brief cache" else 1e-5  # another last bit may round another way
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=tolerance)
        if name != "brief cache":
            near(after, modules)
        return
    right, _ = go_on(None, attentive(name), ids, read(attentive(name), rows, 9))
    errors = [
        torch.stack([(x.float() - y).norm() for x, y in zip(said, right, strict=True)]).norm()
        for said in (found, wanted)
    ]
    assert errors[0] <= 1.2 * errors[1], "no further from float32 than the modules are"


@pytest.mark.parametrize("name", ["groups", "window"])
def test_matrices_of_16_bits_are_recorded_as_they_are(name):
    whole = attentive(name)
    weights = {n: x.bfloat16() if x.ndim > 1 else x for n, x in whole.state_dict().items()}
    with torch.device("meta"):
        model = LanguageModel(whole.config)
    half.keep(model, weights)
    model.load_state_dict(weights, assign=True)
    model.eval()
    ids, before = tokens(3, 20), read(model, 3)
    found, after = go_on(recorded(model), model, ids, before.fork())
    wanted, modules = go_on(None, model, ids, before.fork())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    near(after, modules)
    (made,) = recorded(model)._made.values()
    large = sum(x.nbytes for x in made._tape.kept if x.dtype is torch.float32 and x.numel() >= 300 * 32)
    assert large == 0, "no matrix is widened"


@pytest.mark.parametrize("name", ["groups", "window"])
def test_a_row_in_bfloat16_has_its_bits_in_any_batch(name):
    model = copy.deepcopy(attentive(name)).bfloat16()
    ids, before = tokens(3, 5), read(model, 3, 9)
    together, _ = go_on(recorded(model), model, ids, before.fork())
    alone, _ = go_on(recorded(model), model, ids[:, 1:2], before.take(1))
    assert all(torch.equal(x[1], y[0]) for x, y in zip(together, alone, strict=True))


def test_a_model_in_bfloat16_that_multiplies_its_embedding_is_recorded():
    config = dataclasses.replace(attentive("groups").config, embedding_factor=3.3)
    model = build(config, 1).bfloat16().eval()
    assert recorded(model).step(torch.tensor([[3]]), read(model, 1)) is not None


def test_a_deep_model_with_a_brief_cache_is_recorded():
    """A last bit that rounds another way in one layer is seen in all above it."""
    block = BlockConfig(AttentionConfig(4, kv_heads=2, cache="bfloat16"), SwiGLUConfig(160))
    model = build(ModelConfig("deep", 300, 64, (block,) * 24, norm_eps=1e-5), 1).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qkv" in name:
                parameter.mul_(6)  # sharp attention
    assert recorded(model).step(torch.tensor([[3]]), read(model, 1)) is not None


def test_one_recording_takes_caches_of_all_lengths(monkeypatch):
    monkeypatch.setattr(steps_module, "MOST_BYTES", 1 << 10)  # of what does not grow
    model = copy.deepcopy(attentive("groups"))
    steps = recorded(model)
    with torch.inference_mode():
        for length in (9, 200, 64, 1000, 63):
            state, id = read(model, 1, length), torch.tensor([[3]])
            wanted = stepped(model, None, id, state.fork())[1]
            found = steps.step(id, state)
            assert found is not None
            torch.testing.assert_close(found[1], wanted, rtol=1e-4, atol=1e-5)
    assert len(steps._made) == 1


def test_the_bound_on_bytes_is_one_of_the_rows_that_step_together(monkeypatch):
    """The state of all rows of a batch may be larger."""
    size, ids_B1 = small("gla").init_state(16).nbytes, torch.full((16, 1), 3)
    for bytes, taken in ((size // 2 + 1, True), (size // 4, False)):
        monkeypatch.setattr(steps_module, "MOST_BYTES", bytes)
        model = copy.deepcopy(small("gla"))
        with torch.inference_mode():
            assert (recorded(model).step(ids_B1, model.init_state(16)) is not None) == taken


def test_a_cache_grows_and_the_state_says_so():
    model = small("transformer")
    before = read(model, 1)
    _, after = go_on(recorded(model), model, tokens(1, 100), before)
    cache = after.layers[0]
    assert cache.used == 112 <= cache.slots and int(cache.length_B) == 112
    cache.room()


def test_a_model_that_is_gone_leaves_nothing():
    model = small("gla")
    go_on(recorded(model), model, tokens(1, 2), read(model, 1))
    known, count = weakref.ref(model), len(steps_module._known)
    del model
    gc.collect()
    assert known() is None and len(steps_module._known) < count


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.to(torch.float16),
        lambda model: model.blocks[0].register_forward_hook(lambda *_: None) and model,
    ],
    ids=["float64", "float16", "a hook"],
)
def test_others_are_stepped_by_the_modules(change):
    model = small("perspective2")
    change(model)
    assert steps_of(model) is None


def test_without_kernels_the_modules_step(monkeypatch):
    monkeypatch.setattr(native, "wanted", lambda: False)
    assert steps_of(small("gla")) is None


def test_what_cannot_be_recorded_is_stepped_by_the_modules_and_said_once(caplog, monkeypatch):
    monkeypatch.delitem(HANDLERS, "linear")
    tried, model = [], small("transformer")
    own = steps_module.Recorder
    monkeypatch.setattr(steps_module, "Recorder", lambda *given: (tried.append(1), own(*given))[1])
    with caplog.at_level(logging.INFO, "perspectron"), torch.inference_mode():
        for length in (5, 9, 70, 200):  # each a recording of its own shape, if it were
            state = read(model, 1, length)
            kept, steps = state.fork(), recorded(model)
            assert steps.step(torch.tensor([[3]]), state) is None
            said = stepped(model, steps, torch.tensor([[3]]), state)[1]
            assert torch.equal(said, stepped(model, None, torch.tensor([[3]]), kept)[1])
        assert len(tried) == 1
        model.norm.eps *= 2  # another model: it is tried again
        assert recorded(model).step(torch.tensor([[3]]), read(model, 1)) is None and len(tried) == 2
    levels = [record.levelname for record in caplog.records if "without a recording" in record.message]
    assert levels == ["WARNING", "INFO"], "the same reason, of the same model"


@pytest.mark.parametrize("design", DESIGNS)
def test_a_text_that_begins_with_single_tokens_is_recorded_and_nothing_is_said(design, caplog):
    """An empty state may have another shape than those that follow: that refuses the kind of state no recording."""
    model = small(design)
    with caplog.at_level(logging.WARNING, "perspectron"), torch.inference_mode():
        state = model.init_state(1)
        for _ in range(3):
            steps = recorded(model)
            _, _, state = stepped(model, steps, torch.tensor([[3]]), state)
    assert any(made is not None for made in steps._made.values()) and not caplog.records


def test_a_shape_that_is_refused_after_others_were_recorded_is_refused_alone(monkeypatch):
    model = small("transformer")
    steps = recorded(model)
    with torch.inference_mode():
        assert steps.step(tokens(2, 1)[0], read(model, 2)) is not None
        monkeypatch.delitem(HANDLERS, "linear")
        assert steps.step(tokens(3, 1)[0], read(model, 3)) is None
        monkeypatch.undo()
        assert steps.step(tokens(3, 1)[0], read(model, 3)) is None, "the same shape"
        assert steps.step(tokens(4, 1)[0], read(model, 4)) is not None


def test_a_deep_packed_model_is_recorded():
    """A last bit that rounds another way is most of the logits some layers later."""
    config = presets.small("transformer", vocab_size=300, d_model=64, layers=12, seq_len=64)
    model = build(config, seed=1).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(3 if parameter.ndim == 2 and "blocks" in name else 1)
    convert(model, "4bit")
    before = read(model, 1)
    with torch.inference_mode():
        done = recorded(model).step(torch.tensor([[3]]), before.fork())
        assert done is not None
        _, wanted, _ = stepped(model, None, torch.tensor([[3]]), before)
    torch.testing.assert_close(done[1], wanted, rtol=0, atol=0.3 * float(wanted.abs().max()))


def test_a_packed_model_is_recorded_without_the_compiler():
    said = """
import sys, torch
from perspectron import presets
from perspectron.decode.steps import steps_of
from perspectron.model.model import build
from perspectron.quant.convert import convert
model = build(presets.small("gla", vocab_size=300, d_model=32, layers=2, seq_len=64)).eval()
convert(model, "4bit")
with torch.inference_mode():
    state = model.hidden(torch.ones(1, 9, dtype=torch.int64))[1]
    assert steps_of(model).step(torch.tensor([[3]]), state) is not None
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", said], check=True)


@pytest.mark.parametrize("design", ["gla", "perspective2", "transformer"])
def test_what_a_last_bit_does_to_the_modules_themselves_is_no_fault_of_a_recording(design, monkeypatch):
    """Thirty layers that become those of another model made 1.01e-4 of it, where 1e-4 was the bound. Few layers make
    nothing of a millionth that could be told from their own last bits, which are those of a processor."""
    monkeypatch.setattr(steps_module, "near", torch.equal)
    monkeypatch.setattr(steps_module, "DISTURBANCE", 1e-4)
    model = small(design)
    assert recorded(model).step(torch.tensor([[3]]), read(model, 1)) is not None
    swapped = {"mul": "div", "div": "mul", "silu": "tanh"}
    monkeypatch.setattr(tape, "CODES", tuple(swapped.get(code, code) for code in tape.CODES))
    model = small(design)
    assert recorded(model).step(torch.tensor([[3]]), read(model, 1)) is None


@pytest.mark.parametrize("format", [None, "4bit"])
def test_a_recording_that_is_wrong_is_not_used(format, monkeypatch):
    swapped = {"mul": "div", "div": "mul", "silu": "tanh"}
    monkeypatch.setattr(tape, "CODES", tuple(swapped.get(code, code) for code in tape.CODES))
    model = small("gla")
    if format is not None:
        convert(model, format)
    assert recorded(model).step(torch.tensor([[3]]), read(model, 1)) is None


@pytest.mark.parametrize("design", ["perspective-experts", "perspective2", "gpt2"])
def test_it_is_the_same_without_inference_mode(design):
    model, ids = small(design), tokens(1, 4)
    said, _ = go_on(recorded(model), model, ids, read(model, 1))
    state = read(model, 1).fork()
    with torch.no_grad():
        for wanted, ids_B1 in zip(said, ids, strict=True):
            _, logits, state = stepped(model, recorded(model), ids_B1, state)
            assert torch.equal(logits, wanted) and not logits.is_inference()


def test_autocast_is_for_the_modules():
    model = small("perspective-experts")
    steps = recorded(model)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        _, found, _ = stepped(model, steps, torch.tensor([[3]]), read(model, 1))
        _, wanted, _ = stepped(model, None, torch.tensor([[3]]), read(model, 1))
    assert torch.equal(found, wanted)


def test_the_first_token_of_all_is_read_by_the_modules():
    model = small("transformer")
    with torch.inference_mode():
        assert recorded(model).step(torch.tensor([[3]]), model.init_state(1)) is None


def test_drawing_takes_the_recording(tokenizer, monkeypatch):
    model, calls = small("perspective2"), []
    monkeypatch.setattr(Steps, "step", lambda self, *a, own=Steps.step: calls.append(1) or own(self, *a))
    rows = Rows(model, tokenizer)
    rows.add(prompt_of(9, 1), max_tokens=6)
    while rows.active:
        rows.step()
    assert len(calls) == 5  # the first token is drawn after the prompt


def test_a_state_of_another_precision_has_a_recording_of_its_own():
    model = small("transformer")
    ids = torch.tensor([prompt_of(9, 1)])
    with torch.inference_mode():
        brief = model.to(torch.bfloat16).hidden(ids)[1]
        model.float()
        steps = recorded(model)
        assert steps.step(torch.tensor([[3]]), read(model, 1)) is not None
        wanted = stepped(model, None, torch.tensor([[3]]), brief.fork())[1]
        found = steps.step(torch.tensor([[3]]), brief)
    assert found is not None and len(steps._made) == 2
    torch.testing.assert_close(found[1], wanted, rtol=1e-4, atol=1e-5)


def test_positions_end_where_the_table_does():
    model = small("gpt2")
    steps, state = recorded(model), read(model, 1)
    ids = torch.full((model.config.positions, 1, 1), 3)
    with refused(ConfigError, "positions"), torch.inference_mode():
        functools.reduce(lambda state, ids_B1: stepped(model, steps, ids_B1, state)[2], ids, state)
    beyond = read(model, 1)
    beyond = dataclasses.replace(beyond, length_B=torch.tensor([model.config.positions + 1]))
    with torch.inference_mode():
        assert steps.step(ids[0], beyond) is None


def test_gradients_must_be_off():
    model = small("gla")
    with refused(ValueError, "consume_state"):
        stepped(model, recorded(model), torch.tensor([[3]]), read(model, 1))


@pytest.mark.parametrize(
    ("ids", "error"), [([[300]], ConfigError), ([[3, 4]], None), ([[3], [4]], ConfigError)]
)
def test_tokens_that_do_not_fit_are_left_to_the_modules(ids, error):
    model = small("gla")
    state = read(model, 1)
    with torch.inference_mode():
        kept = state.fork()
        assert recorded(model).step(torch.tensor(ids), state) is None
        near(state, kept)
        if error is not None:
            with pytest.raises(error):
                stepped(model, recorded(model), torch.tensor(ids), state)


def test_who_looks_on_sees_the_modules():
    model = small("gla")
    steps, state = recorded(model), read(model, 1)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        stepped(model, steps, torch.tensor([[3]]), state)
    assert counter.get_total_flops() > 0
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert steps_of(model) is None
    finally:
        handle.remove()


def test_recordings_are_few_and_states_are_let_go():
    model = small("transformer")
    steps = recorded(model)
    for length in range(3, 40):
        _, after = go_on(steps, model, tokens(1, 2), read(model, 1, length))
    assert len(steps._made) == 1
    known = weakref.ref(after)
    go_on(steps, model, tokens(1, 1), read(model, 1))
    del after
    gc.collect()
    assert known() is None


def test_a_gradient_through_a_state_that_a_recording_has_used_up_is_refused():
    model, ids = small("gla"), tokens(1, 1)
    with torch.no_grad():
        state = model.hidden(torch.tensor([prompt_of(12, 0)[:12]]))[1]
        steps = recorded(model)
    loss = model.hidden(ids[0], state)[0].sum()
    with torch.no_grad():
        assert steps.step(ids[0], state) is not None
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()
