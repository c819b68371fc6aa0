"""Falcon-H1: in every block Mamba-2 and attention read one normed input, and the sum of their outputs is added, then a
SwiGLU. Our weights include the config's factors of the parts' inputs, matrix rows and outputs.

Shapes: D model width, H query heads, G heads of keys and values, K head width, I inner width of Mamba-2, N its rows of
state, F width of a network.
"""

from typing import Any

import torch
from torch import Tensor

from perspectron.interop.foreign import bamba, decoder, mamba2
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig

HARMLESS = (
    "add_bos_token", "attn_layer_indices", "expansion_factor", "mamba_chunk_size", "mlp_expansion_factor",
    "num_logits_to_keep",
)  # fmt: skip
NORMS = decoder.PRE | {"ffn_norm": "pre_ff_layernorm"}


def config(source: Source) -> ModelConfig:
    source.must("mamba_use_mlp", (True,), True)
    _factors(source)
    bias = decoder.flag(source, "attention_bias", False)
    attention = decoder.attention(source, decoder.rope(source), key_heads=8, bias=bias)
    by_width = (
        source.get("mamba_d_ssm") is None and "mamba_d_ssm" in source.values
    )  # null, which is not the same as missing
    first = decoder.flag(source, "mamba_norm_before_gate", True)
    normed = decoder.flag(source, "mamba_rms_norm", False)
    ssd = mamba2.mixer(
        source, mamba2.Keys(), groups=1, state=256, inner=None if by_width else source.number("mamba_d_ssm", 1024),
        out_bias=decoder.flag(source, "projectors_bias", False),
        norm=("before" if first else "after") if normed else "none",
    )  # fmt: skip
    network = decoder.network(source, bias=decoder.flag(source, "mlp_bias", False))
    source.must("hidden_act", ("silu",), "silu")
    return decoder.model(
        source, "falcon_h1", [ssd] * decoder.layers(source), network, beside=attention, eps=1e-5, longest=8192,
        embedding_factor=source.positive("embedding_multiplier", 1.0),
        logits_factor=source.positive("lm_head_multiplier", 1.0),
    )  # fmt: skip


def _factors(source: Source) -> dict[str, tuple[float, ...]]:
    """The factors of each part by name: one, or as many as the config has in a list."""
    names = ("ssm_in", "ssm_out", "attention_in", "attention_out", "key")
    factors: dict[str, tuple[float, ...]] = {
        name: (source.real(f"{name}_multiplier", 1.0),) for name in names
    }
    for name, count in (("ssm", 5), ("mlp", 2)):
        found = source.items(f"{name}_multipliers") or [1.0] * count
        if len(found) != count or any(type(x) not in (int, float) for x in found):
            raise source.error(f"{name}_multipliers is {str(found)[:80]}, must be {count} numbers")
        factors[name] = tuple(map(float, found))
    return factors


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    taken = decoder.weights(
        source, config, mixer=bamba.mixer, norms=NORMS, network="feed_forward", last="final_layernorm"
    )
    D, factors = config.d_model, _factors(source)
    gate, down = factors["mlp"]
    for i, block in enumerate(config.blocks):
        there, here = f"model.layers.{i}", f"blocks.{i}"
        attention: Any = block.beside
        taken |= decoder.attention_weights(source, f"{there}.self_attn", f"{here}.beside", D, attention)
        H, G, K = attention.heads, attention.groups, attention.width(D)
        (read,), (gives,), (keys,) = factors["attention_in"], factors["attention_out"], factors["key"]
        _fold(taken, f"{here}.beside.qkv_proj", [(H * K, 1.0), (G * K, keys), (G * K, 1.0)], read)
        _fold(taken, f"{here}.beside.o_proj", [(D, gives)])
        ssd: Any = block.mixer
        I, N = ssd.inner(D), ssd.groups * ssd.state  # noqa: E741
        rows = zip((I, I, N, N, I // ssd.head_dim), factors["ssm"], strict=True)
        _fold(taken, f"{here}.mixer.in_proj", list(rows), *factors["ssm_in"])
        _fold(taken, f"{here}.mixer.o_proj", [(D, factors["ssm_out"][0])])
        _fold(taken, f"{here}.ffn.gate_proj", [(block.ffn.hidden, gate)])  # type: ignore[union-attr]
        _fold(taken, f"{here}.ffn.down_proj", [(D, down)])
    return taken


def _fold(taken: dict[str, Tensor], name: str, rows: list[tuple[int, float]], read: float = 1.0) -> None:
    """Multiply groups of rows (their number, a factor), biases too, and the whole matrix by the factor of its input."""
    for part, factor in (("weight", read), ("bias", 1.0)):
        if (old := taken.get(f"{name}.{part}")) is None:
            continue
        parts = old.split([count for count, _ in rows])
        scaled = torch.cat([x.float() * (own * factor) for x, (_, own) in zip(parts, rows, strict=True)])
        narrow = scaled.to(old.dtype)  # 16 bits stay exact under powers of two
        taken[f"{name}.{part}"] = narrow if torch.equal(narrow.float(), scaled) else scaled
