"""Language models that look before they remember: train, compare and run them with constant memory."""

from pathlib import Path
from typing import TYPE_CHECKING

from perspectron import model as _model
from perspectron import ops as ops
from perspectron import presets
from perspectron.config import ModelConfig, require
from perspectron.errors import PerspectronError
from perspectron.model import LanguageModel, Output
from perspectron.ops import pdr as _pdr  # noqa: F401  (so that perspectron.ops.pdr is there)
from perspectron.state import LMState, load_extra, load_state, save_state

if TYPE_CHECKING:
    from perspectron.data.tokenizer import Tokenizer

__version__ = "0.1.0"
__all__ = [
    "LMState",
    "LanguageModel",
    "ModelConfig",
    "Output",
    "PerspectronError",
    "build",
    "load",
    "load_extra",
    "load_state",
    "ops",
    "presets",
    "save_state",
]


def build(preset_or_config: str | ModelConfig, seed: int = 0) -> LanguageModel:
    """A new model in float32 on the CPU (or on torch's default device), its weights drawn from `seed`.

    ConfigError for an unknown preset, with the list of those there are.
    """
    config = presets.get(preset_or_config) if isinstance(preset_or_config, str) else preset_or_config
    return _model.build(config, seed)


def load(
    path: Path | str, *, cache_bytes: int | None = None, verify: bool = False
) -> tuple[LanguageModel, "Tokenizer"]:
    """The model of a training run (its best held-out checkpoint, else its newest) or of an artifact, and its tokenizer.

    Of an artifact: cache_bytes is memory for experts (default: what is free); verify reads every file first.
    CheckpointError or ArtifactError when there is none that verifies.
    """
    from perspectron.stream.artifact import is_artifact

    if is_artifact(Path(path)):
        from perspectron.stream.engine import load_artifact

        return load_artifact(Path(path), cache_bytes=cache_bytes, verify=verify)
    from perspectron.train.checkpoint import load_run

    require(cache_bytes is None, "cache", cache_bytes, "left out for a run, which is in memory as a whole")
    return load_run(Path(path))
