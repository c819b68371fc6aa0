"""What the tests of decoding are given."""

from tests.decode.conftest import double, model, perspective, tokenizer  # noqa: F401
