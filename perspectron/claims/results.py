"""Results that took long, from the files that benchmarks and comparisons wrote: one JSON object each."""

from functools import cached_property
from pathlib import Path
from typing import Any

from perspectron.errors import DataError
from perspectron.files import read_json

COMMANDS = {
    "decode": "python benchmarks/decode.py --contexts 1024 8192 65536 --repeats 6 --pairs 200",
    "kernels": "python benchmarks/systems.py --kernels",
    "layer_times": "python benchmarks/layer_times.py",
    "full_size": "python benchmarks/full_size.py --experts 1 --threads 2",
    "recall": "python benchmarks/recall.py",
}
COMPARE = (
    "perspectron compare --params 2M --tokens 3M --seeds 3 --jobs 2 --dtype bfloat16 --rates 2e-3 4e-3 8e-3 "
    "--out runs/compare"
)


class Missing(Exception):
    """The command that would measure it."""


def command(name: str) -> str:
    """What writes the results of this name; `--json` keeps them."""
    if name in COMMANDS:
        return f"{COMMANDS[name]} --json docs/results/{name}.json"
    if name == "compare":
        return COMPARE
    design = name.removeprefix("ablate-")
    return f"perspectron ablate runs/compare/cells/{design}/0 --seeds 3 --out runs/{name}"


class Results:
    """The files of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def _read(self) -> dict[str, dict[str, Any]]:
        return {path.stem: read_json(path, DataError) for path in sorted(self.folder.glob("*.json"))}

    def get(self, name: str) -> dict[str, Any]:
        """Missing where there is no such file."""
        if name not in self._read:
            raise Missing(f"`{command(name)}`")
        return self._read[name]

    def __iter__(self) -> Any:
        return iter(self._read.items())

    def median(self, name: str, *path: str) -> float:
        """Of a spread that stands at `path` in a benchmark's results; DataError where it does not."""
        found: Any = self.get(name)["results"]
        for key in path:
            if key not in found:
                raise DataError(
                    f"{self.folder / name}.json: has no {'/'.join(path)}; measured by another version?"
                )
            found = found[key]
        return float(found["median"] if isinstance(found, dict) else found)
