"""Generation of a batch of texts to their ends."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from perspectron.decode.conversation import Conversation
from perspectron.decode.drafts import Drafter
from perspectron.decode.processors import Hook, Processor
from perspectron.decode.reading import CHUNK
from perspectron.decode.row import Finish, Piece, Verdict, Vocabulary
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.model.model import LanguageModel
from perspectron.util.config import require
from perspectron.util.errors import ConfigError


@dataclass(frozen=True)
class Generation:
    """The result of `generate`, row by row.

    texts: the new text of each row. ids: every token drawn, including those of a stop string and the one that ends the
    text. finished: "stop" at a stop string or when a hook says the text is complete, "end" at a token that ends texts
    or a stop id, "length" at `max_tokens`, "unsafe" when a hook stopped it. conversation: to continue from. verdicts:
    by the name of each hook that gave any, those on every token, also on one that stopped its row.
    """

    texts: list[str]
    ids: list[list[int]]
    finished: list[Finish]
    conversation: Conversation
    verdicts: dict[str, list[list[Verdict]]]


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
    on_piece: Callable[[Piece], None] | None = None,
    on_read: Callable[[int, int], None] | None = None,
    chunk: int = CHUNK,
    hooks: Sequence[Hook | Processor] = (),
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    drafts: Drafter | None = None,
) -> Generation:
    """Draw up to `max_tokens` tokens after each prompt, given as text or as ids.

    Without `conversation` the tokenizer's prefix is read first; an empty prompt then begins a document. With a
    conversation, which stays unchanged, the prompts continue it and may be empty; the tokens are then the same as
    without the interruption. Row i draws from stream i of the seed's noise. Finished rows cost nothing.

    stop: strings that end a row; the text ends before the string. on_piece: called with each `Piece`, whose text,
    where it has one, is certain: whole characters that cannot begin a stop string. Joined they equal `texts`; half
    a character at the end of a row becomes U+FFFD. on_read: called with (prompt tokens read, all prompt tokens)
    while prompts are being read. chunk: prompt tokens read at once; apart from the ids, memory does not grow with
    the length of a prompt. hooks, min_tokens, stop_ids: as `Rows.add` has them. drafts: as `Rows` has them.

    ConfigError: ids outside the vocabulary, a number out of bounds, a number of prompts that differs from the
    conversation's rows, more tokens than a table of learned positions has left. NonFiniteError: the logits are not
    finite, or none of those that hooks leave. PerspectronError: a hook failed.

        >>> model, tokenizer = perspectron.load("runs/play")
        >>> result = perspectron.generate(model, tokenizer, ["KING", "QUEEN"], max_tokens=5)
        >>> [len(ids) for ids in result.ids], result.finished
        ([5, 5], ['length', 'length'])
        >>> more = perspectron.generate(model, tokenizer, ["", ""], max_tokens=5, conversation=result.conversation)
    """
    listed = isinstance(prompts, Collection) and not isinstance(prompts, str | bytes)
    listed = listed and not any(isinstance(prompt, int) for prompt in prompts)
    require(listed, "prompts", prompts, "a list of texts, or of lists of ids")
    require(len(prompts) >= 1, "prompts", list(prompts), "at least one")
    B, together = len(prompts), len(prompts) > 1
    talks = conversation is None or isinstance(conversation, Conversation)
    require(talks, "conversation", conversation, "a Conversation")
    if conversation is not None and conversation.rows != B:
        known = conversation.rows
        raise ConfigError(f"prompts: {B} given, must be as many as the conversation has rows, {known}")
    rows = Rows(model, tokenizer, chunk=chunk, together=together, hooks=hooks, drafts=drafts)
    for row, prompt in enumerate(prompts):
        talk = conversation and (conversation.fork() if B == 1 else conversation.take(row))
        rows.add(
            prompt, max_tokens=max_tokens, sampling=sampling, stop=stop, conversation=talk, stream=row,
            min_tokens=min_tokens, stop_ids=stop_ids, fresh=talk is not None and talk.begins,
        )  # fmt: skip
    pieces: list[list[Piece]] = [[] for _ in range(B)]
    while rows.active:
        drawn = rows.step()
        if on_read is not None and (all_read := rows.read)[1]:
            on_read(*all_read)
        for piece in drawn:
            if piece.error is not None:
                raise piece.error
            pieces[piece.row].append(piece)
            if on_piece is not None:
                on_piece(piece)
    return _joined(pieces, Conversation.stack([rows.remove(row) for row in range(B)]))


def _joined(pieces: Sequence[Sequence[Piece]], conversation: Conversation) -> Generation:
    """Assemble the result from the pieces of each row."""
    names = dict.fromkeys(name for row in pieces for piece in row for name in piece.verdicts)
    return Generation(
        texts=["".join(piece.text for piece in row) for row in pieces],
        ids=[[piece.id for piece in row if piece.id is not None] for row in pieces],
        finished=[row[-1].finished or "length" for row in pieces],
        conversation=conversation,
        verdicts={
            name: [[piece.verdicts[name] for piece in row if name in piece.verdicts] for row in pieces]
            for name in names
        },
    )
