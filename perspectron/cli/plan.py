"""`perspectron plan`."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
import tyro
from rich.table import Table

from perspectron.cli.options import Json, Sets, answer, describe, differences, rate, size, table
from perspectron.cli.plan_training import plan_training
from perspectron.data import Tokenizer
from perspectron.opening import Folder
from perspectron.quant.convert import linear_for
from perspectron.stream import speed
from perspectron.stream.artifact import TOKENIZER, layer_file
from perspectron.stream.plan import Case, Needs, Placement, Rates, bounds, case, needs, place
from perspectron.stream.trace import Trace, missed, stack_distances
from perspectron.stream.trace import load as load_trace
from perspectron.train.config import Layout
from perspectron.util.config import require
from perspectron.util.errors import ConfigError
from perspectron.util.files import safe_join

CONTEXT, SEQ_LEN = 8192, 2048
OF_DECODING = ("ram", "vram", "disk", "bandwidth", "pcie", "context", "shared", "trace")
OF_TRAINING = ("gpus", "local", "memory", "seq_len", "recompute", *(item.name for item in fields(Layout)))


@dataclass(frozen=True)
class Plan:
    """Predict how much memory a packed model needs, what streams from disk, and how fast it decodes.

    The prediction is based on the model's shapes and on bandwidths.

    Sizes are like 24G, 512M or 1.5GiB (G is 1000³, GiB 1024³), rates like 3G/s.

    Example: perspectron plan perspective-1t --ram 24G --disk 3G/s

    On a GPU: perspectron plan perspective-1t --ram 256G --vram 4G --pcie 25G/s --bandwidth 200G/s

    What training needs: perspectron plan transformer-125m --train --gpus 8 --memory 80G
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "--ram", "--vram", "--disk", "--set", "--train", "--memory", "--gpus", "--json",
    )  # fmt: skip
    model: tyro.conf.Positional[str]
    """A preset, or the folder of an artifact or of a run."""
    ram: str | None = None
    """Memory for the model and its state, not counting the program itself; required without --train."""
    vram: str | None = None
    """GPU memory, which holds the weights that every token uses and two experts; RAM holds the other experts."""
    disk: str | None = None
    """Read rate of experts (default: measured in the folder of an artifact, otherwise ignored)."""
    bandwidth: str | None = None
    """Read rate of weights from memory, with --vram the GPU's (default: measured here)."""
    pcie: str | None = None
    """Copy rate to the GPU (default: measured here if there is one, otherwise ignored)."""
    context: int | None = None
    """Tokens of the conversation (default: 8192, or as many as a table of positions allows)."""
    shared: str | None = None
    """Format of the dense layers of a preset or a run, as `quantize --linear` takes it (default: 2bit, of an imported
    model 4bit32)."""
    trace: Path | None = None
    """File written by `perspectron perspective trace`; its cache misses become one of the cases."""
    set: Sets = ()
    """Sizes of the preset to replace, as KEY=VALUE."""
    json: Json = False
    train: bool = False
    """Predict a training instead of decoding: memory of each GPU."""
    gpus: int = 1
    """With --train: total number of GPUs."""
    local: int = 8
    """With --train: GPUs per machine."""
    memory: str | None = None
    """With --train: memory of each GPU, such as 80G."""
    seq_len: int | None = None
    """With --train: tokens in a window (default: 2048, or as many as a table of positions has)."""
    recompute: bool = False
    """With --train: recompute activations in the backward pass."""
    layout: Layout = field(default_factory=Layout)

    def __call__(self) -> int:
        unused, when = (OF_DECODING, "with") if self.train else (OF_TRAINING, "without")
        for flag, (value, _) in differences(self, Plan(self.model)).items():
            name = flag.removeprefix("--").replace("-", "_")
            require(name not in unused, name, getattr(self, name, value), f"left out {when} --train")
        if self.train:
            return self._training()
        if self.ram is None:
            raise ConfigError("plan needs --ram, memory for the model such as 24G; or --train --memory 80G")
        ram = size(self.ram, "ram")
        vram = None if self.vram is None else size(self.vram, "vram")
        require(self.pcie is None or vram is not None, "pcie", self.pcie, "left out without vram")
        folder = describe(self.model, self.set)
        needed = self._needs(folder)
        trace = None if self.trace is None else load_trace(self.trace)
        _same_model(needed, trace)
        rates = self._rates(folder, vram is not None)
        placement = place(needed, ram, vram)
        cases = bounds(needed, placement) if placement.fits else []
        if trace is not None and placement.fits and placement.streams:
            rate_missed = missed(stack_distances(trace.keys_N), placement.slots) / trace.chosen_TL.size
            cases.append(case(needed, placement, "trace, LRU", rate_missed))
        fields, lines = _report(needed, placement, rates, cases), _verdict(needed, placement)
        speeds = (_speeds(cases, rates), _known(rates)) if cases else ()
        return answer(self.json, fields, _bytes(needed), *lines, *speeds)

    def _training(self) -> int:
        if self.memory is None:
            raise ConfigError("plan --train needs --memory, that of a GPU, such as 80G")
        room, folder = size(self.memory, "memory"), describe(self.model, self.set)
        local, most = min(self.local, self.gpus), folder.model.positions
        seq_len = min(SEQ_LEN, most or SEQ_LEN) if self.seq_len is None else self.seq_len
        require(seq_len <= (most or seq_len), "seq_len", seq_len, f"≤ {most:,}, the learned positions")
        return plan_training(
            folder.model, self.layout, self.gpus, local, room, seq_len, self.recompute, self.json
        )

    def _needs(self, folder: Folder) -> Needs:
        """ConfigError for a context that the model cannot hold, or a format beside those of an artifact."""
        config, formats = folder.model, folder.quant
        distinct = 0 if folder.experts is None else folder.experts.distinct
        require(formats is None or self.shared is None, "shared", self.shared, "left out for an artifact")
        context = min(CONTEXT, config.positions or CONTEXT) if self.context is None else self.context
        bound = f"from 1 to {config.positions:,}, the learned positions" if config.positions else "≥ 1"
        require(1 <= context <= (config.positions or context), "context", context, bound)
        experts = "" if folder.experts is None else folder.experts.format
        packed = formats or self.shared
        if packed is None:
            ours = folder.run is None
            packed = linear_for(0 if ours else Tokenizer.load(folder.path / TOKENIZER).specials.reset)
        return needs(config, context, packed, distinct, experts)

    def _rates(self, folder: Folder, gpu: bool) -> Rates:
        """The rates that were typed, else those measured here, else None."""
        typed = {name: getattr(self, name) for name in ("bandwidth", "disk", "pcie")}
        known = {name: None if text is None else float(rate(text, name)) for name, text in typed.items()}
        here = torch.cuda.is_available()
        if known["bandwidth"] is None and (here or not gpu):
            known["bandwidth"] = speed.memory("cuda" if gpu else "cpu")
        if known["pcie"] is None and gpu and here:
            known["pcie"] = speed.pcie()
        if known["disk"] is None and folder.experts is not None:
            known["disk"] = speed.disk(safe_join(folder.path, layer_file(folder.experts.layers[0])))
        return Rates(known["bandwidth"], known["disk"], known["pcie"])


def _same_model(needed: Needs, trace: Trace | None) -> None:
    if trace is None:
        return
    own = {layer.layer: layer.experts for layer in needed.experts}
    traced = dict(zip(trace.layers, trace.experts, strict=True))
    if own != traced:
        raise ConfigError(f"trace = that of {trace.model!r}, must have the routed layers of {needed.model!r}")


# ---------------------------------------------------------------- what is printed


def _report(needed: Needs, placement: Placement, rates: Rates, cases: list[Case]) -> dict[str, Any]:
    return asdict(needed) | {
        "resident_bytes": needed.resident,
        "read_per_token": needed.read,
        "written_per_token": needed.written,
        "placement": asdict(placement) | {"fits": placement.fits, "streams": placement.streams},
        "rates": asdict(rates),
        "cases": [
            asdict(one) | {"seconds": one.seconds(rates), "tokens_per_second": one.tokens_per_second(rates)}
            for one in cases
        ],
    }


def _bytes(needed: Needs) -> Table:
    """80 columns wide at most, so that no number is cut."""
    layers, moved = needed.experts, needed.read + needed.written
    resident_moved = moved - sum(layer.read for layer in layers)
    rows = [
        (name, f"{part.parameters:,}", f"{part.bytes:,}", f"{part.read:,}")
        for name, part in needed.parts.items()
    ]
    rows += [
        (f"state, {name}", "", f"{part.bytes:,}", f"{part.read + part.written:,}")
        for name, part in needed.state.items()
    ]
    rows.append(("resident", "", f"{needed.resident:,}", f"{resident_moved:,}"))
    if layers:
        parameters = sum(layer.experts * layer.parameters for layer in layers)
        stored = sum(layer.distinct * layer.shard for layer in layers)
        rows.append(("experts", f"{parameters:,}", f"{stored:,}", f"{moved - resident_moved:,}"))
        rows.append(("all", "", f"{needed.resident + stored:,}", f"{moved:,}"))
    title = f"{needed.model}: bytes, at a context of {needed.context:,}"
    return table(title, ("part", "parameters", "bytes", "moved/token"), rows)


def _verdict(needed: Needs, placement: Placement) -> list[str]:
    lines = []
    if needed.experts:
        first = needed.experts[0]
        lines.append(
            f"an expert of layer {first.layer}: {first.codes:,} bytes of codes, {first.scales:,} of scales, "
            f"{first.shard:,} in whole pages, {first.slot:,} in memory; {needed.shards:,} experts in all"
        )
    pairs = [("RAM", placement.ram, placement.least_ram), ("VRAM", placement.vram, placement.least_vram)]
    for name, there, least in pairs:
        if there is not None and there < least:
            lines.append(f"does not fit: {name} {there:,}, needs at least {least:,}, {least - there:,} more")
    if placement.fits and placement.streams:
        lines.append(
            f"fits: {placement.slots:,} of {placement.shards:,} experts stay in RAM, the others stream; "
            f"none would with {placement.ample_ram:,}"
        )
    elif placement.fits:
        lines.append(f"fits: nothing streams from disk; RAM {placement.ram:,}, needs {placement.ample_ram:,}")
    return lines


def _speeds(cases: list[Case], rates: Rates) -> Table:
    rows = []
    for one in cases:
        speed = one.tokens_per_second(rates)
        amounts = [f"{amount / 1e6:,.1f}" for amount in (one.memory, one.disk, one.pcie)]
        shown = "-" if speed is None else " to ".join(dict.fromkeys(map(digits, speed)))
        rows.append([one.name, f"{one.miss_rate:.1%}", *amounts, shown])
    return table("per token, in MB", ("experts", "read", "memory", "disk", "PCIe", "tokens/s"), rows)


def digits(value: float) -> str:
    """A predicted number, three digits of it: 26,300, 12.3, 0.046."""
    if value >= 1000:
        return f"{round(value, 3 - len(str(int(value)))):,.0f}"
    return f"{value:.2g}" if value < 1 else f"{value:.{3 - len(str(int(value)))}f}"


def _known(rates: Rates) -> str:
    shown = [
        f"{name} {'not given, ignored' if value is None else f'{value / 1e9:.2f} GB/s'}"
        for name, value in asdict(rates).items()
    ]
    return f"tokens/s: from no overlap to full overlap; {', '.join(shown)}"
