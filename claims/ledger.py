"""All claims, and docs/claims.md, which is written from them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from claims import adr, drm, lens, pdr, topology
from claims.claim import ABOUT, ROUNDED, VERDICTS, Claim, Row, judge
from claims.results import Results, command
from perspectron.config import one_of
from perspectron.stats import LEVEL

DOCUMENTS: dict[str, tuple[str, tuple[Claim, ...]]] = {
    "pdr": ("Perspective Decay Recurrence", pdr.CLAIMS),
    "topology": ("Model Topology", topology.CLAIMS),
    "adr": ("Attention with Differentiable Recurrence", adr.CLAIMS),
    "lens": ("Lens-gated attention", lens.CLAIMS),
    "drm": ("The DRM language emitter", drm.CLAIMS),
}
COLUMNS = ("id", "where", "claim", "claimed", "measured", "verdict", "command")
HEAD = f"""# The ledger

The quantitative claims of the five documents that this library builds, beside a measurement. Written by
`python -m claims --out docs/claims.md`; only the claims are typed by hand. Where one is in words, the number in
"claimed" is what we take it to mean; "our reading" in "where" marks what no document says in so many words, and
"decisions" what ours say. `python -m claims --id ID` measures one row again. What trains or takes time is read from
`results`, where the command of its row puts it.

A verdict follows from the numbers. A plain whole number has to be met exactly; a rounded one within half a unit of its
last digit or {ROUNDED:.0%}, one with "~" within {ABOUT:.0%}. A claim that fails as written but not under a condition
holds with that condition. What training shows is said of the size that was trained. A difference of losses holds or
fails where the {LEVEL:.0%} interval of its mean over paired seeds lies on one side, and a design that diverged has
failed. Where seeds do not tell, where a number is missing, or where the machine that a claim is about is not here, it
is untestable here. "As built" is no finding: the library took it over from the document, an input, a definition, a
value to start from, or it could not come out otherwise.
"""


def claims(ids: Sequence[str] = ()) -> list[Claim]:
    """All, or those asked for; ConfigError for an unknown one."""
    every = {claim.id: claim for _, own in DOCUMENTS.values() for claim in own}
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
    for name, (title, _) in DOCUMENTS.items():
        yield f"## {name}\n\n{title}, `seeds/{name}.md`.\n"
        cells = [
            [row.id, row.where, row.claim, row.claimed, row.measured, row.judged, f"`{row.command}`"]
            for row in _of(name, rows)
        ]
        yield from _table(COLUMNS, cells)
        yield ""


def _sources(results: Results) -> Iterator[str]:
    """Where the kept results come from."""
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
    """In order."""
    return [judge(claim, results) for claim in wanted]
