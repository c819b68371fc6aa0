"""Artifacts with random weights in full size, to measure the cost of a model before it is trained.

Weights are drawn as bytes of their formats, so that the float model is never in memory. Scales are such that every
matrix gives numbers of order one.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from perspectron.data.tokenizer import Tokenizer
from perspectron.experts.fetched import Shard
from perspectron.experts.mixture import ExpertsConfig, Mixed
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, shape_of
from perspectron.ops import packing, tiles
from perspectron.ops.packing import LAYOUTS, Packed
from perspectron.quant.convert import formats
from perspectron.quant.linear import QuantEmbedding, QuantLinear
from perspectron.stream import tensors
from perspectron.stream.artifact import FORMAT, ExpertFiles, Header, expert_files, weights_of, write
from perspectron.stream.engine import StreamedModel
from perspectron.stream.expert_file import ExpertLayout, write_layer
from perspectron.stream.tensors import Spec
from perspectron.util.config import require
from perspectron.util.errors import StorageError

PIECE = 1 << 24  # bytes drawn at once
MARGIN = 1 << 20  # bytes of an expert file's header
TERNARY = np.array([84 * t4 + low for t4 in range(3) for low in range(81)], np.uint8)
SPREAD = {
    "ternary": (2 / 3) ** 0.5, "2bit": 1.25**0.5, "4bit": 21.25**0.5, "int8": 73.6,
    "4bit32": 128 * 21.25**0.5, "8bit32": 128 * 73.6,
}  # fmt: skip
"""Standard deviation of a weight of scale 1; of a weight in a tile, if its row's unit is 1, its group's scale 128 and,
at 4 bits, its group's offset 64."""


class Draw(NamedTuple):
    """Random matrices of a shape in a format."""

    format: str
    shape: tuple[int, int]
    gain: float = 1.0
    """Standard deviation of the product over that of what it reads."""

    def codes(self, seed: int | tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
        """Rows of random bytes [·, S] that are legal in the format, some rows at a time."""
        (N, K), layout = self.shape, LAYOUTS[self.format]
        (blocks, S), _, _ = packing.sizes(self.format, self.shape)
        random = np.random.Generator(np.random.SFC64(seed))
        if self.format in tiles.FORMATS:
            yield from self._lines(random, blocks)
            return
        whole, step = N // layout.rows, max(1, PIECE // S)
        for start in range(0, whole, step):
            rows = np.frombuffer(random.bytes(min(step, whole - start) * S), np.uint8).reshape(-1, S)
            rows = _legal(rows, self.format)
            if S > K:
                rows = rows.copy() if not rows.flags.writeable else rows
                rows[:, K:] = layout.padding * sum(layout.radix)
            yield rows
        if blocks > whole:  # the last block has rows past the end
            digits = random.integers(layout.lowest, layout.highest, (N % layout.rows, K), np.uint8, True)
            yield packing.pack_codes(torch.from_numpy(digits), self.format).numpy()

    def _lines(self, random: np.random.Generator, blocks: int) -> Iterator[NDArray[np.uint8]]:
        S = -(-self.shape[1] // packing.ALIGN) * packing.ALIGN
        head, rest = tiles.length(self.format, S)
        scales = np.full(head, 128, np.uint8)
        if self.format == "4bit32":
            scales.reshape(-1, 2, tiles.ROWS)[:, 1] = 64
        step = max(1, PIECE // rest)
        for start in range(0, blocks, step):
            rows = np.frombuffer(random.bytes(min(step, blocks - start) * rest), np.uint8).reshape(-1, rest)
            yield np.concatenate([np.tile(scales, (len(rows), 1)), _legal(rows, self.format)], 1)

    def scales(self) -> Tensor:
        """Scales, as the format keeps them."""
        scale = self.gain / (SPREAD[self.format] * math.sqrt(self.shape[1]))
        _, shape, dtype = packing.sizes(self.format, self.shape)
        layout, filled = LAYOUTS[self.format], torch.full(shape, scale, dtype=dtype)
        if layout.group == packing.GROUP:
            filled[..., layout.rows :] *= layout.highest / 2
            past = -self.shape[0] % layout.rows
            if past:  # rows past the end weigh nothing
                filled[-1, :, layout.rows - past : layout.rows] = 0
                filled[-1, :, 2 * layout.rows - past :] = 0
        return filled

    def packed(self, seed: int | tuple[int, ...]) -> Packed:
        codes = np.concatenate(list(self.codes(seed)))
        return Packed(torch.from_numpy(codes), self.scales(), self.format, self.shape)


def synthesize(
    config: ModelConfig,
    folder: Path,
    tokenizer: Callable[[], Tokenizer],
    *,
    experts: int,
    linear: str = "2bit",
    seed: int = 0,
) -> Header:
    """Write an artifact of `config` with random weights; each routed layer stores `experts` of its own, the others are
    the same as these, in turns. tokenizer: called once it is sure that there is room.

    ConfigError: more experts than there are, or no routed layers. StorageError: no room on the disk.
    """
    routed = [b.ffn for b in config.blocks if isinstance(b.ffn, ExpertsConfig)]
    require(len(routed) > 0, "model", config.name, "one with routed layers")
    count = routed[0].count
    require(1 <= experts <= count, "experts", experts, f"from 1 to {count}")
    files = expert_files(config, experts, linear)
    assert files is not None
    model = shape_of(config)
    about = f"random weights; {experts} of {count} experts in a layer are distinct, the others are aliases of them"
    header = Header(FORMAT, config, "", formats(model, linear), files, None, about)
    shared = _shared(header, seed)
    need = sum(spec.bytes for spec in shared.values()) + len(routed) * (experts * files.shard_bytes + MARGIN)
    free = shutil.disk_usage(next(parent for parent in folder.resolve().parents if parent.exists())).free
    if need > free:
        raise StorageError(f"{folder}: needs {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free")
    layers = {
        layer: partial(_layer, layer=layer, files=files, config=config, seed=seed) for layer in files.layers
    }
    made = tokenizer()
    header = replace(header, tokenizer=made.fingerprint)
    write(folder, header, made, shared, layers)
    return header


def _shared(header: Header, seed: int) -> dict[str, Spec]:
    """Specs of all weights but the experts'."""
    with torch.device("meta"):
        model = StreamedModel(header)
    specs, writes = dict[str, Spec](), (2 * len(model.blocks)) ** -0.5
    for index, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, QuantLinear | QuantEmbedding):
            gain = writes if name.endswith(("o_proj", "down_proj")) else 1.0
            if isinstance(module, QuantEmbedding):
                gain = header.model.embedding_std * math.sqrt(module.shape[1])
            draw = Draw(module.format, module.shape, gain)
            chunks = partial(draw.codes, seed + 7919 * index)
            specs[f"{name}.codes"] = Spec(module.codes.dtype, tuple(module.codes.shape), chunks)
            specs[f"{name}.scales"] = tensors.spec(draw.scales())
    _begin(model, torch.Generator().manual_seed(seed))
    return {
        name: tensors.spec(tensor) for name, tensor in model.state_dict().items() if name not in specs
    } | specs


@torch.no_grad()
def _begin(model: LanguageModel, random: torch.Generator) -> None:
    """Initialise the tensors that are not packed: norms to 1, a router's matrix to normal numbers, the rest to 0 or by
    its module's `init_weights`."""
    for module in model.modules():
        packed = ("codes", "scales") if isinstance(module, QuantLinear | QuantEmbedding) else ()
        tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and name not in packed:
                    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
                    table[name] = nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made
        if isinstance(module, nn.RMSNorm | nn.LayerNorm):
            module.weight.fill_(1)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(generator=random)
    for module in model.modules():
        if isinstance(module, Mixed):
            for router in (module.route_proj, getattr(module, "share_proj", None)):
                if isinstance(router, nn.Linear):  # logits of order one, so that no expert gets everything
                    router.weight.div_(router.in_features**0.5)
        if callable(own := getattr(module, "init_weights", None)):
            own(random)


def _layer(path: Path, *, layer: int, files: ExpertFiles, config: ModelConfig, seed: int) -> None:
    ffn = config.blocks[layer].ffn
    assert isinstance(ffn, ExpertsConfig)
    layout, experts = ExpertLayout.of(config.d_model, ffn, files.format), range(files.distinct)
    gains = (*(1.0,) * (len(layout.shapes) - 1), (2 * len(config.blocks)) ** -0.5)

    def shard(expert: int) -> Shard:
        parts = enumerate(zip(layout.shapes, gains, strict=True))
        matrices = [Draw(layout.codes, *part).packed((seed, layer, expert, i)) for i, part in parts]
        return Shard(matrices[0] if ffn.gated else None, *matrices[-2:])

    write_layer(path, layer, layout, weights_of(ffn.count, files.distinct), map(shard, experts))


def _legal(bytes_: NDArray[np.uint8], format: str) -> NDArray[np.uint8]:
    """Random bytes as bytes of the format; 13 of the ternary ones come twice as often."""
    if format == "ternary":
        return np.take(np.resize(TERNARY, 256), bytes_)
    return np.maximum(bytes_, 1) if LAYOUTS[format].zero == 128 else bytes_
