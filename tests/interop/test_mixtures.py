"""Families of transformers with a mixture of experts as models of ours: the same function, whatever their config leaves
out."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_next import modeling_qwen3_next

from perspectron.experts.mixture import Mixture, MixtureConfig
from perspectron.interop.foreign import decoder, mixture
from perspectron.interop.foreign.source import Source
from perspectron.util.errors import CheckpointError
from tests.interop import families
from tests.interop.families import HEADS, OUTER, Family
from tests.interop.test_hybrids import GRANITE
from tests.refusals import refused

OLMOE = OUTER | {
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 19, "num_experts": 7,
    "num_experts_per_tok": 3,
}  # fmt: skip
QWEN3 = OUTER | HEADS | {
    "moe_intermediate_size": 19, "num_local_experts": 7, "num_experts_per_tok": 3, "mlp_only_layers": [1],
}  # fmt: skip
EXPERTS = GRANITE | {"num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 19}
CASES = [
    Family("olmoe", OLMOE),
    Family("olmoe", OLMOE | {"clip_qkv": 0.4, "norm_topk_prob": True, "attention_bias": True,
                             "tie_word_embeddings": True}, name="olmoe-clipped", seed=2),
    Family("qwen3_moe", QWEN3),
    Family("qwen3_moe", QWEN3 | {"mlp_only_layers": [], "decoder_sparse_step": 2, "norm_topk_prob": True,
                                 "sliding_window": 5, "use_sliding_window": True, "tie_word_embeddings": True},
           name="qwen3_moe-sliding"),
    Family("granitemoehybrid", EXPERTS | {"position_embedding_type": "rope"}, name="granite-experts"),
]  # fmt: skip


case = families.cases(CASES)


class TestEach(families.Questions):
    """Of each mixture."""

    @torch.no_grad()
    def test_shards_of_16_bits_stay_so_in_memory_and_give_the_same_numbers(self, case, tmp_path):
        folder = families.save(families.made(case.family).bfloat16(), tmp_path, shards=True)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **families.EAGER).eval()
        ours = families.read(folder)
        mixtures = [module for module in ours.modules() if isinstance(module, Mixture)]
        assert mixtures and all(x.dtype is torch.bfloat16 for m in mixtures for x in m.matrices().values())
        families.logits_are_the_same(theirs, ours)


@pytest.mark.parametrize("family", CASES, ids=map(str, CASES))
def test_what_a_config_leaves_out_is_what_transformers_takes(family, tmp_path):
    """Each key once: the config, or what is wrong with it, is that of all that transformers makes of the rest; or the
    key is a size that must be there."""
    for name in family.values:
        less = {key: value for key, value in family.values.items() if key != name}
        try:
            AutoConfig.for_model(family.kind, **less).save_pretrained(tmp_path)
        except StrictDataclassError:
            assert isinstance(families.config_of(family, less), str)
            continue
        found = families.config_of(family, less)
        if not (isinstance(found, str) and f" {name} is None, must be" in found):
            whole = json.loads((tmp_path / "config.json").read_text())
            assert found == families.config_of(family, whole), name


def test_a_missing_expert_is_named(tmp_path):
    folder = families.save(families.made(CASES[0]), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    less = {name: x for name, x in tensors.items() if ".2.mlp.experts.6." not in name}
    save_file(less, folder / "model.safetensors", {"format": "pt"})
    with refused(CheckpointError, "model.layers.2.mlp.experts.6.gate_proj.weight"):
        families.read(folder)


@pytest.mark.parametrize(
    ("index", "change", "named"),
    [
        (0, {"num_experts": 0}, ["num_experts", 0]),
        (0, {"num_experts_per_tok": 8}, ["num_experts_per_tok", 8]),
        (0, {"clip_qkv": -1.0}, ["clip_qkv", -1.0]),
        (0, {"norm_topk_prob": 3}, ["norm_topk_prob", 3]),
        (0, {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        (0, {"sliding_window": 5}, ["sliding_window", 5]),
        (2, {"num_local_experts": -1}, ["num_local_experts", -1]),
        (2, {"decoder_sparse_step": 0}, ["decoder_sparse_step", 0]),
        (2, {"shared_expert_intermediate_size": 5}, ["shared_expert_intermediate_size", 5]),
        (4, {"num_experts_per_tok": 0}, ["num_experts_per_tok", 0]),
        (4, {"num_local_experts": 70_000}, ["num_local_experts", 70000]),
    ],
)
def test_an_option_that_no_model_of_ours_has_is_named(index, change, named, tmp_path):
    config = AutoConfig.for_model(CASES[index].kind, **CASES[index].values)
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config.to_json_string()) | change))
    with refused(CheckpointError, *named):
        families.read(tmp_path)


# ---------------------------------------------------------------- mixtures of which other families are made


def parts_of(theirs: torch.nn.Module, folder: Path, **values: Any) -> Source:
    """A folder with one network as transformers has it in memory, under the names of its files."""
    source = Source(folder, values)
    for name, x in theirs.state_dict().items():
        if "experts.gate_up_proj" in name:
            for e, both in enumerate(x):
                for part, matrix in zip(("gate", "up"), both.chunk(2), strict=True):
                    source.tensors[f"mlp.experts.{e}.{part}_proj.weight"] = matrix.clone
        elif re.search(r"(^|\.)experts\.(up|down)_proj", name):
            for e, matrix in enumerate(x):
                source.tensors[f"mlp.experts.{e}.{name.split('.')[-1]}.weight"] = matrix.clone
        else:
            source.tensors[f"mlp.{name}"] = x.clone
    return source


def layer_of(config: MixtureConfig, tensors: dict[str, torch.Tensor]) -> Mixture:
    ours = Mixture(32, config).double()
    ours.load_state_dict({name.removeprefix("ffn."): x for name, x in tensors.items()})
    return ours.eval()


@torch.no_grad()
@pytest.mark.parametrize("normed", [True, False])
def test_a_mixture_with_a_gated_shared_network_is_that_of_qwen3_next(normed, tmp_path):
    values = OUTER | {
        "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 19, "norm_topk_prob": normed,
        "shared_expert_intermediate_size": 13,
    }  # fmt: skip
    settings = AutoConfig.for_model("qwen3_next", **values)
    settings._experts_implementation = "eager"
    theirs = modeling_qwen3_next.Qwen3NextSparseMoeBlock(settings)
    families.redraw(theirs, 1)
    source = parts_of(theirs, tmp_path, **values)
    first, *_ = decoder.networks(source, 4, normed=True, shared=512)
    assert first == MixtureConfig(19, 7, 3, normed=normed, shared=13, shared_gate=True)
    ours = layer_of(first, mixture.weights(source, "mlp", "ffn", 32, first))
    source.done()
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    with families.in_double():
        families.near(ours(x)[0], theirs.double()(x), families.DOUBLE)


@torch.no_grad()
@pytest.mark.parametrize("normed", [True, False])
def test_a_mixture_of_groups_without_gates_is_that_of_nemotron_h(normed, tmp_path):
    values = OUTER | {
        "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 19, "norm_topk_prob": normed,
        "moe_shared_expert_intermediate_size": 13, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    }  # fmt: skip
    settings = AutoConfig.for_model("nemotron_h", **values)
    settings._experts_implementation = "eager"
    theirs = modeling_nemotron_h.NemotronHMoE(settings)
    families.redraw(theirs, 1)
    source = parts_of(theirs, tmp_path, **values)
    config = mixture.nemotron(source)
    ours = layer_of(config, mixture.weights(source, "mlp", "ffn", 32, config, shared="shared_experts"))
    source.done()
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    with families.in_double():
        families.near(ours(x)[0], theirs.double()(x), families.DOUBLE)
    y = torch.cat([ours(x[:, i : i + 1])[0] for i in range(20)], 1)
    families.near(y, ours(x)[0], families.DOUBLE)


def test_of_equal_scores_the_lower_ids_are_chosen():
    layer = Mixture(8, MixtureConfig(4, 64, 5))
    weight_NK, expert_NK = layer.choose(torch.zeros(3, 64))
    assert expert_NK.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert torch.equal(weight_NK, torch.full((3, 5), 0.2))


@pytest.mark.parametrize(
    ("more", "logits", "expert"),
    [({"groups": 2}, [3.0, -9, 1, 1], 0), ({"corrected": True}, [6.0, 0, 0, 0], 1), ({}, [6.0, 0, 0, 0], 0)],
)
def test_a_correction_and_groups_go_by_the_softmax(more, logits, expert):
    layer = Mixture(8, MixtureConfig(4, 4, 1, **more))
    layer.bias_E = torch.tensor([0, 1.1, 0, 0])
    assert layer.choose(torch.tensor([logits]))[1].tolist() == [[expert]]


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_gradients_are_those_of_a_loop(activation):
    config = MixtureConfig(6, 5, 2, normed=False, activation=activation, shared=4, shared_gate=True)
    layer = Mixture(8, config).double()
    families.redraw(layer, 3)
    x = torch.randn(1, 7, 8, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, *_: layer(x)[0], (x, *layer.parameters()), atol=1e-6)
