"""Mamba, the first (docs/designs/baselines.md#mamba)."""

from perspectron.util.registry import Design, register

register(Design(__name__, mixers={"mamba": "mixer:Mamba"}))
