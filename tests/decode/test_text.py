from hypothesis import given, settings
from hypothesis import strategies as st

from perspectron.decode.row import TextStream


def spoken(parts: list[bytes], stop: list[str], early: int = 0) -> list[str]:
    """The pieces; early: parts that complete no stop string."""
    stream, pieces = TextStream(stop), []
    for number, part in enumerate(parts):
        pieces.append(stream.push(part, stops=number >= early))
        if stream.stopped:
            break
    return [*pieces, stream.flush(stops=len(parts) > early)]


def cut(text: str, stop: list[str], start: int = 0) -> str:
    """Letter by letter, up to the first stop string that ends after so many letters."""
    for end in range(start + 1, len(text) + 1):
        lengths = [len(one) for one in stop if text[:end].endswith(one)]
        if lengths:
            return text[: end - max(lengths)]
    return text


pieces_of_text = st.lists(
    st.text("abé😀\ufffd", max_size=3).map(str.encode) | st.binary(max_size=3), max_size=12
)


@settings(max_examples=400, deadline=None)
@given(pieces_of_text, st.lists(st.text("abé😀\ufffd", min_size=1, max_size=4), max_size=3))
def test_pieces_join_to_the_text_up_to_the_first_stop(parts: list[bytes], stop: list[str]) -> None:
    whole = b"".join(parts)
    expected = cut(whole.decode("utf-8", "replace"), stop)
    assert "".join(spoken(parts, stop)) == expected
    assert "".join(spoken([bytes([byte]) for byte in whole], stop)) == expected


def test_a_character_comes_out_whole() -> None:
    assert spoken([b"a\xf0\x9f", b"\x98", b"\x80b"], []) == ["a", "", "😀b", ""]
    assert spoken([b"a\xf0\x9f"], []) == ["a", "\ufffd"]
    assert spoken([b"\xf0\x9f", b"b"], []) == ["", "\ufffdb", ""]


def test_what_may_begin_a_stop_string_is_held_back_and_no_more() -> None:
    assert spoken([b"one\n", b"Us", b"er", b":no"], ["\nUser:"]) == ["one", "", "", "", ""]
    assert spoken([b"one\n", b"Us", b"ed"], ["\nUser:"]) == ["one", "", "\nUsed", ""]
    assert spoken([b"one\n", b"\n", b"Us"], ["\nUser:"]) == ["one", "\n", "", "\nUs"]
    assert spoken([b"one"], ["\nUser:"]) == ["one", ""]
    assert spoken([b"a", b"a", b"b"], ["aab"]) == ["", "", "", ""]
    assert spoken([b"aa", b"ab"], ["aab"]) == ["", "a", ""]


def test_the_stop_that_is_complete_first_counts() -> None:
    assert spoken([b"xabcd"], ["abcd", "bc"]) == ["xa", ""]
    assert spoken([b"xabc"], ["c", "abc"]) == ["x", ""]


def test_a_stop_string_that_the_last_half_of_a_character_completes_counts() -> None:
    stream = TextStream(["a\ufffd"])
    assert (stream.push(b"xa\xf0\x9f"), stream.stopped) == ("x", False)
    assert (stream.flush(), stream.stopped) == ("", True)
    assert spoken([b"a\xf0\x9f"], ["\ufffd"]) == ["a", ""]


letters = st.lists(st.text("ab", max_size=3), max_size=8)


@settings(max_examples=400, deadline=None)
@given(letters, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(0, 8))
def test_a_stop_string_that_is_complete_too_early_is_text(
    parts: list[str], stop: list[str], early: int
) -> None:
    said = spoken([part.encode() for part in parts], stop, early)
    assert "".join(said) == cut("".join(parts), stop, len("".join(parts[:early])))
