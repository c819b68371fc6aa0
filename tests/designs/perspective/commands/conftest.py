"""The text that most commands are tried on."""

from tests.cli.conftest import text  # noqa: F401
