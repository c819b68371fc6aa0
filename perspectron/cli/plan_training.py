"""The output of `perspectron plan MODEL --train`: memory of each GPU, by part."""

from dataclasses import asdict

from perspectron.cli.options import answer, table
from perspectron.experts.router import RoutedConfig
from perspectron.model.config import ModelConfig
from perspectron.train.config import Layout
from perspectron.train.footprint import Memory, memory, sizes_of
from perspectron.util.config import require

MOST_ROWS = 1 << 20
NAMES = {
    "parameters": "parameters, float32",
    "gradients": "gradients, float32",
    "moments": "optimizer: two moments, float32",
    "whole": "one block put together, with gradient",
    "activations": "activations and states",
    "logits": "logits",
}


def plan_training(
    config: ModelConfig,
    layout: Layout,
    gpus: int,
    local: int,
    room: int,
    seq_len: int,
    recompute: bool,
    as_json: bool,
) -> int:
    """Print what a training on so many GPUs needs of each, which have `room` bytes; the exit code."""
    C, E = layout.context_parallel, layout.expert_parallel
    require(gpus >= 1, "gpus", gpus, "≥ 1")
    require(
        local >= 1 and (gpus <= local or gpus % local == 0), "local", local, f"a divisor of gpus = {gpus}"
    )
    require(gpus % C == 0, "context_parallel", C, f"a divisor of gpus = {gpus}")
    require(gpus % E == 0, "expert_parallel", E, f"a divisor of gpus = {gpus}")
    require(seq_len >= 1, "seq_len", seq_len, "≥ 1")
    require(seq_len % C == 0, "seq_len", seq_len, f"a multiple of context_parallel = {C}")
    shape = sizes_of(config)
    counts = [block.ffn.count for block in config.blocks if isinstance(block.ffn, RoutedConfig)]
    require(E == 1 or bool(counts), "expert_parallel", E, f"1: {config.name} has no experts")
    for count in counts:
        require(count % E == 0, "expert_parallel", E, f"a divisor of {count}, the experts of a layer")

    def needs(rows: int) -> Memory:
        return memory(shape, layout, gpus, local, rows * seq_len, recompute)

    one = needs(1)
    each = needs(2).bytes - one.bytes
    rows = max(0, min(MOST_ROWS, int((room - one.bytes) // each) + 1))
    needed = needs(max(rows, 1))
    at_once = seq_len * max(rows, 1) * gpus // C
    fields = {
        "model": config.name, "gpus": gpus, "memory": asdict(needed), "rows": rows, "bytes": needed.bytes,
        "tokens_per_update": at_once,
    }  # fmt: skip
    whole = shape.parameters + shape.experts
    title = (
        f"{config.name}, {whole / 1e6:,.0f} M parameters, on {gpus} GPUs of {room / 1e9:.0f} GB: GB of each"
    )
    lines = [(name, f"{asdict(needed)[key] / 1e9:,.2f}") for key, name in NAMES.items()]
    lines.append(("all", f"{needed.bytes / 1e9:,.2f}"))
    fits = f"{rows:,} windows of {seq_len:,} tokens fit on each GPU, {at_once:,} tokens an update"
    return answer(as_json, fields, table(title, ("part", "GB"), lines), fits if rows else _short(one, room))


def _short(one: Memory, room: int) -> str:
    more = "more GPUs, --recompute, a shorter --seq-len, or --expert-parallel for experts"
    return f"does not fit: {one.bytes / 1e9:,.1f} GB with one window, {room / 1e9:.0f} GB there; take {more}"
