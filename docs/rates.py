"""How the best rates go from size to size, from the searches that are committed: python docs/rates.py"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, cast

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from perspectron.compare.scaling import lowest  # noqa: E402
from perspectron.util import stats  # noqa: E402

SEARCHES = ROOT / "results" / "recipes" / "rates.json"
DRAWS = 2000


class Best(NamedTuple):
    """The best rate of a recipe at a size, with so many tokens."""

    parameters: int
    tokens: int
    rate: float


def read() -> dict[str, list[Best]]:
    """Those of each recipe that was searched at two points or more; a best rate that is the first or the last tried is
    left out, as a better one may lie beyond."""
    found = defaultdict[str, list[Best]](list)
    for search in json.loads(SEARCHES.read_text(encoding="utf-8"))["searches"]:
        for name, losses in search["tried"].items():
            tried = [{"lr": float(lr), "bits_per_byte": bits} for lr, bits in losses.items()]
            rate = lowest(tried)
            if min(line["lr"] for line in tried) < rate < max(line["lr"] for line in tried):
                found[name].append(Best(search["parameters"], search["tokens"], rate))
    return {name: points for name, points in found.items() if len(points) > 1}


def exponents(recipes: list[list[Best]], by_tokens: bool = False) -> list[float]:
    """Of the parameters, and of the tokens where asked, by least squares, with a factor for each recipe."""
    rows = [
        [float(i == j) for j in range(len(recipes))] + list(np.log([at.parameters, at.tokens])[: 1 + by_tokens])
        for i, points in enumerate(recipes) for at in points
    ]  # fmt: skip
    logs = [np.log(at.rate) for points in recipes for at in points]
    return np.linalg.lstsq(np.array(rows), np.array(logs))[0][len(recipes) :].tolist()


def interval(recipes: list[list[Best]], by_tokens: bool = False) -> list[list[float]]:
    """95% of `exponents` over recipes, drawn with replacement."""
    draw = np.random.default_rng(0)
    drawn = [
        exponents([recipes[i] for i in draw.integers(len(recipes), size=len(recipes))], by_tokens)
        for _ in range(DRAWS)
    ]
    return np.percentile(drawn, [2.5, 97.5], axis=0).T.tolist()


def own(recipes: list[list[Best]]) -> tuple[float, float, float]:
    """The mean of the exponents of single recipes, and its 95% by Student's t."""
    found = [exponents([points])[0] for points in recipes]
    low, high = cast("stats.Span", stats.interval(found))
    return fmean(found), low, high


if __name__ == "__main__":
    known = read()
    for name, points in known.items():
        print(f"{name}: N^{exponents([points])[0]:.2f}")
        print(*(f"  {at.parameters:,} × {at.tokens:,}: {at.rate:.4f}" for at in points), sep="\n")
    print("each recipe by itself: N^{:.2f} ({:.2f} to {:.2f})".format(*own(list(known.values()))))
    for by_tokens in (False, True):
        recipes = list(known.values())
        for name, mean, span in zip(
            "ND", exponents(recipes, by_tokens), interval(recipes, by_tokens), strict=False
        ):
            print(f"{name}^{mean:.2f} ({span[0]:.2f} to {span[1]:.2f})")
