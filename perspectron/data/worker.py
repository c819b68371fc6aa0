"""Texts to arrays of ids, in this process or another one, which imports nothing but the tokenizer's library."""

import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing import connection, parent_process
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

END_OF_TEXT_ID = 0

Item = tuple[str, str]
"""A prompt and a text, each of which may be empty."""


class Encoded(NamedTuple):
    """Documents one after another. ids: each begins with the separator. lengths: ids of each document. learned: ids of
    each document before what is learned: the separator and the prompt. bytes: of each document's text."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    learned: NDArray[np.int64]
    bytes: NDArray[np.int64]


def encode(inner: tokenizers.Tokenizer, items: Sequence[Item], dtype: str) -> Encoded:
    """The ids of some documents."""
    texts = [text for item in items for text in item if text]
    found = iter(inner.encode_batch_fast(texts))
    parts, lengths, learned = [], [], []
    for prompt, text in items:
        before = [END_OF_TEXT_ID, *(next(found).ids if prompt else ())]
        after = next(found).ids if text else ()
        parts.append(np.array([*before, *after], dtype))
        lengths.append(len(parts[-1]))
        learned.append(len(before))
    sizes = [len(prompt.encode()) + len(text.encode()) for prompt, text in items]
    return Encoded(np.concatenate(parts), *(np.array(part, np.int64) for part in (lengths, learned, sizes)))


def start(tokenizer: str, dtype: str) -> None:
    """Make this process ready to encode. It leaves signals to the process that started it, and ends with that one,
    however that ends."""
    global _task
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    inner = tokenizers.Tokenizer.from_str(tokenizer)
    inner.encode_special_tokens = True
    _task = (inner, dtype)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def run(items: Sequence[Item]) -> Encoded:
    """`encode` in a process that was made ready."""
    inner, dtype = _task
    return encode(inner, items, dtype)


_task: tuple[tokenizers.Tokenizer, str]


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
