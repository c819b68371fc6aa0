"""The folder that `perspectron generate --keep DIR` writes and `--from DIR` goes on from: a conversation, the adapter
it was written under and, of a streamed model, which experts were used; with a manifest."""

import shutil
from pathlib import Path
from typing import Protocol

from perspectron.decode.conversation import Conversation
from perspectron.model.model import LanguageModel
from perspectron.model.narrow import Dtype
from perspectron.util.errors import StateError
from perspectron.util.files import atomic, read_json, sha256, write_json

FORMAT = "perspectron-kept-1"
MANIFEST, CONVERSATION, ADAPTER, USAGE = (
    "manifest.json",
    "conversation.state",
    "adapter.safetensors",
    "usage.json",
)


class Adapter(Protocol):
    def save(self, path: Path) -> None: ...


def keep(
    folder: Path,
    talk: Conversation,
    model: LanguageModel,
    adapter: Adapter | None,
    usage: Path | None,
    dtype: Dtype,
) -> None:
    """Write the folder, at once. StorageError: it cannot be written."""
    with atomic(folder) as temporary:
        temporary.mkdir()
        talk.save(temporary / CONVERSATION, model, dtype)
        if adapter is not None:
            adapter.save(temporary / ADAPTER)
        if usage is not None and usage.is_file():
            shutil.copyfile(usage, temporary / USAGE)
        files = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
        write_json(temporary / MANIFEST, {"format": FORMAT, "model": model.fingerprint(), "files": files})


def kept(folder: Path, model: LanguageModel) -> dict[str, Path]:
    """The files of a folder, by name. StateError: it is none, is damaged or of another model."""
    manifest = read_json(folder / MANIFEST, StateError)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or manifest.get("format") != FORMAT or CONVERSATION not in files:
        raise StateError(f"{folder}: not a folder that generate --keep wrote")
    if manifest.get("model") != model.fingerprint():
        raise StateError(
            f"{folder}: kept of model {str(manifest.get('model'))[:12]}, this model is {model.fingerprint()[:12]}; "
            "use the model that wrote it"
        )
    found = {}
    for name in (CONVERSATION, ADAPTER, USAGE):
        if name in files:
            try:
                digest = sha256(folder / name)
            except OSError as error:
                raise StateError(f"{folder / name}: cannot be read ({error.strerror})") from None
            if digest != files[name]:
                raise StateError(f"{folder / name}: damaged, it is not what {MANIFEST} says")
            found[name] = folder / name
    return found
