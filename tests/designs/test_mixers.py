"""Every mixer against the contract (design.md), by what it registers alone: nothing here knows one of them. So, too,
options that change what a mixer computes or keeps.

Shapes: B batch, T time, D model width.
"""

import copy
import dataclasses
import itertools

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import perspectron
from perspectron.designs.adr.mixer import ADRConfig
from perspectron.designs.delta.gdn import GDNConfig
from perspectron.designs.delta.gdn2 import GDN2Config
from perspectron.designs.delta.kda import KDAConfig
from perspectron.designs.gated_conv.mixer import GatedConvConfig
from perspectron.designs.lens.mixer import LensConfig
from perspectron.designs.mamba.mixer import MambaConfig
from perspectron.designs.perspective.pdr import PDRConfig
from perspectron.designs.rglru.mixer import RGLRUConfig
from perspectron.designs.ssd.mixer import SSDConfig
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.mixer import mixers
from perspectron.model.state import LMState
from perspectron.ops.rope import RopeScaling
from tests.refusals import refused

D = 16
LENGTHS = [1, 63, 64, 65, 150]
MODES = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
pytestmark = pytest.mark.few(3, each="name")
HYPOTHESIS = settings(max_examples=15, deadline=None, derandomize=True, database=None)

OPTIONS = {
    "attention, of transformers": AttentionConfig(
        4,
        1e4,
        rope_share=0.5,
        kv_heads=2,
        head_dim=10,
        bias=True,
        out_bias=False,
        qk_norm="head",
        rope_scaling=RopeScaling("llama3", 4.0, 16),
    ),
    "attention, capped": AttentionConfig(
        4,
        kv_heads=1,
        qk_norm="all",
        scale=0.7,
        cap=1.5,
        gate="sigmoid",
        rope_scaling=RopeScaling("yarn", 4.0, 16),
    ),
    "attention, window": AttentionConfig(4, kv_heads=2, window=5, cap=2.0, gate="sigmoid"),
    "pdr, gate_rank": PDRConfig(4, gate_rank=3),
    "pdr, fixed_decay": PDRConfig(4, fixed_decay=True),
    "adr, keys": ADRConfig(2, 0.9, couple=False, remember="keys", rope_base=1e4),
    "adr, values": ADRConfig(2, 0.9, remember="values"),
    "lens, rotary": LensConfig(2, output_gate=True, rope_base=1e4),
    "gdn, negative": GDNConfig(2, negative=True),
    "gdn, grouped": GDNConfig(4, key_heads=2, key_dim=6, value_dim=10),
    "ssd, grouped": SSDConfig(8, 5, heads=4, groups=2, bias=True, conv_bias=False, dt_min=0.1, dt_max=0.7),
    "ssd, norm before": SSDConfig(8, 4, conv=3, norm="before"),
    "ssd, no norm": SSDConfig(6, 3, heads=3, groups=3, norm="none"),
    "gated_conv, bias": GatedConvConfig(4, bias=True),
    "mamba, norm": MambaConfig(3, conv=3, rank=2, bias=True, conv_bias=False, norm=True),
    "rglru, wide": RGLRUConfig(4, inner=24, conv=3),
    "kda, negative": KDAConfig(2, negative=True),
    "kda, of Kimi Linear": KDAConfig(3, head_dim=6, gate_bias=False),
    "gdn2, negative": GDN2Config(2, negative=True),
}
MIXERS = mixers()
SMALL = {kind: mixer.small for kind, mixer in MIXERS.items()} | OPTIONS

every_mixer = pytest.mark.parametrize("name", SMALL)
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
stateless = pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"]
)  # where memory may be reused; the tests of what is computed take one of them


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Wide weights: gates go from almost 0 to almost 1, attention from flat to sharp."""
    draw = torch.Generator().manual_seed(seed)
    module.cpu()  # where its own initialisation draws
    for parameter in module.parameters():
        parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=draw)
    for part in module.modules():
        if hasattr(part, "init_weights"):
            part.init_weights(draw)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64).to(parameter)
        parameter += noise * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 3.0)
    module.to(torch.get_default_device())


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    module = MIXERS[SMALL[name].kind](D, 1e-6, SMALL[name])
    randomise(module, seed)
    return module.to(dtype)


def tokens(B: int, T: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def empty(module: nn.Module, B: int, dtype: torch.dtype = torch.float64, capacity: int = 0):
    return module.init_state(B, torch.get_default_device(), dtype, capacity)


def fork(state):
    return LMState((state,)).fork().layers[0]


def select(state, rows: list[int]):
    return LMState((state,)).select(torch.tensor(rows)).layers[0]


def leaves(state) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


def warm(module: nn.Module, B: int, T: int = 37, dtype: torch.dtype = torch.float64):
    """A non-empty state."""
    with torch.no_grad():
        return module(tokens(B, T, seed=99, dtype=dtype), empty(module, B, dtype))[1]


def pieces(T: int, cuts) -> list[slice]:
    edges = [0, *sorted(set(cuts)), T]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if a < b]


def read(module: nn.Module, x_BTD: Tensor, state, cuts=(), *, reset_BT=None, pad_BT=None):
    """(outputs, state) of the tokens, read in pieces; None masks stay None."""
    outputs = []
    for part in pieces(x_BTD.shape[1], cuts):
        reset, pad = (None if mask is None else mask[:, part] for mask in (reset_BT, pad_BT))
        y, state, _ = module(x_BTD[:, part], state, reset_BT=reset, pad_BT=pad)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def check(module, x_BTD, state, cuts, mode, *, reset_BT=None, pad_BT=None, tolerance=1e-9) -> None:
    """A batch with resets and padding, read in pieces, equals each of its documents read alone without either:
    at its tokens, and over the 20 tokens after its end. Outputs at padding are finite."""
    B, T, _ = x_BTD.shape
    start = fork(state)
    after = tokens(B, 20, seed=7, dtype=x_BTD.dtype)
    with mode():
        y, end = read(module, x_BTD, fork(state), cuts, reset_BT=reset_BT, pad_BT=pad_BT)
        y_after, _ = read(module, after, end)
    assert y.isfinite().all()
    for row in range(B):
        reset = [] if reset_BT is None else reset_BT[row].nonzero()[:, 0].tolist()
        valid = torch.ones(T, dtype=torch.bool) if pad_BT is None else ~pad_BT[row]
        with torch.no_grad():
            alone = select(start, [row])
            for part in pieces(T, reset):
                if part.start in reset:
                    alone = empty(module, 1, x_BTD.dtype)
                keep = torch.arange(part.start, part.stop)[valid[part]]
                if len(keep):
                    expected, alone, _ = module(x_BTD[row, keep][None], alone)
                    close(y[row, keep], expected[0], tolerance)
            close(y_after[row], module(after[row : row + 1], alone)[0][0], tolerance)


@every_mixer
def test_the_table_entry_fits_together(name):
    module = build(name)
    assert module.config == SMALL[name] and SMALL[name].kind == name.split(",")[0]
    state = empty(module, 3)
    assert dataclasses.is_dataclass(state)
    y, after, aux = module(tokens(3, 5), state)
    assert y.shape == (3, 5, D) and type(after) is type(state) and isinstance(aux, dict)
    assert all(leaf.shape[0] == 3 for leaf in leaves(after)), "every state tensor has the batch first"
    assert torch.equal(module(tokens(3, 5))[0], y), "without a state it starts from the empty one"


@every_mixer
@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_no_rows_and_no_tokens_are_an_empty_result(name, B, T, masked):
    module, mask = build(name), torch.zeros(B, T, dtype=torch.bool) if masked else None
    start, x = warm(module, 2) if B else empty(module, 0), tokens(B, T).requires_grad_()
    y, state, _ = module(x, start, reset_BT=mask, pad_BT=mask)
    y.sum().backward()
    assert y.shape == (B, T, D) and y.dtype == x.dtype and x.grad.shape == x.shape
    kept = fork(start)
    assert same(state, kept)
    if B:
        with torch.no_grad():
            module(tokens(B, 1), state, consume_state=True)
        assert same(start, kept), "the state after no tokens is another one"


# ---------------------------------------------------------------- time


@every_mixer
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=["train", "inference"])
@pytest.mark.parametrize("masked", [False, True])
def test_no_output_sees_a_later_token(name, mode, masked):
    module, x = build(name), tokens(2, 150)
    masks = {
        "reset_BT": torch.zeros(2, 150, dtype=torch.bool),
        "pad_BT": torch.zeros(2, 150, dtype=torch.bool),
    }
    masks = masks if masked else {}
    with mode():
        before, _ = read(module, x, empty(module, 2), **masks)
        for t in (0, 1, 7, 8, 63, 64, 127, 128, 149):
            changed = x.clone()
            changed[:, t] += 1
            y, _ = read(module, changed, empty(module, 2), **masks)
            close(y[:, :t], before[:, :t], 1e-12)
            assert (y[:, t] - before[:, t]).abs().max() > 1e-3


@every_mixer
@pytest.mark.parametrize(
    ("T", "dtype", "tolerance"),
    [*((T, torch.float64, 1e-9) for T in LENGTHS), (150, torch.float32, 1e-4)],
    ids=str,
)
def test_steps_equal_the_whole(name, T, dtype, tolerance):
    module, x = build(name, dtype), tokens(2, T, dtype=dtype)
    whole, _ = read(module, x, empty(module, 2, dtype))
    for capacity in (0, T):
        with torch.inference_mode():
            steps, _ = read(module, x, empty(module, 2, dtype, capacity), range(T))
        close(steps, whole.detach(), tolerance)


@every_mixer
@pytest.mark.parametrize("capacity", [0, 40])
def test_split_anywhere(name, capacity):
    module, x = build(name), tokens(2, 150)
    whole, end = read(module, x, empty(module, 2))
    rest, _ = read(module, tokens(2, 20, seed=7), end)
    for split in (1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 149):
        with torch.inference_mode():
            y, end = read(module, x, empty(module, 2, capacity=capacity), [split])
            close(y, whole.detach(), 1e-9)
            close(read(module, tokens(2, 20, seed=7), end)[0], rest.detach(), 1e-9)


@every_mixer
@HYPOTHESIS
@given(st.lists(st.integers(1, 149), max_size=20))
def test_a_text_split_into_many_parts_is_read_as_the_whole(name, cuts):
    module, x = build(name), tokens(1, 150)
    whole, _ = read(module, x, empty(module, 1))
    with torch.no_grad():
        close(read(module, x, empty(module, 1), cuts)[0], whole.detach(), 1e-9)


def same(state, other) -> bool:
    """Bit for bit."""
    pairs = zip(pytree.tree_leaves(state), pytree.tree_leaves(other), strict=True)
    return pytree.tree_structure(state) == pytree.tree_structure(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs
    )


def starts(module: nn.Module, dtype: torch.dtype) -> list:
    """States of every kind: empty, with room, read into, and read into with room."""
    with torch.no_grad():
        roomy = module(tokens(2, 37, 99, dtype), empty(module, 2, dtype, capacity=90))[1]
    return [empty(module, 2, dtype), empty(module, 2, dtype, 60), warm(module, 2, dtype=dtype), roomy]


@every_mixer
@every_mode
@pytest.mark.parametrize("T", [1, 30])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_state_handed_in_stays(name, mode, T, masked, dtype):
    module, mask = build(name, dtype), torch.zeros(2, T, dtype=torch.bool) if masked else None
    for state in starts(module, dtype):
        kept = fork(state)
        with mode():
            _, after = read(module, tokens(2, T, dtype=dtype), state, reset_BT=mask, pad_BT=mask)
            if not torch.is_grad_enabled():  # nor does the new one share its memory
                module(tokens(2, 1, dtype=dtype), after, consume_state=True)
        assert same(state, kept)


@every_mixer
@stateless
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_state_consumed_gives_the_same_bits(name, mode, masked, dtype):
    module, x = build(name, dtype), tokens(2, 33, dtype=dtype)
    reset, pad = resets(33)[3:5], padding(33)[3:5]
    masks = {"reset_BT": reset, "pad_BT": pad} if masked else {}
    with mode():
        for state, other in zip(starts(module, dtype), starts(module, dtype), strict=True):
            for part in pieces(33, [1, 2, 3, 23, 24, 32]):
                here = {key: mask[:, part] for key, mask in masks.items()}
                y, state, _ = module(x[:, part], state, **here)
                y_other, other, _ = module(x[:, part], other, **here, consume_state=True)
                assert torch.equal(y, y_other) and same(state, other)


@every_mixer
def test_a_state_made_in_inference_mode_is_consumed_outside_of_it(name):
    module = build(name, torch.float32)
    with torch.inference_mode():
        state = warm(module, 2, dtype=torch.float32)
    with torch.no_grad():
        y, _, _ = module(tokens(2, 1, dtype=torch.float32), state)
        assert torch.equal(y, module(tokens(2, 1, dtype=torch.float32), state, consume_state=True)[0])


@every_mixer
def test_a_state_is_not_consumed_while_gradients_are_on(name):
    config = ModelConfig("one block", 11, D, (BlockConfig(SMALL[name], SwiGLUConfig(8)),))
    model, ids = perspectron.build(config), torch.ones(2, 1, dtype=torch.int64)
    with refused(ValueError, "consume_state"):
        model(ids, model.init_state(2), consume_state=True)
    block = model.blocks[0]
    state = block.init_state(2, model.device, model.dtype)
    with refused(ValueError, "consume_state"):
        block(torch.zeros(2, 1, D), state, model.ffn_of(block), None, None, consume_state=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap: torch takes rows one by one
@pytest.mark.parametrize(
    "name", [name for name in SMALL if name.startswith(("attention", "lens", "mla", "window"))]
)
def test_attention_stands_functional_transforms(name):
    module, x, dx = build(name), tokens(3, 9), tokens(3, 9, seed=5)
    step = 1e-6 * dx
    with torch.no_grad():
        slope = (module(x + step)[0] - module(x - step)[0]) / 2e-6
    close(torch.func.jvp(lambda x: module(x)[0], (x,), (dx,))[1], slope, 1e-6)
    close(torch.func.vmap(lambda x: module(x[None])[0][0])(x), module(x)[0], 1e-9)
    module(x)[0].square().sum().backward()
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    gradients = torch.func.grad(lambda w: torch.func.functional_call(module, w, (x,))[0].square().sum())(
        weights
    )
    for name, weight in module.named_parameters():
        close(gradients[name], weight.grad, 1e-9)


# ---------------------------------------------------------------- rows


@every_mixer
@pytest.mark.parametrize("cuts", [[], [40, 41, 42]])
def test_rows_do_not_meet(name, cuts):
    module, x, state = build(name), tokens(4, 90), warm(build(name), 4)
    order = [2, 0, 3, 1]
    with torch.inference_mode():
        y, _ = read(module, x, fork(state), cuts)
        close(read(module, x[order], select(state, order), cuts)[0], y[order], 1e-12)
        for row in range(4):
            close(read(module, x[row : row + 1], select(state, [row]), cuts)[0], y[row : row + 1], 1e-12)
        x[1] += 1
        y_other, _ = read(module, x, fork(state), cuts)
    close(y_other[[0, 2, 3]], y[[0, 2, 3]], 1e-12)
    assert (y_other[1] - y[1]).abs().max() > 1e-3


@every_mixer
def test_selected_rows_go_on_by_themselves(name):
    module, state = build(name), warm(build(name), 3)
    rows = [1, 1, 0, 2, 1]
    x = tokens(5, 30)
    with torch.no_grad():
        y, _ = read(module, x, select(state, rows), [1, 2, 3])
        for i, row in enumerate(rows):
            close(y[i : i + 1], read(module, x[i : i + 1], select(state, [row]))[0], 1e-9)


@every_mixer
def test_a_fork_goes_its_own_way(name):
    module, ways = build(name), [tokens(2, 40, seed) for seed in (3, 4)]
    with torch.inference_mode():
        expected = [read(module, x, warm(module, 2))[0] for x in ways]
        state = warm(module, 2)
        other = fork(state)
        outputs = [[], []]
        for t in range(40):
            y, state, _ = module(ways[0][:, t : t + 1], state)
            outputs[0].append(y)
            y, other, _ = module(ways[1][:, t : t + 1], other)
            outputs[1].append(y)
    for parts, whole in zip(outputs, expected, strict=True):
        close(torch.cat(parts, 1), whole, 1e-9)


# ---------------------------------------------------------------- padding and packing


def padding(T: int) -> Tensor:
    """Rows without padding; with it left, right, in the middle, scattered, on all but one token, everywhere."""
    pad = torch.zeros(7, T, dtype=torch.bool)
    pad[1, : T // 3] = True
    pad[2, T // 4 :] = True
    pad[3, T // 5 : -T // 4] = True
    pad[4] = torch.rand(T, generator=torch.Generator().manual_seed(0)) < 0.5
    pad[5, :-1] = True
    pad[6] = True
    return pad


@every_mixer
@pytest.mark.parametrize("start", ["empty", "warm"])
@pytest.mark.parametrize("cuts", [[], [10, 20, 64, 100], range(150)], ids=["whole", "pieces", "steps"])
def test_padding_is_as_if_it_were_not_there(name, start, cuts):
    module, pad = build(name), padding(150)
    state = empty(module, len(pad)) if start == "empty" else warm(module, len(pad))
    check(module, tokens(len(pad), 150), state, cuts, torch.no_grad, pad_BT=pad)


@every_mixer
@pytest.mark.parametrize("cuts", [[], [3, 4], range(12)], ids=["whole", "pieces", "steps"])
def test_a_call_may_hold_nothing_but_padding(name, cuts):
    module = build(name)
    for B in (1, 2):
        x, pad = tokens(B, 12), torch.ones(B, 12, dtype=torch.bool)
        for state in (empty(module, B), empty(module, B, capacity=30), warm(module, B)):
            check(module, x, state, cuts, torch.no_grad, pad_BT=pad)


@every_mixer
@pytest.mark.parametrize("cuts", [[], range(70)], ids=["whole", "steps"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_what_stands_in_padding_does_not_matter(name, cuts, dtype, tolerance):
    module, pad = build(name, dtype), padding(70)
    x, more = tokens(len(pad), 70, dtype=dtype), tokens(len(pad), 20, seed=7, dtype=dtype)
    with torch.inference_mode():
        y, end = read(module, x, empty(module, len(pad), dtype), cuts, pad_BT=pad)
        after, _ = read(module, more, end)
        for fill in (0.0, 1e30, float("nan")):
            filled = x.masked_fill(pad[..., None], fill)
            y_filled, end = read(module, filled, empty(module, len(pad), dtype), cuts, pad_BT=pad)
            close(y_filled[~pad], y[~pad], tolerance)
            assert y_filled.isfinite().all()
            close(read(module, more, end)[0], after, tolerance)


@every_mixer
def test_padding_has_no_part_in_gradients(name):
    module, pad, gradients = build(name), padding(150), []
    for fill in (0.0, 1e4):
        x = tokens(len(pad), 150).masked_fill(pad[..., None], fill).requires_grad_()
        y, _ = read(module, x, warm(module, len(pad)), [70], pad_BT=pad)
        gradients.append(torch.autograd.grad(y[~pad].square().sum(), [x, *module.parameters()]))
        assert gradients[-1][0][pad].abs().max() == 0
        assert gradients[-1][0][~pad].abs().max() > 0
    for a, b in zip(*gradients, strict=True):
        close(a, b, 1e-9)


def resets(T: int) -> Tensor:
    """Rows with no reset; in the first column; on the last token; two and more in a row; many; nine in a row."""
    reset = torch.zeros(6, T, dtype=torch.bool)
    reset[1, 0] = True
    reset[2, -1] = True
    reset[3, [5, 6, T // 2, T // 2 + 1, T // 2 + 2]] = True
    reset[4] = torch.rand(T, generator=torch.Generator().manual_seed(0)) < 0.1
    reset[5, :9] = True
    return reset


@every_mixer
@pytest.mark.parametrize("start", ["empty", "warm"])
@pytest.mark.parametrize("cuts", [[], [10, 75, 76, 100], range(150)], ids=["whole", "pieces", "steps"])
def test_packed_documents_equal_each_alone(name, start, cuts):
    module, reset = build(name), resets(150)
    state = empty(module, len(reset)) if start == "empty" else warm(module, len(reset))
    check(module, tokens(len(reset), 150), state, cuts, torch.inference_mode, reset_BT=reset)


@every_mixer
@pytest.mark.parametrize("cuts", [[], [3, 4, 8, 9, 30], range(50)], ids=["whole", "pieces", "steps"])
def test_resets_and_padding_together(name, cuts):
    draw = torch.Generator().manual_seed(5)
    pad, reset = (torch.rand(8, 50, generator=draw) < p for p in (0.4, 0.1))
    pad[0, :9], reset[0, 8], reset[0, 9] = True, True, False  # a document that begins with padding
    pad[1, -1], reset[1, -1] = True, True  # and one that is nothing else
    module = build(name)
    check(module, tokens(8, 50), warm(module, 8), cuts, torch.inference_mode, reset_BT=reset, pad_BT=pad)


@every_mixer
@HYPOTHESIS
@given(st.data())
def test_any_resets_padding_split_and_start(name, data):
    B, T = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    bits = st.lists(st.integers(0, 3), min_size=B * T, max_size=B * T)
    pad = torch.tensor(data.draw(bits)).view(B, T) == 0
    reset = torch.tensor(data.draw(bits)).view(B, T) == 0
    module = build(name)
    state = empty(module, B) if data.draw(st.booleans()) else warm(module, B, data.draw(st.integers(1, 20)))
    cuts = data.draw(st.lists(st.integers(1, 39).filter(lambda cut: cut < T), max_size=8)) if T > 1 else []
    mode = data.draw(st.sampled_from([torch.no_grad, torch.inference_mode]))
    check(module, tokens(B, T), state, cuts, mode, reset_BT=reset, pad_BT=pad)


# ---------------------------------------------------------------- what is not finite


def spoil(state, rows: slice, fill: float):
    """A copy whose floating-point tensors hold `fill` in the last place of each of these rows."""
    state = fork(state)
    for leaf in leaves(state):
        if leaf.is_floating_point() and leaf.numel():
            leaf[rows].select(-1, -1).fill_(fill)
    return state


@every_mixer
@pytest.mark.parametrize(
    ("mode", "cuts"),
    [(torch.enable_grad, []), (torch.inference_mode, [5, 6, 20, 21, 22, 31])],
    ids=["train", "inference in pieces"],
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("spoilt", ["state", "token"])
def test_what_is_not_finite_ends_at_a_reset(name, mode, cuts, padded, spoilt):
    """Spoilt rows with a reset at once, in the middle, twice, on the last token, never; then two sound ones, one with a
    reset. What is spoilt comes before all resets, and from the first one on nothing shows it."""
    first = [0, 21, 20, 39, None, 20, None]
    if spoilt == "token":
        first[0] = 6  # the spoilt one is number 5
    B, T = len(first), 40
    reset, pad = torch.zeros(B, T, dtype=torch.bool), None
    for row, t in enumerate(first):
        if t is not None:
            reset[row, t] = True
    reset[2, 29] = True
    if padded:
        pad = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 0.3
        pad[:, [5, 39]] = False
    module, x, more = build(name), tokens(B, T), tokens(B, 5, seed=5)
    start = warm(module, B)
    at = [5 if spoilt == "token" else 0] * B  # who reads it first
    if padded and spoilt == "state":
        at = (~pad).long().argmax(1).tolist()

    def run(x, state):
        outputs = []
        for part in pieces(T, cuts):
            here = None if not reset[:, part].any() else reset[:, part]
            y, state = read(
                module, x[:, part], state, reset_BT=here, pad_BT=None if pad is None else pad[:, part]
            )
            outputs.append(y)
        return torch.cat(outputs, 1), read(module, more, state)[0], state

    with mode():
        y, y_more, _ = run(x, start)
        for fill in (torch.nan, torch.inf):
            bad_x, bad_start = x.clone(), start
            if spoilt == "state":
                bad_start = spoil(start, slice(5), fill)
            else:
                bad_x[:5, 5, 3] = fill
            found, found_more, found_end = run(bad_x, bad_start)
            for row, t in enumerate(first):
                if row == 4:
                    assert not found[4, at[4]].isfinite().all(), "nothing ends it: it must not vanish"
                    continue
                t = t if row < 5 else 0
                close(found[row, t:], y[row, t:], 1e-12)
                close(found_more[row], y_more[row], 1e-12)
                assert all(leaf.isfinite().all() for leaf in leaves(select(found_end, [row]))), row
                if row < 5 and t > at[row]:
                    assert not found[row, at[row] : t].isfinite().all(), (
                        "what is before the reset depends on it"
                    )


# ---------------------------------------------------------------- what is kept


@every_mixer
@pytest.mark.parametrize("T", [0, 1, 60])
def test_saved_and_loaded_it_goes_on_bit_for_bit(name, T, tmp_path):
    config = ModelConfig("one block", 11, D, (BlockConfig(SMALL[name], SwiGLUConfig(8)),))
    model = perspectron.build(config)
    randomise(model.blocks[0].mixer, 0)
    ids = torch.randint(11, (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        state = model(ids[:, :T]).state if T else model.init_state(2)
        perspectron.save_state(tmp_path / "state", state, model)
        loaded = perspectron.load_state(tmp_path / "state", model).to(model.device)
        assert loaded.nbytes == state.nbytes
        for part in pieces(100 - T, [1, 2, 20]):
            here = slice(T + part.start, T + part.stop)
            outputs = model(ids[:, here], state), model(ids[:, here], loaded)
            assert torch.equal(outputs[0].logits, outputs[1].logits)
            state, loaded = (output.state for output in outputs)


@every_mixer
@pytest.mark.parametrize("T", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dtypes_stay(name, T, dtype):
    module = build(name, dtype)
    start = empty(module, 2, dtype)
    kept = [leaf.dtype for leaf in leaves(start)]
    assert all(torch.finfo(d).bits >= torch.finfo(dtype).bits for d in kept if d.is_floating_point)
    with torch.inference_mode():
        y, state, _ = module(tokens(2, T, dtype=dtype), start)
        assert y.dtype == dtype
        assert [leaf.dtype for leaf in leaves(state)] == kept
        before = LMState((state,)).fork().layers[0]
        after = module(tokens(2, 1, seed=4, dtype=dtype), state)[1]
    for old, new in zip(leaves(before), leaves(after), strict=True):
        if new.is_floating_point() and old.shape == new.shape and (old != new).double().mean() > 0.5:
            assert torch.finfo(new.dtype).bits >= 32, (
                "what every token writes whole must not be rounded to 16 bits"
            )


@every_mixer
@pytest.mark.parametrize("T", [1, 70])
def test_under_autocast_the_state_is_not_rounded(name, T):
    module = build(name, torch.float32)
    x = tokens(2, T, dtype=torch.float32)
    state = warm(module, 2, dtype=torch.float32)
    exact, _ = read(module, x, state)
    with torch.no_grad(), torch.autocast(torch.get_default_device().type, torch.bfloat16):
        y, after = read(module, x, state)
    assert y.dtype == torch.bfloat16
    assert all(leaf.dtype == torch.float32 for leaf in leaves(after) if leaf.is_floating_point())
    assert (y - exact).norm() < 0.1 * exact.norm()


@every_mixer
@every_mode
def test_bytes_are_those_of_the_tensors(name, mode):
    """`nbytes` is the sum over tensors; no tensor keeps a larger one alive; memory never shrinks below it."""
    module, sizes = build(name), []
    with mode():
        state = empty(module, 2)
        for T in (30, 1, 1, 30, 30):
            state = module(tokens(2, T), state)[1]
            if torch.is_grad_enabled():
                state = LMState((state,)).detach().layers[0]
            tensors = [
                leaf for field in dataclasses.fields(state) for leaf in leaves(getattr(state, field.name))
            ]
            counted = LMState((state,)).nbytes
            assert counted == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
            assert sum(storage.nbytes() for storage in storages.values()) == counted
            sizes.append(counted)
    assert sizes == sorted(sizes)


# ---------------------------------------------------------------- gradients


def gradients(module: nn.Module, x: Tensor, state, cuts=()) -> dict[str, Tensor]:
    """Of a fixed weighting of the outputs and of 20 more after them, where the second row begins a document (so
    that a learned start takes part): by input, parameters and initial state."""
    leaves_in, tree = pytree.tree_flatten(fork(state))
    for leaf in leaves_in:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            leaf.requires_grad_()
    x = x.clone().requires_grad_()
    y, end = read(module, x, pytree.tree_unflatten(leaves_in, tree), cuts)
    reset = torch.zeros(len(x), 20, dtype=torch.bool)
    reset[1, 9] = True
    y = torch.cat([y, read(module, tokens(len(x), 20, seed=7, dtype=x.dtype), end, reset_BT=reset)[0]], 1)
    loss = (y * tokens(*y.shape[:2], seed=3, dtype=y.dtype)).sum()
    wanted = {"x": x} | dict(module.named_parameters())
    wanted |= {
        f"state[{i}]": leaf for i, leaf in enumerate(leaves_in) if getattr(leaf, "requires_grad", False)
    }
    assert len(wanted) > 1 + len(list(module.parameters())), "no state to differentiate"
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


@every_mixer
@pytest.mark.parametrize("T", LENGTHS)
def test_float32_follows_float64(name, T):
    single = build(name, torch.float32)
    double = copy.deepcopy(single).double()
    x, state = tokens(2, T, dtype=torch.float32), warm(single, 2, dtype=torch.float32)
    exact_state = pytree.tree_map_only(
        Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, state
    )
    y, exact = read(single, x, state)[0].detach(), read(double, x.double(), exact_state)[0].detach()
    assert (y - exact).norm() < 1e-5 * exact.norm()
    fine = gradients(double, x.double(), exact_state)
    for key, coarse in gradients(single, x, state).items():
        assert fine[key].norm() > 0, key
        assert (coarse - fine[key]).norm() < 1e-4 * fine[key].norm(), key


@every_mixer
@pytest.mark.parametrize("start", ["warm", "full"])
@pytest.mark.parametrize("cuts", [[1], [70], [149], [1, 2, 3, 64, 65, 130]], ids=str)
def test_gradients_flow_through_the_state(name, start, cuts):
    module, x = build(name), tokens(2, 150)
    state = warm(module, 2, 5 if start == "warm" else 100)
    whole, split = gradients(module, x, state), gradients(module, x, state, cuts)
    for key in whole:
        scale = whole[key].norm()
        assert scale > 0 and (split[key] - whole[key]).norm() < 1e-9 * scale, key
