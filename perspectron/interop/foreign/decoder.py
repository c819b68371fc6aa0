"""What importers of decoders share: a norm, a mixer, a norm and a network in each layer, attention with rotary
positions, and weight names like Llama's.

Shapes: D model width, H query heads, G heads of keys and values, K head width, F width of a network, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perspectron.experts.mixture import MixtureConfig
from perspectron.interop.foreign import mixture
from perspectron.interop.foreign.source import Source
from perspectron.model.config import MOST_BLOCKS, BlockConfig, ModelConfig, SequentialConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.heads import LinearHeadConfig
from perspectron.model.mixer import config_of
from perspectron.ops.rope import RopeScaling
from perspectron.util.config import FFNConfig, MixerConfig

GLOBAL, LOCAL = "full_attention", "sliding_attention"
"""Kinds of layers that attend to all earlier tokens, and to a window of them."""
LINEAR = "linear_attention"
"""Layers with a memory of fixed size."""
THETA = 10_000.0
"""Default rotary base in transformers, unless a family has another."""
PRE = {"mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST = {"mixer_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"}
SANDWICH = {
    "mixer_norm": "input_layernorm", "mixer_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "ffn_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
"""A layer's norms by our names, as files name them: before each part (PRE), after each part (POST), or both."""
Mixer = Callable[[Source, str, str, int, Any], dict[str, Tensor]]
"""Takes a mixer's weights, given a source, the layer's name in it, our name of the mixer, D and its config."""
Network = Callable[[Source, str, str, int, Any], dict[str, Tensor]]
"""Takes a network's weights, given a source, its name there, our name, D and its config."""


class Rope(NamedTuple):
    """Rotary positions. base: of the frequencies. share: fraction of a head's channels that are rotated."""

    base: float
    scaling: RopeScaling | None
    share: float


# ---------------------------------------------------------------- configs


def layers(source: Source) -> int:
    return source.number("num_hidden_layers", most=MOST_BLOCKS)


def network(
    source: Source, *, bias: bool = False, act: str = "hidden_act", silent: str = "silu"
) -> SwiGLUConfig:
    """The config of a gated network. act: config key of its activation. silent: the default activation."""
    activation = source.must(act, ("silu", "gelu_pytorch_tanh"), silent)
    return SwiGLUConfig(
        source.number("intermediate_size"), "silu" if activation == "silu" else "gelu_tanh", bias
    )


def networks(
    source: Source, layers: int, *, normed: bool, experts: int = 128, used: int = 8, hidden: int = 768,
    shared: int | None = None,
) -> list[FFNConfig]:  # fmt: skip
    """The network of each layer in configs like Qwen's: a mixture in every `decoder_sparse_step`-th layer that is not
    in `mlp_only_layers`, else a gated network. normed, experts, used, hidden: defaults. shared: default hidden width
    of a shared network with a gate, None if the family has none."""
    only, step = source.items("mlp_only_layers"), source.number("decoder_sparse_step", 1)
    E = mixture.count(source, "num_experts", "num_local_experts", silent=experts)
    mixed: FFNConfig | None = None
    if E:
        source.must("hidden_act", ("silu",), "silu")
        F = 0 if shared is None else source.number("shared_expert_intermediate_size", shared)
        mixed = MixtureConfig(
            source.number("moe_intermediate_size", hidden), E, mixture.chosen(source, E, used),
            normed=bool(source.must("norm_topk_prob", (True, False), normed)), shared=F, shared_gate=F > 0,
        )  # fmt: skip
    flags = [mixed is not None and i not in only and (i + 1) % step == 0 for i in range(layers)]
    other = None if all(flags) else network(source)
    if other is None:
        source.get("intermediate_size")
    found = [mixed if flag else other for flag in flags]
    return [each for each in found if each is not None]


def flag(source: Source, name: str, silent: bool) -> bool:
    """A flag, `silent` if it is missing. Null is false where `silent` is false, else refused."""
    missing = name not in source.values
    return bool(source.must(name, (True, False), silent if missing or not silent else None))


def rope(source: Source, *, theta: float = THETA, share: float | None = None) -> Rope:
    """Rotary positions from `rope_parameters`, or from older keys. theta: default base. share: default fraction of a
    head's channels that are rotated; None: always all.

    CheckpointError: an unknown type or an invalid value."""
    newer = source.mapping("rope_parameters")
    table = source.mapping("rope_scaling") if source.get("rope_scaling") else newer
    base = table.real("rope_theta", source.real("rope_theta", theta))
    if share is not None:
        turns = table.real("partial_rotary_factor", source.real("partial_rotary_factor", share))
        return Rope(base, _scaling(source, table), turns)
    for where in (table, source):
        where.must("partial_rotary_factor", (1.0,), 1.0)
    return Rope(base, _scaling(source, table), 1.0)


def ropes(source: Source, bases: dict[str, float]) -> dict[str, Rope]:
    """Rotary positions of each kind of layer, by name. bases: default base of each kind. Older files have the other
    values of the first kind outside, in `rope_scaling`."""
    first, table = next(iter(bases)), dict(source.mapping("rope_parameters").values)
    if scaling := source.mapping("rope_scaling").values:
        both = {**((table.get(first) or {}) if table else {"rope_type": "default"}), **scaling}
        if both.get("rope_type") == "default":  # transformers then reads neither `type` nor a factor
            both = {name: both[name] for name in ("rope_type", "rope_theta") if name in both}
        table[first] = both
        source.inner("rope_scaling", {})
    source.get("original_max_position_embeddings")  # nor this key outside the table
    nested = source.inner("rope_parameters", table)
    found = {}
    for kind, silent in bases.items():
        own = nested.mapping(kind)
        own.must("truncate", (True,), True)  # transformers looks for it outside
        found[kind] = Rope(own.real("rope_theta", silent), _scaling(source, own, outside=False), 1.0)
    return found


def _scaling(source: Source, table: Source, *, outside: bool = True) -> RopeScaling | None:
    """Rotary scaling by a table, None without one. outside: the original length may stand in the config itself."""
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise table.error(
            f"rope type is {kind!r}, must be 'default', 'linear', 'llama3' or 'yarn' to be read"
        )
    more: dict[str, Any] = {}
    if kind != "linear":
        most = table.number("original_max_position_embeddings", source.get("max_position_embeddings"))
        if outside:
            most = source.number("original_max_position_embeddings", most)
        more["original_max_position_embeddings"] = most
    if kind == "llama3":
        more |= {name: table.real(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        for name in ("attn_factor", "extrapolation_factor"):  # transformers reads neither
            table.must(name, (1.0,), 1.0)
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            more[name] = None if table.get(name) is None else table.real(name)
        more |= {name: table.real(name, x) or x for name, x in (("beta_fast", 32.0), ("beta_slow", 1.0))}
        more["truncate"] = flag(table, "truncate", True)
        if table.get("factor") is None and "factor" in table.values:
            longest = source.number("max_position_embeddings")
            return RopeScaling(kind, longest / more["original_max_position_embeddings"], **more)
    return RopeScaling(kind, table.real("factor"), **more)


def attention(
    source: Source,
    positions: Rope | None,
    *,
    heads: int = 32,
    key_heads: int | None = None,
    width: int | None = None,
    **options: Any,
) -> Any:
    """The config of attention. positions: None is no rotation. heads, key_heads, width: defaults for query heads, key
    and value heads (None: as many), and head width (None: D/H). options: other fields of `AttentionConfig`."""
    heads = source.number("num_attention_heads", heads)
    D, missing = source.number("hidden_size"), "num_key_value_heads" not in source.values
    G = source.number(
        "num_key_value_heads", (missing and key_heads) or heads
    )  # null is as many as query heads
    K = source.number("head_dim", width or max(1, D // heads))
    if heads % G:
        raise source.error(f"num_key_value_heads is {G}, must divide num_attention_heads = {heads}")
    if positions is None:
        turned: dict[str, Any] = {"rope_base": None}
    else:
        turned = {
            "rope_base": positions.base,
            "rope_scaling": positions.scaling,
            "rope_share": positions.share,
        }
    scale = options.pop("scale", None)
    scale = None if scale == K**-0.5 else scale
    grouped = {"kv_heads": None if heads == G else G, "head_dim": None if heads * K == D else K}
    return config_of("attention", heads=heads, **grouped, scale=scale, **turned, **options)


def kinds(source: Source, silent: Sequence[str], known: Sequence[str]) -> list[str]:
    """The kind of each layer. silent: the defaults. CheckpointError for a kind that is not in `known`."""
    found = source.layer_types(len(silent), silent)
    if other := set(found) - set(known):
        raise source.error(f"layer_types has {min(other)!r}, must be {' or '.join(map(repr, known))} here")
    return found


def window(source: Source) -> int | None:
    """Window of sliding layers in tokens: None (no window) for null, 4,096 if the key is missing."""
    silent = None if "sliding_window" in source.values else 4096
    return None if source.get("sliding_window", silent) is None else source.number("sliding_window", silent)


def sliding(source: Source, kinds: Sequence[str], window: int | None) -> list[int | None]:
    """The window of each layer by kind. CheckpointError: a kind that is not attention, or sliding without a window."""
    known = {GLOBAL} if window is None else {GLOBAL, LOCAL}
    if other := set(kinds) - known:
        raise source.error(
            f"layer_types has {min(other)!r}, must be {' or '.join(map(repr, sorted(known)))} here"
        )
    return [window if kind == LOCAL else None for kind in kinds]


def model(
    source: Source,
    name: str,
    mixers: Sequence[MixerConfig],
    networks: FFNConfig | Sequence[FFNConfig],
    *,
    eps: float = 1e-6,
    tied: bool = False,
    longest: int | None = None,
    rows: int | None = None,
    residual: SequentialConfig | Sequence[SequentialConfig] = SequentialConfig(),  # noqa: B008
    beside: MixerConfig | None = None,
    ties: Source | None = None,
    **options: Any,
) -> ModelConfig:
    """The config of a model with these mixers, each before a network. residual: of all layers, or of each. beside: a
    second mixer of every layer. eps, tied, longest, rows: defaults of the norms' epsilon, whether the head is the
    embedding, `max_position_embeddings` (None: positions are unbounded) and `vocab_size`. ties: the source that says
    whether the head is the embedding, if another. options: other fields of `ModelConfig`."""
    shared = (networks,) * len(mixers) if isinstance(networks, FFNConfig) else networks
    around = (residual,) * len(mixers) if isinstance(residual, SequentialConfig) else residual
    blocks = tuple(BlockConfig(*parts, beside) for parts in zip(mixers, shared, around, strict=True))
    scalings = [s for b in blocks for m in b.mixers if (s := getattr(m, "rope_scaling", None)) is not None]
    most = 0 if longest is None else source.number("max_position_embeddings", longest)
    most = max([most, *(int(s.factor * s.original_max_position_embeddings) for s in scalings)])
    return ModelConfig(
        name, source.number("vocab_size", rows), source.number("hidden_size"), blocks, head(ties or source, tied),
        norm_eps=source.real("rms_norm_eps", eps), longest=most, **options,
    )  # fmt: skip


def within(config: Callable[[Source, Source], ModelConfig], source: Source) -> ModelConfig:
    """Our config of the text model in `text_config`, by the family's `config`. The outer config says what is tied."""
    text = source.mapping("text_config")
    text.get("tie_word_embeddings")
    return config(text, source)


def head(source: Source, tied: bool) -> LinearHeadConfig | None:
    """The config of a separate head, or None if the head is the embedding. tied: the default."""
    return None if flag(source, "tie_word_embeddings", tied) else LinearHeadConfig()


# ---------------------------------------------------------------- weights


def outer(
    source: Source, embedding: str, config: ModelConfig, head: str = "lm_head.weight"
) -> dict[str, Tensor]:
    """The embedding's weight, and the head's if it is separate. CheckpointError: the head is tied to the embedding, but
    the file has one with other numbers, and transformers then uses both."""
    V, D = config.vocab_size, config.d_model
    taken = {"embedding.weight": source.take(embedding, V, D)}
    if config.head is not None:
        return taken | {"lm_head.weight": source.take(head, V, D)}
    if source.has(head):
        if not torch.equal(source.take(head, V, D), taken["embedding.weight"]):
            raise source.error(
                f"tie_word_embeddings is true, but {head} is not {embedding}; set it to false to read both"
            )
        del source.taken[head]  # the same as the embedding
    return taken


def norm(source: Source, name: str, width: int, *, one: bool = False) -> Tensor:
    """The weight of an RMS norm. one: the file holds the weight minus 1."""
    weight = source.take(name, width)
    return weight.float() + 1 if one else weight


def weights(
    source: Source,
    config: ModelConfig,
    *,
    mixer: Mixer | None = None,
    attention: Callable[..., dict[str, Tensor]] | None = None,
    place: str = "self_attn",
    norms: dict[str, str] | Callable[[Source, str, BlockConfig], dict[str, str]] = PRE,
    network: str = "mlp",
    gated: Network | None = None,
    last: str = "norm",
    top: str = "model.",
    head: str = "lm_head.weight",
    one: bool = False,
) -> dict[str, Tensor]:
    """A decoder's weights by our names. mixer: takes those of mixers other than attention. attention: takes those of
    attention; None is `attention_weights`. place: the file's name of attention. norms: the file's names of a layer's
    norms by ours, or a function that gives them. network, last: the file's names of networks and of the last norm.
    gated: takes those of a network; None is `network_weights`. top, head: prefix of all names, and name of the head.
    one: the file holds weights of norms minus 1."""
    D = config.d_model
    taken = outer(source, f"{top}embed_tokens.weight", config, head)
    taken["norm.weight"] = norm(source, f"{top}{last}.weight", D, one=one)
    for i, block in enumerate(config.blocks):
        there, here = f"{top}layers.{i}", f"blocks.{i}"
        for ours, theirs in (norms(source, there, block) if callable(norms) else norms).items():
            taken[f"{here}.{ours}.weight"] = norm(source, f"{there}.{theirs}.weight", D, one=one)
        own: Any = block.mixer
        if mixer is None or own.kind == "attention":
            take = attention or attention_weights
            taken |= take(source, f"{there}.{place}", f"{here}.mixer", D, own, one=one)
        else:
            taken |= mixer(source, there, f"{here}.mixer", D, own)
        taken |= (gated or network_weights)(source, f"{there}.{network}", f"{here}.ffn", D, block.ffn)
    return taken


def network_weights(source: Source, there: str, here: str, D: int, ffn: Any) -> dict[str, Tensor]:
    """The weights of a gated network, or of a mixture of experts."""
    if isinstance(ffn, MixtureConfig):
        return mixture.weights(source, there, here, D, ffn)
    return source.take_all(there, here)


def attention_weights(
    source: Source, there: str, here: str, D: int, mixer: Any, *, one: bool = False, out: str = "o_proj",
    norms: tuple[str, str] = ("q_norm", "k_norm"),
) -> dict[str, Tensor]:  # fmt: skip
    """The weights of attention, with queries, keys and values joined. out, norms: the file's names of those parts."""
    H, G, K = mixer.heads, mixer.groups, mixer.width(D)
    source.drop(f"{there}.rotary_emb.inv_freq")
    taken = {}
    for part in ("weight", "bias") if mixer.bias else ("weight",):
        inner = (D,) if part == "weight" else ()
        parts = (
            source.take(f"{there}.{x}_proj.{part}", n * K, *inner)
            for x, n in zip("qkv", (H, G, G), strict=True)
        )
        taken[f"{here}.qkv_proj.{part}"] = torch.cat([*parts])
    taken |= source.take_all(f"{there}.{out}", f"{here}.o_proj")
    if mixer.qk_norm != "none":
        widths = (K, K) if mixer.qk_norm == "head" else (H * K, G * K)
        for ours, theirs, width in zip(("q_norm", "k_norm"), norms, widths, strict=True):
            taken[f"{here}.{ours}.weight"] = norm(source, f"{there}.{theirs}.weight", width, one=one)
    return taken
