"""`perspectron generate --bench`: what a token costs, as a table or as JSON."""

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from perspectron import native
from perspectron.data import Tokenizer
from perspectron.eval.cost import Bench, bench
from perspectron.model import LanguageModel

PROMPT = "def read_lines(path):\n"


def print_bench(model: LanguageModel, tokenizer: Tokenizer, prompt: str, tokens: int, *, json: bool) -> None:
    """Decode and print what a token cost."""
    measured = bench(model, tokenizer.vocab_size, tokenizer.encode(prompt or PROMPT), tokens)
    if json:
        print(as_json(measured))
    else:
        Console(highlight=False).print(_table(model, measured))


def as_json(measured: Bench) -> str:
    fields = asdict(measured) | {
        "median": measured.median,
        "share": measured.share,
        "bytes": measured.touched.total,
    }
    return json.dumps(fields)


def _table(model: LanguageModel, measured: Bench) -> Table:
    table = Table(
        title=f"{model.config.name}: one token of {len(measured.seconds)}",
        title_justify="left",
        show_header=False,
    )
    low, high = min(measured.seconds), max(measured.seconds)
    rows = [
        ("milliseconds", f"{measured.median * 1e3:.1f} ({low * 1e3:.1f}-{high * 1e3:.1f})"),
        ("tokens a second", f"{1 / measured.median:.2f}"),
    ]
    names = {"state": "state, read and written", "caches": "keys and values read"}
    counts = asdict(measured.touched).items()
    threads = native.threads()
    rows += [(f"bytes of {names.get(name, name)}", f"{count:,}") for name, count in counts]
    rows += [
        ("bytes in all", f"{measured.touched.total:,}"),
        ("in memory as state", f"{measured.state_bytes:,} bytes"),
        ("read from memory", f"{measured.bandwidth / 1e9:.1f} GB/s on {threads} thread{'s'[: threads > 1]}"),
        ("share of that", f"{measured.share:.2f}"),
    ]
    if measured.missed:
        rows.append(("bytes from disk", f"{measured.missed:,.0f}, waited {measured.waited * 1e3:.1f} ms"))
    for row in rows:
        table.add_row(*row)
    return table
