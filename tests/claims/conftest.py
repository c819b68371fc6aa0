"""Made-up results of the reference comparison, its ablations and recall, as the library writes them."""

import json
import random

import pytest

from claims.results import ABLATED, COMPARISONS
from perspectron.compare.results import VERSION
from perspectron.eval.recall import SOLVED
from perspectron.presets import DESIGNS
from perspectron.util import registry

ABLATIONS = dict(registry.parts("ablations"))
SEEDS = (0, 1, 2)
PLAN = {"params": 2_000_000, "tokens": 3_000_320, "data": "stdlib", "seeds": list(SEEDS)}
PLAN |= {"vocab_size": 2048, "seq_len": 256}
GATES = {
    "perspective": {
        "pdr_gate_mean": [0.9, 0.8, 0.7],
        "pdr_gate_spread": [0.2] * 3,
        "pdr_halflife": [9.0, 5.0, 3.0],
    },
    "adr": {"adr_roughness": [0.5, 0.6, 0.4, 0.3]},
    "lens": {
        "lens_weights": [[[0.7, 0.22, 0.08], [0.9, 0.07, 0.03]]] * 4,
        "route_gate": [0.8, 0.85, 0.7, 0.75],
    },
    "drm": {"drm_active": [6.0], "drm_outside": [0.02]},
}
ARMS = ("transformer", "perspective", "ssd", "lens", "gpt2", "gla", "drm", "adr", "needle: window 32")


def cell(seed, bits, status="finished", **more):
    found = {
        "seed": seed,
        "status": status,
        "why": "",
        "heldout_bits_per_byte": bits,
        "gates": {},
        "suites": {},
    }
    return found | more


def bins(bits, length=256, tokens=600):
    ends = [2**i for i in range(length.bit_length())]
    return {"position": {"bins": [{"to": end, "tokens": tokens, "bits_per_byte": bits} for end in ends]}}


def comparison(designs, **plan):
    """results.json of a comparison whose designs have these cells."""
    whole = {"version": VERSION, "conditions": {}, "plan": PLAN | plan}
    return whole | {"designs": {name: {"cells": found} for name, found in designs.items()}}


def whole():
    """{name: results}, of every design, ablation and task that the ledger reads; the same at every call."""
    draw = random.Random(6)

    def three(name, more):
        mean = 2.4 + 0.1 * draw.random()
        return [
            cell(s, mean + draw.gauss(0, 0.004), suites=bins(mean), gates=GATES.get(name, {}) if more else {})
            for s in SEEDS
        ]

    found = {"compare": comparison({name: three(name, True) for name in DESIGNS})}
    found["reference/results"] = comparison({name: three(name, False) for name in DESIGNS})
    for design in ABLATED:
        found[f"ablate-{design}"] = comparison({a: three(a, False) for a in (design, *ABLATIONS[design])})
    assert tuple(found) == COMPARISONS
    arms = {name: recalled([draw.random() for _ in SEEDS]) for name in ARMS}
    return found | {"recall": recalls(arms)}


def recalled(accuracy, task="mqar"):
    return {"accuracy": accuracy, "task": task, "pairs": 8, "length": 32}


def recalls(arms):
    shapes = "MQAR of 8 pairs; Options(profile='quick', d_model=64, layers=2); at most 600 steps"
    return {"conditions": {"shapes": shapes}, "results": {"solved": SOLVED, "arms": arms}}


def keep(folder, found):
    for name, result in found.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result))


@pytest.fixture
def kept(tmp_path):
    """A folder with what is given, else with everything."""

    def write(**found):
        keep(tmp_path, found or whole())
        return tmp_path

    return write
