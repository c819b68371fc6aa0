"""Every check of the contract for routed experts, full attention with three scores, and a table of positions."""

from pathlib import Path

import pytest
import torch

from tests.hf.subject import small, subject
from tests.hf.upstream import BESIDE, CHECKS, GENERATION, MODEL, check_of, table

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


def test_every_test_of_transformers_has_a_check_or_a_reason():
    asked = {check_of(name, said) for tests in (GENERATION, MODEL) for name, said in tests.items()}
    assert asked | set(BESIDE) == {check.__name__ for check in CHECKS} | {""}
    for name, said in (GENERATION | MODEL).items():
        assert check_of(name, said) or " " in said, name


def test_the_page_has_the_table():
    page = Path(__file__).parents[2] / "docs" / "reference" / "transformers.md"
    assert page.read_text(encoding="utf-8").endswith(table()), "python -m tests.hf --table"
