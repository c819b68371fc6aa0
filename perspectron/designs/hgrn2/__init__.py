"""HGRN2 (arXiv 2404.07904)."""

from perspectron.util.registry import Design, register

register(
    Design(
        __name__,
        mixers={"hgrn2": "mixer:HGRN2"},
        titles={"hgrn2": "HGRN2"},
    )
)
