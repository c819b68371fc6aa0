"""Books of packages: their forms, digests, the clean split, and what is refused."""

import gzip
import hashlib
import random
import struct
import zlib

import pytest

from perspectron.data import books, open_corpus
from perspectron.data.books import Book, Clean
from perspectron.util.errors import DataError
from tests.refusals import refused

WORDS = ["lamp", "größer", "the", "sea", "was", "grey", "→", "and", "Emma", "said"]


def text_of(seed: int, size: int) -> str:
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(WORDS, k=9)) + "\n" * draw.choice((1, 1, 2)) for _ in range(size // 40)]
    return "".join(lines) + "The end.\n"


def as_r(text: str) -> bytes:
    """One object of an R package: version 3, the name of the encoding, a vector of strings."""
    head = b"X\n" + struct.pack(">iiii", 3, 0x40200, 0x30500, 5) + b"UTF-8"
    lines = [line.encode() for line in text.removesuffix("\n").split("\n")]
    body = struct.pack(">ii", 16, len(lines)) + b"".join(
        struct.pack(">ii", 0x40009, len(x)) + x for x in lines
    )
    return struct.pack(">I", len(head + body)) + zlib.compress(head + body)


def as_windows(text: str, size: int) -> bytes:
    """A file for `bible`, whose windows are compressed as the Unix program `compress` does."""
    data = text.encode()
    packed = [compress(data[at : at + size]) for at in range(0, len(data), size)]
    begin = 0x5C + 4 * len(packed)
    places = [begin + sum(map(len, packed[:i])) for i in range(len(packed))]
    head = b"EC02".ljust(0x58, b"\0") + struct.pack(f">{1 + len(places)}I", len(places), *places)
    return head + b"".join(packed)


def compress(data: bytes) -> bytes:
    table, free, width = {bytes([i]): i for i in range(256)}, 257, 9
    codes, out = list[int](), b""

    def flush(whole: bool) -> bytes:
        bits = sum(code << (width * i) for i, code in enumerate(codes))
        return bits.to_bytes(width if whole else -(-width * len(codes) // 8), "little")

    text = b""
    for byte in (bytes([b]) for b in data):
        if text + byte in table:
            text += byte
            continue
        codes.append(table[text])
        table[text + byte], free, text = free, free + 1, byte
        # The reader's table is one entry behind.
        wider = free - 1 >= 1 << width
        if len(codes) == 8 or wider:
            out, codes = out + flush(True), []
        width += wider
    codes.append(table[text])
    return out + flush(False)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Three books as packages have them, unpacked into the user's folder, and what is frozen of them."""
    texts = {
        form: text_of(seed, size)
        for seed, (form, size) in enumerate({"R": 900_000, "bible": 300_000, "dict": 200_000}.items())
    }
    unpacked = tmp_path / "data"
    tagged = texts["dict"].replace("The end.\n", "   [1913 Webster]\nThe end.\n")
    files = {
        "R": as_r(texts["R"]),
        "bible": as_windows(texts["bible"], 70_000),
        "dict": gzip.compress(tagged.encode()),
    }
    listed = []
    for form, data in files.items():
        (unpacked / "books" / "none").mkdir(parents=True, exist_ok=True)
        (unpacked / "books" / "none" / form).write_bytes(data)
        digest = hashlib.sha256(texts[form].encode()).hexdigest()
        listed.append(
            Book(form.lower(), f"package-{form}", "1.0", f"none/{form}", form, len(texts[form]), digest)
        )
    monkeypatch.setattr(books, "user_data_path", lambda name: unpacked)
    monkeypatch.setattr(books, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(books, "listed", lambda: (tuple(listed), Clean(0.3, 0, 0, "")))
    clean = [piece for piece in books.documents() if books.is_clean(piece[0])]
    frozen = Clean(0.3, len(clean), 0, books.digest_of([path for _, path in clean]))
    monkeypatch.setattr(books, "listed", lambda: (tuple(listed), frozen))
    return texts, unpacked / "books" / "none"


def test_every_form_gives_its_text_in_documents_cut_at_paragraphs(shelf):
    texts, _ = shelf
    found = books.documents()
    for form, text in texts.items():
        pieces = [
            path.read_text(encoding="utf-8") for name, path in found if name.startswith(f"{form.lower()}/")
        ]
        assert "".join(pieces) == text
        assert all(len(piece) >= books.DOCUMENT and piece.endswith("\n\n") for piece in pieces[:-1])


def test_the_clean_split_is_in_no_split_of_the_corpus(shelf):
    corpus = open_corpus("books", 0.2, dev=0.2)
    names = {split: {d.name for d in corpus.documents(split)} for split in corpus.splits}
    clean = {name for name, _ in books.clean()}
    every = {name for name, _ in books.documents()}
    assert clean and all(names.values())
    assert clean.isdisjoint(set.union(*names.values()))
    assert clean | set.union(*names.values()) == every
    assert sum(map(len, names.values())) + len(clean) == len(every)
    assert open_corpus("books", 0.2, dev=0.2).fingerprint == corpus.fingerprint
    assert corpus.fingerprint.startswith("books:")


def test_a_text_that_was_changed_in_the_cache_is_made_again(shelf):
    (_, first), *_ = books.documents()
    before = first.read_bytes()
    first.write_bytes(b"changed")
    assert books.documents()[0][1].read_bytes() == before


def test_missing_packages_are_named_with_the_command_that_gets_them(shelf, tmp_path, monkeypatch):
    _, folder = shelf
    monkeypatch.setattr(books, "cache_folder", lambda: tmp_path / "other")
    (folder / "dict").unlink()
    with refused(DataError, "package-dict", "apt-get", "dpkg-deb") as caught:
        open_corpus("books")
    assert "package-R" not in str(caught.value)


def test_another_text_is_refused_with_its_digest(shelf, tmp_path, monkeypatch):
    texts, folder = shelf
    monkeypatch.setattr(books, "cache_folder", lambda: tmp_path / "other")
    (folder / "R").write_bytes(as_r(texts["R"] + "More.\n"))
    with refused(DataError, "none/R", "sha256", "package-R", "1.0"):
        open_corpus("books")


def test_another_clean_split_than_the_frozen_one_is_refused(shelf, monkeypatch):
    listed, frozen = books.listed()
    monkeypatch.setattr(books, "listed", lambda: (listed, frozen._replace(share=0.6)))
    with refused(DataError, "clean", "sha256", frozen.sha256):
        books.clean()


def test_what_is_frozen_is_whole():
    listed, clean = books.listed()
    assert len({book.sha256 for book in listed}) == len({book.package for book in listed}) == len(listed)
    assert all(len(digest) == 64 for digest in (clean.sha256, *(book.sha256 for book in listed)))
    assert {book.form for book in listed} <= set(books.FORMS)
    assert 0 < clean.bytes < sum(book.bytes for book in listed) * 2 * clean.share
