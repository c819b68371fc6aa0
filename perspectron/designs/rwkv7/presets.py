"""RWKV-7 at one size."""

from perspectron.designs.rwkv7.channel import RWKV7ChannelConfig
from perspectron.designs.rwkv7.mixer import RWKV7Config
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.presets.frame import GPT2_NORM
from perspectron.presets.table import design, preset
from perspectron.util.config import require


@design("RWKV-7: a time mix, then a channel mix", "arXiv 2503.14456")
def rwkv7(
    name: str,
    *,
    vocab_size: int = 2048,
    d_model: int = 128,
    layers: int = 4,
    head_dim: int = 32,
    hidden: int = 512,
    embedding_norm: bool = True,
) -> ModelConfig:
    """RWKV-7; a layer is two blocks, because its network has a state too. hidden: of the channel mixes."""
    require(layers >= 1, "layers", layers, "≥ 1")
    blocks = []
    for layer in range(layers):
        blocks.append(BlockConfig(RWKV7Config(head_dim, layer, layers), None))
        blocks.append(BlockConfig(RWKV7ChannelConfig(hidden, layer, layers), None))
    return ModelConfig(name, vocab_size, d_model, tuple(blocks), embedding_norm=embedding_norm, **GPT2_NORM)


preset("rwkv7-tiny", "RWKV-7, sized like perspective-tiny-dense", rwkv7)
