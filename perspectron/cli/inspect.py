"""`perspectron inspect`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from perspectron import presets
from perspectron.census import Census, census
from perspectron.cli.options import assignment
from perspectron.config import ModelConfig, require
from perspectron.opening import describe


@dataclass(frozen=True)
class Inspect:
    """Parameters, FLOPs per token and state bytes of a preset or a run, counted from the built model.

    Example: perspectron inspect perspective-1t

    With other sizes: perspectron inspect perspective-166m --set rank=128 --json
    """

    model: tyro.conf.Positional[str]
    """A preset, or the folder of a run or an artifact."""
    set: tuple[str, ...] = ()
    """Sizes of the preset to replace, as KEY=VALUE."""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        config = self._config()
        counted = census(config)
        if self.json:
            first = min(counted.flops_per_token)
            fields = asdict(counted) | {
                "model": config.name,
                "flops_per_token": counted.flops_per_token[first],
                "flops_per_token_at": counted.flops_per_token,
                "groups": {kind: group.parameters for kind, group in counted.groups.items()},
                "modules": {kind: group.modules for kind, group in counted.groups.items()},
            }
            print(json.dumps(fields))
        else:
            console = Console(highlight=False)
            console.print(_parameters(config, counted), _costs(counted), sep="\n")
        return 0

    def _config(self) -> ModelConfig:
        if Path(self.model).is_dir():
            require(not self.set, "set", " ".join(self.set), "left out for a run")
            return describe(Path(self.model)).model
        return presets.get(self.model, **dict(map(assignment, self.set)))


def _parameters(config: ModelConfig, counted: Census) -> Table:
    table = Table(title=f"{config.name}: parameters", title_justify="left")
    table.add_column("group")
    for column in ("modules", "each", "all"):
        table.add_column(column, justify="right", no_wrap=True)
    for kind, group in counted.groups.items():
        each = f"{group.parameters // group.modules:,}"
        table.add_row(kind, f"{group.modules:,}", each, f"{group.parameters:,}")
    table.add_row("parameters", "", "", f"{counted.parameters:,}", style="bold")
    table.add_row("active for a token", "", "", f"{counted.active_parameters:,}", style="bold")
    if counted.shard_bytes:
        scales = f"scales {counted.scale_bytes:,}"
        table.add_row("bytes of an expert in ternary", "", f"{counted.shard_bytes:,}", scales)
    return table


def _costs(counted: Census) -> Table:
    table = Table(title="costs by context (state in float32)", title_justify="left")
    for column in ("context", "FLOPs per token", "state bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for context, flops in counted.flops_per_token.items():
        table.add_row(f"{context:,}", f"{flops:,}", f"{counted.state_bytes[context]:,}")
    return table
