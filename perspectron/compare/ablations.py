"""Ablations: each is a function from the config of a design to a config without one part.

`ABLATIONS` lists them by design. Removing a part removes parameters. `ablate` therefore changes the hidden width of
the feed-forward networks (or of the emitter, without networks) until as many parameters are active as before, so that
the part is compared and not the size. docs/designs has a page for each design.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

from perspectron.designs.adr.mixer import ADRConfig
from perspectron.designs.drm.mixer import DRMConfig
from perspectron.designs.drm.terms import OF_METRIC, Losses
from perspectron.designs.lens.mixer import LensConfig
from perspectron.designs.perspective.pdr import PDRConfig
from perspectron.designs.perspective.pdr2 import PDR2Config
from perspectron.designs.presets_old import numbered
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.experts.router import RoutedConfig
from perspectron.model.census import active_parameters
from perspectron.model.config import (
    BlockConfig,
    MixerConfig,
    ModelConfig,
    ParallelConfig,
    SequentialConfig,
    one_of,
    require,
)
from perspectron.model.ffn import ContextMLPConfig, MLPConfig
from perspectron.model.heads import EmitterConfig
from perspectron.presets import TOLERANCE, design_of
from perspectron.util.errors import ConfigError

GATE_RANK = 16  # as published for gated linear attention
STEP = 4  # of a hidden width
AIMS = ("spread_target", "active_target", "condition_target", "u_target", "u_floor")
WEIGHTS = [field.name for field in fields(Losses) if field.name not in AIMS]
Change = Callable[[ModelConfig], ModelConfig]


class Ablation(NamedTuple):
    """A removed part. change: from the full config to the one without it. about: one line about what is left."""

    change: Change
    about: str


def ablate(config: ModelConfig, name: str) -> ModelConfig:
    """Config without a part, with equal active parameters within 2%, named "design-ablation".

    ConfigError for an unknown ablation, one that changes nothing here, or if no width
    restores the size.
    """
    known = ablations_of(config)
    return _without(config, name, known[one_of(name, known, f"ablation of {design_of(config)}")])


def _without(config: ModelConfig, name: str, ablation: Ablation) -> ModelConfig:
    left = ablation.change(config)
    require(left != config, "ablation", name, f"of a part that {config.name} has")
    return replace(rematch(left, active_parameters(config)), name=f"{design_of(config)}-{name}")


def rematch(config: ModelConfig, params: int) -> ModelConfig:
    """Config whose hidden widths all differ by the same multiple of 4, such that its active parameters are nearest to
    `params`. ConfigError when they are not within 2%."""
    if active_parameters(config) == params:
        return config
    widths = list(_widths(config))
    require(len(widths) > 0, "model", config.name, "one with a hidden width to match by")
    own = active_parameters(config)
    slope = (active_parameters(_moved(config, STEP)) - own) / STEP
    turns = max(round((params - own) / slope / STEP), -((min(widths) - 1) // STEP))
    matched = _moved(config, turns * STEP)
    bound = f"within {TOLERANCE:.0%} of {params:,} by some hidden width"
    reached = active_parameters(matched)
    require(abs(reached - params) <= TOLERANCE * params, "parameters", reached, bound)
    return matched


def _widths(config: ModelConfig) -> Iterator[int]:
    """Hidden widths that `_moved` changes."""
    layers: list[Any] = [block.ffn for block in config.blocks if hasattr(block.ffn, "hidden")]
    for part in layers or [config.head]:
        if hasattr(part, "hidden"):
            yield part.hidden


def _moved(config: ModelConfig, by: int) -> ModelConfig:
    """Config whose feed-forward networks (the emitter, where there are none) are wider by `by`."""

    def wider(part: Any) -> Any:
        return replace(part, hidden=part.hidden + by) if hasattr(part, "hidden") else part

    blocks = tuple(replace(block, ffn=wider(block.ffn)) for block in config.blocks)
    head = wider(config.head) if blocks == config.blocks else config.head
    return replace(config, blocks=blocks, head=head)


def _mixers(config: ModelConfig, kind: type[MixerConfig], **values: Any) -> ModelConfig:
    """Config with other values in every mixer of a kind."""

    def changed(block: BlockConfig) -> BlockConfig:
        if not isinstance(block.mixer, kind):
            return block
        mixer: Any = block.mixer
        return replace(block, mixer=replace(mixer, **values))

    return replace(config, blocks=tuple(map(changed, config.blocks)))


def _of(kind: type[MixerConfig], **values: Any) -> Change:
    return lambda config: _mixers(config, kind, **values)


# ---------------------------------------------------------------- Perspective


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
        _of(PDRConfig, gate_rank=GATE_RANK),
        f"the decay gate's W_p has rank {GATE_RANK} and starts at random, not full rank and near the identity",
    ),
    "fixed_decay": Ablation(
        _of(PDRConfig, fixed_decay=True),
        "no W_p: each channel has one learned decay for all tokens, 0.95 at the start",
    ),
    "no_gqa": Ablation(_only(PDRConfig), "every layer is PDR; there is no attention"),
    "no_pdr": Ablation(
        _only(WindowGQAConfig), "every layer is windowed attention: no memory past the windows"
    ),
}

PERSPECTIVE2 = {
    "gated": Ablation(_of(PDR2Config, gated=True), "the output gated and normed"),
    "no_spread": Ablation(_of(PDR2Config, longest=0.0), "every row starts at γ = 0.95, as in PDR"),
    "no_unit_input": Ablation(
        _of(PDR2Config, unit_input=False),
        "values are written without the factor √(1 − γ²), so that slow rows grow larger",
    ),
    "no_gqa": Ablation(_only(PDR2Config), "every layer is recurrent; there is no attention"),
    "no_pdr": Ablation(
        _only(WindowGQAConfig), "every layer is windowed attention: no memory past the windows"
    ),
}

# ---------------------------------------------------------------- Lens


def _lens(*parts: str, mlp: str = "plain", output_gate: bool = False) -> Change:
    """Change to GPT-2 with these parts and no others. mlp: "plain", "gated" (by its channels) or "detached" (it reads
    the output of attention without sending a gradient back)."""

    def change(config: ModelConfig) -> ModelConfig:
        switches = {name: name in parts for name in ("reciprocity", "discoverability", "gates")}
        config = _mixers(config, LensConfig, **switches, output_gate=output_gate)
        return replace(config, blocks=tuple(map(network, config.blocks)))

    def network(block: BlockConfig) -> BlockConfig:
        ffn = block.ffn
        assert isinstance(ffn, ContextMLPConfig)
        block = block if "route" in parts else replace(block, residual=SequentialConfig())
        if mlp == "plain":
            return replace(block, ffn=MLPConfig(ffn.hidden, ffn.activation))
        context = mlp == "detached"
        rank = ffn.context_rank if context else 0
        return replace(block, ffn=replace(ffn, context=context, context_rank=rank, stop_gradient=context))

    return change


LENSES = ("reciprocity", "discoverability", "gates")
LENS = {
    "plain": Ablation(_lens(), "step 1: GPT-2"),
    "reciprocity": Ablation(_lens(*LENSES[:1]), "step 2: plus reciprocity, with a fixed weight of 0.16"),
    "discoverability": Ablation(_lens(*LENSES[:2]), "step 3: plus discoverability, still with fixed weights"),
    "gates": Ablation(_lens(*LENSES), "step 4: plus learned weights of the mixture, per head"),
    "route": Ablation(_lens(*LENSES, "route"), "step 5: plus the route gate"),
    "gated_mlp": Ablation(
        _lens(*LENSES, "route", mlp="gated"), "step 6: plus networks with gates on their channels"
    ),
    "detached": Ablation(
        _lens(*LENSES, "route", mlp="detached"),
        "step 7: plus networks that read the context without a gradient; step 8, with one, is the whole design",
    ),
    "output_gate": Ablation(
        _lens(output_gate=True),
        "control: GPT-2 with only a sigmoid gate on the output of attention",
    ),
}

# ---------------------------------------------------------------- DRM


def _losses(*names: str) -> Change:
    """Change that sets the weights of these loss terms to zero."""

    def change(config: ModelConfig) -> ModelConfig:
        (mixer,) = (block.mixer for block in config.blocks if isinstance(block.mixer, DRMConfig))
        return _mixers(config, DRMConfig, losses=replace(mixer.losses, **dict.fromkeys(names, 0.0)))

    return change


def _no_metric(config: ModelConfig) -> ModelConfig:
    return _mixers(_losses(*OF_METRIC)(config), DRMConfig, strength=0.0, rank=0, metric_basis=0)


def _no_auxiliary(config: ModelConfig) -> ModelConfig:
    config = _losses(*WEIGHTS)(config)
    head = config.head
    return replace(config, head=replace(head, stability=0.0)) if isinstance(head, EmitterConfig) else config


DRM = {
    "no_directions": Ablation(
        _of(DRMConfig, directions=0, direction_basis=0, gate_top_k=0, gate_renorm=False),
        "no learned directions or gates: v = tanh(MLP[z; e]) along the axes, before the metric bends it",
    ),
    "no_metric": Ablation(
        _no_metric, "no metric: nothing bends the velocity, and no loss term weighs its energy"
    ),
    "no_auxiliary": Ablation(_no_auxiliary, "cross-entropy alone: the weights λ of all other terms are 0"),
}

# ---------------------------------------------------------------- ADR


def _no_law5(config: ModelConfig) -> ModelConfig:
    config = _mixers(config, ADRConfig, couple=False)
    blocks = (replace(block, residual=SequentialConfig()) for block in config.blocks)
    return replace(config, blocks=tuple(blocks))


ADR = {
    "no_decay": Ablation(
        _of(ADRConfig, gamma=0.0, cold_start=False), "γ = 0: memories are plain GRU states, h = ĥ"
    ),
    "no_law5": Ablation(
        _no_law5, "memories are not added to the residual, whose norm stands before attention, as in GPT-2"
    ),
    "uncoupled": Ablation(
        _of(ADRConfig, couple=False), "memories are not added to the residual, whose norm stays after it"
    ),
    "keys_only": Ablation(
        _of(ADRConfig, remember="keys", couple=False),
        "attention reads memories of keys and plain values; without memories of values law 5 has nothing to add",
    ),
    "values_only": Ablation(
        _of(ADRConfig, remember="values"), "attention reads plain keys and memories of values"
    ),
}

# ---------------------------------------------------------------- any design


def _half_as_deep(config: ModelConfig) -> ModelConfig:
    require(len(config.blocks) > 1, "model", config.name, "one of several blocks")
    return replace(config, blocks=config.blocks[: (len(config.blocks) + 1) // 2])


def _parallel(config: ModelConfig) -> ModelConfig:
    """ConfigError for a model without a block that adds its parts one after another."""
    found = [
        isinstance(block.residual, SequentialConfig) and None not in (block.mixer, block.ffn)
        for block in config.blocks
    ]
    require(any(found), "model", config.name, "one with sequential residuals")
    pairs = zip(config.blocks, found, strict=True)
    return replace(
        config, blocks=tuple(replace(b, residual=ParallelConfig()) if on else b for b, on in pairs)
    )


def _read_mixers(config: ModelConfig) -> ModelConfig:
    require(
        any(isinstance(b.ffn, RoutedConfig) for b in config.blocks), "model", config.name, "one with experts"
    )
    blocks = (
        replace(b, ffn=replace(b.ffn, reads="mixer")) if isinstance(b.ffn, RoutedConfig) else b
        for b in config.blocks
    )
    return replace(config, blocks=tuple(blocks))


GENERAL = {
    "no_shift": Ablation(
        lambda config: replace(config, shift=False),
        "mixers and networks read each token without the one before",
    ),
    "no_first_values": Ablation(
        lambda config: replace(config, first_values=False),
        "values of mixers do not lean on the first mixer's",
    ),
    "no_embedding_norm": Ablation(
        lambda config: replace(config, embedding_norm=False), "embeddings are not normalised"
    ),
    "no_rope": Ablation(_of(AttentionConfig, rope_base=None), "attention has no rotary positions"),
    "half_depth": Ablation(_half_as_deep, "only the first half of the blocks, with wider networks"),
    "parallel": Ablation(_parallel, "networks read the layer's input, without the mixer's output"),
    "mixer_router": Ablation(_read_mixers, "routers read what the layer's mixer gave, not the normed stream"),
}
"""Ablations of parts that many designs share; a model has those that change it."""

ABLATIONS: dict[str, dict[str, Ablation]] = {
    "perspective": PERSPECTIVE, "perspective2": PERSPECTIVE2, "lens": LENS, "drm": DRM, "adr": ADR,
}  # fmt: skip


def ablations_of(config: ModelConfig) -> dict[str, Ablation]:
    """The ablations of a model by name: those of its design, which need not all change this model, and of GENERAL those
    that do."""
    design = design_of(config)
    own = ABLATIONS.get("perspective" if design == "perspective-experts" else design, {})
    general = dict[str, Ablation]()
    for name, ablation in GENERAL.items():
        with contextlib.suppress(ConfigError):
            _without(config, name, ablation)
            general[name] = ablation
    return own | general
