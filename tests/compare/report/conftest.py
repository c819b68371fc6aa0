"""A made-up comparison: eight designs, three seeds; drm diverges once, gla lacks a seed and ssd its suites."""

import json
import math
import random

import pytest

DESIGNS = {  # final bits per byte, slope, tokens per second, milliseconds at 1k, its growth by the context
    "perspective": (2.447, 0.33, 5200, 1.9, 0.0),
    "adr": (2.561, 0.30, 1500, 1.6, 0.45),
    "lens": (2.482, 0.34, 6100, 1.5, 0.62),
    "drm": (3.118, 0.22, 2100, 0.31, 0.0),
    "gpt2": (2.519, 0.32, 9400, 1.1, 0.52),
    "transformer": (2.403, 0.35, 8800, 1.2, 0.5),
    "gla": (2.431, 0.33, 4700, 1.7, 0.0),
    "ssd": (2.462, 0.32, 4100, 1.4, 0.0),
}
SEEDS, STEPS, BATCH_TOKENS = (0, 1, 2), 1465, 2048
CONTEXTS = [1024, 4096, 16384, 65536, 262144]
GROWS = ("adr", "lens", "gpt2", "transformer")
TABLES = ("adr", "lens", "gpt2")
TASKS = {
    "mqar": (1 / 64, [{"pairs": p, "length": 8 * p} for p in (4, 8, 16, 32)]),
    "needle": (1 / 16, [{"length": n} for n in (256, 1024, 4096)]),
    "parity": (0.5, [{"length": n} for n in (16, 64)]),
}


def made_up(seeds=SEEDS):
    """A results.json as `perspectron compare` writes it; the same at every call."""
    random.seed(6)
    plan = {
        "params": 2_000_000,
        "tokens": 3_000_320,
        "seeds": list(seeds),
        "match": "tokens",
        "reference": "transformer",
        "data": "stdlib",
    }
    plan |= {"seq_len": 256, "batch_size": 8, "vocab_size": 2048, "train_tokens": 4_917_302}
    plan |= {"context": {"windows": 126.4, "streaming": 4711.0}}
    plan |= {"heldout_tokens": 261_003, "curve_tokens": 32_768, "heldout_bytes": 873_112}
    command = "perspectron compare --designs perspective,adr,lens,drm,gpt2,transformer,gla,ssd --params 2M"
    conditions = {"command": f"{command} --tokens 3M --seeds {len(seeds)} --data stdlib --out /tmp/reference"}
    conditions |= {"commit": "b26ea1b", "machine": "x86_64, 2 × AMD EPYC 9R45", "threads": 1, "jobs": 2}
    conditions |= {"torch": "2.11.0", "dtype": "bfloat16", "started": "2026-11-21 21:00 UTC"}
    results = {
        "version": 1,
        "conditions": conditions,
        "plan": plan,
        "compressors": {"gzip -9": 2.087, "xz -9": 1.752, "xz -9, primed": 1.512},
        "designs": {name: _design(name, seeds) for name in DESIGNS},
    }
    drm, gla = results["designs"]["drm"]["cells"], results["designs"]["gla"]["cells"]
    drm[-1] |= {
        "status": "diverged",
        "why": "the loss is not finite at step 611",
        "heldout_bits_per_byte": None,
    }
    drm[-1] |= {"suites": {}, "curve": drm[-1]["curve"][:9]}
    gla[-1] |= {"status": "missing", "why": "trained for 310 of 1465 steps", "heldout_bits_per_byte": None}
    gla[-1] |= {
        "steps": 0,
        "tokens": 0,
        "seconds": None,
        "tokens_per_second": None,
        "curve": [],
        "suites": {},
    }
    ssd = results["designs"]["ssd"]
    ssd["suites"] = {}
    for cell in ssd["cells"]:
        cell["suites"] = {}
    return json.loads(json.dumps(results))


def _design(name, seeds):
    bits, _, speed, _, _ = DESIGNS[name]
    state = {str(at): 33_000 + (256 * at if name in GROWS else 90_000) for at in CONTEXTS}
    rates = [
        {"lr": lr, "bits_per_byte": bits + 1 + abs(math.log(lr / 3e-3)) / 5, "why": ""}
        for lr in (1.5e-3, 3e-3, 6e-3)
    ]
    if name == "drm":
        rates[2] |= {"bits_per_byte": None, "why": "the loss is not finite at step 40"}
    return {
        "about": f"the design {name}, made up",
        "source": "docs/designs/perspective.md#the-recurrence",
        "parameters": 2_000_000 + 31 * len(name) ** 2,
        "active_parameters": 2_000_000 + 31 * len(name) ** 2,
        "train_flops_per_token": 1.2e7 + 9e5 * len(name),
        "state_bytes": state,
        "streaming": {"state_bytes": None, "why": f"{name}: positions = 256, must be 0"}
        if name in TABLES
        else {"state_bytes": 90_000 + 7 * len(name), "why": None},
        "rates": rates,
        "lr": 1.5e-3 if name == "gpt2" else 3e-3,
        "cells": [_cell(name, seed) for seed in seeds],
        "suites": {
            "recall": {
                "design": name,
                "options": {"profile": "full", "layers": 2, "d_model": 64},
                "tasks": {task: _task(name, task) for task in TASKS},
            },
            "cost": _cost(name, state, speed),
        },
    }


def _cell(name, seed):
    bits, slope, speed, _, _ = DESIGNS[name]
    final = bits + 0.004 * seed + random.gauss(0, 0.006)
    curve = []
    for i in range(1, 31):
        step = STEPS * i // 30
        tokens = step * BATCH_TOKENS
        loss = final + 2.6 * slope * ((30 / i) ** 0.55 - 1) + (random.gauss(0, 0.01) if i < 30 else 0)
        curve.append({"step": step, "tokens": tokens, "seconds": tokens / speed})
        curve[-1] |= {"flops": tokens * (1.2e7 + 9e5 * len(name)), "bits_per_byte": loss}
    cell = {"seed": seed, "status": "finished", "why": "", "steps": STEPS, "tokens": STEPS * BATCH_TOKENS}
    cell |= {
        "seconds": STEPS * BATCH_TOKENS / speed,
        "tokens_per_second": speed,
        "heldout_bits_per_byte": final,
        "streaming_bits_per_byte": None if name in TABLES else final - 0.02 - 0.002 * len(name),
    }
    cell |= {"curve": curve, "losses_sha256": f"{random.getrandbits(256):064x}", "terms": {}}
    if name == "lens":
        cell["terms"] = {"route_gate": 0.61 + 0.01 * seed, "reciprocal_weight": 0.12}
    return cell | {
        "suites": {
            "position": _position(name, final),
            "calibration": _calibration(),
            "robustness": _harm(final),
        }
    }


def _position(name, final):
    ends = [2**i for i in range(12 if name not in ("adr", "lens", "gpt2") else 9)]
    bins = [
        {
            "from": end // 2,
            "to": end,
            "tokens": 40 * end,
            "bits_per_byte": final + 0.9 / end**0.5 + random.gauss(0, 0.01),
        }
        for end in ends
    ]
    falls = {"512": None if ends[-1] <= 512 else name != "transformer"}
    return {"seq_len": 256, "contexts": [256, 2048], "bins": bins, "carried": True, "falls_past": falls}


def _calibration():
    bins = []
    for i in range(10):
        confidence = (i + 0.5) / 10
        accuracy = min(1, max(0, confidence + random.gauss(-0.03, 0.02)))
        bins.append({"confidence": confidence, "accuracy": accuracy, "count": round(4000 / (1 + i))})
    interval = {"ece_low": 0.024, "ece_high": 0.037}
    return interval | {"tokens": 11_000, "ece": 0.031, "ece_calibrated": 0.012, "brier": 0.612, "bins": bins}


def _harm(final):
    corrupted = [{"share": share, "bits_per_byte": final + 4 * share} for share in (0.01, 0.05, 0.2)]
    harm = {"whole": 1.2 * final, "resumed": 1.2 * final, "resumed_equal": True}
    harm |= {"bits_per_byte": final, "no_context": final + 2}
    return harm | {
        "shuffled": {"within_64": final + 0.2, "whole": final + 1.1},
        "corrupted": corrupted,
    }


def _task(name, task):
    chance, settings = TASKS[task]
    lines = []
    for i, setting in enumerate(settings):
        ability = {"transformer": 0.99, "lens": 0.98, "gpt2": 0.97}.get(name, 0.99 - 0.24 * i)
        if task == "parity":
            ability = 0.5 if name in GROWS else 0.99
        accuracy = [min(1, max(chance, ability + random.gauss(0, 0.008))) for _ in range(3)]
        lines.append(
            setting
            | {
                "sizes": setting,
                "accuracy": accuracy,
                "steps": [500, 450, 500],
                "chance": chance,
                "rates": {"0.001": 0.5},
                "lr": 0.001,
                "beyond": [0.5, 0.52, 0.54] if task == "parity" else accuracy,
            }
        )
    return {
        "chance": chance,
        "solved": 0.95,
        "settings": lines,
        "theory": "a fixed state holds so many pairs",
    }


def _cost(name, state, speed):
    _, _, _, ms, grows = DESIGNS[name]
    decode = {str(at): ms * (at / 1024) ** grows * random.uniform(0.97, 1.03) for at in CONTEXTS}
    cost = {"contexts": CONTEXTS, "decode_ms": decode, "state_bytes": state}
    cost |= {"train_tokens_per_second": speed, "train_peak_bytes": 812_000_000}
    repeated = name in ("adr", "lens", "gpt2")
    return cost | {"positions": "timed with the table of 256 repeated" if repeated else "", "skipped": {}}


@pytest.fixture(scope="session")
def make_results():
    return made_up
