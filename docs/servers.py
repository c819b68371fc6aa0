"""The tables of the page on the exactness of servers, from the committed results: python docs/servers.py

It rewrites the tables of docs/exactness.md from results/exactness.json (written by benchmarks/exactness.py). A test
compares them with what it would write.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from perspectron.eval.exactness import digits  # noqa: E402

PAGE, RESULTS = ROOT / "docs" / "exactness.md", ROOT / "results" / "exactness.json"
ENDS = ("<!-- tables -->", "<!-- end of tables -->")
MARKS = {"exact": "exact", "within tolerance": "within tolerance", "not offered": "–", "failed": "failed"}


def cell(row: dict[str, Any] | None) -> str:
    """What came of a question: exact; or how many texts differ, and by how much log-probabilities do."""
    if row is None:
        return ""
    if row["verdict"] in MARKS:
        text = MARKS[row["verdict"]]
    elif row["verdict"] == "same texts":
        text = f"same texts, {digits(row['largest'])}"
    else:
        text = f"**{row['texts']} of {row['compared']} differ**, {digits(row['largest'])}"
    if row["reused"] and row["question"].startswith(("in pieces", "rolled", "restored", "stopped")):
        text += f" ({row['reused'][0] / row['reused'][1]:.0%})"
    return text


def page_of(whole: dict[str, Any]) -> str:
    """The tables, and the first difference of each server and question in full."""
    parts = list[str]()
    for model, its in whole["results"]["models"].items():
        servers, plan = its["servers"], its["plan"]
        names = dict.fromkeys(
            (row["question"], row["way"]) for each in servers.values() for row in each["rows"]
        )
        parts += [f"### {model}", "", f"Prompts of {plan['length']} tokens, answers of {plan['tokens']}.", ""]
        parts += ["| question | " + " | ".join(servers) + " |", "|---" * (1 + len(servers)) + "|"]
        for question, way in names:
            rows = [
                next((row for row in each["rows"] if (row["question"], row["way"]) == (question, way)), None)
                for each in servers.values()
            ]
            parts.append(f"| {question}: {way} | " + " | ".join(map(cell, rows)) + " |")
        parts.append("")
    return "\n".join(parts)


def write_page(path: Path, whole: dict[str, Any]) -> str:
    """The page with its tables as they should be."""
    text = path.read_text(encoding="utf-8")
    start, end = text.index(ENDS[0]) + len(ENDS[0]), text.index(ENDS[1])
    return f"{text[:start]}\n{page_of(whole)}\n{text[end:]}"


if __name__ == "__main__":
    PAGE.write_text(write_page(PAGE, json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
