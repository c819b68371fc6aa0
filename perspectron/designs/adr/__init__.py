"""ADR: recurrent memories of keys and values inside attention (docs/designs/adr.md)."""

from perspectron.util.registry import Design, register

register(
    Design(
        __name__,
        mixers={"adr": "mixer:ADR"},
        presets="presets",
        ablations={"adr": "ablations:ADR"},
        commands={"demo": "demo:Demo"},
        cases={"gru": "cases:cases"},
        titles={"adr": "ADR", "adr2": "ADR 2"},
    )
)
