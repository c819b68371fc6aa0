"""Building blocks of designs' presets: a stack of the same block, and one with a recurrence in every layer."""

from functools import partial
from typing import Any

from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.mixer import mixers, numbered
from perspectron.presets.table import DESIGNS, PRESETS, Design, Make, Preset, as_it_is
from perspectron.util import registry
from perspectron.util.config import MixerConfig, require

GPT2_NORM: dict[str, Any] = {"norm": "layer", "norm_eps": 1e-5}
FRAMES: dict[str, Make] = {}
"""Designs whose recurrence can be replaced by another, written in brackets: perspective[kda]. Their `make` has a
keyword `mixer`."""


def stack(
    name: str, vocab_size: int, d_model: int, layers: int, block: BlockConfig, **more: Any
) -> ModelConfig:
    """`layers` times the same block, RMSNorm, a tied head; `more`: other fields of the model."""
    require(layers >= 1, "layers", layers, "≥ 1")
    return ModelConfig(name, vocab_size, d_model, (block,) * layers, **more)


def layered(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    hidden: int,
    mixer: MixerConfig,
    embedding_norm: bool = True,
) -> ModelConfig:
    """A model with a recurrence and a SwiGLU in every layer."""
    require(layers >= 1, "layers", layers, "≥ 1")
    ffn = SwiGLUConfig(hidden)
    blocks = tuple(BlockConfig(numbered(mixer, layer, layers), ffn) for layer in range(layers))
    return ModelConfig(name, vocab_size, d_model, blocks, embedding_norm=embedding_norm)


def enter_recurrences() -> None:
    """Enter a design for each mixer with both `framed` and `hidden`: the mixer and a SwiGLU in every layer. At that
    size each is the preset "KIND-tiny"."""
    for kind, mixer in mixers().items():
        if mixer.hidden and mixer.framed is not None:
            make = partial(layered, hidden=mixer.hidden, mixer=mixer.framed)
            DESIGNS[kind] = Design(make, mixer.about, mixer.source, "hidden", as_it_is)
            about = f"{registry.title(kind)}, sized like perspective-tiny-dense"
            PRESETS[f"{kind}-tiny"] = Preset(make, about, kind)


def enter_framed() -> None:
    """Enter every recurrence in every frame as a design."""
    for name, frame in FRAMES.items():
        for kind, mixer in mixers().items():
            if mixer.framed is not None:
                about = f"{registry.title(name)} with {registry.title(kind)} for its recurrence"
                make = partial(frame, mixer=mixer.framed)
                DESIGNS[f"{name}[{kind}]"] = DESIGNS[name]._replace(make=make, about=about)
