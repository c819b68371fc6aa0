"""Reading prompts of any lengths as one batch, in chunks.

Shapes: B batch, T time, D model width, V vocabulary.
"""

import itertools
import math
import operator
import reprlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from perspectron import native
from perspectron.decode.row import Vocabulary
from perspectron.decode.steps import stepped, steps_of
from perspectron.experts.router import Views
from perspectron.model.block import Block
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.ops.attention import places
from perspectron.util.config import require, require_whole
from perspectron.util.errors import ConfigError
from perspectron.util.machine import memory_kept

DTYPES = torch.float32, torch.bfloat16
CHUNK = 128
"""Tokens of a text that are read at once. Another number gives other last bits, so there is one for all: chunks begin
at multiples of it, counted from where the text begins, and a text that was cut is read as the whole would be."""
KEPT = 32
"""Tokens in a call from which on freed memory is kept for reuse: to switch that on takes as long as a token."""


@torch.inference_mode()
def prefill(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    state: LMState | None = None,
    *,
    reset: int | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, LMState]:
    """Read a batch of prompts of any lengths ≥ 1 after `state`, which is used up: (the logits [B,V] after each
    row's last token, the new state).

    reset: the id across which nothing is remembered, where the tokenizer has one (`Specials.reset`). `chunk` tokens at
    a time, so that memory beyond the state does not grow with the prompt.
    ConfigError: no prompts, a prompt of no tokens, ids outside the model's vocabulary, a state of another
    batch size.
    """
    require_whole("chunk", chunk, 1)
    require(len(prompts) >= 1, "prompts", list(prompts), "at least one")
    for row, ids in enumerate(prompts):
        require(not isinstance(ids, str), f"prompts[{row}]", ids, "ids; a tokenizer encodes text")
        check_ids(ids, model.config.vocab_size, row)
    B = len(prompts)
    if state is not None and state.batch_size != B:
        raise ConfigError(f"prompts: {B} given, must be as many as the state has rows, {state.batch_size}")
    fresh = state is None
    state = model.init_state(B) if state is None else state.to(model.device)  # a loaded one is on the CPU
    last_BD = torch.zeros(B, model.config.d_model, dtype=model.dtype, device=model.device)
    for start in range(0, max(map(len, prompts)), chunk):
        parts = [prompt[start : start + chunk] for prompt in prompts]
        here_BD, state = read(model, parts, state, fresh=[fresh and start == 0] * B, reset=reset)
        read_B1 = torch.tensor([[len(part) > 0] for part in parts], device=model.device)
        last_BD = torch.where(read_B1, here_BD, last_BD)
    return model.head(last_BD), state


def read(
    model: LanguageModel,
    parts: Sequence[Sequence[int]],
    state: LMState,
    *,
    fresh: Sequence[bool],
    reset: int | None,
    views: Views | None = None,
    drawn: bool = False,
) -> tuple[Tensor, LMState]:
    """Read one chunk of tokens in each row, some perhaps empty, after `state`, which is used up: (the head's input
    [B,D] after each row's last token, the new state).

    fresh: rows that have read nothing before, so that a document that starts at their column 0 resets nothing. reset:
    as `prefill` has it. views: from which rows choose their experts; the positions are filled in here. drawn: the
    single token was drawn, and is read as while a text is drawn.
    """
    hidden_BTD, state = read_all(model, parts, state, fresh=fresh, reset=reset, views=views, drawn=drawn)
    last_B = torch.tensor([len(part) for part in parts], device=model.device) - 1
    return hidden_BTD[torch.arange(len(parts), device=model.device), last_B], state


def read_all(
    model: LanguageModel,
    parts: Sequence[Sequence[int]],
    state: LMState,
    *,
    fresh: Sequence[bool],
    reset: int | None,
    views: Views | None = None,
    drawn: bool = False,
) -> tuple[Tensor, LMState]:
    """`read`, with the head's input after every token [B,T,D], T being the longest row. If prompts may be cut anywhere
    (`whole`), a row that is read alone is padded to a multiple of that number."""
    B, T, device = len(parts), max(map(len, parts)), model.device
    fills = whole(model) if B == 1 and views is None else 0
    alone = B == T == 1 and views is None and (fresh[0] or parts[0][0] != reset)
    if alone and (drawn or not fills):  # it may be a drawn token that is read again
        hidden_1D, _, state = stepped(model, steps_of(model), torch.tensor([parts[0]], device=device), state)
        return hidden_1D[:, None], state
    columns = (
        max(2, T + -T % fills) if fills else T
    )  # operations may treat a single column as a step, with other bits
    length_B = torch.tensor([len(part) for part in parts])
    ids_BT = torch.tensor([[*part, *[0] * (columns - len(part))] for part in parts])
    pad_BT = torch.arange(columns) >= length_B[:, None]
    reset_BT = (ids_BT == (-1 if reset is None else reset)) & ~pad_BT
    reset_BT[:, 0] &= ~torch.tensor(fresh)
    starts, pad = (mask_BT.to(device) if mask_BT.any() else None for mask_BT in (reset_BT, pad_BT))
    if views is not None:
        length = state.document_length_B
        start_B = torch.zeros(B, dtype=torch.int64, device=device) if length is None else length
        views = replace(views, position_BT=places(start_B, columns, starts, pad).position_BT)
    with memory_kept() if ids_BT.numel() >= KEPT else nullcontext():
        hidden_BTD, state, _ = model.hidden(
            ids_BT.to(device), state, reset_BT=starts, pad_BT=pad, consume_state=True, views=views
        )
    return hidden_BTD[:, :T], state


def whole(model: LanguageModel) -> int:
    """The number of tokens to a multiple of which calls are padded, so that a prompt gives the same bits wherever it is
    cut; 0 if its layers do not promise that. Sums over all tokens of a call, as in products of matrices, have the same
    order only in multiples of this number."""
    if model.device.type != "cpu" or model.dtype not in DTYPES or not native.wanted():
        return 0
    promised = [block.exact_cells for block in cast("list[Block]", model.blocks)]
    return math.lcm(*promised) if promised else 0


def ids_of(text: str | Sequence[int], tokenizer: Vocabulary, field: str) -> list[int]:
    """The ids of a text, or given ids, such as a tensor's, as ints. ConfigError, naming the field: neither."""
    if isinstance(text, str):
        return tokenizer.encode(text)
    try:
        if not isinstance(text, bytes):
            return [operator.index(id) for id in text]
    except TypeError:
        pass
    raise ConfigError(f"{field} = {reprlib.repr(text)}, must be a text or its ids")


def check_ids(ids: Sequence[int], vocab_size: int, row: int) -> None:
    """ConfigError for no tokens, or an id outside the vocabulary."""
    if len(ids) == 0:
        raise ConfigError(f"prompt has no tokens, must be ≥ 1 (row {row})")
    for id in (min(ids), max(ids)):
        require(0 <= id < vocab_size, f"prompt: token id (row {row})", id, f"≥ 0 and < {vocab_size}")


def lengths(ids: Sequence[int], reset: int | None) -> list[int]:
    """Number of tokens in each document of a text: first of the one that it continues, then of those that begin in it,
    with the id `reset`."""
    starts = [0, *(at for at, id in enumerate(ids) if id == reset), len(ids)]
    return [end - start for start, end in itertools.pairwise(starts)]


def check_room(positions: int, length: int, counts: Sequence[int], max_tokens: int, row: int) -> None:
    """ConfigError for a text that would exceed the positions of a model. length: tokens of the document so far. counts:
    tokens still to be read, as `lengths` gives them."""
    if positions == 0:
        return
    for number, count in enumerate(counts):
        length = length if number == 0 else 0
        room = f"≤ {positions - length}, the positions that row {row} has left of {positions}"
        require(length + count <= positions, "tokens of the prompt", count, room)
        left = positions - length - count + 1
    require(max_tokens <= left, "max_tokens", max_tokens,
            f"≤ {left}, what row {row} has left of positions = {positions}")  # fmt: skip
