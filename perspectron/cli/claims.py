"""`perspectron claims`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from perspectron.claims import ledger
from perspectron.claims.claim import Row
from perspectron.claims.results import Results
from perspectron.files import atomic


@dataclass(frozen=True)
class Claims:
    """What the five documents claim in numbers, beside what is measured, and a verdict.

    Example: perspectron claims --id pdr-flops lens-total

    All of them, as docs/claims.md has them: perspectron claims --out docs/claims.md
    """

    id: tuple[str, ...] = ()
    """Of the claims to measure; all if not given."""
    results: Path = Path("docs/results")
    """Folder with what benchmarks and comparisons measured, as JSON."""
    out: Path | None = None
    """Markdown file to write."""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        results = Results(self.results)
        rows = ledger.measured(ledger.claims(self.id), results)
        if self.out is not None:
            with atomic(self.out) as path:
                path.write_text(ledger.markdown(rows, results), encoding="utf-8")
        if self.json:
            print(json.dumps({"claims": [asdict(row) for row in rows]}))
        elif self.out is None:
            print("\n\n".join(map(_text, rows)))
        else:
            print(f"{self.out}: {len(rows)} claims")
        return 0


def _text(row: Row) -> str:
    """A row for a person at the terminal."""
    return "\n".join(
        [
            f"{row.id} ({row.where}): {row.claim}",
            f"   claimed: {row.claimed}",
            f"  measured: {row.measured}",
            f"   verdict: {row.judged}",
            f"   command: {row.command}",
        ]
    )
