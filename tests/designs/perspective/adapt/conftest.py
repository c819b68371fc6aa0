from dataclasses import replace

import pytest
import torch

from perspectron import presets
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, build

VOCAB = 300
SIZES = {"vocab_size": VOCAB, "d_model": 32, "hidden": 48, "rank": 8, "heads": 4, "kv_heads": 2, "window": 16}


def make(layers: int = 4, *, experts: bool = False, mixers: str = "all") -> LanguageModel:
    """Random weights in float64. mixers: "pdr" or "attention" alone."""
    config: ModelConfig = presets.get("perspective-tiny" if experts else "perspective-tiny-dense", **SIZES)
    chosen = {
        "all": config.blocks,
        "pdr": config.blocks[:1] * layers,
        "attention": config.blocks[3:] * layers,
    }
    blocks = chosen[mixers][:layers]
    model = build(replace(config, blocks=blocks), seed=5).double()
    with torch.no_grad():
        model.embedding.weight.mul_(4)
    return model.requires_grad_(False)


def make2(layers: int = 3, **options: bool) -> LanguageModel:
    """The same of PDR 2, with attention in the third layer, the token before and first values."""
    sizes = SIZES | {"kv_heads": 4, "layers": layers, "period": 3, "groups": 2}
    config = presets.get("perspective2-tiny", **sizes, **options)
    model = build(config, seed=5).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.embedding.weight.mul_(4)
        for name, parameter in model.named_parameters():
            if "shift" in name or "first_values" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
    return model.requires_grad_(False)


def text(tokens: int, seed: int = 0) -> list[int]:
    """Ids of words that come again and again."""
    draw = torch.Generator().manual_seed(seed)
    word_WL = torch.randint(1, VOCAB, (12, 5), generator=draw)
    return word_WL[torch.randint(12, (tokens // 5 + 1,), generator=draw)].flatten()[:tokens].tolist()


@pytest.fixture(scope="module", params=[make, make2], ids=["pdr", "pdr2"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    made: LanguageModel = request.param()
    return made
