"""Sequence mixers. docs/add-a-mixer.md shows how to add one."""

from typing import Any, NamedTuple

from perspectron.designs.adr import mixer as adr
from perspectron.designs.delta import gdn, gdn2, kda
from perspectron.designs.drm import mixer as drm
from perspectron.designs.gla import mixer as gla
from perspectron.designs.hgrn2 import mixer as hgrn2
from perspectron.designs.lens import mixer as lens
from perspectron.designs.mamba3 import mixer as mamba3
from perspectron.designs.mingru import mixer as mingru
from perspectron.designs.perspective import pdr, pdr2
from perspectron.designs.rwkv7 import channel as rwkv7_channel
from perspectron.designs.rwkv7 import mixer as rwkv7
from perspectron.designs.ssd import mixer as ssd
from perspectron.designs.transformer import attention, window_gqa
from perspectron.model.config import MixerConfig


class Mixer(NamedTuple):
    """A table entry: the module, which takes (d_model, norm_eps, config); a small config with which tests build it at
    a width of 16; a one-line description; and its source."""

    module: type[Any]
    small: MixerConfig
    about: str
    source: str


MIXERS = {
    "pdr": Mixer(
        pdr.PDR,
        pdr.PDRConfig(rank=4),
        "Perspective Decay Recurrence: a matrix memory with a decay for each row",
        "docs/designs/perspective.md#the-recurrence",
    ),
    "pdr2": Mixer(
        pdr2.PDR2,
        pdr2.PDR2Config(rank=3, groups=2),
        "improved PDR: groups of rows, spread half-lives, inputs scaled by the decay",
        "docs/designs/perspective.md#perspective2",
    ),
    "window_gqa": Mixer(
        window_gqa.WindowGQA,
        window_gqa.WindowGQAConfig(heads=4, kv_heads=2, window=8),
        "attention to the last W tokens, query heads in groups, rotary positions",
        "docs/designs/perspective.md#windowed-attention",
    ),
    "lens": Mixer(
        lens.Lens,
        lens.LensConfig(heads=2),
        "attention with three scores: query to key, key to query, and a bias for keys that want to be found",
        "docs/designs/lens.md#three-lenses",
    ),
    "adr": Mixer(
        adr.ADR,
        adr.ADRConfig(heads=2, gamma=0.9),
        "attention to recurrent memories (decayed GRUs) of keys and values",
        "docs/designs/adr.md#the-five-laws",
    ),
    "drm": Mixer(
        drm.DRM,
        drm.DRMConfig(
            4,
            2,
            12,
            direction_basis=5,
            metric_basis=3,
            dt=0.3,
            radius=3.0,
            geometry_interval=3,
        ),
        "a single vector that moves along learned directions under a learned metric",
        "docs/designs/drm.md#flow",
    ),
    "gla": Mixer(
        gla.GLA,
        gla.GLAConfig(heads=2, gate_rank=4),
        "gated linear attention: a matrix memory with a decay for each key channel",
        "docs/designs/baselines.md#gated-linear-attention",
    ),
    "ssd": Mixer(
        ssd.SSD,
        ssd.SSDConfig(head_dim=8, state=4),
        "Mamba-2's state-space dual: a matrix memory with one decay per head, behind a short convolution",
        "docs/designs/baselines.md#mamba-2",
    ),
    "attention": Mixer(
        attention.Attention,
        attention.AttentionConfig(heads=2),
        "full attention, with rotary positions or as in GPT-2",
        "docs/designs/baselines.md#attention",
    ),
    "mingru": Mixer(
        mingru.MinGRU,
        mingru.MinGRUConfig(),
        "minGRU: a gated average in each channel, with gates from the input alone",
        "arXiv 2410.01201",
    ),
    "hgrn2": Mixer(
        hgrn2.HGRN2,
        hgrn2.HGRN2Config(heads=2),
        "HGRN2: a matrix memory that writes as much as it forgets, with lower bounds by layer",
        "arXiv 2404.07904",
    ),
    "mamba3": Mixer(
        mamba3.Mamba3,
        mamba3.Mamba3Config(head_dim=8, state=8),
        "Mamba-3: Mamba-2's memory with trapezoid-rule writes and rotating keys, without a convolution",
        "arXiv 2603.15569",
    ),
    "gdn": Mixer(
        gdn.GDN,
        gdn.GDNConfig(heads=2),
        "Gated DeltaNet: a matrix memory with delta-rule writes and one decay per head",
        "arXiv 2412.06464",
    ),
    "kda": Mixer(
        kda.KDA,
        kda.KDAConfig(heads=2),
        "Kimi Delta Attention: the same with a decay for each key channel",
        "arXiv 2510.26692",
    ),
    "gdn2": Mixer(
        gdn2.GDN2,
        gdn2.GDN2Config(heads=2),
        "Gated DeltaNet-2: the same with separate gates for erasing and writing",
        "arXiv 2605.22791",
    ),
    "rwkv7": Mixer(
        rwkv7.RWKV7,
        rwkv7.RWKV7Config(head_dim=8),
        "RWKV-7's time mix: a matrix memory that is read and corrected before it decays",
        "arXiv 2503.14456",
    ),
    "rwkv7_channel": Mixer(
        rwkv7_channel.RWKV7Channel,
        rwkv7_channel.RWKV7ChannelConfig(hidden=24),
        "RWKV-7's channel mix: a network that also reads the previous token",
        "arXiv 2503.14456",
    ),
}
