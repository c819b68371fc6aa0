"""Mamba-2 (docs/designs/baselines.md)."""

from perspectron.util.registry import Design, register

register(
    Design(
        __name__,
        mixers={"ssd": "mixer:SSD"},
        presets="presets",
        titles={"ssd": "Mamba-2"},
    )
)
