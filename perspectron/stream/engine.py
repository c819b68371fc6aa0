"""Running a model from an artifact: packed weights in memory, experts in memory, in a cache or on a GPU."""

import contextlib
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor

from perspectron.data.tokenizer import Tokenizer
from perspectron.experts.fetched import ExpertSource, PackedMixture
from perspectron.experts.mixture import ExpertsConfig, MixtureConfig
from perspectron.experts.router import RoutedConfig
from perspectron.model.block import Block
from perspectron.model.model import LanguageModel, shape_of
from perspectron.ops import packing
from perspectron.quant.linear import QuantEmbedding, QuantLinear, make_room
from perspectron.stream import artifact, tensors
from perspectron.stream.artifact import SHARED, TOKENIZER, Header, Manifest
from perspectron.stream.cache import ShardCache, needed
from perspectron.stream.device import DeviceExperts
from perspectron.stream.expert_file import CODES, ExpertLayout
from perspectron.stream.experts import PackedExperts
from perspectron.stream.reader import Method, ShardFile
from perspectron.stream.speed import METHODS, Disk, probe
from perspectron.stream.usage import Usage
from perspectron.util.config import require
from perspectron.util.errors import ArtifactError, ConfigError, DataError
from perspectron.util.files import cache_folder
from perspectron.util.machine import free_memory, return_memory
from perspectron.util.numbers import size
from perspectron.util.terms import Term

CONVERSATION = 8192  # tokens whose state fits beside the cache of experts that takes the free memory
AHEAD = 2  # layers whose experts are guessed, so that the disk has work until the next guess


class StreamedModel(LanguageModel):
    """The model of an artifact, for inference only."""

    cache: ShardCache | None = None
    digest = plan = ""

    def __init__(self, header: Header) -> None:
        super().__init__(header.model)
        self.header = header
        self._copies: DeviceExperts | None = None
        format = CODES if header.experts is None else header.experts.format
        self.routed: list[PackedExperts | PackedMixture] = []
        for layer, block in enumerate(cast("list[Block]", self.blocks)):
            ffn = block.config.ffn
            if isinstance(ffn, MixtureConfig):
                self.routed.append(PackedMixture(header.model.d_model, ffn, layer, format))
            elif isinstance(ffn, RoutedConfig):
                self.routed.append(PackedExperts(header.model.d_model, ffn, layer))
            else:
                continue
            block.ffn = self.routed[-1]
        make_room(self, header.quant)

    def attach(self, source: ExpertSource, *, predict: bool) -> None:
        """Take experts from `source`; predict: hint what the next layers may want."""
        for index, ffn in enumerate(self.routed):
            ffn.source = source
            following: list[Any] = self.routed[index + 1 : index + 1 + AHEAD] if predict else []
            ffn.following = tuple(following)

    def terms(self, logits_BTV: Tensor, reset_BT: Tensor | None, pad_BT: Tensor | None) -> dict[str, Term]:
        """None: a packed model is not trained."""
        return {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        dtype = fn(torch.empty(0, dtype=torch.float32)).dtype
        require(dtype == torch.float32, "dtype", str(dtype), "float32, in which a packed model computes")
        super()._apply(fn, recurse)
        if self.cache is not None:
            self._place(self.cache)
        return self

    def _place(self, cache: ShardCache) -> None:
        """Have experts delivered on the device that the model is on now."""
        if self._copies is not None and self._copies.device == self.device:
            return
        if self._copies is not None:
            self._copies.close()
            self._copies = None
        if self.device.type == "cuda":
            self._copies = DeviceExperts(cache, self.device)
            self.attach(self._copies, predict=True)
        else:
            self.attach(cache, predict=not cache.resident)

    @property
    def shared_bytes(self) -> int:
        """Bytes of all weights that are always in memory."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    def disk_reads(self) -> tuple[float, float]:
        """Bytes of experts read from disk, and seconds waited for them, so far."""
        if self.cache is None:
            return 0.0, 0.0
        return self.cache.counters.bytes_read, self.cache.counters.wait_seconds

    def fingerprint(self) -> str:
        """Digest of the artifact's manifest, which has the digest of every file."""
        return self.digest

    def open(
        self, folder: Path, cache_bytes: int | None, method: Method | None = None, *, verify: bool = False
    ) -> None:
        """Take experts from the artifact's files: all into memory if they fit, else through a cache of so many bytes
        (None: the free memory less a tenth and a conversation of CONVERSATION tokens). verify: check every weight
        first."""
        assert self.header.experts is not None
        longest = min(CONVERSATION, self.config.positions or CONVERSATION)
        state = shape_of(self.config).init_state(1, capacity=longest)
        free = max(0, free_memory() * 9 // 10 - state.nbytes)
        budget = free if cache_bytes is None else cache_bytes
        with contextlib.ExitStack() as opened:
            files = []
            for layer in self.header.experts.layers:
                file = opened.enter_context(ShardFile(folder / artifact.layer_file(layer)))
                _check(file, layer, self.header)
                files.append(file)
            disk = Disk(method or "buffered", {})
            if needed(files) > budget:  # only experts that stream need a fast disk
                disk = probe(files[0].path, METHODS if method is None else [method])
            for file in files:
                file.use(disk.method)
                if verify:
                    file.verify()
            least = max(ffn.config.chosen for ffn in self.routed)
            self.cache = cache = ShardCache(files, budget, least=least, readers=disk.readers)
            opened.pop_all()
        weakref.finalize(self, cache.close)  # its readers would keep it alive
        self.attach(cache, predict=not cache.resident)
        self.plan = f"experts: {cache.distinct} of {size(cache.slot_bytes)} "
        if cache.resident:
            self.plan += "all in memory, nothing streams"
        else:
            self.plan += f"in {cache.slots} slots ({size(budget)}), read from disk ({disk}), "
            wanted = sum(ffn.config.chosen for ffn in self.routed)
            self.plan += f"up to {size(wanted * self.header.experts.shard_bytes)} for a token"

    def warm(self, path: Path) -> Usage:
        """Begin with the experts that this machine used most, as the file has it, and count from now on."""
        require(self.cache is not None, "warm", True, "left out for a model without experts on disk")
        assert self.cache is not None
        usage = Usage(path, {ffn.layer: ffn.config.count for ffn in self.routed})
        self.cache.warm(usage)
        return usage

    def line(self) -> str:
        """One line on what is in memory, what streams, and what a token costs."""
        kinds = sorted(set(self.header.quant.values()))
        parts = [
            f"{self.config.name}: {', '.join(kinds) or 'float32'} layers, {size(self.shared_bytes)} in memory"
        ]
        if self.header.experts is not None:
            parts.append(self.plan)
        if self.header.about:
            parts.append(self.header.about)
        line = "; ".join(parts)
        return "".join(letter if letter.isprintable() else " " for letter in line)


def load_artifact(
    folder: Path, *, cache_bytes: int | None = None, verify: bool = False, method: Method | None = None
) -> tuple[StreamedModel, Tokenizer]:
    """Load an artifact's model, ready to run on the CPU, and its tokenizer.

    cache_bytes: memory for experts (default: nine tenths of the free memory less one conversation). If all fit, all
    are read at once, otherwise on demand. verify: read every file first and check every weight. method: how streamed
    experts are read (default: the faster method on this disk). ArtifactError if the artifact is missing, damaged or
    differs from config.json; ConfigError if the cache is too small.
    """
    return_memory()
    header = artifact.read_header(folder)
    streams = header.experts is not None or cache_bytes is None
    require(streams, "cache", cache_bytes, "left out for a model without experts on disk")
    manifest = artifact.read_manifest(folder, header)
    if verify:
        artifact.verify(folder, manifest)
    model, tokenizer = load_shared(folder, header, manifest, check=verify)
    if header.experts is not None:
        model.open(folder, cache_bytes, method, verify=verify)
    return model, tokenizer


def load_shared(
    folder: Path, header: Header, manifest: Manifest, *, check: bool
) -> tuple[StreamedModel, Tokenizer]:
    """Model of an artifact without its experts, and its tokenizer. That all codes and numbers are valid is checked once
    for each manifest and user, for whom an empty file with its digest in the name is kept; check: now in any case.

    ArtifactError: a file is missing, damaged or not what config.json says."""
    artifact.verify(folder, manifest, (artifact.CONFIG, TOKENIZER))
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if tokenizer.fingerprint != header.tokenizer:
        raise ArtifactError(f"{folder / TOKENIZER}: of another tokenizer than config.json says")
    try:
        with torch.device("meta"):
            model = StreamedModel(header)
    except (ConfigError, RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        cause = " ".join(str(error).split())[:200] or type(error).__name__  # torch's, for impossible sizes
        raise ArtifactError(f"{folder / artifact.CONFIG}: {cause}") from None
    wanted = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    weights, digest = tensors.read(folder / SHARED, wanted)
    manifest.files[SHARED].check_digest(folder / SHARED, digest, ArtifactError)
    model.load_state_dict(weights, assign=True)
    model.requires_grad_(False).eval()
    model.digest = manifest.digest
    known, seen = _known(manifest.digest), False
    with contextlib.suppress(OSError):
        seen = known is not None and known.is_file()
    if check or not seen:
        _legal(model, folder / SHARED)
        with contextlib.suppress(OSError):  # no place to keep it: it is checked again next time
            if known is not None:
                known.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(known, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))
    return model, tokenizer


def _known(digest: str) -> Path | None:
    """File whose presence says that the weights of this manifest were checked; None: nowhere to keep it."""
    folder = cache_folder()
    return None if folder is None else folder / f"legal-1-{digest}"


def _legal(model: StreamedModel, path: Path) -> None:
    """Check the codes and scales of all packed matrices in memory, and that all other numbers are finite.
    ArtifactError: one is not valid."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear | QuantEmbedding):
            try:
                packing.check(module.packed, name)
            except DataError as error:
                raise ArtifactError(f"{path}: {error}") from None
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not packing.finite(tensor):
            raise ArtifactError(f"{path}: {name}: a number is not finite")


def _check(file: ShardFile, layer: int, header: Header) -> None:
    """Check that the file is of this layer of this model. ArtifactError: it is of another."""
    config = header.model.blocks[layer].ffn
    assert isinstance(config, ExpertsConfig)
    assert header.experts is not None
    wanted = layer, config.count, ExpertLayout.of(header.model.d_model, config, header.experts.format)
    stored = file.layer, file.header.experts, file.header.layout
    if stored != wanted:
        raise ArtifactError(f"{file.path}: layer, experts and widths are {stored}, must be {wanted}")
    if layer == header.experts.layers[0] and len(file.header.stored) != header.experts.distinct:
        raise ArtifactError(
            f"{file.path}: {len(file.header.stored)} experts with weights of their own, must be "
            f"{header.experts.distinct} as config.json says"
        )
