"""A small model behind the server, in this process."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from fastapi.testclient import TestClient

from perspectron.data import Tokenizer
from perspectron.decode.store import PrefixStore
from perspectron.designs.perspective.views import Perspectives, PerspectivesConfig
from perspectron.serve.engine import Engine
from perspectron.serve.served import Served
from perspectron.serve.states import States
from perspectron.serve.web.app import create
from tests.decode.conftest import VOCAB, make

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant:' }}"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    texts = [f"Row {i} of {i * i}: the cat sat on the mat, and then the mat sat.\n" for i in range(80)]
    return Tokenizer.train(texts, VOCAB)


def served(
    folder: Path,
    tokenizer: Tokenizer,
    name: str = "tiny",
    design: str = "perspective-tiny",
    room: Mapping[str, int] = MappingProxyType({}),
    looks: PerspectivesConfig | None = None,
    **options,
) -> Served:
    """A model of its own, its rows one by one. room: the bytes of its store. looks: perspectives, without one."""
    model = make(design)
    store = None if looks is not None else PrefixStore(model, folder=folder / "prefixes", **room)
    if looks is not None:
        options["hooks"] = [Perspectives(model, looks)]
    engine = Engine(model, tokenizer, store=store, **{"rows": 4, "queue": 4, "together": False} | options)
    return Served(
        name, engine, tokenizer, States(folder / "states" / name), States(folder / "slots" / name), 64
    )


@pytest.fixture
def tiny(tmp_path, tokenizer) -> Served:
    return served(tmp_path, tokenizer)


@pytest.fixture
def client(tiny) -> Iterator[TestClient]:
    with TestClient(create([tiny]), base_url="http://localhost") as client:
        yield client
