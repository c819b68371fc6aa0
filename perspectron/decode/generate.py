"""Texts after prompts, drawn until each has come to its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from perspectron.config import require
from perspectron.decode.conversation import Conversation
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Finish, Session, Vocabulary
from perspectron.errors import ConfigError, NonFiniteError
from perspectron.model import LanguageModel


@dataclass(frozen=True)
class Generation:
    """The result of `generate`, row by row.

    texts: ids: every token drawn, those of a stop string and the end-of-text token included. finished: "stop"
    at a stop string, "end" at the end-of-text token, "length" at `max_tokens`. conversation: to go on from.
    """

    texts: list[str]
    ids: list[list[int]]
    finished: list[Finish]
    conversation: Conversation


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
    on_read: Callable[[int, int], None] | None = None,
    chunk: int = 512,
) -> Generation:
    """Draw up to `max_tokens` tokens after each prompt, given as text or as ids.

    Without `conversation` the end-of-text token is read first: after it an empty prompt is the beginning of a
    document. With one, which is used up, the prompts follow what stands there; where they are empty, the tokens are
    the same as if it had not been interrupted. Row i draws from stream i of the seed's noise. A row that has finished
    costs nothing while the others go on.

    stop: a row ends when its text contains one of these; the text ends before it. on_text: called with (row,
    piece) as text becomes certain: whole characters, and nothing that may begin a stop string; the pieces
    joined are exactly `texts`. Half a character at the end of a row shows as U+FFFD. on_read: called with
    (tokens of prompts that are read, all of them) as long as some are not. chunk: tokens of a prompt that are read at
    once; memory beyond the state does not grow with a prompt's length, but for its ids.
    ConfigError: ids outside the vocabulary, a number out of bounds, another number of
    prompts than the conversation has rows, more tokens than a table of learned positions
    has left. NonFiniteError: the model gave logits that are not finite.
    """
    require(len(prompts) >= 1, "prompts", list(prompts), "at least one")
    B, session = len(prompts), Session(model, tokenizer, chunk=chunk)
    if conversation is not None and conversation.rows != B:
        rows = conversation.rows
        raise ConfigError(f"prompts: {B} given, must be as many as the conversation has rows, {rows}")
    for row, prompt in enumerate(prompts):
        talk = conversation if conversation is None or B == 1 else conversation.take(row)
        session.add(
            prompt, max_tokens=max_tokens, sampling=sampling, stop=stop, conversation=talk, stream=row
        )
    texts, ids, finished = [""] * B, [list[int]() for _ in range(B)], dict[int, Finish]()
    while session.active:
        pieces = session.step()
        if on_read is not None and (all_read := session.read)[1]:
            on_read(*all_read)
        for piece in pieces:
            if piece.finished == "error" or piece.id is None:
                raise NonFiniteError(
                    f"logits of row {piece.row} after {len(ids[piece.row])} tokens: must be finite"
                )
            ids[piece.row].append(piece.id)
            texts[piece.row] += piece.text
            if piece.text and on_text is not None:
                on_text(piece.row, piece.text)
            if piece.finished is not None:
                finished[piece.row] = piece.finished
    after = Conversation.stack([session.remove(row) for row in range(B)])
    return Generation(texts, ids, [finished[row] for row in range(B)], after)
