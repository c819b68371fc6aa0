"""`perspectron perspective routes`."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from perspectron.cli.options import Device, Json, OpenedFrom, answer, named_file, table
from perspectron.cli.progress import Work
from perspectron.data import Tokenizer
from perspectron.data.reading import read_tokens
from perspectron.designs.perspective.suites.routes import (
    Measures,
    Rates,
    Routes,
    joined,
    measure,
    of_document,
    summary,
)
from perspectron.experts.torus import cells
from perspectron.model.model import LanguageModel
from perspectron.opening import open_model
from perspectron.util.config import require
from perspectron.util.errors import StorageError
from perspectron.util.files import safe_join, write_json, write_text
from perspectron.util.machine import pick_device
from perspectron.util.plot import Torus, draw_tori


class _Text(NamedTuple):
    """First tokens of a file, and their kind."""

    file: str
    kind: str
    ids: list[int]


@dataclass(frozen=True)
class ShowRoutes:
    """Show which experts a text uses: their load on the torus, and hops between tokens.

    For each layer and kind of text, as SVG and JSON.

    Example: perspectron perspective routes runs/routed --text letters.txt

    By kind: perspectron perspective routes runs/routed --text letter=letters.txt verse=other.txt --out routes/
    """

    run: OpenedFrom
    text: tuple[str, ...]
    """Text files; NAME=FILE names the kind of text, which is otherwise the file's name."""
    out: Path | None = None
    """Folder for routes.svg and routes.json (default: RUN/routes)."""
    tokens: int = 65536
    """Number of tokens to read from each file; 0 is all."""
    path: int = 24
    """Number of tokens of each kind whose path is drawn."""
    device: Device = "auto"
    json: Json = False

    def __call__(self) -> int:
        require(self.tokens == 0 or self.tokens >= 2, "tokens", self.tokens, "0 or ≥ 2")
        require(self.path >= 2, "path", self.path, "≥ 2")
        require(len(self.text) > 0, "text", "none", "at least one file")
        opened = open_model(self.run)
        model, tokenizer = opened.model.to(pick_device(self.device)), opened.tokenizer
        texts = [_read(source, tokenizer, self.tokens) for source in self.text]
        with opened.autocast(), Work("reading the text"):
            prefix = tokenizer.specials.prefix
            routes = joined([of_document(model, text.ids, prefix) for text in texts], axis=1)
        report, measures, runs = _report(model, texts, routes, self.path)
        out = self.out or safe_join(opened.folder.path, "routes", StorageError)
        write_text(out / "routes.svg", _picture(routes, measures, runs))
        write_json(out / "routes.json", report)
        lines = [f"written to {out}: routes.svg, routes.json"]
        if report["router"] == "switch":
            lines.insert(0, "a switch has no torus: hops are counted on a lattice of its experts' ids")
        return answer(self.json, report, *_tables(report), *lines)


def _read(source: str, tokenizer: Tokenizer, limit: int) -> _Text:
    """Text of FILE or NAME=FILE. DataError where it is missing, no text, or shorter than 2 tokens."""
    kind, path = named_file(source, "text")
    return _Text(str(path), kind, read_tokens(path, tokenizer, limit))


def _picture(routes: list[Routes], measures: list[Measures], runs: dict[str, tuple[int, int]]) -> str:
    """A picture of all layers' tori with the load of experts, and the paths of queries. runs: [start, stop) of the
    tokens in row 0, by name."""
    panels = []
    for layer, measured in zip(routes, measures, strict=True):
        title = f"layer {layer.layer}, Gini {measured.gini:.2f}"
        if measured.rates:
            title += f", same {measured.rates.same:.0%}"
        shares = [load / max(measured.tokens, 1) for load in measured.load]
        ways = {name: layer.query_BTA[0, start:stop].tolist() for name, (start, stop) in runs.items()}
        panels.append(Torus(title, layer.torus, cells(layer.torus).tolist(), shares, ways))
    return draw_tori(panels, "Shares of the tokens, and paths of the queries (ring: the first)")


def _report(
    model: LanguageModel, texts: list[_Text], routes: list[Routes], path: int
) -> tuple[dict[str, Any], list[Measures], dict[str, tuple[int, int]]]:
    """Report of all the numbers, each layer's measures, and the [start, stop) of the tokens whose path is drawn."""
    reset_BT = torch.tensor([[t == 0 for text in texts for t in range(len(text.ids))]])
    counted, runs = dict[str, Tensor](), dict[str, tuple[int, int]]()
    for start, text in zip(reset_BT[0].nonzero()[:, 0].tolist(), texts, strict=True):
        runs.setdefault(text.kind, (start, start + min(path, len(text.ids))))
        counted[text.kind] = torch.tensor([[one.kind == text.kind for one in texts for _ in one.ids]])
    measures = [measure(layer, reset_BT=reset_BT) for layer in routes]
    by_kind = {
        name: [measure(layer, reset_BT=reset_BT, counted_BT=counted[name]) for layer in routes]
        for name in counted
    }
    report = {
        "model": model.config.name,
        "router": routes[0].router,
        "texts": [{"file": text.file, "tokens": len(text.ids)} for text in texts],
        "tokens": reset_BT.numel(),
        "kinds": {
            name: {"tokens": int(counted_BT.sum())} | asdict(summary(by_kind[name]))
            for name, counted_BT in counted.items()
        },
        "overall": asdict(summary(measures)),
        "layers": [
            {"layer": layer.layer, "torus": layer.torus}
            | asdict(measured)
            | {"kinds": {name: asdict(by_kind[name][i]) for name in counted}}
            for i, (layer, measured) in enumerate(zip(routes, measures, strict=True))
        ],
    }  # fmt: skip
    return report, measures, runs


COLUMNS = ("Gini", "reached", "same", "1-hop", "2-hop", "distant")


def _tables(report: dict[str, Any]) -> list[Table]:
    torus = " × ".join(map(str, report["layers"][0]["torus"]))
    title = f"{report['model']}, torus {torus}, {report['tokens']:,} tokens"
    chance = _shares(report["overall"]["chance"])
    layers = [(str(layer["layer"]), *_numbers(layer)) for layer in report["layers"]]
    layers += [("mean", *_numbers(report["overall"])), ("by chance", "", "", *chance)]
    by_kind = [(kind, f"{means['tokens']:,}", *_numbers(means)) for kind, means in report["kinds"].items()]
    return [
        table(title, ("layer", *COLUMNS), layers),
        table("by kind of text", ("kind", "tokens", *COLUMNS), by_kind),
    ]


def _numbers(measured: dict[str, Any]) -> list[str]:
    return [f"{measured['gini']:.3f}", f"{measured['reached']:.0%}", *_shares(measured["rates"])]


def _shares(rates: dict[str, float] | None) -> list[str]:
    names = [field.name for field in fields(Rates)]
    return ["-"] * len(names) if rates is None else [f"{rates[name]:.1%}" for name in names]
