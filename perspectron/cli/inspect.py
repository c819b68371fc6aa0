"""`perspectron inspect`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from perspectron import presets
from perspectron.census import Census, census
from perspectron.config import ModelConfig
from perspectron.train import checkpoint

CLAIMS = {
    "perspective-1t": {
        "parameters": "1,046.2 B (topology §3.3)",
        "active parameters": "14.95 B (topology §3.3)",
        "pdr": "52.5 M per layer (pdr §4.2)",
        "window_gqa": "41.9 M per layer (topology §3.1)",
        "swiglu": "135.3 M per layer (topology §3.1)",
        "experts": "135.3 M per expert and layer, 1,039 B (topology §3.2)",
        "embedding": "131 M (topology §3.1)",
        "norms and biases": "1.6 M (topology §3.1)",
        "state": "120 MB of PDR in fp16 (pdr §5.3), 42 MB of KV (topology §4)",
        "flops per token": "110 M per PDR layer (pdr §4.1)",
    },
    "perspective-1t-dense": {"parameters": "6.83 B shared (topology §3.1)"},
}
"""What the source documents say, by preset; shown beside what is counted."""


@dataclass(frozen=True)
class Inspect:
    """Parameters, FLOPs per token and state bytes of a preset or a run, counted from the built model.

    Example: perspectron inspect perspective-1t

    With other sizes: perspectron inspect perspective-20m --set rank=128 --json
    """

    model: tyro.conf.Positional[str]
    """A preset, or the folder of a run."""
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
            console.print(_parameters(config, counted))
            console.print(_costs(config, counted))
        return 0

    def _config(self) -> ModelConfig:
        if Path(self.model).is_dir():
            return checkpoint.load_config(checkpoint.run_of(Path(self.model))).model
        from perspectron.cli.train import assignment

        return presets.get(self.model, **dict(map(assignment, self.set)))


def _parameters(config: ModelConfig, counted: Census) -> Table:
    claims = CLAIMS.get(config.name, {})
    table = Table(title=f"{config.name}: parameters", title_justify="left")
    table.add_column("group")
    for column in ("modules", "each", "all"):
        table.add_column(column, justify="right")
    if claims:
        table.add_column("the documents say")
    rows = [
        (kind, f"{g.modules:,}", f"{g.parameters // g.modules:,}", f"{g.parameters:,}")
        for kind, g in counted.groups.items()
    ]
    rows.append(("parameters", "", "", f"{counted.parameters:,}"))
    rows.append(("active parameters", "", "", f"{counted.active_parameters:,}"))
    for row in rows:
        table.add_row(*row, *([claims.get(row[0], "")] if claims else []))
    return table


def _costs(config: ModelConfig, counted: Census) -> Table:
    claims = CLAIMS.get(config.name, {})
    table = Table(title="costs by context (state in float32)", title_justify="left")
    for column in ("context", "FLOPs per token", "state bytes"):
        table.add_column(column, justify="right")
    for context, flops in counted.flops_per_token.items():
        table.add_row(f"{context:,}", f"{flops:,}", f"{counted.state_bytes[context]:,}")
    if claims.get("flops per token"):
        table.caption = f"the documents say: {claims['flops per token']}; {claims['state']}"
    return table
