"""The whole state of a model as one layer of a cache of transformers.

Shapes: B batch, T time.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from perspectron.model.state import LMState


class Inputs(NamedTuple):
    """Input of one call: ids [B,T] or embeddings [B,T,·], where documents begin, and where there is no token."""

    tokens: Tensor
    reset_BT: Tensor | None
    pad_BT: Tensor | None

    def first(self, count: int) -> "Inputs":
        """The first `count` tokens of the input."""
        reset_BT, pad_BT = (
            None if mask is None else mask[:, :count] for mask in (self.reset_BT, self.pad_BT)
        )
        return Inputs(self.tokens[:, :count], reset_BT, pad_BT)

    def rows(self, rows_N: Tensor) -> "Inputs":
        """The input of these rows of the batch."""
        reset_BT, pad_BT = (None if mask is None else mask[rows_N] for mask in (self.reset_BT, self.pad_BT))
        return Inputs(self.tokens[rows_N], reset_BT, pad_BT)


class Before(NamedTuple):
    """The state before a call, the number of tokens it was after, and the input of the call."""

    state: LMState | None
    seen: int
    inputs: Inputs


class StateLayer(CacheLayerMixin):
    """The model's state, and the number of tokens (padding included) that it is after.

    A state cannot be shortened. While the layer records, it therefore remembers the state before each call, as far back
    as the last `crop`: `crop` returns to the latest one that is early enough, and the tokens that are kept beyond it
    are read again at the next call. Until then they are in `unread`.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.state: LMState | None = None
        self.seen = 0
        self.unread: Inputs | None = None
        self.log: list[Before] = []

    @property
    def batch_size(self) -> int:
        """Rows of the state. AttributeError before there is one, as transformers expects of its layers."""
        if self.state is None:
            raise AttributeError("batch_size: nothing was read yet")
        return self.state.batch_size

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """Remember states from here on, so that `crop` can return to them."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last −tokens_to_remove tokens; 0 accepts all. All remembered states are then forgotten.

        ValueError for a positive number or more tokens than there are, RuntimeError if no early enough state was
        remembered.
        """
        if tokens_to_remove > 0 or -tokens_to_remove > self.seen:
            raise ValueError(
                f"crop: {tokens_to_remove}, must be from {-self.seen} to 0, the tokens to take back"
            )
        target = self.seen + tokens_to_remove
        held = 0 if self.unread is None else self.unread.tokens.shape[1]
        if -tokens_to_remove <= held:
            kept = held + tokens_to_remove
            self.unread = self.unread.first(kept) if self.unread is not None and kept else None
        else:
            while self.log and self.log[-1].seen > target:
                self.log.pop()
            if not self.log:
                raise RuntimeError(
                    "crop: no earlier state was remembered; call activate_past_recording() before what is to be taken "
                    "back is read"
                )
            self.state, seen, inputs = self.log.pop()
            self.unread = inputs.first(target - seen) if target > seen else None
        self.seen = target
        self.log = []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self._select(torch.arange(self.state.batch_size).repeat_interleave(repeats))

    def _select(self, rows_N: Tensor) -> None:
        if rows_N.dtype == torch.bool:
            rows_N = rows_N.nonzero()[:, 0]
        if self.state is not None:
            self.state = self.state.select(rows_N)
        if self.unread is not None:
            self.unread = self.unread.rows(rows_N)
        self.log = []

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Do nothing: the model makes its state."""

    def offload(self) -> None:
        """Do nothing: the state stays with the model."""

    def prefetch(self) -> None:
        """Do nothing: the state stays with the model."""

    def update(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("keys and values cannot be added: the model hands over its whole state")


class StateCache(Cache):
    """A cache of one StateLayer."""

    def __init__(self) -> None:
        super().__init__(layers=[StateLayer()])


def layer_of(cache: Any) -> StateLayer:
    """The StateLayer of a cache. An empty DynamicCache, which many programs make by habit, is given one. TypeError for
    any other cache."""
    if type(cache) is DynamicCache and cache.get_seq_length() == 0 and not _ours(cache):
        cache.layers, cache.layer_class_to_replicate = [StateLayer()], None
    if not _ours(cache):
        raise TypeError(
            f"cache is a {type(cache).__name__}, must be a perspectron.interop.hf.StateCache or an empty DynamicCache"
        )
    layer: StateLayer = cache.layers[0]
    return layer


def _ours(cache: Any) -> bool:
    layers: list[Any] = getattr(cache, "layers", [])
    return len(layers) == 1 and isinstance(layers[0], StateLayer)
