"""`perspectron trace`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

import perspectron
from perspectron.cli.routes import precision, read_tokens
from perspectron.cli.units import rate
from perspectron.config import require
from perspectron.data import Tokenizer
from perspectron.device import pick_device
from perspectron.eval.routes import trace as follow
from perspectron.model import LanguageModel
from perspectron.stream.plan import ExpertLayer, needs
from perspectron.stream.trace import Trace, belady, reuse, save
from perspectron.train import checkpoint

BELADY = 1 << 20  # uses; the best possible cache is looked for in traces up to this long


@dataclass(frozen=True)
class TraceRoutes:
    """Which experts a text takes, and what caches of any size would have to read for it.

    From one expert to all: least recently used ones dropped, without and with guessing the next layer's. A guess is
    played as a use here; the engine also guesses the layer after, never drops for a guess what another guess brought,
    and gives a read up when something else is waited for, so that its own counts differ.

    Example: perspectron trace runs/routed --text letters.txt --disk 3G/s

    Then: perspectron plan runs/routed --ram 1G --trace runs/routed/trace.json
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run, of one of its checkpoints, or of an artifact."""
    text: Path
    """File of text, read as one document."""
    out: Path | None = None
    """Where to keep the trace (default: RUN/trace.json)."""
    tokens: int = 65536
    """Read the first so many tokens; 0 is all."""
    disk: str | None = None
    """Rate at which experts are read, like 3G/s: gives tokens/s."""
    device: str = "auto"
    """ "auto" is CUDA where there is one."""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        require(self.tokens >= 0, "tokens", self.tokens, "≥ 0")
        disk = None if self.disk is None else rate(self.disk, "disk")
        model, tokenizer = perspectron.load(self.run)
        device = pick_device(self.device)
        model.to(device)
        run = checkpoint.run_of(self.run)
        _, ids = read_tokens(self.text, tokenizer, self.tokens)
        with precision(run, device):
            trace = _trace(model, tokenizer, ids)
        out = run / "trace.json" if self.out is None else self.out
        save(out, trace)
        report = _report(trace, needs(model.config, 1).experts, disk)
        if self.json:
            print(json.dumps(report))
        else:
            console = Console(highlight=False)
            console.print(*_tables(report), sep="\n")
            console.print(
                *_notes(report), f"in {out}: which expert each token took", sep="\n", soft_wrap=True
            )
        return 0


def _trace(model: LanguageModel, tokenizer: Tokenizer, ids: list[int]) -> Trace:
    """Of the text's own tokens, read as a document: after the separator."""
    ids_BT = torch.tensor([[tokenizer.end_of_text, *ids]], device=model.embedding.weight.device)
    layers = follow(model, ids_BT)
    return Trace(
        model.config.name,
        tuple(layer.layer for layer in layers),
        tuple(int(np.prod(layer.torus)) for layer in layers),
        np.stack([layer.expert_BT[0, 1:].numpy() for layer in layers], 1),
        np.stack([layer.guess_BT[0, 1:].numpy() for layer in layers], 1),
    )


def _report(trace: Trace, experts: tuple[ExpertLayer, ...], disk: int | None) -> dict[str, Any]:
    """Caches of 1, 2, 4 … experts and of all. bytes: in whole pages, of the largest expert. Rates are shares of
    the uses, one for each layer and token; bytes and tokens per second are what the disk has to give."""
    shard, uses = max(layer.shard for layer in experts), trace.chosen_TL.size
    plain, ahead = reuse(trace), reuse(trace, guess=True)
    keys_N = trace.keys_TL(trace.chosen_TL).ravel()
    sizes = []
    for slots in (*(1 << k for k in range((trace.shards - 1).bit_length())), trace.shards):
        row: dict[str, Any] = {"slots": slots, "bytes": slots * shard}
        for name, found in (("lru", plain), ("guessed", ahead)):
            read = found.read(slots) * shard / trace.tokens
            speed = disk / read if disk and read else None
            hits = 1 - found.missed(slots) / uses
            row[name] = {"hit_rate": hits, "bytes_per_token": read, "tokens_per_second": speed}
        row["best_hit_rate"] = 1 - belady(keys_N, slots) / uses if uses <= BELADY else None
        sizes.append(row)
    right_L = trace.guessed_right_L()
    return {
        "model": trace.model,
        "tokens": trace.tokens,
        "layers": trace.layers,
        "experts": trace.experts,
        "shard_bytes": shard,
        "distinct": len(np.unique(keys_N)),
        "guessed_right": right_L.mean().item() if len(right_L) else None,
        "guessed_right_by_layer": right_L.tolist(),
        "sizes": sizes,
    }


def _tables(report: dict[str, Any]) -> list[Table]:
    title = f"{report['model']}: {report['tokens']:,} tokens, experts of {report['shard_bytes']:,} bytes"
    lru, guessed = (Table(title=text, title_justify="left") for text in (title, "the next layer's guessed"))
    found = ("hits", "bytes/token", "tokens/s")
    for table, columns in ((lru, ("slots", "bytes", *found, "best")), (guessed, ("slots", *found))):
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
    for row in report["sizes"]:
        best = row["best_hit_rate"]
        shown = "-" if best is None else f"{best:.1%}"
        lru.add_row(f"{row['slots']:,}", f"{row['bytes']:,}", *_cells(row["lru"]), shown)
        guessed.add_row(f"{row['slots']:,}", *_cells(row["guessed"]))
    return [lru, guessed] if len(report["layers"]) > 1 else [lru]


def _cells(found: dict[str, Any]) -> list[str]:
    speed = found["tokens_per_second"]
    shown = "-" if speed is None else f"{speed:,.2f}"
    return [f"{found['hit_rate']:.1%}", f"{found['bytes_per_token']:,.0f}", shown]


def _notes(report: dict[str, Any]) -> list[str]:
    uses = report["tokens"] * len(report["layers"])
    notes = [
        f"{report['distinct']:,} different experts in {uses:,} uses: so many miss at every size",
        "best: dropping what is used latest in the future; tokens/s: if reading were all",
    ]
    if report["guessed_right"] is not None:
        notes.append(
            f"guessed by each layer's router on what the routed layer before had: {report['guessed_right']:.1%} right"
        )
        notes.append(
            "a guess is played as a use; the engine looks two layers ahead, and leaves out or gives up some guesses"
        )
    return notes
