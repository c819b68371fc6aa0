"""The document on the recurrence (docs/designs/perspective.md#the-recurrence)."""

from dataclasses import replace
from functools import partial
from math import log, sqrt

import torch

from claims.claim import Claim, Evidence, of, worded
from claims.measures import built, documents, trained
from claims.measures import pdr as tried
from claims.measures.built import HALF, PDR_LAYER, D, R, counted, mixer, mixer_flops, mixer_values
from claims.results import Results, command
from perspectron.designs.gla.mixer import GLAConfig
from perspectron.designs.perspective.pdr import PDRConfig
from perspectron.designs.ssd.mixer import SSDConfig
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.ops.pdr import renormalise

ATTENTION, GLA = AttentionConfig(32), GLAConfig(32)
MAMBA, MAMBA_1 = SSDConfig(64, 128, 2), SSDConfig(64, 16, 2)
MIB = 2.0**20
RETNET = replace(PDR_LAYER, fixed_decay=True)


def _step(index: int) -> float:
    return built.step()[index]


def _state(context: int) -> float:
    return counted(built.FULL).state_bytes[context]


def _pdr_bytes(context: int = 8192) -> int:
    """The bytes of all PDR states, as they are kept."""
    return built.needed().state["pdr"].bytes - 8 * len(built.places("pdr"))


def _growth(kind: str) -> float:
    """FLOPs of a token at 256k tokens over one at 1k."""
    config = {"pdr": PDR_LAYER, "retnet": RETNET, "ssd": MAMBA, "gla": GLA, "attention": ATTENTION}[kind]
    return mixer_flops(config, 1 << 18) / mixer_flops(config, 1 << 10)


def _decode(results: Results) -> Evidence:
    paired = results.get("decode")["results"]["paired"]
    ratio, half, (early, late) = paired["ratio"]["median"], paired["ratio_middle_half"], paired["contexts"]
    spread = f"by the median of {paired['pairs']} pairs; their interquartile range is "
    spread += f"{half['low']:.2f} to {half['high']:.2f}"
    return Evidence((ratio,), f"a token after {late:,} takes {ratio:.2f} times one after {early:,}", spread)


def _uncertainty(results: Results) -> Evidence:
    """AUROC of D less that of entropy, of tokens that the model gets wrong, by seed."""
    runs = results.get("perspectives")["results"]["runs"]
    found = tuple(run["text"]["against_entropy"]["difference"] for run in runs)
    said = ", ".join(f"{value:+.3f}" for value in found)
    return Evidence(found, f"AUROC {said} against entropy's")


def _added() -> float:
    """FLOPs of a token that PDR adds to a recurrence with a fixed decay."""
    return mixer_flops(PDR_LAYER, 1) - mixer_flops(RETNET, 1)


def _saved() -> Evidence:
    """FLOPs that an expert of ternary weights saves, over those."""
    products = built.needed().experts[0].parameters
    shown = f"{products / 1e6:.1f} M for {_added() / 1e6:.1f} M"
    return Evidence((products / _added(),), shown)


def _adapted(results: Results) -> Evidence:
    """Bits per byte that an adapter learned while reading saves: of text like that of training, and of other kinds."""
    streams = results.get("adapt")["results"]["streams"]
    saved, shown = [], []
    for name, words in (("own", "of held-out text"), ("shift", "where the kind of text changes")):
        none, trace, all_weights = (
            sum(streams[name][arm]["nats"]) / sum(streams[name][arm]["bytes"]) / log(2)
            for arm in ("none", "trace", "dynamic")
        )
        saved.append(none - trace)
        shown.append(f"{none:.3f} → {trace:.3f} {words} ({all_weights:.3f} by SGD on all weights)")
    return Evidence(tuple(saved), "; ".join(shown))


# fmt: off
MOTIVATION = (
    Claim("pdr-attention-quadratic", "§1", "Full attention: O(n² d), in n",
          worded("exponent 2", 1.95, 2.05),
          of(lambda: round(built.exponent(lambda n: built.reading(AttentionConfig(4, rope_base=None), n)), 2))),
    Claim("pdr-attention-width", "§1", "Full attention: O(n² d), in d, where n is large", worded("exponent 1", 0.95,
          1.05),
          of(lambda: built.width_exponent(AttentionConfig(4, rope_base=None), 1 << 17, 256))),
    Claim("pdr-linear", "§1", "Linear recurrence (RetNet, RWKV, Mamba): O(n d²), in n (measured: Mamba-2)",
          worded("exponent 1", 0.98, 1.02),
          of(lambda: round(built.exponent(lambda n: built.reading(SSDConfig(64, 16), n), 2048), 2))),
    Claim("pdr-linear-width", "§1", "Linear recurrence: O(n d²), in d (measured: PDR with a fixed decay)",
          worded("exponent 2", 1.95, 2.05), of(lambda: built.width_exponent(RETNET, 512, D)),
          ("where the rank grows with d", of(lambda: built.width_exponent(RETNET, 512, D, replace(RETNET,
          rank=2 * R))))),
    Claim("pdr-performer", "§1", "Linear attention: O(n d²), in n (measured: GLA)", worded("exponent 1", 0.98, 1.02),
          of(lambda: round(built.exponent(lambda n: built.reading(GLAConfig(4), n), 2048), 2))),
    Claim("pdr-performer-width", "§1", "Linear attention: O(n d²), in d (measured: GLA)",
          worded("exponent 2", 1.95, 2.05), of(lambda: built.width_exponent(GLA, 512, D))),
    Claim("pdr-reading-linear", "§1, our reading", "PDR's own reading of a text is linear", worded("exponent 1", 0.98,
          1.02),
          of(lambda: round(built.exponent(lambda n: built.reading(PDRConfig(32), n), 2048), 2))),
    Claim("pdr-layers", "§1", "Each of the 60 PDR layers learns a different lens", "60 layers with their own W_p",
          of(lambda: sum(name.endswith(".p_proj.weight") for name, _ in built.model(built.FULL).named_parameters())),
          built=True),
)

EQUATIONS = (
    Claim("pdr-d", "§2.1", "d = 4096 (model dimension)", "4096", of(lambda: built.model(built.FULL).config.d_model),
          built=True),
    Claim("pdr-r", "§2.1", "r = 256 (recurrent state rank)", "256",
          of(lambda: mixer(PDR_LAYER).init_state(1, built.META, torch.float32).memory_BDR.shape[2]), built=True),
    Claim("pdr-scan-right", "§2.2", "a parallel prefix scan computes all S_1 … S_L",
          worded("equal to the loop", 0, 1e-12), of(tried.scan_error)),
    Claim("pdr-associative", "§2.2", "(A₂,B₂) ⊕ (A₁,B₁) = (A₂A₁, A₂B₁ + B₂) is associative",
          worded("equal", 0, 1e-12), of(tried.associativity), built=True),
    Claim("pdr-scan-depth", "§2.2; §7.2", "in O(log L) sequential steps, of gradients too",
          worded("log₂ 256 = 8 levels", 8, 8, " levels"),
          of(built.scan_levels, 256)),
    Claim("pdr-scan-work", "§2.2", "using O(L·d·r) total work, for a chunk of L tokens",
          worded("as much per token for any L: L = 512 to L = 64", 0.99, 1.01),
          of(lambda: Evidence((built.scan_work(512, 512) / built.scan_work(64, 64),), "as one chunk: "
          + ", ".join(f"{built.scan_work(n, n):.2f}" for n in (64, 128, 256,
          512)) + " L·d·r at L = 64, 128, 256, 512")),
          ("where a text is read in chunks of 128, as built", of(lambda: Evidence((built.scan_work(4096, 128)
          / built.scan_work(512, 128),), f"{built.scan_work(4096, 128):.2f} L·d·r at 512 and at 4,096")))),
    Claim("pdr-chunk", "§2.2, our reading", "Chunk size L = 256 (tunable)", worded("256 as good as any", 0, 1e-12),
          of(tried.chunked, 256)),
)

NOVELTY = (
    Claim("pdr-wp", "§3.1", "W_p is a full d×d matrix (16.78M params)", "16.78 M",
          of(lambda: mixer(PDR_LAYER).p_proj.weight.numel())),
    Claim("pdr-gla-gate", "§3.2", "GLA uses ~d parameters for the gate", f"~{D}",
          of(lambda: sum(p.numel() for p in mixer(GLA).gk_proj.parameters()))),
    Claim("pdr-gate-rank", "§3.2", "With d×d, PDR can modulate along any learned axis",
          worded("rank of W_p over d = 1", 1, 1),
          of(lambda: Evidence((tried.gate_rank()[0] / tried.gate_rank()[1],), "{} of {}".format(*tried.gate_rank()))),
          built=True),
    Claim("pdr-wide-gate", "§3.2, our reading", "A wide gate learns what a small one (GLA's low rank) cannot",
          worded("lower loss than with a low-rank gate", *trained.LOWER),
          trained.without("perspective", "low_rank_gate"), command=command("ablate-perspective")),
    Claim("pdr-adaptive", "§3.1, our reading", "RetNet: fixed γ, no adaptivity; PDR: two-stage, adaptive",
          worded("lower loss than with fixed decay", *trained.LOWER), trained.without("perspective", "fixed_decay"),
          command=command("ablate-perspective")),
    Claim("pdr-gate-used", "§3.2, our reading",
          "similar inputs that should be kept differently get different gates",
          worded("different gates for similar inputs", 1e-9), documents.contrast, command=command("documents")),
    Claim("pdr-specialise", "§1; §3.3",
          "Early layers (3) track syntax, middle ones (40) entities, late ones (55) reasoning",
          worded("early layers share more bits with syntax", 1e-9), documents.syntax_by_depth,
          command=command("documents")),
    Claim("pdr-beats-gla", "§3.1, our reading", "PDR differs from GLA: perspective, not gate",
          worded("lower loss than GLA", *trained.LOWER), trained.versus("perspective", "gla"),
          command=command("reference/results")),
)

FLOPS = (
    Claim("pdr-flops-wp", "§4.1", "W_p x: 2d²", "33.6 M FLOPs", of(built.projection, "p_proj")),
    Claim("pdr-flops-gate", "§4.1", "σ(p_t): d", "4 K FLOPs",
          of(lambda: built.operations(torch.sigmoid, built.meta(D)).total)),
    Claim("pdr-flops-wk", "§4.1", "W_k x: 2rd", "2.1 M FLOPs", of(built.projection, "k_proj")),
    Claim("pdr-flops-wv", "§4.1", "W_v x: 2d²", "33.6 M FLOPs", of(built.projection, "v_proj")),
    Claim("pdr-flops-decay", "§4.1", "diag(γ_t) S_{t−1}: dr", "1.05 M FLOPs", of(_step, 1)),
    Claim("pdr-flops-outer", "§4.1", "v_t k_tᵀ: dr", "1.05 M FLOPs", of(_step, 0)),
    Claim("pdr-flops-add", "§4.1", "S_t (add): dr", "1.05 M FLOPs", of(_step, 2)),
    Claim("pdr-flops-wq", "§4.1", "W_q x: 2rd", "2.1 M FLOPs", of(built.projection, "q_proj")),
    Claim("pdr-flops-read", "§4.1", "S_t q_t: 2dr", "2.1 M FLOPs", of(_step, 3)),
    Claim("pdr-flops-wo", "§4.1", "W_o ô_t: 2d²", "33.6 M FLOPs", of(built.projection, "o_proj")),
    Claim("pdr-flops", "§4.1", "Total", "~110 M FLOPs", of(mixer_flops, PDR_LAYER, 1)),
)

MEMORY = (
    Claim("pdr-weights", "§4.2", "Weights: 3×d² and 2×r×d", "52.5 M params",
          of(lambda: built.matrices(mixer(PDR_LAYER)))),
    Claim("pdr-weight-bytes", "§4.2", "13.1 MB @ 2-bit", "13.1 MB",
          of(lambda: built.needed().parts["pdr"].bytes / len(built.places("pdr"))),
          ("without the scales of its groups", of(lambda: built.matrices(mixer(PDR_LAYER)) / 4))),
    Claim("pdr-state", "§4.2", "State S_t: d × r", "1.05 M numbers", of(mixer_values, PDR_LAYER, 1)),
    Claim("pdr-state-bytes", "§4.2", "2.0 MB @ FP16", "2.0 MB", of(lambda: _pdr_bytes() / len(built.places("pdr"))),
          ("in FP16 and counted in MiB", of(lambda: mixer_values(PDR_LAYER, 1) * HALF / MIB * 1e6))),
    Claim("pdr-activations", "§4.2", "Activations (p, k, v, q, ô, o): ~50 KB @ FP16", "~50 KB",
          of(lambda: built.activations() * HALF)),
)

COMPARISON = (
    Claim("pdr-vs-attention-params", "§4.3", "Attention: 67 M params/layer (MHA d=4096)", "67 M",
          of(lambda: built.matrices(mixer(ATTENTION)))),
    Claim("pdr-vs-retnet-params", "§4.3", "RetNet: 33.6 M params/layer (measured: PDR with a fixed decay)", "33.6 M",
          of(lambda: built.matrices(mixer(RETNET)))),
    Claim("pdr-vs-mamba-params", "§4.3", "Mamba: 12 M params/layer (measured: Mamba-2)", "12 M",
          of(lambda: built.matrices(mixer(MAMBA)))),
    Claim("pdr-vs-attention-flops", "§4.3", "Attention: 33.6M + O(n·d) FLOPs/token/layer, at n = 1", "33.6 M",
          of(lambda: Evidence((mixer_flops(ATTENTION, 1),), f"{mixer_flops(ATTENTION, 1) / 1e6:.2f} M; one of its four "
          f"projections is {built.projection('v_proj') / 1e6:.2f} M"))),
    Claim("pdr-vs-attention-growth", "§4.3", "Attention's FLOPs per token: O(n)", worded("growing with n", 10),
          of(lambda: Evidence((_growth("attention"), ),
          f"{_growth('attention'):.0f} times as many at 256k tokens as at 1k"))),
    Claim("pdr-vs-retnet-flops", "§4.3", "RetNet: 67 M FLOPs/token/layer (measured: PDR with a fixed decay)", "67 M",
          of(mixer_flops, RETNET, 1)),
    Claim("pdr-vs-mamba-flops", "§4.3", "Mamba: 48 M FLOPs/token/layer (measured: Mamba-2)", "48 M",
          of(mixer_flops, MAMBA, 1)),
    Claim("pdr-vs-attention-state", "§4.3", "Attention: O(n·d) KV-cache", worded("2 times at twice the tokens", 2, 2),
          of(lambda: mixer_values(ATTENTION, 8192) / mixer_values(ATTENTION, 4096))),
    Claim("pdr-vs-retnet-state", "§4.3", "RetNet: 2 MB of state (measured: PDR with a fixed decay, FP16)", "2 MB",
          of(lambda: mixer_values(RETNET, 1) * HALF)),
    Claim("pdr-vs-mamba-state", "§4.3", "Mamba: 0.5 MB of state (measured: Mamba-2, FP16)", "0.5 MB",
          of(lambda: mixer_values(MAMBA, 1) * HALF),
          ("with 16 numbers a channel (Mamba-1's), FP16", of(lambda: mixer_values(MAMBA_1, 1) * HALF))),
    Claim("pdr-o1", "§4.3", "PDR: O(1) in sequence length, FLOPs", worded("equal at 1k and 256k", 1, 1, " times"),
          of(_growth, "pdr")),
    Claim("pdr-o1-state", "§4.3; §5.3", "PDR: O(1) in sequence length, state",
          worded("equal at 1k and 256k", 1, 1, " times"), of(lambda: _state(262144) / _state(1024))),
    Claim("pdr-o1-time", "§4.3", "PDR: O(1) in sequence length, time", worded("as fast late as early", 0.95, 1.05),
          _decode, command=command("decode")),
    Claim("pdr-vs-mamba-o1", "§4.3", "Mamba: O(1) in sequence length (measured: Mamba-2)",
          worded("equal at 1k and 256k", 1, 1, " times"),
          of(_growth, "ssd")),
    Claim("pdr-vs-retnet-o1", "§4.3", "RetNet: O(1) in sequence length (measured: PDR with a fixed decay)",
          worded("equal at 1k and 256k", 1, 1, " times"), of(_growth, "retnet")),
    Claim("pdr-trades", "§4.3", "PDR trades some per-token FLOPs (vs Mamba) for adaptivity (measured: Mamba-2)",
          worded("more FLOPs than Mamba", 1, unit=" times Mamba-2's of the same width"),
          of(lambda: mixer_flops(PDR_LAYER, 1) / mixer_flops(MAMBA, 1))),
    Claim("pdr-trades-retnet", "§4.3", "PDR trades some per-token FLOPs (vs RetNet) for adaptivity",
          worded("more FLOPs than RetNet", 1.001, unit=" times those with a fixed decay"),
          of(lambda: mixer_flops(PDR_LAYER, 1) / mixer_flops(RETNET, 1))),
    Claim("pdr-ternary-pays", "§4.3", "ternary FFN saves far more compute than PDR adds",
          worded("more saved than added", 1), of(lambda: Evidence((0.0,),
          f"0 for {_added() / 1e6:.1f} M FLOPs: there are as many products of ternary weights as of others")),
          ("of multiplications, which weights of −1, 0 and 1 need none of", of(_saved))),
    Claim("pdr-beats-mamba", "§4.3, our reading", "much richer adaptivity than Mamba",
          worded("lower loss than Mamba-2", *trained.LOWER), trained.versus("perspective", "ssd"),
          command=command("reference/results")),
    Claim("pdr-beats-attention", "§3.3, our reading", "Perspective Is All You Need",
          worded("lower loss than the transformer", *trained.LOWER),
          trained.beside("perspective", "transformer", "parts/transformer",
                         "with the transformer's rate chosen at more tokens"),
          command=command("reference/results")),
)

STATES = (
    Claim("pdr-zero", "§5.1", "All 60 state matrices start at zero", "0", of(tried.empty_states), built=True),
    Claim("pdr-drift", "§5.2", "If T is extremely large (> 100K), numerical drift can occur",
          worded("relative error > 0.001 at 131,072 tokens", 1e-3), of(tried.drift),
          ("where the state is FP16, as in §4.2, and gates stay near 1, σ(N + 12)", of(tried.half_drift, 12.0))),
    Claim("pdr-overflow", "§5.2", "without re-normalisation floats overflow",
          worded("entries > 65,504, FP16's largest, after 131,072 tokens", 65504),
          of(lambda: Evidence((tried.largest(),), f"largest entry {tried.largest():g}")),
          ("where keys and values keep their sign and gates stay near 1, σ(N + 20)", of(tried.piled_up))),
    Claim("pdr-renorm", "§5.2", "S ← S·α/‖S‖ every 8192 tokens prevents float overflow",
          worded("no entry past 65,504, FP16's largest, before the first time", 0, tried.HALF_MAX),
          of(tried.before_the_first), ("where keys and values are N(0, 1)",
          of(lambda: Evidence((tried.piled_up(8192),), f"largest entry {tried.piled_up(8192):g}, for "
          f"{tried.piled_up():g} without")))),
    Claim("pdr-renorm-norm", "§5.2", "S ← S·α/‖S‖: the norm is α", worded("‖S‖/α = 1", 0.9999, 1.0001),
          of(partial(tried.renormalised, a_large=100.0, a_small=0.01, an_empty=0.0)),
          ("of a state that is not empty, as every state is at first",
          of(partial(tried.renormalised, a_large=100.0, a_small=0.01)))),
    Claim("pdr-alpha", "§5.2", "α = √(d·r)", f"{sqrt(D * R):.0f}",
          of(lambda: float(torch.linalg.vector_norm(renormalise(1e6 * torch.ones(1, D, R))).round())), built=True),
    Claim("pdr-renorm-cost", "§5.2", "costs negligible compute", "< 0.01 %",
          of(lambda: built.operations(renormalise, built.meta(1, D, R)).total / 8192 / mixer_flops(PDR_LAYER, 1))),
    Claim("pdr-state-fp16", "§5.3, our reading", "a state in FP16 goes on as well",
          worded("at most 0.01 nats a token more", float("-inf"), 0.01), documents.state_loss,
          command=command("documents")),
    Claim("pdr-total-state", "§5.3", "Total: 60 × 4096 × 256 × 2 bytes = 120 MB", "120 MB", of(_pdr_bytes),
          ("in FP16 and counted in MiB", of(lambda: _pdr_bytes() / 4 * HALF / MIB * 1e6))),
    Claim("pdr-resume", "§5.3", "Can be saved/loaded to resume a conversation", worded("the same logits", 0, 0),
          of(tried.resumed)),
    Claim("pdr-recall", "§5.3, our reading", "The model's context memory is its state matrices",
          worded("> 0.95 of pairs right", 0.95, 1), trained.recall("perspective"), command=command("recall")),
)

TRAINING = (
    Claim("pdr-gqa-every", "§6", "Every 4th layer switches from PDR to windowed GQA", "4 layers apart",
          of(lambda: built.places("window_gqa")[1] - built.places("window_gqa")[0]), built=True),
    Claim("pdr-lora", "§6, our reading", "FMEA: rank-4 adjustments to W_p change the viewpoint",
          worded("fewer bits per byte while reading", 1e-4), _adapted, command=command("adapt")),
    Claim("pdr-larger", "§6", "the much larger W_v or W_o", worded("larger than W_p", 1.001,
          unit=" times W_p's weights, both"),
          of(lambda: mixer(PDR_LAYER).v_proj.weight.numel() / mixer(PDR_LAYER).p_proj.weight.numel())),
    Claim("pdr-mpd", "§6", "MPD: states diverge across the 4 perspectives", "4", of(tried.diverged)),
    Claim("pdr-mpd-uncertainty", "§6", "Disagreement reflects genuine uncertainty",
          worded("tells errors better than entropy", 0), _uncertainty, command=command("perspectives")),
    Claim("pdr-identity", "§7.1", "W_p = I + 0.01·N(0,1) is near the identity", worded("‖W_p − I‖ ≤ 0.1", 0, 0.1),
          of(lambda: 0.01 * tried.noise_norm()),
          ("with ε/√d, as built", of(lambda: 0.01 / sqrt(D) * tried.noise_norm()))),
    Claim("pdr-initial-gate", "§7.2", "b_γ such that σ(b_γ) ≈ 0.95, W_p x apart", "0.95", of(tried.bias_gate),
          built=True),
    Claim("pdr-slow-decay", "§7.2", "σ(b_γ) ≈ 0.95: slow initial decay, fast information flow",
          worded("a half-life of 13.5 tokens, as at γ = 0.95", 0.95 * log(0.5) / log(0.95), unit=" tokens"),
          of(tried.start_halflives)),
    Claim("pdr-gradient-decay", "§7.2", "Over many time steps, this can cause gradient decay",
          worded("< 0.001 of a gradient left after 256 tokens", 0, 1e-3), of(tried.gradient_left, 256)),
    Claim("pdr-direct", "§7.2", "GQA layers provide direct gradient paths every 4 layers",
          worded("more gradient from far back than without them", 1), of(tried.direct_gradient, 60),
          ("for what is far enough back", of(tried.direct_gradient, 200))),
    Claim("pdr-gate-after", "§7.2", "diag(γ_t), whose elements are in (0, 1): mean γ by layer after training",
          worded("in (0, 1)", 0, 1), trained.of_gates("perspective", "pdr_gate_mean", lambda x: x,
          "{:.3f}"), command=command("compare"), built=True),
)
# fmt: on

CLAIMS = MOTIVATION + EQUATIONS + NOVELTY + FLOPS + MEMORY + COMPARISON + STATES + TRAINING
