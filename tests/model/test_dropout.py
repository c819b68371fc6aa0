"""Dropout: in training alone, by the seed and the update, in every place that the config says."""

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.model.parts import Dropout
from perspectron.util.errors import ConfigError
from perspectron.util.ranks import Ranks, together
from tests.refusals import refused

TINY = {"vocab_size": 40, "d_model": 16, "layers": 2, "hidden": 16, "heads": 2}
IDS = torch.arange(24).view(2, 12)


def model(name: str, **more):
    return perspectron.build(presets.get(name, **TINY | more))


@pytest.mark.parametrize("name", ["gpt2", "adr", "lens", "transformer"])
def test_it_drops_in_training_alone_and_as_the_seed_and_the_update_say(name):
    made, plain = model(name, dropout=0.3), model(name)
    places = [place for place, module in made.named_modules() if isinstance(module, Dropout)]
    assert len(places) == len(set(places)) == 1 + 2 * 3, "embedding; of each block mixer, network, attention"
    with torch.no_grad():
        assert torch.equal(made(IDS).logits, plain(IDS).logits)
    assert torch.equal(made.eval()(IDS).logits, plain.eval()(IDS).logits)
    made.train()

    def drawn(seed: int, step: int) -> torch.Tensor:
        torch.manual_seed(seed)
        made.set_step(step)
        return made(IDS).logits

    first = drawn(1, 5)
    assert torch.equal(drawn(1, 5), first)
    assert all(not torch.equal(other, first) for other in (drawn(2, 5), drawn(1, 6), made(IDS).logits))


@pytest.mark.parametrize("reset", [False, True])
def test_weights_of_attention_are_dropped(reset):
    made = model("perspective", rank=4, kv_heads=1, window=5, period=1, dropout=0.5)
    seen = []
    for block in made.blocks:
        block.mixer.dropout.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
    reset_BT = torch.zeros(2, 12, dtype=torch.bool)
    reset_BT[:, 7] = True
    made(IDS, reset_BT=reset_BT if reset else None)
    assert len(seen) == 2
    for weights, kept in seen:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
        gone = (kept == 0) & (weights > 0)
        assert 0.3 < gone.sum() / (weights > 0).sum() < 0.7
        torch.testing.assert_close(kept[~gone], 2 * weights[~gone])


@pytest.mark.parametrize(("name", "more"), [("gpt2", {}), ("transformer", {"window": 3})], ids=str)
def test_one_token_after_others_drops_too(name, more):
    made, state, called = model(name, dropout=0.5, **more), None, []
    made.blocks[1].mixer.dropout.register_forward_hook(lambda *_: called.append(1))
    for t in range(5):
        state = made(IDS[:, t : t + 1], state).state
    assert len(called) == 5


def test_without_dropping_any_explicit_attention_is_the_fused_kernel(monkeypatch):
    monkeypatch.setattr(Dropout, "forward", lambda _, x: x)
    for name, more in (
        ("gpt2", {}),
        ("perspective", {"rank": 4, "kv_heads": 1, "window": 5, "period": 1}),
        ("lens", {}),
    ):
        found, expected = (model(name, **more, dropout=share)(IDS).logits for share in (0.5, 0.0))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_below_0_or_of_all_is_refused(share):
    with refused(ConfigError, "dropout", share):
        presets.get("gpt2", dropout=share)


def test_a_block_computed_again_has_the_zeros_of_its_own_pass():
    """Two forward passes before their backward passes."""
    plain = model("gpt2", dropout=0.3).double().train()

    def gradients(recompute: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        plain.recompute = recompute
        plain.set_step(1)
        loss = sum(plain(IDS, targets=(IDS + shift) % 40).loss for shift in (1, 2))
        return list(torch.autograd.grad(loss, list(plain.parameters())))

    for once, again in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(once, again, rtol=1e-12, atol=1e-12)


def test_each_rank_has_zeros_of_its_own_and_one_alone_those_of_a_process():
    drop, x = Dropout(0.5).train(), torch.ones(64)
    places = [(row, column) for row in range(2) for column in range(2)]
    drawn = list[torch.Tensor]()
    for row, column in places:
        with together(Ranks(None, 4, row, 2, column, 2)):
            drawn.append(drop(x))
            assert torch.equal(drop(x), drawn[-1])
    assert len({tuple(one.tolist()) for one in (*drawn, drop(x))}) == 5
    with together(Ranks(None, 1, 0, 1)):
        one = drop(x)
    assert torch.equal(one, drop(x))
