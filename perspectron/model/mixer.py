"""The base of every mixer over time: what the model and its tools ask of one, each with a default.

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
    """One line."""
    source: ClassVar[str]
    """The page or paper that describes it."""
    framed: ClassVar[MixerConfig | None] = None
    """Its config at a width of 128, if it can stand for the recurrence of another design, as in perspective[kda]."""
    hidden: ClassVar[int] = 0
    """The width of the SwiGLU beside it, if a model of both in every layer is a design under its kind: at the size of
    perspective-tiny-dense, with `framed` as its config."""

    value_channels: int = 0
    """Channels of its values, which a value residual mixes with those of the first mixer that has as many (`forward`
    then takes `value_residual`); 0 for none."""
    inputs: tuple[str, ...] = ("x",)
    """Names of the inputs that `forward` takes apart (`parts.split_inputs`): q, k, v, g (what gates are made of), or x
    for all. A token shift may be asked for each of them."""
    mix_exponents: tuple[float, ...] = (0.7,)
    """Exponents of the initial token shifts where a model does not say which inputs have them: one for each, or one for
    all."""
    recipe: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Weights that are trained in a way of their own, as its authors do: (share of the learning rate, share of the
    weight decay) by pattern of their names in it. Of several the first counts that fits; `train.optim` makes groups of
    them."""
    own_token_shift: bool = False
    """True if it reads the token before by itself, so that a model with token shift adds none."""
    takes_shared: bool = False
    """True if `forward` takes `shared`, which mixers pass to those above them."""
    learned_start: bool = False
    """True if its empty state is a parameter, which ranks that share a text would each have a part of."""
    splits_time: bool = True
    """True if ranks may share a text, each with a stretch of it: its terms of the loss are means over tokens."""
    exact_cells: int = 0
    """A number of tokens: where each call is filled up to a multiple of it, a prompt has the same bits wherever it is
    cut into calls, on a CPU in float32 and bfloat16 (`decode.reading.whole`). 0: it may have others. What its matrices
    want on top of that, where they are not packed, `Block.exact_cells` knows."""
    calls_linears: bool = True
    """False if it reads the weights of its linear layers past their `forward`, where no hook sees an input; quantising
    then gives them 8 bits."""
    dropout: nn.Module | None
    """What the block sets in training with dropout, for a mixer that has weights to drop; `drops` says so."""
    drops: bool = False
    kept_at_reset: ClassVar[tuple[str, ...]] = ()
    """Fields of its state that a reset keeps, also where the state is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = None  # of the instance: one of the class would hide the module that is set

    @abc.abstractmethod
    def init_state(self, batch_size: int, device: torch.device, dtype: torch.dtype, capacity: int = 0) -> Any:
        """The state before any token: a registered frozen dataclass of tensors whose first dimension is the batch, in
        float32 at least. capacity: tokens to make room for, where the state grows."""

    def require_onnx(self, name: str) -> None:
        """Raise ConfigError, which calls the mixer `name`, if its step cannot be exported to ONNX: where control
        depends on data, or a text begins with a state that is not zero."""

    def decays(self) -> int:
        """Logits of decays of a token, of a matrix memory S that is read as Sᵀ q: `forward` then takes `tuned`
        (`perspectron.model.tuned`), a field `memory_…` of the state has S. 0: there is none."""
        return 0

    def decay_gate(self) -> nn.Module | None:
        """The module that gives the logits of decays for each row of its state [B,T,D], where there is one to draw."""
        return None

    def idle_parameters(self) -> int:
        """Count the parameters that its config leaves without effect."""
        return 0

    def heads(self, x_BTD: Inputs) -> Heads | None:
        """What attention hands to a recurrence that takes its place, with the distances of these inputs; None of what
        is no attention."""
        return None

    @classmethod
    def in_place_of(cls, d_model: int, heads: int, key: int, value: int) -> MixerConfig | None:
        """Its config in the place of attention with so many heads of these widths; None where it cannot have them.
        `take` then fills it."""
        return None

    def take(self, heads: Heads) -> None:
        """Start from what attention hands on, as far as there is a place for it."""
        raise NotImplementedError


def mixers() -> dict[str, type[Mixer]]:
    """The classes of all mixers by kind, imported. ConfigError for one that does not say what has no default."""
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
    """The config of a layer's mixer, where it must know which one of how many it is."""
    if not hasattr(config, "layers"):
        return config
    known: Any = config
    placed: MixerConfig = replace(known, layer=layer, layers=layers)
    return placed
