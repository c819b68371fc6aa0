"""GPT-2."""

from typing import Any

from torch import Tensor

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.source import Source
from perspectron.model.config import MOST_BLOCKS, BlockConfig, ModelConfig
from perspectron.model.ffn import MLPConfig
from perspectron.model.mixer import config_of

HARMLESS = (
    "_num_labels", "attn_pdrop", "embd_pdrop", "n_ctx", "n_special", "output_past", "predict_special_tokens",
    "reorder_and_upcast_attn", "resid_pdrop", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj",
)  # fmt: skip


def config(source: Source) -> ModelConfig:
    """GPT-2 with its learned positions."""
    source.must("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    source.must("scale_attn_weights", (True,), True)
    source.must("scale_attn_by_inverse_layer_idx", (False,), False)
    D = source.number("n_embd", 768)
    mixer = config_of("attention", heads=source.number("n_head", 12), rope_base=None, bias=True)
    block = BlockConfig(mixer, MLPConfig(source.number("n_inner", 4 * D), "gelu_tanh"))
    blocks = (block,) * source.number("n_layer", 12, MOST_BLOCKS)
    return ModelConfig(
        "gpt2", source.number("vocab_size", 50257), D, blocks, decoder.head(source, True),
        positions=source.number("n_positions", 1024), norm="layer",
        norm_eps=source.real("layer_norm_epsilon", 1e-5),
    )  # fmt: skip


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    """The weights by our names; matrices are stored [in, out] there."""
    network: Any = config.blocks[0].ffn
    D, F = config.d_model, network.hidden
    top = "transformer." if source.has("transformer.wte.weight") else ""
    taken = {
        **decoder.outer(source, f"{top}wte.weight", config),
        "positions.weight": source.take(f"{top}wpe.weight", config.positions, D),
        **source.take_all(f"{top}ln_f", "norm"),
    }
    for i in range(len(config.blocks)):
        old, new = f"{top}h.{i}", f"blocks.{i}"
        source.drop(f"{old}.attn.bias", f"{old}.attn.masked_bias")  # the causal mask
        for there, here in (("ln_1", "mixer_norm"), ("ln_2", "ffn_norm")):
            taken |= source.take_all(f"{old}.{there}", f"{new}.{here}")
        for there, here, rows, columns in (
            ("attn.c_attn", "mixer.qkv_proj", D, 3 * D), ("attn.c_proj", "mixer.o_proj", D, D),
            ("mlp.c_fc", "ffn.up_proj", D, F), ("mlp.c_proj", "ffn.down_proj", F, D),
        ):  # fmt: skip
            taken[f"{new}.{here}.weight"] = source.take(f"{old}.{there}.weight", rows, columns).T.contiguous()
            taken[f"{new}.{here}.bias"] = source.take(f"{old}.{there}.bias", columns)
    return taken
