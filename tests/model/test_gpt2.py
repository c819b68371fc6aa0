"""GPT-2 against the published one, its learned positions, and GPT-2 with lenses: census, cache, decode.

Shapes: B batch, T time, D model width, E width in the documents.
"""

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import perspectron
from perspectron import presets
from perspectron.decode.conversation import Conversation
from perspectron.decode.reading import prefill
from perspectron.model.census import census
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.util.errors import ConfigError
from tests.refusals import refused

V, D, P = 64, 16, 64
SIZES = {"vocab_size": V, "d_model": D, "layers": 3, "heads": 2, "hidden": 24, "positions": P}
OFF = dict.fromkeys(("reciprocity", "discoverability", "route", "context", "embedding_norm"), False)
LENSES = [
    {}, {"reciprocity": False}, {"discoverability": False}, {"gates": False}, {"route": False},
    {"context": False}, {"context_rank": 3, "stop_gradient": True}, {"disc_scale": True, "output_gate": True},
    {"route_scale": 2.0}, OFF,
]  # fmt: skip
HYPOTHESIS = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def small(name: str = "gpt2-124m", seed: int = 0, **overrides: Any) -> LanguageModel:
    """In float64, with weights wide enough for sharp attention and logits of a few units."""
    model = perspectron.build(presets.get(name, **SIZES | overrides)).double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter += noise * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3)
    return model


def ids(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def read(model: LanguageModel, text: Tensor, cuts, state: LMState | None = None, **masks: Tensor) -> Tensor:
    outputs, start = [], 0
    for stop in [*cuts, text.shape[1]]:
        part = slice(start, stop)
        output = model(text[:, part], state, **{name: mask[:, part] for name, mask in masks.items()})
        outputs.append(output.logits)
        state, start = output.state, stop
    return torch.cat(outputs, 1)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- the published model


def published(model: LanguageModel) -> GPT2LMHeadModel:
    """transformers' GPT-2 of the same sizes, on the default device."""
    config, block = model.config, model.config.blocks[0]
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.positions, n_embd=config.d_model,
        n_layer=len(config.blocks), n_head=block.mixer.heads, n_inner=block.ffn.hidden,
        bos_token_id=0, eos_token_id=0,
    )).eval()  # fmt: skip


NAMES = {
    "transformer.wte.weight": "embedding.weight", "transformer.wpe.weight": "positions.weight",
    "transformer.ln_f": "norm", "transformer.h": "blocks", "ln_1": "mixer_norm", "ln_2": "ffn_norm",
    "attn.c_attn": "mixer.qkv_proj", "attn.c_proj": "mixer.o_proj", "mlp.c_fc": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
}  # fmt: skip


def ours(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Published weights by our names; theirs are stored [in, out]."""
    found = {}
    for name, weight in weights.items():
        transposed = ".c_" in name and weight.ndim == 2
        for old, new in NAMES.items():
            name = name.replace(old, new)
        found[name] = weight.T if transposed else weight
    found.pop("lm_head.weight", None)  # the embedding
    return found


@functools.cache
def pair(dtype: torch.dtype = torch.float64) -> tuple[LanguageModel, GPT2LMHeadModel]:
    model = small()
    theirs = published(model).double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter += noise * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3)
    model.load_state_dict(ours(theirs.state_dict()))
    return model.to(dtype), theirs.to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("T", [1, 2, 33, P])
def test_logits_are_those_of_the_published_model(dtype, tolerance, T):
    model, theirs = pair(dtype)
    text = ids(3, T)
    with torch.no_grad():
        expected = theirs(text).logits
    assert expected.std() > 1
    close(model(text).logits.detach(), expected, tolerance)


def test_gradients_are_those_of_the_published_model():
    model, theirs = pair()
    text = ids(3, 40)
    loss = model(text[:, :-1], targets=text[:, 1:]).loss
    found = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    named = dict(theirs.named_parameters())
    logits = theirs(text[:, :-1]).logits  # their own loss is rounded to float32
    theirs_loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    close(loss, theirs_loss)
    expected = ours(dict(zip(named, torch.autograd.grad(theirs_loss, list(named.values())), strict=True)))
    assert set(names) == expected.keys()
    for name, gradient in zip(names, found, strict=True):
        close(gradient, expected[name])


def left_padded(B: int, T: int) -> Tensor:
    """True where there is no token: none, some, half, all but one, at the left."""
    return torch.arange(T) < torch.tensor([0, 3, T // 2, T - 1])[:B, None]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_padding_at_the_left_is_read_as_the_published_model_reads_it(dtype, tolerance):
    model, theirs = pair(dtype)
    text, pad = ids(4, 30), left_padded(4, 30)
    positions = ((~pad).cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        expected = theirs(text, attention_mask=(~pad).long(), position_ids=positions).logits
        for cuts in ([], [1], [3, 15, 29], range(1, 30)):
            close(read(model, text, cuts, pad_BT=pad)[~pad], expected[~pad], tolerance)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_step_by_step_with_either_cache(mode):
    model, theirs = pair()
    text, past, expected = ids(2, 40), None, []
    with mode():
        for t in range(40):
            step = theirs(text[:, t : t + 1], cache=past, use_cache=True)
            expected.append(step.logits)
            past = step.cache
        close(read(model, text, range(1, 40)), torch.cat(expected, 1))


def test_the_published_weights_fit_name_by_name():
    """GPT2Config's own defaults are the 124M model."""
    with torch.device("meta"):
        model = perspectron.build("gpt2-124m")
        theirs = GPT2LMHeadModel(GPT2Config())
    shapes = {name: weight.shape for name, weight in ours(theirs.state_dict()).items()}
    assert shapes == {name: weight.shape for name, weight in model.state_dict().items()}
    assert model.norm.eps == theirs.config.layer_norm_epsilon
    assert model.config.blocks[0].mixer.heads == theirs.config.n_head
    assert (
        theirs.config.activation_function == "gelu_new"
        and model.config.blocks[0].ffn.activation == "gelu_tanh"
    )


# ---------------------------------------------------------------- learned positions


@pytest.mark.parametrize("name", ["gpt2-124m", "lens-tiny"])
def test_a_document_longer_than_the_table_is_an_error_that_names_both(name):
    model = small(name)
    text = ids(1, P + 1)

    def beyond(call) -> None:
        with refused(ConfigError, "position", 64, "positions", name):
            call()

    beyond(lambda: model(text))
    state = model(text[:, :P]).state

    beyond(lambda: model(text[:, P:], state))
    with torch.inference_mode():
        state = model(text[:, :P]).state
        beyond(lambda: model(text[:, P:], state))
        reset = torch.ones(1, 1, dtype=torch.bool)
        close(model(text[:, P:], state, reset_BT=reset).logits, model(text[:, P:]).logits)


def test_padding_takes_no_place_in_the_table():
    model = small()
    pad = torch.zeros(2, P + 40, dtype=torch.bool)
    pad[0, 5:45], pad[1, P:] = True, True
    text = ids(2, P + 40)
    for cuts in ([], [P], [1, 20, 50, P + 1], range(1, P + 40)):
        with torch.inference_mode():
            logits = read(model, text, cuts, pad_BT=pad)
            for row in range(2):
                close(logits[row, ~pad[row]], model(text[row, ~pad[row]][None]).logits[0])
    pad[0, 44] = False
    with refused(ConfigError, "position", 64):
        model(text, pad_BT=pad)


@pytest.mark.parametrize("name", ["gpt2-124m", "lens-tiny"])
@pytest.mark.parametrize(
    "cuts", [[], [60, 61, 62, 100, 124], range(1, 130)], ids=["whole", "pieces", "steps"]
)
def test_packed_documents_begin_at_position_0(name, cuts):
    """More tokens than the table is long, but no document is."""
    model, lengths = small(name), [P, 1, P, 1]
    documents = [ids(1, T, seed=i) for i, T in enumerate(lengths)]
    row = torch.cat(documents, 1)
    reset = torch.zeros_like(row, dtype=torch.bool)
    reset[:, list(itertools.accumulate(lengths[:-1], initial=0))] = True
    with torch.inference_mode():
        alone = torch.cat([model(document).logits for document in documents], 1)
        close(read(model, row, cuts, reset_BT=reset), alone)


def test_positions_matter_and_are_learned():
    model = small()
    text = ids(1, 1).expand(1, 9)
    logits = model(text).logits
    assert (logits[:, 1:] - logits[:, :-1]).abs().amax(-1).min() > 1e-3, "of equal tokens, each its own"
    logits.square().sum().backward()
    gradient = model.positions.weight.grad.abs().amax(1)
    assert (gradient[:9] > 0).all() and (gradient[9:] == 0).all()


@pytest.mark.parametrize("name", ["gpt2-124m", "lens-tiny"])
def test_a_saved_conversation_goes_on_at_its_position(name, tmp_path):
    model, text = small(name), ids(2, 40).clamp_min(1)  # 0 begins a document
    with torch.inference_mode():
        whole = model(text).logits
        _, state = prefill(model, [text[0, :25].tolist(), text[1, :11].tolist()])
        assert state.length_B.tolist() == [25, 11]
        talk = Conversation(state, [[], []], [[], []], [0, 0])
        talk.save(tmp_path / "talk", model)
        loaded = Conversation.load(tmp_path / "talk", model).state
        assert loaded.length_B.tolist() == [25, 11] and loaded.length_B.dtype == torch.int64
        for other in (loaded, state.select(torch.tensor([0, 1])), state.fork()):
            pad = torch.zeros(2, 29, dtype=torch.bool)
            pad[0, 15:] = True
            rest = torch.stack([torch.cat([text[0, 25:], text[0, :14]]), text[1, 11:]])
            logits = read(model, rest, [1, 2, 20], other, pad_BT=pad)
            close(logits[0, :15], whole[0, 25:])
            close(logits[1], whole[1, 11:])


# ---------------------------------------------------------------- census


def parameters(name: str, **overrides: Any) -> dict[str, Tensor]:
    with torch.device("meta"):
        return dict(perspectron.build(presets.get(name, **overrides)).named_parameters())


def count(weights: dict[str, Tensor]) -> int:
    return sum(weight.numel() for weight in weights.values())


def test_gpt2_and_gpt2_with_lenses_are_as_large_as_they_should_be():
    plain, lens = parameters("gpt2-124m"), parameters("lens-gpt2-124m")
    assert count(plain) == census(presets.get("gpt2-124m")).parameters == 124_439_808
    assert count(lens) == census(presets.get("lens-gpt2-124m")).parameters == 209_420_988
    E, H, block = 768, 12, "blocks.0."
    size = {name.removeprefix(block): w.numel() for name, w in lens.items() if name.startswith(block)}
    assert size["mixer.u_HK"] == 768 and size["mixer.gates_HL"] == 3 * H == 36 and size["route.raw_1"] == 1
    network = sum(n for name, n in size.items() if name.startswith("ffn.") and name.endswith("weight"))
    assert network == 20 * E**2, "fc1 and fc_gate 2E→4E, fc2 4E→E: 12 E² more than GPT-2's 8 E²"
    assert (count(lens) - count(plain)) == 12 * (12 * E**2 + 4 * E + 768 + 36 + 1)


def test_each_part_costs_what_it_should():
    E, H, L = 768, 12, 12
    whole = count(parameters("lens-gpt2-124m"))
    for off, cost in (
        ({"reciprocity": False}, H),  # one gate of three
        ({"discoverability": False}, E + H),
        ({"reciprocity": False, "discoverability": False}, E + 3 * H),
        ({"gates": False}, 3 * H),
        ({"route": False}, 1),
        ({"context": False}, 12 * E**2 + 4 * E),
        ({"context_rank": 64}, 2 * 4 * E * (E - 64) - 64 * E),
        ({"output_gate": True}, -(E**2 + E)),
        ({"stop_gradient": True, "disc_scale": True, "route_scale": 2.0, "anneal": 0.1}, 0),
    ):
        assert whole - count(parameters("lens-gpt2-124m", **off)) == L * cost, off


def test_a_context_network_of_a_neutral_width_adds_nothing():
    """1.6 E: with a width that 5 divides, to the last number in the matrices; in the 124M model, to rounding."""
    for E, H in ((320, 5), (640, 10)):
        sizes = {"d_model": E, "heads": H}
        plain = parameters("gpt2-124m", **sizes, hidden=4 * E)
        lens = parameters("lens-gpt2-124m", **sizes, hidden=8 * E // 5)
        names = [name for name in plain if name.startswith("blocks.") and ".ffn." in name]
        more = [name for name in lens if name.startswith("blocks.") and ".ffn." in name]
        assert sum(plain[n].numel() for n in names if plain[n].ndim == 2) == sum(
            lens[n].numel() for n in more if lens[n].ndim == 2
        )
    total = count(parameters("lens-gpt2-124m", hidden=round(1.6 * 768)))
    assert abs(total / 124_439_808 - 1) < 2e-4


def test_with_everything_off_it_is_gpt2():
    assert count(parameters("lens-gpt2-124m", **OFF)) == 124_439_808
    gpt2, lens = small(), small("lens-tiny", seed=1, **OFF)
    text = ids(2, 40)
    assert (gpt2(text).logits - lens(text).logits).abs().max() > 0.1
    for a, b in ((gpt2, lens), (small(seed=2), gpt2)):
        b.load_state_dict(a.state_dict(), strict=True)
        a.load_state_dict(b.state_dict(), strict=True)
        assert torch.equal(a(text).logits, b(text).logits)
        with torch.inference_mode():
            assert torch.equal(read(a, text, range(1, 40)), read(b, text, range(1, 40)))
    shapes = [{n: w.shape for n, w in parameters(*c).items()} for c in (("gpt2-124m",),)]
    assert shapes == [{n: w.shape for n, w in parameters("lens-gpt2-124m", **OFF).items()}]


# ---------------------------------------------------------------- cache and decode


def test_the_cache_is_half_as_large_again_in_every_layer_only_with_reciprocity():
    plain = small()
    text = ids(2, 20)
    for switches in LENSES:
        model = small("lens-tiny", **switches)
        for states in (
            (model.init_state(2, capacity=50), plain.init_state(2, capacity=50)),
            (model(text).state, plain(text).state),
        ):
            for a, b in zip(*(state.layers for state in states), strict=True):
                sizes = [x.k_BHSK.nbytes + x.v_BHSV.nbytes for x in (a, b)]
                assert sizes[1] > 0
                assert sizes[0] / sizes[1] == (1.5 if switches.get("reciprocity", True) else 1.0)
                assert LMState((a,)).nbytes == sizes[0] + a.length_B.nbytes, "and nothing else is kept"


@pytest.mark.parametrize("switches", LENSES, ids=str)
def test_prefill_steps_and_splits_agree(switches):
    model, text = small("lens-tiny", **switches), ids(2, P)
    whole = model(text).logits
    assert whole.std() > 0.5
    with torch.inference_mode():
        for cuts in ([1], [P - 1], [5, 6, 7, 32, 33], range(1, P)):
            close(read(model, text, cuts), whole.detach())
            close(read(model, text, cuts, model.init_state(2, capacity=P)), whole.detach())
    close(read(model, text, [1, 2, 40]), whole)


@pytest.mark.parametrize("switches", [{}, {"reciprocity": False, "context_rank": 3}], ids=str)
def test_any_split_of_any_start(switches):
    model, text = small("lens-tiny", **switches), ids(1, P)
    whole = model(text).logits.detach()

    @HYPOTHESIS
    @given(
        st.lists(st.integers(1, P - 1), max_size=12, unique=True),
        st.sampled_from([0, 3, P, 200]),
        st.booleans(),
    )
    def check(cuts, capacity, inference):
        with torch.inference_mode(inference), torch.no_grad():
            close(read(model, text, sorted(cuts), model.init_state(1, capacity=capacity)), whole)

    check()


# ---------------------------------------------------------------- 16 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "switches"), [("gpt2-124m", {}), *(("lens-tiny", s) for s in LENSES)], ids=str
)
def test_16_bits_are_finite_and_near(name, switches, dtype):
    model, text = small(name, **switches), ids(2, P)
    pad = torch.zeros(2, P, dtype=torch.bool)
    pad[0, :7] = True
    with torch.inference_mode():
        exact = model(text, pad_BT=pad).logits
        model = model.to(dtype)
        for cuts in ([], [5, 6, 40], range(1, P)):
            logits = read(model, text, cuts, pad_BT=pad)
            assert logits.dtype == dtype and logits.isfinite().all()
            assert (logits - exact)[~pad].norm() < 8 * torch.finfo(dtype).eps * exact[~pad].norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gpt2-124m", "lens-tiny"])
def test_16_bits_can_be_trained(name, dtype):
    model, text = small(name).to(dtype), ids(2, 40)
    output = model(text[:, :-1], targets=text[:, 1:])
    assert output.loss.dtype == torch.float32
    output.objective().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == dtype for p in model.parameters())
