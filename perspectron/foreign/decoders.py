"""Decoders of attention and a SwiGLU (Llama, Mistral), Mamba-2, and Bamba, a hybrid of both."""

from torch import Tensor

from perspectron.config import BlockConfig, ModelConfig
from perspectron.ffn import SwiGLUConfig
from perspectron.foreign import parts
from perspectron.foreign.source import Source
from perspectron.mixers.attention import AttentionConfig
from perspectron.mixers.ssd import SSDConfig

BAMBA = {
    "expand": "mamba_expand", "heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state": "mamba_d_state",
    "conv": "mamba_d_conv", "groups": "mamba_n_groups", "bias": "mamba_proj_bias", "conv_bias": "mamba_conv_bias",
}  # fmt: skip
MAMBA2 = {
    "expand": "expand", "heads": "num_heads", "head_dim": "head_dim", "state": "state_size", "conv": "conv_kernel",
    "groups": "n_groups", "bias": "use_bias", "conv_bias": "use_conv_bias",
}  # fmt: skip


def llama_config(source: Source) -> ModelConfig:
    """Attention and a SwiGLU in every block."""
    D = source.number("hidden_size")
    block = BlockConfig(parts.attention_config(source, D), _network(source))
    return _model(source, "transformer", D, (block,) * source.number("num_hidden_layers"))


def llama_weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    return _weights(source, config, "mlp", "post_attention_layernorm", "norm")


def bamba_config(source: Source) -> ModelConfig:
    """A SwiGLU in every block, after attention in those that `attn_layer_indices` names and Mamba-2 in the others."""
    D, there = source.number("hidden_size"), source.get("attn_layer_indices", [])
    network, ssd = _network(source), parts.ssd_config(source, D, BAMBA)
    attention = parts.attention_config(source, D)
    mixers = (attention if i in there else ssd for i in range(source.number("num_hidden_layers")))
    return _model(source, "bamba", D, tuple(BlockConfig(mixer, network) for mixer in mixers))


def bamba_weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    return _weights(source, config, "feed_forward", "pre_ff_layernorm", "final_layernorm")


def mamba2_config(source: Source) -> ModelConfig:
    """Mamba-2's mixers alone."""
    source.must("hidden_act", ("silu",), "silu")
    D = source.number("hidden_size")
    block = BlockConfig(parts.ssd_config(source, D, MAMBA2), None)
    eps = float(source.get("layer_norm_epsilon", 1e-5))
    return _model(source, "ssd", D, (block,) * source.number("num_hidden_layers"), eps)


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


def _model(
    source: Source, name: str, D: int, blocks: tuple[BlockConfig, ...], eps: float | None = None
) -> ModelConfig:
    eps = float(source.get("rms_norm_eps", 1e-6)) if eps is None else eps
    return ModelConfig(
        name, source.number("vocab_size"), D, blocks, parts.head_of(source, False), norm_eps=eps
    )


def _weights(source: Source, config: ModelConfig, network: str, second: str, last: str) -> dict[str, Tensor]:
    """Of decoders whose layers have a norm, a mixer, a norm and a network."""
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
            found |= parts.attention(source, f"{old}.self_attn", f"{new}.mixer", D, block.mixer)
        else:
            assert isinstance(block.mixer, SSDConfig)
            found |= parts.ssd(source, f"{old}.mamba", f"{new}.mixer", D, block.mixer)
    return found | parts.head(source, config, config.vocab_size)
