"""Gated linear attention, at named sizes."""

from perspectron.designs.gla.mixer import GLAConfig
from perspectron.presets.table import DESIGNS, preset

preset(
    "gla-20m", "gated linear attention, sized like perspective-20m-dense", DESIGNS["gla"].make,
    vocab_size=8192, d_model=384, layers=8, hidden=1296, mixer=GLAConfig(6),
)  # fmt: skip
preset(
    "gla-125m", "gated linear attention, sized like perspective-125m-dense", DESIGNS["gla"].make,
    vocab_size=32768, d_model=768, layers=12, hidden=2584, mixer=GLAConfig(12),
)  # fmt: skip
