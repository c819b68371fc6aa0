"""Mamba's mixer: the plain loop of its formulas in float64, with its gradients and final state.

Shapes: B batch, T time, D model width, I inner width, N numbers of a channel's memory.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.designs.mamba.mixer import Mamba, MambaConfig, MambaState
from perspectron.util.errors import ConfigError
from tests.designs.formulas import agree, drawn, normal

D = 6


def build(config: MambaConfig) -> Mamba:
    return drawn(Mamba(D, 1e-5, config))


def plain(module: Mamba, x_BTD: Tensor, state: MambaState) -> tuple[Tensor, MambaState]:
    """One token at a time."""
    W, N = module.config.conv, module.config.state
    window, h_BIN, outputs = list(state.window_BZI.unbind(1)), state.memory_BIN, []
    for x_BD in x_BTD.unbind(1):
        u, z = module.in_proj(x_BD).chunk(2, -1)
        window.append(u)
        u = sum(window[len(window) - W + j] * module.conv1d.weight[:, 0, j] for j in range(W))
        u = F.silu(u if module.conv1d.bias is None else u + module.conv1d.bias)
        low, b, c = module.x_proj(u).split([module.dt_proj.in_features, N, N], -1)
        if module.config.norm:
            eps = module.config.norm_eps
            low, b, c = (v / (v.square().mean(-1, keepdim=True) + eps).sqrt() for v in (low, b, c))
        step = torch.log1p(torch.exp(module.dt_proj(low)))
        h_BIN = torch.exp(-step[..., None] * module.A_log.exp()) * h_BIN + (step * u)[..., None] * b[:, None]
        y = (h_BIN * c[:, None]).sum(-1) + module.D * u
        outputs.append(module.o_proj(y * F.silu(z)))
    return torch.stack(outputs, 1), MambaState(h_BIN, torch.stack(window[len(window) - W + 1 :], 1))


@pytest.mark.parametrize("config", [MambaConfig(3), MambaConfig(5, 3, 2, 4, True, False, True, 1e-2)])
@pytest.mark.parametrize("T", [1, 63, 64, 65])
def test_it_is_the_plain_loop(T, config):
    """Its gradients, too."""
    module, x = build(config), normal(2, T, D)
    inner = config.expand * D
    state = MambaState(normal(2, inner, config.state, seed=2), normal(2, config.conv - 1, inner, seed=3))
    wanted = [x.requires_grad_(), state.memory_BIN.requires_grad_(), state.window_BZI.requires_grad_()]
    wanted += list(module.parameters())
    y, after, aux = module(x, state)
    assert aux == {}
    both = [(out, last.memory_BIN, last.window_BZI) for out, last in ((y, after), plain(module, x, state))]
    agree(*both, wanted, 1e-9)


def test_its_rank_follows_from_the_width():
    assert MambaConfig().low(768) == 48 and MambaConfig().low(17) == 2 and MambaConfig(rank=5).low(768) == 5


@pytest.mark.parametrize(
    "options", [{"state": 0}, {"conv": 0}, {"expand": 0}, {"rank": 0}, {"norm_eps": 0.0}]
)
def test_sizes_that_cannot_be_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        MambaConfig(**options)
