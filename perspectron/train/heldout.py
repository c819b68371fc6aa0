"""Loss on held-out text, in nats, bits per byte and perplexity."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from perspectron.data.loader import IGNORE, windows
from perspectron.data.shards import Split
from perspectron.data.tokenizer import Tokenizer
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.util import ranks
from perspectron.util.errors import DataError


@dataclass(frozen=True)
class Heldout:
    """Loss over held-out text: bits per UTF-8 byte, perplexity per token, and how much was read."""

    bits_per_byte: float
    perplexity: float
    tokens: int
    text_bytes: int


def heldout(
    model: LanguageModel,
    split: Split,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    batch_size: int = 8,
    limit_tokens: int | None = None,
    carry: bool = False,
    spread: bool = False,
    dtype: torch.dtype | None = None,
    start: LMState | None = None,
    masked: bool = False,
) -> Heldout:
    """The loss over a split, over its first `limit_tokens`, or with `spread` over as many tokens from the whole split.
    Deterministic.

    Every window of `seq_len` tokens starts from an empty state, or from the row `start`, so that designs are compared
    at the same context. With `carry` the state continues from window to window (batch size 1) and is only reset at the
    start of a document. With `masked` the model is told of padding, which matters to what counts tokens.
    `dtype`: of autocast. Ranks share the batches, and each has the sum of all. Bytes are those of the text where all of
    a split is read; of a part they are those of its tokens, which a normaliser may have changed, without the ends of
    documents. Where these are text elsewhere, as a line end, one that a text itself ends with is left out, too.
    """
    require_targets(split, seq_len, limit_tokens, spread)
    counts_V, end = torch.from_numpy(np.asarray(tokenizer.byte_counts())), tokenizer.specials.end
    device = model.device
    sums, state = torch.zeros(3, dtype=torch.float64), None  # nats, tokens, bytes of text
    with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype is not None):
        batches = windows(
            split,
            seq_len=seq_len,
            batch_size=1 if carry else batch_size,
            limit_tokens=limit_tokens,
            spread=spread,
        )
        for batch, counts in ranks.shared(batches):
            ids, targets = (ranks.columns(x).to(device) for x in (batch.ids_BT, batch.targets_BT))
            starts = batch.starts_BT if carry else batch.reset_BT
            reset = None if starts is None else ranks.columns(starts).to(device)
            if state is None and start is not None:
                state = start.select([0] * len(ids))
            pad = batch.pad_BT if masked else None
            pad = None if pad is None else ranks.columns(pad).to(device)
            output = model(ids, state, reset_BT=reset, pad_BT=pad, consume_state=True)
            logits_NV = output.logits.flatten(0, 1)
            logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
            losses = F.cross_entropy(logits_NV, targets.flatten(), reduction="none")
            read_N = targets[targets != IGNORE].cpu()
            assert batch.ends_BT is not None
            ends_N = read_N[ranks.columns(batch.ends_BT)[(targets != IGNORE).cpu()]]
            read_bytes = counts_V[read_N].sum() - counts_V[ends_N[ends_N == end]].sum()
            found = (losses.double().sum().item(), len(read_N), int(read_bytes))
            sums += counts * torch.tensor(found, dtype=torch.float64)
            state = output.state if carry else None
    nats, tokens, text_bytes = ranks.all_reduce_sum(sums).tolist()
    if split.learned is None and (limit_tokens is None or limit_tokens >= split.tokens):
        text_bytes = split.text_bytes - int(
            counts_V[split.read(0, 1)].sum()
        )  # the first token is not predicted
    bits_per_byte = nats / math.log(2) / max(text_bytes, 1)
    return Heldout(bits_per_byte, math.exp(min(nats / tokens, 700.0)), int(tokens), int(text_bytes))


def require_targets(split: Split, seq_len: int, limit_tokens: int | None, spread: bool) -> None:
    """DataError if nothing that `heldout` would read is a target: the text is too short, or all prompts."""
    if not any(
        b.targets
        for b in windows(split, seq_len=seq_len, batch_size=1, limit_tokens=limit_tokens, spread=spread)
    ):
        raise DataError(
            f"{split.name}: no completion among the tokens measured; measure more of it (eval_tokens; eval --tokens)"
        )
