"""Gated linear attention (docs/designs/baselines.md)."""

from perspectron.util.registry import Design, register

register(
    Design(
        __name__,
        mixers={"gla": "mixer:GLA"},
        presets="presets",
        titles={"gla": "GLA"},
    )
)
