"""The budget that seeds/topology.md sets for its 1.05 T model, beside a plan of the same."""

from typing import NamedTuple

from perspectron.stream.plan import Case, Needs, Part, Rates

Span = tuple[float, float]


class Claim(NamedTuple):
    """document, here: lowest and highest; here is None where a bandwidth is not known."""

    what: str
    unit: str
    document: Span
    here: Span | None
    where: str

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
    case, from nothing overlapping to everything."""
    parts, state, expert = needed.parts, needed.state, needed.experts[0]
    pdr, gqa = parts["pdr"], parts["window_gqa"]
    sizes = [
        ("PDR matrices", 788, pdr.bytes, "§3.1"),
        ("GQA matrices", 210, gqa.bytes, "§3.1"),
        ("shared FFN", 677, parts["swiglu"].bytes, "§3.1"),
        ("embedding", 131, parts["embedding"].bytes, "§3.1"),
        ("norms, biases", 3.2, parts["norms and biases"].bytes, "§3.1"),
        ("shared, all", 1809, sum(part.bytes for part in parts.values()), "§3.1"),
        ("one expert", 27, expert.read, "§4"),
        ("KV cache", 42, state["window_gqa"].bytes, "§4"),
        ("PDR state", 120, state["pdr"].bytes, "pdr §5.3"),
    ]
    recurrent, windowed = len(needed.experts), len(needed.experts) // 3
    arrives = rates.disk if not any(case.pcie for case in cases) else rates.pcie
    steps = [
        ("PDR, state", 0.07, (_traffic(pdr) + _traffic(state["pdr"])) / recurrent, rates.memory),
        ("routing", 0.01, parts["router"].read / recurrent, rates.memory),
        ("expert arrives", 1.12, expert.shard, arrives),
        ("expert computes", 0.14, expert.read, rates.memory),
        (
            "attention",
            0.15,
            (_traffic(gqa) + _traffic(state["window_gqa"])) / windowed,
            rates.memory,
        ),
        ("shared FFN", 0.20, parts["swiglu"].read / windowed, rates.memory),
        ("output", 0.02, parts["embedding"].read, rates.memory),
    ]
    claims = [Claim(what, "MB", (mb, mb), (b / 1e6, b / 1e6), where) for what, mb, b, where in sizes]
    for what, ms, amount, per_second in steps:
        took = None if not per_second else (1000 * amount / per_second,) * 2
        claims.append(Claim(what, "ms", (ms, ms), took, "§8"))
    speed = cases[0].tokens_per_second(rates) if cases else None
    whole = None if speed is None else (1000 / speed[1], 1000 / speed[0])
    claims.append(Claim("a token", "ms", (70, 80), whole, "§8"))
    claims.append(Claim("tokens/s", "tokens/s", (12, 14), speed, "§8"))
    return claims


def _traffic(part: Part) -> int:
    return part.read + part.written
