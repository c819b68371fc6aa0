"""Parts that recurrent mixers share."""

import math

import pytest
import torch

from perspectron.model.parts import between, logits_of_halflives, softplus_of_steps


def plain(x, last, reset, pad):
    """The token before, one at a time."""
    outputs, ends = torch.zeros_like(x), last.clone()
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            if reset[b, t]:
                ends[b] = 0
            if pad[b, t]:
                continue
            outputs[b, t] = ends[b]
            ends[b] = x[b, t]
    return outputs, ends


@pytest.mark.parametrize("cut", [0, 1, 5, 12])
def test_shift_is_the_plain_loop_at_any_cut(cut):
    draw = torch.Generator().manual_seed(3)
    x, last = torch.randn(4, 12, 3, generator=draw), torch.randn(4, 3, generator=draw)
    reset, pad = (torch.rand(4, 12, generator=draw) < 0.3 for _ in range(2))
    expected, ends = plain(x, last, reset, pad)
    mix = torch.tensor([[0.0] * 3, [1.0] * 3, [0.25] * 3])
    a, middle = between(x[:, :cut], last, mix, reset[:, :cut], pad[:, :cut])
    b, end = between(x[:, cut:], middle, mix, reset[:, cut:], pad[:, cut:])
    same, before, some = (
        torch.cat(parts, 1).masked_fill(pad[:, :, None], 0) for parts in zip(a, b, strict=True)
    )
    own = x.masked_fill(pad[:, :, None], 0)
    assert torch.equal(same, own) and torch.equal(end, ends)
    torch.testing.assert_close(before, expected)
    torch.testing.assert_close(some, own + 0.25 * (expected - own))


@pytest.mark.parametrize("resets", [False, True])
def test_a_shift_without_padding_reads_the_token_before(resets):
    x, last, mix = torch.randn(2, 5, 3), torch.randn(2, 3), torch.ones(1, 3)
    reset = torch.tensor([[False, True, False, False, True], [True] + 4 * [False]]) if resets else None
    (before,), end = between(x, last, mix, reset, None)
    expected = torch.cat([last[:, None], x[:, :-1]], 1)
    expected = expected if reset is None else expected.masked_fill(reset[:, :, None], 0)
    torch.testing.assert_close(before, expected)
    assert torch.equal(end, x[:, -1])


@pytest.mark.cpu_only("weights are drawn on the CPU")
def test_half_lives_are_spread_evenly_in_their_logarithm():
    bias = logits_of_halflives(torch.empty(4096), 1, 1000, torch.Generator().manual_seed(0))
    halflife = -math.log(2) / torch.nn.functional.logsigmoid(bias.double())
    assert halflife.min() >= 0.999 and halflife.max() <= 1001
    quartiles = torch.quantile(halflife.log() / math.log(1000), torch.tensor([0.25, 0.5, 0.75]).double())
    torch.testing.assert_close(quartiles, torch.tensor([0.25, 0.5, 0.75]).double(), atol=0.03, rtol=0)


@pytest.mark.cpu_only("weights are drawn on the CPU")
def test_steps_are_spread_evenly_in_their_logarithm():
    step = torch.nn.functional.softplus(
        softplus_of_steps(torch.empty(4096), torch.Generator().manual_seed(0))
    )
    assert step.min() >= 0.00099 and step.max() <= 0.101
    assert 0.008 < step.median() < 0.0125
