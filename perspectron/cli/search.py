"""`perspectron search`."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.table import Table

from perspectron.cli.compare import train
from perspectron.cli.console import progress
from perspectron.cli.options import BatchSize, Device, Encoding, Jobs, SeqLen, count
from perspectron.cli.progress import Work
from perspectron.compare import pool, search
from perspectron.compare.plan import PLAN, Settings, plan, threads_for
from perspectron.data import absolute, with_encoding
from perspectron.train.estimate import slow
from perspectron.util.config import between_commas, require
from perspectron.util.errors import ConfigError
from perspectron.util.files import locked
from perspectron.util.machine import pick_device

SHOWN = 10  # candidates of a rung


@dataclass(frozen=True)
class Search:
    """Search the sizes of a design by successive halving, at equal parameters, by the loss on a dev split.

    Example: perspectron search --design perspective2 --space space.toml --tokens 300k,1M --out runs/search

    space.toml has a list of values for each size, such as rank = [16, 32], and for lr and warmup.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "--design", "--space", "--out", "--params", "--tokens", "--data", "--jobs",
    )  # fmt: skip
    design: str
    """Design, or a variant such as "gla[heads=2]"."""
    space: Path
    """TOML file with the values of each size, and of lr and warmup."""
    out: Path
    """Output folder; with the same options as before, the search resumes there."""
    tokens: str = "300k,1M,3M"
    """Tokens of each rung, in increasing order."""
    candidates: int = 27
    """Maximum number of candidates; from a larger space this many are drawn."""
    keep: int = 3
    """One in this many candidates advances to the next rung."""
    params: str = "2M"
    """Active parameters of each candidate, within 2%."""
    data: str = Settings.data
    """Text, as in `compare`."""
    encoding: Encoding = ""
    heldout: float = Settings.heldout
    """Share of the text that is held out and not read."""
    dev: float = Settings.dev
    """Share of the text that is used to choose candidates and not for training."""
    seq_len: SeqLen = Settings.seq_len
    batch_size: BatchSize = Settings.batch_size
    dtype: Literal["auto", "float32", "bfloat16"] = Settings.dtype
    """Autocast for all candidates; "auto" takes bfloat16 if it is measured to be faster."""
    device: Device = Settings.device
    seed: int = 0
    """Seed for drawing from a space larger than --candidates."""
    jobs: Jobs = 1

    def __call__(self) -> int:
        for name in ("candidates", "jobs"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "≥ 1")
        require(self.keep >= 2, "keep", self.keep, "≥ 2")
        require(self.dev > 0, "dev", self.dev, "> 0: candidates are chosen on this split")
        rungs = [count(part, "tokens") for part in between_commas(self.tokens)]
        require(
            rungs == sorted(set(rungs)) and len(rungs) > 0,
            "tokens",
            self.tokens,
            "in increasing order, like 300k,1M,3M",
        )
        begun = (self.out / PLAN).is_file()  # with all by which it is known
        bound = "left out: with one number of tokens every candidate is trained to the end"
        require(begun or len(rungs) > 1 or self.keep == Search.keep, "keep", self.keep, bound)
        space = search.read_space(self.space, self.design)
        everyone = search.candidates(self.design, space, self.candidates, self.seed)
        whole = len(search.candidates(self.design, space, sys.maxsize, 0))
        bound = f"left out: the space has {whole} combinations, all of which are tried"
        require(begun or self.seed == 0 or whole > self.candidates, "seed", self.seed, bound)
        data = absolute(with_encoding(self.data, self.encoding))
        settings = Settings(
            tuple(dict.fromkeys(one.variant for one in everyone)), count(self.params, "params"), rungs[-1], 1,
            data, self.heldout, self.dev, seq_len=self.seq_len, batch_size=self.batch_size,
            dtype=self.dtype, device=self.device, suites=(),
        )  # fmt: skip
        console, refused = progress(), dict[str, ConfigError]()
        models = partial(search.models, tell=refused.__setitem__)
        try:
            with locked(self.out):
                search.settle(self.out, space, rungs, self.keep, self.seed)
                with Work("encoding the text and planning"):
                    what = plan(self.out, "search", settings, models, threads_for(self.jobs))
                for name, why in refused.items():
                    console.print(f"refused {name}: {why}")
                told = (
                    f"{len(everyone)} candidates of {self.design}, {settings.params:,} parameters; rungs of "
                )
                console.print(told + ", ".join(f"{tokens:,}" for tokens in rungs) + " tokens")
                for line in slow(pick_device(settings.device), settings.dtype):
                    console.print(line)
                results = search.halve(
                    self.out, what, everyone, rungs, self.keep,
                    lambda cells: train(self.out, what, cells, self.jobs, console),
                    lambda tokens, lines: console.print(_table(tokens, lines)),
                )  # fmt: skip
        except pool.StoppedBy as stop:
            console.print(f"stopped and saved; resume with the same command, --out {self.out}")
            return 128 + stop.number
        chosen, spent = results["chosen"], results["trained_tokens"]
        console.print(
            f"{len(results['refused'])} refused, {spent:,} tokens in total; results: {self.out / search.RESULTS}"
        )
        print(
            f"{chosen['variant']}  lr {chosen['lr']:g}  warmup {chosen['warmup']:g}  {chosen['dev_bits_per_byte']:.4f}"
        )
        return 0


def _table(tokens: int, lines: list[dict[str, Any]]) -> Table:
    """The best of a rung."""
    table = Table(title=f"{tokens:,} tokens: the best {min(SHOWN, len(lines))} of {len(lines)}")
    for head in ("variant", "lr", "warm-up", "dev bits per byte", "state", "tokens/s"):
        table.add_column(head, justify="left" if head == "variant" else "right", overflow="fold")
    for line in lines[:SHOWN]:
        bits = line["dev_bits_per_byte"]
        table.add_row(
            line["variant"], f"{line['lr']:g}", f"{line['warmup']:.0%}", line["why"] if bits is None else f"{bits:.4f}",
            f"{line['state_bytes']:,}", f"{line['tokens_per_second'] or 0:,.0f}",
        )  # fmt: skip
    return table
