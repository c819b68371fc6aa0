"""Refusals by what they name, whatever their wording: tests/goldens/messages.txt alone has the words."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(error: Any, *named: object) -> Iterator[pytest.ExceptionInfo]:
    """Of this class, in one line that names each: an option, a field, a tensor, a file, a value."""
    with pytest.raises(error) as caught:
        yield caught
    in_a_line(str(caught.value), *named)


@contextmanager
def warned(*named: object) -> Iterator[None]:
    """One `UserWarning` among all is a line that names each."""
    with pytest.warns(UserWarning) as caught:  # noqa: PT030
        yield
    assert any(names(str(warning.message), *named) for warning in caught), [str(w.message) for w in caught]


def in_a_line(text: str, *named: object) -> None:
    """A text is one line that names each."""
    assert len(text.strip().splitlines()) == 1, text
    assert names(text, *named), f"{named} in: {text}"


def names(text: str, *named: object) -> bool:
    """Whether a text has each as a word of its own; a whole number with commas between thousands, too."""
    return all(any(re.search(pattern, text) for pattern in _patterns(name)) for name in named)


def _patterns(name: object) -> Iterator[str]:
    assert not re.search(r"\s", str(name)), f"{name!r} is wording: name a field, a file or a value"
    for word in {str(name), f"{name:,}" if isinstance(name, int) else str(name)}:
        before = r"(?<![\w.])" if word[0].isdigit() else r"(?<!\w)" if word[0].isalnum() else ""
        after = r"(?![\w,]*\d)" if word[-1].isdigit() else r"(?!\w)" if word[-1].isalnum() else ""
        yield before + re.escape(word) + after
