"""RWKV-7 (arXiv 2503.14456)."""

from perspectron.util.registry import Design, register

register(
    Design(
        __name__,
        mixers={"rwkv7": "mixer:RWKV7", "rwkv7_channel": "channel:RWKV7Channel"},
        presets="presets",
        titles={"rwkv7": "RWKV-7"},
    )
)
