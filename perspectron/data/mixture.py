"""Mixtures: several corpora with weights, as a source names them, and as one corpus."""

import re
from fractions import Fraction
from typing import NamedTuple

from perspectron.data.corpus import Corpus, Joined, fingerprint
from perspectron.util.errors import DataError

MOST_SOURCES = 64
FINEST = 10**6
"""Weights are multiples of 1 / FINEST."""
_SOURCE = re.compile(r"(?:^|\s+)([A-Za-z0-9_][\w-]{0,63})=([^:\s]*):(?=\S)")


class Part(NamedTuple):
    """One of several sources, with its share of the tokens to train on."""

    name: str
    weight: Fraction
    source: str

    def __str__(self) -> str:
        """The part as a source names it, NAME=WEIGHT:SOURCE, with all decimals of its weight."""
        return f"{self.name}={float(self.weight):.6f}".rstrip("0").rstrip(".") + f":{self.source}"


def parts_of(source: str) -> list[Part]:
    """The sources of "code=0.7:PATH prose=0.3:PATH"; none for a text that names a single one. DataError: a weight that
    is no number above 0, a name twice, or weights that do not sum to 1."""
    found = list(_SOURCE.finditer(source))
    if not found or found[0].start():
        return []
    ends = [*(match.start() for match in found[1:]), len(source)]
    parts = [
        Part(match[1], weight_of(match[2], f"data: weight of {match[1]}"), source[match.end() : end].strip())
        for match, end in zip(found, ends, strict=True)
    ]
    names = [part.name for part in parts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"data: source {twice[0]!r} is named twice; give each a name of its own")
    if len(parts) > MOST_SOURCES:
        raise DataError(f"data: {len(parts)} sources, must be at most {MOST_SOURCES}")
    if (total := sum(part.weight for part in parts)) != 1:
        said = ", ".join(f"{part.name} {float(part.weight):g}" for part in parts)
        raise DataError(f"data: the weights sum to {float(total):g} ({said}), must sum to 1")
    return parts


def joined(sources: list[str]) -> str:
    """Join sources that were given one by one into one text. DataError: one of several has no name and weight."""
    if len(sources) > 1:
        for source in sources:
            if not _SOURCE.match(source):
                raise DataError(
                    f"data: {source!r} is one of {len(sources)} sources; give each a name and a weight, as in "
                    "--data code=0.7:PATH --data prose=0.3:PATH"
                )
    return " ".join(sources)


class Mixture(Joined):
    """Corpora, each with a weight; as a corpus they stand one after another. The weights tell a loader how often to
    read from each, and change nothing of the text: the fingerprint is the same for all."""

    def __init__(self, source: str, named: list[tuple[Part, Corpus]]) -> None:
        lines = [f"{part.name}={corpus.fingerprint}" for part, corpus in named]
        super().__init__(source, fingerprint("mixture", lines), [corpus for _, corpus in named])
        self.named = named


def weight_of(text: str, where: str) -> Fraction:
    """A weight as a number. DataError, naming `where`: it is not above 0 and at most 1, to 6 decimals."""
    try:
        # 1e9999999 would take seconds, and one more digit hours.
        weight = Fraction(text) if len(text) < 32 and "e" not in text.lower() else Fraction(0)
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    if not 0 < weight <= 1 or FINEST % weight.denominator:
        raise DataError(f"{where} is {text[:80]!r}, must be above 0 and at most 1, to 6 decimals")
    return weight
