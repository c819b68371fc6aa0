"""The document on Lens (docs/designs/lens.md)."""

from typing import Any, cast

import torch

from claims.claim import Claim, Evidence, Measure, of, untestable, worded
from claims.measures import built, common, trained
from claims.measures import lens as tried
from claims.measures.built import counted, model, routed_residual
from claims.results import Results, command
from perspectron.model.block import Block

FULL, PLAIN, E = "lens-gpt2-124m", "gpt2-124m", 768
LAYERS = len(built.blocks(FULL))
OFF: tuple[tuple[str, Any], ...] = (
    ("reciprocity", False), ("discoverability", False), ("gates", False), ("route", False), ("context", False),
)  # fmt: skip


def _block(name: str, *sizes: tuple[str, Any], part: str = "") -> int:
    """Parameters of the first block, or of what in it has `part` in its name."""
    block = model(name, *sizes).blocks[0]
    return sum(p.numel() for own, p in block.named_parameters() if part in own)


def _small() -> int:
    """The parameters that the block has beside GPT-2's and the wider network."""
    return _block(FULL, part="u_HK") + _block(FULL, part="gates_HL") + _block(FULL, part="raw_1")


def _wide() -> int:
    """The parameters of the network that reads context, less those of GPT-2's."""
    return _block(FULL, part="ffn.") - _block(PLAIN, part="ffn.")


def _flops(*off: tuple[str, Any]) -> int:
    """FLOPs of a token at a context of 1,024."""
    return counted(FULL, *off).flops_per_token[1024]


def _only(*on: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, name in on) for name, _ in OFF)


def _extra(*on: str) -> float:
    """FLOPs with these parts over those without any, less 1."""
    return round(_flops(*_only(*on)) / _flops(*OFF) - 1, 5)


def _products(name: str) -> float:
    """Matrix products in a block."""
    layer = cast(Block, model(name).blocks[0])
    state = layer.init_state(1, built.META, torch.float32)
    return len(built.operations(layer, built.meta(1, 16, E), state, layer.ffn, None, None).products())


def _slower(results: Results) -> Evidence:
    ratio = results.median("kernels", "lens", "lens_to_plain")
    return Evidence((ratio,), f"{ratio:.2f} times plain attention, forward and backward")


def _cache(other: str) -> float:
    return counted(FULL).state_bytes[1024] / counted(other).state_bytes[1024]


def _cache_at(tenths: int) -> Evidence:
    """A gate leaves the cache as it is; taking attention out of blocks, whatever their gates, makes it smaller."""
    share, removed = tried.cache_at(tenths / 10), 10 - tenths
    pruned = tried.cache_without(removed)
    return Evidence((share,), f"{share:.0%}; `prune-attention` of {removed} of 10 blocks leaves {pruned:.0%}")


def _mixtures(index: int) -> Measure:
    """Least and greatest weight of one lens over all heads after training."""

    def ends(layers: list[Any]) -> list[float]:
        heads = [head[index] for layer in layers for head in layer]
        return [min(heads), max(heads)]

    return trained.of_gates("lens", "lens_weights", ends, "{:.3f}", [tried.mixture()[index]] * 2)


_route = trained.of_gates("lens", "route_gate", lambda g: [sum(g) / len(g)], "g = {:.3f}", [tried.anneal(0)])


def _helps(id: str, where: str, text: str, step: str, before: str) -> Claim:
    """A part that is claimed to lower the loss: the step that adds it, and the one before."""
    lower = worded("lower loss with it", *trained.LOWER)
    return Claim(
        id, where, text, lower, trained.without("lens", before, step), command=command("ablate-lens")
    )


# fmt: off
RECIPROCITY = (
    Claim("lens-rec-compute", "§1; §Compute", "Reciprocity: compute cost ZERO (transpose is free)", "0 %",
          of(lambda: Evidence((_extra("reciprocity"),), f"{_extra('reciprocity'):.2%} of a token at 1,024")),
          ("when a whole text is read in the document's form, which keeps S (`designs/lens/op.naive`)",
          of(tried.reciprocal_products))),
    Claim("lens-rec-time", "§1", "Zero overhead", worded("as fast as plain attention", 0, 1.05), _slower,
          command=command("kernels")),
    Claim("lens-rec-params", "§1", "Parameter cost: 0 params", "0 params",
          of(lambda: _block(FULL, ("gates", False)) - _block(FULL, ("gates", False), ("reciprocity", False))),
          built=True),
    Claim("lens-rec-cache", "§1", "Zero overhead, at decoding too",
          worded("GPT-2's cache", 1, 1, " times GPT-2's cache"), of(_cache, PLAIN)),
    Claim("lens-rec-diagonal", "§1", "Diagonal is symmetric (self-attention preserved)", worded("equal", 0, 0),
          of(tried.diagonal), built=True),
    Claim("lens-bidirectional", "§1", "Bidirectional token communication: \"Italy\" attends back to a later \"Rome\"",
          worded("earlier tokens see later ones", 1e-6), of(common.seen_from_before, "lens-tiny")),
    _helps("lens-rec-helps", "§1", "bidirectional communication is a benefit", "reciprocity", "plain"),
)

FINDER = (
    Claim("lens-disc-params", "§2", "Discoverability: n_head × head_dim = 768 params", "768 params",
          of(lambda: _block(FULL, part="u_HK"))),
    Claim("lens-disc-share", "§2", "(0.01% overhead)", "0.01 %",
          of(lambda: _block(FULL, part="u_HK") / _block(PLAIN))),
    Claim("lens-disc-start", "§2", "u starts at randn × 0.02", "0.02", of(tried.finder_spread), built=True),
    Claim("lens-disc-mean", "§2, our reading", "d − mean(d): zero-mean for stability", worded("changes the outputs",
          1e-6),
          of(tried.centred)),
    Claim("lens-disc-new", "§2, our reading", "Allows tokens to be found regardless of the query",
          worded("differs from a bias on queries", 1e-6), of(tried.as_query_bias)),
    Claim("lens-disc-flops", "§2; §Compute", "d = K·u: tiny einsum, H×D a token and layer", "< 0.1 %", of(_extra,
          "discoverability")),
    _helps("lens-disc-helps", "§2", "important tokens are found", "discoverability", "reciprocity"),
)

GATES = (
    Claim("lens-gates-sum", "§3", "Weights always sum to 1 per head", "1", of(tried.mixture_sum), built=True),
    *(
        Claim(f"lens-gates-{name}", "§3", f"Start w_{name} ≈ {start}", start, of(lambda i=i: tried.mixture()[i]),
              built=True)
        for i, (name, start) in enumerate((("std", "0.80"), ("rec", "0.15"), ("disc", "0.05")))
    ),
    Claim("lens-gates-params", "§3", "n_head × 3 = 36 params", "36 params",
          of(lambda: _block(FULL, part="gates_HL"))),
    Claim("lens-gates-share", "§3", "<0.001% overhead", "< 0.001 %",
          of(lambda: _block(FULL, part="gates_HL") / _block(PLAIN))),
    Claim("lens-gates-after-std", "§3", "Example after training: a head's w_std from 0.65 to 0.92", "0.65–0.92",
          _mixtures(0), command=command("compare")),
    Claim("lens-gates-after-rec", "§3", "Example after training: a head's w_rec from 0.06 to 0.30", "0.06–0.30",
          _mixtures(1), command=command("compare")),
    Claim("lens-gates-after-disc", "§3", "Example after training: a head's w_disc from 0.02 to 0.15", "0.02–0.15",
          _mixtures(2), command=command("compare")),
    _helps("lens-gates-help", "§3", "Learnable: the model learns the optimal balance per head", "gates",
          "discoverability"),
)



def _ratio(g: float) -> Evidence:
    """Parameters of GPT-2's network over its attention's, plain and each by its weight."""
    plain = round(_block(PLAIN, part="ffn.") / _block(PLAIN, part="mixer."), 2)
    weighted = round(plain * (1 - g) / g, 2)
    return Evidence((plain, weighted), f"{plain:g} : 1 in parameters, {weighted:g} : 1 by their weights g and 1 − g")


ROUTE = (
    Claim("lens-route-start", "§4", "Route gate: sigmoid(2.2) ≈ 0.9 initially", "0.9", of(lambda: tried.anneal(0)),
          built=True),
    Claim("lens-route-params", "§4", "1 param per block (12 total for GPT-2)", "12",
          of(lambda: LAYERS * _block(FULL, part="raw_1")), built=True),
    Claim("lens-route-blocks", "§4", "Single learnable scalar per block", "12 blocks", of(routed_residual, FULL),
          built=True),
    Claim("lens-route-traditional", "§4", "g ≈ 1.0 (0.9): traditional, 4:1 MLP:attention", "4 : 1", of(_ratio, 0.9)),
    Claim("lens-route-balanced", "§4", "g ≈ 0.5: balanced, 2:1 MLP:attention", "2 : 1", of(_ratio, 0.5)),
    Claim("lens-route-heavy", "§4", "g ≈ 0.3: MLP-heavy, 1:1.4 attention:MLP", "1.4 : 1", of(_ratio, 0.3)),
    *(
        Claim(f"lens-route-{part}-{g}", "§4", f"g = 0.{g}: {part} weight {share}%", f"{share} %",
              of(tried.routed_part, g / 10, part), built=True)
        for g in (9, 7, 5, 3)
        for part, share in (("attention", 10 * g), ("mlp", 100 - 10 * g))
    ),
    Claim("lens-route-gpt2", "§4", "0.9 is traditional: the weights of a GPT-2 block",
          worded("attention 100%, MLP 100%", 0.999, 1.001), of(tried.routed, 0.9),
          ("at g = 0.5 with route_scale = 2", of(tried.routed, 0.5, 2.0))),
    Claim("lens-route-cache-9", "§4", "g = 0.9: KV cache 100% (baseline)", "100 %", of(tried.cache_at, 0.9)),
    *(
        Claim(f"lens-route-cache-{g}", "§4", f"g = 0.{g}: KV cache {g}0%", f"{g}0 %", of(_cache_at, g))
        for g in (7, 5, 3)
    ),
    Claim("lens-route-learns", "§4", "Goal: the model learns to shift toward MLP, enabling a smaller KV cache",
          worded("g ≤ 0.7, the first of its table with a smaller cache", 0, 0.7), _route, command=command("compare")),
    Claim("lens-route-anneal", "§4", "delta = −0.0001 a step gradually pushes toward MLP",
          worded("g < 0.9 after 10,000 steps", 0, 0.9), of(lambda: Evidence((tried.anneal(10000), ),
          f"g = {tried.anneal(10000):.2f} after 10,000 steps, 0.5 after 22,000"))),
    _helps("lens-route-helps", "§4", "learning the ratio of attention to MLP", "route", "gates"),
)

CONTEXT = (
    Claim("lens-context-fc1", "§5", "fc1: 2E × 4E = 8E²", "8 E²",
          of(lambda: _block(FULL, part="ffn.up_proj.weight") / E**2)),
    Claim("lens-context-fc1-was", "§5", "(was 4E²)", "4 E²",
          of(lambda: _block(PLAIN, part="ffn.up_proj.weight") / E**2)),
    Claim("lens-context-gate", "§5", "fc_gate: 2E × 4E = 8E²", "8 E²",
          of(lambda: _block(FULL, part="ffn.gate_proj.weight") / E**2)),
    Claim("lens-context-fc2", "§5", "fc2: 4E × E = 4E² (unchanged)", "4 E²",
          of(lambda: _block(FULL, part="ffn.down_proj.weight") / E**2)),
    Claim("lens-context-e2", "§5", "Overhead: +8E² params", "8 E²", of(lambda: round(_wide() / E**2, 2))),
    Claim("lens-context-each", "§5", "for GPT-2: +4.7M per layer", "4.7 M", of(_wide)),
    _helps("lens-context-helps", "§5", "enables better MLP performance", "lens", "gated_mlp"),
)

TOTAL = (
    Claim("lens-base-each", "§Total", "Baseline GPT-2 per layer: 7.08M", "7.08 M", of(_block, PLAIN)),
    Claim("lens-each", "§Total", "Total per layer: ~11.8M", "~11.8 M", of(_block, FULL)),
    Claim("lens-each-share", "§Total", "(67% increase) per layer, and so of 12", "67 %",
          of(lambda: round(_block(FULL) / _block(PLAIN) - 1, 4))),
    Claim("lens-base", "§Total", "Baseline 12 layers: 85.0M", "85.0 M", of(lambda: LAYERS * _block(PLAIN))),
    Claim("lens-total", "§Total", "With lens-gating: 141.6M", "141.6 M", of(lambda: LAYERS * _block(FULL))),
    Claim("lens-124m", "§Total", "GPT-2 124M, the whole model", "124 M", of(lambda: counted(PLAIN).parameters)),
    Claim("lens-whole", "docs/designs/lens.md#context", "with every lens, embeddings included: 209.4 M", "209.4 M",
          of(lambda: counted(FULL).parameters)),
    Claim("lens-small-share", "§Total; §Removed", "All other mechanisms are negligible (<0.02% overhead), <1% params",
          "< 0.02 %",
          of(lambda: _small() / _block(PLAIN))),
)

COMPUTE = (
    Claim("lens-gemms", "§Compute", "Zero extra GEMMs",
          worded("as many matrix products as GPT-2's block", 0, 0, " more in a block"),
          of(lambda: _products(FULL) - _products(PLAIN))),
    Claim("lens-flops", "§Compute", "Total extra FLOPs: < 0.01%", "< 0.01 %",
          of(lambda: round(_flops() / counted(PLAIN).flops_per_token[1024] - 1, 4))),
    Claim("lens-flops-gates", "§Compute", "Lens gate mixing: element-wise, negligible", "< 0.1 %",
          of(lambda: round((_flops(*_only("reciprocity", "discoverability", "gates")) - _flops(*_only("reciprocity",
          "discoverability"))) / _flops(*OFF), 5))),
    Claim("lens-flops-route", "§Compute", "Route gate blending: element-wise, negligible", "< 0.1 %",
          of(_extra, "route")),
    Claim("lens-flops-context", "§Compute", "MLP context concat: memory copy (no compute)", "0 %", of(_extra,
          "context"),
          ("for the copy alone, not for the wider products that read it", of(lambda: float(
          built.operations(torch.cat, [built.meta(1, E), built.meta(1, E)]).total)))),
    Claim("lens-near-zero", "§Principle", "five core innovations with near-zero compute overhead", "< 1 %",
          of(lambda: Evidence((_flops() / counted(PLAIN).flops_per_token[1024] - 1,),
          f"{_flops() / counted(PLAIN).flops_per_token[1024] - 1:.2%}; "
          f"{_extra('discoverability', 'gates', 'route'):.3%} without context and reciprocity"))),
)

REMOVED = (
    Claim("lens-removed-mla", "§Removed", "MLA: K/V down-projection to 128D", "128",
          untestable("removed from the design, not implemented")),
    Claim("lens-removed-coupling", "§Removed", "Bidirectional coupling: 393K params per layer", "393 K",
          untestable("removed from the design, not implemented")),
    Claim("lens-removed-cross", "§Removed", "Cross-token MLP: 9.4M params per layer", "9.4 M",
          untestable("removed from the design, not implemented; 16E² would be as many",
          f"{16 * E**2 / 1e6:.2f} M is 16E²")),
    Claim("lens-removed-total", "§Removed", "134M total across 12 layers", "134 M",
          of(lambda: Evidence((LAYERS * 9.4e6,), "112.8 M by the document's own 9.4 M a layer"))),
    Claim("lens-mechanisms", "§Removed", "5 focused mechanisms vs 8+", "5 mechanisms", of(lambda: len(OFF)),
          built=True),
    Claim("lens-beats-gpt2", "§Summary", "every parameter justifies itself through improved validation loss",
          worded("lower loss than GPT-2, equal parameters", *trained.LOWER), trained.versus("lens", "gpt2"),
          command=command("reference/results")),
)
# fmt: on

CLAIMS = RECIPROCITY + FINDER + GATES + ROUTE + CONTEXT + TOTAL + COMPUTE + REMOVED
