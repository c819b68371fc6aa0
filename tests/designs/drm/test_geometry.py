"""The geometry of DRM: each number against one that is known beforehand."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.designs.drm import geometry
from perspectron.designs.drm import op as drm
from perspectron.designs.drm.geometry import (
    Options,
    components,
    energy,
    exponent,
    measure,
    mixer_of,
    recurrence,
    torus,
    turns,
    walk,
)
from perspectron.designs.drm.geometry_command import findings, page
from perspectron.designs.drm.law import State
from perspectron.util.errors import ConfigError, DataError
from tests.refusals import refused

TINY = {"vocab_size": 40, "d_model": 8, "d_token": 6, "hidden": 8, "emitter": 8, "directions": 3, "rank": 2}
FEW = {"tokens": 2300, "sampled": 8, "pairs": 6, "span": 4, "rounds": 5, "points": 300, "steps": 40}


@pytest.fixture(scope="module")
def model():
    return perspectron.build(presets.get("drm", **TINY)).requires_grad_(False)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(40, (2400,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def results(model, ids):
    return measure(model, ids, Options(**FEW))


def around(turns_each: float, T: int = 3000) -> torch.Tensor:
    angle = 2 * math.pi * turns_each * torch.arange(T) / 1000
    return torch.stack([angle.cos(), angle.sin()], 1)


def test_turns_are_counted():
    found = turns(around(12.0))
    assert abs(found["turns"] - 12) < 0.1 and found["low"] > 11 and found["ring"] > 0.99
    assert abs(sum(found["histogram"]) - 1) < 1e-6


def test_a_torus_is_seen_and_a_random_walk_is_none():
    draw = torch.Generator().manual_seed(0)
    axes_66 = torch.linalg.qr(torch.randn(6, 6, generator=draw)).Q
    circles = torch.cat([3 * around(12.0), 2 * around(-7.3)], 1) @ axes_66[:4]
    noise = torch.randn(3000, 6, generator=draw)
    shuffled = circles[torch.randperm(3000, generator=draw)]
    assert torus(circles + 1e-3 * noise, shuffled)["verdict"] == "consistent with"
    assert torus(noise, noise.flip(0))["verdict"] == "no sign"
    assert torus(noise.cumsum(0), noise)["verdict"] == "no sign"


def test_the_planes_are_of_the_principal_components_whatever_was_drawn_before():
    noise = torch.randn(3000, 40, generator=torch.Generator().manual_seed(1))
    kept, found = torch.random.get_rng_state(), []
    for _ in range(2):
        found.append(torus(noise, noise.flip(0)))
        torch.rand(1)
    assert found[0] == found[1]
    torch.random.set_rng_state(kept)
    torus(noise, noise.flip(0))
    assert torch.equal(torch.random.get_rng_state(), kept)
    apart = noise - noise.mean(0)
    wanted = torch.linalg.svd(apart.double(), full_matrices=False).Vh[:6].T
    axes = components(apart, 6)
    torch.testing.assert_close(
        (axes.double() * wanted).sum(0).abs(), torch.ones(6).double(), rtol=0, atol=1e-5
    )
    assert (axes.amax(0) > -axes.amin(0)).all()


def test_what_goes_round_recurs_in_step_and_noise_does_not():
    noise = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    ring, random = recurrence(around(20.0, 400)), recurrence(noise)
    assert ring["determinism"] > 0.95 and random["determinism"] < 0.1
    assert abs(random["rate"] - 0.05) < 1e-3


def test_energy_is_the_sum_over_steps(model):
    mixer = mixer_of(model)
    path = 0.3 * torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(2))
    for row, found in zip(path, energy(mixer, path), strict=True):
        expected = 0.0
        for a, b in itertools.pairwise(row):
            now = geometry.field(mixer, ((a + b) / 2)[None])
            expected += ((b - a) @ drm.metric(now)[0] @ (b - a)).item()
        assert found.item() == pytest.approx(expected, rel=1e-5)


def test_the_exponent_is_the_growth_of_a_small_difference(model, ids):
    """Without the metric's bend, whose solve is not for many rows at once, as two states drift apart in the loop."""
    mixer = mixer_of(model).double()
    inputs_TE = geometry._inputs(model, ids[:60])[0].double()
    found = exponent(inputs_TE, mixer.weights(), mixer.law(), torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(0)
    tangent = torch.nn.functional.normalize(torch.randn(8, generator=draw, dtype=torch.float64), dim=0)
    z, grown, left = mixer.z0.clone(), 0.0, 30
    for t, x in enumerate(inputs_TE):
        both = torch.stack([z, z + 1e-7 * tangent])
        state = State(both, both.new_empty(2, 0), torch.full([2], t))
        after, _, _ = drm.scan(x.expand(2, 1, -1), state, mixer.weights(), mixer.law(), backend="naive")
        tangent = (after[1, 0] - after[0, 0]) / 1e-7
        grown += math.log(tangent.norm()) if t >= left else 0.0
        tangent, z = tangent / tangent.norm(), after[0, 0]
    mixer.float()
    assert found == pytest.approx(grown / 30, rel=1e-4)


def test_the_walk_is_that_of_the_model(model, ids, monkeypatch):
    monkeypatch.setattr(geometry, "CHUNK", 100)
    here = walk(model, mixer_of(model), ids[:250])
    with torch.inference_mode():
        _, state, _ = model.hidden(torch.tensor([ids[:250]]))
    torch.testing.assert_close(here.z_TS[-1], state.layers[0].z_BD[0], rtol=1e-4, atol=1e-5)
    assert here.z_TS.shape == (251, 8) and here.v_TS.shape == (250, 8)


def test_relaxed_paths_are_shorter_where_the_metric_bends(results):
    paths = results["paths"]
    assert 0 < paths["relaxed_over_straight"]["median"] <= 1
    assert paths["model_over_relaxed"]["median"] >= paths["model_over_straight"]["median"] > 0
    assert results["bounds"]["max"] <= 1 and results["local"]["outside"]["mean"] < 1
    assert results["local"]["condition"]["mean"] <= results["local"]["condition_bound"]["mean"]


def test_failures_come_first(results):
    good = results | {
        "paths": results["paths"] | {"model_over_relaxed": {"median": 1.0, "low": 1.0, "high": 1.05}},
        "torus": results["torus"] | {"verdict": "consistent with"},
    }
    sides = [good for good, _ in findings(good)]
    assert sides == sorted(sides) and False in sides and True in sides
    assert any(side and line.startswith("Its paths are of low action") for side, line in findings(good))
    assert "not of low action" in findings(results)[0][1]
    assert "No sign of a torus" in page(results) and "Consistent with a torus" in page(good)


def test_another_design_held_geometry_and_a_short_text_are_refused(model, ids):
    with refused(ConfigError, "design", "gpt2-tiny"):
        mixer_of(perspectron.build(presets.get("gpt2-tiny", d_model=16, layers=1, heads=2, hidden=16)))
    with refused(ConfigError, "geometry_interval", 3):
        mixer_of(perspectron.build(presets.get("drm", **TINY, geometry_interval=3)))
    with refused(DataError, 100, 2256):
        measure(model, ids[:100])


@pytest.mark.parametrize(
    ("options", "least"),
    [({"tokens": 2255}, 2256), ({"points": 5000}, 5256), ({"pairs": 2000, "span": 300}, 2556)],
    ids=str,
)
def test_samples_that_do_not_fit_into_the_tokens_are_refused_with_the_number_that_would(options, least):
    tokens = options.get("tokens", least - 1)
    with refused(ConfigError, "tokens", tokens, least):
        Options(**FEW | options | {"tokens": tokens})
    assert Options(**FEW | options | {"tokens": least}).least == least


@pytest.mark.parametrize("part", ["shift", "input_conv"])
def test_a_model_whose_inputs_are_more_than_the_token_is_refused(part):
    """A path is followed from token to token."""
    config = replace(presets.get("drm", **TINY), **{part: True})
    with refused(ConfigError, part, True):
        geometry.mixer_of(perspectron.build(config))
