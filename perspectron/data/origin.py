"""Files that came with the weights of an imported model. A run keeps them unchanged, in a folder of their own."""

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
    """The texts, by name, of those files of NAMES that a folder of transformers has. DataError: one cannot be read."""
    found = dict[str, str]()
    for name in NAMES:
        if (path := folder / name).is_file():
            try:
                found[name] = read_text(path)
            except (OSError, ValueError) as error:
                raise DataError(f"{path}: unreadable ({error})") from None
    return found


def keep(texts: Mapping[str, str], run: Path) -> None:
    """Write these files into the folder of a run. StorageError if they cannot be written."""
    for name, text in texts.items():
        write_text(run / FOLDER / name, text)


def template_of_prompts(run: Path) -> Template | None:
    """The chat template by which the prompts of a run's training were made, if it has one."""
    return Template.of(run, tokens_of(run / FOLDER))


def template_in(run: Path) -> Template | None:
    """The chat template of a run, if it has one: that of its prompts, or the one that it was imported with.
    ConfigError: it is not a template."""
    return template_of_prompts(run) or Template.of(run / FOLDER, tokens_of(run / FOLDER))


def carry(run: Path, out: Path) -> None:
    """Copy the files that a run keeps, if any, to the folder `out` of what is made of it, with the template of its
    prompts in the place of an earlier one."""
    keep(files(run / FOLDER), out)
    if (template := template_of_prompts(run)) is not None:
        template.save(out / FOLDER)
