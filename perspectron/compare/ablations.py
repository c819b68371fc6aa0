"""Ablations: each is a function from the config of a design to a config without one part.

Designs register theirs by name. Removing a part removes parameters. `ablate` therefore changes the hidden width of
the feed-forward networks (or of the emitter, without networks) until as many parameters are active as before, so that
the part is compared and not the size. docs/designs has a page for each design.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from perspectron.experts.router import RoutedConfig
from perspectron.model.census import active_parameters
from perspectron.model.config import BlockConfig, ModelConfig, ParallelConfig, SequentialConfig
from perspectron.model.mixer import numbered
from perspectron.presets import TOLERANCE, design_of
from perspectron.presets.fit import STEP
from perspectron.util import registry
from perspectron.util.config import MixerConfig, one_of, require
from perspectron.util.errors import ConfigError

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


def with_mixers(config: ModelConfig, kind: type[MixerConfig], **values: Any) -> ModelConfig:
    """Config with other values in every mixer of a kind."""

    def changed(block: BlockConfig) -> BlockConfig:
        if not isinstance(block.mixer, kind):
            return block
        mixer: Any = block.mixer
        return replace(block, mixer=replace(mixer, **values))

    return replace(config, blocks=tuple(map(changed, config.blocks)))


def with_experts(config: ModelConfig, **values: Any) -> ModelConfig:
    """Config with other values in every layer of experts."""
    blocks = (
        replace(b, ffn=replace(b.ffn, **values)) if isinstance(b.ffn, RoutedConfig) else b
        for b in config.blocks
    )
    return replace(config, blocks=tuple(blocks))


def of_mixers(kind: type[MixerConfig], **values: Any) -> Change:
    """The change that sets other values in every mixer of a kind."""
    return lambda config: with_mixers(config, kind, **values)


# ---------------------------------------------------------------- any design


def _half_as_deep(config: ModelConfig) -> ModelConfig:
    require(len(config.blocks) > 1, "model", config.name, "one of several blocks")
    kept = config.blocks[: (len(config.blocks) + 1) // 2]
    return replace(config, blocks=tuple(_numbered(block, i, kept) for i, block in enumerate(kept)))


def _numbered(block: BlockConfig, at: int, blocks: Sequence[BlockConfig]) -> BlockConfig:
    """The block at a place among others, its mixers numbered among those of their kind."""

    def placed(field: str) -> Any:
        mixer: MixerConfig | None = getattr(block, field)
        kinds = [getattr(getattr(other, field), "kind", None) for other in blocks]
        return mixer and numbered(mixer, kinds[:at].count(mixer.kind), kinds.count(mixer.kind))

    return replace(block, mixer=placed("mixer"), beside=placed("beside"))


def _parallel(config: ModelConfig) -> ModelConfig:
    """Config with parallel in place of sequential residuals. ConfigError: no block adds mixer and network in turn."""
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
    return with_experts(config, reads="mixer")


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
    "no_rope": Ablation(
        of_mixers(MixerConfig.of("attention"), rope_base=None), "attention has no rotary positions"
    ),
    "half_depth": Ablation(_half_as_deep, "only the first half of the blocks, with wider networks"),
    "parallel": Ablation(_parallel, "networks read the layer's input, without the mixer's output"),
    "mixer_router": Ablation(_read_mixers, "routers read what the layer's mixer gave, not the normed stream"),
}
"""Ablations of parts that many designs share; a model has those that change it."""


def ablations_of(config: ModelConfig) -> dict[str, Ablation]:
    """The ablations of a model by name: those of its design, which need not all change this model, and of GENERAL those
    that do."""
    design = design_of(config)
    own: dict[str, Ablation] = (
        registry.part("ablations", design) if design in registry.places("ablations") else {}
    )
    return own | {name: GENERAL[name] for name in _made(config, GENERAL)}


def removed(config: ModelConfig) -> dict[str, ModelConfig]:
    """The model without each part that can be removed from it, by ablation."""
    return _made(config, ablations_of(config))


def _made(config: ModelConfig, known: Mapping[str, Ablation]) -> dict[str, ModelConfig]:
    found = dict[str, ModelConfig]()
    for name, ablation in known.items():
        with contextlib.suppress(ConfigError):
            found[name] = _without(config, name, ablation)
    return found
