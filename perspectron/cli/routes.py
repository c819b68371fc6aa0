"""`perspectron routes`."""

import contextlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

import perspectron
from perspectron.config import require
from perspectron.data import Tokenizer
from perspectron.device import pick_device
from perspectron.errors import DataError
from perspectron.eval.routes import (
    KINDS,
    Measures,
    Rates,
    Routes,
    joined,
    kinds,
    longest_run,
    measure,
    summary,
    trace,
)
from perspectron.eval.torus import draw
from perspectron.files import write_json
from perspectron.model import LanguageModel
from perspectron.stream.artifact import is_artifact
from perspectron.train import checkpoint
from perspectron.train.precision import autocast

CHARACTERS = 100  # of a file are read for each token that is asked for; a token has at most 72


class _Text(NamedTuple):
    """A file's first tokens, and the kind of each."""

    file: str
    ids: list[int]
    kinds: list[str]


@dataclass(frozen=True)
class ShowRoutes:
    """Which experts a text takes, drawn on the torus: their load, and hops between tokens.

    Layer by layer, and by kind of text (code, prose, numbers). Drawn as SVG, written as JSON.

    Example: perspectron routes runs/routed --text letters.txt

    With kinds of your own: perspectron routes runs/routed --text verse=poems.txt law=acts.txt --out routes/
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run, of one of its checkpoints, or of an artifact."""
    text: tuple[str, ...]
    """Files of text; KIND=FILE says of what kind one is, else each paragraph is "numbers" (30% digits or more), "code"
    (5% or more of the signs of programs) or "prose"."""
    out: Path | None = None
    """Folder for routes.svg and routes.json (default: RUN/routes)."""
    tokens: int = 65536
    """Read the first so many tokens of each file; 0 is all."""
    path: int = 24
    """Tokens of each kind whose way is drawn."""
    device: str = "auto"
    """ "auto" is CUDA where there is one."""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        require(self.tokens >= 0, "tokens", self.tokens, "≥ 0")
        require(self.path >= 2, "path", self.path, "≥ 2")
        require(len(self.text) > 0, "text", "none", "one file or more")
        model, tokenizer = perspectron.load(self.run)
        model.to(pick_device(self.device))
        run = checkpoint.run_of(self.run)
        texts = [_read(given, tokenizer, self.tokens) for given in self.text]
        with precision(run, model.device):
            routes = joined([_trace(model, tokenizer, text) for text in texts], axis=1)
        report, measures, runs = _report(model, texts, routes, self.path)
        out = run / "routes" if self.out is None else self.out
        draw(routes, measures, runs, out / "routes.svg")
        write_json(out / "routes.json", report)
        if self.json:
            print(json.dumps(report))
        else:
            console = Console(highlight=False)
            console.print(*_tables(report), sep="\n")
            if report["router"] == "switch":
                console.print("a switch's experts stand on no torus: hops are those of their ids' lattice")
            console.print(f"in {out}: routes.svg, routes.json", soft_wrap=True)
        return 0


def _read(given: str, tokenizer: Tokenizer, limit: int) -> _Text:
    """DataError: not there, not text, or fewer than 2 tokens."""
    kind, path = None, Path(given)
    if "=" in given and not path.exists():
        kind, _, name = given.partition("=")
        path = Path(name)
        require(kind != "", "text", given, "FILE or KIND=FILE")
    text, ids = read_tokens(path, tokenizer, limit)
    return _Text(str(path), ids, kinds(text, ids, tokenizer) if kind is None else [kind] * len(ids))


def precision(run: Path, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """As the run was trained; an artifact computes as it does."""
    if is_artifact(run):
        return contextlib.nullcontext()
    return autocast(device, checkpoint.load_config(run).train.dtype)


def read_tokens(path: Path, tokenizer: Tokenizer, limit: int) -> tuple[str, list[int]]:
    """A file's text and its first `limit` tokens (0: all). DataError: not there, not text, or fewer than 2 tokens."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read(CHARACTERS * limit if limit else -1)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text") from None
    ids = tokenizer.encode(text)
    ids = ids[:limit] if limit else ids
    if len(ids) < 2:
        raise DataError(f"{path}: {len(ids)} tokens, need at least 2")
    return text, ids


def _trace(model: LanguageModel, tokenizer: Tokenizer, text: _Text) -> list[Routes]:
    """Of the text's own tokens, read as a document: after the separator."""
    device = model.device
    ids_BT = torch.tensor([[tokenizer.end_of_text, *text.ids]], device=device)
    return [
        layer._replace(expert_BT=layer.expert_BT[:, 1:], query_BTA=layer.query_BTA[:, 1:])
        for layer in trace(model, ids_BT)
    ]


def _report(
    model: LanguageModel, texts: list[_Text], routes: list[Routes], path: int
) -> tuple[dict[str, Any], list[Measures], dict[str, tuple[int, int]]]:
    """All the numbers; each layer's measures; the ways to draw."""
    kind_T = [kind for text in texts for kind in text.kinds]
    reset_T = [t == 0 for text in texts for t in range(len(text.ids))]
    reset_BT = torch.tensor([reset_T])
    counts = Counter(kind_T)
    names = sorted(counts, key=lambda kind: (KINDS.index(kind) if kind in KINDS else len(KINDS), kind))
    counted: dict[str, Tensor] = {name: torch.tensor([[kind == name for kind in kind_T]]) for name in names}
    measures = [measure(layer, reset_BT=reset_BT) for layer in routes]
    by_kind = {
        name: [measure(layer, reset_BT=reset_BT, counted_BT=counted[name]) for layer in routes]
        for name in names
    }
    runs = {name: longest_run(counted[name][0].tolist(), reset_T, path) for name in names}
    report = {
        "model": model.config.name,
        "router": routes[0].router,
        "texts": [{"file": text.file, "tokens": len(text.ids)} for text in texts],
        "tokens": len(kind_T),
        "kinds": {
            name: {"tokens": counts[name]} | asdict(summary(by_kind[name])) for name in names
        },
        "overall": asdict(summary(measures)),
        "layers": [
            {"layer": layer.layer, "torus": layer.torus}
            | asdict(measured)
            | {"kinds": {name: asdict(by_kind[name][i]) for name in names}}
            for i, (layer, measured) in enumerate(zip(routes, measures, strict=True))
        ],
        "ways": {
            name: [
                {
                    "layer": layer.layer,
                    "experts": layer.expert_BT[0, start:stop].tolist(),
                    "queries": layer.query_BTA[0, start:stop].tolist(),
                }
                for layer in routes
            ]
            for name, (start, stop) in runs.items()
        },
    }  # fmt: skip
    return report, measures, runs


COLUMNS = ("Gini", "reached", "same", "1-hop", "2-hop", "distant")


def _tables(report: dict[str, Any]) -> list[Table]:
    torus = " × ".join(map(str, report["layers"][0]["torus"]))
    title = f"{report['model']}, torus {torus}, {report['tokens']:,} tokens"
    layers, by_kind = (
        Table(title=title, title_justify="left"),
        Table(title="by kind of text", title_justify="left"),
    )
    for table, first in ((layers, ("layer",)), (by_kind, ("kind", "tokens"))):
        for column in (*first, *COLUMNS):
            table.add_column(column, justify="left" if column in ("layer", "kind") else "right", no_wrap=True)
    for layer in report["layers"]:
        layers.add_row(str(layer["layer"]), *_numbers(layer))
    layers.add_row("mean", *_numbers(report["overall"]), style="bold")
    chance = _shares(report["overall"]["chance"])
    layers.add_row("by chance", "", "", *chance)
    for kind, found in report["kinds"].items():
        by_kind.add_row(kind, f"{found['tokens']:,}", *_numbers(found))
    return [layers, by_kind]


def _numbers(found: dict[str, Any]) -> list[str]:
    return [f"{found['gini']:.3f}", f"{found['reached']:.0%}", *_shares(found["rates"])]


def _shares(rates: dict[str, float] | None) -> list[str]:
    names = [field.name for field in fields(Rates)]
    return ["-"] * len(names) if rates is None else [f"{rates[name]:.1%}" for name in names]
