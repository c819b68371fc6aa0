"""Mamba and Falcon Mamba, whose mixers are the only parts of their blocks; Falcon's has norms without weights.

Shapes: D model width.
"""

import math
from typing import Any

from torch import Tensor

from perspectron.interop.foreign import decoder, mamba2
from perspectron.interop.foreign.source import Source
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.mixer import config_of

HARMLESS = (
    "d_inner", "d_model", "fused_add_norm", "n_layer", "pad_vocab_size_multiple", "rescale_prenorm_residual",
    "residual_in_fp32", "rms_norm", "ssm_cfg", "time_step_floor", "time_step_init_scheme", "time_step_max",
    "time_step_min", "time_step_scale", "use_associative_scan", "use_falcon_mambapy", "use_mambapy",
)  # fmt: skip


def config(source: Source) -> ModelConfig:
    return _model(source, norm=False)


def falcon(source: Source) -> ModelConfig:
    """Falcon Mamba."""
    return _model(source, norm=True, norm_eps=source.positive("mixer_rms_eps", 1e-6))


def _model(source: Source, **norms: Any) -> ModelConfig:
    D, expand = source.number("hidden_size"), source.number("expand", 2)
    source.must("hidden_act", ("silu",), "silu")
    inner = source.number("intermediate_size", expand * D)
    if inner % D:
        raise source.error(
            f"intermediate_size is {inner}, must be a multiple of hidden_size = {D} to be read"
        )
    expand = inner // D  # where both are written, transformers goes by the width
    auto = source.get("time_step_rank", "auto") == "auto"
    rank = math.ceil(D / 16) if auto else source.number("time_step_rank")
    mixer = config_of(
        "mamba", state=source.number("state_size", 16), expand=expand, conv=source.number("conv_kernel", 4), rank=rank,
        bias=decoder.flag(source, "use_bias", False), conv_bias=decoder.flag(source, "use_conv_bias", True), **norms,
    )  # fmt: skip
    eps = source.positive("layer_norm_epsilon", 1e-5)
    blocks = (BlockConfig(mixer, None),) * decoder.layers(source)
    return ModelConfig(
        "mamba", source.number("vocab_size"), D, blocks, decoder.head(source, True), norm_eps=eps
    )


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    embedding = "backbone.embeddings.weight"
    older = embedding.replace("embeddings", "embedding")  # as the authors' own files have it
    return mamba2.weights(source, config, older if source.has(older) else embedding)
