"""Errors that a user can cause. Each message is one line with the name, its value and the bound."""

from pathlib import Path

LONGEST = 800  # characters of a message


class PerspectronError(Exception):
    """Base of every error that the user can fix. The command line prints it and exits with `exit_code`.

    Its text is one printable line whatever a file or a library put into it: control characters are escaped, and a long
    text is shortened in the middle.

        >>> try:
        ...     perspectron.load("no-such-run")
        ... except perspectron.PerspectronError as error:
        ...     print(type(error).__name__)
        CheckpointError
    """

    exit_code = 2

    def __str__(self) -> str:
        return _one_line(super().__str__())


def escaped(text: str, keep: str = "") -> str:
    """A text for a terminal, with what is not printable escaped, except `keep`: a stranger's file may hold commands."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def _one_line(words: str) -> str:
    text = escaped(" ".join(words.split()))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 200]} … {text[-200:]}"


class ConfigError(PerspectronError):
    """A preset, key or value that is not allowed."""


class BackendError(PerspectronError):
    """The requested kernel backend cannot run here."""


class DataError(PerspectronError):
    """A corpus, tokenizer or shard that is missing, empty, damaged or of another kind."""


class StateError(PerspectronError):
    """A saved state that is damaged or belongs to another model."""


class CheckpointError(PerspectronError):
    """A checkpoint that is missing, damaged or of another model."""


class StorageError(PerspectronError):
    """Writing failed (a full disk, a read-only folder); what was there before is unchanged."""


class NonFiniteError(PerspectronError):
    """A loss or gradient was not finite. Raised before the optimizer step."""

    exit_code = 3


class RankError(PerspectronError):
    """A process of a training that is missing, has ended or cannot be reached."""

    code = 2

    def __init__(self, text: str, exit_code: int = code) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class ArtifactError(PerspectronError):
    """A file of an artifact that is missing, malformed or not what its folder says."""


class ShardError(PerspectronError):
    """An expert could not be read. The message says where it is and why."""

    def __init__(self, path: Path, layer: int, expert: int, cause: str) -> None:
        super().__init__(path, layer, expert, cause)
        self.path, self.layer, self.expert, self.cause = path, layer, expert, cause

    def __str__(self) -> str:
        return _one_line(f"{self.path}: layer {self.layer}, expert {self.expert}: {self.cause}")
