"""Errors a user can cause. Each carries one line that names the thing, its value and the bound."""

from pathlib import Path

LONGEST = 800  # characters of a message


class PerspectronError(Exception):
    """Base of every error that is the user's to mend; the command line prints it and exits with `exit_code`.

    As text it is one line to be read, whatever a file or a library put into it: control characters are spelled out, and
    the middle of a long one is left out."""

    exit_code = 2

    def __str__(self) -> str:
        return _one_line(super().__str__())


def _one_line(words: str) -> str:
    text = " ".join(words.split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 200]} … {text[-200:]}"


class ConfigError(PerspectronError):
    """A preset, key or value that is not allowed."""


class BackendError(PerspectronError):
    """A kernel backend was asked for that cannot run here."""


class DataError(PerspectronError):
    """A corpus, tokenizer or shard that is missing, empty, damaged or of another kind."""


class StateError(PerspectronError):
    """A saved state that is damaged or belongs to another model."""


class CheckpointError(PerspectronError):
    """A checkpoint that is missing, damaged or of another model."""


class StorageError(PerspectronError):
    """Writing failed (a full disk, a read-only folder); what stood there before still stands."""


class NonFiniteError(PerspectronError):
    """A loss or gradient was not finite; raised before the optimizer stepped."""

    exit_code = 3


class ArtifactError(PerspectronError):
    """A file of an artifact that is missing, malformed or not what its folder says."""


class ShardError(PerspectronError):
    """An expert could not be read: where it stands, and why."""

    def __init__(self, path: Path, layer: int, expert: int, cause: str) -> None:
        super().__init__(path, layer, expert, cause)
        self.path, self.layer, self.expert, self.cause = path, layer, expert, cause

    def __str__(self) -> str:
        return _one_line(f"{self.path}: layer {self.layer}, expert {self.expert}: {self.cause}")
