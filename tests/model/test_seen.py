"""What a model keeps of its way through the layers: tokens between blocks, and attention maps against plain attention
in float64, for every mixer that attends."""

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from perspectron.designs.adr.mixer import ADRConfig
from perspectron.designs.lens.mixer import LensConfig
from perspectron.designs.perspective.pdr import PDRConfig
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.designs.transformer.mla import MLAConfig
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.model import cache, ring
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.model import LanguageModel, Output, build
from perspectron.model.tuned import Tuned
from perspectron.train.loop import compiled
from perspectron.util.errors import ConfigError
from tests.refusals import refused

V, D = 40, 16
ATTENDING = {
    "attention": AttentionConfig(4, kv_heads=2, qk_norm="head"),
    "capped": AttentionConfig(4, kv_heads=1, scale=0.7, cap=1.5, gate="sigmoid"),
    "window": AttentionConfig(4, kv_heads=2, window=5),
    "rounded": AttentionConfig(2, cache="bfloat16"),
    "window_gqa": WindowGQAConfig(4, 2, 6),
    "mla": MLAConfig(2, 10, 6, 4, 5),
    "lens": LensConfig(2, rope_base=1e4),
    "adr": ADRConfig(2, 0.9),
}


def model_of(*mixers: object, positions: int = 0) -> LanguageModel:
    blocks = tuple(BlockConfig(mixer, SwiGLUConfig(24)) for mixer in mixers)
    model = build(ModelConfig("seen", V, D, blocks, positions=positions), 3).double()
    with torch.no_grad():
        model.embedding.weight.normal_(0, 1, generator=torch.Generator().manual_seed(1))
    return model


def tokens(B: int, T: int) -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(5))


def masks(T: int) -> tuple[Tensor, Tensor]:
    """Resets and padding of three rows, which stand inside as well as at both ends."""
    reset, pad = torch.zeros(3, T, dtype=torch.bool), torch.zeros(3, T, dtype=torch.bool)
    reset[1, 7], reset[2, 3], reset[2, 11] = True, True, True
    pad[0, :2], pad[1, 9], pad[2, 12:] = True, True, True
    return reset, pad


def in_parts(model: LanguageModel, cuts: list[int], **options: bool) -> list[Output]:
    ids, (reset, pad) = tokens(3, cuts[-1]), masks(cuts[-1])
    outputs, state = [], None
    for start, stop in zip([0, *cuts[:-1]], cuts, strict=True):
        part = slice(start, stop)
        outputs.append(model(ids[:, part], state, reset_BT=reset[:, part], pad_BT=pad[:, part], **options))
        state = outputs[-1].state
    return outputs


def plain(q: Tensor, k: Tensor, scale: float, cap: float | None, window: int | None) -> Tensor:
    """The map of all tokens of `masks`, each pair of them by itself."""
    (B, H, T, _), (reset, pad) = q.shape, masks(q.shape[2])
    document, place = reset.long().cumsum(1), (~pad).long().cumsum(1)
    k = k.repeat_interleave(H // k.shape[1], 1)
    found = q.new_zeros(B, H, T, T)
    for b in range(B):
        for t in range(T):
            sees = [
                s
                for s in range(t + 1)
                if not (pad[b, s] or pad[b, t])
                and document[b, s] == document[b, t]
                and (window is None or place[b, t] - place[b, s] < window)
            ]
            if sees:
                scores = scale * (q[b, :, t, None] * k[b, :, sees].to(q.dtype)).sum(-1)
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                found[b, :, t, sees] = scores.softmax(-1)
    return found


@pytest.mark.parametrize("name", ATTENDING)
def test_maps_are_those_of_plain_attention_however_a_text_is_cut(name, monkeypatch):
    calls = []

    def spied(attend):
        def run(q, k, v, state, at, **options):
            calls.append((q, k, v, options))
            return attend(q, k, v, state, at, **options)

        return run

    monkeypatch.setattr(cache, "attend", spied(cache.attend))
    monkeypatch.setattr(ring, "attend", spied(ring.attend))
    model, T = model_of(ATTENDING[name]), 14
    (whole,) = in_parts(model, [T], output_attentions=True)
    ((q, k, _, options),) = calls
    scale = options.get("scale") or q.shape[3] ** -0.5
    exact = plain(q, k, scale, options.get("cap"), options.get("window"))
    (found,) = whole.attentions
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)
    assert bool((found > 0).flatten(1).any(1).all())
    for cuts in ([1, 2, 9, T], list(range(1, T + 1)), [6, T]):
        parts = in_parts(model, cuts, output_attentions=True)
        for start, stop, part in zip([0, *cuts[:-1]], cuts, parts, strict=True):
            (own,) = part.attentions
            rows = exact[:, :, start:stop]
            torch.testing.assert_close(own[..., start - stop :], rows[..., start:stop], rtol=1e-9, atol=1e-12)
            past = own[..., : start - stop]  # counted in tokens, without padding and other documents
            torch.testing.assert_close(past.sum(-1), rows[..., :start].sum(-1), rtol=1e-9, atol=1e-12)


def test_columns_of_the_past_are_its_last_tokens_the_newest_at_the_right():
    for name in ("attention", "window"):
        model = model_of(ATTENDING[name])
        ids = tokens(2, 14)
        (whole,) = model(ids, output_attentions=True).attentions
        first = model(ids[:, :9])
        (last,) = model(ids[:, 9:], first.state, output_attentions=True).attentions
        kept = last.shape[3] - 5
        assert kept == {"attention": 9, "window": 4}[name]
        torch.testing.assert_close(last, whole[:, :, 9:, 9 - kept :])


def test_rows_with_pasts_of_different_lengths_are_aligned_at_the_right():
    model = model_of(ATTENDING["attention"])
    long, short = (model(tokens(1, T)).state for T in (8, 3))
    both = type(long).stack([long, short])
    ids = tokens(2, 4)
    (found,) = model(ids, both, output_attentions=True).attentions
    (alone,) = model(ids[1:], short, output_attentions=True).attentions
    assert found.shape[3] == 12 and not found[1, :, :, :5].any()
    torch.testing.assert_close(found[1:, :, :, 5:], alone)


def test_a_fork_whose_keys_stand_in_pieces_has_the_maps_of_one_that_reads_on():
    model = model_of(AttentionConfig(2)).float()
    ids = tokens(1, 700)
    with torch.inference_mode():
        state = model(ids[:, :600]).state
        fork = model(ids[:, 600:610], state.fork()).state
        assert all(part.shared for part in fork.layers)
        (found,) = model(ids[:, 610:], fork, output_attentions=True).attentions
        (whole,) = model(ids, output_attentions=True).attentions
    torch.testing.assert_close(found, whole[:, :, 610:])


def test_layers_without_attention_have_no_map_and_two_mixers_join_their_heads():
    blocks = (
        BlockConfig(PDRConfig(4), SwiGLUConfig(24)),
        BlockConfig(AttentionConfig(2), SwiGLUConfig(24), beside=WindowGQAConfig(4, 2, 3)),
    )
    model = build(ModelConfig("two", V, D, blocks))
    none, both = model(tokens(2, 9), output_attentions=True).attentions
    assert none is None and both.shape == (2, 6, 9, 9)
    assert not both[:, 2:, 5, :3].any() and both[:, :2, 5, :3].all()


def test_hidden_states_are_what_enters_and_leaves_each_block_and_the_input_of_the_head():
    model = model_of(PDRConfig(4), ATTENDING["window"], positions=20)
    ids, (reset, pad) = tokens(3, 14), masks(14)
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        block.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    out = model(ids, reset_BT=reset, pad_BT=pad, output_hidden_states=True)
    first, second, last = out.hidden_states
    assert first.equal(seen[0]) and second.equal(seen[1]) and last.equal(model.norm(seen[3]))
    assert not first.equal(model.embedding(ids))  # positions are in it
    assert model.head(last).equal(out.logits) and out.attentions is None
    parts = in_parts(model, [5, 14], output_hidden_states=True)
    for whole, *cut in zip(out.hidden_states, *(part.hidden_states for part in parts), strict=True):
        torch.testing.assert_close(torch.cat(cut, 1)[~pad], whole[~pad])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_asking_changes_no_bit_and_not_asking_keeps_nothing(mode):
    model = model_of(PDRConfig(4), *ATTENDING.values()).float()
    with mode():
        plain, asked = (
            in_parts(model, [6, 7, 14], **options)
            for options in ({}, {"output_hidden_states": True, "output_attentions": True})
        )
    for one, other in zip(plain, asked, strict=True):
        assert one.hidden_states is None and one.attentions is None
        assert one.logits.equal(other.logits) and len(other.attentions) == len(ATTENDING) + 1


def test_gradients_pass_through_both_also_where_blocks_are_computed_again():
    gradients = []
    for recompute in (False, True):
        model = model_of(PDRConfig(4), ATTENDING["attention"])
        model.recompute = recompute
        out = model(tokens(2, 9), output_hidden_states=True, output_attentions=True)
        (out.hidden_states[1].square().sum() + out.attentions[1].square().sum()).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        assert one.any() and one.equal(other)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_keeps_the_same(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = model_of(ATTENDING["attention"], ATTENDING["window"])
    ids = tokens(2, 9)
    options = {"output_hidden_states": True, "output_attentions": True}
    plain = model(ids, **options)
    found = compiled(model)(ids, **options)
    for one, other in zip(
        (*plain.hidden_states, *plain.attentions), (*found.hidden_states, *found.attentions), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_documents_that_begin_with_a_trained_memory_keep_their_tokens_and_refuse_maps():
    model = model_of(PDRConfig(4), ATTENDING["attention"])
    state = model.init_state(1, tuned=["first"])
    part = state.layers[0]
    assert isinstance(part, Tuned)
    own = dataclasses.replace(part, first=torch.full_like(part.first, 0.1))
    state = dataclasses.replace(state, layers=(own, *state.layers[1:]))
    ids = tokens(1, 9)
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[0, 4] = True
    out = model(ids, state, reset_BT=reset, output_hidden_states=True)
    assert model.head(out.hidden_states[-1]).equal(out.logits) and out.hidden_states[0].shape == (1, 9, D)
    with refused(ConfigError, "output_attentions"):
        model(ids, state, reset_BT=reset, output_attentions=True)
    assert model(ids[:, :4], state, output_attentions=True).attentions[1] is not None
