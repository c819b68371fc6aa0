"""`perspectron lens prune-attention`."""

from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from rich.table import Table

from perspectron.cli.options import Json, answer, table
from perspectron.cli.progress import Work
from perspectron.designs.lens.prune import prune, route_gates
from perspectron.opening import describe, open_model
from perspectron.train import checkpoint
from perspectron.train.heldout import heldout
from perspectron.util.config import require


@dataclass(frozen=True)
class PruneAttention:
    """Remove attention and its cache from the blocks whose route gate weighs it least.

    Prints held-out loss and cache bytes for every number of blocks, and exports the model without N of them as a new
    run.

    Example: perspectron lens prune-attention runs/lens --blocks 2

    The table alone: perspectron lens prune-attention runs/lens
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run whose blocks have route gates (lens-*)."""
    blocks: int | None = None
    """Number of blocks to export without attention, those with the lowest g."""
    out: Path | None = None
    """Folder of the exported run (default: RUN-without-N)."""
    context: int = 1024
    """Context length at which the cache is measured."""
    tokens: int = 0
    """Number of held-out tokens to measure the loss on; 0 is all."""
    json: Json = False

    def __call__(self) -> int:
        require(self.context >= 1, "context", self.context, "≥ 1")
        require(self.tokens >= 0, "tokens", self.tokens, "≥ 0")
        require(
            self.blocks is not None or self.out is None, "out", str(self.out), "left out without --blocks"
        )
        config = describe(self.run).of_run()
        opened = open_model(self.run)
        model, tokenizer = opened.model, opened.tokenizer
        gates = route_gates(model)
        whole = opened.folder.path
        whole = whole if whole.name not in ("", "..") else whole.resolve()
        out = self.out or whole.with_name(f"{whole.name}-without-{self.blocks}")
        require(self.blocks is None or not out.exists(), "out", str(out), "a new folder")
        split = opened.shards(opened.folder.path).split("heldout")
        rows = []
        # A model keeps count of its tokens by a mixer or by learned positions.
        most = len(gates) - (model.config.positions == 0 and len(gates) == len(model.config.blocks))
        if self.blocks is not None:
            require(1 <= self.blocks <= most, "blocks", self.blocks, f"from 1 to {most}")
        with Work("measuring the held-out loss") as work:
            for n in range(most + 1):
                work.tell(n, most + 1)
                pruned = prune(model, [index for _, index in gates[:n]])
                loss = heldout(
                    pruned,
                    split,
                    tokenizer,
                    seq_len=config.train.seq_len,
                    limit_tokens=self.tokens or None,
                    dtype=opened.folder.dtype,
                ).bits_per_byte
                cache = pruned.init_state(1, capacity=self.context).nbytes
                g, block = gates[n - 1] if n else (None, None)
                rows.append(
                    {"removed": n, "block": block, "g": g, "bits_per_byte": loss, "cache_bytes": cache}
                )
                if n and n == self.blocks:
                    progress = checkpoint.Progress(heldout=loss)
                    exported = replace(config, model=pruned.config)
                    checkpoint.export(out, exported, tokenizer, pruned, progress)
        exported_to = str(out) if self.blocks is not None else None
        fields = {"context": self.context, "rows": rows, "exported": exported_to}
        lines = [f"exported without attention in {self.blocks} blocks: {exported_to}"] if exported_to else []
        return answer(self.json, fields, _table(rows, self.context), *lines)


def _table(rows: list[dict[str, int | float | None]], context: int) -> Table:
    title = f"attention removed block by block, lowest route gate first (cache at {context:,} tokens)"
    lines = []
    for row in rows:
        g, block = row["g"], row["block"]
        shown = ("", "") if g is None else (str(block), f"{g:.3f}")
        lines.append((str(row["removed"]), *shown, f"{row['bits_per_byte']:.3f}", f"{row['cache_bytes']:,}"))
    return table(title, ("removed", "block", "g", "held-out bits per byte", "cache bytes"), lines)
