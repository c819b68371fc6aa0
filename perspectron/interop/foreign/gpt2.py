"""GPT-2."""

import torch
from torch import Tensor

from perspectron.designs.lens.mixer import LensConfig
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.interop.foreign.parts import embeddings, head, head_of
from perspectron.interop.foreign.source import Source
from perspectron.model.config import MOST_BLOCKS, BlockConfig, ModelConfig, RouteGatedConfig
from perspectron.model.ffn import ContextMLPConfig, MLPConfig

REST = 20.0
"""Logit at which a lens gate is open or shut: within 1e-8 of 1 and 0."""


def config(source: Source) -> ModelConfig:
    """GPT-2 with its learned positions."""
    source.must("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    for name, value in (
        ("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False),
    ):  # fmt: skip
        source.must(name, (value,), value)
    D = source.number("n_embd", 768)
    mixer = AttentionConfig(source.number("n_head", 12), rope_base=None, bias=True)
    block = BlockConfig(mixer, MLPConfig(source.number("n_inner", 4 * D), "gelu_tanh"))
    blocks = (block,) * source.number("n_layer", 12, MOST_BLOCKS)
    return ModelConfig(
        "gpt2", source.number("vocab_size", 50257), D, blocks, head_of(source, True),
        positions=source.number("n_positions", 1024), norm="layer",
        norm_eps=source.real("layer_norm_epsilon", 1e-5),
    )  # fmt: skip


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    """The weights by our names; matrices are stored [in, out] there."""
    D, V, F = config.d_model, config.vocab_size, config.blocks[0].ffn.hidden  # type: ignore[union-attr]
    top = "transformer." if source.has("transformer.wte.weight") else ""
    found = {
        **embeddings(source, f"{top}wte.weight", config),
        "positions.weight": source.take(f"{top}wpe.weight", config.positions, D),
        **_pair(source, f"{top}ln_f", "norm", D),
    }
    for i in range(len(config.blocks)):
        old, new = f"{top}h.{i}", f"blocks.{i}"
        source.drop(f"{old}.attn.bias", f"{old}.attn.masked_bias")  # the causal mask
        for there, here in (("ln_1", "mixer_norm"), ("ln_2", "ffn_norm")):
            found |= _pair(source, f"{old}.{there}", f"{new}.{here}", D)
        for there, here, rows, columns in (
            ("attn.c_attn", "mixer.qkv_proj", D, 3 * D), ("attn.c_proj", "mixer.o_proj", D, D),
            ("mlp.c_fc", "ffn.up_proj", D, F), ("mlp.c_proj", "ffn.down_proj", F, D),
        ):  # fmt: skip
            found[f"{new}.{here}.weight"] = source.take(f"{old}.{there}.weight", rows, columns).T.contiguous()
            found[f"{new}.{here}.bias"] = source.take(f"{old}.{there}.bias", columns)
    return found | head(source, config, V)


def _pair(source: Source, there: str, here: str, width: int) -> dict[str, Tensor]:
    return {f"{here}.{part}": source.take(f"{there}.{part}", width) for part in ("weight", "bias")}


def lens_config(config: ModelConfig) -> ModelConfig:
    """A GPT-2 with every part of the lens design beside its own."""
    heads, hidden = config.blocks[0].mixer.heads, config.blocks[0].ffn.hidden  # type: ignore[union-attr]
    block = BlockConfig(
        LensConfig(heads), ContextMLPConfig(hidden, activation="gelu_tanh"), RouteGatedConfig(2.0)
    )
    named = {"name": "lens", "blocks": (block,) * len(config.blocks)}
    return ModelConfig(**{name: getattr(config, name) for name in config.__dataclass_fields__} | named)


def lens_weights(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """GPT-2's weights for `lens_config`'s model, its new parts at rest: attention sees by the standard lens alone, the
    network ignores the context and its gate is open, and the route gate is at ½, so that it is the same function."""
    D, found = config.d_model, dict(weights)
    for i, block in enumerate(config.blocks):
        at, heads = f"blocks.{i}", block.mixer.heads  # type: ignore[union-attr]
        up_FD = found[f"{at}.ffn.up_proj.weight"]
        zero_FD = torch.zeros_like(up_FD)
        found[f"{at}.ffn.up_proj.weight"] = torch.cat([up_FD, zero_FD], 1)
        found[f"{at}.ffn.gate_proj.weight"] = torch.cat([zero_FD, zero_FD], 1)
        found[f"{at}.ffn.gate_proj.bias"] = torch.full((len(up_FD),), REST)
        found[f"{at}.mixer.u_HK"] = torch.zeros(heads, D // heads)
        found[f"{at}.mixer.gates_HL"] = torch.tensor([REST, 0.0, 0.0]).repeat(heads, 1)
        found[f"{at}.route.raw_1"] = found[f"{at}.route.bias_1"] = torch.zeros(1)
    return found
