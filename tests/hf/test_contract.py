"""Every check of the contract for routed experts, full attention with three scores, and a table of positions."""

import pytest
import torch

from tests.hf.contract import CHECKS, small, subject

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, of options that the tests combine


@pytest.fixture(scope="module", params=["perspective-experts", "lens", "gpt2"])
def model(request, tokenizer):
    return subject(small(request.param), tokenizer)


@pytest.fixture(autouse=True)
def as_users_have_it():
    torch.use_deterministic_algorithms(
        False
    )  # torch.cumsum of transformers' own has no other on some devices


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_does_what_transformers_asks(check, model):
    check(model)
