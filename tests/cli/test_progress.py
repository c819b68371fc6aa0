"""What a long command says meanwhile."""

import io

import pytest

from perspectron.cli.progress import Work
from perspectron.util.numbers import duration
from tests.waiting import PATIENCE, until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (60, "1 min 0 s"),
        (570, "9 min 30 s"),
        (7500, "2 h 5 min"),
        (4e6, "1,111 h 6 min"),
    ],
)
def test_durations_are_read_by_people(seconds, said):
    assert duration(seconds) == said


def test_nothing_is_said_of_what_is_quick(capsys):
    with Work("reading", quiet=PATIENCE) as work:
        work.tell(1, 2)
    work._thread.join()
    assert capsys.readouterr().err == ""


def test_elsewhere_than_on_a_terminal_lines_are_whole(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    monkeypatch.setattr("perspectron.cli.progress.EVERY", {True: 0.02, False: 0.02})
    monkeypatch.setattr("perspectron.cli.progress.time.monotonic", lambda: 100.0)
    with Work("reading", quiet=0.01) as work:
        until(said.getvalue)
        work.tell(30, 90)
        until(lambda: "30 of 90" in said.getvalue())
    lines = said.getvalue().splitlines()
    assert lines[0] == "perspectron: reading: 0 s so far"
    assert lines[-1] == "perspectron: reading: 30 of 90, about 0 s left"


def test_text_that_is_read_says_how_fast_and_how_long_it_takes(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("perspectron.cli.progress.time.monotonic", lambda: clock[0])
    work = Work("encoding")
    work._start = 90.0
    work.read(5_000_000, 0.5)  # goes on: half of it was done before
    assert work.line() == "encoding: 10 s so far"
    clock[0] = 110.0
    work.read(35_000_000, 0.6)
    assert work.line() == "encoding: 35 MB of text, 3.0 MB/s, about 40 s left"
    clock[0] = 115.0
    assert work.line() == "encoding: 35 MB of text, 3.0 MB/s, about 35 s left"
    work.read(50_000_000, 0.5)  # how much there is is not known
    assert work.line() == "encoding: 50 MB of text, 3.0 MB/s"


@pytest.mark.parametrize("columns", ["40", "200"])
def test_on_a_terminal_one_line_is_written_over_and_nothing_is_left(monkeypatch, columns):
    said = Terminal()
    monkeypatch.setattr("sys.stderr", said)
    monkeypatch.setenv("COLUMNS", columns)
    with Work("reading a text with a name that is longer than forty columns", quiet=0.01):
        until(said.getvalue)
    drawn = said.getvalue().replace("\x1b[K", "").split("\r")
    assert "\n" not in said.getvalue() and drawn[-1] == ""
    assert max(map(len, drawn)) < int(columns)


def test_an_error_ends_it(monkeypatch):
    monkeypatch.setattr("sys.stderr", said := io.StringIO())
    with pytest.raises(ZeroDivisionError), Work("dividing", quiet=0.0) as work:
        print(1 / (until(said.getvalue) or 0))
    before = said.getvalue()
    work._thread.join()
    assert said.getvalue() == before
