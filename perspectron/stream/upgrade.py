"""Converting artifacts of version 0.1, whose expert files had another format (.experts).

    0   magic, 8 bytes
    8   u32 version, u32 bytes of JSON, two CRCs
    24  JSON, zeros to the next page, then each stored expert on its own pages, as in an expert file of today

The JSON lists the kind of each expert: "full", at an offset; "alias", the same as a full one; or "delta", its changes
from a full one, which is read no more.
"""

import math
import os
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

from perspectron.config import ModelConfig
from perspectron.errors import ArtifactError, DataError
from perspectron.experts.router import RoutedConfig
from perspectron.files import open_file, parse_json, safe_join
from perspectron.stream import artifact, tensors
from perspectron.stream.artifact import Header, old_layer_file
from perspectron.stream.engine import load_shared
from perspectron.stream.expert_file import ExpertLayout, Shard, write_layer
from perspectron.stream.tensors import PAGE, aligned
from perspectron.tensors import MAX_SIZE

MAX_JSON = 1 << 20


def upgrade(folder: Path, out: Path) -> Header:
    """Write the artifact of 0.1 in `folder` as one of today; the weights stay bit for bit.

    ArtifactError: it is damaged (every file is checked by its SHA-256), or has experts that are stored as changes.
    StorageError: not written.
    """
    header = artifact.read_header(folder, old=True)
    manifest = artifact.read_manifest(folder, header, old=True)
    artifact.verify(folder, manifest)
    weights, tokenizer = load_shared(folder, header, manifest, check=True)
    shared = {name: tensors.spec(tensor) for name, tensor in weights.state_dict().items()}
    layers = header.experts.layers if header.experts is not None else ()
    experts = {
        layer: partial(
            _layer, layer=layer, model=header.model, source=safe_join(folder, old_layer_file(layer))
        )
        for layer in layers
    }
    artifact.write(out, header, tokenizer, shared, experts)
    return header


def _layer(path: Path, *, layer: int, model: ModelConfig, source: Path) -> None:
    try:
        with open_file(source) as file:
            _rewrite(path, layer, model, source, file)
    except (ValueError, DataError) as error:
        raise ArtifactError(f"{source}: not an expert file of 0.1 ({error})") from None
    except OSError as error:
        raise ArtifactError(f"{source}: unreadable ({error.strerror})") from None


def _rewrite(path: Path, layer: int, model: ModelConfig, source: Path, file: BufferedReader) -> None:
    length = int.from_bytes(file.read(16)[12:], "little")
    size = os.fstat(file.fileno()).st_size
    if not 2 <= length <= min(MAX_JSON, size - 24):
        raise ValueError(f"header of {length} bytes, must be at most {min(MAX_JSON, max(0, size - 24))}")
    file.seek(24)
    fields = parse_json(file.read(length).decode())
    ffn = model.blocks[layer].ffn
    assert isinstance(ffn, RoutedConfig)  # as config.json was checked
    experts, layout = math.prod(ffn.torus), ExpertLayout(model.d_model, ffn.hidden)
    must = {"layer": layer, "experts": experts, "d_model": model.d_model, "hidden": ffn.hidden}
    for name, value in must.items():
        found = fields.get(name) if isinstance(fields, dict) else None
        if type(found) is not int or found != value:
            raise ValueError(f"{name} = {repr(found)[:40]}, must be {value}, the model's")
    of, places = _shards(fields.get("shards"), experts, source)
    last = -(-(24 + length) // PAGE) * PAGE
    for expert, place in sorted(places.items(), key=lambda item: item[1]):
        if place % PAGE or place < last:
            raise ValueError(f"offset of expert {expert} is {place}, must be a page from {last} on")
        last = place + layout.bytes
        if last > size:
            raise ArtifactError(f"{source}: ends within expert {expert}")
    # An alias could stand for a later expert: now the first of those that are the same is the stored one.
    first = {stored: min(expert for expert, own in enumerate(of) if own == stored) for stored in places}
    weights_of = [first[own] for own in of]

    def shards() -> Iterator[Shard]:
        for stored in sorted(places, key=lambda stored: first[stored]):
            buffer = aligned(layout.bytes)
            file.seek(places[stored])
            if file.readinto(buffer.data) != layout.bytes:
                raise ArtifactError(f"{source}: ends within expert {stored}")
            yield layout.shard(buffer)

    write_layer(path, layer, layout, weights_of, shards())


def _shards(entries: Any, experts: int, source: Path) -> tuple[list[int], dict[int, int]]:
    """(for each expert the one whose weights it has; offsets of those that are stored). ValueError: a header that 0.1
    did not write. ArtifactError: one with experts that are read no more."""
    if not isinstance(entries, list) or len(entries) != experts:
        told = len(entries) if isinstance(entries, list) else "no list"
        raise ValueError(f"shards: {told}, must be {experts}; experts are missing, or too many")
    known, places = dict[int, int](), dict[int, int]()
    for i, entry in enumerate(entries):
        kind = entry.get("kind") if isinstance(entry, dict) else None
        if kind == "delta":
            raise ArtifactError(
                f"{source}: experts stored as changes (--deltas of 0.1) are read no more; quantize the run again"
            )
        if kind not in ("full", "alias"):
            raise ValueError(f"shards[{i}].kind = {repr(kind)[:40]}, must be full or alias")
        second = ("offset", MAX_SIZE) if kind == "full" else ("of", experts - 1)
        for name, most in (("expert", experts - 1), second):
            value = entry.get(name)
            if type(value) is not int or not 0 <= value <= most:
                raise ValueError(f"shards[{i}].{name} = {repr(value)[:40]}, must be in 0 … {most}")
        expert = entry["expert"]
        if kind == "full":
            places[expert] = entry["offset"]
        known[expert] = entry.get("of", expert) if kind == "alias" else expert
    if len(known) != experts:
        raise ValueError(f"shards: of {len(known)} experts, must be {experts}; experts are missing")
    for expert, own in known.items():
        if own not in places:
            raise ValueError(f"expert {expert} has the weights of {own}, must be of one that is stored")
    return [known[expert] for expert in range(experts)], places
