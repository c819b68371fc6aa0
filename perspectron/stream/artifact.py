"""A model in few bits, as a folder: what generating needs and training does not.

DIR/config.json says what it is; tokenizer.json; shared.safetensors holds all weights but the experts';
experts/layer-NNN.experts those of one routed layer, to be read one by one; manifest.json the size and SHA-256 of each
of the others. The folder appears whole or not at all.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from perspectron.block import Block
from perspectron.config import ModelConfig, dump, load, require
from perspectron.data.tokenizer import Tokenizer
from perspectron.errors import ArtifactError, ConfigError
from perspectron.experts import RoutedConfig, RoutedSwiGLU
from perspectron.files import atomic, read_json, safe_join, sha256
from perspectron.model import LanguageModel
from perspectron.ops.packing import LAYOUTS
from perspectron.quant.convert import pack_expert
from perspectron.quant.linear import QuantEmbedding, QuantLinear
from perspectron.quant.ternary import converted
from perspectron.routing import cells, hops
from perspectron.stream import tensors
from perspectron.stream.experts import TRAINING, WEIGHTS
from perspectron.stream.format import ExpertLayout, Shard
from perspectron.stream.tensors import Spec
from perspectron.stream.write import CloseTo, SameAs, write_layer

FORMAT = "perspectron-artifact-1"
CONFIG, TOKENIZER, SHARED, MANIFEST = "config.json", "tokenizer.json", "shared.safetensors", "manifest.json"


@dataclass(frozen=True)
class ExpertFiles:
    """layers: of the model, those with experts. count: E of each. distinct: how many of them have weights of their
    own; the others are the same under another name. shard_bytes: of one expert in its file."""

    layers: tuple[int, ...]
    count: int
    distinct: int
    shard_bytes: int


@dataclass(frozen=True)
class Trained:
    """Where held-out text can be had, and the length of a window in training."""

    data: str
    heldout: float
    seq_len: int


@dataclass(frozen=True)
class Header:
    """config.json. quant: format of each module that is packed, by its name. about: one line for people."""

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
            require(format in LAYOUTS, f"quant.{name}", format, f"one of {', '.join(LAYOUTS)}")

    def files(self) -> list[str]:
        """What the folder holds beside the manifest."""
        layers = self.experts.layers if self.experts is not None else ()
        return [CONFIG, TOKENIZER, SHARED, *map(layer_file, layers)]


def layer_file(layer: int) -> str:
    return f"experts/layer-{layer:03d}.experts"


def is_artifact(path: Path) -> bool:
    """Whether a folder is one, be it damaged."""
    return (path / SHARED).exists() or ((path / MANIFEST).exists() and (path / "experts").exists())


# ---------------------------------------------------------------- write


def write(
    folder: Path,
    header: Header,
    tokenizer: Tokenizer,
    shared: Mapping[str, Spec],
    experts: Mapping[int, Callable[[Path], object]],
) -> None:
    """Write an artifact. experts: by layer, what writes its file. StorageError when the disk is full."""
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
        files = {name: {"bytes": part.stat().st_size, "sha256": sha256(part)} for name, part in parts.items()}
        text = json.dumps({"format": FORMAT, "files": files}, indent=1)
        (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")


@torch.no_grad()
def save_artifact(
    model: LanguageModel,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    deltas: bool = False,
    trained: Trained | None = None,
    about: str = "",
) -> Header:
    """Write a model whose layers were packed (`quant.convert`); what was not is kept as it is, but experts,
    which become ternary, by rounding where they are not yet. deltas: store an expert as its changes from a lattice
    neighbour where that is smaller.

    ConfigError for experts that are half converted. StorageError: not written.
    """
    require(converted(model), "experts", "half converted", "float or ternary as a whole")
    quant = {n: m.format for n, m in model.named_modules() if isinstance(m, QuantLinear | QuantEmbedding)}
    routed = {
        layer: block.ffn
        for layer, block in enumerate(cast("list[Block]", model.blocks))
        if isinstance(block.config.ffn, RoutedConfig)
    }
    files = None
    if routed:
        first = next(iter(routed.values())).config
        E = math.prod(first.torus)
        size = ExpertLayout(model.config.d_model, first.hidden).bytes
        files = ExpertFiles(tuple(routed), E, E, size)
    header = Header(FORMAT, model.config, tokenizer.fingerprint, quant, files, trained, about)
    left_out = (*WEIGHTS, *TRAINING)
    shared = {
        name: tensors.spec(tensor)
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[2] not in left_out
    }
    experts = {
        layer: partial(_save_layer, layer=layer, module=m, deltas=deltas) for layer, m in routed.items()
    }
    write(folder, header, tokenizer, shared, experts)
    return header


def _save_layer(path: Path, *, layer: int, module: RoutedSwiGLU, deltas: bool) -> None:
    torus = module.config.torus
    cell_EA = cells(torus)
    near_EE = hops(torus) == 1
    even_E = cell_EA.sum(1) % 2 == 0

    def shard(expert: int) -> Shard:
        return Shard(*pack_expert(module, expert))

    def shards() -> Iterator[tuple[int, Shard | SameAs | CloseTo]]:
        # A chessboard: every odd cell has an even neighbour, which is stored in full.
        for expert in sorted(range(len(cell_EA)), key=lambda e: bool(deltas and not even_E[e])):
            if deltas and not even_E[expert]:
                of = int((near_EE[expert] & even_E).nonzero()[0])
                yield expert, CloseTo(of, shard(expert))
            else:
                yield expert, shard(expert)

    layout = ExpertLayout(module.route_proj.in_features, module.config.hidden)
    write_layer(path, layer, layout, len(cell_EA), shards())


# ---------------------------------------------------------------- read


@dataclass(frozen=True)
class Manifest:
    """files: size and SHA-256 of each. digest: of them all."""

    files: dict[str, dict[str, Any]]
    digest: str


def read_header(folder: Path) -> Header:
    """ArtifactError, naming file and field, unless config.json is one of ours."""
    path = safe_join(folder, CONFIG)
    try:
        return load(Header, read_json(path, ArtifactError), str(path))
    except ConfigError as error:
        raise ArtifactError(f"{error}" if str(path) in str(error) else f"{path}: {error}") from None


def read_manifest(folder: Path, header: Header) -> Manifest:
    """ArtifactError unless it tells of exactly the files that there must be, and they are there in full size, in the
    folder itself: no link leads out of it."""
    path = safe_join(folder, MANIFEST)
    read = read_json(path, ArtifactError)
    try:
        format, files = read["format"], read["files"]
        known = {
            name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for name, entry in files.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ArtifactError(f"{path}: not a manifest") from None
    if format != FORMAT:
        raise ArtifactError(f"{path}: format {format!r}, must be {FORMAT!r}")
    if unlike := set(known) ^ set(header.files()):
        name = min(unlike)
        verb = "lacks" if name not in known else "has"
        raise ArtifactError(
            f"{path}: {verb} {name!r}, must tell of the files that config.json says there are"
        )
    for name, entry in known.items():
        part = safe_join(folder, name)
        if not part.is_file():
            raise ArtifactError(f"{part}: no such file")
        if part.stat().st_size != entry["bytes"]:
            raise ArtifactError(f"{part}: {part.stat().st_size} bytes, must be {entry['bytes']}")
    text = json.dumps(known, sort_keys=True)
    return Manifest(known, hashlib.sha256(text.encode()).hexdigest())


def expect(path: Path, found: str, entry: Mapping[str, Any]) -> None:
    """ArtifactError unless a file's SHA-256 is the one in the manifest."""
    if found != entry["sha256"]:
        raise ArtifactError(f"{path}: damaged, its SHA-256 is not {entry['sha256'][:12]}…")


def verify(folder: Path, manifest: Manifest) -> None:
    """Read every byte there is; ArtifactError, naming the file, for one that is not as it was written."""
    for name, entry in manifest.files.items():
        expect(folder / name, sha256(folder / name), entry)
