"""Learning from a text while it is read: every token is scored before anything is learned from it.

Shapes: T time, D model width, r rank of the adapter.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, cast

import torch
from torch import Tensor

from perspectron.data.specials import OURS, Specials
from perspectron.decode.conversation import Conversation
from perspectron.decode.reading import CHUNK, check_ids
from perspectron.decode.sampling import SamplingConfig
from perspectron.designs.perspective.adapt.adapter import Adapter
from perspectron.designs.perspective.adapt.gradient import (
    Piece,
    Subspace,
    Weights,
    by_backprop,
    by_jvp,
    by_traces,
    joined,
    losses,
    with_weights,
)
from perspectron.model.block import Block
from perspectron.model.model import LanguageModel
from perspectron.util.config import at_least, one_of, positive, require

RATE = 1e-4  # of Adam, for each token of an update
BETAS, EPS = (0.9, 0.99), 1e-8
GUARDED = 128  # tokens on which the adapter has to be no worse than the model without it
PATIENCE = 3  # rollbacks in a row, after which nothing is learned until the next document


@dataclass(frozen=True)
class AdaptConfig:
    """How the adapter learns. estimator: of the gradient. "trace" goes back through all tokens before, by traces that
    are carried along; "jvp" takes `directions` of a random subspace of `subspace` numbers, in forward mode; "backprop"
    goes back through `window` tokens. every: tokens for each update, which are read at once. lr: of Adam. pull: of the
    weights towards 0, in terms of lr. clip: greatest norm of a gradient. guard: update turns between two comparisons
    with the model without the adapter; 0 is never. window: tokens of backprop. directions: of jvp. subspace: numbers of
    jvp. seconds: time for learning, after which nothing more is learned."""

    estimator: Literal["trace", "jvp", "backprop"] = "trace"
    every: int = 2 * CHUNK
    lr: float = RATE * 2 * CHUNK
    pull: float = 0.01
    clip: float = 1.0
    guard: int = 10
    window: int = 256
    directions: int = 8
    subspace: int = 1024
    seconds: float = math.inf

    def __post_init__(self) -> None:
        one_of(self.estimator, ("trace", "jvp", "backprop"), "estimator")
        at_least(1, self, "every", "window", "directions", "subspace")
        at_least(0, self, "guard", "pull", "seconds")
        positive(self, "lr", "clip")
        if self.estimator == "jvp":
            require(
                self.directions <= self.subspace,
                "directions",
                self.directions,
                f"≤ subspace = {self.subspace}",
            )

    @classmethod
    def of_text(cls, tokens: int) -> Self:
        """The config for a text of `tokens` tokens, from which something is learned even if they are few."""
        every = max(1, min(cls.every, tokens))
        return cls(every=every, lr=RATE * every)


@dataclass(frozen=True)
class Report:
    """The result of `Learner.read`. nats: of each token, in the order of the text, before it was learned from. The
    others as the adapter's counters, of this text alone. seconds: spent learning, beside reading."""

    nats: Tensor
    updates: int
    rollbacks: int
    skipped: int
    seconds: float


class Learner:
    """Reads a text and adapts the gates to it.

    It begins a document, or continues a copy of a conversation of one row. fresh: nothing was read before what this one
    has still to read. A document's first token is not scored where the tokenizer has neither a prefix nor an end. The
    caller's adapter is changed in place; the model's own weights are set to need no gradient. ConfigError: a model that
    has no gates to adapt, or renormalises its memory, which traces do not follow.
    """

    def __init__(
        self,
        model: LanguageModel,
        adapter: Adapter,
        config: AdaptConfig = AdaptConfig(),
        conversation: Conversation | None = None,
        special: Specials = OURS,
        *,
        fresh: bool = False,
    ) -> None:
        self.special = special
        traced = config.estimator == "trace"
        for index in adapter.up if traced else ():
            every = getattr(cast(Block, model.blocks[index]).mixer.config, "renorm_every", 0)
            require(every == 0, "estimator", "trace", "jvp or backprop where the memory is renormalised")
        self.model, self.adapter, self.config = model.requires_grad_(False), adapter, config
        adapter.to(model.device)
        self.space = (
            Subspace(adapter.up, config.subspace, adapter.config.seed) if config.estimator == "jvp" else None
        )
        self.fresh = fresh or conversation is None
        begun = Conversation(model.init_state(1), [[*special.start]], [[]], [0])
        self.talk = begun if conversation is None else conversation.fork()
        require(self.talk.rows == 1, "conversation", f"of {self.talk.rows} rows", "of one; take a row")
        require(
            conversation is None or len(self.talk.pending[0]) > 0,
            "conversation",
            "one that was stopped",
            "one with a token to go on from",
        )
        if self.fresh:  # saved traces are of a memory that is not here
            adapter.trace.clear()
        self.state = adapter.attach(self.talk.state.to(model.device), traces=traced)
        self.gradient: Weights = {}
        self.since, self.turns, self.streak, self.spent, self.frozen = 0, 0, 0, 0.0, False
        self.finite = True
        """Every loss since the last turn is."""
        self.past: deque[tuple[Piece, Tensor]] = deque()
        """The newest pieces, without their traces, and their nats as they were scored."""
        self.reach = max(GUARDED, config.every, config.window if config.estimator == "backprop" else 0)
        self.accepted = self._weights()

    def conversation(self, *, traces: bool = False) -> Conversation:
        """A copy of the conversation, under the adapter. traces: carry them along, which costs r products."""
        return replace(self.talk, state=with_weights(self.state, self.adapter.up, traces=traces)).fork()

    def read(self, ids: Sequence[int]) -> Report:
        """Read tokens after those before, and learn from them. ConfigError: none, or ids outside the vocabulary."""
        check_ids(ids, self.model.config.vocab_size, 0)
        counters = self.adapter.counters
        before, spent = replace(counters), self.spent
        unread, nats = [*self.talk.pending[0], *ids], [torch.empty(0, dtype=torch.float64)]
        while len(unread) > 1:
            n = min(self.config.every - self.since, len(unread) - 1)
            nats.append(self._piece(unread[: n + 1]))
            unread = unread[n:]
        known = self.talk.recent[0]
        window = max(SamplingConfig.repetition_window, len(known))
        recent = [*known, *(id for id in ids[-window:] if id not in self.special.silent)][-window:]
        self.talk = replace(self.talk, pending=[unread], recent=[recent])
        updates, rollbacks, skipped = (
            getattr(counters, name) - getattr(before, name) for name in ("updates", "rollbacks", "skipped")
        )
        return Report(torch.cat(nats), updates, rollbacks, skipped, self.spent - spent)

    def _piece(self, ids: list[int]) -> Tensor:
        """Read tokens, of which all but the first are scored, and learn when there are enough."""
        if self.special.reset in ids[1:]:
            self.frozen, self.streak = False, 0
        piece, self.fresh = Piece(ids, self.state, self.fresh, self.special.reset), False
        learns = not self.frozen and self.spent < self.config.seconds
        start, found, up = time.perf_counter(), Weights(), self.adapter.up
        if learns and self.config.estimator == "trace":
            nats_T, found, state = by_traces(self.model, piece, up)
        else:
            with torch.no_grad():
                nats_BT, state = losses(self.model, piece)
            nats_T, start = nats_BT[0], time.perf_counter()
        self.since += len(ids) - 1
        due = self.since >= self.config.every
        finite = bool(nats_T.isfinite().all())
        self.finite &= finite
        if finite:
            self._remember(replace(piece, state=with_weights(piece.state, up, traces=False)), nats_T)
            if learns and due and self.finite and self.config.estimator != "trace":
                found = self._late()
        else:
            state = piece.state  # what it left in the memory would stay there
            self.past.clear()
        for i, part in found.items():
            self.gradient[i] = self.gradient[i] + part if i in self.gradient else part
        if learns and due:
            self._update(self.finite)
        if due:
            self.since, self.gradient, self.finite = 0, {}, True
        self.state = with_weights(state, self.adapter.up)
        self.spent += (time.perf_counter() - start) * learns
        return nats_T.double().cpu()

    def _late(self) -> Weights:
        """The gradient from the tokens since the last turn, for which they are read again."""
        up, since = self.adapter.up, [piece for piece, _ in self._newest(self.since)]
        if self.space is not None:
            chosen_K = self.space.directions(self.adapter.counters.updates, self.config.directions)
            return by_jvp(self.model, joined(since), up, self.space, chosen_K)
        whole = [piece for piece, _ in self._newest(max(self.since, self.config.window))]
        return by_backprop(self.model, whole, up, len(since))

    def _remember(self, piece: Piece, nats_T: Tensor) -> None:
        """Keep a piece, and no more of those before it than are needed."""
        self.past.append((piece, nats_T))
        while sum(len(nats_T) for _, nats_T in self.past) - len(self.past[0][1]) >= self.reach:
            self.past.popleft()

    def _newest(self, tokens: int) -> list[tuple[Piece, Tensor]]:
        """The newest pieces, with at least `tokens` tokens together if there are as many."""
        found = list[tuple[Piece, Tensor]]()
        for piece, nats_T in reversed(self.past):
            if sum(len(nats_T) for _, nats_T in found) >= tokens:
                break
            found.insert(0, (piece, nats_T))
        return found

    def _update(self, finite: bool) -> None:
        """Take a step of Adam with the mean gradient, unless something is not finite, or the weights did worse than no
        adapter."""
        adapter, config, counters = self.adapter, self.config, self.adapter.counters
        self.turns += 1
        if config.guard and self.turns % config.guard == 0 and not self._stands():
            return
        if finite:  # or there may be no gradient
            gradient = torch.stack([self.gradient[i] for i in adapter.up])
            norm = gradient.double().norm() / self.since
        if not finite or not norm.isfinite():
            counters.skipped += 1
            return
        counters.tokens += self.since
        counters.updates += 1
        factor = min(1.0, config.clip / max(float(norm), EPS)) / self.since
        lr = config.lr if self.space is None else config.lr * math.sqrt(self.space.size / adapter.size)
        step = counters.updates
        names = ("up", "first", "second")  # of all layers as one
        up, first, second = (torch.stack(list(getattr(adapter, name).values())) for name in names)
        gradient *= factor
        first = first.lerp(gradient, 1 - BETAS[0])
        second = second.lerp(gradient.square(), 1 - BETAS[1])
        mean, square = first / (1 - BETAS[0] ** step), second / (1 - BETAS[1] ** step)
        up = up - lr * (mean / (square.sqrt() + EPS) + config.pull * up)
        for name, part in zip(names, (up, first, second), strict=True):
            setattr(adapter, name, dict(zip(adapter.up, part, strict=True)))

    def _stands(self) -> bool:
        """True if the weights are accepted. If the newest tokens, as they were scored under the weights, lost more than
        the model without the adapter loses from the same state, restore the last accepted weights and give False."""
        adapter, newest = self.adapter, self._newest(GUARDED)
        if sum(len(nats_T) for _, nats_T in newest) < 2:  # too few to tell
            return True
        piece = joined([piece for piece, _ in newest])
        none = {i: torch.zeros_like(up) for i, up in adapter.up.items()}
        with torch.no_grad():
            nats_1T, _ = losses(self.model, piece, with_weights(piece.state, none))
        worse_T = torch.cat([nats_T for _, nats_T in newest]).double() - nats_1T[0].double()
        if worse_T.mean() > worse_T.std() / math.sqrt(len(worse_T)):
            adapter.up, adapter.first, adapter.second = (
                {i: part.clone() for i, part in parts.items()} for parts in self.accepted
            )
            adapter.counters.rollbacks += 1
            self.streak += 1
            self.frozen = self.streak >= PATIENCE
            return False
        self.accepted, self.streak = self._weights(), 0
        return True

    def _weights(self) -> tuple[Weights, Weights, Weights]:
        """Copies of the weights and their moments."""
        parts = (self.adapter.up, self.adapter.first, self.adapter.second)
        up, first, second = ({i: part.clone() for i, part in part.items()} for part in parts)
        return up, first, second
