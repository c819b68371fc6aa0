"""The config of a model: its blocks, how they add their parts, and its head."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from perspectron.util.config import (
    FFNConfig,
    HeadConfig,
    MixerConfig,
    ResidualConfig,
    at_least,
    positive,
    require,
)

MOST_BLOCKS = 1024
MOST_SIZE = 1 << 24
"""Upper bound of every width, length or number in a model's config. Larger values are mistakes, and the product of two
would overflow 64 bits."""


@dataclass(frozen=True)
class SequentialConfig(ResidualConfig):
    """h = x + mixer(norm(x)); y = h + ffn(norm(h)) (docs/designs/perspective.md#stack).

    norm: "pre"; "post" norms the outputs of mixer and network, not their inputs: h = x + norm(mixer(x)); "sandwich"
    norms both. factor: multiplies what mixer and network add."""

    kind = "sequential"
    norm: Literal["pre", "post", "sandwich"] = "pre"
    factor: float = 1.0

    def __post_init__(self) -> None:
        require(self.factor != 0, "factor", self.factor, "other than 0")


@dataclass(frozen=True)
class ParallelConfig(ResidualConfig):
    """y = x + mixer(norm(x)) + ffn(norm(x)), each with a norm of its own."""

    kind = "parallel"


@dataclass(frozen=True)
class Law5Config(ResidualConfig):
    """h = norm(x + mixer(x)); y = h + ffn(norm(h)) (docs/designs/adr.md#residual)."""

    kind = "law5"


@dataclass(frozen=True)
class RouteGatedConfig(ResidualConfig):
    """h = x + a, a = mixer(norm(x)); m = ffn(norm(h)); y = x + scale · (g a + (1 − g) m), one learned g per block
    (docs/designs/lens.md#route-gate). scale: 2 gives GPT-2 at g = ½. anneal: after `anneal_after` updates, the bias
    under g's sigmoid falls by this much with each update."""

    kind = "route_gated"
    scale: float = 1.0
    anneal: float = 0.0
    anneal_after: int = 0

    def __post_init__(self) -> None:
        positive(self, "scale")
        at_least(0, self, "anneal", "anneal_after")


@dataclass(frozen=True)
class NoResidualConfig(ResidualConfig):
    """y = mixer(x), nothing added; the ffn must be missing (docs/designs/drm.md#flow)."""

    kind = "none"


@dataclass(frozen=True)
class BlockConfig:
    """One layer: a mixer, then a feed-forward network; either may be missing. beside: a second mixer with the same
    input as the first; their outputs are added."""

    mixer: MixerConfig | None
    ffn: FFNConfig | None
    residual: ResidualConfig = SequentialConfig()
    beside: MixerConfig | None = None

    def __post_init__(self) -> None:
        if self.beside is not None:
            require(self.mixer is not None, "mixer", None, "given where beside is")
            sequential = isinstance(self.residual, SequentialConfig)
            require(sequential, "beside", self.beside.kind, f"null with residual {self.residual.kind}")
            require(self.beside.d_token is None, "beside.d_token", self.beside.d_token, "null")
        match self.residual:
            case NoResidualConfig():
                require(self.mixer is not None, "mixer", None, "given with residual none")
                require(self.ffn is None, "ffn", self.ffn, "None with residual none")
            case Law5Config():
                require(self.mixer is not None, "mixer", None, "given with residual law5")
            case RouteGatedConfig():
                require(self.ffn is not None, "ffn", None, "given with residual route_gated")
            case _:
                require(
                    self.mixer is not None or self.ffn is not None, "ffn", None, "given where mixer is not"
                )

    @property
    def mixers(self) -> tuple[MixerConfig, ...]:
        """The layer's mixers, in order: none, one or two."""
        return tuple(mixer for mixer in (self.mixer, self.beside) if mixer is not None)


Shift = bool | tuple[str, ...]
"""Inputs of mixers and networks that also read the token before: none, all (as each mixer sets it), or those named."""


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and parts of a language model: embedding, blocks, final norm, head.

    head: None uses the transposed embedding. embedding_std: standard deviation of the embedding at initialisation.
    embedding_norm: divide the embedding by its root mean square before the first block, so that it is comparable in
    size to what the mixers add. first_norm: a norm with weights after the embedding, as in RWKV. embedding_factor:
    multiply the embedding by this, rounded to its dtype. logits_factor, logits_cap: for the head's output l, the logits
    are factor · l, or cap · tanh(factor · l / cap) where the cap is not 0. positions: length of a learned position
    table, which bounds the length of a document; 0 for none. norm: "rms", or "layer" with biases. dropout: share of the
    numbers that are zeroed in training, in the embedding, in what mixers and networks add, and in the weights of
    attention. shift: mixers and networks read a learned mix of each token and the one before, or only these of their
    inputs do: q, k, v, g (gates), x (all of a mixer's, with one mix), network
    (docs/designs/baselines.md#two-parts-for-every-design). input_conv: they read, instead, the token plus a short
    convolution of it and the three before; input_swish: plus the swish of that. first_values: values of mixers are
    mixed with those of the first mixer with as many channels. longest: tokens of the longest document that rotary
    positions were made for, past which nothing is generated; 0 for no bound. zero_outputs: the output matrices of
    mixers and networks start at 0.

        >>> config = perspectron.presets.get("perspective2-tiny", layers=2)
        >>> config.d_model, len(config.blocks), perspectron.build(config).config == config
        (128, 2, True)
    """

    name: str
    vocab_size: int
    d_model: int
    blocks: tuple[BlockConfig, ...]
    head: HeadConfig | None = None
    embedding_std: float = 0.02
    embedding_norm: bool = False
    first_norm: bool = False
    embedding_factor: float = 1.0
    logits_factor: float = 1.0
    logits_cap: float = 0.0
    positions: int = 0
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    dropout: float = 0.0
    shift: Shift = False
    input_conv: Shift = False
    input_swish: bool = False
    first_values: bool = False
    longest: int = 0
    zero_outputs: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "vocab_size", "d_model")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "in [0, 1)")
        require(len(self.blocks) >= 1, "blocks", len(self.blocks), "at least one block")
        at_least(0, self, "positions", "logits_cap", "longest")
        positive(self, "embedding_std", "norm_eps", "embedding_factor", "logits_factor")
        require(len(self.blocks) <= MOST_BLOCKS, "blocks", len(self.blocks), f"≤ {MOST_BLOCKS}")
        _require_sizes(self, "")
        alone = self.input_conv is False or self.shift is False
        require(alone, "input_conv", self.input_conv, "false with shift")
        require(
            self.input_conv is not False or not self.input_swish,
            "input_swish",
            True,
            "false without input_conv",
        )
        mixers = sum(block.mixer is not None for block in self.blocks)
        require(self.positions > 0 or mixers > 0, "blocks with a mixer", mixers, "≥ 1 where positions = 0")
        for index, block in enumerate(self.blocks):
            width = None if block.mixer is None else block.mixer.d_token
            first = index == 0 and isinstance(block.residual, NoResidualConfig)
            require(width in (None, self.d_model) or first, f"blocks[{index}].mixer.d_token", width,
                    f"d_model = {self.d_model}, but in a first block with residual none")  # fmt: skip
            alone = block.beside is None or not (self.shift or self.input_conv or self.first_values)
            require(alone, f"blocks[{index}].beside", "given", "null with shift, input_conv or first_values")
        require(self.head is not None or self.d_token == self.d_model, "head", None,
                f"given, because tokens are {self.d_token} wide and the model {self.d_model}")  # fmt: skip

    @property
    def room(self) -> int:
        """Tokens that one document may have; 0 for any number."""
        return self.positions or self.longest

    @property
    def d_token(self) -> int:
        """Width of the embedding: the model width, unless the first mixer sets another."""
        first = self.blocks[0].mixer
        return (None if first is None else first.d_token) or self.d_model


def _require_sizes(config: Any, where: str) -> None:
    """ConfigError for a whole number that is above MOST_SIZE, anywhere in a config."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{where}{field.name}"
        for i, item in enumerate(value if isinstance(value, tuple) else (value,)):
            at = f"{name}[{i}]" if isinstance(value, tuple) else name
            if dataclasses.is_dataclass(item):
                _require_sizes(item, f"{at}.")
            elif isinstance(item, int):
                require(abs(item) <= MOST_SIZE, at, item, f"≤ {MOST_SIZE:,}")
