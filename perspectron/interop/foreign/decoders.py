"""Decoders of attention and a SwiGLU (Llama, Mistral), Mamba-2, and Bamba, a hybrid of both."""

from torch import Tensor

from perspectron.designs.ssd.mixer import SSDConfig
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.interop.foreign import parts
from perspectron.interop.foreign.source import Source
from perspectron.model.config import MOST_BLOCKS, BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig

BAMBA = {
    "expand": "mamba_expand", "heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state": "mamba_d_state",
    "conv": "mamba_d_conv", "groups": "mamba_n_groups", "bias": "mamba_proj_bias", "conv_bias": "mamba_conv_bias",
}  # fmt: skip
MAMBA2 = {
    "expand": "expand", "heads": "num_heads", "head_dim": "head_dim", "state": "state_size", "conv": "conv_kernel",
    "groups": "n_groups", "bias": "use_bias", "conv_bias": "use_conv_bias",
}  # fmt: skip
OF_LLAMA = parts.Defaults(1e-6)
OF_MISTRAL = parts.Defaults(1e-6, key_heads=8, sliding_window=4096)
OF_BAMBA = parts.Defaults(1e-5, key_heads=8, rope_share=0.5)
"""The defaults of these kinds, as the classes of transformers have them."""


def llama_config(source: Source, defaults: parts.Defaults = OF_LLAMA) -> ModelConfig:
    """Attention and a SwiGLU in every block."""
    D = source.number("hidden_size")
    block = BlockConfig(parts.attention_config(source, D, defaults), _network(source))
    return _model(source, "transformer", D, (block,) * _layers(source), _eps(source, defaults))


def llama_weights(
    source: Source, config: ModelConfig, defaults: parts.Defaults = OF_LLAMA
) -> dict[str, Tensor]:
    return _weights(source, config, "mlp", "post_attention_layernorm", "norm", defaults)


def mistral_config(source: Source) -> ModelConfig:
    """The config of a Mistral: Llama's, but for what a silent config means."""
    return llama_config(source, OF_MISTRAL)


def mistral_weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    return llama_weights(source, config, OF_MISTRAL)


def bamba_config(source: Source) -> ModelConfig:
    """A SwiGLU in every block, after attention in those that `attn_layer_indices` names and Mamba-2 in the others."""
    D, there = source.number("hidden_size"), source.items("attn_layer_indices")
    network, ssd = _network(source), parts.ssd_config(source, D, BAMBA, groups=1, width=None)
    attention = parts.attention_config(source, D, OF_BAMBA)
    mixers = (attention if i in there else ssd for i in range(_layers(source)))
    blocks = tuple(BlockConfig(mixer, network) for mixer in mixers)
    return _model(source, "bamba", D, blocks, _eps(source, OF_BAMBA))


def bamba_weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    return _weights(source, config, "feed_forward", "pre_ff_layernorm", "final_layernorm", OF_BAMBA)


def mamba2_config(source: Source) -> ModelConfig:
    """Mamba-2's mixers alone."""
    source.must("hidden_act", ("silu",), "silu")
    D = source.number("hidden_size")
    block = BlockConfig(parts.ssd_config(source, D, MAMBA2, groups=8, width=64), None)
    return _model(source, "ssd", D, (block,) * _layers(source), source.real("layer_norm_epsilon", 1e-5))


def mamba2_weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    D = config.d_model
    found = parts.embeddings(source, "backbone.embeddings.weight", config)
    found["norm.weight"] = source.take("backbone.norm_f.weight", D)
    for i, block in enumerate(config.blocks):
        assert isinstance(block.mixer, SSDConfig)
        old, new = f"backbone.layers.{i}", f"blocks.{i}"
        found[f"{new}.mixer_norm.weight"] = source.take(f"{old}.norm.weight", D)
        found |= parts.ssd(source, f"{old}.mixer", f"{new}.mixer", D, block.mixer)
    return found | parts.head(source, config, config.vocab_size)


def _network(source: Source) -> SwiGLUConfig:
    source.must("hidden_act", ("silu",), "silu")
    source.must("mlp_bias", (False,), False)
    return SwiGLUConfig(source.number("intermediate_size"))


def _layers(source: Source) -> int:
    return source.number("num_hidden_layers", most=MOST_BLOCKS)


def _eps(source: Source, defaults: parts.Defaults) -> float:
    return source.real("rms_norm_eps", defaults.eps)


def _model(source: Source, name: str, D: int, blocks: tuple[BlockConfig, ...], eps: float) -> ModelConfig:
    return ModelConfig(
        name, source.number("vocab_size"), D, blocks, parts.head_of(source, False), norm_eps=eps
    )


def _weights(
    source: Source, config: ModelConfig, network: str, second: str, last: str, defaults: parts.Defaults
) -> dict[str, Tensor]:
    """The weights of decoders whose layers have a norm, a mixer, a norm and a network."""
    D = config.d_model
    found = parts.embeddings(source, "model.embed_tokens.weight", config)
    found["norm.weight"] = source.take(f"model.{last}.weight", D)
    for i, block in enumerate(config.blocks):
        old, new = f"model.layers.{i}", f"blocks.{i}"
        found[f"{new}.mixer_norm.weight"] = source.take(f"{old}.input_layernorm.weight", D)
        found[f"{new}.ffn_norm.weight"] = source.take(f"{old}.{second}.weight", D)
        assert isinstance(block.ffn, SwiGLUConfig)
        found |= parts.swiglu(source, f"{old}.{network}", f"{new}.ffn", D, block.ffn.hidden)
        if isinstance(block.mixer, AttentionConfig):
            source.drop(f"{old}.self_attn.rotary_emb.inv_freq")
            found |= parts.attention(source, f"{old}.self_attn", f"{new}.mixer", D, block.mixer, defaults)
        else:
            assert isinstance(block.mixer, SSDConfig)
            found |= parts.ssd(source, f"{old}.mamba", f"{new}.mixer", D, block.mixer)
    return found | parts.head(source, config, config.vocab_size)
