"""Routed layers on packed matrices: the same tokens to the same experts as the float layer, and a token's result that
depends on nothing but the token."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch

from perspectron.experts.layer import RoutedSwiGLU
from perspectron.experts.router import FixedRouter, RoutedConfig
from perspectron.experts.ternary import trits
from perspectron.ops import packing
from perspectron.stream.expert_file import Shard
from perspectron.stream.experts import PackedExperts
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D, F = 24, 20
CONFIG = RoutedConfig(F, (3, 2), ternary=True, int8_activations=True)


class InMemory:
    """All experts at hand."""

    def __init__(self, shards):
        self.shards = shards

    def get(self, layer, expert):
        return nullcontext(self.shards[layer, expert])

    def ask(self, layer, experts):
        pass

    def hint(self, layer, expert):
        pass

    def holds(self, layer, expert):
        return True


def shards_of(module: RoutedSwiGLU) -> dict[tuple[int, int], Shard]:
    found = {}
    for expert in range(len(module.gate_EFD)):
        matrices = []
        for weight in (module.gate_EFD, module.up_EFD, module.down_EDF):
            codes, scale = trits(weight.detach()[expert])
            row_scales = scale.flatten().expand(codes.shape[0]).contiguous()
            matrices.append(packing.pack((codes + 1).to(torch.uint8), row_scales, None, "ternary"))
        found[2, expert] = Shard(*matrices)
    return found


def made(config: RoutedConfig) -> tuple[RoutedSwiGLU, PackedExperts]:
    module = RoutedSwiGLU(D, config)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        module.route_proj.weight.normal_(generator=draw)
        module.route_proj.bias.zero_()
        module.init_weights(draw)
        if config.bias_rate > 0:
            module.bias_E.uniform_(0, 0.02, generator=draw)
    layer = PackedExperts(D, config, 2)
    own = {name: value for name, value in module.state_dict().items() if name in layer.state_dict()}
    layer.load_state_dict(own)
    layer.source = InMemory(shards_of(module))
    return module.eval(), layer.eval()


def rows(count: int) -> torch.Tensor:
    return torch.randn(2, count, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gate": "soft"},
        {"gate": "none"},
        {"router": "switch", "smooth": 0.0},
        {"offsets": False},
        {"bias_rate": 0.0},
    ],
    ids=str,
)
def test_as_the_float_layer(changes):
    module, layer = made(dataclasses.replace(CONFIG, **changes))
    x = rows(17)
    with torch.inference_mode():
        expected, _ = module(x)
        found, terms = layer(x)
        ours, theirs = layer.router.route(x.flatten(0, 1)), module.router.route(x.flatten(0, 1))
    assert terms == {}
    assert torch.equal(ours.expert_N, theirs.expert_N)
    assert len(ours.expert_N.unique()) > 2
    torch.testing.assert_close(ours.gate_N, theirs.gate_N)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("changes", [{}, {"torus": (5, 2, 3)}, {"router": "switch", "gate": "soft"}], ids=str)
def test_a_token_does_not_depend_on_the_others(changes):
    _, layer = made(dataclasses.replace(CONFIG, **changes))
    x = rows(33)
    with torch.inference_mode():
        whole, _ = layer(x)
        for t in range(33):
            assert torch.equal(layer(x[:1, t : t + 1])[0][0, 0], whole[0, t])
        assert torch.equal(layer(x[:, :5])[0], whole[:, :5])


def test_padding_takes_no_expert():
    _, layer = made(CONFIG)
    x, asked = rows(4), []
    inner = layer.source

    class Watched(InMemory):
        def get(self, number, expert):
            asked.append(expert)
            return inner.get(number, expert)

    layer.source = Watched({})
    pad = torch.ones(2, 4, dtype=torch.bool)
    with torch.inference_mode():
        assert not layer(x, pad_BT=pad)[0].any()
        assert not layer(x[:1, :1], pad_BT=pad[:1, :1])[0].any()
        assert asked == []
        pad[1, 2] = False
        expected = layer(x)[0][1, 2]
        asked.clear()
        assert torch.equal(layer(x, pad_BT=pad)[0][1, 2], expected)
    assert len(asked) == 1


def test_hints_what_the_next_layer_may_want():
    _, layer = made(CONFIG)
    _, after = made(CONFIG)
    after.layer = 5
    layer.following = (after,)
    hinted = []
    layer.source.hint = lambda number, expert: hinted.append((number, expert))
    x = rows(1)[:1]
    with torch.inference_mode():
        layer(x)
        guess = int(after.router.route(x[0]).expert_N)
    assert hinted == [(5, guess)]
    assert len(list(layer.children())) == 1


def test_another_device_is_waited_for_once(monkeypatch):
    class Elsewhere(torch.Tensor):
        device, waits = torch.device("cuda"), 0

        def tolist(self):
            Elsewhere.waits += 1
            return super().tolist()

    _, layer = made(CONFIG)
    _, after = made(CONFIG)
    after.layer = 5
    x, hinted = rows(4)[:1], []
    with torch.inference_mode():
        expected = layer(x)[0]
        layer.following = (after,)
        guesses = after.router.route(x[0]).expert_N.tolist()
        inner = FixedRouter.nearest
        monkeypatch.setattr(FixedRouter, "nearest", lambda *args: inner(*args).as_subclass(Elsewhere))
        layer.source.hint = lambda number, expert: hinted.append((number, expert))
        assert torch.equal(layer(x)[0], expected)
    assert Elsewhere.waits == 1
    assert [expert for number, expert in hinted if number == 5] == list(dict.fromkeys(guesses))


def test_at_hand_first():
    _, layer = made(CONFIG)
    inner, order = layer.source, []

    class Half:
        def get(self, number, expert):
            order.append(expert)
            return inner.get(number, expert)

        def ask(self, number, experts):
            pass

        def hint(self, number, expert):
            pass

        def holds(self, number, expert):
            return expert % 2 == 1

    layer.source = Half()
    with torch.inference_mode():
        layer(rows(40))
    odd = [expert % 2 for expert in order]
    assert odd == sorted(odd, reverse=True) and len(set(order)) == len(order) > 3


def test_fetched_experts_do_not_train():
    _, layer = made(CONFIG)
    layer.train()
    with refused(ConfigError, "training", True):
        layer(rows(2))
    assert not any(name.endswith(("_EFD", "_EDF", "load_E", "share_1")) for name in layer.state_dict())


def test_a_token_that_is_not_finite_says_so():
    _, layer = made(CONFIG)
    x = rows(3)
    x[0, 1] = torch.nan
    with torch.inference_mode():
        y, _ = layer(x)
    assert y[0, 1].isnan().all()
    assert y[0, [0, 2]].isfinite().all() and y[1].isfinite().all()
