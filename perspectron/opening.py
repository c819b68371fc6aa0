"""One door to weights: the folder of a run, of one of its checkpoints or of an artifact, opened.

`describe` reads the description of a folder and no weights; `open_model` loads the model too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from perspectron.config import ModelConfig, require
from perspectron.data import Shards, Tokenizer, encode, open_corpus, open_shards
from perspectron.errors import DataError
from perspectron.model import LanguageModel
from perspectron.stream.artifact import ExpertFiles, Trained, is_artifact, read_header
from perspectron.stream.engine import load_artifact
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig
from perspectron.train.prepare import prepare


@dataclass(frozen=True)
class Folder:
    """Description of a run or an artifact, as its folder has it.

    path: of the run or artifact, also where one checkpoint of a run was asked for. model: its config. run: the whole
    config of a run; None for an artifact. quant: format of each packed module of an artifact, by name; None for a run.
    experts: files of an artifact's experts. trained: text and window of training, where they are known. dtype: autocast
    to it, as in training; None computes in float32, or as an artifact does.
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
    """A model on the CPU and its tokenizer. line: what of an artifact is in memory and what streams; empty for a run,
    which is in memory as a whole."""

    folder: Folder
    model: LanguageModel
    tokenizer: Tokenizer
    line: str = ""

    def autocast(self) -> torch.autocast:
        """A context that computes as in training, on the device where the model is."""
        dtype = self.folder.dtype
        return torch.autocast(self.model.device.type, dtype, enabled=dtype is not None)

    def shards(self, scratch: Path) -> Shards:
        """The text of training, encoded; that of an artifact, where it is a corpus, into `scratch`.

        DataError when the text is not at hand any more or encoded with another tokenizer, ConfigError for an artifact
        that does not say which it was.
        """
        if self.folder.run is not None:
            return prepare(self.folder.path, self.folder.run)[1]
        trained = self.folder.trained
        known = trained is not None and trained.data != ""
        require(known, "data", None, "given: the artifact does not say what it was trained on")
        assert trained is not None
        if (Path(trained.data) / "manifest.json").is_file():
            shards = open_shards(Path(trained.data))
            if shards.tokenizer_fingerprint != self.tokenizer.fingerprint:
                raise DataError(
                    f"{shards.path}: encoded with tokenizer {shards.tokenizer_fingerprint[:12]}, "
                    f"that of {self.folder.path} is {self.tokenizer.fingerprint[:12]}"
                )
            return shards
        return encode(open_corpus(trained.data, trained.heldout), self.tokenizer, scratch)


def describe(path: Path) -> Folder:
    """The description of a folder. CheckpointError or ArtifactError when its config is missing or damaged."""
    if is_artifact(path):
        header = read_header(path)
        return Folder(path, header.model, None, header.quant, header.experts, header.trained)
    folder = checkpoint.run_of(path)
    config = checkpoint.load_config(folder)
    train = config.train
    return Folder(
        folder,
        config.model,
        config,
        trained=Trained(train.data, train.heldout, train.seq_len),
        dtype=torch.bfloat16 if train.dtype == "bfloat16" else None,
    )


def open_model(path: Path, *, cache_bytes: int | None = None, verify: bool = False) -> Opened:
    """The model of a run (its best held-out checkpoint, else its newest), of one checkpoint or of an artifact.

    For an artifact, cache_bytes is memory for experts (default: what is free), and verify reads every file first; a
    run takes neither. CheckpointError or ArtifactError when there is no model that verifies, ConfigError for a cache
    that is too small.
    """
    folder = describe(path)
    if folder.run is None:
        streamed, tokenizer = load_artifact(path, cache_bytes=cache_bytes, verify=verify)
        return Opened(folder, streamed, tokenizer, streamed.line())
    for name, value in (("cache", cache_bytes), ("verify", verify or None)):
        require(value is None, name, value, "left out for a run, which is in memory as a whole")
    return Opened(folder, *checkpoint.load_run(path))


def load(
    path: Path | str, *, cache_bytes: int | None = None, verify: bool = False
) -> tuple[LanguageModel, Tokenizer]:
    """The model and the tokenizer of `open_model`, with the same options and errors."""
    opened = open_model(Path(path), cache_bytes=cache_bytes, verify=verify)
    return opened.model, opened.tokenizer
