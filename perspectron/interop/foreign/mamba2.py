"""Mamba-2, whose mixers are the only parts of its blocks."""

import math
from typing import Any

from torch import Tensor

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.source import Source
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.mixer import config_of

NAMES = {
    "expand": "expand", "heads": "num_heads", "head_dim": "head_dim", "state": "state_size", "conv": "conv_kernel",
    "groups": "n_groups", "bias": "use_bias", "conv_bias": "use_conv_bias",
}  # fmt: skip
HARMLESS = (
    "chunk_size", "rescale_prenorm_residual", "residual_in_fp32", "rms_norm", "time_step_floor", "time_step_max",
    "time_step_min", "time_step_rank",
)  # fmt: skip


def config(source: Source) -> ModelConfig:
    source.must("hidden_act", ("silu",), "silu")
    D, eps = source.number("hidden_size"), source.real("layer_norm_epsilon", 1e-5)
    blocks = (BlockConfig(ssd_config(source, D, NAMES, groups=8, width=64), None),) * decoder.layers(source)
    return ModelConfig(
        "ssd", source.number("vocab_size"), D, blocks, decoder.head(source, False), norm_eps=eps
    )


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    D = config.d_model
    taken = decoder.outer(source, "backbone.embeddings.weight", config)
    taken["norm.weight"] = source.take("backbone.norm_f.weight", D)
    for i, block in enumerate(config.blocks):
        there, here = f"backbone.layers.{i}", f"blocks.{i}"
        taken[f"{here}.mixer_norm.weight"] = source.take(f"{there}.norm.weight", D)
        taken |= ssd(source, f"{there}.mixer", f"{here}.mixer", D, block.mixer)
    return taken


def ssd_config(source: Source, D: int, names: dict[str, str], groups: int, width: int | None) -> Any:
    """Mamba-2's mixer with one group. names: theirs of our options, of groups and of the biases. groups and width of a
    head are what a config without them means; None for a width that follows from the others."""
    for name, value, silent in (("groups", 1, groups), ("bias", False, False), ("conv_bias", True, True)):
        source.must(names[name], (value,), silent)
    if source.get("time_step_limit") is not None:
        limit = source.items("time_step_limit")
        if limit not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
            raise source.error(f"time_step_limit is {limit}, must be [0, inf] to be read")
    expand, heads = source.number(names["expand"], 2), source.number(names["heads"])
    follows = source.get(names["head_dim"], "auto" if width is None else width) == "auto"
    width = expand * D // heads if follows else source.number(names["head_dim"], width)
    if width * heads != expand * D:
        raise source.error(
            f"{heads} heads of {width} are {heads * width} wide, must be expand · width = {expand * D}"
        )
    state, conv = source.number(names["state"]), source.number(names["conv"], 4)
    return config_of("ssd", head_dim=width, state=state, expand=expand, conv=conv)


def ssd(source: Source, there: str, here: str, D: int, mixer: Any) -> dict[str, Tensor]:
    """The weights of a mixer: I its inner width, H heads, C channels of the convolution, N rows of state."""
    I, N = mixer.expand * D, mixer.state  # noqa: E741
    H, C = I // mixer.head_dim, I + 2 * N
    shapes = {
        "in_proj.weight": (I + C + H, D), "conv1d.weight": (C, 1, mixer.conv), "conv1d.bias": (C,),
        "dt_bias": (H,), "A_log": (H,), "D": (H,), "norm.weight": (I,), "out_proj.weight": (D, I),
    }  # fmt: skip
    return {
        f"{here}.{name.replace('out_proj', 'o_proj')}": source.take(f"{there}.{name}", *shape)
        for name, shape in shapes.items()
    }
