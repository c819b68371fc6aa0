"""LFM2's gated short convolution (docs/designs/baselines.md#gated-short-convolution)."""

from perspectron.util.registry import Design, register

register(Design(__name__, mixers={"gated_conv": "mixer:GatedConv"}))
