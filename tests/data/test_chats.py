"""Talks: records with `messages` or `conversations`, of which the answers are learned."""

import json
import re
from pathlib import Path

import pytest

from perspectron.cli.main import main
from perspectron.data import open_corpus
from perspectron.data.corpus import RULE
from perspectron.data.records import Fields
from perspectron.data.template import Template
from perspectron.util.errors import DataError
from tests.cli.small import PLAIN
from tests.refusals import in_a_line, refused

TALKS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is {i}?"},
        {"role": "assistant", "content": f"A number, {i}."},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": f"{i}+1?"}]},
        {"role": "assistant", "content": f"It is {i + 1}."},
    ]
    for i in range(40)
]
SHAREGPT = [
    [
        {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]}
        for m in talk
    ]
    for talk in TALKS
]
BAD = [
    {"messages": []},
    {"messages": "hello"},
    {"messages": ["hello"]},
    {"messages": [{"role": "user", "content": "alone"}]},
    {"messages": [{"role": "robot", "content": "x"}, {"role": "assistant", "content": "x"}]},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "assistant", "content": None}]},
    {"messages": [{"role": "assistant", "content": {"text": "x"}}]},
    {"messages": [{"role": "assistant", "content": [{"type": "image", "url": "x"}]}]},
    {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]},
    {"messages": TALKS[0], "tools": [{"type": "function"}]},
    {"messages": TALKS[0], "functions": [{"name": "look"}]},
    {"messages": [{"role": "assistant", "content": "so", "function_call": {"name": "look"}}]},
    {"messages": [*TALKS[0][:4], {"role": "assistant", "content": "so", "reasoning_content": "hm"}]},
    {"messages": [{"role": "assistant", "content": "a NUL \0"}]},
    {"messages": [{"role": "assistant", "content": "half \ud83d"}]},
    {"conversations": [{"from": "gpt"}]},
    {"conversations": {"from": "gpt", "value": "x"}},
]


def documents(source: str | Path, template: Template | None = None, heldout: float = 0.2):
    corpus = open_corpus(str(source), heldout, template=template or Template.named("plain"))
    return corpus, {split: list(corpus.documents(split)) for split in corpus.splits}


def lines(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("field", ["messages", "conversations"])
def test_each_answer_is_learned_after_all_that_was_said_before_it(field, tmp_path):
    talks = TALKS if field == "messages" else SHAREGPT
    _, split = documents(lines(tmp_path / "a.jsonl", [{field: talk, "id": 3} for talk in talks]))
    all_of = [document for part in split.values() for document in part]
    assert len(all_of) == 80
    said = {(document.prompt, document.text) for document in all_of}
    first = "### system\nBe brief.\n\n### user\nWhat is 7?\n\n### assistant\n"
    assert (first, "A number, 7.") in said
    assert (f"{first}A number, 7.\n\n### user\nAnd 7+1?\n\n### assistant\n", "It is 8.") in said
    talks_of = [{document.name for document in part} for part in split.values()]
    assert not set.intersection(*talks_of)  # a talk is on one side


def test_an_answer_of_no_weight_is_only_read(tmp_path):
    talks = [[*talk[:2], talk[2] | {"weight": 0}, talk[3], talk[4] | {"weight": 1}] for talk in TALKS]
    records = [{"messages": talk, "tools": "null"} for talk in talks]
    records += [{"messages": [*talk[:4], talk[4] | {"thinking": False}]} for talk in TALKS[:1]]
    _, split = documents(lines(tmp_path / "a.jsonl", records))
    said = [document for part in split.values() for document in part]
    assert len(said) == 42 and sum(document.text.startswith("It is") for document in said) == 41
    sides = [
        {document.prompt for document in part if "What is 0?" in document.prompt} for part in split.values()
    ]
    assert sum(map(bool, sides)) == 1  # the talk with weights, and without


@pytest.mark.parametrize("tools", ["[1]", [{"name": "look"}], ["look"]], ids=str)
def test_tools_in_a_table_are_seen(tools, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    plain = [[m for m in talk if isinstance(m["content"], str)] for talk in TALKS]
    records = [{"messages": talk, "tools": tools if i < 3 else None} for i, talk in enumerate(plain)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    corpus, _ = documents(tmp_path / "a.parquet")
    assert corpus.skipped_count == 3


def test_a_json_array_and_parquet_hold_the_same(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    plain = [
        [m if isinstance(m["content"], str) else {**m, "content": "And?"} for m in talk] for talk in TALKS
    ]
    records = [{"messages": talk} for talk in plain]
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1))
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    found = []
    for path in (lines(tmp_path / "a.jsonl", records), tmp_path / "a.json", tmp_path / "a.parquet"):
        _, split = documents(path)
        found.append({name: sorted((d.prompt, d.text) for d in part) for name, part in split.items()})
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_other_encodings_and_marks(encoding, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS).encode(encoding))
    _, split = documents(f"{path}#encoding={encoding}" if encoding == "utf-16" else path)
    assert sum(map(len, split.values())) == 80


def test_what_is_no_talk_is_left_out_and_counted(tmp_path):
    corpus, split = documents(lines(tmp_path / "a.jsonl", [*BAD, *({"messages": talk} for talk in TALKS)]))
    assert sum(map(len, split.values())) == 80 and corpus.skipped_count == len(BAD)
    with refused(DataError, "b.jsonl"):
        documents(lines(tmp_path / "b.jsonl", BAD))


def test_a_talk_that_the_template_refuses_is_left_out(tmp_path):
    (tmp_path / "strict.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    strict = Template.load(tmp_path / "strict.jinja")
    records = [{"messages": talk[1:] if i % 2 else talk} for i, talk in enumerate(TALKS)]
    corpus, split = documents(lines(tmp_path / "a.jsonl", records), strict)
    assert sum(map(len, split.values())) == 40 and corpus.skipped_count == 20
    (tmp_path / "short.jinja").write_text(
        "{% for m in messages %}{% if m.content | length > 10 %}{{ raise_exception('long') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    short, asked = (
        Template.load(tmp_path / "short.jinja"),
        [f"{i}?" + " long" * (i % 2) * 9 for i in range(40)],
    )
    talks = [[{"role": "user", "content": one}, {"role": "assistant", "content": "!"}] for one in asked]
    pairs = [{"prompt": one, "completion": "!!"} for one in asked]
    corpus, split = documents(lines(tmp_path / "b.jsonl", [*({"messages": t} for t in talks), *pairs]), short)
    assert sum(map(len, split.values())) == 40 and corpus.skipped_count == 40


def test_pairs_and_talks_stand_in_one_file(tmp_path):
    pairs = [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(20)]
    _, split = documents(lines(tmp_path / "a.jsonl", [*pairs, *({"messages": talk} for talk in TALKS)]))
    assert sum(map(len, split.values())) == 100


def test_a_pair_with_a_field_of_that_name_that_is_no_talk_is_a_pair(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pairs = [{"prompt": f"{i}?", "completion": f"{i}!", "messages": None} for i in range(20)]
    empty = [{**one, "prompt": "!", "messages": [], "conversations": {}} for one in pairs]
    assert Fields(template=Template.named("plain")).of(empty[0]).texts[0][1] == "0!"
    records = [*pairs, *({"prompt": None, "completion": None, "messages": talk[3:]} for talk in TALKS)]
    plain = [{**one, "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{i}"}]}
             for i, one in enumerate(records[20:])]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist([*pairs, *plain]), tmp_path / "a.parquet")
    for path in (lines(tmp_path / "a.jsonl", records), tmp_path / "a.parquet"):
        corpus, split = documents(path)
        assert sum(map(len, split.values())) == 60 and corpus.skipped_count == 0


def test_a_talk_that_begins_with_an_answer_has_the_answers_after_it(tmp_path):
    talks = [[{"from": "gpt", "value": "Hello."}, *talk] for talk in SHAREGPT]
    _, split = documents(lines(tmp_path / "a.jsonl", [{"conversations": talk} for talk in talks]))
    all_of = [document for part in split.values() for document in part]
    assert len(all_of) == 80 and not any("Hello." in one.prompt + one.text for one in all_of)


def test_either_field_has_either_names(tmp_path):
    mixed = [{"messages": talk} for talk in SHAREGPT] + [{"conversations": talk} for talk in TALKS]
    _, split = documents(lines(tmp_path / "a.jsonl", mixed))
    assert sum(map(len, split.values())) == 160
    none = dict.fromkeys(("role", "content", "from", "value"))
    both = [
        {"messages": [none | m for m in talk], "conversations": None, "prompt": [{"a": 1}]}
        for talk in SHAREGPT
    ]
    assert documents(lines(tmp_path / "b.jsonl", both))[0].skipped_count == 0
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    simple = [
        {**one, "messages": [m for m in one["messages"] if isinstance(m["value"], str)]} for one in both
    ]
    parquet.write_table(pyarrow.Table.from_pylist(simple), tmp_path / "b.parquet")
    assert sum(map(len, documents(tmp_path / "b.parquet")[1].values())) == 80


def test_a_pair_and_the_talk_of_it_are_on_one_side(tmp_path):
    pairs = [(f"What is {i}?", f"It is {i}.") for i in range(50)]
    talks = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": other}] for one, other in pairs
    ]
    records = [{"prompt": one, "completion": other} for one, other in pairs]
    _, split = documents(lines(tmp_path / "a.jsonl", [*records, *({"messages": talk} for talk in talks)]))
    sides = [{document.text for document in part} for part in split.values()]
    assert len(set.union(*sides)) == 50 and not set.intersection(*sides)


@pytest.mark.parametrize("talk", [False, True])
def test_a_template_with_the_date_splits_alike_every_day(tmp_path, talk):
    dated = "{{ strftime_now('%f') }} {% for m in messages %}{{ m.content }} {% endfor %}"
    said = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}."}] for i in range(60)
    ]
    records = [{"messages": one} for one in said]
    if not talk:
        records = [{"prompt": one["content"], "completion": other["content"]} for one, other in said]
    template = Template(dated, "dated")
    corpus, first = documents(lines(tmp_path / "a.jsonl", records), template)
    names = {split: {document.name for document in part} for split, part in first.items()}
    assert len(names["train"] | names["heldout"]) == 60 and not names["train"] & names["heldout"]
    for split in corpus.splits:
        again = list(corpus.documents(split))
        assert {document.name for document in again} == names[split]
    assert {d.prompt for d in again} != {d.prompt for d in first[corpus.splits[-1]]}  # it tells the time


def test_prompts_that_an_earlier_rule_split_are_not_split_anew(tmp_path):
    path = lines(
        tmp_path / "a.jsonl", [{"prompt": f"{i}?", "completion": f"{i}.", "text": f"{i}"} for i in range(60)]
    )
    texts = [[d.text for d in open_corpus(str(path), rule=rule).documents("heldout")] for rule in (2, RULE)]
    assert texts[0] == texts[1]
    with refused(DataError, "rule", 2, RULE):
        open_corpus(str(path), template=Template.named("plain"), rule=2)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_talks_without_a_template_are_told_of_one(tmp_path, name):
    records = [{"messages": [m for m in talk if isinstance(m["content"], str)]} for talk in TALKS]
    if name == "a.parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / name)
    else:
        (tmp_path / name).write_text(
            "\n".join(map(json.dumps, records)) if name == "a.jsonl" else json.dumps(records)
        )
    with refused(DataError, name, "--template"):
        open_corpus(str(tmp_path / name), 0.2).settle()


def test_training_on_talks_says_what_was_read_and_needs_a_template(tmp_path, capsys):
    path = lines(tmp_path / "a.jsonl", [*BAD, *({"messages": talk} for talk in TALKS * 2)])
    quick = ["--seq-len", "32", "--batch-size", "2", "--dtype", "float32", "--steps", "2", *PLAIN]
    command = ["train", "--data", str(path), "--out", str(tmp_path / "run"), *quick]
    assert main(command) == 2
    in_a_line(capsys.readouterr().err.splitlines()[-1], "a.jsonl", "--template")
    assert main([*command, "--template", "plain"]) == 0
    said = capsys.readouterr().err
    told = [int(count) for count in re.findall(r"records of a.jsonl: (\d+) ", said)]
    more = re.search(r"and (\d+) more kinds", said)
    assert more and 0 < sum(told) <= len(BAD) - int(more[1])
    assert (tmp_path / "run" / "chat_template.jinja").exists()
