"""The base class of every mixer over time, with defaults for most of what the model and its tools ask of one.

Shapes: B batch, T time, D model width.
"""

import abc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from perspectron.model.masks import Inputs
from perspectron.model.transfer import Heads
from perspectron.util import registry
from perspectron.util.config import MixerConfig, require


class Mixer(nn.Module, abc.ABC):
    """A layer that mixes information across time steps, built from (d_model, norm_eps, config).

    The model initialises linear layers and scales one named `o_proj` down by the number of layers; a mixer sets all its
    other parameters and buffers in `init_weights(generator)`, if it has any. docs/add-a-mixer.md builds one.
    """

    config: Any
    small: ClassVar[MixerConfig]
    """A config with which tests build it at a width of 16."""
    about: ClassVar[str]
    """One-line description, for lists of designs."""
    source: ClassVar[str]
    """The page or paper that describes it."""
    state_kind: ClassVar[type]
    """The class of its state, where that begins as zeros of `state_shapes`; else it has an `init_state` of its own."""
    framed: ClassVar[MixerConfig | None] = None
    """Config at a width of 128 in place of another design's recurrence, as in perspective[kda]; None: it cannot be."""
    hidden: ClassVar[int] = 0
    """Hidden width of the SwiGLU in the design named after its kind, which has `framed` and this SwiGLU in every layer,
    at the size of perspective-tiny-dense; 0 for no such design."""

    value_channels: int = 0
    """Channels of its values, which a value residual mixes with those of the first mixer that has as many (`forward`
    then takes `value_residual`); 0 for none."""
    inputs: tuple[str, ...] = ("x",)
    """Names of the inputs that `forward` takes separately (`parts.split_inputs`): q, k, v, g (for gates), or x for one
    input in all. A token shift can be set for each of them."""
    mix_exponents: tuple[float, ...] = (0.7,)
    """Exponents of the initial mixes of token shifts where a model does not name the inputs that have one: one for each
    input, or one for all."""
    recipe: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Weights that its authors train with settings of their own: (factor of the learning rate, factor of the weight
    decay) by pattern of their names in the mixer. The first pattern that fits counts; `train.optim` makes groups of
    them."""
    own_token_shift: bool = False
    """True if it reads the token before by itself, so that a model with token shift adds none."""
    takes_shared: bool = False
    """True if `forward` takes `shared`, which mixers pass to those above them."""
    learned_start: bool = False
    """True if its empty state is a learned parameter, of which FSDP leaves each rank only a part."""
    splits_time: bool = True
    """True if ranks may share a text, each reading a stretch of it: loss terms must then be means over tokens."""
    exact_cells: int = 0
    """A number of tokens: if each call is padded to a multiple of it, a prompt gives the same bits wherever it is cut
    into calls, on a CPU in float32 and bfloat16 (`decode.reading.whole`). 0: not promised. `Block.exact_cells` adds
    what unpacked matrices need."""
    calls_linears: bool = True
    """False if it reads the weights of its linear layers past their `forward`, where no hook sees an input; quantising
    then gives them 8 bits."""
    dropout: nn.Module | None
    """Dropout of attention weights, set by the block where the model has dropout and `drops` is true; else None."""
    drops: bool = False
    kept_at_reset: ClassVar[tuple[str, ...]] = ()
    """Fields of its state that a reset keeps, also where the state is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = None  # on the instance: a class attribute would hide the module that is set

    def state_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the state's tensors, without the batch."""
        raise NotImplementedError(f"{type(self).__name__} has neither state_shapes nor init_state")

    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype, capacity: int = 0) -> Any:
        """The state before any token: a registered frozen dataclass of tensors whose first dimension is the batch, in
        float32 at least; zeros here. capacity: tokens to make room for, where the state grows."""
        dtype = torch.promote_types(dtype, torch.float32)
        shapes = self.state_shapes()
        return self.state_kind(*(torch.zeros(batch_size, *x, device=device, dtype=dtype) for x in shapes))

    def require_onnx(self, name: str) -> None:
        """Raise ConfigError, which calls the mixer `name`, if its step cannot be exported to ONNX: where control
        depends on data, or a text begins with a state that is not zero."""

    def decays(self) -> int:
        """Number of decay logits per token of a matrix memory S that is read as Sᵀ q: `forward` then takes `tuned`
        (`perspectron.model.tuned`), and the state's field `memory_…` is S. 0: it has no such memory."""
        return 0

    def decay_gate(self) -> nn.Module | None:
        """The module that gives the decay logits of each row of its state [B,T,D], if it has one that can be drawn."""
        return None

    def idle_parameters(self) -> int:
        """Count the parameters that its config leaves without effect."""
        return 0

    def heads(self, x_BTD: Inputs) -> Heads | None:
        """The matrices of attention, for a recurrence that takes its place, with the distances it reaches on these
        inputs; None for a mixer that is not attention."""
        return None

    @classmethod
    def in_place_of(cls, d_model: int, heads: int, key: int, value: int) -> MixerConfig | None:
        """Config of this mixer in place of attention with these heads and widths of keys and values; None if it cannot
        have them. `take` then sets the weights."""
        return None

    def take(self, heads: Heads) -> None:
        """Set the weights from those of attention, as far as this mixer has a place for them."""
        raise NotImplementedError


def mixers() -> dict[str, type[Mixer]]:
    """The classes of all mixers by kind, imported. ConfigError: one is no `Mixer`, or lacks small, about or source."""
    found = dict(registry.parts("mixers"))
    for kind, mixer in found.items():
        _require_mixer(kind, mixer)
        for name in ("small", "about", "source"):
            require(
                hasattr(mixer, name),
                f"{mixer.__name__}.{name}",
                "nothing",
                "given (docs/add-a-mixer.md)",
            )
    return found


def build(d_model: int, norm_eps: float, config: MixerConfig) -> Mixer:
    """The mixer of a config. ConfigError for one that is no `Mixer`."""
    mixer = registry.part("mixers", config.kind)
    _require_mixer(config.kind, mixer)
    made: Mixer = mixer(d_model, norm_eps, config)
    return made


def _require_mixer(kind: str, mixer: Any) -> None:
    derived = isinstance(mixer, type) and issubclass(mixer, Mixer)
    require(derived, f"mixer {kind!r}", getattr(mixer, "__name__", mixer), "a perspectron.model.mixer.Mixer")


def config_of(kind: str, **values: Any) -> MixerConfig:
    """A config of a kind of mixer, whose module is imported; `values` are its fields."""
    return MixerConfig.of(kind)(**values)


def numbered(config: MixerConfig, layer: int, layers: int) -> MixerConfig:
    """The config of a layer's mixer, with the number of the layer and of layers filled in if it has these fields."""
    if not hasattr(config, "layers"):
        return config
    known: Any = config
    placed: MixerConfig = replace(known, layer=layer, layers=layers)
    return placed
