"""The options of `generate`."""

from pathlib import Path

import pytest
import tyro

from perspectron.cli.generate import Generate


@pytest.mark.parametrize(
    ("arguments", "stop", "prompts"),
    [
        (["RUN", "--stop", ".", "KING"], (".",), ("KING",)),
        (["RUN", "KING", "QUEEN", "--stop", "."], (".",), ("KING", "QUEEN")),
        (["RUN", "--stop", ".", "--stop", "\n", "KING"], (".", "\n"), ("KING",)),
        (["RUN", "KING"], (), ("KING",)),
    ],
)
def test_a_stop_string_takes_no_prompt_along(arguments, stop, prompts):
    command = tyro.cli(Generate, args=arguments, config=(tyro.conf.OmitArgPrefixes,))
    assert (command.run, command.stop, command.prompts) == (Path("RUN"), stop, prompts)
