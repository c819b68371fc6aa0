"""`python -m claims.keep FOLDER FILE`: the results of a comparison, with what its gates have become, where the ledger
reads them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from claims.measures.gates import gates
from perspectron.compare import measure, results
from perspectron.data.loader import windows
from perspectron.eval.subject import Subject
from perspectron.util.errors import ConfigError
from perspectron.util.files import plain, read_json, write_json

WINDOWS = 8  # of text, in which gates are measured


def main(arguments: Sequence[str]) -> None:
    """Read FOLDER/results.json, measure the gates of every finished cell, and write FILE."""
    folder, file = map(Path, arguments)
    found = read_json(folder / results.RESULTS, ConfigError)
    for name, design in found["designs"].items():
        for cell in design["cells"]:
            done = cell["status"] == "finished"
            at = folder / "cells" / name / str(cell["seed"])
            cell["gates"] = plain(_of_text(measure.opened(at))) if done else {}
    write_json(file, found)


def _of_text(subject: Subject) -> dict[str, Any]:
    """Gates in windows from all over the held-out text."""
    tokens = WINDOWS * subject.seq_len + 1
    batch = next(
        windows(subject.text, seq_len=subject.seq_len, batch_size=WINDOWS, limit_tokens=tokens, spread=True)
    )
    return gates(subject.model, batch.ids_BT.to(subject.model.device))


if __name__ == "__main__":
    main(sys.argv[1:])
