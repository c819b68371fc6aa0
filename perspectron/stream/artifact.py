"""Artifacts: quantised models as folders, for inference.

DIR/config.json is the header, tokenizer.json the tokenizer. shared.safetensors holds all weights except experts,
experts/layer-NNN.safetensors the experts of one routed layer, to be read one by one. manifest.json holds the size and
SHA-256 of every other file. The folder is written atomically.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import torch
from msgspec import Struct

from perspectron.data.tokenizer import Tokenizer
from perspectron.experts.fetched import Held, PackedMixture, Shard
from perspectron.experts.layer import EXPERTS, RoutedSwiGLU
from perspectron.experts.mixture import ExpertsConfig
from perspectron.experts.router import RoutedConfig
from perspectron.experts.ternary import converted
from perspectron.model.block import Block
from perspectron.model.config import MOST_SIZE, ModelConfig
from perspectron.model.model import LanguageModel
from perspectron.ops.packing import LAYOUTS
from perspectron.quant.convert import pack_expert
from perspectron.quant.linear import QuantEmbedding, QuantLinear
from perspectron.stream import tensors
from perspectron.stream.expert_file import CODES, ExpertLayout, planned, write_layer
from perspectron.stream.tensors import Spec
from perspectron.util.config import dump, load, require
from perspectron.util.errors import ArtifactError, ConfigError
from perspectron.util.files import Record, atomic, read_json, safe_join
from perspectron.util.schema import checked

FORMAT = "perspectron-artifact-1"
CONFIG, TOKENIZER, SHARED, MANIFEST = "config.json", "tokenizer.json", "shared.safetensors", "manifest.json"


@dataclass(frozen=True)
class ExpertFiles:
    """Experts of an artifact. layers: indices of the model's layers that have experts. count: E of each layer.
    distinct: how many of them have weights of their own; the others are aliases of these. shard_bytes: bytes of one
    expert in its file. format: that of its matrices."""

    layers: tuple[int, ...]
    count: int
    distinct: int
    shard_bytes: int
    format: str = CODES

    def __post_init__(self) -> None:
        require(1 <= self.distinct <= self.count, "experts.distinct", self.distinct, f"in 1 … {self.count}")


@dataclass(frozen=True)
class Trained:
    """Source of the held-out text, and the length of a window in training. rule: version of the rules of the split."""

    data: str
    heldout: float
    seq_len: int
    rule: int = 1

    def __post_init__(self) -> None:
        require(0 <= self.heldout < 1, "trained.heldout", self.heldout, "in [0, 1)")
        require(1 <= self.seq_len <= MOST_SIZE, "trained.seq_len", self.seq_len, f"in 1 … {MOST_SIZE:,}")


@dataclass(frozen=True)
class Header:
    """Contents of config.json. quant: format of each packed module, by its name. about: one line for people."""

    format: str
    model: ModelConfig
    tokenizer: str
    quant: dict[str, str]
    experts: ExpertFiles | None = None
    trained: Trained | None = None
    about: str = ""

    def __post_init__(self) -> None:
        require(self.format == FORMAT, "format", self.format, repr(FORMAT))
        for name, format in self.quant.items():
            require(format in LAYOUTS, f"quant.{name[:80]}", format, f"one of {', '.join(LAYOUTS)}")
        routed = {i: b.ffn for i, b in enumerate(self.model.blocks) if isinstance(b.ffn, ExpertsConfig)}
        told = () if self.experts is None else self.experts.layers
        require(tuple(routed) == told, "experts.layers", told, f"those of the model, {tuple(routed)}")
        if self.experts is not None:
            require(len(told) >= 1, "experts.layers", told, "one or more")
            first = routed[told[0]]
            try:
                size = ExpertLayout.of(self.model.d_model, first, self.experts.format).bytes
            except ValueError as error:
                raise ConfigError(f"blocks[{told[0]}].ffn: {error}") from None
            count, shard_bytes = first.count, self.experts.shard_bytes
            require(self.experts.count == count, "experts.count", self.experts.count, f"{count}, the model's")
            require(shard_bytes == size, "experts.shard_bytes", shard_bytes, f"{size}, the model's")

    def files(self) -> list[str]:
        """Names of the folder's files, except the manifest."""
        layers = self.experts.layers if self.experts is not None else ()
        return [CONFIG, TOKENIZER, SHARED, *map(layer_file, layers)]


def layer_file(layer: int) -> str:
    return f"experts/layer-{layer:03d}.safetensors"


def is_artifact(path: Path) -> bool:
    """True if a folder is an artifact, even a damaged one."""
    return (path / SHARED).exists() or ((path / MANIFEST).exists() and (path / "experts").exists())


# ---------------------------------------------------------------- write


def write(
    folder: Path,
    header: Header,
    tokenizer: Tokenizer,
    shared: Mapping[str, Spec],
    experts: Mapping[int, Callable[[Path], object]],
) -> None:
    """Write an artifact. experts: by layer, the function that writes its file. StorageError: not written."""
    with atomic(folder) as temporary:
        temporary.mkdir()
        (temporary / CONFIG).write_text(json.dumps(dump(header), indent=1) + "\n", encoding="utf-8")
        tokenizer.save(temporary / TOKENIZER)
        tensors.write(temporary / SHARED, dict(shared))
        if experts:
            (temporary / "experts").mkdir()
        for layer, save in experts.items():
            save(temporary / layer_file(layer))
        parts = {name: temporary / name for name in header.files()}
        manifest = msgspec.to_builtins(Manifest({name: Record.of(part) for name, part in parts.items()}))
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def expert_files(config: ModelConfig, distinct: int = 0, linear: str = CODES) -> ExpertFiles | None:
    """Description of a model's expert files; None without experts. distinct: how many experts of a layer have weights
    of their own (0: all). linear: format of other matrices, which a mixture's experts have, too. ConfigError: more
    experts than the reader of a file takes, or other ones in one layer than in another."""
    files = None
    for layer, block in enumerate(config.blocks):
        if isinstance(block.ffn, ExpertsConfig):
            codes = CODES if isinstance(block.ffn, RoutedConfig) else linear
            E, layout = block.ffn.count, ExpertLayout.of(config.d_model, block.ffn, codes)
            try:
                planned(layer, layout, weights_of(E, distinct))
            except ValueError as error:
                raise ConfigError(f"blocks[{layer}].ffn: {error}") from None
            first = files or ExpertFiles((), E, distinct or E, layout.bytes, codes)
            one = E, layout.bytes, codes
            alike = (first.count, first.shard_bytes, first.format)
            require(
                one == alike,
                f"blocks[{layer}].ffn: experts, bytes of each, format",
                one,
                f"{alike}, as below",
            )
            files = replace(first, layers=(*first.layers, layer))
    return files


def weights_of(experts: int, distinct: int) -> list[int]:
    """The expert whose weights each expert has: `distinct` of them (0: all) in turns."""
    return [expert % (distinct or experts) for expert in range(experts)]


@torch.no_grad()
def save_artifact(
    model: LanguageModel, tokenizer: Tokenizer, folder: Path, *, trained: Trained | None = None
) -> Header:
    """Write a model whose layers were packed (`quant.convert`). Other weights are kept as they are, except experts,
    which are rounded to ternary if they are not yet; those of a mixture are packed.

    ConfigError: experts are half converted, or too many. StorageError: not written.
    """
    require(converted(model), "experts", "half converted", "float or ternary as a whole")
    quant = {n: m.format for n, m in model.named_modules() if isinstance(m, QuantLinear | QuantEmbedding)}
    formats = [module.format for module in model.modules() if isinstance(module, PackedMixture)]
    files = expert_files(model.config, linear=formats[0] if formats else CODES)
    header = Header(FORMAT, model.config, tokenizer.fingerprint, quant, files, trained)
    shared = {
        name: tensors.spec(tensor)
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[2] not in EXPERTS
    }
    blocks, layers = cast("list[Block]", model.blocks), () if files is None else files.layers
    experts = {layer: partial(_save_layer, layer=layer, module=blocks[layer].ffn) for layer in layers}
    write(folder, header, tokenizer, shared, experts)
    return header


def _save_layer(path: Path, *, layer: int, module: RoutedSwiGLU | PackedMixture) -> None:
    experts, D = range(module.config.count), module.route_proj.in_features
    if isinstance(module, PackedMixture):
        shards = cast(Held, module.source).shards
        layout = ExpertLayout.of(D, module.config, module.format)
        write_layer(path, layer, layout, experts, shards)
        return
    layout = ExpertLayout.of(D, module.config)
    write_layer(path, layer, layout, experts, (Shard(*pack_expert(module, expert)) for expert in experts))


# ---------------------------------------------------------------- read


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag=FORMAT):
    """manifest.json: size and SHA-256 of each file."""

    files: dict[str, Record]

    @property
    def digest(self) -> str:
        """One SHA-256 of all these records."""
        text = json.dumps(msgspec.to_builtins(self.files), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read_header(folder: Path) -> Header:
    """Header of the artifact in `folder`. ArtifactError, naming file and field."""
    path = safe_join(folder, CONFIG)
    values = read_json(path, ArtifactError)
    try:
        return load(Header, values, str(path))
    except ConfigError as error:
        raise ArtifactError(f"{error}" if str(path) in str(error) else f"{path}: {error}") from None


def read_manifest(folder: Path, header: Header) -> Manifest:
    """The manifest of an artifact.

    ArtifactError unless it lists exactly the files that there must be, and they are there in full size, in the folder
    itself: no link leads out of it."""
    path = safe_join(folder, MANIFEST)
    values = read_json(path, ArtifactError)
    manifest = checked(values, Manifest, ArtifactError, path)
    if unlike := manifest.files.keys() ^ set(header.files()):
        name = min(unlike)
        verb = "lacks" if name not in manifest.files else "has"
        raise ArtifactError(
            f"{path}: {verb} {name[:80]!r}, must tell of the files that config.json says there are"
        )
    for name, record in manifest.files.items():
        record.check(folder, name, ArtifactError, contents=False)
    return manifest


def verify(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Read these files whole (None: all files). ArtifactError, naming the file: it is not as it was written."""
    for name in manifest.files if names is None else names:
        manifest.files[name].check(folder, name, ArtifactError)
