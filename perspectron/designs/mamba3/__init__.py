"""Mamba-3 (arXiv 2603.15569)."""

from perspectron.util.registry import Design, register

register(
    Design(
        __name__,
        mixers={"mamba3": "mixer:Mamba3"},
        titles={"mamba3": "Mamba-3"},
    )
)
