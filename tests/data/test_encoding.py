"""Encoding: in processes, interrupted anywhere; several sources, mixed by their weights; tokenizers of every kind."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perspectron.data import Shards, Tokenizer, encode, made_in, open_corpus, open_shards
from perspectron.data import encoding as encoding_module
from perspectron.data.loader import Loader
from perspectron.data.specials import Specials
from perspectron.data.vocabulary import BYTES, characters, made
from perspectron.util.errors import DataError
from tests.data.conftest import sentence
from tests.refusals import refused

WEIGHTS = {"digits": 0.7, "words": 0.3}


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two sources, the second of which is far too small for its share."""
    root = tmp_path_factory.mktemp("sources")
    (root / "digits").mkdir()
    for i in range(60):
        (root / "digits" / f"{i}.txt").write_text(f"{i * 7919} " * 40)
    lines = (json.dumps({"text": "many words of prose " * (i % 7 + 1)}) + "\n" for i in range(30))
    (root / "words.jsonl").write_text("".join(lines))
    return f"digits=0.7:{root / 'digits'} words=0.3:{root / 'words.jsonl'}"


@pytest.fixture(scope="module")
def mixed(texts: str, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    out = tmp_path_factory.mktemp("mixed") / "shards"
    return encode(open_corpus(texts, heldout=0.2), tokenizer, out, shard_tokens=512)


# Progress and interruption


def test_progress_over_several_sources_is_by_their_bytes(
    texts: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    told, corpus = list[float](), open_corpus(texts, heldout=0.2)
    encode(corpus, tokenizer, tmp_path / "out", tell=lambda _, share: told.append(share))
    digits, words = (corpus.size for _, corpus in corpus.named)
    assert any(share == pytest.approx(digits / (digits + words)) for share in told)
    assert told == sorted(told) and told[-1] == pytest.approx(1, abs=0.01)


def test_progress_is_told_in_bytes_and_shares(
    shards: Shards, text_folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_module, "BATCH_DOCUMENTS", 8)
    told: list[tuple[int, float]] = []
    corpus = open_corpus(str(text_folder), heldout=0.2)
    encode(corpus, tokenizer, tmp_path / "out", shard_tokens=256, tell=lambda *done: told.append(done))
    assert contents(tmp_path / "out") == contents(shards.path)
    assert told == sorted(told) and told[-1][1] == pytest.approx(1)
    whole = sum(shards.split(split).text_bytes for split in shards.splits)
    assert told[-1][0] == whole


def test_an_encoding_that_goes_on_does_not_encode_again(
    shards: Shards, text_folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_module, "BATCH_DOCUMENTS", 4)
    out, encoded, encode_items = tmp_path / "out", list[str](), Tokenizer.encode_items

    def watched(self: Tokenizer, items: Any, dtype: str, *end: Any) -> Any:
        if len(encoded) == until:
            raise KeyboardInterrupt
        encoded.extend(text for _, text in items)
        return encode_items(self, items, dtype, *end)

    monkeypatch.setattr(Tokenizer, "encode_items", watched)
    until = 72
    with pytest.raises(KeyboardInterrupt):
        encode(open_corpus(str(text_folder), heldout=0.2), tokenizer, out, shard_tokens=256)
    first, until = list(encoded), -1
    encoded.clear()
    encode(open_corpus(str(text_folder), heldout=0.2), tokenizer, out, shard_tokens=256)
    assert contents(out) == contents(shards.path)
    again = set(first) & set(encoded)
    assert len(first) == 72 and len(again) < 20, "what stood in a complete shard is not encoded again"


# Several sources


def test_sources_stand_one_after_another(mixed: Shards, texts: str, tokenizer: Tokenizer) -> None:
    corpus = open_corpus(texts, heldout=0.2)
    for split in corpus.splits:
        its = mixed.split(split)
        whole = [tokenizer.decode(its.document(i)) for i in range(its.documents)]
        assert whole == [document.text for document in corpus.documents(split)]
        assert its.tokens == sum(source.tokens for source in its.sources)
        assert {source.name: float(source.weight) for source in its.sources} == WEIGHTS
    again = open_shards(mixed.path)
    assert again.corpus_fingerprint == corpus.fingerprint
    assert again.split("train").read(0, 900).tolist() == mixed.split("train").read(0, 900).tolist()


def counted(mixed: Shards, loader: Loader, batches: int) -> dict[str, int]:
    """Ids of each source in so many batches: digits have no letters."""
    border, seen = mixed.split("train").sources[0].tokens, dict.fromkeys(WEIGHTS, 0)
    train = mixed.split("train")
    digits = {tuple(train.read(at, at + 8)) for at in range(border - 8)}
    for _ in range(batches):
        for row in loader.next_batch().ids_BT.numpy():
            seen["digits" if tuple(row) in digits else "words"] += len(row)
    return seen


def test_an_epoch_has_the_shares_that_were_asked_for(mixed: Shards) -> None:
    loader = Loader(mixed.split("train"), batch_size=1, seq_len=8, seed=3)
    assert loader.windows > 1000
    seen = counted(mixed, loader, loader.windows)
    for name, weight in WEIGHTS.items():
        assert seen[name] / sum(seen.values()) == pytest.approx(weight, abs=0.001)
    early = counted(mixed, Loader(mixed.split("train"), batch_size=10, seq_len=8, seed=3), 2)
    assert early == {"digits": 14 * 8, "words": 6 * 8}, "and every batch has them"


def test_every_window_of_a_source_is_read_once_in_each_pass_over_it(mixed: Shards) -> None:
    train = mixed.split("train")
    loader = Loader(train, batch_size=10, seq_len=8, seed=3)
    starts = loader._starts(np.arange(loader.windows))
    border = train.sources[0].tokens
    for i, source in enumerate(train.sources):
        mine = starts[(starts >= border) == bool(i)] - i * border
        windows = (source.tokens - 1) // 8
        for at in range(0, len(mine) - windows, windows):
            assert sorted(mine[at : at + windows].tolist()) == list(range(0, 8 * windows, 8))
    assert (starts >= border).sum() > 2 * (train.sources[1].tokens // 8), (
        "the small one is read several times"
    )


@pytest.mark.parametrize("stop", [1, 37, 130])
def test_a_mixture_goes_on_bit_for_bit(mixed: Shards, stop: int) -> None:
    def loader() -> Loader:
        return Loader(mixed.split("train"), batch_size=6, seq_len=16, seed=3)

    whole, first = loader(), loader()
    batches = [whole.next_batch() for _ in range(2 * whole.windows // 6)]
    for _ in range(stop):
        first.next_batch()
    second = loader()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for batch in batches[stop:]:
        other = second.next_batch()
        assert other.ids_BT.equal(batch.ids_BT) and other.targets_BT.equal(batch.targets_BT)


def test_ranks_share_a_mixture(mixed: Shards) -> None:
    def loader(**ranks: int) -> Loader:
        return Loader(mixed.split("train"), batch_size=6, seq_len=16, seed=3, **ranks)

    whole, parts = loader(), [loader(rank=rank, world_size=3) for rank in range(3)]
    for _ in range(40):
        rows = np.concatenate([part.next_batch().ids_BT.numpy() for part in parts])
        np.testing.assert_array_equal(rows, whole.next_batch().ids_BT.numpy())


def test_other_weights_and_other_sources_replace_a_mixture(
    texts: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    encode(open_corpus(texts), tokenizer, out)
    before = contents(out)
    assert contents(encode(open_corpus(texts), tokenizer, out).path) == before
    other = texts.replace("0.7", "0.4").replace("words=0.3", "prose=0.6")
    found = encode(open_corpus(other), tokenizer, out)
    assert [source.name for source in found.split("train").sources] == ["digits", "prose"]
    assert not (out / "words").exists()
    alone = encode(open_corpus(texts.split("0.3:")[1]), tokenizer, out)
    assert [source.name for source in alone.split("train").sources] == [""]
    assert {path.name for path in out.iterdir()} - {".lock"} == {
        f"{split}-00000.{kind}" for split in ("train", "heldout") for kind in ("bin", "starts")
    } | {"manifest.json"}


def test_other_weights_encode_nothing_again(
    texts: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, other = tmp_path / "out", texts.replace("0.7", "0.4").replace("0.3", "0.6")
    encode(open_corpus(texts), made_in(out, "bpe", open_corpus(texts), 300), out)
    monkeypatch.setattr(Tokenizer, "encode_items", lambda *_: pytest.fail("encoded again"))
    monkeypatch.setattr(Tokenizer, "train", lambda *_: pytest.fail("trained again"))
    found = encode(open_corpus(other), made_in(out, "bpe", open_corpus(other), 300), out)
    assert [float(source.weight) for source in found.split("train").sources] == [0.4, 0.6]


def test_texts_in_the_folder_of_a_source_stay(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The folder of an encoding can be the one that the sources are in."""

    def tell(_: int, share: float) -> None:
        raise KeyboardInterrupt

    for name in ("code", "prose", "other"):
        (tmp_path / name).mkdir()
        for i in range(6):
            (tmp_path / name / f"{i}.txt").write_text(f"{name} {i}, some words\n" * 50)
    before = contents(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        encode(
            open_corpus(f"code=0.5:{tmp_path}/code prose=0.5:{tmp_path}/prose"),
            tokenizer,
            tmp_path,
            tell=tell,
        )
    encode(open_corpus(f"{tmp_path}/other"), tokenizer, tmp_path)
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert not any("/" in name for name in after.keys() - before.keys()), (
        "nothing of the encoding of both stays"
    )


def test_nothing_stays_of_an_interrupted_encoding_of_another_kind(
    texts: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits, words = texts.split()[0].partition(":")[2], texts.split("0.3:")[1]
    sources = [texts, digits, f"a=0.5:{digits} words=0.5:{words}", texts, words]
    monkeypatch.setattr(encoding_module, "BATCH_DOCUMENTS", 8)

    def encoded(source: str, out: Path, until: float = 2.0) -> None:
        def tell(_: int, share: float) -> None:
            if share > until:
                raise KeyboardInterrupt

        encode(open_corpus(source), tokenizer, out, shard_tokens=512, tell=tell)

    for source, other in itertools.pairwise(sources):
        out, fresh = tmp_path / "out", tmp_path / "fresh"
        with pytest.raises(KeyboardInterrupt):
            encoded(source, out, until=0.9)
        assert len(contents(out)) > 2
        encoded(other, out)
        encoded(other, fresh)
        assert contents(out) == contents(fresh)
        shutil.rmtree(out)
        shutil.rmtree(fresh)


def test_a_position_in_other_weights_is_refused(texts: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def loader(weights: str) -> Loader:
        shards = encode(open_corpus(weights), tokenizer, tmp_path / "out")
        return Loader(shards.split("train"), batch_size=2, seq_len=16, seed=0)

    first = loader(texts).state_dict()
    second = loader(texts.replace("0.7", "0.4").replace("0.3", "0.6"))
    assert second.windows == first["windows"]
    with refused(DataError, "digits", 0.4, "words", 0.6):
        second.load_state_dict(first)
    alone = loader(texts.split("0.3:")[1])
    with refused(DataError):
        alone.load_state_dict(first)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("a=0.7:{0} b=0.2:{0}", [0.9, "a", 0.7, "b", 0.2]),
        ("a=0.7:{0} a=0.3:{0}", ["'a'"]),
        ("a=0.7:{0} b=x:{0}", ["b", "'x'"]),
        ("a=0.7:{0} b=:{0}", ["b", "''"]),
        ("a=1.3:{0} b=-0.3:{0}", ["a", "'1.3'"]),
        ("a=1:{0} b=0:{0}", ["b", "'0'"]),
        ("a=1:{0} b=-1:{0}", ["b", "'-1'"]),
        ("a=nan:{0} b=1:{0}", ["a", "'nan'"]),
        ("a=inf:{0} b=1:{0}", ["a", "'inf'"]),
        ("a=1/0:{0} b=1:{0}", ["a", "'1/0'"]),
        ("a=0.7:{0} b=0.3:nowhere", ["b", "nowhere"]),
        ("a=0.7:{0} b=0.3:{1}", ["b", "{1}"]),
    ],
)
def test_mixtures_that_make_no_sense(texts: str, mixed: Shards, source: str, named: list[Any]) -> None:
    named = [mixed.path if name == "{1}" else name for name in named]
    with refused(DataError, *named):
        open_corpus(source.format(texts.split("0.3:")[1], mixed.path))


def test_a_source_that_is_too_short_for_a_window_is_named(mixed: Shards) -> None:
    tokens = mixed.split("train").sources[1].tokens
    with refused(DataError, "train", "words", tokens, tokens + 1):
        Loader(mixed.split("train"), batch_size=1, seq_len=tokens, seed=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sources": {}}, ["sources"]),
        ({"sources": {"digits": "1/2"}}, [0.5]),
        ({"sources": {"digits": 0.7, "words": 0.3}}, ["sources[...]", "float"]),
        ({"sources": {"digits": "1e99999999", "words": "3/10"}}, ["sources.digits", "1e99999999"]),
        ({"sources": {"digits": "7/10", "gone": "3/10"}}, ["gone/manifest.json"]),
        ({"sources": {"digits": "7/10", "../up": "3/10"}}, ["../up"]),
        ({"version": 2}, ["version"]),
        ({"more": 1}, ["more"]),
    ],
)
def test_a_manifest_of_sources_must_say_what_it_should(
    mixed: Shards, tmp_path: Path, change: dict[str, Any], named: list[Any]
) -> None:
    shutil.copytree(mixed.path, tmp_path / "copy")
    path = tmp_path / "copy" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(DataError, "manifest.json", *named):
        open_shards(tmp_path / "copy")


# Tokenizers


def test_bytes_are_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("any text\nof lines\n" * 50)
    corpus = open_corpus(str(tmp_path / "a.txt"))
    tokenizer = made("bytes", corpus, 9999)
    assert tokenizer.vocab_size == BYTES
    text = "ünï 😀\0\r\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    shards = encode(corpus, tokenizer, tmp_path / "out")
    assert shards.split("train").tokens == shards.split("train").text_bytes + shards.split("train").documents


def test_characters_are_tokens_as_far_as_the_vocabulary_reaches(tmp_path: Path) -> None:
    text = "日本語の日本 Grüße 😀😀"
    tokenizer = characters([text], 4096)
    ids = tokenizer.encode(text)
    assert [tokenizer.token_bytes(id).decode() for id in ids] == list(text)
    assert tokenizer.decode(tokenizer.encode("未知 ok")) == "未知 ok"
    # Most frequent first: 😀 needs three tokens, 日 one more than 本 would.
    few = characters(["ü" * 9 + "日日"], BYTES + 1)
    assert few.vocab_size == BYTES + 1 and len(few.encode("ü日")) == 1 + 3
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").fingerprint == tokenizer.fingerprint
    with refused(DataError, "tokenizer"):
        characters([], 300)


def test_a_tokenizer_of_a_file_is_that_of_the_file_as_it_is_now(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(sentence(i) for i in range(99)))
    corpus, file = open_corpus(str(tmp_path / "a.txt")), tmp_path / "own.json"
    for size in (300, 290):
        wanted = made("bpe", corpus, size)
        wanted.save(file)
        found = made_in(tmp_path / "out", str(file), corpus, 300)
        assert found.vocab_size == size and found.fingerprint == wanted.fingerprint
    for specials in (Specials(stops=frozenset((0, 7)), end=7), Specials(stops=frozenset((0, 9)), end=9)):
        specials.save(tmp_path / "specials.json")
        assert made_in(tmp_path / "out", str(file), corpus, 300).specials == specials
        assert Tokenizer.load(tmp_path / "out" / "tokenizer.json").specials == specials
    file.unlink()
    with refused(DataError, file):
        made_in(tmp_path / "out", str(file), corpus, 300)


def test_an_empty_text_is_a_separator(tokenizer: Tokenizer) -> None:
    found = list(tokenizer.encode_items([("", ""), ("ask", ""), ("", "say")], "<u2"))
    asked = tokenizer.encode("ask")
    assert [ids.tolist() for ids, _ in found] == [[0], [0, *asked], [0, *tokenizer.encode("say")]]
    assert [before for _, before in found] == [1, 1 + len(asked), 1]


def test_a_tokenizer_is_made_once_for_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("".join(sentence(i) for i in range(99)))
    corpus = open_corpus(str(tmp_path / "a.txt"))
    first = made_in(tmp_path / "out", "bpe", corpus, 300)
    monkeypatch.setattr(Tokenizer, "train", lambda *_: pytest.fail("trained again"))
    assert made_in(tmp_path / "out", "bpe", corpus, 300).fingerprint == first.fingerprint
    assert made_in(tmp_path / "out", "bytes", corpus, 300).vocab_size == BYTES
    assert (
        made("bytes", corpus, 300).fingerprint
        == Tokenizer.load(tmp_path / "out" / "tokenizer.json").fingerprint
    )
    monkeypatch.undo()
    assert made_in(tmp_path / "out", "bpe", corpus, 300).fingerprint == first.fingerprint
    (tmp_path / "out" / "tokenizer.json").write_text("{")
    assert made_in(tmp_path / "out", "bpe", corpus, 300).fingerprint == first.fingerprint
    assert made(str(tmp_path / "out" / "tokenizer.json"), corpus, 0).fingerprint == first.fingerprint
    with refused(DataError, "tokenizer", "nope", "bpe", "bytes", "characters"):
        made("nope", corpus, 300)
    with refused(DataError, "vocab_size", 256):
        made("characters", corpus, 256)
