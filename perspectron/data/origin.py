"""What stood beside the weights of a model that was imported. A run keeps it in a folder of its own, as it came."""

from collections.abc import Mapping
from pathlib import Path

from perspectron.data import world
from perspectron.data.template import TOOLS_FILE, Template, tokens_of
from perspectron.util.errors import DataError
from perspectron.util.files import read_text, write_text

FOLDER = "source"
WEIGHTS = "weights.json"
"""The dtype and shape of each tensor that the model was made of, by name."""
NAMES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
         "chat_template.jinja", TOOLS_FILE, world.FILE, WEIGHTS)  # fmt: skip


def files(folder: Path) -> dict[str, str]:
    """The texts of those files that are in a folder of transformers. DataError: one cannot be read."""
    found = dict[str, str]()
    for name in NAMES:
        if (path := folder / name).is_file():
            try:
                found[name] = read_text(path)
            except (OSError, ValueError) as error:
                raise DataError(f"{path}: unreadable ({error})") from None
    return found


def keep(texts: Mapping[str, str], run: Path) -> None:
    """Write them into the folder of a run. StorageError if they cannot be."""
    for name, text in texts.items():
        write_text(run / FOLDER / name, text)


def template_of_prompts(run: Path) -> Template | None:
    """The chat template by which the prompts of a run's training were made, if it has one."""
    return Template.of(run, tokens_of(run / FOLDER))


def template_in(run: Path) -> Template | None:
    """The chat template of a run, if it has one: that of its prompts, or the one that it was imported with.
    ConfigError: it is none."""
    return template_of_prompts(run) or Template.of(run / FOLDER, tokens_of(run / FOLDER))


def carry(run: Path, out: Path) -> None:
    """Give what a run keeps, if it does, to what is made of it."""
    keep(files(run / FOLDER), out)
