"""The DRM emitter against vectors of an implementation that nobody here wrote (float64, an .npz each).

`pytest tests/designs/drm --vectors DIR` reads any such folder; the two in tests/vectors are the default. A
vector's config is mapped to ours; a switch of the original that is not built here fails by its name.

Shapes: B batch, T time, S state, H hidden, N directions, R rank, Q vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import perspectron
from perspectron.designs.drm import op as drm
from perspectron.designs.drm.head import EmitterConfig
from perspectron.designs.drm.mixer import DRMConfig, Risk
from perspectron.designs.drm.terms import Losses
from perspectron.model.config import BlockConfig, ModelConfig, NoResidualConfig

OWN = Path(__file__).parents[2] / "vectors"
NORM_EPS = 1e-6
LOSSES = {name: f"lambda_{name}" for name in (
    "action", "dim_sparsity", "dim_entropy", "dim_variance", "active_fraction", "metric_reg", "metric_diversity",
    "condition", "metric_u_target", "metric_u_floor", "recurrence", "blindspot",
)} | {
    "spread_target": "target_dim_std", "active_target": "target_active_fraction",
    "condition_target": "target_condition", "u_target": "metric_u_target_norm", "u_floor": "metric_u_min_norm",
}  # fmt: skip
RISK = {name: f"risk_{name}" for name in ("alpha_max", "exponent_min", "exponent_max", "mass_max")}
MIXER = {
    "directions": "n_directions", "rank": "metric_rank", "hidden": "hidden_size", "d_token": "d_token",
    "direction_basis": "direction_basis_size", "direction_norm": "direction_norm", "dt": "dt",
    "radius": "state_clip_norm", "squash": "bounded_state", "clip": "bounded_state", "gate_bias": "gate_logit_bias",
    "gate_temperature": "gate_temperature", "metric_floor": "metric_eps",
    "strength_warmup": "metric_naturalization_warmup_steps", "damping": "metric_damping",
    "geometry_interval": "geometry_update_interval", "bptt": "bptt_truncate_interval",
}  # fmt: skip
READ_BELOW = {
    "vocab_size", "d_state", "metric_u_basis_size", "gate_top_k", "gate_top_k_renorm", "lambda_stability",
    "use_metric_naturalization", "metric_naturalization_strength", "use_powerlaw_risk", "_training", "_global_step",
}  # fmt: skip
NO_PART = {  # of generation, of files, or of how the original was run
    "seed", "schema_version", "max_seq_len", "generation_temperature", "top_k", "tokenizer_type", "use_torch_compile",
    "instantiate_disabled_risk",
}  # fmt: skip
MAPPED = {*LOSSES.values(), *RISK.values(), *MIXER.values(), *READ_BELOW, *NO_PART}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "path" in metafunc.fixturenames:
        folder = metafunc.config.getoption("--vectors")
        paths = sorted(folder.glob("*.npz"))
        if not paths:
            raise pytest.UsageError(f"--vectors = {folder}, must be a folder with .npz files")
        metafunc.parametrize("path", paths, ids=[path.stem for path in paths])


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, tensors)."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    config = json.loads(arrays.pop("config_json").tobytes())
    return config, {name: torch.from_numpy(array) for name, array in arrays.items()}


def switches_not_built(config: dict[str, Any]) -> list[str]:
    """Keys that are not mapped and differ from their off value, which is that of our own vectors."""
    off, _ = read(OWN / "drm-dense.npz")
    absent = object()
    return [
        f"{key} = {value!r}"
        for key, value in sorted(config.items())
        if key not in MAPPED and value != off.get(key, absent)
    ]


def config_of(c: dict[str, Any]) -> ModelConfig:
    top_k = c["gate_top_k"] if c["gate_top_k"] < c["n_directions"] else 0
    mixer = DRMConfig(
        **{name: c[key] for name, key in MIXER.items()},
        metric_basis=c["metric_u_basis_size"] if c["metric_rank"] else 0,
        gate_top_k=top_k,
        gate_renorm=c["gate_top_k_renorm"] and top_k > 0,
        strength=c["metric_naturalization_strength"] if c["use_metric_naturalization"] else 0.0,
        risk=Risk(**{name: c[key] for name, key in RISK.items()}, cached=True)
        if c["use_powerlaw_risk"]
        else None,
        losses=Losses(**{name: c[key] for name, key in LOSSES.items()}),
    )
    stability = {"stability": c["lambda_stability"]} if c["lambda_stability"] else {}
    block = BlockConfig(mixer, None, NoResidualConfig())
    head = EmitterConfig(c["hidden_size"], **stability)
    return ModelConfig("conformance", c["vocab_size"], c["d_state"], (block,), head, norm_eps=NORM_EPS)


def views(p: dict[str, Tensor], c: dict[str, Any]) -> dict[str, Tensor]:
    """Where each of the original's tensors stands in ours (parameters, or their gradients)."""
    S, H, N, R = c["d_state"], c["hidden_size"], c["n_directions"], c["metric_rank"]
    own = {name.removeprefix("blocks.0.mixer."): tensor for name, tensor in p.items()}
    found = {
        "token_embedding.embedding.weight": own["embedding.weight"],
        "initializer.z0": own["z0"],
        "emitter.net.0.weight": own["norm.weight"],
        "flow.coeff_net.0.weight[z]": own["read.weight"][2 * H :],
        "flow.coeff_net.0.weight[e]": own["token.weight"],
        "flow.coeff_net.0.bias": own["read.bias"][2 * H :],
    }
    for i, part in enumerate(("direction_field", "metric")):
        mine = slice(i * H, (i + 1) * H)
        found |= {f"{part}.trunk.0.{kind}": own[f"read.{kind}"][mine] for kind in ("weight", "bias")}
        found |= {f"{part}.trunk.3.weight": own["trunk_w"][i], f"{part}.trunk.3.bias": own["trunk_b"][mine]}
    for kind in ("weight", "bias"):
        u = own[f"metric.{kind}"][S:].unflatten(0, (R, -1)) if R else own[f"metric.{kind}"][S:]
        found |= {
            f"direction_field.direction_head.{kind}": own[f"direction.{kind}"][:-N],
            f"direction_field.gate_head.{kind}": own[f"direction.{kind}"][-N:],
            f"metric.diag_head.{kind}": own[f"metric.{kind}"][:S],
            f"metric.u_head.{kind}": u if "metric_basis" in own or not R else u.transpose(0, 1),
            f"flow.coeff_net.3.{kind}": own[f"flow.{kind}"],
            f"emitter.net.1.{kind}": own[f"lm_head.up_proj.{kind}"],
            f"emitter.net.4.{kind}": own[f"lm_head.out_proj.{kind}"],
        }
        if c["use_powerlaw_risk"]:
            found |= {
                f"risk.net.0.{kind}": own[f"risk_in.{kind}"],
                f"risk.net.2.{kind}": own[f"risk_out.{kind}"],
            }
    if c["use_powerlaw_risk"]:
        for i, letter in enumerate("bd"):
            found |= {
                f"risk.alpha_{letter}": own["risk_alpha"][i],
                f"risk.beta_{letter}": own["risk_beta"][i],
            }
    if "direction_basis" in own:
        found["direction_field.direction_basis"] = own["direction_basis"]
    if "metric_basis" in own:
        found["metric.u_basis"] = own["metric_basis"]
    return found


def theirs(tensors: dict[str, Tensor], prefix: str, S: int) -> dict[str, Tensor]:
    """Their tensors under a prefix, the flow's first layer cut into what reads z and what reads e."""
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if "flow.coeff_net.0.weight" in found:
        whole = found.pop("flow.coeff_net.0.weight")
        found |= {"flow.coeff_net.0.weight[z]": whole[:, :S], "flow.coeff_net.0.weight[e]": whole[:, S:]}
    return found


def load(c: dict[str, Any], tensors: dict[str, Tensor]) -> perspectron.LanguageModel:
    model = perspectron.build(config_of(c)).double()
    places = views({name: p.detach() for name, p in model.named_parameters()}, c)
    given = theirs(tensors, "weight/", c["d_state"])
    for name, place in places.items():
        if place.numel():
            place.copy_(given.pop(name).view(place.shape))
    unused = ("risk.",) if c["metric_rank"] else ("risk.", "metric.u_")
    assert all(name.startswith(unused) for name in given), f"weights without a place: {sorted(given)}"
    assert sum(x.numel() for x in places.values()) == sum(p.numel() for p in model.parameters())
    if c["_global_step"] is not None:
        model.set_step(c["_global_step"])
    return model.train(c["_training"])


def close(name: str, ours: Tensor, expected: Tensor, tolerance: float) -> None:
    assert ours.shape == expected.shape, name
    worst = (ours - expected).abs().max().item()
    assert worst <= tolerance, f"{name} is off by {worst:.1e}, allowed {tolerance:.0e}"


@pytest.mark.parametrize("backend", ["torch", "naive"])
def test_a_vector_of_the_document_is_met(path, backend):
    c, tensors = read(path)
    assert not (unknown := switches_not_built(c)), f"not built here: {', '.join(unknown)}"
    model = load(c, tensors)
    mixer, states = model.blocks[0].mixer, []
    mixer.backend = backend
    mixer.register_forward_hook(lambda module, inputs, output: states.append(output[0]))
    output = model(tensors["input/ids"], targets=tensors["input/targets"])
    close("logits", output.logits, tensors["output/logits"], 1e-10)
    close("states", states[0], tensors["output/states"], 1e-12)
    check_terms(c, tensors, output)
    output.objective().backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    expected = theirs(tensors, "grad/", c["d_state"])
    for name, ours in views(gradients, c).items():
        wanted = expected.pop(name).view(ours.shape) if name in expected else torch.zeros_like(ours)
        assert (ours - wanted).norm() <= 1e-9 * wanted.norm() + 1e-15, f"gradient of {name}"
    assert not any(gradient.any() for gradient in expected.values()), f"gradients left: {sorted(expected)}"


def check_terms(c: dict[str, Any], tensors: dict[str, Tensor], output: perspectron.Output) -> None:
    """Every aux/*, and what they add up to. A term that we do not report, because its part is off, must be 0."""
    ours = {name: term.value for name, term in output.aux.items()}
    ours |= {"ce": output.loss, "total": output.objective()}
    floor = output.aux["metric_u_floor"]
    ours["total"] = ours["total"] - floor.weight * floor.value  # as the original adds it later
    ours.setdefault("stability", drm.logit_change(output.logits))
    if not c["use_powerlaw_risk"]:
        ours["blindspot"] = torch.zeros_like(output.loss)
    for key, expected in tensors.items():
        if key.startswith("aux/"):
            close(key, ours[key.removeprefix("aux/")], expected, 1e-10)
    close("loss", output.objective(), tensors["output/loss"], 1e-10)


def test_a_switch_that_is_not_built_is_named():
    c, _ = read(OWN / "drm-dense.npz")
    assert switches_not_built(c | {"dt": 0.5, "seed": 3, "metric_rank": 7}) == []
    changed = c | {"selective_memory": True, "emitter_layers": 2, "a_new_one": 1}
    assert switches_not_built(changed) == ["a_new_one = 1", "emitter_layers = 2", "selective_memory = True"]


def test_every_key_of_the_vectors_is_read_or_must_be_off():
    c, _ = read(OWN / "drm-dense.npz")
    assert set(c) >= MAPPED
