"""Answers to the harness against heldout() and plain forwards; the harness itself where it is installed."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors

from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.decode import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.eval import harness
from perspectron.eval.harness import Answers, Score
from perspectron.model.model import build
from perspectron.train.heldout import heldout
from perspectron.util.errors import ConfigError
from tests.refusals import refused

PAIRS = [
    ("The quick brown", " fox"),
    ("größer → ", "日本語 🦊"),
    ("and fox " * 12, "and brown fox"),
    ("", "quick"),
    ("x", "y" * 9),
    ("fox   ", "fox"),
    ("   ", "and"),
]


def answers(subject, design="perspective", seq_len=128, **fields) -> Answers:
    made = subject(design, seq_len=seq_len, model_dtype=fields.pop("model_dtype", torch.float32))
    return Answers(made.model, made.tokenizer, **fields)


def plain(asked: Answers, ids: list[int], scored: int) -> tuple[float, bool]:
    """Of the last `scored` ids, from one forward."""
    with torch.no_grad():
        log_p_TV = asked.model(torch.tensor([ids[:-1]])).logits[0].log_softmax(1)
    targets = torch.tensor(ids[1:])
    nats = log_p_TV.gather(1, targets[:, None])[-scored:].sum().item()
    return nats, bool((log_p_TV.argmax(1) == targets)[-scored:].all())


@pytest.mark.parametrize("design", presets.DESIGNS)
def test_a_batch_of_unequal_lengths_is_each_alone(subject, design, monkeypatch):
    asked = answers(subject, design)
    together = asked.log_likelihoods(PAIRS)
    encode = asked.tokenizer.encode
    for pair, score in zip(PAIRS, together, strict=True):
        assert asked.log_likelihoods([pair])[0].log_likelihood == pytest.approx(
            score.log_likelihood, abs=1e-4
        )
        before, all = encode(pair[0].rstrip()), encode("".join(pair))
        nats, greedy = plain(asked, [0, *all], len(all) - len(before))
        assert (all[: len(before)], score.greedy) == (before, greedy)
        assert score.log_likelihood == pytest.approx(nats, abs=1e-4)
    monkeypatch.setattr(harness, "CHUNK", 30)
    for score, other in zip(together, asked.log_likelihoods(PAIRS), strict=True):
        assert other.log_likelihood == pytest.approx(score.log_likelihood, abs=1e-4)
        assert other.greedy == score.greedy


@pytest.mark.parametrize("design", ["perspective", "transformer"])
def test_rolling_is_what_heldout_says_of_the_same_documents(subject, text, design):
    asked, (tokenizer, split) = answers(subject, design), text
    documents = [tokenizer.decode(split.document(i).tolist()) for i in range(split.documents)]
    nats = -sum(asked.rolling(documents))
    carried = heldout(asked.model, split, tokenizer, seq_len=64, carry=True)
    borders = 0.0  # heldout also predicts the separator after every document but the last
    for i in range(split.documents - 1):
        borders -= plain(asked, [*split.document(i).tolist(), 0], 1)[0]
    assert nats + borders == pytest.approx(math.log(carried.perplexity) * carried.tokens, rel=1e-5)
    assert asked.rolling([]) == []
    assert asked.rolling(["", "fox"])[0] == 0


def test_rolling_with_a_table_of_positions_predicts_each_token_once(subject, text):
    asked, (tokenizer, split) = answers(subject, "gpt2", seq_len=48), text
    ids = split.document(0).tolist()[:132]
    expected = (
        plain(asked, ids[:49], 48)[0] + plain(asked, ids[48:97], 48)[0] + plain(asked, ids[83:132], 35)[0]
    )
    assert tokenizer.encode(tokenizer.decode(ids)) == ids[1:]
    assert asked.rolling([tokenizer.decode(ids)]) == [pytest.approx(expected, abs=1e-3)]


def test_a_long_context_keeps_its_end_where_a_table_ends(subject):
    asked = answers(subject, "gpt2", seq_len=32)
    context = "fox and " * 40
    ids = asked.tokenizer.encode(context.rstrip() + " quick brown")
    scored = len(ids) - len(asked.tokenizer.encode(context.rstrip()))
    (score,) = asked.log_likelihoods([(context, "quick brown")])
    assert score.log_likelihood == pytest.approx(plain(asked, ids[-33:], scored)[0], abs=1e-4)
    with refused(ConfigError, "tokens"):
        asked.log_likelihoods([("fox", "ZQ" * 100)])


def test_a_token_across_the_border_is_not_used(subject):
    """A tokenizer in which "ab" is one token: a continuation "b" after "a" is the token "b"."""
    asked = answers(subject)
    tokenizer = Tokenizer.train(["ababab " * 50], 300)
    assert len(tokenizer.encode("xab")) < 3
    asked = Answers(asked.model, tokenizer)
    row = asked._row("xa", "b")
    assert (row.ids, row.scored) == ([0, *tokenizer.encode("xa"), *tokenizer.encode("b")], 1)
    assert asked.log_likelihoods([("fox", ""), ("fox", "b")])[0] == (0.0, True)


def test_greedy_is_what_generating_gives(subject):
    """Of texts that are the same tokens again when they are read."""
    asked = answers(subject)
    encode, found = asked.tokenizer.encode, 0
    for context in ("The quick", "fox and", "brown", "Number 1", "and", "größer", "x", "quick fox"):
        for most in (1, 2, 3):
            (text,) = asked.continuations([(context, {"max_gen_toks": most})])
            if len(encode(text)) == most and encode(context + text) == encode(context) + encode(text):
                found += 1
                assert asked.log_likelihoods([(context, text)])[0].greedy
    assert found >= 3
    assert not asked.log_likelihoods([("The quick", " 🦊🦊")])[0].greedy


def test_generation_ends_before_any_of_its_strings(subject):
    asked = answers(subject, batch_size=2)
    contexts = ["The quick brown", "fox", "brown", "and and and and and"]
    whole = asked.continuations([(context, {"until": [], "max_gen_toks": 24}) for context in contexts])
    assert whole == [asked.continuations([(c, {"max_gen_toks": 24})])[0] for c in contexts]
    made = generate.generate(
        asked.model, asked.tokenizer, ["fox"], max_tokens=24, sampling=SamplingConfig(temperature=0)
    )
    assert whole[1] == made.texts[0]
    ends = [text[len(text) // 2 :][:2] for text in whole]
    options = [{"until": [end, "never"], "max_new_tokens": 24} for end in ends]
    for text, end, found in zip(
        whole, ends, asked.continuations(list(zip(contexts, options, strict=True))), strict=True
    ):
        assert len(end) == 2
        assert found == text[: text.index(end)]
    sampled = asked.continuations([("fox", {"do_sample": True, "temperature": 2.0, "max_gen_toks": 24})])
    assert sampled != [whole[1]]


@pytest.mark.parametrize("contexts", [["fox"] * 4, ["fox", "The quick brown fox", "fox", "and", "fox"]])
def test_what_is_sampled_is_drawn_apart_and_batches_change_nothing(subject, contexts):
    """As `repeats` of a task asks: the same request several times."""
    options = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12}
    requests = [(context, options) for context in contexts]
    one, two, all = (answers(subject, batch_size=size).continuations(requests) for size in (1, 2, 8))
    assert one == two == all
    assert len(set(one)) == len(one)


def test_null_is_as_if_it_were_not_given(subject):
    asked = answers(subject)
    null = {"temperature": None, "top_p": None, "top_k": None, "max_gen_toks": None, "max_tokens": 6}
    plain = {"temperature": 1.0, "max_gen_toks": 6}
    found = [asked.continuations([("fox", {"do_sample": True} | options)]) for options in (null, plain)]
    assert found[0] == found[1]
    for name, value in (
        ("temperature", "hot"),
        ("max_gen_toks", [6]),
        ("max_tokens", math.nan),
        ("until", [3]),
    ):
        with refused(ConfigError, name):
            asked.continuations([("fox", {"do_sample": True, name: value})])


def test_generation_leaves_room_in_a_table_of_positions(subject):
    asked = answers(subject, "gpt2", seq_len=32)
    long = "fox and " * 40
    (text,) = asked.continuations([(long, {"max_gen_toks": 10})])
    kept = asked.tokenizer.encode(long)[-22:]
    made = generate.generate(
        asked.model, asked.tokenizer, [kept], max_tokens=10, sampling=SamplingConfig(temperature=0)
    )
    assert text == made.texts[0]
    assert asked.continuations([(long, {})])
    with refused(ConfigError, "max_gen_toks", 32):
        asked.continuations([("fox", {"max_gen_toks": 32})])
    with refused(ConfigError, "num_beams"):
        asked.continuations([("fox", {"num_beams": 4})])


# ---------------------------------------------------------------- the harness itself


def task(name: str, data: Path, kind: str, **fields: object) -> dict[str, object]:
    made = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    made |= {"test_split": "test", "output_type": kind, "doc_to_text": "{{question}}"}
    return made | fields


WRITE = {"until": ["o"], "max_gen_toks": 9}


def scored_by_the_harness(
    folder: Path, questions: list[dict[str, object]]
) -> dict[str, list[dict[str, Any]]]:
    """Of the run in `folder`, by task: what the harness logs of each question. The process has no network."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    drawn = {"until": ["never"], "max_gen_toks": 12, "do_sample": True, "temperature": 1.5}
    tasks = [
        task("choose", data, "multiple_choice", doc_to_choice="{{choices}}", doc_to_target="{{answer}}"),
        task("roll", data, "loglikelihood_rolling", doc_to_target="{{question}}")
        | {"doc_to_text": "", "metric_list": [{"metric": "bits_per_byte"}]},
        task("blimp", data, "multiple_choice", doc_to_choice="{{[good, bad]}}", doc_to_target=0)
        | {"doc_to_text": ""},
        task("last", data, "loglikelihood", doc_to_target="{{' ' ~ last}}")
        | {"metric_list": [{"metric": "perplexity"}, {"metric": "acc"}]},
        task("write", data, "generate_until", doc_to_target="x", generation_kwargs=WRITE),
        task("draw", data, "generate_until", doc_to_target="x", generation_kwargs=drawn, repeats=4),
    ]
    for made in tasks:
        (folder / f"{made['task']}.yaml").write_text(json.dumps(made))
    command = ["lm-eval", "--model", "perspectron", "--model_args", f"run={folder / 'run'}", "--log_samples"]
    command += ["--tasks", "choose,roll,blimp,last,write,draw", "--include_path", str(folder)]
    command += ["--output_path", str(folder / "out")]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    subprocess.run([sys.executable, "-m", "perspectron", *command], check=True, env=env, capture_output=True)
    return {
        path.name.split("_")[1]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (folder / "out").rglob("samples_*.jsonl")
    }


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra eval")
def test_what_the_harness_is_asked_in_vain_is_refused():
    from lm_eval.api.registry import get_model

    from perspectron.cli.harness import NAME, register

    register()
    model = get_model(NAME)
    for given, named in (
        ({}, "run"),
        ({"pretrained": "gpt2"}, "pretrained"),
        ({"run": "x", "peft": 1}, "peft"),
    ):
        with refused(ConfigError, "model_args", named):
            model.create_from_arg_obj(given, {"batch_size": 1, "max_batch_size": None, "device": "cpu"})
    with refused(ConfigError, "--apply_chat_template"):
        model.__new__(model).apply_chat_template([])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra eval")
def test_tasks_from_local_files_are_scored_as_we_score_them(subject, tmp_path):
    """A choice, a text as a whole, a sentence or its opposite (as in BLiMP), a last word (as in LAMBADA), generated
    text, and one that is drawn four times."""
    from perspectron.stream.artifact import save_artifact

    asked = answers(subject)
    save_artifact(asked.model, asked.tokenizer, tmp_path / "run")
    questions = [
        {"question": "The quick brown", "choices": [" fox", "日本語", " and brown"], "answer": 1}
        | {"good": "The fox jumps.", "bad": "The fox jump.", "last": "fox"},
        {"question": "größer →", "choices": [" 🦊", " quick", "x"], "answer": 0}
        | {"good": "größer.", "bad": "größer?", "last": "日本語"},
    ]
    samples = scored_by_the_harness(tmp_path, questions)
    for question, sample in zip(questions, samples["choose"], strict=True):
        ours = asked.log_likelihoods([(question["question"], " " + c) for c in question["choices"]])
        theirs = [float(response[0][0]) for response in sample["resps"]]
        assert theirs == pytest.approx([score.log_likelihood for score in ours], abs=1e-4)
        assert sample["acc"] == float(np.argmax(theirs) == question["answer"])
    ours = asked.rolling([question["question"] for question in questions])
    assert [float(s["resps"][0][0]) for s in samples["roll"]] == pytest.approx(ours, abs=1e-4)
    for question, pair, last in zip(questions, samples["blimp"], samples["last"], strict=True):
        ours = [
            score.log_likelihood
            for score in asked.log_likelihoods([("", " " + question[w]) for w in ("good", "bad")])
        ]
        assert [float(response[0][0]) for response in pair["resps"]] == pytest.approx(ours, abs=1e-4)
        assert pair["acc"] == float(ours[0] > ours[1])
        # By one plain forward: tokens of the context and the word together, the word's scored.
        context, word = question["question"], " " + question["last"]
        both, before = asked.tokenizer.encode(context + word), asked.tokenizer.encode(context)
        assert both[: len(before)] == before
        nats, greedy = plain(asked, [0, *both], len(both) - len(before))
        ((theirs, same),) = last["resps"][0]
        assert float(theirs) == pytest.approx(nats, abs=1e-4) and str(same) == str(greedy)
    until = [(question["question"], WRITE) for question in questions]
    assert [s["resps"][0][0] for s in samples["write"]] == asked.continuations(until)
    for sample in samples["draw"]:
        (drawn,) = sample["resps"]
        assert len(set(drawn)) == len(drawn) == 4


def letters() -> tokenizers.Tokenizer:
    """A tokenizer of single bytes, without any special token."""
    ids = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bare = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    return bare


@pytest.mark.parametrize("design", ["transformer-tiny", "gpt2-tiny"])
def test_a_prefix_of_several_tokens_is_not_scored(design, tmp_path) -> None:
    made = letters()
    made.add_special_tokens(["<s>", "<en>"])
    ids = [(token, made.token_to_id(token)) for token in ("<s>", "<en>")]
    made.post_processor = processors.TemplateProcessing(single="<s> <en> $A", special_tokens=ids)
    made.save(str(tmp_path / "made.json"))
    tokenizer = Tokenizer.load(tmp_path / "made.json")
    assert len(tokenizer.specials.prefix) == 2
    answers = Answers(build(presets.get(design, vocab_size=258), seed=0).eval(), tokenizer)
    (whole,) = answers.log_likelihoods([("", "the cat")])
    assert answers.rolling(["the cat"]) == [pytest.approx(whole.log_likelihood, abs=1e-4)]


def test_a_first_token_with_nothing_before_it_is_refused(tmp_path) -> None:
    letters().save(str(tmp_path / "bare.json"))
    model = build(presets.get("transformer-tiny", vocab_size=256), seed=0).eval()
    answers = Answers(model, Tokenizer.load(tmp_path / "bare.json"))
    alone, both = (
        answers.log_likelihoods([("a", "bc")]),
        answers.log_likelihoods([("a", "bc"), ("abc", "def")]),
    )
    assert both[0].log_likelihood == pytest.approx(alone[0].log_likelihood, abs=1e-5)
    assert answers.log_likelihoods([("", "")]) == [Score(0.0, True)] and answers.rolling([""]) == [0.0]
    with refused(ConfigError, "context"):
        answers.log_likelihoods([("", "bc")])
    with refused(ConfigError, "text"):
        answers.rolling(["bc"])
