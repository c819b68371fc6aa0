"""The router: every view against a search by hand, ties, and the choice that the layer, the packed layer and the
native step share."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from perspectron import native
from perspectron.experts.layer import RoutedSwiGLU
from perspectron.experts.router import (
    OFFSET,
    VIEWS,
    Distances,
    FixedRouter,
    Routed,
    RoutedConfig,
    Router,
    Views,
)
from perspectron.experts.torus import cells, distance2, lattice
from perspectron.stream.experts import PackedExperts
from perspectron.util.errors import ConfigError
from tests.native.isa import forced_isa
from tests.refusals import refused

D = 24
TORI = [(8, 4), (3, 2, 5), (7,), (1, 4), (2, 1, 2)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(torus=(4, 2), *, dtype=torch.float64, biases=0.02, kind: type[Routed] = Routed, **options) -> Routed:
    config, draw = RoutedConfig(12, torus, **options), generator(0)
    layer = kind(D, config, 0) if kind is PackedExperts else kind(D, config)
    with torch.no_grad():
        layer.route_proj.weight.normal_(generator=draw)
        layer.route_proj.bias.uniform_(generator=draw)
        if hasattr(layer, "offset_EA"):
            layer.offset_EA.normal_(generator=draw)
        if config.bias_rate > 0:
            layer.bias_E.normal_(0, biases, generator=draw)
    return layer.to(dtype).requires_grad_(False)


def tokens(count: int, dtype=torch.float64) -> Tensor:
    return torch.randn(count, D, generator=generator(1), dtype=dtype)


def places(layer: Routed) -> list[list[float]]:
    torus, found = layer.config.torus, []
    for e, cell in enumerate(cells(torus).tolist()):
        moved = [0.0] * len(torus)
        if hasattr(layer, "offset_EA"):
            moved = [OFFSET * math.tanh(x) for x in layer.offset_EA[e].tolist()]
        found.append([(c + 0.5 + m) / n for c, m, n in zip(cell, moved, torus, strict=True)])
    return found


def ranked(layer: Routed, query: list[float]) -> list[int]:
    """Experts from the nearest to the farthest, by hand; of equals the lower id first."""
    costs = []
    for e, place in enumerate(places(layer)):
        apart = [min((z - p) % 1, (p - z) % 1) for z, p in zip(query, place, strict=True)]
        handicap = layer.bias_E[e].item() if layer.config.bias_rate > 0 else 0.0
        costs.append((sum(d * d for d in apart) - handicap, e))
    return [e for _, e in sorted(costs)]


@pytest.mark.parametrize("torus", TORI)
@pytest.mark.parametrize("options", [{}, {"offsets": False}, {"bias_rate": 0.0}], ids=str)
def test_every_view_is_the_search_by_hand(torus, options):
    layer = made(torus, **options)
    router, x = layer.router, tokens(50)
    distances = router.distances(x)
    order = [ranked(layer, query) for query in distances.query_NA.tolist()]
    away = torch.tensor([0.5 if n > 1 else 0.0 for n in torus])
    across = [ranked(layer, query) for query in (distances.query_NA + away).tolist()]
    assert router.select(distances).tolist() == [experts[0] for experts in order]
    assert router.select(distances, "second").tolist() == [experts[1] for experts in order]
    assert router.select(distances, "antipode").tolist() == [experts[0] for experts in across]
    assert router.route(x).expert_N.tolist() == [experts[0] for experts in order]


@pytest.mark.parametrize("torus", [(8, 4, 4), (4, 2), (6, 1, 2)])
def test_the_antipode_twice_is_the_lattice_point_itself(torus):
    router = made(torus, offsets=False, bias_rate=0.0).router
    place_EA = lattice(torus).double()

    def antipode(query_NA: Tensor) -> Tensor:
        return router.select(Distances(query_NA, distance2(query_NA, place_EA)), "antipode")

    once_E = antipode(place_EA)
    assert antipode(place_EA[once_E]).tolist() == list(range(math.prod(torus)))
    moved = [n // 2 for n in torus]
    wanted = [
        [(c + m) % n for c, m, n in zip(cell, moved, torus, strict=True)] for cell in cells(torus).tolist()
    ]
    assert cells(torus)[once_E].tolist() == wanted


def test_ties_go_to_the_lowest_id_in_every_view():
    router = made((4, 2), offsets=False, bias_rate=0.0).router
    query_NA = torch.tensor([[0.5, 0.5]], dtype=torch.float64)  # between 1, 2, 5 and 6
    distances = Distances(query_NA, distance2(query_NA, lattice((4, 2)).double()))
    assert router.select(distances).tolist() == [1]
    assert router.select(distances, "second").tolist() == [2]
    assert router.select(distances, "antipode").tolist() == [0]  # between 0, 3, 4 and 7


def test_a_switch_chooses_by_its_logits():
    layer = made((3, 2), router="switch", smooth=0.0)
    router, x = layer.router, tokens(40)
    logit_NE = x @ layer.route_proj.weight.T + layer.route_proj.bias + layer.bias_E
    best_NE = logit_NE.argsort(1, descending=True)
    distances = router.distances(x)
    assert distances.query_NA.shape == (40, 0)
    assert torch.equal(router.select(distances), best_NE[:, 0])
    assert torch.equal(router.select(distances, "second"), best_NE[:, 1])
    assert torch.equal(router.select(distances, "antipode"), best_NE[:, -1])  # the least likely


def test_random_depends_on_seed_and_position_alone_and_is_even():
    router = made((4, 2)).router
    distances = router.distances(tokens(4000))
    drawn = router.select(distances, "random", seed=3)
    assert torch.equal(router.select(distances, "random", seed=3), drawn)
    assert not torch.equal(router.select(distances, "random", seed=4), drawn)
    few = Distances(distances.query_NA[:3], distances.distance2_NE[:3])
    assert torch.equal(router.select(few, "random", seed=3, position_N=[7, 3999, 0]), drawn[[7, 3999, 0]])
    with refused(ConfigError, "position_N", 2):
        router.select(few, "random", seed=3, position_N=[7, 3999])
    load_E = torch.bincount(drawn, minlength=8).double()
    assert ((load_E - 500).square() / 500).sum() < 24.3  # χ² of 7 degrees of freedom, 0.1%


def test_perturbed_draws_by_the_softmax_of_the_router():
    layer = made((4, 2), offsets=False, bias_rate=0.0)
    router, count = layer.router, 20_000
    distances = router.distances(tokens(1))
    probability_E = (distances.distance2_NE[0] / -router.config.tau).softmax(0)
    many = Distances(*(part.expand(count, -1) for part in distances))
    drawn_E = torch.bincount(router.select(many, "perturbed", seed=1), minlength=8).double()
    wanted_E = count * probability_E
    assert ((drawn_E - wanted_E).square() / wanted_E)[wanted_E > 5].sum() < 24.3  # χ² of 7, 0.1%


def test_views_change_their_own_rows_and_layers_alone():
    layer, x = made((4, 2), kind=RoutedSwiGLU, gate="soft"), tokens(6)[None].expand(4, -1, -1)
    for weight in (layer.gate_EFD, layer.up_EFD, layer.down_EDF):
        weight.normal_(generator=generator(2))
    position_BT = torch.arange(6).expand(4, -1)
    kinds = ("nearest", "second", "antipode", "random")
    views = Views(kinds, (3,) * 4, position_BT, from_layer=2)
    assert views.at(1) is None
    with torch.no_grad():
        plain, seen = layer(x)[0], layer(x, views=views.at(2))[0]
        own = layer(x, views=replace(views.at(2), gate="own"))[0]
        torch.testing.assert_close(seen[0], plain[0])
        torch.testing.assert_close(own[0], plain[0])
        for row, kind in enumerate(kinds[1:], 1):
            distances = layer.router.distances(x[row])
            of_N = layer.router.select(distances, kind, seed=3 | 2 << 64)
            assert torch.equal(
                layer.router.route(x.flatten(0, 1), views.at(2)).expert_N.view(4, 6)[row], of_N
            )
            assert not torch.allclose(plain[row], seen[row])
            ratio = layer.router.gates(distances, of_N) / layer.router.gates(
                distances, distances.distance2_NE.argmin(1)
            )
            torch.testing.assert_close(own[row], seen[row] * ratio[:, None])


@pytest.mark.parametrize(
    ("view", "options", "named"),
    [
        ("nearer", {}, ["view", "nearer"]),
        ("random", {}, ["seed", None]),
        ("random", {"seed": -1}, ["seed", -1]),
        ("random", {"seed": 2**128}, ["seed", str(2**128)]),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_line(view, options, named):
    router = made((4, 2)).router
    with refused(ConfigError, *named):
        router.select(router.distances(tokens(2)), view, **options)


def test_one_expert_has_no_second():
    router = made((1,)).router
    distances = router.distances(tokens(3))
    assert router.select(distances).tolist() == [0, 0, 0]
    with refused(ConfigError, "view", "second"):
        router.select(distances, "second")


def test_gradients_reach_the_parameters_through_a_router_made_at_each_call():
    layer = RoutedSwiGLU(D, RoutedConfig(12, (4, 2)))
    layer.load_state_dict(made((4, 2), kind=RoutedSwiGLU).state_dict() | {})
    bias_A = torch.zeros(2, requires_grad=True)
    with torch.no_grad():
        shifted = torch.func.functional_call(
            layer, {"route_proj.bias": bias_A}, (tokens(6, torch.float32)[None],)
        )
    assert shifted[0].shape == (1, 6, D)
    layer.router.route(tokens(6, torch.float32)).gate_N.sum().backward()
    assert layer.route_proj.weight.grad is not None and layer.offset_EA.grad.abs().sum() > 0


# ---------------------------------------------------------------- one choice for all


@pytest.mark.parametrize("torus", [*TORI, (8, 4, 4)])
@pytest.mark.parametrize(
    "options", [{}, {"offsets": False}, {"bias_rate": 0.0}, {"router": "switch", "smooth": 0.0}], ids=str
)
def test_the_packed_layer_chooses_as_the_layer_does_and_token_by_token_alike(torus, options):
    float_layer = made(torus, dtype=torch.float32, **options)
    packed = made(torus, dtype=torch.float32, kind=PackedExperts, **options)
    x = tokens(200, torch.float32)
    ours, theirs = packed.router.distances(x), float_layer.router.distances(x)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    alone = [packed.router.distances(x_D[None]) for x_D in x]
    assert torch.equal(torch.cat([one.distance2_NE for one in alone]), ours.distance2_NE)
    margin_N = theirs.distance2_NE.sort(1).values[:, :3].diff(dim=1).amin(1) if math.prod(torus) > 2 else None
    clear_N = torch.ones(200, dtype=torch.bool) if margin_N is None else margin_N > 1e-4
    assert clear_N.sum() > 150
    for view in VIEWS:
        chosen = [
            router.select(d, view, seed=0)
            for router, d in ((packed.router, ours), (float_layer.router, theirs))
        ]
        agree_N = chosen[0] == chosen[1]
        assert agree_N[clear_N].all() if view != "antipode" else agree_N.float().mean() > 0.98


@pytest.mark.skipif(not native.available(), reason="no native library")
@pytest.mark.parametrize("isa", ["avx512", "avx2", "scalar"])
def test_the_native_choice_is_the_least_distance_with_ties_to_the_lowest_id(isa):
    """Queries in float32 that are exact, so that equals are equal: W is zero, and b falls on centres, edges and
    corners of cells."""
    torus = (4, 2)
    place_EA = lattice(torus)
    handicap_E = torch.tensor([0.0, 0.25, 0.0, 0.25, 0.0, 0.0, 0.25, 0.0])
    try:
        with forced_isa(isa):
            for x, y in itertools.product(range(-8, 17), range(-4, 9)):
                query = torch.tensor([x / 8, y / 4])
                for handicap in (None, handicap_E):
                    z_TA, distance_TE, expert_T = native.route(
                        torch.ones(2, D), torch.zeros(2, D), query, place_EA, handicap
                    )
                    wanted = distance2(query[None], place_EA) - (0 if handicap is None else handicap)
                    assert torch.equal(z_TA, query.expand(2, 2))
                    assert torch.equal(distance_TE, wanted.expand(2, 8))
                    best = wanted[0].tolist().index(wanted.min().item())
                    assert expert_T.tolist() == distance_TE.argmin(1).tolist() == [best, best]
    except ValueError:
        pytest.skip(f"no {isa} here")


@pytest.mark.skipif(not native.available(), reason="no native library")
def test_a_token_that_is_not_finite_goes_to_the_same_expert_natively():
    layer = made((4, 2), dtype=torch.float32, kind=PackedExperts)
    x = tokens(3, torch.float32)
    x[1, 5] = torch.nan
    _, distance_TE, expert_T = native.route(x, *layer.router.used)
    assert distance_TE[1].isnan().all()
    assert torch.equal(expert_T, distance_TE.argmin(1))


@pytest.mark.parametrize("options", [{}, {"router": "switch", "smooth": 0.0}], ids=str)
def test_without_the_library_torch_chooses_alike(options, monkeypatch):
    layer = made((4, 2), dtype=torch.float32, kind=PackedExperts, **options)
    x = tokens(64, torch.float32)
    expected = layer.router.distances(x)
    monkeypatch.setattr(native, "wanted", lambda: False)
    found = layer.router.distances(x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.distance2_NE[5:6], layer.router.distances(x[5:6]).distance2_NE)


def test_a_fixed_router_is_made_again_where_the_layer_was_moved():
    layer = made((4, 2), dtype=torch.float32, kind=PackedExperts)
    first = layer.router
    assert layer.router is first and isinstance(first, FixedRouter) and isinstance(made().router, Router)
    layer.to(torch.float32)
    assert layer.router is not first
