"""A check that a text's output depends on nothing but itself: digests of one text read and drawn in many ways."""

import hashlib
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from perspectron import native
from perspectron.decode.reading import CHUNK
from perspectron.decode.row import Vocabulary
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.model.model import LanguageModel
from perspectron.util.config import require

BATCHES = (1, 2, 7, 8, 9, 33, 64)
PIECES = (1, 5, CHUNK, CHUNK + 1)
DRAWN = 8


@dataclass(frozen=True)
class Way:
    """One way to read and draw the text. together: as `Rows` has it. name: how it differs otherwise. digest: digest of
    all tokens and all logits. promised: True if it must equal that of the text alone."""

    together: bool
    name: str
    digest: str
    promised: bool


def ways(
    model: LanguageModel,
    tokenizer: Vocabulary,
    *,
    batches: Sequence[int] = BATCHES,
    pieces: Sequence[int] = PIECES,
    threads: Sequence[int] = (1, 2),
) -> list[Way]:
    """Digests of the text alone, in batches with others, read in pieces, and on other numbers of threads; the number of
    threads is restored at the end."""
    found, said = list[Way](), partial(digest, model, tokenizer)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if native.available():
            stack.callback(native.set_threads, native.threads())
        for together in (False, True):

            def add(name: str, promised: bool, together: bool = together, **how: int) -> None:
                found.append(Way(together, name, said(together=together, **how), promised))

            _set_threads(threads[0])
            for rows in batches:
                add(f"batch of {rows}", True, others=rows - 1)
            for piece in pieces:
                add(f"pieces of {piece}", True, piece=piece)
            for count in threads[1:]:
                _set_threads(count)
                add(f"{count} threads", False)
    return found


@torch.inference_mode()
def digest(
    model: LanguageModel, tokenizer: Vocabulary, *, together: bool = False, others: int = 0, piece: int = 0
) -> str:
    """The digest of the tokens and all logits drawn after one text. others: texts that are under way beside it, half
    of which join after its first token. piece: tokens of the text that are given at once; 0 is all."""
    V, room = tokenizer.vocab_size, model.config.room or CHUNK + 3 * DRAWN
    require(room >= 2 * DRAWN, "positions", room, f"≥ {2 * DRAWN} to be verified")
    length = min(CHUNK + 22, room - DRAWN)
    words = torch.tensor([id for id in range(V) if id not in tokenizer.specials.silent])
    ids, session = _text(0, length, words), Session(model, tokenizer)
    for start in range(0, length, piece or length):
        session.read(ids[start : start + (piece or length)])
    rows, greedy = Rows(model, tokenizer, together=together), SamplingConfig(temperature=0.0)

    def join(numbers: Sequence[int]) -> None:
        for number in numbers:
            text = _text(number, 1 + number % 9, words)
            rows.add(text, max_tokens=min(2 * DRAWN + number % DRAWN, room - len(text)), stream=number)

    join(range(1, 1 + others // 2))
    row = session.enter(rows, max_tokens=DRAWN, sampling=greedy, stream=0, logprobs=V)
    told, joined = hashlib.sha256(), False
    while row in rows.active:
        for drawn in rows.step():
            if drawn.row == row:
                told.update(struct.pack("<q", -1 if drawn.id is None else drawn.id))
                told.update(b"".join(struct.pack("<qd", *one) for one in drawn.likely))
                if not joined:
                    join(range(1 + others // 2, 1 + others))
                    joined = True
    return told.hexdigest()


def bits() -> dict[str, str]:
    """The software and hardware that bits depend on, in words."""
    isa = native.isa() if native.available() else "none"
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "native": isa}


def _set_threads(count: int) -> None:
    torch.set_num_threads(count)
    if native.available():
        native.set_threads(count)


def _text(number: int, length: int, words_V: Tensor) -> list[int]:
    """Random ids of these, none of which begins or ends a text."""
    draw = torch.Generator().manual_seed(number)
    return words_V[torch.randint(len(words_V), (length,), generator=draw)].tolist()
