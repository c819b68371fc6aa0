"""Recordings of a model that changes: whatever changes it, and whether a version says so or not, a step is taken as the
model is now. A model that stays keeps its recordings."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron import native, presets
from perspectron.decode import steps as steps_module
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.decode.steps import steps_of
from perspectron.model.model import LanguageModel, build
from perspectron.quant.convert import convert
from perspectron.quant.linear import QuantLinear
from perspectron.train.optim import OptimConfig, optimizer_of
from tests.decode.conftest import VOCAB
from tests.decode.test_rows import prompt_of
from tests.decode.test_steps import go_on, near, read, recorded, tokens
from tests.decode.test_store import small

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=str(native.reason())),
    pytest.mark.cpu_only("recordings are steps on the CPU"),
]
DESIGNS = [name for name in presets.DESIGNS if "[" not in name]
"""Those whose mixers are of their own; the others put them into other blocks."""
GREEDY = SamplingConfig(temperature=0)


# What changes a model between two tokens, and what changes it between two texts.
def _shrink(model: LanguageModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)


def _data(model: LanguageModel) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.7)


def _array(model: LanguageModel) -> None:
    for parameter in model.parameters():
        parameter.detach().numpy()[...] *= 0.7


def _fused(model: LanguageModel) -> None:
    parameters = [x.requires_grad_() for x in model.parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(parameters, lr=0.05, fused=True).step()
    model.requires_grad_(False)


def _loaded(model: LanguageModel) -> None:
    model.load_state_dict(
        {name: x * 0.7 if x.is_floating_point() else x for name, x in model.state_dict().items()}
    )


def _assigned(model: LanguageModel) -> None:
    weights = {name: x * 0.7 if x.is_floating_point() else x for name, x in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)


def _elsewhere(model: LanguageModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.7


def _turned(model: LanguageModel) -> None:
    square = next(x for x in model.parameters() if x.ndim == 2 and x.shape[0] == x.shape[1])
    square.data = square.data.T


def _norms(model: LanguageModel) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = 0.3


class _Doubled(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _linears(model: LanguageModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module) is torch.nn.Linear]


def _class(model: LanguageModel) -> None:
    for module in _linears(model):
        module.__class__ = _Doubled


def _forward(model: LanguageModel) -> None:
    for module in _linears(model):
        module.forward = lambda x, own=module: 2 * F.linear(x, own.weight, own.bias)


def _replaced(model: LanguageModel) -> None:
    ffn = next(m for m in model.modules() if any(type(own) is torch.nn.Linear for own in m.children()))
    name, old = next((name, own) for name, own in ffn.named_children() if type(own) is torch.nn.Linear)
    new = torch.nn.Linear(old.in_features, old.out_features, old.bias is not None)
    new.load_state_dict({key: 2 * x for key, x in old.state_dict().items()})
    setattr(ffn, name, new.requires_grad_(False))


def _buffer(model: LanguageModel) -> None:
    for module in _linears(model):
        weight = module.weight.detach() * 2
        del module.weight
        module.register_buffer("weight", weight)


WITHIN = (_shrink, _data, _array, _fused, _loaded)
BETWEEN = (_assigned, _elsewhere, _turned, _norms, _class, _forward, _replaced, _buffer)


@pytest.mark.few(4, each="design")
@pytest.mark.parametrize("change", [*WITHIN, *BETWEEN], ids=lambda change: change.__name__)
@pytest.mark.parametrize("design", ["ssd", "lens2", "drm", "mingru"])
def test_a_model_that_changes_is_stepped_as_it_is_now(design, change):
    model = small(design)
    before = read(model, 1)
    old, _ = go_on(recorded(model), model, tokens(1, 3), before.fork())
    try:
        change(model)
    except StopIteration:
        pytest.skip("it has no such part")
    found, _ = go_on(steps_of(model), model, tokens(1, 3), before.fork())
    wanted, _ = go_on(None, model, tokens(1, 3), before.fork())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert change in (_turned,) or not torch.allclose(found[0], old[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("change", WITHIN, ids=lambda change: change.__name__)
@pytest.mark.parametrize("design", ["ssd", "lens2", "hgrn2"])
def test_numbers_that_change_between_two_tokens_are_read(design, change):
    model = small(design)
    steps, ids, before = recorded(model), tokens(1, 6), read(model, 1)
    _, found = go_on(steps, model, ids[:3], before.fork())
    _, wanted = go_on(None, model, ids[:3], before.fork())
    change(model)
    said, found = go_on(steps, model, ids[3:], found)
    asked, wanted = go_on(None, model, ids[3:], wanted)
    near(found, wanted)
    for one, other in zip(said, asked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert steps_of(model) is steps, "recorded anew where it has to be, not looked at anew"


@pytest.mark.few(1, each="design")
@pytest.mark.parametrize("design", [*DESIGNS, "perspective2[gated=true]"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_model_that_stays_keeps_its_recordings(design, dropout):
    config = presets.small(design, vocab_size=VOCAB, d_model=32, layers=2, seq_len=64)
    model = build(dataclasses.replace(config, dropout=dropout)).eval()
    steps = recorded(model)
    for _ in range(2):
        go_on(steps, model, tokens(1, 2), read(model, 1))
        model(torch.ones(1, 4, dtype=torch.int64), targets=torch.ones(1, 4, dtype=torch.int64))
        assert steps_of(model) is steps
    assert steps_of(copy.deepcopy(model)) is not steps


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * float(other.abs().max()))


def adamw(model: LanguageModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def own(model: LanguageModel) -> torch.optim.Optimizer:
    return optimizer_of(model, OptimConfig(lr=3e-3))


def muon(model: LanguageModel) -> torch.optim.Optimizer:
    return optimizer_of(model, OptimConfig(lr=3e-3, optimizer="muon"))


@pytest.mark.few(1, each="design")
@pytest.mark.parametrize("optimizer", [own, adamw, muon], ids=lambda optimizer: optimizer.__name__)
@pytest.mark.parametrize("design", DESIGNS)
def test_what_was_trained_is_recorded_and_drawn_as_it_is_now(design, optimizer, tokenizer):
    """120 updates between two texts; each gradient is good for twelve of them, which saves time."""
    model, prompts = small(design), [prompt_of(9, 1), prompt_of(9, 2)]
    old = generate(model, tokenizer, prompts, max_tokens=8)
    go_on(recorded(model), model, tokens(1, 2), read(model, 1))
    update, ids_BT = optimizer(model.train()), torch.tensor([prompt_of(9, 3)])
    for turn in range(120):
        if turn % 12 == 0:
            update.zero_grad()
            model(ids_BT[:, :-1], targets=ids_BT[:, 1:]).loss.backward()
        update.step()
    model.eval()
    ids, before = tokens(1, 40), read(model, 1)
    found, after = go_on(recorded(model), model, ids, before.fork())
    wanted, modules = go_on(None, model, ids, before.fork())
    close(found, wanted)
    near(after, modules)
    new = generate(model, tokenizer, prompts, max_tokens=8)
    assert new.ids == generate(copy.deepcopy(model), tokenizer, prompts, max_tokens=8).ids != old.ids


@pytest.mark.parametrize("design", ["ssd", "kda", "lens2"])
def test_a_text_goes_on_with_a_model_that_was_trained(design, tokenizer):
    model = small(design)
    session = Session(model, tokenizer).read(prompt_of(20, 1))
    session.say(10, sampling=GREEDY)
    state, ids = session._state.fork(), session.tokens
    _fused(model)
    session.say(10, sampling=GREEDY)
    with torch.inference_mode():
        last = ids[-1]
        for id in session.tokens[len(ids) :]:
            hidden_B1D, state, _ = model.hidden(torch.tensor([[last]]), state)
            logits_V, last = model.head(hidden_B1D[:, 0])[0], id
            assert float(logits_V.max() - logits_V[id]) <= 1e-3 * float(logits_V.abs().max())


def test_a_matrix_that_is_made_of_others_is_seen_when_a_text_goes_on():
    model = small("gla")
    for module in _linears(model):
        torch.nn.utils.parametrizations.weight_norm(module)
    before = read(model, 1)
    old, _ = go_on(recorded(model), model, tokens(1, 3), before.fork())
    _data(model)
    found, _ = go_on(recorded(model), model, tokens(1, 3), before.fork())
    close(found, go_on(None, model, tokens(1, 3), before)[0])
    assert not torch.allclose(found[0], old[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("design", ["drm", "gla"])
def test_packed_numbers_that_change_are_seen(design):
    model = small(design)
    convert(model, "4bit")
    before = read(model, 1)
    go_on(recorded(model), model, tokens(1, 3), before.fork())
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.codes.data.bitwise_xor_(0x11)
    found, _ = go_on(recorded(model), model, tokens(1, 3), before.fork())
    for one, other in zip(found, go_on(None, model, tokens(1, 3), before)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-2 * float(other.abs().max()))


def test_a_method_of_a_class_that_is_replaced_is_seen(monkeypatch):
    class Own(torch.nn.Linear):
        pass

    model = small("gla")
    for module in _linears(model):
        module.__class__ = Own
    go_on(recorded(model), model, tokens(1, 2), read(model, 1))
    monkeypatch.setattr(Own, "forward", lambda self, x: 3 * F.linear(x, self.weight, self.bias))
    before = read(model, 1)
    close(
        go_on(recorded(model), model, tokens(1, 3), before.fork())[0],
        go_on(None, model, tokens(1, 3), before)[0],
    )


class _Scaled(torch.nn.Linear):
    """A module whose numbers stand in a list, a tensor that is no buffer, and a parameter of one number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.shares[0] * self.shares[1]["more"] * self.table[0] * self.scale


def _list(module: _Scaled) -> None:
    module.shares[0] = 3.0


def _table(module: _Scaled) -> None:
    module.shares[1]["more"] = 3.0


def _tensor(module: _Scaled) -> None:
    module.table = torch.full((2,), 3.0)


def _parameter(module: _Scaled) -> None:
    module.scale = torch.nn.Parameter(module.scale.clone(), requires_grad=False)
    steps_of(module.model())
    module.scale.data.fill_(3.0)


@pytest.mark.parametrize("change", [_list, _table, _tensor, _parameter], ids=lambda change: change.__name__)
def test_attributes_that_change_are_seen(change):
    model = small("gla")
    module = _linears(model)[-1]
    module.__class__, module.shares, module.table = _Scaled, [1.0, {"more": 1.0}], torch.ones(2)
    module.scale, module.model = torch.nn.Parameter(torch.ones(1), requires_grad=False), weakref.ref(model)
    before = read(model, 1)
    old, _ = go_on(recorded(model), model, tokens(1, 3), before.fork())
    change(module)
    found, _ = go_on(recorded(model), model, tokens(1, 3), before.fork())
    close(found, go_on(None, model, tokens(1, 3), before)[0])
    assert not torch.allclose(found[0], old[0], rtol=1e-3, atol=1e-3)


def test_a_model_with_a_forward_of_its_own_is_let_go():
    model = small("gla")
    go_on(recorded(model), model, tokens(1, 2), read(model, 1))
    model.forward = model.hidden
    assert steps_of(model) is None
    known, count = weakref.ref(model), len(steps_module._known)
    del model
    gc.collect()
    assert known() is None and len(steps_module._known) < count
