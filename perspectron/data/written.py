"""Folders that this program wrote, which are no text to read."""

import os
from pathlib import Path
from typing import Any

from perspectron.util.errors import DataError
from perspectron.util.files import read_json

SHOWN = 3
"""Most folders that a line names."""
FILES = ("manifest.json", "progress.json", "config.json", "compare.json", "scale.json", "convert.json")
"""Files by which such a folder is known."""
QUICKSTART = (
    ("corpus/manifest.json", "perspective/config.json", "transformer/config.json"),
    ("model.json", "model/config.json"),
)
"""Files by all of which a folder of quickstart is known, of texts or of a model."""


class Written:
    """The output folder `out`, if any, and folders of runs, comparisons, packed models and encoded text. found: those
    that were asked about."""

    def __init__(self, out: Path | None = None) -> None:
        self.out = None if out is None else out.resolve()
        self.found = list[Path]()

    def __call__(self, folder: Path) -> bool:
        """True if the folder is one of them."""
        ours = folder.resolve() == self.out or any(_is_ours(folder / name) for name in FILES)
        ours = ours or any(all(_is_ours(folder / name) for name in names) for names in QUICKSTART)
        if ours and folder not in self.found:
            self.found.append(folder)
        return ours

    def notes(self) -> list[str]:
        """A line that says what was left out; none where that is nothing."""
        more = len(self.found) - SHOWN
        named = ", ".join(map(str, self.found[:SHOWN])) + (f" and {more:,} more" if more > 0 else "")
        return [f"left out what perspectron wrote: {named}"] if self.found else []


def _is_ours(path: Path) -> bool:
    """True if it is a file by which a folder is known: by its format, or as the config of a run, a comparison,
    comparisons of several sizes, a conversion or the model of a quickstart, which have none."""
    try:
        values: Any = read_json(path, DataError) if os.path.isfile(path) else None
    except DataError:
        return False
    if not isinstance(values, dict):
        return False
    if "format" in values:
        return str(values["format"]).startswith("perspectron-")
    if path.name == "config.json":
        return "train" in values and isinstance(values.get("model"), dict) and "blocks" in values["model"]
    fields = {
        "compare.json": ("settings", "arms"),
        "scale.json": ("designs", "sizes", "per_parameter"),
        "convert.json": ("config", "layers", "rows"),
        "model.json": ("path", "files"),
    }
    return path.name in fields and all(name in values for name in fields[path.name])
