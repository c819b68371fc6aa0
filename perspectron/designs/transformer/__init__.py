"""Attention in full and in a window, GPT-2 and a modern transformer (docs/designs/baselines.md)."""

from perspectron.util.registry import Design, register

register(
    Design(
        __name__,
        mixers={
            "attention": "attention:Attention",
            "window_gqa": "window_gqa:WindowGQA",
            "mla": "mla:MLA",
        },
        presets="presets",
        titles={"gpt2": "GPT-2", "transformer": "Transformer"},
    )
)
