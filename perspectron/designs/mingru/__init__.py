"""minGRU (arXiv 2410.01201)."""

from perspectron.util.registry import Design, register

register(
    Design(
        __name__,
        mixers={"mingru": "mixer:MinGRU"},
        titles={"mingru": "minGRU"},
    )
)
