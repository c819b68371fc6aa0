"""Stretches of held-out documents, read in chunks with the state carried, and intervals of their loss.

Shapes: N stretches, B rows, T time, V vocabulary.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from perspectron.data.shards import Split
from perspectron.data.tokenizer import Tokenizer
from perspectron.eval.subject import Subject
from perspectron.model.state import LMState
from perspectron.util.errors import DataError
from perspectron.util.stats import student

ROWS = 8
"""Stretches read side by side; designs that go token by token are slow without them."""
CHUNK = 2048
"""Tokens whose logits are in memory at once."""
LEAST = 4
"""Least number of stretches, or windows, for an interval."""


def stretches(split: Split, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Ids [N, length + 1], N ≤ count: `length` inputs and the target of the last, all of one document; and which of the
    targets are learned [N, length], such as completions and not their prompts.

    The first stretch of every document that is long enough, in order, then the second of each, and so on: from as many
    documents as possible. DataError when none is long enough.
    """
    ends = [*split.starts[1:].tolist(), split.tokens]
    fits = [
        (start, (end - start - 1) // length) for start, end in zip(split.starts.tolist(), ends, strict=True)
    ]
    places = sorted((turn, start) for start, turns in fits for turn in range(min(turns, count)))[:count]
    if not places:
        raise DataError(f"{split.name}: no document of {length + 1} tokens, need at least one")
    spans = [(start + turn * length, start + (turn + 1) * length + 1) for turn, start in places]
    learned = [split.is_learned(start + 1, stop) for start, stop in spans]
    ids = [split.read(start, stop) for start, stop in spans]
    return torch.from_numpy(np.stack(ids)), torch.from_numpy(np.stack(learned))


def longest(split: Split, count: int, most: int) -> int:
    """Length of the stretches: the greatest power of two ≤ `most` of which there are `count`, or at least one if no
    length gives so many. DataError without a document of two tokens."""
    sizes = np.diff([*split.starts, split.tokens]) - 1
    if sizes.max(initial=0) < 1:
        raise DataError(f"{split.name}: no document of 2 tokens, need at least one")
    powers = [2**k for k in range(max(most, 1).bit_length()) if 2**k <= sizes.max()]
    enough = [length for length in powers if (sizes // length).sum() >= count]
    return enough[-1] if enough else powers[-1]


def nats(subject: Subject, ids_BT: Tensor, state: LMState | None = None) -> tuple[Tensor, LMState]:
    """The loss at each token after the first [B, T − 1], on the CPU, and the state after all but the last token.

    The state handed in is used up. Memory beyond it does not grow with T.
    """
    model, (B, T) = subject.model, ids_BT.shape
    ids_BT = ids_BT.to(model.device)
    state = model.init_state(B, capacity=T) if state is None else state
    step, losses = max(1, CHUNK // B), []
    with torch.inference_mode(), subject.opened.autocast():
        for at in range(0, T - 1, step):
            part_BT = ids_BT[:, at : at + step + 1]
            hidden_BTD, state, _ = model.hidden(part_BT[:, :-1], state, consume_state=True)
            logits_BTV = model.head(hidden_BTD)
            full_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
            losses.append(F.cross_entropy(full_BTV.mT, part_BT[:, 1:], reduction="none").cpu())
    return torch.cat(losses, 1), state


def read(subject: Subject, ids_BT: Tensor, state: LMState) -> LMState:
    """The state after T more tokens; the state handed in is used up."""
    model, B = subject.model, len(ids_BT)
    with torch.inference_mode(), subject.opened.autocast():
        for part_BT in ids_BT.to(model.device).split(max(1, CHUNK // B), 1):
            _, state, _ = model.hidden(part_BT, state, consume_state=True)
    return state


def byte_counts(tokenizer: Tokenizer, ids: Tensor, learned: Tensor | bool = True) -> Tensor:
    """Bytes of each id, in the same shape; 0 of those that are not learned."""
    return torch.from_numpy(np.asarray(tokenizer.byte_counts()))[ids] * learned


def bits_per_byte(nats: Tensor, text_bytes: Tensor) -> float:
    """Σ nats / Σ bytes in bits; NaN without a byte."""
    total = int(text_bytes.sum())
    return nats.double().sum().item() / math.log(2) / total if total else math.nan


def span(nats_N: Tensor, bytes_N: Tensor) -> tuple[float, float] | None:
    """95% interval of Σ nats / Σ bytes in bits per byte, from each stretch's nats and bytes; None of fewer stretches
    than LEAST, or without a byte.

    Student's t on how far each stretch lies from the ratio of all. Quantiles of resampled stretches are too narrow
    where there are few: of 4 without any gain, every tenth seemed to have one, where every 40th should.
    """
    N, text_bytes = len(nats_N), bytes_N.double()
    if N < LEAST or not text_bytes.sum():
        return None
    bits_N = nats_N.double() / math.log(2)
    ratio = bits_N.sum() / text_bytes.sum()
    error = (bits_N - ratio * text_bytes).std() / text_bytes.mean() / math.sqrt(N)
    return student(ratio.item(), error.item(), N - 1)
