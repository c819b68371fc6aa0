"""Checks that prompts give the same bits wherever they are cut: by what the layers promise, then by a measurement."""

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
    """True if the layers promise that a prompt, read in calls of `chunk` tokens, gives the same bits if it is also cut
    elsewhere, and a random text of at most LENGTH tokens confirms this at CUTS: a library may choose its kernels by the
    number of rows of a product. Logs a warning if nothing is promised or the promise is broken."""
    if not whole(model) or BLOCK % chunk:
        log.warning(
            "%s: prefixes are shared in steps of %d tokens; %s", model.config.name, chunk, _why(model, chunk)
        )
        return False
    draw, config = torch.Generator().manual_seed(0), model.config
    length = min(LENGTH, config.room or LENGTH)
    ids = torch.randint(config.vocab_size, (length,), generator=draw).tolist()
    pairs = zip(_read(model, ids, chunk, ()), _read(model, ids, chunk, CUTS), strict=True)
    kept = all(torch.equal(x, y) for x, y in pairs)
    if not kept:
        why = "a prompt that is cut has other bits on this machine"
        log.warning("%s: prefixes are shared in steps of %d tokens; %s", config.name, chunk, why)
    return kept


def _why(model: LanguageModel, chunk: int) -> str:
    """The reason why equal bits are not promised, in words."""
    if BLOCK % chunk:
        return f"blocks of {BLOCK} are no multiple of them"
    parts = [part for block in cast("list[Block]", model.blocks) for part in (*block.mixers, *block.networks)]
    kinds = ", ".join(sorted({type(part).__name__ for part in parts if not getattr(part, "exact_cells", 0)}))
    ways = f"layers of {kinds}" if kinds else f"{model.dtype} on {model.device.type}".replace("torch.", "")
    return f"{ways} promise no equal bits elsewhere"


def _read(model: LanguageModel, ids: list[int], chunk: int, cuts: tuple[int, ...]) -> list[Tensor]:
    """The head's input after each token, and the tensors of the state, from calls that also end at `cuts`."""
    state, read = model.init_state(1), list[Tensor]()
    for start, stop in pairwise(
        sorted({*range(0, len(ids), chunk), *(at for at in cuts if at < len(ids)), len(ids)})
    ):
        hidden_1TD, state = read_all(model, [ids[start:stop]], state, fresh=[start == 0], reset=None)
        read.append(hidden_1TD)
    return [torch.cat(read, 1), *(x for x in pytree.tree_leaves(state.filled()) if isinstance(x, Tensor))]
