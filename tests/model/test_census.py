"""Bytes of a token, against what can be counted by hand."""

import pytest
import torch

from perspectron import build, presets
from perspectron.model.census import census, footprint, touched
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState

W, LAYERS, D, F, E = 8, 4, 32, 24, 6  # three PDR layers with experts, one of attention


def tiny(**changes: object) -> LanguageModel:
    sizes = {"d_model": D, "hidden": F, "rank": 8, "heads": 4, "kv_heads": 2, "window": W, "vocab_size": 300}
    return build(presets.get("perspective-tiny", **sizes, torus=[3, 2], layers=LAYERS, **changes))


@torch.inference_mode()
def after(model: LanguageModel, tokens: int, rows: int = 1) -> LMState:
    """In two steps, so that a cache has grown."""
    ids_BT = torch.randint(300, (rows, tokens), generator=torch.Generator().manual_seed(0))
    state = model(ids_BT[:, :1]).state
    return state if tokens == 1 else model(ids_BT[:, 1:], state).state


@pytest.mark.parametrize("tokens", [1, 5, W, W + 1, 3 * W])
@pytest.mark.parametrize("rows", [1, 3])
def test_attention_reads_what_its_window_holds(tokens, rows):
    model = tiny()
    found = touched(model, after(model, tokens, rows))
    assert found.caches == rows * min(tokens, W) * 2 * 2 * (D // 4) * 4
    assert found.state == 2 * rows * (3 * (D * 8 * 4 + 8) + 8)  # memories and lengths, read and written


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_full_attention_reads_all_tokens_so_far(tokens):
    model = build(presets.get("gpt2-tiny"))
    layers, D = len(model.blocks), model.config.d_model
    assert touched(model, after(model, tokens)).caches == layers * tokens * 2 * D * 4


@torch.inference_mode()
def test_a_cache_with_pieces_reads_each_token_once():
    model = build(presets.get("transformer-tiny"))
    state, whole = after(model, 600).fork(), after(model, 640)
    state = model(torch.ones(1, 40, dtype=torch.int64), state).state
    assert state.layers[0].shared
    assert touched(model, state) == touched(model, whole)
    (kind,) = (kind for kind, part in footprint(model, state).state.items() if part.bytes > 10_000)
    assert footprint(model, state).state[kind].bytes == state.nbytes
    assert touched(model, model.init_state(1)).caches == 0


def test_a_run_reads_one_expert_of_each_layer():
    model = tiny()
    found = touched(model, after(model, 3))
    assert found.experts == 3 * 3 * F * D * 4
    parameters = sum(p.numel() for p in model.parameters())
    idle = sum(m.idle_parameters() for m in model.modules() if hasattr(m, "idle_parameters"))
    assert idle == (E - 1) * found.experts // 4
    buffers = sum(buffer.nbytes for name, buffer in model.named_buffers() if name.endswith("bias_E"))
    looked_up = model.embedding.weight.nbytes if model.config.head is not None else 0
    assert found.experts + found.shared + found.head == 4 * (parameters - idle) + buffers - looked_up


def test_a_state_that_is_renormed_is_counted():
    """Found by the fuzzer: where a token stands is not known without numbers."""
    plain, renormed = (census(presets.get("perspective-tiny", renorm_every=n), [1024]) for n in (0, 64))
    assert renormed.parameters == plain.parameters and renormed.state_bytes == plain.state_bytes
    assert plain.flops_per_token[1024] < renormed.flops_per_token[1024] < 1.02 * plain.flops_per_token[1024]
