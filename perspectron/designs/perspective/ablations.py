"""Ablations of Perspective and Perspective 2."""

from dataclasses import replace

from perspectron.compare.ablations import Ablation, Change, of_mixers
from perspectron.designs.perspective.pdr import PDRConfig
from perspectron.designs.perspective.pdr2 import PDR2Config
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.model.config import ModelConfig
from perspectron.model.mixer import numbered
from perspectron.util.config import MixerConfig, require

GATE_RANK = 16  # as published for gated linear attention


def _only(kind: type[MixerConfig]) -> Change:
    """Change that puts mixers like the first of a kind in the place of all others; each block keeps its network."""

    def change(config: ModelConfig) -> ModelConfig:
        mixers = [block.mixer for block in config.blocks if isinstance(block.mixer, kind)]
        require(len(mixers) > 0, "model", config.name, f"one with a {kind.kind} layer")
        blocks, layers = config.blocks, len(config.blocks)
        placed = [replace(b, mixer=numbered(mixers[0], i, layers)) for i, b in enumerate(blocks)]
        return replace(config, blocks=tuple(placed))

    return change


PERSPECTIVE = {
    "low_rank_gate": Ablation(
        of_mixers(PDRConfig, gate_rank=GATE_RANK),
        f"the decay gate's W_p has rank {GATE_RANK} and starts at random, not full rank and near the identity",
    ),
    "fixed_decay": Ablation(
        of_mixers(PDRConfig, fixed_decay=True),
        "no W_p: each channel has one learned decay for all tokens, 0.95 at the start",
    ),
    "no_gqa": Ablation(_only(PDRConfig), "every layer is PDR; there is no attention"),
    "no_pdr": Ablation(
        _only(WindowGQAConfig), "every layer is windowed attention: no memory past the windows"
    ),
}

PERSPECTIVE2 = {
    "gated": Ablation(of_mixers(PDR2Config, gated=True), "the output gated and normed"),
    "no_spread": Ablation(of_mixers(PDR2Config, longest=0.0), "every row starts at γ = 0.95, as in PDR"),
    "no_unit_input": Ablation(
        of_mixers(PDR2Config, unit_input=False),
        "values are written without the factor √(1 − γ²), so that slow rows grow larger",
    ),
    "no_gqa": Ablation(_only(PDR2Config), "every layer is recurrent; there is no attention"),
    "no_pdr": Ablation(
        _only(WindowGQAConfig), "every layer is windowed attention: no memory past the windows"
    ),
}
