"""Hooks of decoding: what acts on a row between the model's step and its next token, such as a safe set, a grammar or a
user's own.

A hook stands in `hooks` of `generate`, `Rows`, `Rows.add` or `Session.say`, beside others in the order in which they
act; so do the logits processors of transformers. What a hook does not touch keeps its bits, and one that raises ends
its own row with that error.

Shapes: N states of one row, D model width, V vocabulary, T time.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from perspectron.decode.batch import Batch
from perspectron.decode.row import Row, Verdict
from perspectron.model.state import LMState
from perspectron.util.config import require
from perspectron.util.errors import ConfigError, PerspectronError

T = TypeVar("T")
Processor = Callable[[Tensor, Tensor], Tensor]
"""A logits processor as transformers has them: `(input_ids [N,T], scores [N,V]) -> scores`."""


class Mark(NamedTuple):
    """A verdict, as `Verdict` has its fields."""

    flagged: bool = False
    token: int | None = None
    stop: bool = False


class Hook:
    """A hook that changes nothing; its methods are called in this order, and none may change a tensor in place."""

    name = ""
    """The key of its verdicts, and its name in errors; the name of the class if empty."""
    keeps_before = False
    """True if it asks for `Step.before`."""
    reads_ahead = False
    """True if it looks at logits and tokens alone, so that drafts may be read for its row and those beside it."""
    shares_prefixes = True
    """False if its rows must read their prompts themselves, and store nothing that was read."""

    @property
    def judges(self) -> bool:
        """True if it gives verdicts, by which a row may stop."""
        return type(self).verdict is not Hook.verdict

    def begin(self, row: Row) -> "Hook":
        """The hook that follows this row, before it reads anything: one of its own where there is something to
        remember. It may change the row. ConfigError: it does not fit the row."""
        return self

    def prompt(self, ids: list[int], state: LMState, *, begins: bool, last: bool) -> None:
        """The row is about to read these tokens of its prompt after `state`, which will be used up. begins: they begin
        a text. last: they end the prompt."""

    def hidden(self, hidden_ND: Tensor, step: "Step") -> Tensor:
        """The hidden states for the head to read in place of these."""
        return hidden_ND

    def logits(self, logits_NV: Tensor, step: "Step") -> Tensor:
        """The logits to draw from in the place of these, on the CPU; −inf is never drawn."""
        return logits_NV

    def verdict(self, step: "Step", id: int) -> Verdict | None:
        """The verdict on a token that was drawn; None: take it."""
        return None

    def took(self, id: int) -> bool:
        """Called when the row takes this token. True if its text is complete."""
        return False

    def end(self, state: LMState) -> LMState:
        """The state to keep of a row that leaves."""
        return state

    def report(self, verdicts: Sequence[Sequence[Any]], seconds: float) -> tuple[dict[str, Any], str]:
        """Report on all rows for `perspectron generate`: fields of its JSON, and a line to print, perhaps empty."""
        return {}, ""


class Step:
    """A row after the model has read its last token, as hooks see it.

    hidden_1D: the head's input, before any hook. logits_1V: logits to draw from, once all hooks have acted on them.
    verdicts: those of earlier hooks, by name; of several with one name, all but the first with " 2" and so on.
    stops: one of them stops the row. error: raised by a hook; the row then ends.
    """

    def __init__(self, batch: Batch, at: int, hooks: Sequence[Hook], hidden_1D: Tensor) -> None:
        self.row, self.hooks, self.hidden_1D = batch.rows[at], hooks, hidden_1D
        self.logits_1V: Tensor = hidden_1D
        self.verdicts, self.stops = dict[str, Verdict](), False
        self.error: PerspectronError | None = None
        self._batch, self._at = batch, at

    @property
    def state(self) -> LMState:
        """A copy of the row's state. Assigned another one, the row goes on from that."""
        return self._batch.state_at(self._at)

    @state.setter
    def state(self, state: LMState) -> None:
        self._batch.put(self._at, state)

    @property
    def before(self) -> LMState:
        """A copy of the row's state before its last token. StateError before the first one after a prompt, which has
        none, and where no hook has `keeps_before`."""
        return self._batch.before_at(self._at)

    @property
    def position(self) -> int:
        """The position of the row's last token in its document; 0 if the state does not count tokens."""
        return self._batch.position(self._at)

    def look(self, hidden_ND: Tensor) -> Tensor:
        """The logits [N,V] from which the row would draw if the model had given these hidden states."""
        logits_NV = self._batch.model.head(self.seen(hidden_ND))
        return self.scores(logits_NV.cpu()[:, : self.row.vocabulary.vocab_size])

    def seen(self, hidden_ND: Tensor) -> Tensor:
        """The hidden states after all hooks, for the head to read."""
        for hook in self.hooks:
            hidden_ND = ask(hook, _alike, hook.hidden, hidden_ND, self)
        return hidden_ND

    def scores(self, logits_NV: Tensor) -> Tensor:
        """The logits after all hooks and the row's own minimum of tokens."""
        for hook in self.hooks:
            logits_NV = ask(hook, _alike, hook.logits, logits_NV, self)
        if self.row.early > 0:
            logits_NV = logits_NV.index_fill(1, torch.tensor([*self.row.ends], dtype=torch.int64), -torch.inf)
        return logits_NV

    def judge(self, id: int) -> int:
        """The token to take in the place of one that was drawn; the verdicts are kept."""
        names = [named(hook) for hook in self.hooks]
        for at, hook in enumerate(self.hooks):
            verdict = ask(hook, hook.verdict, self, id)
            if verdict is not None:
                again = names[:at].count(names[at])
                self.verdicts[f"{names[at]} {again + 1}" if again else names[at]] = verdict
                self.stops |= verdict.stop
                id = id if verdict.token is None else ask(hook, self._known, verdict.token)
        return id

    def _known(self, token: int) -> int:
        """A token that a hook asks for, as an int. ValueError: it is not in the vocabulary."""
        V, id = self.row.vocabulary.vocab_size, operator.index(token)
        if not 0 <= id < V:
            raise ValueError(f"token {id}, must be ≥ 0 and < {V}")
        return id

    def take(self, id: int) -> bool:
        """Tell the hooks that a token is taken: True if one of them says that the text is complete."""
        complete = [ask(hook, hook.took, id) for hook in self.hooks]
        return any(complete)

    def attempt(self, work: Callable[..., T], *args: Any) -> T | None:
        """The result of a hook's work; None after its error, which ends the row."""
        try:
            return None if self.error else work(*args)
        except PerspectronError as error:
            self.error = error
            return None


def named(hook: Hook) -> str:
    return hook.name or type(hook).__name__


def ask(hook: Hook, work: Callable[..., T], *args: Any, **more: Any) -> T:
    """The result of a hook's work. PerspectronError: its own, or, for any other error, one with the hook's name."""
    try:
        return work(*args, **more)
    except PerspectronError:
        raise
    except Exception as error:
        raise PerspectronError(f"hook {named(hook)}: {type(error).__name__}: {error}") from error


def _alike(change: Callable[[Tensor, Step], Tensor], x: Tensor, step: Step) -> Tensor:
    """Apply a hook's change. ValueError: the result is not a tensor of the same shape."""
    y = change(x, step)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        kind = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"gave {kind}, must be a tensor {list(x.shape)}")
    return y


class _Processor(Hook):
    """A logits processor as a hook."""

    reads_ahead = True

    def __init__(self, call: Processor) -> None:
        self.call, self.name = call, type(call).__name__

    def logits(self, logits_NV: Tensor, step: Step) -> Tensor:
        ids_NT = torch.tensor([step.row.ids[:]] * len(logits_NV))
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        return self.call(ids_NT, logits_NV.to(wide, copy=True))  # some change it in place


def hooks_of(given: Iterable[Hook | Processor]) -> list[Hook]:
    """The hooks, logits processors wrapped as such. ConfigError: something that is neither."""
    require(isinstance(given, Iterable), "hooks", given, "a list of hooks")
    hooks = list[Hook]()
    for one in given:
        if not isinstance(one, Hook) and not callable(one):
            raise ConfigError(f"hooks: {one!r}, must be a Hook or take (input_ids, scores)")
        hooks.append(one if isinstance(one, Hook) else _Processor(one))
    return hooks
