"""Ablations of the DRM emitter."""

from dataclasses import fields, replace

from perspectron.compare.ablations import Ablation, Change, of_mixers, with_mixers
from perspectron.designs.drm.head import EmitterConfig
from perspectron.designs.drm.mixer import DRMConfig
from perspectron.designs.drm.terms import OF_METRIC, Losses
from perspectron.model.config import ModelConfig

AIMS = ("spread_target", "active_target", "condition_target", "u_target", "u_floor")
WEIGHTS = [field.name for field in fields(Losses) if field.name not in AIMS]


def _losses(*names: str) -> Change:
    """Change that sets the weights of these loss terms to zero."""

    def change(config: ModelConfig) -> ModelConfig:
        (mixer,) = (block.mixer for block in config.blocks if isinstance(block.mixer, DRMConfig))
        return with_mixers(config, DRMConfig, losses=replace(mixer.losses, **dict.fromkeys(names, 0.0)))

    return change


def _no_metric(config: ModelConfig) -> ModelConfig:
    return with_mixers(_losses(*OF_METRIC)(config), DRMConfig, strength=0.0, rank=0, metric_basis=0)


def _no_auxiliary(config: ModelConfig) -> ModelConfig:
    config = _losses(*WEIGHTS)(config)
    head = config.head
    return replace(config, head=replace(head, stability=0.0)) if isinstance(head, EmitterConfig) else config


DRM = {
    "no_directions": Ablation(
        of_mixers(DRMConfig, directions=0, direction_basis=0, gate_top_k=0, gate_renorm=False),
        "no learned directions or gates: v = tanh(MLP[z; e]) along the axes, before the metric bends it",
    ),
    "no_metric": Ablation(
        _no_metric, "no metric: nothing bends the velocity, and no loss term weighs its energy"
    ),
    "no_auxiliary": Ablation(_no_auxiliary, "cross-entropy alone: the weights λ of all other terms are 0"),
}
