"""Models in GGUF, the format of llama.cpp, presented as folders of transformers: each value and tensor has the name
that it has there, so that one importer of a family reads both."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perspectron.interop.foreign.gguf import container, tokenizer
from perspectron.interop.foreign.gguf.container import Container, Stored
from perspectron.interop.foreign.gguf.families import FAMILIES, Family
from perspectron.interop.foreign.gguf.fields import Fields, shared, unattended
from perspectron.interop.foreign.gguf.fixes import Fix
from perspectron.interop.foreign.source import Source, folder_of
from perspectron.util.errors import CheckpointError

SUFFIX = ".gguf"
_DRAWN = "general.sampling."
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Source]:
    """A GGUF as a temporary folder of transformers, which exists within the context. Tensors stay in the file until
    they are taken.

    CheckpointError, naming the file and the field: it is cut short, has a type that gguf does not know, an architecture
    that is not in FAMILIES, or metadata that no model of ours has. DataError: an unknown tokenizer.
    """
    whole = container.read(path)
    arch = whole.metadata.get("general.architecture")
    kind = whole.metadata.get("general.type", "model")
    if kind != "model" or not isinstance(arch, str) or arch not in FAMILIES:
        what = f"general.type is {kind!r}" if kind != "model" else f"general.architecture is {arch!r}"
        raise whole.error(f"{what}, which cannot be read; {', '.join(FAMILIES)} can")
    if "token_embd.weight" not in whole.tensors:
        raise whole.error("it has no tensor token_embd.weight")
    family, fields = FAMILIES[arch], Fields(whole, arch)
    attends, experts = family.attends, family.experts
    config = shared(fields, experts=experts) if attends else unattended(fields)
    config = {"model_type": family.kind} | config | family.config(fields, config)
    fields.done()
    files = tokenizer.files(whole)
    config |= {name: files["generation_config.json"][name] for name in tokenizer.ROLES}
    files["generation_config.json"] |= _sampling(whole)
    texts = {
        name: json.dumps(values, ensure_ascii=False)
        for name, values in {"config.json": config, **files}.items()
    }
    with folder_of(texts, path, {"": f"{path}: "}) as folder:
        source = Source(folder, config)
        source.tensors = _tensors(whole, family, config)
        matrices = {tensor.kind.name for tensor in whole.tensors.values() if len(tensor.shape) > 1}
        source.itemsize = 2 if matrices <= {"F16", "BF16"} else 4
        yield source


def _sampling(whole: Container) -> dict[str, Any]:
    """The authors' sampling options by transformers' names; 32-bit numbers are rounded to the digits written."""
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    found = dict[str, Any]()
    for key, value in whole.metadata.items():
        if key.startswith(_DRAWN):
            name = key.removeprefix(_DRAWN)
            found[names.get(name, name)] = float(f"{value:.7g}") if isinstance(value, float) else value
    return {"do_sample": True, **found} if found else {}


class _Parts(NamedTuple):
    """Tensors of a GGUF that make up one of a transformers folder, in order. fix: converts each."""

    stored: list[Stored]
    fix: Fix

    def load(self) -> Tensor:
        """The joined tensor. CheckpointError: shapes from which it cannot be made."""
        try:
            loaded = [self.fix(each.load()) for each in self.stored]
            rows = 1 if self.stored[0].name.endswith("_exps.weight") else 0  # within each expert
            return loaded[0] if len(loaded) == 1 else torch.cat(loaded, rows)
        except (RuntimeError, IndexError):
            shapes = ", ".join(f"{each.name} {list(each.shape)}" for each in self.stored)
            path = self.stored[0].path
            raise CheckpointError(f"{path}: shapes that the config does not allow: {shapes}") from None


def _tensors(whole: Container, family: Family, config: dict[str, Any]) -> dict[str, Callable[[], Tensor]]:
    """The tensors by their names in transformers. An unknown one keeps its name, which the importer then reports.
    Layers that only predict further tokens are left out, and so are rotary frequency divisors, which the config has."""
    fixes, parts = family.fixes(config), dict[str, _Parts]()
    for name in sorted(whole.tensors.keys() - {"rope_freqs.weight"}):
        layer = _LAYER.fullmatch(name)
        if layer and int(layer[1]) >= config["num_hidden_layers"]:
            continue
        rest, names = (layer[2], family.names) if layer else (name, family.outer)
        stem, _, suffix = rest.rpartition(".")
        there = names.get(rest) or (f"{names[stem]}.{suffix}" if stem in names else None)
        if there is None:
            parts[name] = _Parts([whole.tensors[name]], lambda x: x)
            continue
        there = f"{family.layers}.{layer[1]}.{there}" if layer else there
        fix = fixes.get(rest) or fixes.get(stem) or (lambda x: x)
        parts.setdefault(there, _Parts([], fix)).stored.append(whole.tensors[name])
    return {name: each.load for name, each in parts.items()}
