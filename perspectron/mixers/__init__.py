"""Sequence mixers. To add one: write its file (config, state, module) and add its line to MIXERS."""

from typing import Any, NamedTuple

from perspectron.config import MixerConfig
from perspectron.mixers import attention, lens, pdr, window_gqa
from perspectron.mixers.cache import Cache


class Mixer(NamedTuple):
    """A table entry: the module, which takes (d_model, norm_eps, config), its state, a small config by which
    tests build it at a width of 16, and where it comes from."""

    module: type[Any]
    state: type[Any]
    small: MixerConfig
    source: str


MIXERS = {
    "pdr": Mixer(pdr.PDR, pdr.PDRState, pdr.PDRConfig(rank=4), "seeds/pdr.md §2"),
    "window_gqa": Mixer(
        window_gqa.WindowGQA,
        window_gqa.WindowGQAState,
        window_gqa.WindowGQAConfig(heads=4, kv_heads=2, window=8),
        "seeds/topology.md §2.2",
    ),
    "lens": Mixer(lens.Lens, Cache, lens.LensConfig(heads=2), "seeds/lens.md, enhancements 1-3"),
    "attention": Mixer(attention.Attention, Cache, attention.AttentionConfig(heads=2), "decisions.md §7"),
}
