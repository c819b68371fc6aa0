"""The document on the whole model (docs/designs/perspective.md#stack), and what our page takes from those beside it."""

from itertools import pairwise
from math import prod

from claims.claim import Claim, Evidence, Measure, at_most, digits, of, worded
from claims.measures import built, common, documents, trained
from claims.measures import pdr as tried
from claims.measures.built import FULL, HALF, blocks, counted, experts, needed, places, vectors
from claims.results import Results, command
from perspectron.designs.transformer.window_gqa import WindowGQAConfig
from perspectron.experts.router import RoutedConfig
from perspectron.experts.ternary import trits
from perspectron.ops.packing import sizes
from perspectron.presets import get

LISTED = set(range(4, 77, 4))  # GQA layers, as §1 has them
FASTER = 10  # times as fast as any other step reads: not the same memory
NO_GPU = "needs the document's GPU"
SCALES = "without the scales of its groups"
W_O = "with W_o, which its row leaves out"
_SHARED = ("pdr", "window_gqa", "swiglu", "embedding", "norms and biases")


def _gqa() -> WindowGQAConfig:
    mixer = blocks(FULL)[places("window_gqa")[0]].mixer
    assert isinstance(mixer, WindowGQAConfig)
    return mixer


def _routed() -> RoutedConfig:
    ffn = blocks(FULL)[0].ffn
    assert isinstance(ffn, RoutedConfig)
    return ffn


def _projection(results: Results) -> Evidence:
    """Seconds of the check of one state against 500 half-spaces, before anything is projected."""
    check = results.get("safety")["results"]["milliseconds"]["500 x 4096"]["median"] / 1e3
    return Evidence((check,), proviso="the check alone, of 500 half-spaces at width 4096, on a CPU")


def _expert_count() -> int:
    return needed().experts[0].experts


def _group(kind: str) -> int:
    return counted(FULL).groups[kind].parameters


def _pdr_without_o() -> int:
    return _group("pdr") - len(places("pdr")) * built.D**2


def _packed(kind: str) -> int:
    return needed().parts[kind].bytes


def _shared() -> int:
    """Parameters that all experts share, the router's apart."""
    return sum(_group(kind) for kind in _SHARED)


def _shared_bytes() -> int:
    return sum(part.bytes for part in needed().parts.values())


def _cache() -> float:
    return needed().state["window_gqa"].bytes - 8 * len(places("window_gqa"))


def _runs() -> int:
    """Most PDR layers between two of attention."""
    at = [-1, *places("window_gqa")]
    return max(late - early - 1 for early, late in pairwise(at))


def _ms(part: str) -> Measure:
    """Milliseconds of a step here, on a CPU. The document's are of a GPU: how fast that would have to read."""

    def measure(results: Results) -> Evidence:
        here = results.median("layer_times", "milliseconds", part)
        rate, others = _moved(part) / MS[part] / 1e6, max(_moved(p) / MS[p] / 1e6 for p in STEPS if p != part)
        shown = f"{here:.2g} ms on one CPU thread; {MS[part]:g} ms take {digits(rate, 2)} GB/s of memory"
        if rate > FASTER * others:
            why = f"{rate / others:.0f} times the reading speed of any other step in the document"
            return Evidence((here / 1e3,), shown, why)
        return Evidence((here / 1e3,), shown, excuse=NO_GPU)

    return measure


def _moved(part: str) -> float:
    """Bytes that a token reads and writes in a step."""
    row, gqa = 4 * built.D, len(places("window_gqa"))
    return {
        "embed": lambda: built.D,
        "norm": lambda: 3 * row,
        "pdr": lambda: _per_layer("pdr"),
        "route": lambda: needed().parts["router"].read / len(experts()),
        "experts": lambda: needed().experts[0].read,
        "gqa": lambda: _per_layer("window_gqa"),
        "shared_ffn": lambda: needed().parts["swiglu"].read / gqa,
        "residual": lambda: 3 * row,
        "output": lambda: _packed("embedding"),
        "sample": lambda: 4 * get(FULL).vocab_size,
    }[part]()


def _per_layer(kind: str) -> float:
    """Bytes that a token moves in one layer of a kind, its state's included."""
    part, state = needed().parts[kind], needed().state[kind]
    return (part.read + state.read + state.written) / len(places(kind))


def _arrives(results: Results) -> Evidence:
    """The experts' bytes that arrive from disk beside the tokens."""
    rate = results.median("full_size", "disk", "read_gigabytes_per_second") * 1e9
    shard, asked = needed().experts[0].shard, needed().experts[0].shard / 1.12e-3
    shown = f"{1e3 * shard / rate:.2g} ms from disk; 1.12 ms ask for {asked / 1e9:.1f} GB/s"
    return Evidence(
        (shard / rate,),
        shown,
        excuse=f"no GPU on PCIe here; it would have to carry {asked / 1e9:.1f} GB/s",
    )


def _speed(results: Results) -> Evidence:
    memory = results.median("full_size", "memory", "tokens_per_second")
    disk = results.median("full_size", "disk", "tokens_per_second")
    shown = (
        f"{memory:.1f} from memory, {disk:.1f} from disk, on two CPU cores; four of 128 experts are distinct"
    )
    return Evidence((memory, disk), shown, excuse=NO_GPU)


def _token(results: Results) -> Evidence:
    took = results.median("full_size", "memory", "milliseconds")
    return Evidence(
        (took / 1e3,),
        f"{took:.0f} ms on two CPU cores, from memory; four of 128 experts are distinct",
        excuse=NO_GPU,
    )


def _sum_of_steps() -> float:
    """Seconds, of the document's own steps: what is streamed overlaps what is computed, the rest adds up."""
    pdr, gqa = len(places("pdr")), len(places("window_gqa"))
    layer = max(MS["pdr"] + MS["route"] + MS["experts"], MS["arrives"])
    around = 2 * (pdr + gqa) * (MS["norm"] + MS["residual"])
    once = sum(MS[name] for name in ("embed", "output", "projection", "sample"))
    return round((pdr * layer + gqa * (MS["gqa"] + MS["shared_ffn"]) + around + once) / 1e3, 5)


def _two_bits() -> float:
    """Bits of a weight, scales apart."""
    codes, _, _ = sizes("2bit", (_routed().hidden, built.D))
    return 8 * prod(codes) / (_routed().hidden * built.D)


def _int8_bytes() -> float:
    """Bytes of a value, scales apart."""
    codes, _, _ = sizes("int8", (get(FULL).vocab_size, built.D))
    return prod(codes) / (get(FULL).vocab_size * built.D)


def _embedding_of(tokens: int) -> float:
    return _group("embedding") / get(FULL).vocab_size * tokens


def _without_scales() -> float:
    """Bytes of all shared parameters: 2 bits a weight, 8 of the embedding's, FP16 else."""
    packed = sum(_group(kind) for kind in ("pdr", "window_gqa", "swiglu")) * _two_bits() / 8
    return packed + _group("embedding") + HALF * _group("norms and biases")


MS = {
    "embed": 0.01, "norm": 0.002, "pdr": 0.07, "route": 0.01, "arrives": 1.12, "experts": 0.14, "gqa": 0.15,
    "shared_ffn": 0.20, "residual": 0.001, "output": 0.02, "projection": 0.01, "sample": 0.001,
}  # fmt: skip
STEPS = {
    "embed": "Embed token", "norm": "RMSNorm", "pdr": "PDR state update + readout", "route": "Manifold route",
    "experts": "Ternary FFN compute", "gqa": "Windowed attention (512 window)",
    "shared_ffn": "Shared FFN (2-bit, in VRAM)", "residual": "Residual add",
    "output": "Final RMSNorm + output projection", "sample": "Sample token",
}  # fmt: skip

# fmt: off
STRUCTURE = (
    Claim("topology-layers", "§1", "an 80-layer transformer variant", "80 layers", of(lambda: len(blocks(FULL))),
          built=True),
    Claim("topology-pdr-layers", "§1", "Fast clock: 60 PDR layers", "60", of(lambda: len(places("pdr"))), built=True),
    Claim("topology-even", "§1", "PDR layers are 0–79 (even)", "60 even layers of 80",
          of(lambda: len([i for i in range(len(blocks(FULL))) if i % 2 == 0]))),
    Claim("topology-gqa-layers", "§1", "Slow clock: 20 GQA layers", "20", of(lambda: len(places("window_gqa"))),
          built=True),
    Claim("topology-gqa-list", "§1", "GQA at layers 4, 8, 12, …, 76 (every 4th), 20 of them", "20 layers",
          of(lambda: Evidence((float(len(LISTED)),),
          f"{len(LISTED)} are listed, and {len(LISTED & set(places('window_gqa')))} "
          "of them are built so: §4 has 3, 7, …, 79"))),
    Claim("topology-drawn", "§1", "the sequence as drawn: 4 PDR layers, then GQA every 4th", "60 PDR layers",
          of(lambda: Evidence((float(len(blocks(FULL)) - len(LISTED)),), f"{len(blocks(FULL)) - len(LISTED)} PDR and "
          f"{len(LISTED)} GQA are drawn; built: {len(places('pdr'))} and {len(places('window_gqa'))}, 3 PDR first"))),
    Claim("topology-window", "§1", "Exact token-level recall over the last 512 positions", "512 tokens",
          of(lambda: _gqa().window), built=True),
    Claim("topology-window-recall", "§1", "Exact token-level recall: windowed attention alone finds a needle",
          worded("> 0.95 right", 0.95, 1), trained.recall("needle: window 32"), command=command("recall")),
    Claim("topology-expert-layers", "§1", "Expert FFN: 60 layers", "60", of(lambda: len(experts())), built=True),
    Claim("topology-shared-layers", "§1", "Shared FFN: 20 layers", "20",
          of(lambda: counted(FULL).groups["swiglu"].modules), built=True),
    Claim("topology-experts", "§1", "128 experts, top-1 per token", "128", of(_expert_count), built=True),
    Claim("topology-hidden", "§2.1", "SwiGLU FFN: d → 11008 → d", "11008", of(lambda: _routed().hidden), built=True),
    Claim("topology-ternary", "§2.1", "expert weights are ternary {−1, 0, +1}", "3 values",
          of(lambda: len(trits(common.drawn(64, 64))[0].unique())), built=True),
    Claim("topology-on-gpu", "§2.1", "Only ~27 MB occupies the GPU at any moment", "~27 MB",
          of(lambda: 2 * needed().experts[0].shard),
          ("where experts are not read ahead, one buffer of the two", of(lambda: needed().experts[0].shard))),
    Claim("topology-heads", "§2.2", "32 query heads", "32", of(lambda: _gqa().heads), built=True),
    Claim("topology-kv-heads", "§2.2", "8 KV heads", "8", of(lambda: _gqa().kv_heads), built=True),
    Claim("topology-gqa-ratio", "§2.2", "4:1 GQA ratio", "4 : 1", of(lambda: _gqa().heads / _gqa().kv_heads),
          built=True),
    Claim("topology-head-dim", "§2.2", "Head dim = 128", "128", of(lambda: get(FULL).d_model // _gqa().heads),
          built=True),
    Claim("topology-two-bits", "§2.2", "Weights are 2-bit GPTQ", "2 bits",
          of(lambda: round(8 * _packed("swiglu") / _group("swiglu"), 3)), (SCALES, of(_two_bits))),
)

SHARED = (
    Claim("topology-pdr-each", "§3.1", "PDR projections (W_p, W_k, W_v, W_q): 52.5 M per layer", "52.5 M",
          of(lambda: _pdr_without_o() / len(places("pdr"))), (W_O, of(lambda: _group("pdr") / len(places("pdr"))))),
    Claim("topology-pdr-total", "§3.1", "PDR projections: 3.15 B", "3.15 B", of(_pdr_without_o),
          (W_O, of(_group, "pdr"))),
    Claim("topology-pdr-bytes", "§3.1", "PDR projections @ 2-bit: 788 MB", "788 MB", of(_packed, "pdr"),
          (SCALES, of(lambda: _group("pdr") / 4))),
    Claim("topology-pdr-norms-each", "§3.1", "PDR biases + norms: 0.02 M per layer", "0.02 M",
          of(lambda: vectors("pdr") / len(places("pdr")))),
    Claim("topology-pdr-norms", "§3.1", "PDR biases + norms: 1.2 M", "1.2 M", of(vectors, "pdr")),
    Claim("topology-pdr-norm-bytes", "§3.1", "PDR biases + norms, FP16: 2.4 MB", "2.4 MB",
          of(lambda: vectors("pdr") * HALF)),
    Claim("topology-gqa-each", "§3.1", "GQA projections (Q, K, V, O): 41.9 M per layer", "41.9 M",
          of(lambda: _group("window_gqa") / len(places("window_gqa")))),
    Claim("topology-gqa-total", "§3.1", "GQA projections: 838 M", "838 M", of(_group, "window_gqa")),
    Claim("topology-gqa-bytes", "§3.1", "GQA projections @ 2-bit: 210 MB", "210 MB", of(_packed, "window_gqa"),
          (SCALES, of(lambda: _group("window_gqa") / 4))),
    Claim("topology-gqa-norms-each", "§3.1", "GQA norms: 0.02 M per layer", "0.02 M",
          of(lambda: vectors("window_gqa") / len(places("window_gqa")))),
    Claim("topology-gqa-norms", "§3.1", "GQA norms: 0.4 M", "0.4 M", of(vectors, "window_gqa")),
    Claim("topology-gqa-norm-bytes", "§3.1", "GQA norms, FP16: 0.8 MB", "0.8 MB",
          of(lambda: vectors("window_gqa") * HALF)),
    Claim("topology-ffn-each", "§3.1", "Shared FFN (W_g, W_u, W_d): 135.3 M per layer", "135.3 M",
          of(lambda: _group("swiglu") / counted(FULL).groups["swiglu"].modules)),
    Claim("topology-ffn-total", "§3.1", "Shared FFN: 2.71 B", "2.71 B", of(_group, "swiglu")),
    Claim("topology-ffn-bytes", "§3.1", "Shared FFN @ 2-bit: 677 MB", "677 MB", of(_packed, "swiglu"),
          (SCALES, of(lambda: _group("swiglu") / 4))),
    Claim("topology-embedding", "§3.1", "Embedding (32K × 4096): 131 M", "131 M", of(_group, "embedding"),
          ("with 32,000 tokens instead of its own 32,768", of(_embedding_of, 32000))),
    Claim("topology-embedding-bytes", "§3.1", "Embedding, INT8: 131 MB", "131 MB", of(_packed, "embedding"),
          ("with 32,000 tokens, without row scales", of(_embedding_of, 32000))),
    Claim("topology-head", "§3.1", "Output head (tied w/ embed): 0", "0 parameters",
          of(lambda: counted(FULL).groups["head"].parameters if "head" in counted(FULL).groups else 0), built=True),
    Claim("topology-shared", "§3.1", "Shared total: 6.83 B", "6.83 B", of(_shared)),
    Claim("topology-shared-bytes", "§3.1", "Shared total: ~1 809 MB", "~1809 MB", of(_shared_bytes),
          (SCALES, of(_without_scales))),
)

EXPERTS = (
    *(
        Claim(f"topology-{part}", "§3.2", f"W_{part}: 45.1 M per expert and layer", "45.1 M", of(built.expert, part))
        for part in ("gate", "up", "down")
    ),
    *(
        Claim(f"topology-{part}-expert", "§3.2", f"W_{part}: 2.71 B per expert", "2.71 B",
              of(lambda p=part: built.expert(p) * len(experts())))
        for part in ("gate", "up", "down")
    ),
    *(
        Claim(f"topology-{part}-all", "§3.2", f"W_{part}: 346.4 B in 128 experts", "346.4 B",
              of(lambda p=part: built.expert(p) * len(experts()) * _expert_count()))
        for part in ("gate", "up", "down")
    ),
    Claim("topology-expert-layer", "§3.2", "Expert total per layer: 135.3 M", "135.3 M",
          of(lambda: needed().experts[0].parameters)),
    Claim("topology-expert", "§3.2", "Expert total per expert: 8.12 B", "8.12 B",
          of(lambda: _group("experts") / _expert_count())),
    Claim("topology-all-experts", "§3.2", "Expert total: 1 039 B", "1 039 B", of(_group, "experts")),
    Claim("topology-expert-sum", "§3.3", "Expert parameters: 1 039.4 B (128 × 8.12 B)", "1 039.4 B",
          of(_group, "experts")),
    Claim("topology-total", "§3.3", "TOTAL: 1 046.2 B", "1 046.2 B", of(lambda: counted(FULL).parameters)),
    Claim("topology-trillion", "§3.3", "≈ 1.05 T", "1.05 T", of(lambda: counted(FULL).parameters)),
    Claim("topology-active", "§3.3", "Active per token: 14.95 B (6.83 B shared + 8.12 B × 1 expert)", "14.95 B",
          of(lambda: counted(FULL).active_parameters)),
)

PATTERN = (
    Claim("topology-period", "§4", "a repeating motif of period 4", "4",
          of(lambda: places("window_gqa")[1] - places("window_gqa")[0]), built=True),
    Claim("topology-place", "§4", "Layer 4k+3: GQA + Shared FFN", worded("layer 4k + 3", 3, 3),
          of(lambda: tuple(sorted({float(i % 4) for i in places("window_gqa")}))), built=True),
    Claim("topology-expert-bytes", "§4", "PDR costs ~27 MB VRAM for the expert FFN", "~27 MB",
          of(lambda: needed().experts[0].shard)),
    Claim("topology-depth", "§4", "handles 75 % of depth", "75 %",
          of(lambda: len(places("pdr")) / len(blocks(FULL))), built=True),
    Claim("topology-gqa-depth", "§4", "GQA at 25 % of layers", "25 %",
          of(lambda: len(places("window_gqa")) / len(blocks(FULL))), built=True),
    Claim("topology-cache", "§4", "keeps the KV-cache at only 42 MB", "42 MB", of(_cache),
          ("in FP16", of(lambda: _cache() / 4 * HALF))),
    Claim("topology-segment", "§4", "at most 3 layers of compression before a GQA layer", "3", of(_runs), built=True),
    Claim("topology-ratio", "§4; pdr §6, our reading",
          "The 3:1 ratio: GQA sharpens what PDR compresses, corrects its drift",
          worded("lower loss than PDR alone", *trained.LOWER), trained.without("perspective", "no_gqa"),
          command=command("ablate-perspective")),
    Claim("topology-converted", "§4; pdr §6, our reading",
          "The 3:1 ratio, in a converted transformer: attention in a fourth of the layers sharpens",
          worded("lower loss than recurrences alone", *trained.LOWER),
          trained.kept, command=command("convert")),
    Claim("topology-drift", "§4; pdr §6, our reading", "The same: attention corrects the recurrence's drift",
          worded("loss rises less with position than of recurrences alone", *trained.LOWER),
          trained.drifts, command=command("convert")),
    Claim("topology-vocabulary", "§5.1", "Vocabulary: 32 768 tokens", "32 768", of(lambda: get(FULL).vocab_size),
          built=True),
    Claim("topology-width", "§5.1; §7", "Embedding dimension, a single residual stream: 4 096", "4 096",
          of(lambda: get(FULL).d_model), built=True),
    Claim("topology-int8", "§5.1", "INT8 (1 byte per value)", "1 byte",
          of(lambda: round(_packed("embedding") / _group("embedding"), 3)), ("without the scales of its rows",
          of(lambda: _int8_bytes()))),
    Claim("topology-positions", "§5.1", "Positional encoding: none at input", "0 positions",
          of(lambda: get(FULL).positions), built=True),
    Claim("topology-eps", "§6", "ε = 10⁻⁶", worded("1e-6", 1e-6, 1e-6),
          of(lambda: Evidence((get(FULL).norm_eps,), f"{get(FULL).norm_eps:.0e}")), built=True),
    Claim("topology-norm-bias", "§6", "RMSNorm (no learnable bias)", "0 biases",
          of(built.parameters, lambda name, p: "norm" in name and name.endswith("bias")), built=True),
    Claim("topology-plain", "§7", "No gating or scaling on the residual", worded("80 plain blocks", 1, 1),
          of(lambda: Evidence((float(built.plain_residual(FULL)),), f"all {len(blocks(FULL))} add up plainly")),
          built=True),
    Claim("topology-gradient", "§7", "Gradient flow is unimpeded across all 80 layers",
          worded("first layer's gradient 0.1 to 10 times the last's", 0.1, 10), of(tried.gradient_flow, 80)),
)


TIMES = (
    *(
        Claim(f"topology-ms-{part.replace('_', '-')}", "§8", text, at_most(f"{MS[part]:g} ms"), _ms(part),
              command=command("layer_times"))
        for part, text in STEPS.items()
    ),
    Claim("topology-ms-arrives", "§8", "Stream expert layer to VRAM (overlapped)", at_most(f"{MS['arrives']:g} ms"),
          _arrives, command=command("full_size")),
    Claim("topology-ms-projection", "§8", "SPP projection", at_most(f"{MS['projection']:g} ms"), _projection,
          command=command("safety")),
)

SPEED = (
    Claim("topology-ms-sum", "§8", "Total (PCIe-bound): the document's own steps add up", "70–80 ms",
          of(_sum_of_steps)),
    Claim("topology-ms-token", "§8", "Total (PCIe-bound): ~70–80 ms", "70–80 ms", _token,
          command=command("full_size")),
    Claim("topology-speed", "§8", "12–14 tok/s", "12–14 tokens/s", _speed, command=command("full_size")),
)

DECISIONS = (
    Claim("topology-delta", "docs/designs/perspective.md#streaming",
          "neighbours that differ in 10% of their weights, kept as a delta: 2.7 MB",
          "2.7 MB", of(lambda: tried.delta_bytes(0.10, needed().experts[0].parameters)),
          ("where 2% differ", of(lambda: tried.delta_bytes(0.02, needed().experts[0].parameters)))),
    Claim("topology-zeros", "docs/designs/perspective.md#ternary-weights",
          "≈50% of ternary weights are zero", "~50 %", of(tried.zeros_of, "normal"),
          ("where weights are Laplace distributed and the threshold is the document's, 0.7·mean|W|",
          of(tried.zeros_of, "laplace", "twn"))),
    Claim("topology-plan-gate", "docs/designs/perspective.md#training-the-experts",
          "the training plan's four conditions before a larger model", "4 conditions", documents.gate,
          command=command("documents")),
)
# fmt: on

CLAIMS = STRUCTURE + SHARED + EXPERTS + PATTERN + TIMES + SPEED + DECISIONS
