"""Import of folders that `perspectron export --hf` wrote, also after transformers has saved them again."""

import json
from dataclasses import replace

import msgspec
from torch import Tensor

from perspectron.data.specials import OURS
from perspectron.data.tokenizer import Tokenizer
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig
from perspectron.util.config import load

PREFIX = "model."
HARMLESS = None
"""Keys that are not read are accepted."""


def config(source: Source) -> ModelConfig:
    """The config within config.json."""
    whole = load(ModelConfig, source.get("architecture"), f"{source.folder / 'config.json'}: architecture")
    return replace(whole, vocab_size=source.number("vocab_size"))


def tokenizer(source: Source) -> Tokenizer:
    """The tokenizer beside config.json. A tokenizer of ours is freed of what transformers adds to it; another takes
    from config.json the id of the token at which the model forgets all before it."""
    path = source.folder / "tokenizer.json"
    found = Tokenizer.load(path)
    if found.specials == OURS:
        bare = json.loads(found.to_str()) | dict.fromkeys(("post_processor", "truncation", "padding"))
        return Tokenizer.parse(json.dumps(bare, indent=2, ensure_ascii=False), path)
    reset = source.get("end_of_text")
    found.specials = msgspec.structs.replace(found.specials, reset=reset if type(reset) is int else None)
    return found


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    """The same tensors under our names."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in source.all().items()}
