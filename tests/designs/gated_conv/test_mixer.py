"""The gated short convolution as a module: as transformers has it, as a plain loop with its gradients, its size.

Shapes: B batch, T time, D model width, W taps.
"""

import pytest
import torch
from torch import Tensor
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from perspectron.designs.gated_conv.mixer import GatedConv, GatedConvConfig, GatedConvState
from perspectron.util.errors import ConfigError
from tests.designs.formulas import agree, drawn, normal
from tests.refusals import refused

D = 12


def build(conv: int, *, bias: bool) -> GatedConv:
    return drawn(GatedConv(D, 1e-5, GatedConvConfig(conv, bias)))


def plain(module: GatedConv, x_BTD: Tensor, window_BZD: Tensor) -> tuple[Tensor, Tensor]:
    """One token at a time."""
    W, window, outputs = module.config.conv, list(window_BZD.unbind(1)), []
    for x_BD in x_BTD.unbind(1):
        b, c, u = module.in_proj(x_BD).chunk(3, -1)
        window.append(b * u)
        y = sum(window[len(window) - W + j] * module.conv1d.weight[:, 0, j] for j in range(W))
        y = y if module.conv1d.bias is None else y + module.conv1d.bias
        outputs.append(module.o_proj(c * y))
    return torch.stack(outputs, 1), torch.stack(window[len(window) - W + 1 :], 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("T", [1, 2, 40])
def test_it_is_the_plain_loop(T, W, bias):
    """Its gradients, too."""
    module, x, window = build(W, bias=bias), normal(2, T, D), normal(2, W - 1, D, seed=2)
    wanted = [x.requires_grad_(), window.requires_grad_(), *module.parameters()]
    y, state, aux = module(x, GatedConvState(window))
    assert aux == {}
    agree((y, state.window_BZD), plain(module, x, window), wanted, 1e-11)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_that_of_transformers(bias):
    module = build(4, bias=bias)
    config = Lfm2Config(
        hidden_size=D, conv_L_cache=4, conv_bias=bias, num_hidden_layers=1, layer_types=["conv"]
    )
    theirs = Lfm2ShortConv(config, 0).double().eval()
    names = {"conv1d": "conv", "o_proj": "out_proj"}
    parts = {name: name.partition(".") for name in module.state_dict()}
    theirs.load_state_dict(
        {names.get(a, a) + dot + b: module.state_dict()[name] for name, (a, dot, b) in parts.items()}
    )
    x = normal(2, 40, D)
    torch.testing.assert_close(module(x)[0], theirs(x), rtol=1e-12, atol=1e-12)


def test_its_state_is_the_window_alone():
    module = build(3, bias=False)
    state = module.init_state(2, torch.get_default_device(), torch.bfloat16, capacity=10**6)
    assert state.window_BZD.shape == (2, 2, D) and state.window_BZD.dtype is torch.float32
    with refused(ConfigError, "conv", 0):
        GatedConvConfig(0)
