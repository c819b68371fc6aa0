"""RG-LRU's mixer: the plain loop of its formulas in float64, with its gradients and final state.

Shapes: B batch, T time, D model width, I inner width.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.designs.rglru.mixer import RGLRU, RGLRUConfig, RGLRUState
from perspectron.util.errors import ConfigError
from tests.designs.formulas import agree, drawn, normal

D = 6


def build(config: RGLRUConfig) -> RGLRU:
    return drawn(RGLRU(D, 1e-5, config))


def plain(module: RGLRU, x_BTD: Tensor, state: RGLRUState) -> tuple[Tensor, RGLRUState]:
    """One token at a time."""
    W, H = module.config.conv, module.config.heads
    window, h_BI, first, outputs = list(state.window_BZI.unbind(1)), state.hidden_BI, 1 - state.begun_B1, []
    for x_BD in x_BTD.unbind(1):
        window.append(module.x_proj(x_BD))
        u = sum(window[len(window) - W + j] * module.conv1d.weight[:, 0, j] for j in range(W))
        u = u + module.conv1d.bias
        gates = [gate(part).chunk(2, -1) for gate, part in zip(module.gates, u.chunk(H, -1), strict=True)]
        i, r = (torch.cat(parts, -1).sigmoid() for parts in zip(*gates, strict=True))
        log_a = -8 * r * torch.log1p(module.decay_I.exp())
        size = torch.where(first > 0, 1.0, (1 - (2 * log_a).exp()).sqrt())
        h_BI, first = log_a.exp() * h_BI + size * i * u, torch.zeros_like(first)
        outputs.append(module.o_proj(h_BI * F.gelu(module.y_proj(x_BD), approximate="tanh")))
    return torch.stack(outputs, 1), RGLRUState(
        h_BI, torch.stack(window[len(window) - W + 1 :], 1), torch.ones_like(first)
    )


@pytest.mark.parametrize("config", [RGLRUConfig(2), RGLRUConfig(5, 10, 3)])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 129])
def test_it_is_the_plain_loop(T, config):
    """Its gradients, too; one text has begun, and one begins."""
    module, x, inner = build(config), normal(2, T, D), config.width(D)
    begun = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    state = RGLRUState(
        normal(2, inner, seed=2) * begun, normal(2, config.conv - 1, inner, seed=3) * begun[:, :, None], begun
    )
    wanted = [x.requires_grad_(), state.hidden_BI.requires_grad_(), state.window_BZI.requires_grad_()]
    wanted += list(module.parameters())
    y, after, aux = module(x, state)
    assert aux == {} and torch.equal(after.begun_B1, torch.ones_like(begun))
    both = [(out, last.hidden_BI, last.window_BZI) for out, last in ((y, after), plain(module, x, state))]
    agree(*both, wanted, 1e-9)


def test_memories_start_within_the_radii_and_keep_their_size():
    module = RGLRU(1024, 1e-5, RGLRUConfig(4))
    with torch.no_grad():
        module.init_weights(torch.Generator().manual_seed(0))
        decay = torch.exp(-F.softplus(module.decay_I.double()))
    assert 0.9 <= float(decay.min()) < 0.91 and 0.998 < float(decay.max()) <= 0.9991


@pytest.mark.parametrize("options", [{"heads": 0}, {"heads": 2, "conv": 0}, {"heads": 2, "inner": 0}])
def test_sizes_that_cannot_be_are_refused(options):
    with pytest.raises(ConfigError, match=list(options)[-1]):
        RGLRUConfig(**options)
    with pytest.raises(ConfigError, match="heads"):
        RGLRU(D, 1e-5, RGLRUConfig(4))
