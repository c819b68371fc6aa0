"""`perspectron list`."""

import json
from dataclasses import dataclass
from typing import Any

from perspectron.cli import catalogue
from perspectron.cli.options import Json


@dataclass(frozen=True)
class List:
    """List mixers, designs and presets, one line each, with their sources.

    `train --preset` takes presets and designs, `compare --designs` designs.

    Example: perspectron list
    """

    json: Json = False

    def __call__(self) -> int:
        kept = catalogue.read()
        if self.json:
            print(json.dumps(kept))
        else:
            print("\n\n".join(_table(title, rows) for title, rows in kept.items()))
            print(
                "\nPages under docs/ are in the source tree, and on the site that `mkdocs build` makes of it."
            )
        return 0


def _table(title: str, rows: list[dict[str, Any]]) -> str:
    """One line a row: numbers to the right, words to the left."""
    head = dict.fromkeys(rows[0], "") | {"name": title}
    head |= {key: key for key, value in rows[0].items() if isinstance(value, int)}
    cells = [[f"{v:,}" if isinstance(v, int) else v for v in row.values()] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    signs = (">" if isinstance(value, int) else "<" for value in rows[0].values())
    form = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    lines = [form.format(*texts) for texts in cells]
    lines[0] = f"{title:<{widths[0] + 2}}{lines[0][widths[0] :]}"
    return "\n".join([lines[0].rstrip(), *(f"  {line}".rstrip() for line in lines[1:])])
