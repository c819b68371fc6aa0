"""`perspectron perspective trace`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from perspectron.cli.options import Device, Json, OpenedFrom, answer, rate, table
from perspectron.cli.progress import Work
from perspectron.data.reading import read_tokens
from perspectron.designs.perspective.suites.routes import Routes, of_document
from perspectron.model.model import LanguageModel
from perspectron.opening import open_model
from perspectron.stream.plan import ExpertLayer, needs
from perspectron.stream.trace import Trace, missed, save, stack_distances
from perspectron.util.config import require
from perspectron.util.machine import pick_device


@dataclass(frozen=True)
class TraceRoutes:
    """Record which experts a text uses, and compute how much caches of any size would read.

    Cache sizes range from one expert to all; the least recently used expert is dropped. The engine also predicts
    the experts of the next layers; the share of correct predictions is printed too.

    Example: perspectron perspective trace runs/routed --text letters.txt --disk 3G/s

    Then: perspectron plan runs/routed --ram 1G --trace runs/routed/trace.json
    """

    run: OpenedFrom
    text: Path
    """Text file, read as one document."""
    out: Path | None = None
    """File to write the trace to (default: RUN/trace.json)."""
    tokens: int = 65536
    """Number of tokens to read; 0 is all."""
    disk: str | None = None
    """Read rate of experts, such as 3G/s, to estimate tokens/s."""
    device: Device = "auto"
    json: Json = False

    def __call__(self) -> int:
        require(self.tokens == 0 or self.tokens >= 2, "tokens", self.tokens, "0 or ≥ 2")
        disk = None if self.disk is None else rate(self.disk, "disk")
        opened = open_model(self.run)
        model, tokenizer = opened.model.to(pick_device(self.device)), opened.tokenizer
        ids = read_tokens(self.text, tokenizer, self.tokens)
        with opened.autocast(), Work("reading the text"):
            layers = of_document(model, ids, tokenizer.specials.prefix)
            trace = _trace(model, layers)
        out = opened.folder.path / "trace.json" if self.out is None else self.out
        save(out, trace)
        report = _report(trace, needs(model.config, 1).experts, disk) | {
            "guessed_two_before": _further(layers)
        }
        line = f"written to {out}: the expert of each token in each layer"
        return answer(self.json, report, _table(report), *_notes(report), line)


def _trace(model: LanguageModel, layers: list[Routes]) -> Trace:
    return Trace(
        model.config.name,
        tuple(layer.layer for layer in layers),
        tuple(int(np.prod(layer.torus)) for layer in layers),
        np.stack([layer.expert_BT[0].numpy() for layer in layers], 1),
        np.stack([layer.guess_BT[0].numpy() for layer in layers], 1),
    )


def _further(layers: list[Routes]) -> dict[int, float]:
    """Share of tokens, by layer, whose expert its router guesses right from the input of the routed layer two
    before."""
    pairs = [(layer, layer.further_BT) for layer in layers]
    return {
        layer.layer: (layer.expert_BT == guess_BT).double().mean().item()
        for layer, guess_BT in pairs
        if guess_BT is not None
    }


def _report(trace: Trace, experts: tuple[ExpertLayer, ...], disk: int | None) -> dict[str, Any]:
    """Caches of 1, 2, 4 … experts and of all. bytes: in whole pages, of the largest expert. Rates are shares of
    the uses, one for each layer and token; bytes and tokens per second are what the disk has to give."""
    shard, uses = max(layer.shard for layer in experts), trace.chosen_TL.size
    distance_N, sizes = stack_distances(trace.keys_N), []
    for slots in (*(1 << k for k in range((trace.shards - 1).bit_length())), trace.shards):
        misses = missed(distance_N, slots)
        read = misses * shard / trace.tokens
        speed = disk / read if disk else None
        measures = {"hit_rate": 1 - misses / uses, "bytes_per_token": read, "tokens_per_second": speed}
        sizes.append({"slots": slots, "bytes": slots * shard} | measures)
    right_L = trace.guessed_right_L()
    return {
        "model": trace.model,
        "tokens": trace.tokens,
        "layers": trace.layers,
        "experts": trace.experts,
        "shard_bytes": shard,
        "distinct": len(np.unique(trace.keys_N)),
        "guessed_right": right_L.mean().item() if len(right_L) else None,
        "guessed_right_by_layer": right_L.tolist(),
        "sizes": sizes,
    }


def _table(report: dict[str, Any]) -> Table:
    title = f"{report['model']}: {report['tokens']:,} tokens, experts of {report['shard_bytes']:,} bytes"
    rows = [
        (
            f"{row['slots']:,}",
            f"{row['bytes']:,}",
            f"{row['hit_rate']:.1%}",
            f"{row['bytes_per_token']:,.0f}",
            "-" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.2f}",
        )
        for row in report["sizes"]
    ]
    return table(title, ("slots", "bytes", "hits", "bytes/token", "tokens/s"), rows)


def _notes(report: dict[str, Any]) -> list[str]:
    uses = report["tokens"] * len(report["layers"])
    notes = [
        f"{report['distinct']:,} distinct experts in {uses:,} uses; the first use of each misses at every size",
        "tokens/s: the limit set by reading alone",
    ]
    if report["guessed_right"] is not None:
        notes.append(
            "experts guessed by each layer's router from the input of the routed layer before it: "
            f"{report['guessed_right']:.1%} right"
        )
        pairs = zip(report["layers"][1:], report["guessed_right_by_layer"], strict=True)
        notes.append("by layer: " + ", ".join(f"{layer}: {right:.1%}" for layer, right in pairs))
    if further := report["guessed_two_before"]:
        said = ", ".join(f"{layer}: {right:.1%}" for layer, right in further.items())
        notes.append(f"from the input of the routed layer two before, by layer: {said}")
    return notes
