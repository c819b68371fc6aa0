"""OLMoE: Llama with norms across all heads of queries and of keys, which may be clipped, and a mixture of experts in
place of each network."""

from perspectron.experts.mixture import MixtureConfig
from perspectron.interop.foreign import decoder, mixture
from perspectron.interop.foreign.source import Source
from perspectron.model.config import ModelConfig

HARMLESS = mixture.HARMLESS


def config(source: Source) -> ModelConfig:
    clip = None if source.get("clip_qkv") is None else source.positive("clip_qkv", 1.0)
    attention = decoder.attention(
        source, decoder.rope(source), heads=16, bias=decoder.flag(source, "attention_bias", False), qk_norm="all",
        clip=clip,
    )  # fmt: skip
    source.must("hidden_act", ("silu",), "silu")
    E = mixture.count(source, "num_experts", "num_local_experts", silent=64, least=1)
    normed = decoder.flag(source, "norm_topk_prob", False)
    network = MixtureConfig(source.number("intermediate_size"), E, mixture.chosen(source, E), normed=normed)
    mixers = [attention] * decoder.layers(source)
    return decoder.model(source, "olmoe", mixers, network, eps=1e-5, longest=4096)
