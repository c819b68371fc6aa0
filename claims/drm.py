"""The document on DRM (docs/designs/drm.md)."""

import torch

from claims.claim import Claim, Evidence, of, untestable, worded
from claims.measures import built, common, documents, trained
from claims.measures import drm as tried
from claims.measures.built import attention_calls, counted, model
from claims.results import Results, command
from perspectron.designs.drm import op as drm
from perspectron.designs.drm.mixer import DRM

SMALL = "drm-104k"
NAMED = (
    "active_fraction",
    "dim_variance",
    "condition",
    "metric_diversity",
    "recurrence",
    "metric_u_floor",
    "blindspot",
)
"""The regularizers that the document lists, as the model reports them."""


def _mixer() -> DRM:
    mixer: DRM = common.first(SMALL, DRM)
    return mixer


def _linears() -> int:
    """Projections to queries, keys or values."""
    return sum(
        name.split(".")[-2].startswith(("q_", "k_", "v_", "qkv", "kv"))
        for name, _ in model(SMALL).named_parameters()
        if "proj" in name
    )


def _flops(context: int) -> int:
    return counted(SMALL).flops_per_token[context]


def _state(context: int) -> int:
    return counted(SMALL).state_bytes[context]


def _late(results: Results) -> Evidence:
    ratio = results.median("kernels", "drm", "late_to_early")
    return Evidence((ratio,), f"a token after 65,536 takes {ratio:.2f} times one after 1,024")


def _gates() -> tuple[float, ...]:
    gates = tried.geometry()[0].a_BN
    return round(gates.min().item(), 2), round(gates.max().item(), 2)


def _lengths() -> Evidence:
    lengths = tried.geometry()[0].V_BNS.norm(dim=-1)
    return Evidence(
        (lengths.min().item(), lengths.max().item()), f"{lengths.min():.4f} to {lengths.max():.4f}"
    )


def _orthogonal() -> Evidence:
    """Greatest |cosine| of two directions."""
    V = tried.geometry()[0].V_BNS
    cosines = (V @ V.mT - torch.eye(V.shape[1])).abs()
    return Evidence((cosines.max().item(),), f"|cosine| of two directions up to {cosines.max():.2f}")


def _coupling() -> Evidence:
    now = tried.geometry()[0]
    metric = drm.metric(now)
    pairs = torch.einsum("bis,bst,bjt->bij", now.V_BNS, metric, now.V_BNS)
    return common.below(common.apart(pairs, drm.coupling(now)), 1e-4)


def _terms() -> Evidence:
    model = common.made(SMALL, ("risk", True)).train()
    _, _, terms = model.hidden(common.text())
    terms_there = [name for name in NAMED if name in terms]
    model.eval()
    return Evidence((float(len(terms_there)),), f"{len(terms_there)} of {len(NAMED)} by name")


def _start() -> float:
    z = _mixer().init_state(3, torch.device("cpu"), torch.float32).z_BD
    return common.apart(z, z[:1].expand_as(z))


def _torus() -> Evidence:
    points = drm.on_torus(common.drawn(64))
    return common.below((points.square().sum(-1) - 1).abs().max().item(), 1e-5)


# fmt: off
NOT_ATTENTION = (
    Claim("drm-no-attention", "§Architecture", "the mechanism is not sequence attention", "0 attention kernels",
          of(attention_calls, SMALL), built=True),
    Claim("drm-no-mha", "§Why", "does not instantiate nn.MultiheadAttention", "0 such modules",
          of(lambda: sum(isinstance(m, torch.nn.MultiheadAttention) for m in model(SMALL).modules())), built=True),
    Claim("drm-no-qkv", "§Why", "does not construct query/key/value projections", "0 such projections", of(_linears),
          built=True),
    Claim("drm-no-pairs", "§Why", "does not run pairwise token attention", worded("exponent 1", 0.95, 1.05),
          of(lambda: round(built.exponent(lambda n: built.operations(model(SMALL), torch.zeros(1, n,
          dtype=torch.int64, device="meta")).total, 12), 2))),
    Claim("drm-no-cache", "§Generation", "There is no attention cache",
          worded("a state equal at 1k and 256k tokens", 1, 1, " times"), of(lambda: _state(262144) / _state(1024))),
    Claim("drm-state", "§Latent", "the state is a vector in R^d_state", worded("64 numbers", 64, 64, " numbers"),
          of(lambda: _mixer().init_state(1, torch.device("cpu"), torch.float32).z_BD.numel()), built=True),
    Claim("drm-o1", "§Generation", "generation updates z once per token: O(1)",
          worded("as many FLOPs at 256k as at 1k", 1, 1, " times"), of(lambda: _flops(262144) / _flops(1024))),
    Claim("drm-o1-time", "§Generation, our reading", "and in time", worded("as fast late as early", 0.95, 1.05), _late,
          command=command("kernels")),
    Claim("drm-start", "§Latent", "a learned initial state expanded to the batch", worded("equal rows", 0, 0),
          of(_start), built=True),
    Claim("drm-history", "§Why, our reading", "Sequence history is compressed into z_t",
          worded("recalls as many pairs as the transformer", 0), trained.recall("drm", "transformer"),
          command=command("recall")),
)

GEOMETRY = (
    Claim("drm-gates", "§DirectionField", "a_i(z) ∈ [0, 1]", worded("in [0, 1]", 0, 1), of(_gates), built=True),
    Claim("drm-active", "docs/designs/drm.md#loss",
          "gates define an effective local active dimension; its bound of 0.65, at the start",
          worded("Σa ≤ 0.65 of 8 directions", 0, 0.65 * 8, " of 8"),
          of(lambda: round(common.at_start(SMALL)["drm_active"][0], 2))),
    Claim("drm-active-after", "docs/designs/drm.md#loss", "and after training",
          worded("Σa ≤ 0.65 of 16 directions", 0, 0.65 * 16),
          trained.of_gates("drm", "drm_active", lambda x: x, "{:.2f}"), command=command("compare")),
    Claim("drm-unit", "§DirectionField", "Optional normalization keeps their scale controlled",
          worded("unit vectors", 0.9999, 1.0001), of(_lengths), built=True),
    Claim("drm-oblique", "§DirectionField", "The directions are not orthogonalized",
          worded("some cosine > 0.1", 0.1, 1), of(_orthogonal)),
    Claim("drm-definite", "§RelationalMetric", "positive definite up to the eps floor",
          worded("least eigenvalue ≥ 0.0001", 1e-4), of(lambda: round(tried.least_eigenvalue(), 2))),
    Claim("drm-coupling", "§RelationalMetric", "C_ij = V_i G V_jᵀ", worded("equal", 0, 1e-4), of(_coupling)),
    Claim("drm-useful", "§RelationalMetric, our reading", "the metric is part of the movement law, to use",
          worded("lower loss than without a metric", *trained.LOWER), trained.without("drm", "no_metric"),
          command=command("ablate-drm")),
    Claim("drm-directions", "§DirectionField, our reading", "directions are the central computation",
          worded("lower loss than without directions", *trained.LOWER), trained.without("drm", "no_directions"),
          command=command("ablate-drm")),
)

FLOW = (
    Claim("drm-span", "§DRMFlow", "the velocity belongs explicitly to the span of active directions",
          worded("nothing outside", 0, 1e-6), of(tried.outside_span, 500),
          ("before the metric bends it (naturalisation 0)", of(tried.outside_span, 0))),
    Claim("drm-span-after", "§DRMFlow", "and after training", worded("nothing of |v|² outside", 0, 1e-6),
          trained.of_gates("drm", "drm_outside", lambda x: x, "{:.1%}"), command=command("compare")),
    Claim("drm-woodbury", "§DRMFlow", "a damped Woodbury solve of (G + λI)⁻¹ v",
          worded("equal to a dense solve", 0, 1e-4), of(tried.solve_error)),
    Claim("drm-schedule-start", "§DRMFlow",
          "The naturalization strength is scheduled, avoiding immediate over-conditioning",
          worded("0 at the first update", 0, 0), of(tried.strength, 0), built=True),
    Claim("drm-schedule-middle", "docs/designs/drm.md#flow", "and rises", worded("0.25 after 250 updates", 0.25, 0.25),
          of(tried.strength, 250), built=True),
    Claim("drm-schedule-end", "docs/designs/drm.md#flow", "to its full strength",
          worded("0.5 after 500 updates", 0.5, 0.5),
          of(tried.strength, 500), built=True),
    Claim("drm-dt", "§DRMFlow", "z_{t+1} = z_t + Δz_t", worded("a step of 1", 1, 1), of(lambda: _mixer().config.dt),
          built=True),
)

LOSSES = (
    Claim("drm-action", "§Action", "the action term is the mean metric energy Δzᵀ G Δz", worded("equal", 0, 1e-5),
          of(tried.energy_error)),
    Claim("drm-action-helps", "§Action, our reading", "geometric regularization beside the token loss, to use",
          worded("lower loss than without auxiliary losses", *trained.LOWER), trained.without("drm", "no_auxiliary"),
          command=command("ablate-drm")),
    Claim("drm-terms", "§Emitter",
          "regularizers: active fraction, variance, conditioning, diversity, recurrence, floor, risk",
          "7 regularizers", of(_terms)),
    Claim("drm-geodesic", "§Geodesic", "does not solve the boundary-value geodesic problem",
          worded("no such solver", 0), untestable("the document claims nothing that could fail", "no solver")),
    Claim("drm-low-action", "§Geodesic, our reading", "low-action trajectories",
          worded(f"at most {documents.NEAR} times the action of a relaxed path", 0, documents.NEAR),
          documents.low_action, command=command("documents")),
    Claim("drm-torus", "§Toroidal", "circular coordinates as (cos θ, sin θ)", worded("on the circle", 0, 1e-5),
          of(_torus)),
    Claim("drm-torus-convergence", "§Toroidal", "does not claim spontaneous toroidal convergence",
          worded("no sign of a torus", 0, 0),
          documents.tori, command=command("documents")),
    Claim("drm-stable", "§Toroidal, our reading", "structural stability, which a toroidal claim would need",
          worded("a Lyapunov exponent ≤ 0 with weights 1% off", float("-inf"), 0), documents.stable,
          command=command("documents")),
    Claim("drm-transformer", "docs/designs/drm.md#measured", "a transformer wins at equal tokens",
          worded("the transformer's loss is lower", *trained.LOWER),
          trained.beside("transformer", "drm", "parts/transformer",
                         "with the transformer's rate chosen at more tokens"),
          command=command("reference/results")),
    Claim("drm-dispensable", "docs/designs/drm.md#measured", "directions can be ablated away",
          worded("at most 0.01 higher loss without directions", *trained.NO_HIGHER), trained.without("drm", "drm",
          "no_directions"),
          command=command("ablate-drm")),
    Claim("drm-auxiliary-costs", "docs/designs/drm.md#measured", "auxiliary losses cost CE",
          worded("lower loss without auxiliary losses", *trained.LOWER), trained.without("drm", "drm", "no_auxiliary"),
          command=command("ablate-drm")),
)
# fmt: on

CLAIMS = NOT_ATTENTION + GEOMETRY + FLOW + LOSSES
