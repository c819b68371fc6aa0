"""Artifacts of version 0.1 rewritten: their expert files had a format of their own, .experts.

    0   magic, 8 bytes
    8   u32 version, u32 bytes of JSON, two CRCs
    24  JSON, zeros to the next page, then each stored expert on its own pages, as in an expert file of today

The JSON lists the kind of each expert: "full", at an offset; "alias", the same as a full one; or "delta", its changes
from a full one, which is read no more.
"""

import json
import math
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path

from perspectron.config import ModelConfig
from perspectron.data.tokenizer import Tokenizer
from perspectron.errors import ArtifactError
from perspectron.experts.router import RoutedConfig
from perspectron.stream import artifact, tensors
from perspectron.stream.artifact import SHARED, TOKENIZER, Header, old_layer_file
from perspectron.stream.expert_file import ExpertLayout, Shard, write_layer
from perspectron.stream.tensors import PAGE, aligned

MAX_JSON = 1 << 20


def upgrade(folder: Path, out: Path) -> Header:
    """Write the artifact of 0.1 in `folder` as one of today; the weights stay bit for bit.

    ArtifactError: it is damaged (every file is checked by its SHA-256), or has experts that are stored as changes.
    StorageError: not written.
    """
    header = artifact.read_header(folder, old=True)
    artifact.verify(folder, artifact.read_manifest(folder, header, old=True))
    weights, _ = tensors.read(folder / SHARED)
    shared = {name: tensors.spec(tensor) for name, tensor in weights.items()}
    layers = header.experts.layers if header.experts is not None else ()
    experts = {
        layer: partial(_layer, layer=layer, model=header.model, source=folder / old_layer_file(layer))
        for layer in layers
    }
    artifact.write(out, header, Tokenizer.load(folder / TOKENIZER), shared, experts)
    return header


def _layer(path: Path, *, layer: int, model: ModelConfig, source: Path) -> None:
    try:
        with source.open("rb") as file:
            _rewrite(path, layer, model, source, file)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{source}: no expert file of 0.1 ({type(error).__name__}: {error})") from None


def _rewrite(path: Path, layer: int, model: ModelConfig, source: Path, file: BufferedReader) -> None:
    length = int.from_bytes(file.read(16)[12:], "little")
    file.seek(24)
    fields = json.loads(file.read(min(length, MAX_JSON)))
    ffn = model.blocks[layer].ffn
    if not isinstance(ffn, RoutedConfig):
        raise ValueError(f"layer {layer} of the model has no experts")
    experts, entries = math.prod(ffn.torus), fields["shards"]
    must = {"layer": layer, "experts": experts, "d_model": model.d_model, "hidden": ffn.hidden}
    for name, value in must.items():
        if fields[name] != value:
            raise ValueError(f"{name} = {fields[name]!r}, must be {value}, the model's")
    layout = ExpertLayout(model.d_model, ffn.hidden)
    if any(entry["kind"] == "delta" for entry in entries):
        raise ArtifactError(
            f"{source}: experts stored as changes (--deltas of 0.1) are read no more; quantize the run again"
        )
    of = {entry["expert"]: entry.get("of", entry["expert"]) for entry in entries}
    places = {entry["expert"]: entry["offset"] for entry in entries if entry["kind"] == "full"}
    if len(of) != experts or any(place < PAGE or place % PAGE for place in places.values()):
        raise ValueError("experts are missing, or not on pages")
    if len(set(places.values())) != len(places):
        raise ValueError("two experts in one place")
    size = source.stat().st_size
    for expert, place in places.items():
        if place + layout.bytes > size:
            raise ArtifactError(f"{source}: ends within expert {expert}")
    # An alias could stand for a later expert: now the first of those that are the same is the stored one.
    first = {stored: min(expert for expert in of if of[expert] == stored) for stored in places}
    weights_of = [first[of[expert]] for expert in range(experts)]

    def shards() -> Iterator[Shard]:
        for stored in sorted(places, key=lambda stored: first[stored]):
            buffer = aligned(layout.bytes)
            file.seek(places[stored])
            if file.readinto(buffer.data) != layout.bytes:
                raise ArtifactError(f"{source}: ends within expert {stored}")
            yield layout.shard(buffer)

    write_layer(path, layer, layout, weights_of, shards())
