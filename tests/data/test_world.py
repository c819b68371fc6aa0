"""RWKV's World vocabulary: the longest token each time, in the author's file and in one of the tokenizers library."""

import codecs
import random

import pytest
import tokenizers

from perspectron.data import world
from perspectron.data.specials import Specials
from perspectron.data.tokenizer import Tokenizer
from perspectron.util.errors import DataError
from tests.refusals import refused
from tests.rwkv_models import PIECES, vocabulary, vocabulary_file


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("world")
    vocabulary_file(folder)
    return Tokenizer.of_transformers(folder)


def longest(data: bytes) -> list[int]:
    """By trying every length."""
    known, ids = vocabulary(), []
    while data:
        token = next(data[:n] for n in range(len(data), 0, -1) if data[:n] in known)
        ids.append(known[token])
        data = data[len(token) :]
    return ids


def texts() -> list[str]:
    draw = random.Random(1)
    parts = [*PIECES, "é", "é ", "世", "🎉", "t", " t", "h", "\x00", world.SEPARATOR]
    return ["", *("".join(draw.choices(parts, k=n)) for n in range(1, 40))]


def test_the_longest_token_is_taken_each_time(own):
    for text in texts():
        assert own.encode(text) == longest(text.encode())
        assert own.decode(own.encode(text)) == text
    assert own.vocab_size == len(vocabulary()) + 1


def test_its_file_of_the_tokenizers_library_has_the_same_ids(own):
    inner = tokenizers.Tokenizer.from_str(own.to_str())
    for text in texts():
        if world.SEPARATOR not in text:  # which that reads as a special token
            assert inner.encode(text, add_special_tokens=False).ids == own.encode(text)
            assert inner.decode(own.encode(text)) == text


def test_a_long_text_takes_time_that_grows_as_it_does(own):
    text = "the quick brown fox " * 40_000 + "x" * 200_000
    ids = own.encode(text)
    assert len(ids) > 400_000 and b"".join(own.token_bytes(id) for id in ids) == text.encode()
    assert [len(piece) for piece in own.pieces(text)][:2] == [1 << 14] * 2


def test_only_a_template_writes_the_separator(own):
    assert 0 not in own.encode(world.SEPARATOR)
    marked = own.marked(f"{world.SEPARATOR}the") + world.SEPARATOR
    assert own.encode(marked)[:2] == [0, vocabulary()[b"the"]] and own.encode(marked).count(0) == 1
    assert own.token_bytes(0) == b""


def test_it_is_saved_and_loaded(own, tmp_path):
    own.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == own.fingerprint and loaded.specials == own.specials
    assert loaded.encode("the  汉字") == own.encode("the  汉字")


def test_special_ids_are_those_of_the_files_beside_it(tmp_path):
    vocabulary_file(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 0, "bos_token_id": 0}')
    spelled = '{"bos_token": "%s", "eos_token": "\\n\\n", "pad_token": "%s"}' % ((world.SEPARATOR,) * 2)
    (tmp_path / "tokenizer_config.json").write_text(spelled)
    end = vocabulary()[b"\n\n"]
    found = Tokenizer.of_transformers(tmp_path).specials
    assert found == Specials((), frozenset((0, end)), 0, None, end)


def test_a_token_of_text_that_ends_texts_keeps_its_bytes(tmp_path):
    vocabulary_file(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "\\n\\n"}')
    found = Tokenizer.of_transformers(tmp_path)
    found.save(tmp_path / "saved" / "tokenizer.json")
    for one in (found, Tokenizer.load(tmp_path / "saved" / "tokenizer.json")):
        assert one.specials.stops == {vocabulary()[b"\n\n"]}
        assert one.decode(one.encode("the\n\nthe")) == "the\n\nthe"
        assert one.byte_counts().sum() == sum(map(len, vocabulary()))


def test_a_stream_gives_whole_characters(own):
    """A token may end within a character, and one may be the rest of it and a space."""
    ids = own.encode("a汉世é 🎉")
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    shown = [decoder.decode(own.token_bytes(id)) for id in ids]
    assert "".join(shown) == "a汉世é 🎉" and "" in shown


LINES = [f"{id} {bytes([id - 1])!r} 1" for id in range(1, 257)]


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("300 'ab' 3", 257),
        ("300 'ab'", 257),
        ("x 'ab' 2", 257),
        ("300 ab 2", 257),
        ("300 ['ab'] 2", 257),
        ("300 'a' 'b' 2", 257),
        ("300 f'ab' 2", 257),
        ("300 '' 0", 257),
        ("0 'ab' 2", 257),
        ("17 'ab' 2", 257),
        ("300 'a' 1", 257),
        ("99999999 'ab' 2", 257),
        (r"300 '\ud800' 3", 257),
        (r"300 '\N{no}' 3", 257),
        ("300 b'é' 2", 257),
        ("", 257),
        ("300 '" + "(" * 20_000 + "' 20000", 257),
    ],
)
def test_a_line_that_is_not_right_is_named(line, number, tmp_path):
    path = tmp_path / world.FILE
    path.write_text("\n".join([*LINES, line, "301 'abc' 3"]))
    with refused(DataError, path, number):
        Tokenizer.of_transformers(tmp_path)


def test_a_byte_without_a_token_is_named(tmp_path):
    (tmp_path / world.FILE).write_text("\n".join(LINES[:200] + LINES[201:]))
    with refused(DataError, "0xc8"):
        Tokenizer.of_transformers(tmp_path)


def test_lines_may_end_as_windows_ends_them(own, tmp_path):
    text = vocabulary_file(tmp_path).read_text()
    (tmp_path / world.FILE).write_text(text, newline="\r\n")
    assert Tokenizer.of_transformers(tmp_path).fingerprint == own.fingerprint
