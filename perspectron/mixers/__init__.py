"""Sequence mixers. To add one: write its file (config, state, module) and add its line to MIXERS."""

from typing import Any, NamedTuple

from perspectron.config import MixerConfig
from perspectron.mixers import attention, pdr, window_gqa


class Mixer(NamedTuple):
    """A table entry: the module, which takes (d_model, norm_eps, config), its state, and a small config by
    which tests build it at a width of 16."""

    module: type[Any]
    state: type[Any]
    small: MixerConfig


MIXERS = {
    "pdr": Mixer(pdr.PDR, pdr.PDRState, pdr.PDRConfig(rank=4)),
    "window_gqa": Mixer(
        window_gqa.WindowGQA,
        window_gqa.WindowGQAState,
        window_gqa.WindowGQAConfig(heads=4, kv_heads=2, window=8),
    ),
    "attention": Mixer(attention.Attention, attention.AttentionState, attention.AttentionConfig(heads=2)),
}
