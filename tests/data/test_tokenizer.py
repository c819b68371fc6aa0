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
from perspectron.util.errors import DataError, StorageError
from perspectron.util.machine import Peak

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
    assert TOKENIZER.end_of_text not in ids
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
    assert loaded.end_of_text == 0 and 0 not in loaded.encode(text)


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
    with pytest.raises(DataError, match=f"{bad} is not between 0 and 299"):
        TOKENIZER.decode([1, bad])


def test_refusals() -> None:
    with pytest.raises(DataError, match="vocab_size: 256 is below 257"):
        Tokenizer.train(TEXTS, 256)
    with pytest.raises(DataError, match="no text"):
        Tokenizer.train(["", ""], 300)
    with pytest.raises(DataError, match=r"'\\ud800' at 1 is half of a surrogate pair"):
        TOKENIZER.encode("a\ud800")
    with pytest.raises(DataError, match="surrogate"):
        Tokenizer.train(["a\ud800"], 300)


def test_an_error_in_the_texts_reaches_the_caller() -> None:
    def texts() -> Any:
        yield "some"
        raise DataError("gone")

    with pytest.raises(DataError, match="gone"):
        Tokenizer.train(texts(), 300)


def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "tokenizer.json"
    TOKENIZER.save(path)
    return path, json.loads(path.read_text())


def normalizes(value: dict[str, Any]) -> None:
    value["normalizer"] = {"type": "Lowercase"}


def adds_special(value: dict[str, Any]) -> None:
    value["added_tokens"].append(value["added_tokens"][0] | {"id": 300, "content": "<|other|>"})


def splits_on_space(value: dict[str, Any]) -> None:
    value["pre_tokenizer"] = {"type": "Whitespace"}


def adds_prefix(value: dict[str, Any]) -> None:
    value["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def drops_words(value: dict[str, Any]) -> None:
    value["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"


def has_dropout(value: dict[str, Any]) -> None:
    value["model"]["dropout"] = 0.5


def skips_an_id(value: dict[str, Any]) -> None:
    last = max(value["model"]["vocab"], key=value["model"]["vocab"].__getitem__)
    value["model"]["vocab"][last] = 1000


def lacks_a_byte(value: dict[str, Any]) -> None:
    value["model"]["vocab"]["Ġx!"] = value["model"]["vocab"].pop("Ā")


def holds_no_bytes(value: dict[str, Any]) -> None:
    value["model"]["merges"].pop()
    last = max(value["model"]["vocab"], key=value["model"]["vocab"].__getitem__)
    value["model"]["vocab"]["中"] = value["model"]["vocab"].pop(last)


@pytest.mark.parametrize(
    "damage",
    [
        normalizes,
        adds_special,
        splits_on_space,
        adds_prefix,
        drops_words,
        has_dropout,
        skips_an_id,
        lacks_a_byte,
        holds_no_bytes,
    ],
)
def test_load_refuses_other_tokenizers(tmp_path: Path, damage: Any) -> None:
    path, value = saved(tmp_path)
    damage(value)
    path.write_text(json.dumps(value))
    with pytest.raises(
        DataError, match=r"tokenizer\.json: (not|id|token|1 of 256|added_tokens|pre_tokenizer|model)"
    ):
        Tokenizer.load(path)


def regex(value: dict[str, Any]) -> dict[str, Any]:
    return value["pre_tokenizer"]["pretokenizers"][0]["pattern"]


FOREIGN: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda v: v["model"]["vocab"].update(def_=2**40), r"id of token 'def_' is 1099511627776, must be in 0 … 300"),
    (lambda v: v["model"]["vocab"].update({"def": 2**40}), "is 1099511627776, must be in 0 … 299"),
    (lambda v: v["model"]["vocab"].update({"def": 2**32}), "is 4294967296, must be in 0 … 299"),
    (lambda v: v["model"]["vocab"].update({"def": -1}), "is -1, must be in 0 … 299"),
    (lambda v: v["model"]["vocab"].update({"def": 256.0}), r"model.vocab\[...\]: expected `int`, got `float`"),
    (lambda v: v["model"]["vocab"].update({"!": True}), r"model.vocab\[...\]: expected `int`, got `bool`"),
    (lambda v: v["model"]["vocab"].update({"!": "1"}), r"model.vocab\[...\]: expected `int`, got `str`"),
    (lambda v: v["model"]["vocab"].update({"!": 2}), "ids are not 0 to 299"),
    (lambda v: v["model"]["vocab"].update({"": v["model"]["vocab"].pop("def")}), "token '' is not spelled"),
    (lambda v: v["model"].update(type="\ud800"), "half of a surrogate pair"),
    (lambda v: v["model"].update(vocab=[]), "model.vocab: expected `object`, got `array`"),
    (lambda v: v["model"].update(merges={}), "model.merges: expected `array`, got `object`"),
    (lambda v: v["model"]["merges"].append(["q", "q"]), r"merges\[43\] is \['q', 'q'\], must be of two tokens"),
    (lambda v: v["model"]["merges"].append(["中", "q"]), r"merges\[43\]"),
    (lambda v: v["model"]["merges"].append(["d"]), r"merges\[43\]"),
    (lambda v: v["model"]["merges"].append([{}, 3]), r"merges\[43\]\[0\]: expected `str`"),
    (lambda v: v["model"]["merges"].append(["", "d"]), r"merges\[43\]"),
    (lambda v: v["model"]["merges"].append("d e f"), r"merges\[43\] is \['d', 'e', 'f'\]"),
    (lambda v: v["model"]["merges"].append(None), r"merges\[43\]: expected"),
    (lambda v: regex(v).update(Regex=r"(a+)+$"), r"pattern is '\(a\+\)\+\$', must be"),
    (lambda v: regex(v).update(Regex=regex(v)["Regex"] + "|(x+x+)+y"), "must be that of GPT-2, Llama 3 or this lib"),
    (lambda v: regex(v).update(Regex=["a"]), r"pattern\[...\]: expected `str`, got `array`"),
    (lambda v: regex(v).update(Regex=None), r"pattern\[...\]: expected `str`, got `null`"),
    (lambda v: regex(v).update(String=regex(v).pop("Regex")), "pre_tokenizer is .*must split words as"),
    (lambda v: v["model"].update(type="Unigram"), "model.type: invalid enum value 'Unigram'"),
    (lambda v: v["added_tokens"][0].update(id=2**40), "added_tokens has '<.endoftext.>' with id 1099511627776"),
    (lambda v: v.pop("pre_tokenizer"), "missing required field `pre_tokenizer`"),
    (lambda v: v.update(pre_tokenizer=None), "pre_tokenizer: expected `object`, got `null`"),
]  # fmt: skip


def test_what_decides_nothing_here_is_not_asked_for(tmp_path: Path) -> None:
    """Of whatever a file says beside the vocabulary, merges and splits the library sees nothing."""
    path, value = saved(tmp_path)
    value |= {"decoder": "x" * 300, "truncation": {"max_length": 2**62}, "post_processor": [1]}
    value["model"]["cache_capacity"] = 2**62
    path.write_text(json.dumps(value))
    assert Tokenizer.load(path).fingerprint == TOKENIZER.fingerprint


@pytest.mark.parametrize(("change", "message"), FOREIGN, ids=range(len(FOREIGN)))
def test_what_the_library_would_believe_is_refused_before_it_sees_it(
    tmp_path: Path, change, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose patterns take exponential time, whose ids make tables of terabytes, whose merges have no tokens."""
    path, value = saved(tmp_path)
    change(value)
    path.write_text(json.dumps(value))
    monkeypatch.setattr(tokenizer.tokenizers.Tokenizer, "from_str", None)  # must not be called
    with pytest.raises(DataError, match=message) as error:
        Tokenizer.load(path)
    said = str(error.value)
    assert said.startswith(f"{path}: ") and "\n" not in said and len(said) < len(str(path)) + 250


def test_no_merge_gives_the_separator(tmp_path: Path) -> None:
    path, value = saved(tmp_path)
    vocab, merges = value["model"]["vocab"], value["model"]["merges"]
    part = END_OF_TEXT[:-1]
    for token in list(vocab)[-1:]:
        vocab[part] = vocab.pop(token)
    merges[:] = [pair for pair in merges if "".join(pair) in vocab] + [[part, ">"]]
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match=r"model.merges.* must be of two tokens into one"):
        Tokenizer.load(path)


def test_files_of_older_libraries_load(tmp_path: Path) -> None:
    """Without the fields that are newer, and with merges as one string."""
    path, value = saved(tmp_path)
    before = TOKENIZER.fingerprint
    del value["model"]["ignore_merges"], value["model"]["byte_fallback"]
    value["model"]["merges"] = [" ".join(pair) for pair in value["model"]["merges"]]
    path.write_text(json.dumps(value))
    assert Tokenizer.load(path).fingerprint == before


def test_files_that_are_no_files_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = saved(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        with pytest.raises(DataError, match="not a regular file"):
            Tokenizer.load(tmp_path / name)
    monkeypatch.setattr(bpe, "MOST_BYTES", 1000)
    with pytest.raises(DataError, match=r"tokenizer\.json: .*more than 1000 bytes"):
        Tokenizer.load(path)


def test_a_vast_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(1 << 36)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="more than 67108864 bytes"):
        Tokenizer.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 160 << 10


def test_what_the_library_dies_of_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):  # as pyo3 has it
        pass

    def panics(*_: object) -> None:
        raise PanicException("called `Option::unwrap()` on a\n`None` value")

    path, _ = saved(tmp_path)

    monkeypatch.setattr(tokenizer, "_of", panics)
    with pytest.raises(
        DataError, match=r"tokenizer.json: the tokenizer's library failed \(called .* a `None`"
    ):
        Tokenizer.load(path)
    broken = Tokenizer.__new__(Tokenizer)
    broken._inner = type("Broken", (), {"encode_batch_fast": panics})()
    with pytest.raises(DataError, match="text: the tokenizer's library failed"):
        broken.encode("a")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff\xfe", b"null", b'{"version": "1.0"', b'{"a": 1, "a": 1}', b"[" * 100_000]
)
def test_load_refuses_damaged_files(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer file"):
        Tokenizer.load(path)
    path.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(path)


def test_save_to_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = saved(tmp_path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(StorageError, match="No space left"):
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


@pytest.mark.parametrize("field", ["type", "pretokenizers"])
def test_a_file_without_its_splits_is_refused(tmp_path: Path, field: str) -> None:
    TOKENIZER.save(tmp_path / "tokenizer.json")
    value = json.loads((tmp_path / "tokenizer.json").read_text())
    del value["pre_tokenizer"][field]
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    with pytest.raises(
        DataError,
        match=f"pre_tokenizer: .*missing required field `{field}`",
    ):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_the_same_tokenizer_is_made_once(tmp_path):
    """The library keeps some memory for good for each one that encodes."""
    trained = Tokenizer.train(["the cat sat on the mat"] * 3, 260)
    trained.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded._inner is trained._inner
    assert Tokenizer.train(["the dog ran"] * 3, 260)._inner is not trained._inner


def test_a_run_that_no_border_cuts_is_refused_where_it_would_take_gigabytes() -> None:
    with pytest.raises(DataError, match=r"text: 1,048,577 characters without a space after a letter"):
        TOKENIZER.encode('"' * (2**20 + 1))
    assert len(TOKENIZER.encode('"' * 2**16)) > 0
