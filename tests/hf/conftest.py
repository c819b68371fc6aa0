"""A small tokenizer, and no network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import transformers

from perspectron.data import Tokenizer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the quick brown fox jumps over the lazy dog, and counts to 1234. " * 4], 300)
