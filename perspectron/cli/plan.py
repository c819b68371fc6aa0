"""`perspectron plan`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from perspectron import presets
from perspectron.cli.plan_claims import Claim, document
from perspectron.cli.train import assignment
from perspectron.cli.units import rate, size
from perspectron.config import ModelConfig, require
from perspectron.errors import ConfigError
from perspectron.files import safe_join
from perspectron.stream import bandwidth
from perspectron.stream.artifact import is_artifact, layer_file, read_header
from perspectron.stream.plan import Case, Needs, Placement, Rates, bounds, case, needs, place
from perspectron.stream.trace import Trace, reuse
from perspectron.stream.trace import load as load_trace
from perspectron.train import checkpoint

CONTEXT = 8192


@dataclass(frozen=True)
class Plan:
    """What a model needs to run compressed, what of it streams from disk, and how fast it decodes.

    Predicted from its shapes and from bandwidths, beside what the documents promise.

    Sizes are like 24G, 512M or 1.5GiB (G is 1000³, GiB 1024³), rates like 3G/s.

    Example: perspectron plan perspective-1t --ram 24G --disk 3G/s

    On a GPU: perspectron plan perspective-1t --ram 256G --vram 4G --pcie 25G/s --bandwidth 200G/s
    """

    model: tyro.conf.Positional[str]
    """A preset, or the folder of an artifact or of a run."""
    ram: str
    """Memory for the model and its state; the program itself comes on top."""
    vram: str | None = None
    """Memory of a GPU: it holds what every token uses and two experts, RAM the others."""
    disk: str | None = None
    """Rate at which experts can be read; measured in the folder of an artifact, else left out."""
    bandwidth: str | None = None
    """Rate at which weights can be read from memory (with --vram: the GPU's); measured here if not given."""
    pcie: str | None = None
    """Rate of copies to the GPU; measured here where there is one, else left out."""
    context: int | None = None
    """Tokens of the conversation (default: 8192, or all that a table of positions allows)."""
    shared: str | None = None
    """Format of the dense layers of a preset or a run: 2bit (default), 4bit or int8."""
    trace: Path | None = None
    """What `perspectron trace` wrote: its misses are one of the cases."""
    set: tuple[str, ...] = ()
    """Sizes of the preset to replace, as KEY=VALUE."""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        ram = size(self.ram, "ram")
        vram = None if self.vram is None else size(self.vram, "vram")
        require(self.pcie is None or vram is not None, "pcie", self.pcie, "left out without vram")
        needed = self._needs()
        trace = None if self.trace is None else load_trace(self.trace)
        _same_model(needed, trace)
        rates = self._rates(vram is not None)
        placement = place(needed, ram, vram)
        cases = bounds(needed, placement) if placement.fits else []
        if trace is not None and placement.fits and placement.streams:
            cases += _traced(needed, placement, trace)
        claims = document(needed, rates, cases) if needed.model == "perspective-1t" else []
        if self.json:
            print(json.dumps(_report(needed, placement, rates, cases, claims)))
            return 0
        console = Console(highlight=False)
        console.print(_bytes(needed))
        console.print(*_verdict(needed, placement), sep="\n", soft_wrap=True)
        if cases:
            console.print(_speeds(cases, rates))
            console.print(_known(rates), soft_wrap=True)
        if claims:
            console.print(_claims(claims))
        return 0

    def _needs(self) -> Needs:
        """ConfigError for an unknown preset, a damaged folder, or a context that it cannot hold."""
        formats, distinct = None, 0
        if Path(self.model).is_dir():
            require(not self.set, "set", " ".join(self.set), "left out for a folder")
            config, formats, distinct = _folder(Path(self.model))
        else:
            config = presets.get(self.model, **dict(map(assignment, self.set)))
        require(formats is None or self.shared is None, "shared", self.shared, "left out for an artifact")
        context = min(CONTEXT, config.positions or CONTEXT) if self.context is None else self.context
        bound = f"from 1 to {config.positions:,}, the learned positions" if config.positions else "≥ 1"
        require(1 <= context <= (config.positions or context), "context", context, bound)
        return needs(config, context, formats or self.shared or "2bit", distinct)

    def _rates(self, gpu: bool) -> Rates:
        """What is given, else measured, else None."""
        given = {name: getattr(self, name) for name in ("bandwidth", "disk", "pcie")}
        known = {name: None if text is None else float(rate(text, name)) for name, text in given.items()}
        here = torch.cuda.is_available()
        if known["bandwidth"] is None and (here or not gpu):
            known["bandwidth"] = bandwidth.memory("cuda" if gpu else "cpu")
        if known["pcie"] is None and gpu and here:
            known["pcie"] = bandwidth.pcie()
        folder = Path(self.model)
        if (
            known["disk"] is None
            and is_artifact(folder)
            and (experts := read_header(folder).experts) is not None
        ):
            known["disk"] = bandwidth.disk(safe_join(folder, layer_file(experts.layers[0])))
        return Rates(known["bandwidth"], known["disk"], known["pcie"])


def _folder(folder: Path) -> tuple[ModelConfig, Mapping[str, str] | None, int]:
    """The model of a folder; and of an artifact the format of each packed module, and how many experts of a layer have
    weights of their own (0: all)."""
    if not is_artifact(folder):
        return checkpoint.load_config(checkpoint.run_of(folder)).model, None, 0
    header = read_header(folder)
    return header.model, header.quant, header.experts.distinct if header.experts is not None else 0


def _same_model(needed: Needs, trace: Trace | None) -> None:
    if trace is None:
        return
    own = {layer.layer: layer.experts for layer in needed.experts}
    traced = dict(zip(trace.layers, trace.experts, strict=True))
    if own != traced:
        raise ConfigError(f"trace = one of {trace.model!r}, must have the routed layers of {needed.model!r}")


def _traced(needed: Needs, placement: Placement, trace: Trace) -> list[Case]:
    uses = trace.chosen_TL.size
    plain, ahead = (reuse(trace, guess=guess) for guess in (False, True))
    missed, read = plain.missed(placement.slots) / uses, ahead.read(placement.slots) / uses
    return [
        case(needed, placement, "trace, LRU", missed),
        case(needed, placement, "trace, guessing", read),
    ]


# ---------------------------------------------------------------- what is printed


def _report(
    needed: Needs, placement: Placement, rates: Rates, cases: list[Case], claims: list[Claim]
) -> dict[str, Any]:
    return {
        "model": needed.model,
        "context": needed.context,
        "parts": {name: asdict(part) for name, part in needed.parts.items()},
        "state": {name: asdict(part) for name, part in needed.state.items()},
        "experts": [asdict(layer) for layer in needed.experts],
        "resident_bytes": needed.resident,
        "read_per_token": needed.read,
        "written_per_token": needed.written,
        "placement": asdict(placement) | {"fits": placement.fits, "streams": placement.streams},
        "rates": asdict(rates),
        "cases": [
            asdict(found)
            | {"seconds": found.seconds(rates), "tokens_per_second": found.tokens_per_second(rates)}
            for found in cases
        ],
        "document": [claim._asdict() | {"difference": claim.difference} for claim in claims],
    }


def _table(title: str, first: str, columns: tuple[str, ...]) -> Table:
    """80 columns wide at most, so that no number is cut."""
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _bytes(needed: Needs) -> Table:
    title = f"{needed.model}: bytes, at a context of {needed.context:,}"
    table = _table(title, "part", ("parameters", "bytes", "a token moves"))
    for name, part in needed.parts.items():
        table.add_row(name, f"{part.parameters:,}", f"{part.bytes:,}", f"{part.read:,}")
    for name, part in needed.state.items():
        table.add_row(f"state, {name}", "", f"{part.bytes:,}", f"{part.read + part.written:,}")
    layers = needed.experts
    moved = needed.read + needed.written
    resident_moved = moved - sum(layer.read for layer in layers)
    table.add_row("resident", "", f"{needed.resident:,}", f"{resident_moved:,}", style="bold")
    if layers:
        parameters = sum(layer.experts * layer.parameters for layer in layers)
        codes = sum(layer.distinct * layer.codes for layer in layers)
        scales = sum(layer.distinct * layer.scales for layer in layers)
        in_pages = sum(layer.distinct * layer.shard for layer in layers)
        table.add_row("experts, codes", f"{parameters:,}", f"{codes:,}", f"{sum(e.codes for e in layers):,}")
        table.add_row("experts, scales", "", f"{scales:,}", f"{sum(e.scales for e in layers):,}")
        table.add_row("experts, in pages", "", f"{in_pages:,}", "")
        table.add_row("all", "", f"{needed.resident + in_pages:,}", f"{moved:,}", style="bold")
    return table


def _verdict(needed: Needs, placement: Placement) -> list[str]:
    lines = []
    if needed.experts:
        first = needed.experts[0]
        lines.append(
            f"an expert of layer {first.layer}: {first.codes:,} of codes, {first.scales:,} of scales, "
            f"{first.shard:,} in whole pages; {needed.shards:,} of them"
        )
    pairs = [("RAM", placement.ram, placement.least_ram), ("VRAM", placement.vram, placement.least_vram)]
    for name, given, least in pairs:
        if given is not None and given < least:
            lines.append(f"does not fit: {name} {given:,}, needs at least {least:,}, {least - given:,} more")
    if placement.fits and placement.streams:
        lines.append(
            f"fits: {placement.slots:,} of {placement.shards:,} experts stay in RAM, the others stream; "
            f"nothing would with {placement.ample_ram:,}"
        )
    elif placement.fits:
        lines.append(f"fits: nothing streams from disk; RAM {placement.ram:,}, needs {placement.ample_ram:,}")
    return lines


def _speeds(cases: list[Case], rates: Rates) -> Table:
    table = _table("a token, in MB", "experts", ("read", "memory", "disk", "PCIe", "tokens/s"))
    for found in cases:
        speed = found.tokens_per_second(rates)
        amounts = [f"{amount / 1e6:,.1f}" for amount in (found.memory, found.disk, found.pcie)]
        shown = "-" if speed is None else f"{speed[0]:,.2f} to {speed[1]:,.2f}"
        table.add_row(found.name, f"{found.miss_rate:.1%}", *amounts, shown)
    return table


def _known(rates: Rates) -> str:
    shown = [
        f"{name} {'not given, left out' if value is None else f'{value / 1e9:.2f} GB/s'}"
        for name, value in asdict(rates).items()
    ]
    return f"tokens/s: from nothing overlapping to everything; {', '.join(shown)}"


def _claims(claims: list[Claim]) -> Table:
    title = "beside seeds/topology.md (a step: the time to read its bytes)"
    table = _table(title, "", ("document", "here", "difference", "where"))
    for claim in claims:
        table.add_row(*claim.shown())
    return table
