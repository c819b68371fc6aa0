"""Lens-gated GPT-2: attention by reciprocity and discoverability, and route gates (docs/designs/lens.md)."""

from perspectron.util.registry import Design, register

register(
    Design(
        __name__,
        mixers={"lens": "mixer:Lens"},
        presets="presets",
        ablations={"lens": "ablations:LENS"},
        commands={"prune-attention": "prune_command:PruneAttention"},
        cases={"lens": "cases:cases"},
        titles={"lens": "Lens", "lens2": "Lens 2"},
    )
)
