"""What the library does with a model of another program: recorded steps, gradients, adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch

from perspectron import native
from perspectron.data.loader import Batch
from perspectron.decode.steps import stepped, steps_of
from perspectron.interop import foreign
from perspectron.interop.foreign.source import Source
from perspectron.model.model import LanguageModel, build
from perspectron.quant.convert import convert
from perspectron.train.lora import LoraConfig, adapt
from tests.interop import families
from tests.interop.families import Family


def recorded(test: Any) -> Any:
    """A test of recorded steps, with full weights and packed ones, where there are kernels."""
    test = pytest.mark.parametrize("format", [None, "4bit"])(test)
    return pytest.mark.skipif(not native.available(), reason=str(native.reason()))(test)


def model_of(family: Family, **changes: object) -> LanguageModel:
    """A model of ours by the family's config, drawn at random."""
    model = build(foreign.kind(family.kind).config(Source(Path(), family.values | changes))).eval()
    families.redraw(model, 3)
    return model


def steps_are_recorded(model: LanguageModel, format: str | None) -> None:
    if format is not None:
        convert(model, format)
    for rows in (1, 3):
        with torch.inference_mode():
            state = model.hidden(families.text(rows=rows, length=12))[1]
            other, steps = state.fork(), steps_of(model)
            for ids_B1 in families.text(seed=5, rows=rows, length=20).split(1, 1):
                done = steps.step(ids_B1, state)
                assert done is not None, steps.told
                (_, found, state), (_, wanted, other) = done, stepped(model, None, ids_B1, other)
                families.near(found, wanted, 1e-5 if format is None else 2e-2)


def whole_texts_and_steps_have_the_same_gradients(model: LanguageModel) -> None:
    """In float64, of every parameter."""
    model, ids = model.double(), families.text(rows=1, length=20)
    parameters = dict(model.named_parameters())
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(20, model.config.vocab_size, generator=draw, dtype=torch.float64)
    both = model(ids).logits[0], in_steps(model, ids)[0]
    whole, steps = (torch.autograd.grad((x * weight).sum(), list(parameters.values())) for x in both)
    for name, a, b in zip(parameters, whole, steps, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * float(b.abs().max()))


def in_steps(model: LanguageModel, ids_BT: torch.Tensor) -> torch.Tensor:
    """Logits of a text, token by token."""
    state, logits = None, []
    for ids_B1 in ids_BT.split(1, 1):
        out = model(ids_B1, state)
        state = out.state
        logits.append(out.logits)
    return torch.cat(logits, 1)


def an_adapter_learns(model: LanguageModel) -> None:
    """Beside all layers, and changes nothing before it has learned."""
    ids = families.text()
    before = model(ids).logits.detach()
    adapt(model, LoraConfig(rank=2), Batch(ids, ids, torch.zeros_like(ids, dtype=torch.bool), ids.numel()))
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=1e-4)
    model.train()(ids, targets=ids).loss.backward()
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in learning) and len(learning) >= 2 * len(model.blocks)
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in learning.values())
