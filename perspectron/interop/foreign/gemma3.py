"""Gemma 3's text model: norms before and after each part, sliding windows with their own rotary base in five of six
layers, and a network gated by GELU. Norm weights are stored minus 1.

In `gemma3`, the text's config is in `text_config`, and weights for images stand beside the text's.
"""

from functools import partial

from torch import Tensor

from perspectron.interop.foreign import decoder
from perspectron.interop.foreign.decoder import GLOBAL, LOCAL
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig, SequentialConfig

IMAGES = ("model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector.")
HARMLESS = (
    "_sliding_window_pattern", "boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image",
    "vision_config",
)  # fmt: skip


def config(source: Source, ties: Source | None = None) -> ModelConfig:
    count, every = decoder.layers(source), source.number("sliding_window_pattern", 6)
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):  # transformers ignores the first
        source.must(name, (None, False))
    kinds = source.layer_types(count, [LOCAL if (i + 1) % every else GLOBAL for i in range(count)])
    windows = decoder.sliding(source, kinds, source.number("sliding_window", 4096))
    ropes = decoder.ropes(
        source, {GLOBAL: source.real("rope_theta", 1e6), LOCAL: source.real("rope_local_base_freq", 1e4)}
    )
    bias, scale = (
        decoder.flag(source, "attention_bias", False),
        source.positive("query_pre_attn_scalar", 256.0) ** -0.5,
    )
    mixers = [
        decoder.attention(
            source, ropes[kind], heads=8, key_heads=4, width=256, bias=bias, qk_norm="head", scale=scale,
            window=window,
        )
        for kind, window in zip(kinds, windows, strict=True)
    ]  # fmt: skip
    cap = source.get("final_logit_softcapping")
    return decoder.model(
        source, "transformer", mixers,
        decoder.network(source, act="hidden_activation", silent="gelu_pytorch_tanh"),
        residual=SequentialConfig("sandwich"), tied=True, ties=ties, longest=131_072, rows=262_208,
        embedding_factor=source.number("hidden_size") ** 0.5,
        logits_cap=0.0 if cap is None else source.real("final_logit_softcapping"),
    )  # fmt: skip


config_within = partial(decoder.within, config)


def weights(source: Source, config: ModelConfig) -> dict[str, Tensor]:
    source.drop_all(*IMAGES)
    top = next(
        (
            top
            for top in ("model.language_model.", "language_model.model.")
            if source.has(f"{top}norm.weight")
        ),
        "model.",
    )
    head = "language_model.lm_head.weight" if top.startswith("language_model.") else "lm_head.weight"
    return decoder.weights(source, config, norms=decoder.SANDWICH, top=top, head=head, one=True)
