"""`perspectron drm geometry`."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from perspectron.cli.options import Json, answer, open_model, shown
from perspectron.cli.progress import Work
from perspectron.compare.report.page import Section, rendered
from perspectron.data.reading import read_tokens
from perspectron.designs.drm.geometry import RING, Options, measure, mixer_of
from perspectron.opening import Opened
from perspectron.util.files import plain, write_json, write_text
from perspectron.util.page import Cell
from perspectron.util.page import Table as PageTable
from perspectron.util.plot import Chart, Line, draw

PAGE, RESULTS = "geometry.html", "geometry.json"
SIDES = {False: "contradicts the document", True: "supports it"}
LOCAL = {
    "action": ("action", "vᵀGv of a token"),
    "speed": ("speed", "|v|"),
    "active": ("active dimension", "Σa"),
    "gate_entropy": ("entropy of a gate", "bits"),
    "condition": ("condition", "of the metric, from eigenvalues"),
    "condition_bound": ("its bound", "(max d + ‖U‖²) / min d"),
    "outside": ("outside", "share of |v|² outside the directions"),
    "radius": ("radius", "|z| / R"),
}


@dataclass(frozen=True)
class GeometryOf:
    """Look at how a DRM moves: its action, geometry and dynamics on a text, as one page that opens offline.

    Example: perspectron drm geometry runs/drm --tokens 3000 --steps 500

    Writes RUN/geometry.html and RUN/geometry.json.
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run of drm or drm2, or of one of its checkpoints."""
    text: Path | None = None
    """Text to read (default: the run's held-out text)."""
    options: Options = field(default_factory=Options)
    out: Path | None = None
    """Folder for page and numbers (default: the run's)."""
    json: Json = False

    def __call__(self) -> int:
        opened = open_model(self.run)
        mixer_of(opened.model)  # whether there is one, before the text is read
        with Work("reading the text"):
            ids = self._ids(opened)
        with Work("measuring"):
            results = measure(opened.model, ids, self.options)
        out = self.out or opened.folder.path
        write_json(out / RESULTS, plain(results))
        write_text(out / PAGE, page(results))
        said = [f"{SIDES[good]}: {line}" for good, line in findings(results)]
        return answer(self.json, results, *said, shown(numbers(results)), f"page: {out / PAGE}")

    def _ids(self, opened: Opened) -> list[int]:
        """The text as one document."""
        if self.text is not None:
            return read_tokens(self.text, opened.tokenizer, self.options.tokens)
        with tempfile.TemporaryDirectory() as scratch:
            split = opened.shards(Path(scratch)).split("heldout")
            ids = split.read(0, min(split.tokens, 2 * self.options.tokens)).tolist()
        return [id for id in ids if id not in opened.tokenizer.specials.silent][: self.options.tokens]


def findings(results: dict[str, Any]) -> list[tuple[bool, str]]:
    """Findings in sentences, each with whether it speaks for the document: first those that do not."""
    paths, torus, near, mixed = (
        results["paths"],
        results["torus"],
        results["recurrence"]["text"],
        results["recurrence"]["shuffled"],
    )
    lyapunov, bounds, local = results["lyapunov"], results["bounds"], results["local"]
    over, relaxed = paths["model_over_straight"], paths["model_over_relaxed"]
    low = relaxed["high"] <= 1.1
    signs = sum(plane["sign"] for plane in torus["planes"])
    more = near["determinism"] - mixed["determinism"]
    wound = torus["verdict"] == "consistent with"
    steady = lyapunov["exponent"] < 0 and lyapunov["noisy"] < 0
    told = [
        (
            low,
            f"Its paths are {'' if low else 'not '}of low action: over {paths['span']} tokens they take "
            f"{over['median']:.3g} times the action of a straight line ({over['low']:.3g} to {over['high']:.3g}) and "
            f"{relaxed['median']:.3g} times that of a relaxed path.",
        ),
        (
            wound,
            f"{'Consistent with' if wound else 'No sign of'} a torus. {signs} of {len(torus['planes'])} planes turn "
            "more with the text than with shuffled tokens, and keep away from their middle.",
        ),
        (
            more > 0.05,
            f"Its motion recurs {'more' if more > 0.05 else 'no more'} in step than with shuffled tokens: "
            f"{near['determinism']:.0%} of recurrent points stand on diagonals, {mixed['determinism']:.0%} when "
            "shuffled.",
        ),
        (
            steady,
            f"The largest Lyapunov exponent is {lyapunov['exponent']:+.3f} nats a token ({lyapunov['noisy']:+.3f} with "
            f"weights 1% off): two states that read the same text {'come together' if steady else 'drift apart'}.",
        ),
        (
            bounds["max"] < 0.95,
            f"The state is bounded by construction; it stays within {bounds['max']:.0%} of the radius "
            f"({bounds['most']:.0%} for 99.9% of tokens).",
        ),
    ]
    if "outside" in local:
        inside = local["outside"]["mean"] < 1e-6
        told.append((
            inside,
            f"{local['outside']['mean']:.2%} of |v|² lies outside the span of the directions.",
        ))  # fmt: skip
    return sorted(told, key=lambda pair: pair[0])


def numbers(results: dict[str, Any]) -> PageTable:
    """The local numbers as a table."""
    rows = []
    for name, words in LOCAL.items():
        if (found := results["local"].get(name)) is not None:
            rows.append([Cell(*words), *(Cell(f"{found[key]:.3g}") for key in ("mean", "low", "high"))])
    return PageTable(
        "At tokens of the text: mean, and the middle 90%", ("number", "mean", "from", "to"), rows
    )


def page(results: dict[str, Any]) -> str:
    """The results as an HTML page."""
    (_, first), *_ = found = findings(results)
    paths, lyapunov = results["paths"], results["lyapunov"]
    ratios = [
        [Cell(*words), *(Cell(f"{paths[key][at]:.3g}") for at in ("median", "low", "high"))]
        for key, words in (
            ("model_over_straight", ("model / straight", "its own path over a straight line")),
            ("model_over_relaxed", ("model / relaxed", "its own path over a relaxed one")),
            ("relaxed_over_straight", ("relaxed / straight", "a relaxed path over a straight line")),
        )
    ]
    said = (
        f"{paths['pairs']} pairs of states {paths['span']} tokens apart. A relaxed path is a straight line after "
        "gradient descent on the discrete energy Σ Δzᵀ G Δz with fixed ends; it need not be a geodesic."
    )
    sections = [
        Section("findings", "Findings", tables=[_findings(found)]),
        Section(
            "paths",
            "Low-action paths",
            said,
            tables=[PageTable("Ratios of action: median, 95% interval", ("paths", "median", "from", "to"), ratios)],
        ),
        Section("torus", "Torus", _torus_note(results), _histograms(results), [_planes(results)]),
        Section("dynamics", "Recurrence and stability", _dynamics_note(results), facts=_dynamics(results)),
        Section("local", "Geometry at tokens", tables=[numbers(results)]),
        *([_coupling(results)] if results["coupling"] else []),
        Section(
            "conditions",
            "Conditions",
            facts=[
                ("model", results["model"]), ("tokens read, as one document", f"{results['tokens']:,}"),
                ("coordinates", f"{results['state']:,}"), ("directions", f"{results['directions']:,}"),
                ("tokens of the Lyapunov exponent", f"{lyapunov['tokens']:,}"),
            ],
        ),
    ]  # fmt: skip
    return rendered(f"The geometry of {results['model']}", first, sections)


def _findings(found: list[tuple[bool, str]]) -> PageTable:
    rows = [[Cell(SIDES[good]), Cell(line)] for good, line in found]
    return PageTable("What speaks against the document, and what for it", ("side", "finding"), rows, (0, 1))


def _torus_note(results: dict[str, Any]) -> str:
    return (
        "Planes of the leading principal components of the state. A plane is a sign of a circle where the net turns of "
        "the text exclude zero and those of shuffled tokens, and where the path keeps away from the middle (the 1% "
        f"quantile of its distance is at least {RING:g} of the mean). Two such planes are consistent with a torus; "
        "they would not prove one."
    )


def _planes(results: dict[str, Any]) -> PageTable:
    rows = []
    for place, plane in enumerate(results["torus"]["planes"]):
        cells = [
            Cell(f"{plane[of]['turns']:+.2f}", f"{plane[of]['low']:+.2f} to {plane[of]['high']:+.2f}")
            for of in ("text", "shuffled")
        ]
        sign = Cell("yes" if plane["sign"] else "no")
        rows.append(
            [Cell(f"{2 * place + 1} and {2 * place + 2}"), *cells, Cell(f"{plane['text']['ring']:.2f}"), sign]
        )
    head = ("components", "text", "shuffled tokens", "least distance", "sign of a circle")
    return PageTable("Net turns for each 1,000 tokens, with their 95% interval", head, rows)


def _histograms(results: dict[str, Any]) -> list[str]:
    """The angle between neighbouring tokens in the first plane."""
    plane, lines = results["torus"]["planes"][0], []
    for style, (of, name) in enumerate((("text", "text"), ("shuffled", "shuffled tokens")), 1):
        bins = plane[of]["histogram"]
        width = 360 / len(bins)
        lines.append(
            Line(name, [(-180 + width * (i + 0.5), 100 * share) for i, share in enumerate(bins)], style)
        )
    chart = Chart("Angle from token to token, first plane", "degrees", "% of tokens", lines)
    return [draw([chart], slug="angles-")]


def _dynamics_note(results: dict[str, Any]) -> str:
    return (
        "Points are recurrent when they are nearer than a radius that makes it 5% of all pairs (pairs within 16 tokens "
        "left out). Determinism is the share of recurrent points on diagonals of four or more: stretches that go the "
        "same way twice. The exponent is the mean growth of a tangent carried along the text."
    )


def _dynamics(results: dict[str, Any]) -> list[tuple[str, str]]:
    text, mixed, lyapunov, bounds = (
        results["recurrence"]["text"], results["recurrence"]["shuffled"], results["lyapunov"], results["bounds"],
    )  # fmt: skip
    return [
        ("determinism, text", f"{text['determinism']:.1%}"),
        ("determinism, shuffled tokens", f"{mixed['determinism']:.1%}"),
        ("radius of 5% recurrence", f"{text['radius']:.3g} (shuffled {mixed['radius']:.3g})"),
        ("Lyapunov exponent", f"{lyapunov['exponent']:+.4f} nats a token"),
        ("with weights 1% off", f"{lyapunov['noisy']:+.4f} nats a token"),
        ("largest |z| / R", f"{bounds['max']:.3f}"),
        ("99.9% of |z| / R below", f"{bounds['most']:.3f}"),
    ]


def _coupling(results: dict[str, Any]) -> Section:
    """Mean coupling as squares, and the eigenvalues."""
    C, eigen = results["coupling"]["mean"], results["coupling"]["eigenvalues"]
    side, size = len(C), 18
    squares = "".join(
        f'<rect x="{j * size}" y="{i * size}" width="{size - 1}" height="{size - 1}" fill="var(--s1)" '
        f'fill-opacity="{min(1.0, C[i][j]):.3f}"><title>{i}, {j}: {C[i][j]:.2f}</title></rect>'
        for i in range(side)
        for j in range(side)
    )
    name = "Mean coupling of directions, from 0 (empty) to 1 (full)"
    svg = (
        f'<svg viewBox="0 0 {side * size} {side * size}" role="img" aria-label="{name}" style="max-width:420px">'
        f"<title>{name}</title>{squares}</svg>"
    )
    line = Line("eigenvalue", [(i + 1, value) for i, value in enumerate(eigen)], 1)
    chart = draw(
        [Chart("Eigenvalues of VVᵀ, mean over tokens", "number", "eigenvalue", [line])], slug="eigen-"
    )
    note = (
        f"Mean |C_ij| of two different directions, scaled to a diagonal of 1: "
        f"{results['coupling']['off_diagonal']:.2f}. Orthogonal directions would have 0, and all eigenvalues 1."
    )
    return Section("coupling", "Coupling of directions", note, [svg, chart])
