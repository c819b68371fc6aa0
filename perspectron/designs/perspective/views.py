"""Decoding from several viewpoints: one model under other routings says how sure its next token is
(docs/designs/perspective.md#viewpoints).

A token that the model is unsure of is read again, from the state before it, as further rows of one batch in which each
row chooses its experts from another view. The model's own state and logits are never touched.

Shapes: N tokens or rows, P perspectives with the base first, V vocabulary, D model width, T time. Probabilities and
logarithms are float64; disagreement and information are in bits.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from perspectron.decode.reading import read
from perspectron.experts.router import DRAWN, VIEWS, RoutedConfig, View, Views
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState, Stateful
from perspectron.util.config import at_least, dump, load, one_of, require
from perspectron.util.errors import ConfigError, NonFiniteError
from perspectron.util.files import read_json, write_json
from perspectron.util.streams import philox

KINDS = ("base", *VIEWS[1:])
SURROGATES = ("base", "noise", "temperature", "mask")
FORMAT = "perspectron-perspectives-1"
NOISE, WARM, MASKED = 0.5, 2.0, 0.1  # of the surrogates: of logits, times T, share of channels


@dataclass(frozen=True)
class PerspectivesConfig:
    """The perspectives that there are, when they are asked, and what follows from their answers.

    kinds: "base" first; one that comes again draws by another seed. trigger_p, trigger_entropy, every: the perspectives
    are asked where the likeliest token has less probability, the entropy is above so many nats, or the position in the
    document is a multiple (0: off). probe, trigger_probe: and where what the head reads has a greater product with
    these D numbers (none: off). threshold: of disagreement, in bits. temperature, base_temperature: of the mixture
    and of the base where they become a confidence. from_layer: layers below route as ever. gate: of a "soft" router.
    persistent: the perspectives keep states of their own, and read all tokens. surrogate: of a model without experts,
    noise on logits, a temperature and a mask on what the head reads stand in for views. seed: of what is drawn.
    """

    kinds: tuple[str, ...] = ("base", "second", "antipode", "random")
    trigger_p: float = 0.6
    trigger_entropy: float = 3.0
    every: int = 0
    probe: tuple[float, ...] = field(default=(), repr=False)
    trigger_probe: float = 0.0
    threshold: float = 0.216
    temperature: float = 1.0
    base_temperature: float = 1.0
    from_layer: int = 0
    gate: Literal["base", "own"] = "base"
    persistent: bool = False
    surrogate: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for kind in self.kinds:
            one_of(kind, KINDS, "kinds")
        first = self.kinds[:1] == ("base",) and "base" not in self.kinds[1:] and len(self.kinds) >= 2
        require(first, "kinds", self.kinds, '"base" first, once, and one or more others')
        require(0 <= self.threshold <= 1, "threshold", self.threshold, "in [0, 1] bits")
        require(0 <= self.trigger_p <= 1, "trigger_p", self.trigger_p, "in [0, 1]")
        at_least(0, self, "trigger_entropy", "every", "from_layer", "seed")
        require(
            all(map(math.isfinite, (*self.probe, self.trigger_probe))),
            "probe",
            "not finite",
            "finite numbers",
        )
        for name in ("temperature", "base_temperature"):
            require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "> 0 and finite")
        require(self.seed < 2**63, "seed", self.seed, "< 2^63")
        one_of(self.gate, ("base", "own"), "gate")

    @cached_property
    def _probe_D(self) -> Tensor:
        return torch.tensor(self.probe, dtype=torch.float64)

    def unsure(self, top_N: Tensor, entropy_N: Tensor, hidden_ND: Tensor) -> Tensor:
        """True [N] where the greatest of the base's probabilities, their entropy or what the head reads asks for the
        perspectives."""
        asked_N = (top_N < self.trigger_p) | (entropy_N > self.trigger_entropy)
        if self.probe:  # summed row by row: no other row changes a bit
            asked_N |= (hidden_ND.cpu().double() * self._probe_D).sum(1) > self.trigger_probe
        return asked_N


class Verdict(NamedTuple):
    """The answer of the perspectives about one drawn token. confidence: probability that it is right. disagreement,
    information: in bits; votes: the likeliest token of each perspective; 0 and the base's alone if not triggered.
    flagged: they disagree, and no two agree on a token."""

    triggered: bool
    flagged: bool
    token: int
    confidence: float
    disagreement: float
    information: float
    votes: tuple[int, ...]


# ---------------------------------------------------------------- measures


def probabilities(logits: Tensor) -> Tensor:
    """Softmax in float64."""
    return logits.double().softmax(-1)


def entropy(p: Tensor) -> Tensor:
    """H in nats over the last dimension; 0·log 0 is 0."""
    return -torch.xlogy(p, p).sum(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen–Shannon divergence in bits over the last dimension: 0 of equals, 1 of what has nothing in common."""
    m = (p + q) / 2
    halves = (torch.where(x > 0, x * (x / m).log2(), 0).sum(-1) for x in (p, q))
    return sum(halves, torch.zeros(())) / 2


def compared(p_NPV: Tensor) -> tuple[Tensor, Tensor]:
    """Disagreement [N], the mean divergence of all pairs, and information [N], H(mean) − mean H: both in bits."""
    pairs = list(combinations(range(p_NPV.shape[1]), 2))
    apart_N = torch.stack([divergence(p_NPV[:, i], p_NPV[:, j]) for i, j in pairs]).mean(0)
    more_N = (entropy(p_NPV.mean(1)) - entropy(p_NPV).mean(1)) / math.log(2)
    return apart_N, more_N.clamp_min(0)


def majority(votes: Sequence[int]) -> int | None:
    """The token of two votes or more, the base's of equals, and then that of the earliest perspectives; None without
    one."""
    counts = Counter(votes)

    def rank(token: int) -> tuple[int, bool, int]:
        return counts[token], token == votes[0], -sum(i for i, vote in enumerate(votes) if vote == token)

    best = max(counts, key=rank)
    return best if counts[best] >= 2 else None


def confidence(p_V: Tensor, token: int, temperature: float) -> float:
    """Probability of a token under p^(1/T), normalised."""
    return float((p_V.log() / temperature).softmax(0)[token])


# ---------------------------------------------------------------- looking again


class Perspectives:
    """A model and how it is looked at. ConfigError: a model without experts and no `surrogate`, a "second" of layers
    with one expert, layers that the model does not have, or a model whose state does not count tokens where that is
    needed."""

    def __init__(self, model: LanguageModel, config: PerspectivesConfig) -> None:
        self.model, self.config = model, config
        routed = [block.ffn for block in model.config.blocks if isinstance(block.ffn, RoutedConfig)]
        if not routed:
            require(
                config.surrogate, "perspectives", model.config.name,
                "of a model with routed experts; surrogate = True stands in for them",
            )  # fmt: skip
        else:
            require(not config.surrogate, "surrogate", True, "False for a model that has experts")
            least = min(math.prod(ffn.torus) for ffn in routed)
            require(
                least >= 2, "perspectives", model.config.name, "of a model with 2 or more experts a layer"
            )
        D = model.config.d_model
        require(
            len(config.probe) in (0, D),
            "numbers of the probe",
            len(config.probe),
            f"{D}, as the head reads, or 0",
        )
        layers = len(model.config.blocks)
        require(config.from_layer <= layers, "from_layer", config.from_layer, f"≤ {layers}, the layers")
        require(not (config.persistent and config.surrogate), "persistent", True, "False with surrogate")
        if config.every > 0 or {*config.kinds} & {*DRAWN}:
            counts = model.init_state(1, device="meta").document_length_B is not None
            name, known = "every" if config.every > 0 else "kinds", config.every or config.kinds
            require(counts, name, known, "left out for a model whose state does not count tokens")

    @property
    def names(self) -> tuple[str, ...]:
        return SURROGATES if self.config.surrogate else self.config.kinds

    @cached_property
    def _views(self) -> Views:
        others = self.config.kinds[1:]
        turns = [others[:i].count(kind) for i, kind in enumerate(others)]
        kinds: tuple[View, ...] = tuple(view for kind in others for view in VIEWS if view == kind)
        seeds = tuple(self.config.seed + turn for turn in turns)
        return Views(kinds, seeds, torch.empty(0), self.config.from_layer, self.config.gate)

    def views(self, index: int, rows: int) -> Views:
        """Those of one perspective for so many rows; the positions are missing."""
        one = self._views
        return replace(one, view_B=(one.view_B[index - 1],) * rows, seed_B=(one.seed_B[index - 1],) * rows)

    def begin(self, state: LMState) -> LMState:
        """States [N·(P − 1)] of the other perspectives, copies of these N rows."""
        K = len(self.config.kinds) - 1
        return state.select([row for row in range(state.batch_size) for _ in range(K)])

    def read(
        self, parts: Sequence[Sequence[int]], state: LMState, *, fresh: Sequence[bool]
    ) -> tuple[Tensor, LMState]:
        """Read tokens from the other perspectives, after their states, which are used up: what the head reads after
        the last [N, P − 1, D], and the new states."""
        N, K, views = len(parts), len(self.config.kinds) - 1, self._views
        views = replace(views, view_B=views.view_B * N, seed_B=views.seed_B * N)
        rows, begins = [part for part in parts for _ in range(K)], [new for new in fresh for _ in range(K)]
        hidden_BD, state = read(self.model, rows, state, fresh=begins, views=views)
        return hidden_BD.view(N, K, -1), state

    def stand_ins(
        self,
        hidden_ND: Tensor,
        logits_NV: Tensor,
        position_N: Sequence[int],
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits [N, 3, V] of the surrogates. head: the model's, when left out."""
        (N, V), D, seed = logits_NV.shape, hidden_ND.shape[1], self.config.seed
        noise, keep = np.empty((N, V)), np.empty((N, D))
        for row, at in enumerate(position_N):
            u = philox(seed, at, 2 * V)
            noise[row] = NOISE * np.sqrt(-2 * np.log(u[:V])) * np.cos(2 * np.pi * u[V:])
            keep[row] = (philox(seed | 1 << 64, at, D) >= MASKED) / (1 - MASKED)
        masked_ND = hidden_ND * torch.from_numpy(keep).to(hidden_ND)
        masked_NV = (head or self.model.head)(masked_ND).cpu()[:, :V]
        noisy_NV = logits_NV.double() + torch.from_numpy(noise)
        return torch.stack([noisy_NV, logits_NV.double() / WARM, masked_NV.double()], 1)

    def triggered(self, p_NV: Tensor, hidden_ND: Tensor, position_N: Sequence[int]) -> list[bool]:
        """True if the perspectives are asked."""
        every, unsure_N = (
            self.config.every,
            self.config.unsure(p_NV.amax(1), entropy(p_NV), hidden_ND).tolist(),
        )
        return [
            unsure or (every > 0 and at % every == 0) for unsure, at in zip(unsure_N, position_N, strict=True)
        ]

    def judge(
        self,
        logits_NV: Tensor,
        hidden_ND: Tensor,
        drawn: Sequence[int],
        position_N: Sequence[int],
        look: Callable[[list[int]], Tensor],
        mixed: Callable[[int, Tensor, int], int],
    ) -> list[Verdict]:
        """The verdict on each of N tokens drawn from the base's logits. hidden: what the head reads, before a safe set.

        look: gives of these rows the others' logits [n, P − 1, V]. mixed: draws for a row from the logarithm of the
        mixture [V], given the majority's token. NonFiniteError: a perspective's logits are not finite."""
        config, p_NV = self.config, probabilities(logits_NV)
        at = [row for row, yes in enumerate(self.triggered(p_NV, hidden_ND, position_N)) if yes]
        plain = zip(p_NV, drawn, p_NV.argmax(1).tolist(), strict=True)
        found = [
            Verdict(False, False, id, confidence(p_V, id, config.base_temperature), 0.0, 0.0, (vote,))
            for p_V, id, vote in plain
        ]
        if not at:
            return found
        others_nPV = look(at)
        for index, name in enumerate(self.names[1:]):
            if not others_nPV[:, index].amax(-1).isfinite().all():
                raise NonFiniteError(f"logits of the perspective {name!r}: must be finite")
        p_nPV = torch.cat([p_NV[at][:, None], probabilities(others_nPV)], 1)
        for row, p_PV in zip(at, p_nPV, strict=True):
            apart, more = (part.item() for part in compared(p_PV[None]))  # alone: no other row changes a bit
            votes, id, flagged = tuple(p_PV.argmax(1).tolist()), drawn[row], False
            mixture_V = p_PV.mean(0)
            if apart >= config.threshold:
                chosen = majority(votes)
                flagged = chosen is None
                id = id if chosen is None else mixed(row, mixture_V.log(), chosen)
            sure = confidence(mixture_V, id, config.temperature)
            found[row] = Verdict(True, flagged, id, sure, apart, more, votes)
        return found


# ---------------------------------------------------------------- files


def save_calibration(
    path: Path, config: PerspectivesConfig, model: Stateful, tokenizer: str, rates: dict[str, Any]
) -> None:
    """Keep a config that was fitted to a model, with the fingerprints of model and tokenizer. StorageError."""
    fields = {"format": FORMAT, "model": model.fingerprint(), "tokenizer": tokenizer}
    write_json(path, fields | {"config": dump(config), "rates": rates})


def load_calibration(path: Path, model: Stateful, tokenizer: str) -> PerspectivesConfig:
    """The config that was fitted to this model. ConfigError: missing, damaged, or of another model or tokenizer."""
    fields = read_json(path, ConfigError)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a calibration; perspectives calibrate RUN --out {path} writes one")
    for name, own in (("model", model.fingerprint()), ("tokenizer", tokenizer)):
        other = str(fields.get(name))[:12]
        if fields.get(name) != own:
            raise ConfigError(
                f"{path}: fitted to {name} {other}, this one is {own[:12]}; calibrate again for this model"
            )
    return load(PerspectivesConfig, fields.get("config"), f"{path}: config")
