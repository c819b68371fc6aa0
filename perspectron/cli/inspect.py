"""`perspectron inspect`."""

from dataclasses import asdict, dataclass

import tyro
from rich.table import Table

from perspectron.cli.options import Json, Sets, answer, describe, table
from perspectron.model.census import Census, census


@dataclass(frozen=True)
class Inspect:
    """Count parameters, FLOPs per token and bytes of state of a preset or run from the built model.

    Example: perspectron inspect perspective-1t

    With other sizes: perspectron inspect perspective-166m --set rank=128 --json
    """

    model: tyro.conf.Positional[str]
    """A preset, or the folder of a run or an artifact."""
    set: Sets = ()
    """Sizes of the preset to replace, as KEY=VALUE."""
    json: Json = False

    def __call__(self) -> int:
        config = describe(self.model, self.set).model
        counted = census(config)
        fields = asdict(counted) | {
            "model": config.name,
            "flops_per_token": counted.flops_per_token[min(counted.flops_per_token)],
            "flops_per_token_at": counted.flops_per_token,
            "groups": {kind: group.parameters for kind, group in counted.groups.items()},
            "modules": {kind: group.modules for kind, group in counted.groups.items()},
        }
        return answer(self.json, fields, _parameters(config.name, counted), _costs(counted))


def _parameters(name: str, counted: Census) -> Table:
    rows = [
        (kind, f"{group.modules:,}", f"{group.parameters // group.modules:,}", f"{group.parameters:,}")
        for kind, group in counted.groups.items()
    ]
    rows.append(("parameters", "", "", f"{counted.parameters:,}"))
    rows.append(("active per token", "", "", f"{counted.active_parameters:,}"))
    if counted.shard_bytes:
        scales = f"scales {counted.scale_bytes:,}"
        rows.append(("bytes of a ternary expert", "", f"{counted.shard_bytes:,}", scales))
    return table(f"{name}: parameters", ("group", "modules", "each", "all"), rows)


def _costs(counted: Census) -> Table:
    rows = [
        (f"{context:,}", f"{flops:,}", f"{counted.state_bytes[context]:,}")
        for context, flops in counted.flops_per_token.items()
    ]
    head = ("context", "FLOPs per token", "state bytes")
    return table("costs by context (state in float32)", head, rows)
