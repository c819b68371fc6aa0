"""Matrices of 16 bits in a model that computes in float32: half the memory, and the same results as with the matrices
in float32. Only embeddings, linear layers and the experts of mixtures are kept in 16 bits; vectors are float32.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.experts.mixture import Mixture
from perspectron.model.heads import LinearHead, TokenEmbedding
from perspectron.ops.dispatch import recorder

DTYPES = (torch.bfloat16, torch.float16)
ROWS = 1 << 12
"""Rows of a head, or of an embedding used as one, that are widened at once."""


class HalfLinear(nn.Linear):
    """y = W x + b in x's dtype; W is widened when it is used."""

    widens = True

    def forward(self, x: Tensor) -> Tensor:
        if (tape := recorder()) is not None:
            recorded: Tensor = tape.widened(x, self.weight, self.bias)
            return recorded
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class HalfHead(HalfLinear, LinearHead):
    """A head whose matrix is widened ROWS rows at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return logits(x, self.weight)


class HalfEmbedding(TokenEmbedding):
    """An embedding whose rows are widened to float32 when they are looked up."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return logits(hidden, self.weight)


HALVES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: HalfLinear, LinearHead: HalfHead, TokenEmbedding: HalfEmbedding,
}  # fmt: skip
WHOLE = {half: whole for whole, half in HALVES.items()}


def logits(hidden: Tensor, rows_VD: Tensor) -> Tensor:
    """Logits [..., V] of hidden states [..., D]: the products with every row."""
    if (tape := recorder()) is not None:
        recorded: Tensor = tape.widened(hidden, rows_VD, None)
        return recorded
    return torch.cat([F.linear(hidden, rows.to(hidden.dtype)) for rows in rows_VD.split(ROWS)], -1)


def keep(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Prepare a model on the meta device for these tensors: where a matrix has 16 bits, the model's gets them too;
    other tensors of 16 bits are cast to the model's dtypes, in the dict itself."""
    for name, module in model.named_modules():
        for own, parameter in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            tensor = tensors.get(f"{name}.{own}" if name else own)
            if tensor is None or not (tensor.is_floating_point() and parameter.is_floating_point()):
                continue
            if tensor.dtype in DTYPES and own == "weight" and type(module) in HALVES:
                module.__class__ = HALVES[type(module)]
                module.weight = nn.Parameter(parameter.to(tensor.dtype))
            elif tensor.dtype in DTYPES and isinstance(module, Mixture) and own in module.matrices():
                setattr(module, own, nn.Parameter(parameter.to(tensor.dtype)))  # widens what it uses
            elif tensor.dtype in DTYPES:
                tensors[f"{name}.{own}" if name else own] = tensor.to(parameter.dtype)


def widen(model: nn.Module) -> None:
    """Widen the model to float32, except experts, which are widened one by one when they are used."""
    for module in model.modules():
        if type(module) in WHOLE:
            module.__class__ = WHOLE[type(module)]
            weight = cast(nn.Parameter, module.weight)
            module.weight = nn.Parameter(weight.detach().float(), weight.requires_grad)
