"""The budget that seeds/topology.md sets for its 1.05 T model, beside a plan of the same."""

from typing import NamedTuple

from perspectron.claims import ledger, topology
from perspectron.stream.plan import Case, Needs, Part, Rates

Span = tuple[float, float]


class Claim(NamedTuple):
    """document, here: lowest and highest; here is None where a bandwidth is not known."""

    what: str
    unit: str
    document: Span
    where: str
    here: Span | None

    @property
    def difference(self) -> float | None:
        """Of the middle of ours from the nearer end of theirs, as a share of that; 0 inside."""
        if self.here is None:
            return None
        middle, (low, high) = sum(self.here) / 2, self.document
        end = min(max(middle, low), high)
        return middle / end - 1

    def shown(self) -> tuple[str, ...]:
        difference = self.difference
        return (
            f"{self.what}, {self.unit}" if self.unit != self.what else self.what,
            _span(self.document),
            "-" if self.here is None else _span(self.here),
            "-" if difference is None else f"{difference:+,.1%}",
            self.where,
        )


def _span(span: Span) -> str:
    low, high = (f"{v:,.0f}" if v >= 100 else f"{v:.1f}" if v >= 10 else f"{v:.3f}" for v in span)
    return low if low == high else f"{low} to {high}"


def document(needed: Needs, rates: Rates, cases: list[Case]) -> list[Claim]:
    """Bytes by part, milliseconds by step where reading its bytes is all it takes, and tokens per second of the first
    case, from nothing overlapping to everything. What the document says is the ledger's."""
    parts, state, expert = needed.parts, needed.state, needed.experts[0]
    pdr, gqa = parts["pdr"], parts["window_gqa"]
    sizes: list[tuple[str, int, tuple[str, ...]]] = [
        ("PDR matrices", pdr.bytes, ("topology-pdr-bytes",)),
        ("GQA matrices", gqa.bytes, ("topology-gqa-bytes",)),
        ("shared FFN", parts["swiglu"].bytes, ("topology-ffn-bytes",)),
        ("embedding", parts["embedding"].bytes, ("topology-embedding-bytes",)),
        (
            "norms, biases",
            parts["norms and biases"].bytes,
            ("topology-pdr-norm-bytes", "topology-gqa-norm-bytes"),
        ),
        ("shared, all", sum(part.bytes for part in parts.values()), ("topology-shared-bytes",)),
        ("one expert", expert.read, ("topology-expert-bytes",)),
        ("KV cache", state["window_gqa"].bytes, ("topology-cache",)),
        ("PDR state", state["pdr"].bytes, ("pdr-total-state",)),
    ]
    recurrent, windowed = len(needed.experts), len(needed.experts) // 3
    arrives = rates.disk if not any(case.pcie for case in cases) else rates.pcie
    steps = [
        ("PDR, state", "pdr", (_traffic(pdr) + _traffic(state["pdr"])) / recurrent, rates.memory),
        ("routing", "route", parts["router"].read / recurrent, rates.memory),
        ("expert arrives", "arrives", expert.shard, arrives),
        ("expert computes", "experts", expert.read, rates.memory),
        ("attention", "gqa", (_traffic(gqa) + _traffic(state["window_gqa"])) / windowed, rates.memory),
        ("shared FFN", "shared_ffn", parts["swiglu"].read / windowed, rates.memory),
        ("output", "output", parts["embedding"].read, rates.memory),
    ]
    claims = [Claim(what, "MB", *_given(*ids), (b / 1e6, b / 1e6)) for what, b, ids in sizes]
    for what, step, amount, per_second in steps:
        took = None if not per_second else (1000 * amount / per_second,) * 2
        claims.append(Claim(what, "ms", (topology.MS[step],) * 2, "§8", took))
    speed = cases[0].tokens_per_second(rates) if cases else None
    whole = None if speed is None else (1000 / speed[1], 1000 / speed[0])
    claims.append(Claim("a token", "ms", *_given("topology-ms-token"), whole))
    claims.append(Claim("tokens/s", "tokens/s", *_given("topology-speed"), speed))
    return claims


def _given(*ids: str) -> tuple[Span, str]:
    """(the sum of what some claims say, where)."""
    found = ledger.claims(ids)
    spans = [claim.range.given for claim in found]
    document, where = found[0].id.partition("-")[0], found[0].where
    low, high = (sum(ends) for ends in zip(*spans, strict=True))
    return (low, high), where if document == "topology" else f"{document} {where}"


def _traffic(part: Part) -> int:
    return part.read + part.written
