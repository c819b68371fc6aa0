"""Decoding from several viewpoints: one model under other routings says how sure its next token is
(docs/designs/perspective.md#viewpoints).

A token that the model is unsure of is read again, from the state before it, as further rows of one batch in which each
row chooses its experts from another view. The model's own state and logits are never touched.

Shapes: N tokens or rows, P perspectives with the base first, V vocabulary, D model width, T time. Probabilities and
logarithms are float64; disagreement and information are in bits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from perspectron.decode.processors import Hook, Step
from perspectron.decode.reading import read
from perspectron.decode.row import Row
from perspectron.decode.sampling import sample
from perspectron.designs.perspective.measures import compared, confidence, entropy, majority, probabilities
from perspectron.experts.router import DRAWN, VIEWS, RoutedConfig, View, Views
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState, Stateful
from perspectron.util.config import at_least, dump, load, one_of, require
from perspectron.util.errors import ConfigError, NonFiniteError
from perspectron.util.files import plain, read_json, write_json
from perspectron.util.streams import philox

KINDS = ("base", *VIEWS[1:])
SURROGATES = ("base", "noise", "temperature", "mask")
FORMAT = "perspectron-perspectives-1"
NOISE, WARM, MASKED = 0.5, 2.0, 0.1  # of the surrogates: of logits, times T, share of channels


@dataclass(frozen=True)
class PerspectivesConfig:
    """The perspectives, when they are asked, and what follows from their answers.

    kinds: "base" first; one that comes again draws by another seed. trigger_p, trigger_entropy, every: the perspectives
    are asked where the likeliest token has less probability, the entropy is above so many nats, or the position in the
    document is a multiple (0: off). probe, trigger_probe: and where the head's input has a greater product with these D
    numbers (none: off). threshold: of disagreement, in bits. temperature, base_temperature: of the mixture and of the
    base where they become a confidence. from_layer: layers below it route as usual. gate: of a "soft" router.
    persistent: the perspectives keep states of their own, and read all tokens. surrogate: in a model without experts,
    noise on logits, a temperature and a mask on the head's input stand in for views, which have no kinds, layer or
    gate. seed: of random draws.
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
        """True [N] where the base's greatest probability, its entropy or the probe asks for the perspectives."""
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

    @property
    def stop(self) -> bool:
        return False


# ---------------------------------------------------------------- looking again


class Perspectives(Hook):
    """A model and its perspectives, as a hook: the views are asked about unsure tokens, and where they disagree, their
    majority is taken. ConfigError: a model without experts and no `surrogate`, a "second" of layers with one expert,
    layers that the model does not have, or a model whose state does not count tokens where that is needed."""

    name = "perspectives"
    shares_prefixes = False

    def __init__(self, model: LanguageModel, config: PerspectivesConfig = PerspectivesConfig()) -> None:
        self.model, self.config = model, config
        self.keeps_before = not (config.persistent or config.surrogate)
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
        if config.every > 0 or (not config.surrogate and {*config.kinds} & {*DRAWN}):
            counts = model.init_state(1, device="meta").document_length_B is not None
            name, known = "every" if config.every > 0 else "kinds", config.every or config.kinds
            require(counts, name, known, "left out for a model whose state does not count tokens")

    @classmethod
    def of(cls, model: LanguageModel, tokenizer: str, calibration: Path | None) -> "Perspectives":
        """The perspectives of a model, with fixed thresholds or those of a file. tokenizer: its fingerprint."""
        config = (
            PerspectivesConfig() if calibration is None else load_calibration(calibration, model, tokenizer)
        )
        return cls(model, config)

    def begin(self, row: Row) -> "_Asked":
        return _Asked(self, row)

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
        """The views of one perspective for `rows` rows, without the positions."""
        one = self._views
        return replace(one, view_B=(one.view_B[index - 1],) * rows, seed_B=(one.seed_B[index - 1],) * rows)

    def copies(self, state: LMState) -> LMState:
        """States [N·(P − 1)] of the other perspectives, copies of these N rows."""
        K = len(self.config.kinds) - 1
        return state.select([row for row in range(state.batch_size) for _ in range(K)])

    def others(
        self,
        parts: Sequence[Sequence[int]],
        state: LMState,
        *,
        fresh: Sequence[bool],
        reset: int | None,
    ) -> tuple[Tensor, LMState]:
        """Let the other perspectives read tokens after their states, which are consumed: the head's input after the
        last [N, P − 1, D], and the new states. fresh, reset: as `reading.read` has them."""
        N, K, views = len(parts), len(self.config.kinds) - 1, self._views
        views = replace(views, view_B=views.view_B * N, seed_B=views.seed_B * N)
        rows, begins = [part for part in parts for _ in range(K)], [new for new in fresh for _ in range(K)]
        hidden_BD, state = read(self.model, rows, state, fresh=begins, reset=reset, views=views)
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

    def judge(
        self,
        logits_1V: Tensor,
        hidden_1D: Tensor,
        id: int,
        position: int,
        look: Callable[[], Tensor],
        mixed: Callable[[Tensor, int], int],
    ) -> Verdict:
        """The verdict on a token drawn from the base's logits. hidden: what the head reads, before any hook.

        look: gives the others' logits [P − 1, V]. mixed: draws from the logarithm of the mixture [V], given the
        majority's token. NonFiniteError: a perspective's logits are not finite."""
        config, p_1V = self.config, probabilities(logits_1V)
        unsure = bool(config.unsure(p_1V.amax(1), entropy(p_1V), hidden_1D))
        if not unsure and (config.every == 0 or position % config.every):
            sure = confidence(p_1V[0], id, config.base_temperature)
            return Verdict(False, False, id, sure, 0.0, 0.0, (int(p_1V.argmax()),))
        others_KV = look()
        for name, other_V in zip(self.names[1:], others_KV, strict=True):
            if not other_V.amax().isfinite():
                raise NonFiniteError(f"logits of the perspective {name!r}: must be finite")
        p_PV = torch.cat([p_1V, probabilities(others_KV)])
        apart, more = (part.item() for part in compared(p_PV[None]))
        votes, flagged, mixture_V = tuple(p_PV.argmax(1).tolist()), False, p_PV.mean(0)
        if apart >= config.threshold:
            chosen = majority(votes)
            flagged = chosen is None
            id = id if chosen is None else mixed(mixture_V.log(), chosen)
        return Verdict(True, flagged, id, confidence(mixture_V, id, config.temperature), apart, more, votes)

    def report(self, verdicts: Sequence[Sequence[Verdict]], seconds: float) -> tuple[dict[str, Any], str]:
        """All verdicts, and a line with the rates."""
        every = [verdict for row in verdicts for verdict in row]
        if not every:
            return {}, ""
        asked = sum(verdict.triggered for verdict in every) / len(every)
        flagged = sum(verdict.flagged for verdict in every) / len(every)
        speed = len(every) / max(seconds, 1e-9)
        line = f"views asked at {asked:.0%} of tokens, {flagged:.1%} flagged, {speed:.0f} tokens a second"
        return {"verdicts": [[verdict._asdict() for verdict in row] for row in verdicts]}, line


class _Asked(Hook):
    """The hook of one row.

    chunk: the tokens of the prompt that were read last, the state before them, and whether they begin a text; until the
    first draw. views: states [P − 1] of persistent perspectives. seen: the input of their heads [P − 1, D] after the
    last token.
    """

    name, shares_prefixes = Perspectives.name, Perspectives.shares_prefixes

    def __init__(self, all: Perspectives, row: Row) -> None:
        self.all, self.row, self.keeps_before = all, row, all.keeps_before
        self.reset = row.vocabulary.specials.reset
        self.chunk: tuple[list[int], LMState, bool] | None = None
        self.views: LMState | None = None
        self.seen: Tensor | None = None

    def prompt(self, ids: list[int], state: LMState, *, begins: bool, last: bool) -> None:
        if self.keeps_before and last:
            self.chunk = ids, state.fork(), begins
        if self.all.config.persistent:
            self._read(ids, state, begins)

    def verdict(self, step: Step, id: int) -> Verdict:
        if self.all.config.persistent and self.seen is None:
            self._read(self.row.unread[-1:])
        base_1V = step.look(
            step.hidden_1D
        )  # by the head as the views are, to the bit, however the row was read

        def look() -> Tensor:
            return self._look(step, base_1V)

        verdict = self.all.judge(base_1V, step.hidden_1D, id, step.position, look, self._mixed)
        self.chunk = self.seen = None
        return verdict

    def _read(self, ids: list[int], state: LMState | None = None, begins: bool = False) -> None:
        """Let persistent perspectives read tokens. state: to begin from."""
        if self.views is None:
            assert state is not None
            self.views = self.all.copies(state)
        hidden_1PD, self.views = self.all.others([ids], self.views, fresh=[begins], reset=self.reset)
        self.seen = hidden_1PD[0]

    def _look(self, step: Step, base_1V: Tensor) -> Tensor:
        """The others' logits [P − 1, V]."""
        if self.all.config.surrogate:
            return self.all.stand_ins(step.hidden_1D, base_1V, [step.position], step.look)[0]
        if self.seen is not None:
            return step.look(self.seen)
        state = self._before(step)
        length_1 = state.document_length_B
        fresh = length_1 is not None and not length_1.any()
        last, copies = [self.row.unread[-1:]], self.all.copies(state)
        return step.look(self.all.others(last, copies, fresh=[fresh], reset=self.reset)[0][0])

    def _before(self, step: Step) -> LMState:
        """The state before the last token."""
        if self.chunk is None:
            return step.before
        ids, state, begins = self.chunk
        if ids[-1] == self.reset or len(ids) == 1:
            return state
        return read(self.all.model, [ids[:-1]], state.fork(), fresh=[begins], reset=self.reset)[1]

    def _mixed(self, log_V: Tensor, chosen: int) -> int:
        row = self.row
        if row.sampling.temperature == 0:
            return chosen
        return int(sample(log_V[None], [row.recent], [row.drawn], row.sampling, [row.stream])[0])


# ---------------------------------------------------------------- files


def save_calibration(
    path: Path, config: PerspectivesConfig, model: Stateful, tokenizer: str, rates: dict[str, Any]
) -> None:
    """Keep a config that was fitted to a model, with the fingerprints of model and tokenizer. StorageError."""
    fields = {"format": FORMAT, "model": model.fingerprint(), "tokenizer": tokenizer}
    write_json(path, fields | {"config": dump(config), "rates": plain(rates)})


def load_calibration(path: Path, model: Stateful, tokenizer: str) -> PerspectivesConfig:
    """The config that was fitted to this model. ConfigError: missing, damaged, or of another model or tokenizer."""
    fields = read_json(path, ConfigError)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: not a calibration; this writes one: perspectron perspective views RUN --out {path}"
        )
    for name, own in (("model", model.fingerprint()), ("tokenizer", tokenizer)):
        other = str(fields.get(name))[:12]
        if fields.get(name) != own:
            raise ConfigError(
                f"{path}: fitted to {name} {other}, this one is {own[:12]}; calibrate again for this model"
            )
    return load(PerspectivesConfig, fields.get("config"), f"{path}: config")
