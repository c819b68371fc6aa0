"""What the tests of other suites are given."""

from tests.eval.conftest import model_of, periodic, subject, text  # noqa: F401
