"""Import of mixtures of experts, which several families have.

Shapes: D model width, F hidden width, E experts.
"""

from collections.abc import Mapping

from torch import Tensor

from perspectron.experts.mixture import MixtureConfig
from perspectron.experts.router import MOST_EXPERTS
from perspectron.interop.foreign.source import Source

HARMLESS = ("output_router_logits", "router_aux_loss_coef", "router_z_loss_coef", "moe_shared_expert_overlap")
"""Keys that concern training alone."""
MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


# ---------------------------------------------------------------- configs


def count(source: Source, *names: str, silent: int, least: int = 0) -> int:
    """The number of experts, by the first of these names that the config has."""
    name = next((name for name in names if source.get(name) is not None), names[-1])
    return source.number(name, silent, most=MOST_EXPERTS, least=least)


def chosen(source: Source, experts: int, silent: int = 8) -> int:
    """Number of experts per token."""
    return source.number("num_experts_per_tok", silent, most=experts)


def nemotron(source: Source) -> MixtureConfig:
    """NemotronH's mixture: sigmoid scores, corrected for choosing experts, by groups; experts without gates."""
    source.must("moe_latent_size", (None,))
    source.must("mlp_hidden_act", ("relu2",), "relu2")
    source.must("mlp_bias", (False,), False)
    source.get("n_shared_experts")  # transformers always has one, of the given width
    E = count(source, "n_routed_experts", silent=8, least=1)
    return MixtureConfig(
        source.number("moe_intermediate_size", 7688), E, chosen(source, E, 2), "sigmoid",
        bool(source.must("norm_topk_prob", (True, False), True)), source.positive("routed_scaling_factor", 1.0),
        True, source.number("n_group", 1), source.number("topk_group", 1), "relu2",
        source.number("moe_shared_expert_intermediate_size", 7688),
    )  # fmt: skip


# ---------------------------------------------------------------- weights


def weights(
    source: Source, there: str, here: str, D: int, ffn: MixtureConfig, *, shared: str = "shared_expert",
    matrices: Mapping[str, str] = MATRICES,
) -> dict[str, Tensor]:  # fmt: skip
    """Weights of a mixture, by its name there. Each expert has its own matrices or, in a GGUF, all share one tensor.
    shared: the file's name of the shared network. matrices: the file's names of an expert's matrices."""
    E = ffn.experts
    taken = {f"{here}.route_proj.weight": source.take(f"{there}.gate.weight", E, D)}
    if ffn.corrected:
        taken[f"{here}.bias_E"] = source.take(f"{there}.gate.e_score_correction_bias", E)
    for name, ours in (("gate", "gate_EFD"), ("up", "up_EFD"), ("down", "down_EDF"))[not ffn.gated :]:
        shape = (D, ffn.hidden) if name == "down" else (ffn.hidden, D)
        each = [f"{there}.experts.{e}.{matrices[name]}.weight" for e in range(E)]
        taken[f"{here}.{ours}"] = source.take_stack(f"{there}.experts.{name}_proj.weight", each, *shape)
        if ffn.shared:
            shape = (D, ffn.shared) if name == "down" else (ffn.shared, D)
            taken[f"{here}.shared_{name}_proj.weight"] = source.take(
                f"{there}.{shared}.{name}_proj.weight", *shape
            )
    if ffn.shared_gate:
        taken[f"{here}.share_proj.weight"] = source.take(f"{there}.{shared}_gate.weight", 1, D)
    return taken
