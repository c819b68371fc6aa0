"""What the commands that run a model do with an artifact."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import perspectron
from perspectron import native
from perspectron.cli.units import size
from perspectron.config import require
from perspectron.data import Tokenizer
from perspectron.eval.cost import Bench, bench
from perspectron.model import LanguageModel
from perspectron.stream.artifact import is_artifact, read_header
from perspectron.stream.engine import StreamedModel

PROMPT = "def read_lines(path):\n"
CLAIMED = "12-14 on a 4 GB GPU, 1-2 on a CPU"


def open_model(path: Path, cache: str | None, *, verify: bool = False) -> tuple[LanguageModel, Tokenizer]:
    """The model of a run or an artifact. Of an artifact it says in a line what is in memory and what is not, and
    leaves the threads to the kernels: torch's own operations are too small to share."""
    budget = None if cache is None else size(cache, "cache")
    if is_artifact(path):
        _check_cache(path, cache, budget)
    elif path.is_dir():
        for name, given in (("cache", cache), ("verify", verify)):
            require(not given, name, given, "left out for a run, which is in memory as a whole")
    model, tokenizer = perspectron.load(path, cache_bytes=budget, verify=verify)
    if isinstance(model, StreamedModel):
        print(f"perspectron: {model.line()}", file=sys.stderr)
        if native.available() and torch.get_num_threads() > 1:
            native.set_threads(torch.get_num_threads())
            torch.set_num_threads(1)
    return model, tokenizer


def _check_cache(path: Path, cache: str | None, budget: int | None) -> None:
    """ConfigError, naming what was typed, for less than one expert."""
    experts = read_header(path).experts
    if budget is not None and experts is not None:
        least = experts.shard_bytes
        require(budget >= least, "cache", cache, f"at least {least:,} bytes, one expert")


def print_bench(model: LanguageModel, tokenizer: Tokenizer, prompt: str, tokens: int, *, json: bool) -> None:
    """Decode and print what a token cost."""
    found = bench(model, tokenizer.vocab_size, tokenizer.encode(prompt or PROMPT), tokens)
    if json:
        print(as_json(found))
    else:
        Console(highlight=False).print(_table(model, found))


def as_json(found: Bench) -> str:
    fields = asdict(found) | {"median": found.median, "share": found.share, "bytes": found.touched.total}
    return json.dumps(fields)


def _table(model: LanguageModel, found: Bench) -> Table:
    table = Table(
        title=f"{model.config.name}: one token of {len(found.seconds)}",
        title_justify="left",
        show_header=False,
    )
    low, high = min(found.seconds), max(found.seconds)
    rows = [
        ("milliseconds", f"{found.median * 1e3:.1f} ({low * 1e3:.1f}-{high * 1e3:.1f})"),
        ("tokens a second", f"{1 / found.median:.2f}"),
    ]
    if model.config.name == "perspective-1t":
        rows.append(("the document says", CLAIMED))
    names = {"state": "state, read and written", "caches": "keys and values read"}
    counts = asdict(found.touched).items()
    threads = native.threads()
    rows += [(f"bytes of {names.get(name, name)}", f"{count:,}") for name, count in counts]
    rows += [
        ("bytes in all", f"{found.touched.total:,}"),
        ("in memory as state", f"{found.state_bytes:,} bytes"),
        ("read from memory", f"{found.bandwidth / 1e9:.1f} GB/s on {threads} thread{'s'[: threads > 1]}"),
        ("share of that", f"{found.share:.2f}"),
    ]
    if found.missed:
        rows.append(("bytes from disk", f"{found.missed:,.0f}, waited {found.waited * 1e3:.1f} ms"))
    for row in rows:
        table.add_row(*row)
    return table
