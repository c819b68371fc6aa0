"""Adapters of PEFT on the model of transformers: what they compute is what merging writes, and every layer that can be
named learns."""

import copy

import pytest
import torch
from torch import nn

from perspectron import presets
from perspectron.interop.hf import PerspectronConfig, PerspectronForCausalLM
from perspectron.util.errors import ConfigError
from tests.hf.subject import small
from tests.refusals import refused

peft = pytest.importorskip("peft")
IDS = torch.randint(1, 290, (2, 20), generator=torch.Generator().manual_seed(0))
TOKENS = sorted({int(id) for id in IDS[:, ::5].flatten()})
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own, of adapters without tied modules


def model_of(design: str) -> PerspectronForCausalLM:
    """Random weights, none of them at rest."""
    torch.manual_seed(2)
    model = PerspectronForCausalLM(PerspectronConfig.of(small(design)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def adapted(base: PerspectronForCausalLM, config: "peft.PeftConfig") -> nn.Module:
    """The model with adapters that are not at rest."""
    torch.manual_seed(3)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("design", presets.DESIGNS)
def test_an_adapter_of_any_layer_learns_and_is_what_merging_writes(design):
    base = model_of(design)
    plain = logits(base)
    names = [name for name, module in base.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    ends = {
        ".".join(name.split(".")[3:]) or name
        for name in names
        if ".blocks." not in name or ".blocks.1." in name
    }
    for end in sorted(ends):
        model = adapted(base, peft.LoraConfig(r=2, target_modules=[end]))
        learned = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert learned and all("lora_" in name for name in learned)
        computed = logits(model)
        computed.square().mean().backward()
        for name in learned:
            assert model.get_parameter(name).grad.abs().sum() > 0, name
        assert (computed - plain).abs().max() > 1e-3, end
        written = logits(model.merge_and_unload())
        torch.testing.assert_close(written, computed, atol=1e-4, rtol=1e-4, msg=end)


@pytest.mark.parametrize("design", ["gla", "lens", "drm", "transformer"])
def test_chosen_tokens_learn_alone_and_a_tied_head_sees_them(design):
    linear = "flow" if design == "drm" else "o_proj"
    for config in (
        peft.TrainableTokensConfig(token_indices=TOKENS),
        peft.TrainableTokensConfig(token_indices=TOKENS, target_modules=["embedding"]),
        peft.LoraConfig(r=2, target_modules=[linear], trainable_token_indices=TOKENS),
    ):
        base = model_of(design)
        before = base.model.embedding.weight.clone()
        model = peft.get_peft_model(copy.deepcopy(base), config)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
            optimizer.step()
        computed = logits(model)
        whole = model.merge_and_unload()
        after = whole.model.embedding.weight
        assert (after != before).any(-1).nonzero().flatten().tolist() == TOKENS
        torch.testing.assert_close(logits(whole), computed, atol=1e-5, rtol=1e-5)
        if base.config.tie_word_embeddings:
            hidden = whole.model.hidden(IDS)[0]
            torch.testing.assert_close(computed, hidden @ after.T, atol=1e-5, rtol=1e-5)


def test_the_rows_of_a_tied_head_are_those_of_an_embedding_that_is_learned_whole():
    base = model_of("gla")
    model = adapted(base, peft.LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["embedding"]))
    with torch.no_grad():
        model.base_model.model.model.embedding.modules_to_save["default"].weight.mul_(2)
    computed = logits(model)
    torch.testing.assert_close(logits(model.merge_and_unload()), computed, atol=1e-5, rtol=1e-5)


def test_an_adapter_with_a_bias_where_the_layer_has_none_is_not_lost():
    base = model_of("drm")
    model = adapted(base, peft.LoraConfig(r=2, target_modules=["token"], lora_bias=True))
    one = logits(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.default.bias"):
                parameter.add_(1)
    assert (logits(model) - one).abs().max() > 1e-3


def test_input_without_tokens_is_named():
    model = model_of("gla").eval()
    for shape in ((0, 3), (1, 0), (0, 0)):
        ids = torch.zeros(shape, dtype=torch.int64)
        for read in (model, lambda ids: model.generate(ids, max_new_tokens=2)):
            with refused(ConfigError, "ids"):
                read(ids)
        with refused(ConfigError, "inputs_embeds"):
            model(inputs_embeds=torch.zeros(*shape, 32))
    with refused(ValueError, "attention_mask"):
        model(IDS, attention_mask=torch.ones(1, 20))
