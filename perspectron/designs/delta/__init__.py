"""Gated delta rules: Gated DeltaNet, Kimi Delta Attention and Gated DeltaNet-2."""

from perspectron.util.registry import Design, register

register(
    Design(
        __name__,
        mixers={"gdn": "gdn:GDN", "kda": "kda:KDA", "gdn2": "gdn2:GDN2"},
        titles={"gdn": "Gated DeltaNet", "gdn2": "Gated DeltaNet-2", "kda": "KDA"},
    )
)
