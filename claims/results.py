"""Results that took long, from the files that benchmarks and comparisons wrote: one JSON object each."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from perspectron.util.config import require
from perspectron.util.errors import DataError
from perspectron.util.files import read_json

COMMANDS = {
    "adapt": "python benchmarks/adapt.py runs/python --texts prose=runs/prose.txt c=runs/c.txt json=runs/json.txt "
    "--tokens 100000 --slow-tokens 5000 --stream 1000000 --repeats 15",
    "decode": "python benchmarks/decode.py --contexts 1024 8192 65536 --repeats 6 --pairs 200",
    "kernels": "python benchmarks/systems.py --kernels",
    "layer_times": "python benchmarks/layer_times.py",
    "full_size": "python benchmarks/full_size.py --experts 4 --disk-tokens 24 --threads 2",
    "recall": "python benchmarks/recall.py",
    "perspectives": "python benchmarks/perspectives.py",
    "safety": "python benchmarks/safety.py",
    "documents": "python benchmarks/documents.py",
    "convert": "python benchmarks/convert.py --folder runs/convert",
}
COMPARE = (
    "perspectron compare --params 2M --tokens 3M --seeds 3 --jobs 2 --dtype bfloat16 --rates 2e-3 4e-3 8e-3 "
    "--out runs/reference"
)
REFERENCE = (
    "perspectron compare --designs 'perspective2,gdn,gla,transformer,transformer[shift=true,first_values=true],"
    "lens2[shift=true,first_values=true],kda,"
    "perspective,gpt2,lens,rwkv7,hgrn2,drm,ssd,adr,adr2,gdn2,mamba3,mingru,drm2,lens2' --params 2M --tokens 3M "
    "--seeds 3 --rates 2e-3 4e-3 8e-3 1.6e-2 3.2e-2 --warmups 0.05 0.2 --rate-share 0.1 "
    "--dtype bfloat16 --suites '' --out runs/normed"
)
"""What results/reference joins, in one command."""
ABLATED = ("perspective", "adr", "lens", "drm")
COMPARISONS = ("compare", "reference/results", *(f"ablate-{design}" for design in ABLATED))
DIRTY = "with changes"
"""Suffix of the commit of a measurement made with uncommitted changes."""
VERSION = 1
"""Of a comparison's results.json."""


class Missing(Exception):
    """The command that would measure it."""


def command(name: str) -> str:
    """The command that writes the results of this name."""
    if name in COMMANDS:
        return f"{COMMANDS[name]} --json results/{name}.json"
    if name == "compare":
        return f"{COMPARE} && python -m claims.keep runs/reference results/compare.json"
    if name == "reference/results":
        return f"{REFERENCE} && cp runs/normed/results.json results/{name}.json"
    design = name.removeprefix("ablate-")
    made = f"perspectron ablate runs/reference/cells/{design}/0 --tokens 500k --seeds 3 --jobs 2 --out runs/{name}"
    return f"{made} && cp runs/{name}/results.json results/{name}.json"


class Results:
    """The files of a folder, by name; others than these that lie there are none of ours. ConfigError: no folder."""

    def __init__(self, folder: Path) -> None:
        require(folder.is_dir(), "results", str(folder), "a folder that is there")
        self.folder = folder
        self.asked: set[str] = set()
        """Names that `get` was asked for."""

    @cached_property
    def _read(self) -> dict[str, dict[str, Any]]:
        paths = {name: self.path(name) for name in sorted((*COMMANDS, *COMPARISONS))}
        return {name: self._checked(name, path) for name, path in paths.items() if path.is_file()}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _checked(self, name: str, path: Path) -> dict[str, Any]:
        kept: Any = read_json(path, DataError)
        keys = ("plan", "designs") if name in COMPARISONS else ("results",)
        if not isinstance(kept, dict) or not all(isinstance(kept.get(key), dict) for key in keys):
            what = "a comparison, its results.json" if name in COMPARISONS else "a benchmark"
            raise DataError(f"{path}: not the results of {what}; written by `{command(name)}`")
        if name in COMPARISONS and kept.get("version") != VERSION:
            raise DataError(f"{path}: version {kept.get('version')!r}, must be {VERSION}; measure it again")
        return kept

    def get(self, name: str) -> dict[str, Any]:
        """Missing where there is no such file."""
        self.asked.add(name)
        if name not in self._read:
            raise Missing(f"`{command(name)}`")
        return self._read[name]

    def commits(self, name: str) -> list[str]:
        """Commits at which a file was measured; arms that were added later have their own. Empty: no such file."""
        kept = self._read.get(name, {})
        measured = [kept.get("conditions", {}), *kept.get("results", {}).get("arms", {}).values()]
        return list(dict.fromkeys(str(each["commit"]) for each in measured if each.get("commit")))

    def uncommitted(self, name: str) -> bool:
        """Whether any of it was measured with changes to its commit."""
        return any(DIRTY in commit for commit in self.commits(name))

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return iter(self._read.items())

    def median(self, name: str, *path: str) -> float:
        """The median of a spread at `path` in a benchmark's results; DataError where it does not."""
        kept: Any = self.get(name)["results"]
        for key in path:
            if not isinstance(kept, dict) or key not in kept:
                raise DataError(f"{self.path(name)}: has no {'/'.join(path)}; measured by another version?")
            kept = kept[key]
        return float(kept["median"] if isinstance(kept, dict) else kept)
