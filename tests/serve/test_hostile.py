"""A server in a process of its own, to which hostile things are sent: /health is answered meanwhile.

The bounds here are wide, so that no machine is too slow: what hangs a server does so for minutes.
`benchmarks/hostile.py` measures.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    from hostile import CASES, RUN, Server, measured
    from hostile import LIMIT as NEVER
SIZE = 2 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    names = [name for name in dict.fromkeys(["plain", *(case.template for case in CASES.values())]) if name]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(ROOT, Path(folder), RUN, names)
        yield server
        server.end()


@pytest.mark.parametrize("name", CASES)
def test_everyone_else_is_answered_meanwhile(server, name) -> None:
    found = measured(server, CASES[name], SIZE)
    assert found["health"] < NEVER / 3, found
    assert 200 <= found["status"] < 500, found
    assert found["grown"] < 256 << 20, found
    assert found["status"] == 200 or '"error"' in found["said"]
