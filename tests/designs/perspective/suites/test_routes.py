"""Routes against what the experts were really given, plain loops and walks on the torus."""

import itertools
import math
from dataclasses import astuple, replace

import pytest
import torch

from perspectron import build, presets
from perspectron.data import Tokenizer
from perspectron.designs.perspective.suites import routes
from perspectron.designs.perspective.suites.routes import Measures, Rates, Routes, measure, summary, trace
from perspectron.experts.torus import cells, hops, lattice
from perspectron.model.config import SequentialConfig
from perspectron.model.ffn import TiedConfig
from perspectron.model.model import LanguageModel
from perspectron.ops import experts
from perspectron.stream.engine import load_artifact
from perspectron.stream.synthetic import synthesize
from perspectron.util.errors import ConfigError
from tests.refusals import refused

SHAPES = [(1,), (2,), (3,), (5,), (8,), (4, 4), (4, 2), (1, 3), (2, 2), (2, 1, 3), (3, 4, 2), (8, 4, 4)]


def steps_between(shape: tuple[int, ...]) -> list[list[int]]:
    """Hops from every expert to every other, by walking from neighbour to neighbour."""
    places = [at[::-1] for at in itertools.product(*(range(n) for n in shape[::-1]))]  # x fastest
    ids = {at: i for i, at in enumerate(places)}
    table = []
    for start in places:
        far, edge = {start: 0}, [start]
        while edge:
            at = edge.pop(0)
            for axis, by in itertools.product(range(len(shape)), (-1, 1)):
                to = (*at[:axis], (at[axis] + by) % shape[axis], *at[axis + 1 :])
                if to not in far:
                    far[to] = far[at] + 1
                    edge.append(to)
        table.append([far[at] for at in sorted(far, key=ids.__getitem__)])
    return table


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hops_are_the_fewest_steps(shape):
    assert hops(shape).tolist() == steps_between(shape)


def random_routes(shape: tuple[int, ...], B: int, T: int, seed: int = 0) -> Routes:
    draw = torch.Generator().manual_seed(seed)
    expert_BT = torch.randint(math.prod(shape), (B, T), generator=draw)
    return Routes(3, "torus", shape, expert_BT, torch.rand(B, T, len(shape), generator=draw), expert_BT)


@pytest.mark.parametrize("shape", [(1,), (2,), (4, 2), (3, 4, 2)], ids=str)
def test_measures_are_those_of_plain_counting(shape):
    layer = random_routes(shape, 3, 40)
    draw = torch.Generator().manual_seed(1)
    reset_BT, counted_BT = (torch.rand(3, 40, generator=draw) < p for p in (0.2, 0.8))
    found = measure(layer, reset_BT=reset_BT, counted_BT=counted_BT)
    table, load, moved = steps_between(shape), [0] * math.prod(shape), [0] * 4
    for row, resets, counted in zip(layer.expert_BT.tolist(), reset_BT, counted_BT, strict=True):
        for t, expert in enumerate(row):
            load[expert] += int(counted[t])
            if t and counted[t] and counted[t - 1] and not resets[t]:
                moved[min(table[row[t - 1]][expert], 3)] += 1
    assert found.load == load
    assert found.tokens == sum(load)
    assert found.pairs == sum(moved) > 0
    assert astuple(found.rates) == pytest.approx([count / sum(moved) for count in moved])
    chance = [0.0] * 4
    for a, b in itertools.product(range(len(load)), repeat=2):
        chance[min(table[a][b], 3)] += load[a] * load[b] / sum(load) ** 2
    assert astuple(found.chance) == pytest.approx(chance)
    unfair = sum(abs(a - b) for a in load for b in load) / (2 * len(load) * sum(load))
    assert found.gini == pytest.approx(unfair)
    assert found.reached == sum(map(bool, load)) / len(load)


@pytest.mark.parametrize("tokens", [1, routes.CHUNK, routes.CHUNK + 1, 2 * routes.CHUNK + 1])
def test_an_artifact_loses_no_token(tmp_path, tokens):
    """A chunk of one token would take the engine's short way, which no hook sees."""
    sizes = {"d_model": 64, "hidden": 8, "rank": 8, "heads": 4, "kv_heads": 2, "window": 8, "vocab_size": 300}
    config = presets.get("perspective-tiny", **sizes, torus=[2, 2], ternary=True, int8_activations=True)
    synthesize(config, tmp_path / "a", lambda: Tokenizer.train(["the cat sat. " * 40], 300), experts=2)
    model, _ = load_artifact(tmp_path / "a")
    ids_BT = torch.randint(300, (1, tokens), generator=torch.Generator().manual_seed(0))
    found = trace(model, ids_BT)
    assert {layer.expert_BT.shape for layer in found} == {(1, tokens)}
    for whole, part in zip(found, trace(model, ids_BT[:, :2]), strict=True):
        assert torch.equal(whole.expert_BT[:, :2], part.expert_BT)


def test_nothing_counted_and_single_tokens_have_no_rates():
    layer = random_routes((4, 2), 2, 5)
    nothing = measure(layer, counted_BT=torch.zeros(2, 5, dtype=torch.bool))
    assert nothing == Measures(0, [0] * 8, 0.0, 0.0, 0, None, None)
    alone = measure(layer, reset_BT=torch.ones(2, 5, dtype=torch.bool))
    assert (alone.tokens, alone.pairs, alone.rates) == (10, 0, None)
    assert summary([alone, alone]).rates is None
    assert sum(astuple(summary([alone, alone]).chance)) == pytest.approx(1)


def test_a_summary_is_the_mean_of_the_layers():
    one = Measures(4, [4, 0], 0.5, 0.5, 3, Rates(1.0, 0.0, 0.0, 0.0), Rates(1.0, 0.0, 0.0, 0.0))
    other = replace(one, gini=0.0, reached=1.0, rates=Rates(0.0, 0.5, 0.25, 0.25))
    assert summary([one, other]).rates == Rates(0.5, 0.25, 0.125, 0.125)
    assert (summary([one, other]).gini, summary([one, other]).reached) == (0.25, 0.75)


# ---------------------------------------------------------------- trace


def small(**overrides) -> LanguageModel:
    sizes = {"d_model": 32, "layers": 4, "hidden": 16, "rank": 8, "heads": 2, "kv_heads": 1, "window": 8}
    config = presets.get("perspective-tiny", **sizes | {"vocab_size": 300, "torus": [4, 2]} | overrides)
    return build(config, seed=1).double()


IDS = torch.randint(300, (2, 23), generator=torch.Generator().manual_seed(0))
RESET = torch.zeros(2, 23, dtype=torch.bool)
RESET[0, 9] = RESET[1, 16] = True


@pytest.fixture
def given(monkeypatch) -> list[torch.Tensor]:
    """The experts that the networks were really told to use, call by call."""
    seen, plain = [], experts.swiglu

    def spy(x_ND, expert_N, *rest, **options):
        seen.append(expert_N.clone())
        return plain(x_ND, expert_N, *rest, **options)

    monkeypatch.setattr(experts, "swiglu", spy)
    return seen


@pytest.mark.parametrize("router", ["torus", "switch"])
def test_a_trace_is_what_the_experts_were_given(router, given):
    model = small(router=router)
    layers = trace(model, IDS, RESET)
    assert [layer.layer for layer in layers] == [0, 1, 2]
    assert len(given) == 3
    for layer, expert_N in zip(layers, given, strict=True):
        assert layer.expert_BT.tolist() == expert_N.view(2, 23).tolist()
        assert layer.router == router
        assert layer.expert_BT.unique().numel() > 2  # not a trivial choice
        if router == "switch":
            assert torch.equal(layer.query_BTA, lattice((4, 2))[layer.expert_BT])
    given.clear()
    model(IDS, reset_BT=RESET)
    assert [layer.expert_BT.flatten().tolist() for layer in layers] == [e.tolist() for e in given]


def test_routers_that_read_the_token_before_are_traced_as_they_route(given):
    layers = trace(small(shift=True), IDS, RESET)
    assert [layer.expert_BT.flatten().tolist() for layer in layers] == [e.tolist() for e in given]


@pytest.mark.parametrize("reads", ["stream", "mixer"])
def test_routers_read_what_their_block_gives_them(reads, given):
    config = small(reads=reads).config
    around = {"residual": SequentialConfig("sandwich", 0.3)}
    blocks = [replace(block, **around, beside=block.mixer) for block in config.blocks[:3]]
    blocks[1] = replace(blocks[1], residual=SequentialConfig("post"))
    blocks.append(config.blocks[3])
    layers = trace(build(replace(config, blocks=tuple(blocks)), seed=1).double(), IDS)
    assert [layer.expert_BT.flatten().tolist() for layer in layers] == [e.tolist() for e in given]


def test_queries_are_those_that_choose(monkeypatch):
    """Without biases and offsets the chosen expert's cell is the one that the query falls into."""
    model = small(bias_rate=0.0, offsets=False)
    for layer in trace(model, IDS):
        assert layer.query_BTA.shape == (2, 23, 2)
        assert ((layer.query_BTA >= 0) & (layer.query_BTA < 1)).all()
        cell_BTA = (layer.query_BTA * torch.tensor([4, 2])).long()
        assert torch.equal(cells((4, 2))[layer.expert_BT], cell_BTA)


def test_in_chunks_as_at_once(monkeypatch):
    model = small()
    whole = trace(model, IDS, RESET)
    monkeypatch.setattr(routes, "CHUNK", 5)
    for a, b in zip(whole, trace(model, IDS, RESET), strict=True):
        assert torch.equal(a.expert_BT, b.expert_BT)
        torch.testing.assert_close(a.query_BTA, b.query_BTA, rtol=0, atol=1e-9)


def test_a_document_knows_nothing_of_the_one_before():
    model = small()
    after = trace(model, IDS[:1, 9:])
    for both, alone in zip(trace(model, IDS, RESET), after, strict=True):
        torch.testing.assert_close(both.query_BTA[:1, 9:], alone.query_BTA, rtol=0, atol=1e-9)
    plain = trace(model, IDS)
    assert not torch.allclose(plain[1].query_BTA[:1, 9:], after[1].query_BTA, atol=1e-4)


def test_no_hook_stays():
    model = small()
    trace(model, IDS)
    with refused(ConfigError, "ids", "vocab_size"):
        trace(model, IDS + 300)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_network_that_two_layers_share_is_seen_in_both(given):
    config = small().config
    blocks = (*config.blocks[:3], replace(config.blocks[0], ffn=TiedConfig(1)))
    layers = trace(build(replace(config, blocks=blocks), seed=1).double(), IDS)
    assert [layer.layer for layer in layers] == [0, 1, 2, 3]
    assert [layer.expert_BT.flatten().tolist() for layer in layers] == [e.tolist() for e in given]


def test_a_dense_model_has_no_routes():
    with refused(ConfigError, "model", "perspective-tiny"):
        trace(small(ffn="dense"), IDS)


def test_traces_join_in_rows_and_in_line():
    parts = [[random_routes((4, 2), 1, 6, seed)] for seed in (0, 1)]
    (below,), (line,) = routes.joined(parts, 0), routes.joined(parts, 1)
    assert below.expert_BT.tolist() == [parts[0][0].expert_BT[0].tolist(), parts[1][0].expert_BT[0].tolist()]
    assert torch.equal(line.query_BTA, torch.cat([part[0].query_BTA for part in parts], 1))
    assert (line.layer, line.torus) == (3, (4, 2))
