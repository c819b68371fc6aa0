import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perspectron.data import END_OF_TEXT, Tokenizer, bpe, open_corpus, tokenizer
from perspectron.data.specials import OURS
from perspectron.util.errors import ConfigError, DataError, StorageError
from perspectron.util.machine import Peak
from tests.refusals import refused

TEXTS = ["def f(x):\n        return x + 1\n" * 20, "The cat sat on the mat. 123456 äöü 😀\r\n" * 20]
TOKENIZER = Tokenizer.train(TEXTS, 300)


@settings(max_examples=100, deadline=None)
@given(st.text())
@example("")
@example("\r\n\n\r \t\0\x7f\x80")
@example("👩‍👩‍👧‍👦 e\u0301 \ufeff\U0010ffff")
@example(END_OF_TEXT)
@example(f"a{END_OF_TEXT} {END_OF_TEXT}\n")
@example(" " * 1000 + "\n" * 100)
@example("a" * 100_000)
@example("हिन्दी में १२३४")
def test_round_trip_is_exact_and_never_a_separator(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert 0 not in ids
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode()
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.byte_counts()[ids].sum() == len(text.encode())


def test_batch_equals_single() -> None:
    texts = [*TEXTS, "", END_OF_TEXT, "x"]
    assert TOKENIZER.encode_batch(texts) == [TOKENIZER.encode(text) for text in texts]
    assert TOKENIZER.encode_batch([]) == []


def test_saved_tokenizer_still_cannot_be_forged(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    TOKENIZER.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.fingerprint == TOKENIZER.fingerprint
    assert loaded.vocab_size == TOKENIZER.vocab_size == 300
    text = f"{TEXTS[0]}{END_OF_TEXT}"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.specials == OURS and 0 not in loaded.encode(text)


def test_training_is_deterministic_and_follows_the_text() -> None:
    assert Tokenizer.train(iter(TEXTS), 300).fingerprint == TOKENIZER.fingerprint
    assert Tokenizer.train(iter(TEXTS), 299).fingerprint != TOKENIZER.fingerprint
    assert Tokenizer.train(["other text, other text"], 320).fingerprint != TOKENIZER.fingerprint


def test_training_on_real_text_is_deterministic() -> None:
    texts = [document.text for document in open_corpus("stdlib").documents("heldout")][:15]
    assert Tokenizer.train(texts, 1000).fingerprint == Tokenizer.train(texts, 1000).fingerprint


def test_little_text_gives_a_smaller_tokenizer() -> None:
    small = Tokenizer.train(["ab ab"], 5000)
    assert small.vocab_size == 258  # 256 bytes, the separator and "ab"
    assert small.token_bytes(257) == b"ab"
    assert small.token_bytes(0) == b""
    assert sorted(small.token_bytes(i) for i in range(1, 257)) == [bytes([i]) for i in range(256)]


def test_separators_in_the_training_text_are_text() -> None:
    trained = Tokenizer.train([END_OF_TEXT * 50], 400)
    assert trained.decode(trained.encode(END_OF_TEXT)) == END_OF_TEXT
    assert END_OF_TEXT.encode() not in [trained.token_bytes(i) for i in range(trained.vocab_size)]


def test_words_split_as_code_and_prose_need() -> None:
    trained = Tokenizer.train(["        return 123456\n" * 50], 400)
    tokens = [trained.token_bytes(i) for i in trained.encode("        return 123456\n")]
    assert tokens == [b"       ", b" return", b" ", b"123", b"456", b"\n"]


def test_a_megabyte_of_one_letter_trains_and_encodes() -> None:
    trained = Tokenizer.train(["a" * 2**20, "=" * 2**20, " " * 2**20], 300)
    assert max(trained.byte_counts()) <= 65
    assert trained.decode(trained.encode("a" * 2**20)) == "a" * 2**20


def test_incomplete_characters_decode_to_a_mark() -> None:
    ids = TOKENIZER.encode("€")
    assert TOKENIZER.decode([0, *ids, 0]) == "€"
    assert TOKENIZER.decode(ids[:-1]) == "\ufffd"


@pytest.mark.parametrize("bad", [-1, 300])
def test_unknown_ids_are_refused(bad: int) -> None:
    with refused(DataError, bad, 299):
        TOKENIZER.decode([1, bad])


def test_a_tokenizer_of_no_text_or_too_few_ids_and_half_a_character_are_refused() -> None:
    with refused(DataError, "vocab_size", 256):
        Tokenizer.train(TEXTS, 256)
    with refused(DataError, "tokenizer"):
        Tokenizer.train(["", ""], 300)
    with refused(DataError, r"'\ud800'", 1):
        TOKENIZER.encode("a\ud800")
    with refused(ConfigError, "text", "a"):
        TOKENIZER.encode(["a"])  # type: ignore[arg-type]
    with refused(DataError):
        Tokenizer.train(["a\ud800"], 300)


def test_an_error_in_the_texts_reaches_the_caller() -> None:
    def texts() -> Any:
        yield "some"
        raise DataError("gone")

    with refused(DataError, "gone"):
        Tokenizer.train(texts(), 300)


def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "tokenizer.json"
    TOKENIZER.save(path)
    return path, json.loads(path.read_text())


DAMAGED: list[tuple[Callable[[dict[str, Any]], object], list[Any]]] = [
    (lambda v: v["model"]["vocab"].update(def_=2**40), ["model.vocab", 2**40]),
    (lambda v: v["model"]["vocab"].update({"def": 2**24}), ["model.vocab", 2**24]),
    (lambda v: v["model"]["vocab"].update({"def": -1}), ["model.vocab", -1]),
    (lambda v: v["model"]["vocab"].update({"def": 256.0}), ["model.vocab[...]", "float"]),
    (lambda v: v["model"]["vocab"].update({"!": True}), ["model.vocab[...]", "bool"]),
    (lambda v: v["model"]["vocab"].update({"!": "1"}), ["model.vocab[...]", "str"]),
    (lambda v: v["model"].update(vocab=5), ["model.vocab"]),
    (lambda v: v["model"].update(unk_token={}), ["model.unk_token"]),
    (lambda v: v["model"].update(dropout=0.5), ["model.dropout", 0.5]),
    (lambda v: v.update(added_tokens=[{}]), ["added_tokens[0]", "content"]),
    (lambda v: v.pop("model"), ["model"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), DAMAGED, ids=range(len(DAMAGED)))
def test_what_the_library_would_believe_is_refused_before_it_sees_it(
    tmp_path: Path, change, named: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids that make tables of terabytes, merges that are drawn."""
    path, value = saved(tmp_path)
    change(value)
    path.write_text(json.dumps(value))
    monkeypatch.setattr(tokenizer.tokenizers.Tokenizer, "from_str", None)  # must not be called
    with refused(DataError, *named) as error:
        Tokenizer.load(path)
    said = str(error.value)
    assert said.startswith(f"{path}: ") and "\n" not in said and len(said) < len(str(path)) + 250


REFUSED: list[Callable[[dict[str, Any]], object]] = [
    lambda v: v["model"].update(merges={}),
    lambda v: v["model"]["merges"].append(["q", "q"]),
    lambda v: v["model"]["merges"].append(["d"]),
    lambda v: v["model"].update(type="Trigram"),
    lambda v: v["model"].update(type="\ud800"),
    lambda v: v["pre_tokenizer"].update(type="Words"),
    lambda v: v["pre_tokenizer"].pop("pretokenizers"),
    lambda v: v["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="("),
    lambda v: v.update(normalizer=[1]),
]


@pytest.mark.parametrize("change", REFUSED, ids=range(len(REFUSED)))
def test_what_the_library_cannot_read_is_refused_in_a_line(tmp_path: Path, change) -> None:
    path, value = saved(tmp_path)
    change(value)
    path.write_text(json.dumps(value))
    with refused(DataError, path):
        Tokenizer.load(path)


def test_no_merge_gives_the_separator(tmp_path: Path) -> None:
    path, value = saved(tmp_path)
    vocab, merges = value["model"]["vocab"], value["model"]["merges"]
    letters = [END_OF_TEXT[:end] for end in range(2, len(END_OF_TEXT))]
    vocab.update({part: len(vocab) + i for i, part in enumerate(letters)})
    merges[:0] = [[whole[:-1], whole[-1]] for whole in [*letters, END_OF_TEXT]]
    value["pre_tokenizer"] = value["pre_tokenizer"]["pretokenizers"][1]
    path.write_text(json.dumps(value))
    assert 0 not in Tokenizer.load(path).encode(END_OF_TEXT)


def test_a_file_stays_as_it_came(tmp_path: Path) -> None:
    """Also one of an older library: without the fields that are newer, and with merges as one string."""
    path, value = saved(tmp_path)
    del value["model"]["ignore_merges"], value["model"]["byte_fallback"]
    value["model"]["merges"] = [" ".join(pair) for pair in value["model"]["merges"]]
    path.write_text(text := json.dumps(value))
    loaded = Tokenizer.load(path)
    loaded.save(tmp_path / "other.json")
    assert (tmp_path / "other.json").read_text() == text
    assert loaded.encode(TEXTS[0]) == TOKENIZER.encode(TEXTS[0])


def test_files_that_are_no_files_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = saved(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        with refused(DataError, tmp_path / name):
            Tokenizer.load(tmp_path / name)
    monkeypatch.setattr(bpe, "MOST_BYTES", 1000)
    with refused(DataError, path, 1000):
        Tokenizer.load(path)


def test_a_vast_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(1 << 36)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with refused(DataError, path, 67108864):
        Tokenizer.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 160 << 10


def test_what_the_library_dies_of_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):  # as pyo3 has it
        pass

    def panics(*_: object, **__: object) -> None:
        raise PanicException("called `Option::unwrap()` on a\n`None` value")

    path, _ = saved(tmp_path)

    monkeypatch.setattr(tokenizer, "_of", panics)
    with refused(DataError, path):
        Tokenizer.load(path)
    broken = Tokenizer.__new__(Tokenizer)
    broken._cut = True
    broken._inner = type("Broken", (), {"encode_batch_fast": panics})()
    with refused(DataError, "text"):
        broken.encode("a")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff\xfe", b"null", b'{"version": "1.0"', b'{"a": 1, "a": 1}', b"[" * 100_000]
)
def test_load_refuses_damaged_files(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with refused(DataError, path):
        Tokenizer.load(path)
    path.unlink()
    with refused(DataError, path):
        Tokenizer.load(path)


def test_save_to_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = saved(tmp_path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with refused(StorageError, path):
        Tokenizer.train(["ab ab"], 300).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@given(st.text(alphabet="ab1 \n\r\t_.,'é²終\u0300", max_size=200))
def test_a_long_text_is_encoded_in_pieces_as_in_one(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_PIECE", 3)
        assert TOKENIZER.encode(text) == TOKENIZER.encode_batch([text])[0]


def test_encoding_a_long_text_takes_little_memory() -> None:
    """A million characters: their ids, and what encoding one piece takes."""
    text = "the cat sat on the mat, again\n" * 33_334
    assert TOKENIZER.encode(text) == TOKENIZER.encode_batch([text])[0]
    assert len(list(tokenizer._pieces(text))) > 10
    with Peak() as peak:
        TOKENIZER.encode(text)
    assert peak.bytes is None or peak.bytes < 48 << 20


def test_the_same_tokenizer_is_made_once(tmp_path):
    """The library keeps some memory for good for each one that encodes."""
    trained = Tokenizer.train(["the cat sat on the mat"] * 3, 260)
    trained.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded._inner is trained._inner
    assert Tokenizer.train(["the dog ran"] * 3, 260)._inner is not trained._inner


def test_a_run_that_no_border_cuts_is_refused_where_it_would_take_gigabytes() -> None:
    with refused(DataError, "text", 4_194_305):
        TOKENIZER.encode('"' * (2**22 + 1))
    assert len(TOKENIZER.encode('"' * 2**16)) > 0


def test_what_an_earlier_version_imported_is_refused_as_its_ends_would_be_text(tmp_path: Path) -> None:
    vocab = {token: id for id, token in enumerate([END_OF_TEXT, *bpe.byte_letters(), "<|stop|><|eot|>"])}
    value = json.loads(Tokenizer.spelled([]).to_str())
    value["model"]["vocab"] = vocab
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    with refused(DataError, tmp_path / "tokenizer.json"):
        Tokenizer.load(tmp_path / "tokenizer.json")
