"""Latent attention: the keys and values of all heads, made and attended to one by one, give what it gives.

Shapes: B batch, T time, D model width, H heads, R latent width, N and P parts of a key, V value width.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from perspectron.designs.transformer.mla import MLA, MLAConfig
from perspectron.util.errors import ConfigError
from tests.refusals import refused

D = 16
CONFIG = MLAConfig(3, 10, 6, 4, 5, norm_eps=1e-3)


@torch.no_grad()
def build(config: MLAConfig = CONFIG) -> MLA:
    module, draw = MLA(D, 1e-6, config).double(), torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(0, 1 if parameter.ndim == 1 else 2 * parameter.shape[-1] ** -0.5, generator=draw)
    return module.to(torch.get_default_device())


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(module: MLA, x_TD: Tensor) -> Tensor:
    """As published: each head has a key and a value of each token."""
    H, R, N, P = CONFIG.heads, CONFIG.rank, CONFIG.key_dim, CONFIG.shared_dim
    kept, outputs = [], []
    for x_D in x_TD:
        c, p = (module.kv_proj.weight @ x_D).split([R, P])
        c = c / torch.sqrt((c * c).mean() + 1e-3) * module.kv_norm.weight
        kept.append((c, p))
        q_HC = (module.q_proj.weight @ x_D).view(H, N + P)
        heads = []
        for h in range(H):
            keys = torch.stack([torch.cat([module.key_HRN[h].T @ c, p]) for c, p in kept])
            values = torch.stack([module.value_HVR[h] @ c for c, _ in kept])
            heads.append((keys @ q_HC[h] / math.sqrt(N + P)).softmax(0) @ values)
        outputs.append(module.o_proj.weight @ torch.cat(heads))
    return torch.stack(outputs)


@pytest.mark.parametrize("cuts", [(30,), (1,) * 5 + (25,), (13, 1, 16)])
def test_it_is_attention_to_keys_and_values_of_each_head(cuts):
    """So are its gradients."""
    module, x_BTD = build(), normal(2, 30, D).requires_grad_()
    expected = torch.stack([plain(module, x_TD) for x_TD in x_BTD])
    state, parts = None, []
    for part in x_BTD.split(cuts, 1):
        y, state, _ = module(part, state)
        parts.append(y)
    y_BTD = torch.cat(parts, 1)
    torch.testing.assert_close(y_BTD, expected, rtol=1e-10, atol=1e-10)
    inputs = [x_BTD, *module.parameters()]
    found, wanted = (
        torch.autograd.grad((y * normal(2, 30, D, seed=3)).sum(), inputs) for y in (y_BTD, expected)
    )
    for a, b in zip(found, wanted, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * float(b.abs().max()))


@torch.no_grad()
def test_of_a_token_the_latent_and_the_shared_part_are_kept_and_nothing_else():
    for config, size in ((CONFIG, 4), (replace(CONFIG, cache="bfloat16"), 2)):
        module = build(config).float()
        states = [module.init_state(2, torch.device("meta"), torch.float32, tokens) for tokens in (64, 128)]
        bytes_of = [sum(x.nbytes for x in (state.k_BHSK, state.v_BHSV)) for state in states]
        assert bytes_of[1] - bytes_of[0] == 2 * 64 * (10 + 4) * size


@torch.no_grad()
def test_a_rounded_cache_has_the_same_numbers_in_every_split():
    module, x_BTD = build(replace(CONFIG, cache="bfloat16")).float(), normal(2, 40, D).float()
    whole, (state, parts) = module(x_BTD)[0], (None, list[Tensor]())
    for part in x_BTD.split((7, 1, 1, 31), 1):
        y, state, _ = module(part, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=2e-6 * float(whole.abs().max()))
    full = build().float()(x_BTD)[0]
    assert 1e-4 < float((whole - full).abs().max() / full.abs().max()) < 0.1


@pytest.mark.parametrize("field", ["heads", "rank", "key_dim", "shared_dim", "value_dim", "norm_eps"])
def test_a_number_that_cannot_be_is_named(field):
    with refused(ConfigError, field, 0):
        replace(CONFIG, **{field: 0})


def test_its_step_is_refused_in_onnx_by_its_place():
    with refused(ConfigError, "blocks[3].mixer", "mla"):
        build().require_onnx("blocks[3].mixer")
