"""Text after a prompt: read it in chunks, draw token by token, stop, and go on later from where it stopped.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from perspectron.config import require
from perspectron.decode.sampling import SamplingConfig, sample
from perspectron.decode.text import TextStream
from perspectron.errors import ConfigError, StateError
from perspectron.model import LanguageModel
from perspectron.state import LMState, Stateful, load_extra, load_state, save_state

END_OF_TEXT_ID = 0
"""The id that stands before every document. Models are trained to remember nothing across it."""

Finish = Literal["stop", "end", "length"]


class Vocabulary(Protocol):
    """What generating asks of a tokenizer."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...
    def token_bytes(self, id: int) -> bytes: ...


@dataclass(frozen=True)
class Conversation:
    """All that is needed to go on. Going on uses it up, because the state is updated in place: keep a `fork()`
    to go on from the same point twice.

    state: of what was read. pending: per row, tokens not yet read; after `generate` exactly one, the last one
    drawn. That holds however the row finished: tokens of a stop string are part of the history, though not of
    the text; after "end" the pending token is the end-of-text token, so that the row goes on with a new
    document and remembers nothing of the old one. recent: per row, the last `repetition_window` tokens given
    or drawn, end-of-text tokens left out. drawn: per row, how many tokens were ever drawn.
    """

    state: LMState
    pending: list[list[int]]
    recent: list[list[int]]
    drawn: list[int]

    def fork(self) -> "Conversation":
        """An independent copy."""
        pending, recent = ([list(ids) for ids in rows] for rows in (self.pending, self.recent))
        return Conversation(self.state.fork(), pending, recent, list(self.drawn))

    def save(self, path: Path | str, model: Stateful) -> None:
        """Write to one file, whole or not at all. StorageError when it cannot be written."""
        fields = {"pending": self.pending, "recent": self.recent, "drawn": self.drawn}
        save_state(path, self.state, model, extra={"conversation": fields})

    @classmethod
    def load(cls, path: Path | str, model: Stateful) -> "Conversation":
        """Read a saved conversation. StateError: missing, damaged, another model's, or a bare state."""
        state = load_state(path, model)
        fields: Any = load_extra(path).get("conversation")
        if not _are_conversation_fields(fields, state.batch_size):
            raise StateError(f"{path}: not a conversation, lacks its pending, recent and drawn tokens")
        return cls(state, fields["pending"], fields["recent"], fields["drawn"])


@dataclass(frozen=True)
class Generation:
    """What `generate` made, row by row.

    texts: ids: every token drawn, those of a stop string and the end-of-text token included. finished: "stop"
    at a stop string, "end" at the end-of-text token, "length" at `max_tokens`. conversation: to go on from.
    """

    texts: list[str]
    ids: list[list[int]]
    finished: list[Finish]
    conversation: Conversation


@torch.inference_mode()
def prefill(
    model: LanguageModel, prompts: Sequence[Sequence[int]], state: LMState | None = None, *, chunk: int = 512
) -> tuple[Tensor, LMState]:
    """Read a batch of prompts of any lengths ≥ 1 after `state`, which is used up: (the logits [B,V] after each
    row's last token, the new state).

    `chunk` tokens at a time, so that memory beyond the state does not grow with the prompt. An end-of-text
    token starts a document: nothing before it is remembered, as in training.
    ConfigError: no prompts, a prompt of no tokens, ids outside the model's vocabulary, a state of another
    batch size.
    """
    require(chunk >= 1, "chunk", chunk, "≥ 1")
    _check_ids(prompts, model.config.vocab_size)
    B = len(prompts)
    if state is not None and state.batch_size != B:
        raise ConfigError(f"prompts: {B} given, must be as many as the state has rows, {state.batch_size}")
    device = model.device
    fresh = state is None
    state = None if state is None else state.to(device)  # a loaded one is on the CPU
    last_BD = torch.zeros(B, model.config.d_model, dtype=model.dtype, device=device)
    row_B = torch.arange(B, device=device)
    for start in range(0, max(map(len, prompts)), chunk):
        parts = [list(prompt[start : start + chunk]) for prompt in prompts]
        ids_BT, reset_BT, pad_BT = _batch(parts, start == 0 and fresh, device)
        hidden_BTD, state, _ = model.hidden(ids_BT, state, reset_BT=reset_BT, pad_BT=pad_BT)
        length_B = torch.tensor([len(part) for part in parts], device=device)
        here_BD = hidden_BTD[row_B, length_B - 1]
        last_BD = torch.where((length_B > 0)[:, None], here_BD, last_BD)
    assert state is not None
    return model.head(last_BD), state


@torch.inference_mode()
def generate(
    model: LanguageModel,
    tokenizer: Vocabulary,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008  (frozen)
    stop: Sequence[str] = (),
    conversation: Conversation | None = None,
    on_text: Callable[[int, str], None] | None = None,
    chunk: int = 512,
) -> Generation:
    """Draw up to `max_tokens` tokens after each prompt, given as text or as ids.

    Without `conversation` the end-of-text token is read first, and a prompt needs at least one token. With
    one, which is used up, the prompts follow what stands there, and may be empty; the tokens are then the
    same as if it had not been interrupted. A row that has finished waits, its state frozen, for the others.

    stop: a row ends when its text contains one of these; the text ends before it. on_text: called with (row,
    piece) as text becomes certain: whole characters, and nothing that may begin a stop string; the pieces
    joined are exactly `texts`. Half a character at the end of a row shows as U+FFFD.
    ConfigError: a prompt of no tokens, ids outside the vocabulary, a number out of bounds, another number of
    prompts than the conversation has rows, more tokens than a table of learned positions
    has left. NonFiniteError: the model gave logits that are not finite.
    """
    require(max_tokens >= 1, "max_tokens", max_tokens, "≥ 1")
    require(not isinstance(stop, str), "stop", stop, "a list of strings")
    require(all(stop), "stop", list(stop), "strings of at least one character")
    V = tokenizer.vocab_size
    known = model.config.vocab_size
    require(known >= V, "vocab_size of the tokenizer", V, f"≤ that of the model, {known}")
    given = [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    unread, state = _unread(given, V, conversation)
    _check_room(model.config.positions, unread, state, max_tokens)
    rows = _begin(given, conversation, stop, sampling.repetition_window)
    logits_BV, state = prefill(model, unread, state, chunk=chunk)
    while True:
        # A model may have more ids than its tokenizer knows.
        recent, drawn = [row.recent for row in rows], [row.drawn for row in rows]
        ids = sample(logits_BV[:, :V], recent, drawn, sampling).tolist()
        for index, (row, id) in enumerate(zip(rows, ids, strict=True)):
            if row.finished is None:
                piece = row.take(id, tokenizer.token_bytes(id), max_tokens, sampling.repetition_window)
                if piece and on_text is not None:
                    on_text(index, piece)
        done = [row.finished is not None for row in rows]
        if all(done):
            return _end(rows, state)
        last_B1 = torch.tensor([[row.ids[-1]] for row in rows], device=logits_BV.device)
        pad_B1 = torch.tensor(done, device=logits_BV.device)[:, None] if any(done) else None
        hidden_B1D, state, _ = model.hidden(last_B1, state, pad_BT=pad_B1)
        logits_BV = model.head(hidden_B1D)[:, 0]


@dataclass
class _Row:
    """One row under way."""

    recent: list[int]
    drawn: int
    stream: TextStream
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finished: Finish | None = None

    def take(self, id: int, data: bytes, max_tokens: int, window: int) -> str:
        """Count a drawn token in; the text it makes certain."""
        self.ids.append(id)
        self.drawn += 1
        piece = self.stream.push(data)
        if id == END_OF_TEXT_ID:
            self.finished = "end"
        else:
            self.recent = [*self.recent, id][-window:]
            if self.stream.stopped:
                self.finished = "stop"
            elif len(self.ids) == max_tokens:
                self.finished = "length"
        if self.finished is not None:
            piece += self.stream.flush()
        self.pieces.append(piece)
        return piece


def _unread(
    given: list[list[int]], vocab_size: int, conversation: Conversation | None
) -> tuple[list[list[int]], LMState | None]:
    """What each row has to read, and the state to read it after."""
    if conversation is None:
        _check_ids(given, vocab_size)
        return [[END_OF_TEXT_ID, *ids] for ids in given], None
    B, rows = len(given), len(conversation.pending)
    if rows != B:
        raise ConfigError(f"prompts: {B} given, must be as many as the conversation has rows, {rows}")
    unread = [[*pending, *ids] for pending, ids in zip(conversation.pending, given, strict=True)]
    _check_ids(unread, vocab_size)
    return unread, conversation.state


def _begin(
    given: list[list[int]], conversation: Conversation | None, stop: Sequence[str], window: int
) -> list[_Row]:
    recent = [[] for _ in given] if conversation is None else conversation.recent
    drawn = [0] * len(given) if conversation is None else conversation.drawn
    # The penalty does not count the end of a document: it is no repetition.
    recent = [
        [*old, *(id for id in new if id != END_OF_TEXT_ID)][-window:]
        for old, new in zip(recent, given, strict=True)
    ]
    return [_Row(ids, count, TextStream(stop)) for ids, count in zip(recent, drawn, strict=True)]


def _end(rows: list[_Row], state: LMState) -> Generation:
    pending = [row.ids[-1:] for row in rows]
    conversation = Conversation(state, pending, [row.recent for row in rows], [row.drawn for row in rows])
    finished = [row.finished for row in rows if row.finished is not None]
    return Generation(
        ["".join(row.pieces) for row in rows], [row.ids for row in rows], finished, conversation
    )


def _batch(
    parts: list[list[int]], fresh: bool, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """ids, reset and pad [B,T] of rows of any lengths, padded at the right; None where the mask is empty.
    `fresh`: nothing was read before, so that a document that starts at column 0 resets nothing."""
    T = max(map(len, parts))
    ids_BT = torch.tensor([part + [END_OF_TEXT_ID] * (T - len(part)) for part in parts])
    pad_BT = torch.arange(T) >= torch.tensor([len(part) for part in parts])[:, None]
    reset_BT = (ids_BT == END_OF_TEXT_ID) & ~pad_BT
    if fresh:
        reset_BT[:, 0] = False
    reset, pad = (mask_BT.to(device) if mask_BT.any() else None for mask_BT in (reset_BT, pad_BT))
    return ids_BT.to(device), reset, pad


def _check_room(positions: int, unread: list[list[int]], state: LMState | None, max_tokens: int) -> None:
    """Refuse at once what would run off a table of learned positions."""
    if positions == 0:
        return
    lengths = [0] * len(unread) if state is None or state.length_B is None else state.length_B.tolist()
    for row, (length, ids) in enumerate(zip(lengths, unread, strict=True)):
        if END_OF_TEXT_ID in ids:
            length, ids = 0, ids[len(ids) - 1 - ids[::-1].index(END_OF_TEXT_ID) :]
        left = positions - length - len(ids) + 1
        require(max_tokens <= left, "max_tokens", max_tokens,
                f"≤ {max(left, 0)}, what row {row} has left of positions = {positions}")  # fmt: skip


def _check_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    require(len(prompts) >= 1, "prompts", list(prompts), "at least one")
    for row, ids in enumerate(prompts):
        if len(ids) == 0:
            raise ConfigError(f"prompt has no tokens, must be ≥ 1 (row {row})")
        for id in (min(ids), max(ids)):
            require(0 <= id < vocab_size, f"prompt: token id (row {row})", id, f"≥ 0 and < {vocab_size}")


def _are_conversation_fields(fields: Any, rows: int) -> bool:
    if not isinstance(fields, dict) or set(fields) != {"pending", "recent", "drawn"}:
        return False
    if not all(isinstance(field, list) and len(field) == rows for field in fields.values()):
        return False
    ids = [*fields["pending"], *fields["recent"], fields["drawn"]]
    return all(isinstance(row, list) and all(type(id) is int for id in row) for row in ids)
