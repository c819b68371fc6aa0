"""The emitter as the head of any model."""

import torch
import torch.nn.functional as F

import perspectron
from perspectron.designs.drm.head import EmitterConfig
from tests.model.test_block import FFNS, MIXERS, BlockConfig, D, ModelConfig, V, ids, randomise


def test_it_has_a_hidden_layer():
    config = ModelConfig("head", V, D, (BlockConfig(MIXERS[1], FFNS[0]),), head=EmitterConfig(24))
    model = perspectron.build(config).double()
    randomise(model)
    x, _, _ = model.hidden(ids(2, 9))
    first, second = model.lm_head.up_proj, model.lm_head.out_proj
    expected = F.gelu(x @ first.weight.T + first.bias) @ second.weight.T + second.bias
    output = model(ids(2, 9), targets=ids(2, 9, seed=1))
    torch.testing.assert_close(output.logits, expected, rtol=1e-12, atol=1e-12)
    output.objective().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
