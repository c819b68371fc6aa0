"""Compares two texts of a model: where they diverge, what each predicts next, and how far their states differ."""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch.utils._pytree as pytree
from torch import Tensor

from perspectron.decode import reading
from perspectron.decode.history import exhausted
from perspectron.decode.saved import alike
from perspectron.decode.session import Session
from perspectron.model.cache import Cache
from perspectron.model.state import LMState
from perspectron.model.tuned import Tuned
from perspectron.util.config import require, require_whole
from perspectron.util.errors import NonFiniteError, StateError

PIECE = 64
"""Tokens of a probe whose logits are computed at once."""
MOST = 1 << 16
"""Maximum number of tokens of a probe or a question."""


@dataclass(frozen=True)
class Apart:
    """The difference of texts a and b. shared: number of tokens that both begin with; None if a beginning is not known.
    tokens: number of tokens of each. layers: for each layer ‖a − b‖ of its states over the larger of ‖a‖ and ‖b‖, of a
    cache over the tokens that both have. next: the most likely next tokens of each, with their probabilities. kl: for
    each probe token, KL(a ‖ b) in nats of the predictions in its place from the text and the probe before it alone."""

    shared: int | None
    tokens: tuple[int, int]
    layers: tuple[float, ...]
    next: tuple[tuple[tuple[int, float], ...], ...]
    kl: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of `kl` in nats; NaN without a probe."""
        return math.nan if not self.kl else sum(self.kl) / len(self.kl)


def diff(a: Session, b: Session, on: Sequence[int] | str = (), *, count: int = 5) -> Apart:
    """Compare two texts, leaving both as they are. on: a probe, read after each. count: number of likely next tokens.
    StateError: the texts are of different models. ConfigError, NonFiniteError: as `Session.likely`."""
    return exhausted(diffing(a, b, on, count=count))


def diffing(
    a: Session, b: Session, on: Sequence[int] | str = (), *, count: int = 5
) -> Generator[int, None, Apart]:
    """`diff` as a generator, which pauses as `Session.reading` does."""
    if a.model is not b.model:
        raise StateError("the texts are of different models; compare texts of one")
    require_whole("count", count, 0)
    ids = ids_of(a, on)
    shared = alike(a.tokens, b.tokens) if a.whole and b.whole else None
    states = (yield from a.remembering()), (yield from b.remembering())
    layers = tuple(distances(*states))
    expected = list[tuple[tuple[int, float], ...]]()
    for session in (a, b):
        logits_TV = yield from session.expecting()
        found = list[tuple[int, float]]()
        if len(logits_TV):
            _require_finite(logits_TV[-1])
            p_V = logits_TV[-1].double().softmax(0)
            values, tokens = p_V.topk(min(count, len(p_V)))
            found = list(zip(tokens.tolist(), values.tolist(), strict=True))
        expected.append(tuple(found))
    kl = yield from diverging(a.fork(), b.fork(), ids)
    return Apart(shared, (len(a.tokens), len(b.tokens)), layers, tuple(expected), tuple(kl))


def ids_of(session: Session, text: Sequence[int] | str, field: str = "on") -> list[int]:
    """The ids of a text. ConfigError, naming the field: more than MOST ids, or one outside the vocabulary."""
    ids = reading.ids_of(text, session.tokenizer, field)
    require(len(ids) <= MOST, f"{field}: tokens", len(ids), f"≤ {MOST}")
    V = session.tokenizer.vocab_size
    for id in (min(ids, default=0), max(ids, default=0)):
        require(0 <= id < V, f"{field}: token id", id, f"≥ 0 and < {V}")
    return ids


def diverging(a: Session, b: Session, ids: Sequence[int]) -> Generator[int, None, list[float]]:
    """KL(a ‖ b) in nats of the predictions of both texts in the place of each id; both sessions are used up."""
    found = list[float]()
    for start in range(0, len(ids), PIECE):
        some = ids[start : start + PIECE]
        p_TV, q_TV = (yield from a.predicting(some)), (yield from b.predicting(some))
        rows = min(len(p_TV), len(q_TV))  # no prediction for the first id of an empty text
        if rows:
            found += kl(p_TV[-rows:], q_TV[-rows:])
    return found


def kl(p_TV: Tensor, q_TV: Tensor) -> list[float]:
    """KL(p ‖ q) in nats of two rows of logits, for each row. NonFiniteError: logits that are not finite."""
    _require_finite(p_TV)
    _require_finite(q_TV)
    p_TV, q_TV = p_TV.double().log_softmax(1), q_TV.double().log_softmax(1)
    return (p_TV.exp() * (p_TV - q_TV)).sum(1).clamp_min(0).tolist()


def _require_finite(logits: Tensor) -> None:
    if not bool(logits.isfinite().all()):
        raise NonFiniteError("logits after a text: must be finite")


def distances(a: LMState, b: LMState) -> Iterator[float]:
    """Distance of two states in each layer: ‖a − b‖ over the larger of ‖a‖ and ‖b‖; 0 where both are zero, or the layer
    has no state. NonFiniteError: a state is not finite."""
    for layer, (one, other) in enumerate(zip(a.layers, b.layers, strict=True)):
        apart = norm_a = norm_b = 0.0
        for x, y in zip(_tensors(one), _tensors(other), strict=True):
            slots = min(x.shape[2], y.shape[2]) if x.ndim == 4 and x.shape != y.shape else None
            x, y = (x, y) if slots is None else (x[:, :, :slots], y[:, :, :slots])
            apart += float((x - y).square().sum())
            norm_a, norm_b = norm_a + float(x.square().sum()), norm_b + float(y.square().sum())
        if not math.isfinite(apart):
            raise NonFiniteError(f"state of layer {layer}: must be finite")
        yield math.sqrt(apart / max(norm_a, norm_b)) if apart else 0.0


def _tensors(layer: object) -> Iterator[Tensor]:
    """The floating-point tensors of a layer's state in float64; of a cache, the slots of its tokens."""
    for part in pytree.tree_leaves(layer, is_leaf=lambda part: isinstance(part, Cache | Tuned)):
        if isinstance(part, Tuned):
            yield from _tensors(part.mixer)  # trained parts do not come from the text
            continue
        for x in part.span(0, part.spanned()) if isinstance(part, Cache) else (part,):
            if isinstance(x, Tensor) and x.is_floating_point():
                yield x.double()
