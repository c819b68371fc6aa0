"""Ablations of ADR."""

from dataclasses import replace

from perspectron.compare.ablations import Ablation, of_mixers, with_mixers
from perspectron.designs.adr.mixer import ADRConfig
from perspectron.model.config import ModelConfig, SequentialConfig


def _no_law5(config: ModelConfig) -> ModelConfig:
    config = with_mixers(config, ADRConfig, couple=False)
    blocks = (replace(block, residual=SequentialConfig()) for block in config.blocks)
    return replace(config, blocks=tuple(blocks))


ADR = {
    "no_decay": Ablation(
        of_mixers(ADRConfig, gamma=0.0, cold_start=False), "γ = 0: memories are plain GRU states, h = ĥ"
    ),
    "no_law5": Ablation(
        _no_law5, "memories are not added to the residual, whose norm stands before attention, as in GPT-2"
    ),
    "uncoupled": Ablation(
        of_mixers(ADRConfig, couple=False),
        "memories are not added to the residual, whose norm stays after it",
    ),
    "keys_only": Ablation(
        of_mixers(ADRConfig, remember="keys", couple=False),
        "attention reads memories of keys and plain values; without memories of values law 5 has nothing to add",
    ),
    "values_only": Ablation(
        of_mixers(ADRConfig, remember="values"), "attention reads plain keys and memories of values"
    ),
}
