"""`python -m claims`, from the root of a checkout."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from claims import ledger
from claims.claim import Row
from claims.results import Results
from perspectron.util.errors import PerspectronError
from perspectron.util.files import atomic


@dataclass(frozen=True)
class Claims:
    """What the five documents claim in numbers, beside a measurement and a verdict.

    Example: python -m claims --id pdr-flops lens-total

    The whole ledger, as docs/claims.md has it: python -m claims --out docs/claims.md
    """

    id: tuple[str, ...] = ()
    """Claims to measure (default: all)."""
    results: Path = Path("results")
    """Folder with the JSON files that benchmarks and comparisons wrote."""
    out: Path | None = None
    """Markdown file to write."""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> None:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 2 for a user error."""
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    command = tyro.cli(Claims, args=arguments, prog="python -m claims", config=config)
    try:
        command()
    except PerspectronError as error:
        print(f"claims: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
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


if __name__ == "__main__":
    sys.exit(main())
