"""What designs are made of, for their presets: a stack of the same block, and one with a recurrence in every layer."""

from functools import partial
from typing import Any

from perspectron.model.config import BlockConfig, MixerConfig, ModelConfig, require
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.mixer import numbered
from perspectron.presets.table import DESIGNS, PRESETS, Design, Make, Preset, as_it_is
from perspectron.util import registry

GPT2_NORM: dict[str, Any] = {"norm": "layer", "norm_eps": 1e-5}
FRAMES: dict[str, Make] = {}
"""Designs that take another recurrence for their own, written in brackets: perspective[kda]. `make` has a keyword
`mixer`."""
FRAMED: dict[str, MixerConfig] = {}
"""Recurrences that stand in them, by kind."""


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
    """A recurrence and a SwiGLU in every layer."""
    require(layers >= 1, "layers", layers, "≥ 1")
    ffn = SwiGLUConfig(hidden)
    blocks = tuple(BlockConfig(numbered(mixer, layer, layers), ffn) for layer in range(layers))
    return ModelConfig(name, vocab_size, d_model, blocks, embedding_norm=embedding_norm)


def recurrence(mixer: MixerConfig, hidden: int, about: str, source: str) -> None:
    """Enter a recurrence as a design under its kind, with a SwiGLU in every layer; as the preset "KIND-tiny"; and in
    the frames of others. hidden: width of the network at the size of perspective-tiny-dense."""
    make = partial(layered, hidden=hidden, mixer=mixer)
    DESIGNS[mixer.kind] = Design(make, about, source, "hidden", 4, as_it_is)
    PRESETS[f"{mixer.kind}-tiny"] = Preset(make, f"{about}, sized like perspective-tiny-dense", mixer.kind)
    FRAMED[mixer.kind] = mixer


def enter_framed() -> None:
    """Enter every recurrence in every frame as a design."""
    for name, make in FRAMES.items():
        for kind, mixer in FRAMED.items():
            DESIGNS[f"{name}[{kind}]"] = DESIGNS[name]._replace(
                make=partial(make, mixer=mixer),
                about=f"{registry.title(name)} with {kind} for its recurrence",
            )
