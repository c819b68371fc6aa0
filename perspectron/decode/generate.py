"""Generation of a batch of texts to their ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from perspectron.decode.batch import Finish, Piece
from perspectron.decode.constrain import Constraint
from perspectron.decode.conversation import Conversation
from perspectron.decode.reading import CHUNK
from perspectron.decode.rows import Rows, Vocabulary
from perspectron.decode.sampling import SamplingConfig
from perspectron.designs.perspective.safety import Safety
from perspectron.designs.perspective.views import PerspectivesConfig, Verdict
from perspectron.model.model import LanguageModel
from perspectron.util.config import require
from perspectron.util.errors import ConfigError, NonFiniteError


@dataclass(frozen=True)
class Generation:
    """The result of `generate`, row by row.

    texts: the new text of each row. ids: every token drawn, including those of a stop string and the end-of-text
    token. finished: "stop" at a stop string or where a constraint has the text complete, "end" at the end-of-text token
    or a stop id, "length" at `max_tokens`, "unsafe" where a state was outside the safe set. conversation: to continue
    from. verdicts: of every token, if perspectives were asked. unsafe: the numbers of the tokens drawn from states
    outside the safe set.
    """

    texts: list[str]
    ids: list[list[int]]
    finished: list[Finish]
    conversation: Conversation
    verdicts: list[list[Verdict]]
    unsafe: list[list[int]]


@torch.inference_mode()
def generate(
    model: LanguageModel,
    tokenizer: Vocabulary,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_tokens: int = 200,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008
    stop: Sequence[str] = (),
    conversation: Conversation | None = None,
    on_text: Callable[[int, str], None] | None = None,
    on_piece: Callable[[Piece], None] | None = None,
    on_read: Callable[[int, int], None] | None = None,
    chunk: int = CHUNK,
    perspectives: PerspectivesConfig | None = None,
    safety: Safety | None = None,
    constraint: Constraint | None = None,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
) -> Generation:
    """Draw up to `max_tokens` tokens after each prompt, given as text or as ids.

    Without `conversation` the end-of-text token is read first; an empty prompt then begins a document. With a
    conversation, which is consumed, the prompts continue it and may be empty; the tokens are then the same as without
    the interruption. Row i draws from stream i of the seed's noise. Finished rows cost nothing.

    stop: strings that end a row; the text ends before the string. on_text: called with (row, piece) as soon as text is
    certain, which means whole characters that cannot begin a stop string; the joined pieces equal `texts`. Half a
    character at the end of a row becomes U+FFFD. on_piece: called with each `Piece`, also one without text. on_read:
    called with (prompt tokens read, all prompt tokens) while prompts are being read. chunk: prompt tokens read at once;
    apart from the ids, memory does not grow with the length of a prompt. perspectives: unsure tokens are judged from
    several views of the experts. safety: states are held in a safe set. constraint, min_tokens, stop_ids: as
    `Rows.add` has them.

    ConfigError: ids outside the vocabulary, a number out of bounds, a number of prompts that differs from the
    conversation's rows, more tokens than a table of learned positions has left. NonFiniteError: the logits are not
    finite, or none of those that a constraint allows.
    """
    listed = not isinstance(prompts, str | bytes) and not any(isinstance(prompt, int) for prompt in prompts)
    require(listed, "prompts", prompts, "a list of texts, or of lists of ids")
    require(len(prompts) >= 1, "prompts", list(prompts), "at least one")
    B, together = len(prompts), len(prompts) > 1
    rows = Rows(model, tokenizer, chunk=chunk, together=together, perspectives=perspectives, safety=safety)
    if conversation is not None and conversation.rows != B:
        known = conversation.rows
        raise ConfigError(f"prompts: {B} given, must be as many as the conversation has rows, {known}")
    for row, prompt in enumerate(prompts):
        talk = conversation if conversation is None or B == 1 else conversation.take(row)
        rows.add(
            prompt, max_tokens=max_tokens, sampling=sampling, stop=stop, conversation=talk, stream=row,
            constraint=constraint, min_tokens=min_tokens, stop_ids=stop_ids,
        )  # fmt: skip
    told = [_Told() for _ in range(B)]
    while rows.active:
        pieces = rows.step()
        if on_read is not None and (all_read := rows.read)[1]:
            on_read(*all_read)
        for piece in pieces:
            told[piece.row].take(piece)
            if on_piece is not None:
                on_piece(piece)
            if piece.text and on_text is not None:
                on_text(piece.row, piece.text)
    return Generation(
        texts=[row.text for row in told],
        ids=[row.ids for row in told],
        finished=[row.finished for row in told],
        conversation=Conversation.stack([rows.remove(row) for row in range(B)]),
        verdicts=[row.verdicts for row in told],
        unsafe=[row.unsafe for row in told],
    )


@dataclass
class _Told:
    """One row's part of a `Generation`, so far."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finished: Finish = "length"
    verdicts: list[Verdict] = field(default_factory=list)
    unsafe: list[int] = field(default_factory=list)

    def take(self, piece: Piece) -> None:
        """Add a piece. NonFiniteError: its logits were not finite."""
        if piece.finished == "error":
            said = f"logits of row {piece.row} after {len(self.ids)} tokens: must be finite"
            raise NonFiniteError(piece.error or said)
        if piece.unsafe:
            self.unsafe.append(len(self.ids))
        if piece.verdict is not None:
            self.verdicts.append(piece.verdict)
        if piece.id is not None:
            self.ids.append(piece.id)
        self.text += piece.text
        self.finished = piece.finished or self.finished
