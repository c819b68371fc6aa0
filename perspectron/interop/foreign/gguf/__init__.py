"""Models in GGUF, the format of llama.cpp, as folders of transformers: each value and tensor under the name that it has
there, so that a family's importer reads both."""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perspectron.interop.foreign.gguf import container, families, tokenizer
from perspectron.interop.foreign.gguf.container import Container, Stored
from perspectron.interop.foreign.gguf.families import FAMILIES, Family, Fix
from perspectron.interop.foreign.source import Source
from perspectron.util.errors import CheckpointError, ConfigError, DataError

SUFFIX = ".gguf"
_DRAWN = "general.sampling."
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Source]:
    """The model in a file as a folder of transformers that is there within the context; its tensors stay in the file
    until they are taken.

    CheckpointError, naming the file and the field: cut short, of a type that gguf does not know, an architecture that
    is not in FAMILIES, or metadata that no model of ours has. DataError: a tokenizer that is not known.
    """
    whole = container.read(path)
    arch = whole.metadata.get("general.architecture")
    kind = whole.metadata.get("general.type", "model")
    if kind != "model" or not isinstance(arch, str) or arch not in FAMILIES:
        what = f"general.type is {kind!r}" if kind != "model" else f"general.architecture is {arch!r}"
        raise whole.error(f"{what}, which cannot be read; {', '.join(FAMILIES)} can")
    if "token_embd.weight" not in whole.tensors:
        raise whole.error("it has no tensor token_embd.weight")
    family, fields = FAMILIES[arch], families.Fields(whole, arch)
    attends, experts = family.attends, family.experts
    config = families.shared(fields, experts=experts) if attends else families.unattended(fields)
    config = {"model_type": family.kind} | config | family.config(fields, config)
    fields.done()
    files = tokenizer.files(whole)
    config |= {name: files["generation_config.json"][name] for name in tokenizer.ROLES}
    files["generation_config.json"] |= _sampling(whole)
    with tempfile.TemporaryDirectory() as folder:
        for name, values in {"config.json": config, **files}.items():
            (Path(folder) / name).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
        try:
            source = _Unpacked(Path(folder), config)
            source.tensors = _tensors(whole, family, config)
            matrices = {tensor.kind.name for tensor in whole.tensors.values() if len(tensor.shape) > 1}
            source.itemsize = 2 if matrices <= {"F16", "BF16"} else 4
            yield source
        except (CheckpointError, ConfigError, DataError) as error:
            text = str(error).replace(f"{folder}{os.sep}", f"{path}: ").replace(folder, str(path))
            raise type(error)(text) from None


def _sampling(whole: Container) -> dict[str, Any]:
    """How its authors suggest to draw, by the names of transformers; numbers of 32 bits as they were written."""
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    found = dict[str, Any]()
    for key, value in whole.metadata.items():
        if key.startswith(_DRAWN):
            name = key.removeprefix(_DRAWN)
            found[names.get(name, name)] = float(f"{value:.7g}") if isinstance(value, float) else value
    return {"do_sample": True, **found} if found else {}


class _Unpacked(Source):
    """Values of a folder, and tensors of the file that it was made from."""

    def open_weights(self) -> None:
        """They are known."""


class _Parts(NamedTuple):
    """The tensors in a file that are one of a folder, one after another, and what each is made to."""

    stored: list[Stored]
    fix: Fix

    def load(self) -> Tensor:
        """The one of the folder. CheckpointError: shapes from which it cannot be made."""
        try:
            loaded = [self.fix(each.load()) for each in self.stored]
            rows = 1 if self.stored[0].name.endswith("_exps.weight") else 0  # of each expert
            return loaded[0] if len(loaded) == 1 else torch.cat(loaded, rows)
        except (RuntimeError, IndexError):
            shapes = ", ".join(f"{each.name} {list(each.shape)}" for each in self.stored)
            path = self.stored[0].path
            raise CheckpointError(f"{path}: shapes that the config does not allow: {shapes}") from None


def _tensors(whole: Container, family: Family, config: dict[str, Any]) -> dict[str, Callable[[], Tensor]]:
    """The tensors by their names in a folder; one that is not known keeps its name, and importers name it then. Those
    of layers that only guess further tokens are passed over, and the divisors of frequencies, which the config has."""
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
