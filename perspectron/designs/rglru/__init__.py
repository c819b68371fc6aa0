"""The real-gated linear recurrent unit of Griffin and RecurrentGemma (docs/designs/baselines.md#rg-lru)."""

from perspectron.util.registry import Design, register

register(Design(__name__, mixers={"rglru": "mixer:RGLRU"}))
