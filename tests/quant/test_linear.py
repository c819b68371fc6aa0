"""Packed modules in the place of torch's own."""

import pytest
import torch
from torch import nn

from perspectron.ops.dispatch import affine
from perspectron.ops.packing import LAYOUTS, dequantise
from perspectron.quant.formats import quantise
from perspectron.quant.linear import QuantEmbedding, QuantLinear, bytes_of
from perspectron.util.errors import ConfigError
from tests.refusals import refused

every_format = pytest.mark.parametrize("format", LAYOUTS)
CASTS = {
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "to": lambda m: m.to("cpu", torch.float64),
}


def linear(bias=True, seed=0) -> nn.Linear:
    draw = torch.Generator().manual_seed(seed)
    made = nn.Linear(70, 13, bias)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.1, generator=draw)
    return made


@every_format
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_layer_of_its_weights(format, bias):
    whole = linear(bias)
    matrix = quantise(whole.weight, format)
    own = QuantLinear.of(matrix, whole.bias)
    assert (own.in_features, own.out_features, own.format) == (70, 13, format)
    assert torch.equal(own.weight, dequantise(matrix)) and own.weight.dtype == torch.float32
    x = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(1))
    expected = nn.functional.linear(x, own.weight, whole.bias)
    with torch.inference_mode():
        y = own(x)
        assert own(x.bfloat16()).dtype == torch.bfloat16
    assert (y - expected).norm() < 0.02 * expected.norm()
    assert not any(parameter.requires_grad for parameter in own.parameters())
    assert set(own.state_dict()) == {"codes", "scales"} | ({"bias"} if bias else set())


@every_format
def test_code_that_calls_no_layer_reads_the_matrix_as_it_is(format):
    whole = linear()
    own = QuantLinear.of(quantise(whole.weight, format), whole.bias)
    weight, bias = affine(own)
    assert torch.equal(weight, own.weight) and bias is own.bias


@every_format
def test_loaded_it_is_the_same(format):
    whole = linear()
    own = QuantLinear.of(quantise(whole.weight, format), whole.bias)
    for made in (QuantLinear(70, 13, format), QuantLinear(70, 13, format).to("meta")):
        made.load_state_dict(own.state_dict(), assign=True)
        x = torch.randn(4, 70)
        with torch.inference_mode():
            assert torch.equal(made(x), own(x))
    with pytest.raises(RuntimeError, match="size mismatch"):
        QuantLinear(71, 14, format).load_state_dict(own.state_dict())


@every_format
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_cast_leaves_codes_and_scales(format, cast):
    whole = linear()
    own = QuantLinear.of(quantise(whole.weight, format), whole.bias)
    codes, scales = own.codes, own.scales
    cast(nn.Sequential(own))
    assert torch.equal(own.codes, codes) and torch.equal(own.scales, scales)
    assert own.codes.dtype == torch.uint8 and own.scales.dtype == scales.dtype
    assert own.bias.dtype != torch.float32
    own.to("meta")
    assert own.codes.is_meta and own.scales.is_meta and own.scales.dtype == scales.dtype


@pytest.mark.parametrize("format", ["int8", "8bit32"])
def test_a_packed_embedding_is_that_of_its_weights(format):
    table = nn.Embedding(50, 20)
    own = QuantEmbedding.of(quantise(table.weight, format))
    ids = torch.tensor([[3, 49, 3], [0, 1, 2]])
    rows = own(ids)
    assert rows.shape == (2, 3, 20) and torch.equal(rows, own.weight[ids])
    assert (rows - table(ids)).abs().max() < table.weight.abs().max() / 253
    x = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = own.logits(x)
    assert logits.shape == (2, 3, 50)
    assert (logits - x @ table.weight.T).norm() < 0.02 * logits.norm()
    for beyond in (-1, 50):
        with pytest.raises(IndexError, match="out of range"):
            own(torch.tensor([3, beyond]))
    with refused(ConfigError, "format", "2bit"):
        QuantEmbedding(50, 20, "2bit")


def test_bytes_are_counted_by_kind():
    whole = linear()
    model = nn.Sequential(QuantLinear.of(quantise(whole.weight, "2bit"), whole.bias), nn.RMSNorm(13))
    found = bytes_of(model)
    assert found == {"2bit": 4 * 128 + 4 * 1 * 8 * 2, "float32": 4 * 13 + 4 * 13}
    assert sum(found.values()) == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert bytes_of(model[0]) == {"2bit": 4 * 128 + 4 * 1 * 8 * 2, "float32": 4 * 13}
