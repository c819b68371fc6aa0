"""`perspectron import`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from perspectron.cli.options import Json, answer
from perspectron.cli.progress import Work
from perspectron.util.config import meant_beside, require

if TYPE_CHECKING:
    from perspectron.model.config import BlockConfig, ModelConfig


@dataclass(frozen=True)
class Import:
    """Convert a model of transformers, a GGUF, or a .pth of RWKV's author, to a run: one of ours, or of another family
    (docs/guides/bring-a-model.md has them).

    The run holds only weights: generate, eval, quantize and serve accept it, and train --init starts from it.

    Example: perspectron import letters-hf --out runs/letters-again
    Example: perspectron import model.gguf --out runs/model
    """

    folder: tyro.conf.Positional[Path]
    """Folder with config.json, safetensors and tokenizer.json, a GGUF file, or a .pth with its vocabulary beside it."""
    out: Path
    """New folder of the run."""
    lens: bool = False
    """Add the parts of the lens design to a GPT-2, initialised so that its outputs stay the same until it is
    trained."""
    cache: Literal["full", "bfloat16"] | None = None
    """Keys and values of the state in float32 ("full"), or rounded to bfloat16, of half the size (default: as a run
    that was exported kept them; "full" for all others)."""
    json: Json = False

    def __call__(self) -> int:
        require(not self.out.exists(), "out", str(self.out), "a new folder")
        require(
            self.folder.exists(),
            "folder",
            str(self.folder),
            f"a file or folder that is there{meant_beside(self.folder)}",
        )
        from perspectron.data import origin
        from perspectron.interop import foreign
        from perspectron.train import checkpoint
        from perspectron.train.config import RunConfig, TrainConfig

        with Work(f"reading {self.folder}"):
            model, tokenizer, _, files = foreign.read(self.folder, lens=self.lens)
            train = TrainConfig(data="", dtype="float32", device="cpu")
            if model.config.positions:
                train = replace(train, seq_len=min(train.seq_len, model.config.positions))
            config = RunConfig(
                model.config if self.cache is None else _caching(model.config, self.cache), train
            )
            checkpoint.export(self.out, config, tokenizer, model, checkpoint.Progress())
            origin.keep(files, self.out)
        size = sum(parameter.numel() for parameter in model.parameters())
        fields = {"out": str(self.out), "model": model.config.name, "parameters": size}
        return answer(self.json, fields, f"{self.out}: {model.config.name}, {size / 1e6:.2f} M parameters")


def _caching(config: "ModelConfig", cache: str) -> "ModelConfig":
    """The config with attention that keeps keys and values as `cache` says. ConfigError: there is no attention."""
    if cache != "full":
        attends = any(hasattr(mixer, "cache") for block in config.blocks for mixer in block.mixers)
        require(attends, "cache", cache, f"left out: {config.name} has no attention, so no keys and values")

    def kept(block: "BlockConfig") -> "BlockConfig":
        mixers: dict[str, Any] = {"mixer": block.mixer, "beside": block.beside}
        changed = {name: replace(m, cache=cache) for name, m in mixers.items() if hasattr(m, "cache")}
        return replace(block, **changed)

    return replace(config, blocks=tuple(map(kept, config.blocks)))
