"""The contents of `perspectron list`, kept in catalogue.json, since counting a model takes torch, which takes seconds
to import.

`python -m perspectron.cli.catalogue` writes the file, after a mixer, a design or a preset has changed.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

NAME = "catalogue.json"
Catalogue = dict[str, list[dict[str, Any]]]


def read() -> Catalogue:
    """Mixers, designs and presets, in the order of their tables."""
    kept: Catalogue = json.loads(files("perspectron.cli").joinpath(NAME).read_text(encoding="utf-8"))
    return kept


def counted() -> Catalogue:
    """The same from the tables themselves, with the parameters of every preset counted."""

    from perspectron import presets
    from perspectron.model.census import active_parameters
    from perspectron.model.mixer import mixers
    from perspectron.model.model import shape_of

    sized = []
    for name, preset in presets.PRESETS.items():
        config = presets.get(name)
        total = sum(parameter.numel() for parameter in shape_of(config).parameters())
        sized.append(_row(name, preset, parameters=total, active=active_parameters(config)))
    return {
        "mixers": [_row(name, mixer) for name, mixer in mixers().items()],
        "designs": [_row(name, design) for name, design in presets.DESIGNS.items()],
        "presets": sized,
    }


def _row(name: str, entry: Any, **sizes: int) -> dict[str, Any]:
    return {"name": name, **sizes, "what": entry.about, "source": entry.source}


if __name__ == "__main__":
    target = Path(str(files("perspectron.cli").joinpath(NAME)))
    tables = []
    for kind, rows in counted().items():
        lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
        tables.append(f' "{kind}": [\n{lines}\n ]')
    target.write_text("{\n" + ",\n".join(tables) + "\n}\n", encoding="utf-8")
