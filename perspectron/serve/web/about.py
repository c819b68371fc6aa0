"""Descriptions of models, texts and states, as the server sends them."""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import Response

from perspectron.data import Tokenizer
from perspectron.decode.history import PARENTS, Entry, History
from perspectron.decode.row import first_bytes, within
from perspectron.decode.suggested import USED
from perspectron.serve.served import Served

TOKENS = 8192  # length of the text whose state's bytes are reported, where a model has no table of positions
PART = 1 << 14  # ids that are written without a pause for other threads
WORDS = 24
"""Tokens of a state that a list shows."""


def model_of(served: Served) -> dict[str, Any]:
    """The entry of a model in the list of models."""
    config, before = served.engine.model.config, len(served.tokenizer.specials.prefix)
    about: dict[str, Any] = {"context": config.room or None}
    about["state_tokens"] = config.positions or min(TOKENS, config.room or TOKENS)
    state = served.engine.model.init_state(1, capacity=about["state_tokens"], device="meta")
    about["state_bytes"] = state.nbytes
    about["twin_cache_bytes"] = (
        2 * 4 * len(config.blocks) * config.d_model
    )  # a token's keys and values in float32
    first, second = (
        served.engine.model.init_state(1, capacity=before + tokens, device="meta").nbytes for tokens in (1, 2)
    )
    about |= {"prefix_tokens": before, "first_token_bytes": first, "next_token_bytes": second - first}
    about["chat"] = served.template is not None
    about["sampling"] = {name: getattr(served.sampling, name) for name in USED}
    about |= {"id": served.name, "object": "model", "created": served.created}
    return about | {"owned_by": "perspectron", "design": config.name}


def texts(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[str], list[int]]:
    """(the text of each token, where a character of several tokens stands with the last of them; the number of
    characters up to the end of each token)."""
    decoder, found, ends, at = codecs.getincrementaldecoder("utf-8")("replace"), list[str](), list[int](), 0
    first = next((number for number, id in enumerate(ids, 1) if tokenizer.token_bytes(id)), 0)
    for number, id in enumerate(ids, 1):
        data = first_bytes(tokenizer, id) if number == first else tokenizer.token_bytes(id)
        found.append(decoder.decode(data, final=number == len(ids)))
        at += len(found[-1])
        ends.append(at)
    return found, ends


def drawn_of(log: Iterable[Entry]) -> list[tuple[int, int]]:
    """The ranges [start, stop) of tokens that were drawn."""
    return [(entry.start, entry.stop) for entry in log if entry.what == "drawn"]


def words(tokenizer: Tokenizer, history: History, messages: Sequence[Mapping[str, str]] = ()) -> str:
    """The first words that a state adds to the one it came from: those of the last question in a conversation; of a
    mere copy its last words, after "…"."""
    if asked := [message["content"] for message in messages if message["role"] == "user"]:
        return asked[-1][: 4 * WORDS]
    start = max((entry.stop for entry in history.entries if entry.what in PARENTS), default=0)
    own = history.ids[start : start + WORDS]
    if not own:
        return "…" + within(tokenizer, history.ids[-WORDS // 3 :])
    return within(tokenizer, own) if start else tokenizer.decode(own)


def ids_of(ids: Sequence[int]) -> Response:
    """Ids as JSON, made a part at a time: all at once it would keep every other thread waiting."""
    parts = (json.dumps(ids[start : start + PART])[1:-1] for start in range(0, len(ids), PART))
    return Response(f'{{"tokens": [{", ".join(parts)}]}}', media_type="application/json")
