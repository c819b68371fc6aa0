"""Modules with packed matrices (`perspectron.ops.packing`) that replace torch's own; for inference only.

Shapes: N rows (outputs), K columns (inputs), V vocabulary, D width.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.experts.mixture import Mixed
from perspectron.experts.router import Routed
from perspectron.ops import packed, tiles
from perspectron.ops.packing import LAYOUTS, Packed, columns, dequantise, sizes
from perspectron.util.config import require
from perspectron.util.errors import ConfigError

EMBEDDED = ("int8", "8bit32")
"""Formats that an embedding can have."""


class _Matrix(nn.Module):
    """Module with a packed matrix in the buffers codes and scales, which keep their dtypes when the model is cast."""

    codes: Tensor
    scales: Tensor

    def __init__(self, shape: tuple[int, int], format: str) -> None:
        super().__init__()
        self.format, self.shape = format, shape
        codes_shape, scales_shape, dtype = sizes(format, shape)
        self.register_buffer("codes", torch.empty(codes_shape, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(scales_shape, dtype=dtype))

    @property
    def packed(self) -> Packed:
        return Packed(self.codes, self.scales, self.format, self.shape)

    @property
    def weight(self) -> Tensor:
        """The matrix in float32, dequantised anew each time."""
        return dequantise(self.packed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scales = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.codes.device)
        return self


class QuantLinear(_Matrix):
    """y = W x + b on x rounded to 8 bits; the bias is float."""

    def __init__(self, in_features: int, out_features: int, format: str, bias: bool = True) -> None:
        super().__init__((out_features, in_features), format)
        self.in_features, self.out_features = in_features, out_features
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @classmethod
    def of(cls, matrix: Packed, bias: Tensor | None = None) -> Self:
        """A layer with this matrix and bias, not copied."""
        N, K = matrix.shape
        with torch.device("meta"):
            made = cls(K, N, matrix.format, bias is not None)
        made.codes, made.scales = matrix.codes, matrix.scales
        if bias is not None:
            made.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return made

    def forward(self, x: Tensor) -> Tensor:
        y = packed.linear(x, self.packed)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.format}, bias={self.bias is not None}"


class QuantEmbedding(_Matrix):
    """Rows in 8 bits, to look up and, as a tied head, to multiply with."""

    def __init__(self, num_embeddings: int, embedding_dim: int, format: str = "int8") -> None:
        require(format in EMBEDDED, "format", format, f"{' or '.join(EMBEDDED)} for an embedding")
        super().__init__((num_embeddings, embedding_dim), format)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    @classmethod
    def of(cls, matrix: Packed) -> Self:
        """A layer with this matrix, not copied."""
        with torch.device("meta"):
            made = cls(*matrix.shape, matrix.format)
        made.codes, made.scales = matrix.codes, matrix.scales
        return made

    def forward(self, ids: Tensor) -> Tensor:
        """[..., D] in float32 of ids [...]."""
        # As indices, negative ids would count from the end.
        unit, zero = F.embedding(ids, self.scales[:, None]), LAYOUTS[self.format].padding
        if self.format == "int8":
            return (F.embedding(ids, self.codes)[..., : self.embedding_dim].float() - zero) * unit
        code, scale = (
            F.embedding(at, self.codes.view(-1, 1)).squeeze(-1).float()
            for at in tiles.places(ids, columns(self.packed))
        )
        numbers = (code.unflatten(-1, (-1, tiles.GROUP)) - zero) * scale[..., None]
        return numbers.flatten(-2)[..., : self.embedding_dim] * unit

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]: their products with every row."""
        return packed.linear(hidden, self.packed)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.format}"


def bytes_of(module: nn.Module, *, without: Collection[str] = ()) -> dict[str, int]:
    """Bytes of parameters and buffers, by format of packed matrices, else by dtype. without: names, in their module, of
    tensors that do not count."""
    found = Counter[str]()
    for name, tensor in (*module.named_buffers(), *module.named_parameters()):
        owner, _, own = name.rpartition(".")
        if own in without:
            continue
        part = module.get_submodule(owner)
        packed = isinstance(part, _Matrix) and own in ("codes", "scales")
        found[str(part.format if packed else tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    return found


def is_router(model: nn.Module, name: str) -> bool:
    """True if the matrix of this name is a router's."""
    parent, _, last = name.rpartition(".")
    return last == "route_proj" and isinstance(model.get_submodule(parent), Routed | Mixed)


def make_room(model: nn.Module, formats: Mapping[str, str]) -> None:
    """Replace a model's matrices, by name, with empty packed ones. ConfigError: a name is of no such matrix."""
    for name, format in formats.items():
        parent, _, last = name.rpartition(".")
        try:
            module = model.get_submodule(name)
        except AttributeError:
            module = None
        made: nn.Module
        if isinstance(module, nn.Linear) and not is_router(model, name):
            made = QuantLinear(module.in_features, module.out_features, format, module.bias is not None)
        elif isinstance(module, nn.Embedding):
            made = QuantEmbedding(module.num_embeddings, module.embedding_dim, format)
        else:  # also a router, which is never packed
            raise ConfigError(f"quant key = {name[:80]!r}, must be a matrix of the model")
        setattr(model.get_submodule(parent), last, made)
