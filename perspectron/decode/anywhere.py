"""Whether a model's prompts have the same bits wherever they are cut: what its layers promise, and a look at it."""

import logging
from itertools import pairwise
from typing import cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from perspectron.decode.reading import read_all, whole
from perspectron.model.block import Block
from perspectron.model.model import LanguageModel
from perspectron.ops.attention import BLOCK

LENGTH = BLOCK + 24
CUTS = 5, 37, 101, BLOCK + 1
log = logging.getLogger("perspectron")


@torch.inference_mode()
def measured(model: LanguageModel, chunk: int) -> bool:
    """True if a model's layers promise that a prompt, read in calls of `chunk` tokens, has the same bits wherever it is
    cut besides, and a random text of LENGTH tokens has them at CUTS: which kernels a library takes for a product of so
    many rows is its own affair. Said in the log where there is no promise, or it is not kept."""
    if not whole(model) or BLOCK % chunk:
        log.warning(
            "%s: prefixes are shared in steps of %d tokens; %s", model.config.name, chunk, _why(model, chunk)
        )
        return False
    draw, config = torch.Generator().manual_seed(0), model.config
    length = min(LENGTH, config.room or LENGTH)
    ids = torch.randint(config.vocab_size, (length,), generator=draw).tolist()
    kept = _same(_read(model, ids, chunk, ()), _read(model, ids, chunk, CUTS))
    if not kept:
        why = "a prompt that is cut has other bits on this machine"
        log.warning("%s: prefixes are shared in steps of %d tokens; %s", config.name, chunk, why)
    return kept


def _why(model: LanguageModel, chunk: int) -> str:
    """Why nothing is promised."""
    if BLOCK % chunk:
        return f"blocks of {BLOCK} are no multiple of them"
    parts = [part for block in cast("list[Block]", model.blocks) for part in (*block.mixers, *block.networks)]
    kinds = ", ".join(sorted({type(part).__name__ for part in parts if not getattr(part, "exact_cells", 0)}))
    ways = f"layers of {kinds}" if kinds else f"{model.dtype} on {model.device.type}".replace("torch.", "")
    return f"{ways} promise no equal bits elsewhere"


def _read(model: LanguageModel, ids: list[int], chunk: int, cuts: tuple[int, ...]) -> list[Tensor]:
    """What the head reads after each token, and the state."""
    state, read = model.init_state(1), list[Tensor]()
    for start, stop in pairwise(
        sorted({*range(0, len(ids), chunk), *(at for at in cuts if at < len(ids)), len(ids)})
    ):
        hidden_1TD, state = read_all(model, [ids[start:stop]], state, fresh=[start == 0], reset=None)
        read.append(hidden_1TD)
    return [torch.cat(read, 1), *(x for x in pytree.tree_leaves(state.filled()) if isinstance(x, Tensor))]


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(some, others, strict=True))
