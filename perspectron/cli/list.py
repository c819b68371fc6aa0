"""`perspectron list`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perspectron import presets
from perspectron.mixers import MIXERS


@dataclass(frozen=True)
class List:
    """The mixers and presets there are, a line each, and where in the documents they come from.

    Example: perspectron list
    """

    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        mixers = [
            {"name": name, "what": entry.about, "source": entry.source} for name, entry in MIXERS.items()
        ]
        models: list[dict[str, str | int]] = [
            {
                "name": name,
                "parameters": presets.parameters(name),
                "what": preset.summary,
                "source": preset.source,
            }
            for name, preset in presets.PRESETS.items()
        ]
        if self.json:
            print(json.dumps({"mixers": mixers, "presets": models}))
        else:
            _print("mixers", mixers)
            print()
            _print("presets", models)
        return 0


def _print(title: str, rows: Sequence[Mapping[str, str | int]]) -> None:
    """One line a row: numbers to the right, words to the left."""
    cells = [[f"{value:,}" if isinstance(value, int) else value for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(title)
    for row, texts in zip(rows, cells, strict=True):
        shown = [
            text.rjust(width) if isinstance(value, int) else text.ljust(width)
            for value, text, width in zip(row.values(), texts, widths, strict=True)
        ]
        print("  " + "  ".join(shown).rstrip())
