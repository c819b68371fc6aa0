"""Opening a model from the folder of a run, of one of its checkpoints or of an artifact, and saving one as a run.

`describe` reads a folder's description without weights; `open_model` loads the model too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from perspectron.data import Shards, Tokenizer, encode, is_encoded, open_corpus, open_shards, origin
from perspectron.data.template import Template, tokens_of
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.suggested import Asked, suggested
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, shape_of
from perspectron.stream.artifact import ExpertFiles, Header, Trained, is_artifact, read_header
from perspectron.stream.engine import load_artifact
from perspectron.train import checkpoint
from perspectron.train.checkpoint import Checkpoint
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.prepare import prepare
from perspectron.train.weights import same_tensors
from perspectron.util.config import require
from perspectron.util.errors import CheckpointError, ConfigError, DataError, StorageError
from perspectron.util.files import atomic


@dataclass(frozen=True)
class Folder:
    """Description of a run or an artifact, as its folder has it.

    path: of the run or artifact, also if one checkpoint of a run was given. model: its config. run: the full config of
    a run; None for an artifact. quant: format of each packed module of an artifact by name; None for a run. experts:
    files of an artifact's experts. trained: text and window length of training, if known. dtype: of autocast, as in
    training; None computes in float32, or in an artifact's own way.
    """

    path: Path
    model: ModelConfig
    run: RunConfig | None = None
    quant: Mapping[str, str] | None = None
    experts: ExpertFiles | None = None
    trained: Trained | None = None
    dtype: torch.dtype | None = None

    def of_run(self, field: str = "run") -> RunConfig:
        """The config of a run. ConfigError, naming the field, for an artifact."""
        require(self.run is not None, field, str(self.path), "a run, not an artifact in few bits")
        assert self.run is not None
        return self.run


@dataclass(frozen=True)
class Opened:
    """A model on the CPU, in eval mode, and its tokenizer. line: which parts of an artifact are in memory and which
    stream; empty for a run. checkpoint: the one a run's weights are from; None for an artifact."""

    folder: Folder
    model: LanguageModel
    tokenizer: Tokenizer
    line: str = ""
    checkpoint: Checkpoint | None = None

    def template(self, named: str | None = None) -> Template | None:
        """The named chat template (`Template.named`), or else the model's own, if it has one: that by which the prompts
        of its training were made, or the one that it was imported with. ConfigError: it is no template."""
        if named is not None:
            return Template.named(named, tokens_of(self.folder.path / origin.FOLDER))
        return origin.template_in(self.folder.path)

    def sampling(
        self, asked: Asked | None = None, otherwise: SamplingConfig | None = None
    ) -> tuple[SamplingConfig, str]:
        """(settings of sampling, a line on those taken from the model), by `suggested`: each as asked for, or else as
        an imported model came with it, or else as in `otherwise`."""
        source, values = self.folder.path / origin.FOLDER, {} if asked is None else asked.values
        return suggested(source, values, otherwise or SamplingConfig())

    def autocast(self) -> torch.autocast:
        """A context that computes with the dtype of training, on the model's device."""
        dtype = self.folder.dtype
        return torch.autocast(self.model.device.type, dtype, enabled=dtype is not None)

    def shards(self, scratch: Path) -> Shards:
        """The encoded training text. An artifact's text is encoded into `scratch` if only the corpus is known.

        DataError if the text is missing or was encoded with another tokenizer, ConfigError for an artifact that does
        not name its text.
        """
        if self.folder.run is not None:
            return prepare(self.folder.path, self.folder.run)[1]
        trained = self.folder.trained
        known = trained is not None and trained.data != ""
        require(known, "data", None, "given: the artifact does not say what it was trained on")
        assert trained is not None
        if is_encoded(trained.data):
            shards = open_shards(Path(trained.data))
            if shards.tokenizer_fingerprint != self.tokenizer.fingerprint:
                raise DataError(
                    f"{shards.path}: encoded with tokenizer {shards.tokenizer_fingerprint[:12]}, "
                    f"that of {self.folder.path} is {self.tokenizer.fingerprint[:12]}"
                )
            return shards
        template = origin.template_of_prompts(self.folder.path)
        corpus = open_corpus(trained.data, trained.heldout, template=template, rule=trained.rule)
        return encode(corpus, self.tokenizer, scratch)


def describe(path: Path) -> Folder:
    """The description of a folder. CheckpointError or ArtifactError if its config is missing or damaged."""
    if is_artifact(path):
        return _of_artifact(path, read_header(path))
    folder = checkpoint.run_of(path)
    return _of_run(folder, checkpoint.load_config(folder))


def _of_artifact(path: Path, header: Header) -> Folder:
    return Folder(path, header.model, None, header.quant, header.experts, header.trained)


def _of_run(path: Path, config: RunConfig) -> Folder:
    train = config.train
    trained = Trained(train.data, train.heldout, train.seq_len, config.rule)
    dtype = torch.bfloat16 if train.dtype == "bfloat16" else None
    return Folder(path, config.model, config, trained=trained, dtype=dtype)


def open_model(path: str | Path, *, cache_bytes: int | None = None, verify: bool = False) -> Opened:
    """Load the model of a run (its best held-out checkpoint, or else the newest), of one checkpoint or of an artifact.

    For an artifact, cache_bytes is the memory for experts (default: what is free), and verify checks every file first;
    a run takes neither. CheckpointError or ArtifactError if no model there is valid, ConfigError if the cache is too
    small.
    """
    path = Path(path)
    if is_artifact(path):
        model, tokenizer = load_artifact(path, cache_bytes=cache_bytes, verify=verify)
        return Opened(_of_artifact(path, model.header), model, tokenizer, model.line())
    for name, value in (("cache", cache_bytes), ("verify", verify or None)):
        require(value is None, name, value, "left out for a run, which is held in memory as a whole")
    run = checkpoint.open_run(path)
    return Opened(_of_run(run.folder, run.config), run.model, run.tokenizer, checkpoint=run.checkpoint)


def load(
    path: Path | str, *, cache_bytes: int | None = None, verify: bool = False
) -> tuple[LanguageModel, Tokenizer]:
    """Load the model and the tokenizer of a run, of one of its checkpoints or of an artifact, onto the CPU, in eval
    mode: call `model.train()` to train it by hand. Options and errors are those of `open_model`.

        >>> model, tokenizer = perspectron.load("runs/play")
        >>> model(torch.tensor([tokenizer.encode("KING")])).logits.shape[0]
        1
    """
    opened = open_model(Path(path), cache_bytes=cache_bytes, verify=verify)
    return opened.model, opened.tokenizer


def save(model: LanguageModel, tokenizer: Tokenizer, folder: Path | str, *, seq_len: int = 256) -> Path:
    """Write a model that was built, and perhaps trained, by hand as a run, for `load` and for every command that takes
    one; its folder. The run holds weights alone, in float32 or 16 bits as the model has them: training goes on in a new
    run, by `train(init=folder)`.

    tokenizer: its ids are below the model's vocabulary size. seq_len: tokens of the windows it was trained on, in which
    `eval` measures it; at most its learned positions count. The folder is there as a whole or not at all. ConfigError:
    it is there already, the tokenizer has ids that the model lacks, or the model has packed or adapted weights, which
    are no run's; StorageError: writing failed.

        >>> import perspectron
        >>> tokenizer = perspectron.Tokenizer.train(["to be or not to be"], 300)
        >>> model = perspectron.build("perspective2-tiny")
        >>> perspectron.save(model, tokenizer, "by-hand").name
        'by-hand'
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise ConfigError(f"folder: {folder} is a run already; name a new folder, or remove it first")
    there = folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir())))
    require(not there, "folder", str(folder), "a new folder, or an empty one")
    known = f"≥ {tokenizer.vocab_size}, the tokenizer's"
    require(model.config.vocab_size >= tokenizer.vocab_size, "vocab_size", model.config.vocab_size, known)
    plain = shape_of(model.config)
    try:
        same_tensors(plain.state_dict(), model.state_dict(), folder)
    except CheckpointError as error:
        raise ConfigError(f"model: {error}") from None
    train = TrainConfig(
        data="", dtype="float32", device="cpu", seq_len=min(seq_len, model.config.positions or seq_len)
    )
    with atomic(folder) as temporary:
        try:
            checkpoint.export(
                temporary, RunConfig(model.config, train), tokenizer, model, checkpoint.Progress()
            )
        except StorageError as error:
            raise StorageError(f"{error}".replace(str(temporary), str(folder))) from error
    return folder
