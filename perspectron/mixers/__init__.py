"""Sequence mixers: docs/add-a-mixer.md adds one, step by step."""

from typing import Any, NamedTuple

from perspectron.config import MixerConfig
from perspectron.mixers import (
    adr,
    attention,
    drm,
    gdn,
    gdn2,
    gla,
    hgrn2,
    kda,
    lens,
    mamba3,
    mingru,
    pdr,
    pdr2,
    rwkv7,
    rwkv7_channel,
    ssd,
    window_gqa,
)


class Mixer(NamedTuple):
    """A table entry: the module, which takes (d_model, norm_eps, config), a small config by which
    tests build it at a width of 16, what it is in a line, and where it comes from."""

    module: type[Any]
    small: MixerConfig
    about: str
    source: str


MIXERS = {
    "pdr": Mixer(
        pdr.PDR,
        pdr.PDRConfig(rank=4),
        "Perspective Decay Recurrence: a matrix memory whose rows fade by gates of their own",
        "docs/designs/perspective.md#the-recurrence",
    ),
    "pdr2": Mixer(
        pdr2.PDR2,
        pdr2.PDR2Config(rank=3, groups=2),
        "PDR behind a short convolution, with half-lives spread and its output normed and gated",
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
        "attention through three lenses: what I seek, who seeks me, what wants to be found",
        "docs/designs/lens.md#three-lenses",
    ),
    "adr": Mixer(
        adr.ADR,
        adr.ADRConfig(heads=2, gamma=0.9),
        "attention to recurrent memories of keys and values, each a GRU that decays",
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
        "a state that moves along learned directions by a learned metric, with nothing else kept",
        "docs/designs/drm.md#flow",
    ),
    "gla": Mixer(
        gla.GLA,
        gla.GLAConfig(heads=2, gate_rank=4),
        "gated linear attention: a matrix memory whose key channels fade by gates of their own",
        "docs/designs/baselines.md#gated-linear-attention",
    ),
    "ssd": Mixer(
        ssd.SSD,
        ssd.SSDConfig(head_dim=8, state=4),
        "Mamba-2's state-space dual: a matrix memory that fades by one gate a head, behind a short convolution",
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
        "minGRU: a gated average in each channel, its gate read from the input alone, behind a short convolution",
        "arXiv 2410.01201",
    ),
    "hgrn2": Mixer(
        hgrn2.HGRN2,
        hgrn2.HGRN2Config(heads=2),
        "HGRN2: a matrix memory that writes what it forgets, its gates bounded from below by layer",
        "arXiv 2404.07904",
    ),
    "mamba3": Mixer(
        mamba3.Mamba3,
        mamba3.Mamba3Config(head_dim=8, state=8),
        "Mamba-3: Mamba-2's memory, written by the trapezoid rule with keys that turn, without a convolution",
        "arXiv 2603.15569",
    ),
    "gdn": Mixer(
        gdn.GDN,
        gdn.GDNConfig(heads=2),
        "Gated DeltaNet: a matrix memory corrected by the delta rule, which fades by one gate a head",
        "arXiv 2412.06464",
    ),
    "kda": Mixer(
        kda.KDA,
        kda.KDAConfig(heads=2),
        "Kimi Delta Attention: the same, whose key channels fade by gates of their own",
        "arXiv 2510.26692",
    ),
    "gdn2": Mixer(
        gdn2.GDN2,
        gdn2.GDN2Config(heads=2),
        "Gated DeltaNet-2: the same, which erases and writes each channel by gates of their own",
        "arXiv 2605.22791",
    ),
    "rwkv7": Mixer(
        rwkv7.RWKV7,
        rwkv7.RWKV7Config(head_dim=8),
        "RWKV-7's time mix: a matrix memory read and corrected before its rows fade by gates of their own",
        "arXiv 2503.14456",
    ),
    "rwkv7_channel": Mixer(
        rwkv7_channel.RWKV7Channel,
        rwkv7_channel.RWKV7ChannelConfig(hidden=24),
        "RWKV-7's channel mix: a network that also reads the token before",
        "arXiv 2503.14456",
    ),
}
