"""`perspectron perspective adapt`."""

import math
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import tyro

from perspectron.cli.options import Json, answer, open_model, table
from perspectron.cli.progress import Work
from perspectron.data import Tokenizer
from perspectron.data.reading import read_tokens
from perspectron.data.specials import Specials
from perspectron.decode.reading import CHUNK
from perspectron.designs.perspective.adapt import AdaptConfig, Adapter, AdapterConfig, Learner, merge
from perspectron.designs.perspective.adapt.adapter import gates
from perspectron.designs.perspective.adapt.gradient import Piece, losses
from perspectron.designs.perspective.adapt.positions import least, search
from perspectron.eval.reading import bits_per_byte, byte_counts
from perspectron.model.model import LanguageModel
from perspectron.opening import Opened, describe
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig
from perspectron.util.config import require
from perspectron.util.errors import DataError


@dataclass(frozen=True)
class Adapt:
    """Learn from a text while reading it: train a small adapter of the gates and save it to a file.

    Prints the text's bits per byte with and without the adapter; every token is scored before it is learned from.

    Example: perspectron perspective adapt runs/routed --text other.txt

    On: perspectron perspective adapt runs/routed --text letters.txt --adapter runs/routed/adapter.safetensors

    As a new run: perspectron perspective adapt runs/routed --text other.txt --merge runs/adapted

    Positions instead: perspectron perspective adapt runs/routed --text other.txt --positions --merge runs/moved"""

    FIRST: ClassVar[tuple[str, ...]] = (
        "--text", "--adapter", "--out", "--merge", "--positions", "--tokens", "--json",
    )  # fmt: skip
    run: tyro.conf.Positional[Path]
    """Folder of a run with PDR layers, or of one of its checkpoints."""
    text: Path
    """Text to learn from."""
    adapter: Path | None = None
    """Continue with this saved adapter, which has its own rank, layers and seed."""
    new: AdapterConfig = field(default_factory=AdapterConfig)
    learning: AdaptConfig = field(default_factory=AdaptConfig)
    out: Path | None = None
    """File of the adapter (default: RUN/adapter.safetensors)."""
    merge: Path | None = None
    """Folder for a new run: the model with the adapter merged into its weights."""
    positions: bool = False
    """Move the positions of experts towards the text instead of learning an adapter; needs --merge, and takes no option
    of an adapter."""
    tokens: int = 0
    """Number of tokens to read; 0 is all."""
    json: Json = False

    def __call__(self) -> int:
        require(self.merge is None or not self.merge.exists(), "merge", str(self.merge), "a new folder")
        self._check_adapter()
        if not self.positions:
            self._check_tokens(self.learning.every, " = every")
        config = describe(self.run).of_run()
        opened = open_model(self.run)
        model, tokenizer = opened.model, opened.tokenizer
        if self.positions:
            return self._move(opened, config)
        gates(model)  # whether it has any, before the text is read
        text = read_tokens(self.text, tokenizer, self.tokens)
        if len(text) < self.learning.every:
            raise DataError(
                f"{self.text}: {len(text)} tokens, need at least every = {self.learning.every} to learn from"
            )
        adapter = Adapter(model, self.new) if self.adapter is None else Adapter.load(self.adapter, model)
        with opened.autocast(), Work("reading the text") as work:
            start = time.perf_counter()
            plain = unadapted(model, text, tokenizer.specials)
            read = time.perf_counter() - start
            learner, parts = Learner(model, adapter, self.learning, special=tokenizer.specials), []
            start = time.perf_counter()
            whole = self.learning.every * max(1, CHUNK // self.learning.every)  # updates end where reads do
            for at in range(0, len(text), whole):
                work.tell(at, len(text))
                parts.append(learner.read(text[at : at + whole]))
            learned = time.perf_counter() - start
        out = self.out or opened.folder.path / "adapter.safetensors"
        adapter.detach(learner.state)  # its traces
        adapter.save(out)
        lines = [f"adapter: {out}, {out.stat().st_size:,} bytes"]
        if self.merge is not None:
            made = merge(model, adapter)
            exported = replace(config, model=made.config)
            checkpoint.export(self.merge, exported, tokenizer, made, checkpoint.Progress())
            lines.append(f"merged into {self.merge}")
        nats = torch.cat([part.nats for part in parts])
        before, after = (in_bits(tokenizer, text, each) for each in (plain, nats))
        counters = {
            name: sum(getattr(p, name) for p in parts) for name in ("updates", "rollbacks", "skipped")
        }
        fields = {
            "tokens": len(text),
            "bits_per_byte": {"without": before, "with": after},
            **counters,
            "tokens_per_second": {"without": len(text) / read, "with": len(text) / learned},
            "numbers": adapter.size,
            "config": asdict(adapter.config),
            "adapter": str(out),
            "merged": None if self.merge is None else str(self.merge),
        }
        rows = [
            ("without", f"{before:.4f}", f"{len(text) / read:,.0f}"),
            ("learning", f"{after:.4f}", f"{len(text) / learned:,.0f}"),
        ]
        title = f"{self.text}: {len(text):,} tokens, {adapter.size:,} numbers in the adapter"
        told = ", ".join(f"{count} {name}" for name, count in counters.items())
        return answer(self.json, fields, table(title, ("", "bits per byte", "tokens/s"), rows), told, *lines)

    def _check_adapter(self) -> None:
        """ConfigError: an option of a new adapter beside a saved one; with positions, any option of an adapter, or no
        new folder."""
        if not self.positions:
            if self.adapter is not None:
                why = f"left out with --adapter: those of {self.adapter} apply"
                without(vars(self.new), AdapterConfig(), why)
            return
        require(self.merge is not None, "merge", None, "a new folder, for a model with other positions")
        why = "left out with --positions, which make no adapter"
        for name, path in (("adapter", self.adapter), ("out", self.out)):
            require(path is None, name, str(path), why)
        without(vars(self.new), AdapterConfig(), why)
        without(vars(self.learning), AdaptConfig(), why)

    def _check_tokens(self, enough: int, why: str) -> None:
        """ConfigError: what is to be read is too little to learn from, whatever the text."""
        require(self.tokens == 0 or self.tokens >= enough, "tokens", self.tokens, f"0 or ≥ {enough}{why}")

    def _move(self, opened: Opened, config: RunConfig) -> int:
        """Search positions, and write the run that has them."""
        assert self.merge is not None
        model, tokenizer = opened.model, opened.tokenizer
        self._check_tokens(least(tokenizer.specials), ", for a step")
        ids = read_tokens(self.text, tokenizer, self.tokens)
        with opened.autocast(), Work("searching positions"):
            steps = search(model, ids, special=tokenizer.specials)
        checkpoint.export(self.merge, config, tokenizer, model, checkpoint.Progress())
        ties = sum(step.ties for step in steps) / len(steps)
        kept = [step for step in steps if step.accepted]
        rows = [
            (str(s.block), f"{s.before:.4f}", f"{s.after:.4f}", "yes" if s.accepted else "no")
            for s in steps[-20:]
        ]
        fields = {
            "tokens": len(ids),
            "steps": [asdict(step) for step in steps],
            "ties": ties,
            "merged": str(self.merge),
        }
        shown = table("nats of fresh tokens, the last 20 steps", ("block", "before", "after", "kept"), rows)
        told = f"{len(kept)} of {len(steps)} steps kept; {ties:.0%} of trials lost exactly as much as another"
        return answer(self.json, fields, shown, told, f"merged into {self.merge}")


def without(given: dict[str, Any], usual: AdapterConfig | AdaptConfig, why: str) -> None:
    """ConfigError for the first value that is not the usual one."""
    for name, value in given.items():
        require(value == getattr(usual, name), name, value, why)


def unadapted(model: LanguageModel, text: list[int], special: Specials) -> torch.Tensor:
    """Nats of each token of a document, by the model as it is; none of the first without a prefix or an end."""
    state, nats = model.init_state(1), [torch.empty(0, dtype=torch.float64)]
    ids = [*special.start, *text]
    with torch.no_grad():
        for at in range(0, len(ids) - 1, CHUNK):
            part, state = losses(model, Piece(ids[at : at + CHUNK + 1], state, at == 0, special.reset))
            nats.append(part[0].double().cpu())
    return torch.cat(nats)


def in_bits(tokenizer: Tokenizer, text: list[int], nats: torch.Tensor) -> float:
    """Bits per byte of the tokens that have nats, a text's last; NaN for a text without a byte."""
    nats = nats[-len(text) :]  # without those of a prefix of several ids
    found = bits_per_byte(nats, byte_counts(tokenizer, torch.tensor(text[len(text) - len(nats) :])))
    return found if math.isfinite(found) else math.nan
