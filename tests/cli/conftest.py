"""The text that most commands are tried on."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of six files, 20 kB."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(6):
        (folder / f"{i}.txt").write_text(f"the cat sat on mat number {i}, and the dog sat on the log. " * 60)
    return folder
