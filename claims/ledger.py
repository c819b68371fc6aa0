"""All claims, and docs/claims.md, which is written from them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from claims import adr, drm, lens, pdr, topology
from claims.claim import ABOUT, ROUNDED, VERDICTS, Claim, Row, judge
from claims.results import Results, command
from perspectron.util.config import one_of
from perspectron.util.stats import LEVEL


class Document(NamedTuple):
    """One of the five documents. page: ours about it, from `docs`."""

    title: str
    page: str
    claims: tuple[Claim, ...]


DOCUMENTS = {
    "pdr": Document("Perspective Decay Recurrence", "designs/perspective.md#the-recurrence", pdr.CLAIMS),
    "topology": Document("The Perspective model", "designs/perspective.md#stack", topology.CLAIMS),
    "adr": Document("Attention with Differentiable Recurrence", "designs/adr.md", adr.CLAIMS),
    "lens": Document("Lens-gated attention", "designs/lens.md", lens.CLAIMS),
    "drm": Document("The DRM language emitter", "designs/drm.md", drm.CLAIMS),
}
COLUMNS = ("id", "where", "claim", "claimed", "measured", "verdict", "command")
HEAD = f"""# The ledger

The quantitative claims of the five documents that this library implements, each next to a measurement. This page is
written by `python -m claims --out docs/claims.md`; only the claims are typed by hand. `python -m claims --id ID`
measures one row again. Measurements that need training or take long are read from `results`, where the row's command
puts them.

"where" is the section of the source document, which our page about the design describes, or the section of our page
that makes the claim. "our reading" marks claims that no document states literally. If a claim is made in words, the
number in "claimed" is our interpretation.

A verdict follows from the numbers:

- A plain whole number must be matched exactly, a rounded one within half a unit of its last digit or {ROUNDED:.0%}, one
  with "~" within {ABOUT:.0%}.
- A claim that fails as written but is true under a condition holds with that condition.
- Training results apply to the size that was trained. A difference of losses holds or fails where the
  {LEVEL:.0%} interval of its mean over paired seeds lies on one side of zero. A design that diverged fails.
- A claim is "untestable here" if the seeds do not decide it, a number is missing, or it needs a machine we do not have.
- "As built" is not a finding: the library takes the value from the document (an input, a definition, an initial value),
  or it could not be otherwise.
"""


def claims(ids: Sequence[str] = ()) -> list[Claim]:
    """All, or those asked for; ConfigError for an unknown one."""
    every = {claim.id: claim for document in DOCUMENTS.values() for claim in document.claims}
    return [every[one_of(id, every, "id")] for id in ids] if ids else list(every.values())


def markdown(rows: Sequence[Row], results: Results) -> str:
    """The whole ledger."""
    return "\n".join([HEAD, *_summary(rows), "", *_tables(rows), *_sources(results)]) + "\n"


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    yield from _table(("document", "claims", *VERDICTS), [_counts(name, rows) for name in DOCUMENTS])
    total = Counter(row.verdict for row in rows)
    yield _line(["**all**", f"**{len(rows)}**", *(f"**{total[verdict]}**" for verdict in VERDICTS)])


def _counts(name: str, rows: Sequence[Row]) -> list[str]:
    own = Counter(row.verdict for row in _of(name, rows))
    return [f"[{name}](#{name})", str(own.total()), *(str(own[verdict]) for verdict in VERDICTS)]


def _of(name: str, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.id.startswith(f"{name}-")]


def _tables(rows: Sequence[Row]) -> Iterator[str]:
    for name, document in DOCUMENTS.items():
        yield f"## {name}\n\n{document.title}: [how it works, and what we decided]({document.page}).\n"
        cells = [
            [row.id, row.where, row.claim, row.claimed, row.measured, row.judged, f"`{row.command}`"]
            for row in _of(name, rows)
        ]
        yield from _table(COLUMNS, cells)
        yield ""


def _sources(results: Results) -> Iterator[str]:
    """The conditions of the kept results: commit and machine."""
    yield "## Kept results\n"
    rows = []
    for name, kept in results:
        conditions = kept.get("conditions", {})
        machine = conditions.get("cpu") or conditions.get("machine") or ""
        told = [str(conditions.get("threads", "")), ", ".join(results.commits(name))]
        date = conditions.get("date") or conditions.get("started") or ""
        rows.append([f"{name}.json", str(machine), *told, str(date), f"`{command(name)}`"])
    yield from _table(("file", "machine", "threads", "commit", "date", "command"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _line(header)
    yield _line(["---"] * len(header))
    yield from map(_line, rows)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def measured(wanted: Sequence[Claim], results: Results) -> list[Row]:
    """The measurements, in order."""
    return [judge(claim, results) for claim in wanted]
