"""Small language models with exact state: train, compare and run them on CPU cores or a GPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perspectron.util.version import __version__ as __version__

if TYPE_CHECKING:
    from perspectron import ops as ops
    from perspectron import presets as presets
    from perspectron.data.tokenizer import Tokenizer
    from perspectron.decode.generate import generate as generate
    from perspectron.decode.session import Session
    from perspectron.model.config import ModelConfig
    from perspectron.model.model import LanguageModel, Output
    from perspectron.model.state import LMState, load_extra, load_state, save_state
    from perspectron.opening import load, save
    from perspectron.training import Trained, train
    from perspectron.util.errors import PerspectronError

__all__ = [
    "LMState",
    "LanguageModel",
    "ModelConfig",
    "Output",
    "PerspectronError",
    "Session",
    "Tokenizer",
    "Trained",
    "build",
    "generate",
    "load",
    "load_extra",
    "load_state",
    "ops",
    "presets",
    "save",
    "save_state",
    "train",
]


def build(preset_or_config: "str | ModelConfig", seed: int = 0) -> "LanguageModel":
    """Build a model in float32 on the CPU (or on torch's default device), with weights drawn from `seed`.

    Raises ConfigError for an unknown preset; the message lists the known ones.

        >>> import perspectron
        >>> model = perspectron.build("perspective2-tiny", seed=1)
        >>> sum(parameter.numel() for parameter in model.parameters())
        1212160
    """
    from perspectron import presets
    from perspectron.model import model

    config = presets.get(preset_or_config) if isinstance(preset_or_config, str) else preset_or_config
    return model.build(config, seed)


_MODULES = {
    "model.config": ("ModelConfig",),
    "decode.session": ("Session",),
    "decode.generate": ("generate",),
    "util.errors": ("PerspectronError",),
    "model.model": ("LanguageModel", "Output"),
    "opening": ("load", "save"),
    "data.tokenizer": ("Tokenizer",),
    "training": ("Trained",),
    "model.state": ("LMState", "load_extra", "load_state", "save_state"),
}
"""The other public names and their modules. Each is imported when it is first used, so that `perspectron --help` does
not wait for torch."""

if not TYPE_CHECKING:  # to mypy a module with __getattr__ has every name

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"perspectron.{module}"), name)
        if name == "ops":
            import_module("perspectron.ops.pdr")  # documented as perspectron.ops.pdr.scan
        if name in (
            "ops",
            "presets",
            "train",
        ):  # train is a package that can be called, as its functions' home
            return import_module(f"perspectron.{name}")
        raise AttributeError(f"module 'perspectron' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
