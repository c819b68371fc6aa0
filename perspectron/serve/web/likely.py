"""Log-probabilities of tokens, as completions and chats have them."""

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

from perspectron.data import Tokenizer
from perspectron.decode.row import Piece, first_bytes


class Mark(NamedTuple):
    """A token, its log-probability (None if nothing precedes it), and the most likely tokens in its place."""

    id: int
    logprob: float | None
    likely: Sequence[tuple[int, float]]


def marks_of(pieces: Sequence[Piece]) -> list[Mark]:
    """Marks of the tokens drawn."""
    return [Mark(piece.id, piece.logprob, piece.likely) for piece in pieces if piece.id is not None]


def shown(tokenizer: Tokenizer, id: int) -> str:
    """A token as text, unlike any other token's; part of a character as OpenAI shows it, "bytes:" and its bytes."""
    data = tokenizer.token_bytes(id)
    if not data:
        return tokenizer.spelling(id)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "bytes:"
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if text.startswith("bytes:") else text


class Completed:
    """Writer of one choice's log-probabilities in the form of completions. echoed, text: marks and text of the prompt,
    where it comes first. begins: nothing is before it."""

    def __init__(
        self, tokenizer: Tokenizer, echoed: Sequence[Mark] = (), text: str = "", *, begins: bool = False
    ) -> None:
        self._tokenizer, self._echoed, self._start = tokenizer, echoed, len(text)
        self._begins = begins or bool(echoed)
        self._begin(0)

    def _begin(self, at: int) -> None:
        self._at, self._decoder = at, codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, marks: Sequence[Mark]) -> dict[str, Any]:
        """The entry of the next tokens; text_offset: the character of the choice's text in which each begins."""
        offsets = self._offsets(self._echoed)
        if self._start:
            self._begin(self._start)
        offsets += self._offsets(marks)
        marks, self._echoed, self._start = [*self._echoed, *marks], (), 0
        return {
            "tokens": [shown(self._tokenizer, mark.id) for mark in marks],
            "token_ids": [mark.id for mark in marks],
            "token_logprobs": [mark.logprob for mark in marks],
            "top_logprobs": [self._top(mark) for mark in marks],
            "text_offset": offsets,
        }

    def _offsets(self, marks: Sequence[Mark]) -> list[int]:
        offsets = list[int]()
        for mark in marks:
            data, open_ = self._tokenizer.token_bytes(mark.id), self._decoder.getstate()[0]
            offsets.append(self._at + _breaks(open_, data[:1]))
            if self._begins and data:
                data, self._begins = first_bytes(self._tokenizer, mark.id), False
            self._at += len(self._decoder.decode(data))
        return offsets

    def _top(self, mark: Mark) -> dict[str, float] | None:
        """The most likely tokens, the likeliest first, and the token itself."""
        if mark.logprob is None:
            return None
        pairs = dict([*mark.likely, (mark.id, mark.logprob)])
        return {shown(self._tokenizer, id): value for id, value in pairs.items()}


def _breaks(open_: bytes, byte: bytes) -> bool:
    """True if `byte` does not continue the character begun in `open_`, which then becomes U+FFFD before it."""
    try:
        codecs.utf_8_decode(open_ + byte, "strict", False)
    except UnicodeDecodeError:
        return open_ != b""
    return False


def chatted(tokenizer: Tokenizer, marks: Sequence[Mark]) -> dict[str, Any]:
    """Log-probabilities in the form of chats."""

    def one(id: int, logprob: float | None) -> dict[str, Any]:
        return {"token": shown(tokenizer, id), "logprob": logprob, "bytes": list(tokenizer.token_bytes(id))}

    return {
        "content": [one(*mark[:2]) | {"top_logprobs": [one(*pair) for pair in mark.likely]} for mark in marks]
    }
