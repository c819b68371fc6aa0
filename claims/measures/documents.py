"""Measures of small trained models, of `benchmarks/documents.py`."""

import statistics
from typing import Any

from claims.claim import Evidence
from claims.measures.trained import DISAGREE, difference, span
from claims.results import Results

SYNTAX = ("brackets", "block", "call")
NEAR = 1.1  # times the action of a relaxed path


def _read(results: Results) -> tuple[dict[str, Any], str]:
    found = results.get("documents")["results"]
    return found, f"small models, {found['seeds']} seeds"


def emergent_halflives(results: Results) -> Evidence:
    """The slope of the logarithm of learned half-lives over depth."""
    found, proviso = _read(results)
    slope = found["halflives"]["slope"]
    layers = zip(*found["halflives"]["layers"], strict=True)
    lives = ", ".join(span([statistics.geometric_mean(seed) for seed in layer], "{:.1f}") for layer in layers)
    shown = f"half-lives by layer {lives} tokens, from 16 everywhere; slope of their logarithm {slope['mean']:+.3f}"
    shown += f" ({slope['low']:+.3f} to {slope['high']:+.3f})"
    return Evidence((slope["low"], slope["high"]), shown, proviso, unsure=f"no significant slope, {proviso}")


def coherent(what: str, unit: str) -> Any:
    """A measure of generated text, ADR's less GPT-2's."""

    def measure(results: Results) -> Evidence:
        found, proviso = _read(results)
        values = {name: [one[what] for one in found["coherence"][name]] for name in ("adr", "gpt2")}
        return difference(values, unit, proviso)

    return measure


def low_action(results: Results) -> Evidence:
    """The action of a model's own path over that of a relaxed one with the same ends, median of paths."""
    found, proviso = _read(results)
    ratios = [one["paths"]["model_over_relaxed"]["median"] for one in found["geometry"]]
    straight = [one["paths"]["model_over_straight"]["median"] for one in found["geometry"]]
    shown = (
        f"{span(ratios, '{:.1f}')} times a relaxed path's, {span(straight, '{:.1f}')} times a straight line's"
    )
    return Evidence(tuple(ratios), shown, proviso, unsure=DISAGREE)


def tori(results: Results) -> Evidence:
    """Seeds in whose states there is a sign of a torus."""
    found, proviso = _read(results)
    count = sum(one["torus"]["verdict"] != "no sign" for one in found["geometry"])
    return Evidence((float(count),), f"a sign of one in {count} of {found['seeds']} seeds", proviso)


def stable(results: Results) -> Evidence:
    """The largest Lyapunov exponent under a text, with weights 1% off."""
    found, proviso = _read(results)
    values = [one["lyapunov"]["noisy"] for one in found["geometry"]]
    exact = [one["lyapunov"]["exponent"] for one in found["geometry"]]
    shown = f"{span(values, '{:+.3f}')} nats a token with weights 1% off, {span(exact, '{:+.3f}')} without"
    return Evidence(tuple(values), shown, proviso, unsure=DISAGREE)


def syntax_by_depth(results: Results) -> Evidence:
    """Rank correlation with depth of the bits that gates share with labels of syntax, its sign turned: above 0 where
    early layers know more of it."""
    found, proviso = _read(results)
    values = [-statistics.fmean(one["rank"][name] for name in SYNTAX) for one in found["depth"]]
    names = [one["rank"]["name"] for one in found["depth"]]
    layers = len(found["depth"][0]["layers"])
    shown = f"rank correlation with depth over {layers} layers: of brackets, blocks and calls "
    shown += f"{span([-value for value in values], '{:+.2f}')}, of names {span(names, '{:+.2f}')}"
    return Evidence(tuple(values), shown, proviso, unsure=DISAGREE)


def contrast(results: Results) -> Evidence:
    """How far gates differ where one earlier token is another."""
    found, proviso = _read(results)
    values = [
        value for one in found["depth"] for value in one["contrast"][1:]
    ]  # the first reads the token alone
    shown = f"|Δγ| is {span(values, '{:.3f}')} of |Δh| after another token"
    return Evidence(tuple(values), shown, f"{proviso}; nothing says which inputs should be kept differently")


def state_loss(results: Results) -> Evidence:
    """Nats a token that a state costs when it was saved in FP16, at the longest context."""
    states = _read(results)[0]["states"]
    shown = "; ".join(
        f"at {int(context):,} tokens {each['float16']['more']:+.1e} in FP16, {each['int8']['more']:+.1e} in int8"
        for context, each in states.items()
    )
    return Evidence(
        tuple(each["float16"]["more"] for each in states.values()), shown, "a small model, one seed"
    )


def gate(results: Results) -> Evidence:
    """The conditions of the training plan's first gate that hold."""
    found, proviso = _read(results)
    conditions = found["gate"]["conditions"]
    shown = "; ".join(f"{c['name']}: {c['measured']}" for c in conditions) + f": {found['gate']['verdict']}"
    return Evidence((float(sum(c["holds"] is True for c in conditions)),), shown, proviso)
