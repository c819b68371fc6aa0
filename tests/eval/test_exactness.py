"""Questions of exactness to a server: one that keeps all of it passes, and each fault is found by the question that
asks for it."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path

import pytest

from perspectron.cli.main import main
from perspectron.eval import engines
from perspectron.eval.engines import Answer, EngineError, NotOffered, Server, difference
from perspectron.eval.exactness import Asked, Plan, holds
from tests.eval.engine_fake import Fake, serving
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
PLAN = Plan(length=32, tokens=6, texts=3, rounds=2, seed=3)


def rows_of(fake, keeping="llama.cpp", only=()):
    with serving(fake) as url:
        server = Server(url, keeping=keeping, likely=3)
        server.meet()
        rows = Asked(server, dataclasses.replace(PLAN, only=only)).all()
    return {(row.question, row.way): row for row in rows}


def verdicts(rows, start):
    return {row.verdict for (question, _), row in rows.items() if question.startswith(start)}


def test_a_server_that_keeps_everything_is_exact_in_every_question() -> None:
    rows = rows_of(Fake())
    assert {row.verdict for row in rows.values()} == {"exact"}, {k: r.note for k, r in rows.items()}
    assert holds([*rows.values()])
    assert all(row.compared for row in rows.values())
    cached, read = rows["in pieces = at once", "a prompt after its beginnings"].reused
    assert 0 < cached < read
    assert rows["restored = never stopped", "another slot"].reused[0] > 0


def test_a_number_that_is_none_is_no_equal_one() -> None:
    one, other = (Answer("a", "stop", (1,), ("a",), (x,)) for x in (math.nan, -1.0))
    assert not difference(one, other).exact
    assert not difference(one, one).exact


def test_a_position_without_likeliest_tokens_differs_by_none() -> None:
    told, silent = (Answer("a", "stop", (1,), ("a",), (0.0,), (top,)) for top in ({1: 0.0}, {}))
    for one, other in ((told, silent), (silent, told)):
        found = difference(one, other)
        assert found.exact and found.compared == 1  # the token itself


@pytest.mark.parametrize(
    ("parts", "named"), [([{}], "choices"), ([{"choices": []}], "choices"), ([[]], "OpenAI")]
)
def test_what_is_no_answer_does_not_pass_for_one(parts, named) -> None:
    with refused(EngineError, named):
        engines._answer(parts)


@pytest.mark.parametrize("line", [b"data: {oops\n", b"data: \xff\n"])
def test_a_stream_of_what_is_no_json_is_an_error_of_the_server(line) -> None:
    with refused(EngineError, "JSON"):
        list(engines._events([line]))


@pytest.mark.parametrize(
    ("fault", "question", "verdict"),
    [
        ("rereads after a restore", "restored", "differs"),
        ("rounds after a restore", "restored", "same texts"),
        ("gives 500 after a restore", "restored", "failed"),
        ("leaks between rows", "alone", "differs"),
        ("logprobs change the answer", "logprobs", "differs"),
        ("forgets a rollback", "rolled back", "differs"),
        ("drops a token", "in pieces", "differs"),
        ("streams less", "streamed", "differs"),
        ("is random", "repeated", "differs"),
        ("loses the seed", "repeated", "differs"),
    ],
)
def test_a_fault_is_found_by_its_question(fault, question, verdict) -> None:
    """Another question, of a greedy answer that is read anew, finds nothing where that is not at fault."""
    rows = rows_of(Fake(fault), only=(question, "logprobs" if question == "repeated" else "repeated"))
    assert verdict in verdicts(rows, question), {key: row.verdict for key, row in rows.items()}
    assert not holds([*rows.values()])
    assert rows["repeated = repeated", "greedy"].verdict == ("differs" if fault == "is random" else "exact")


def test_what_a_server_does_not_offer_counts_neither_way() -> None:
    only = ("restored", "chat", "logprobs", "rolled back", "repeated")
    rows = rows_of(Fake(offers=()), "none", only)
    assert (
        verdicts(rows, "restored") == verdicts(rows, "chat") == verdicts(rows, "logprobs") == {"not offered"}
    )
    assert verdicts(rows, "rolled back") == verdicts(rows, "repeated") == {"exact"}
    assert holds([*rows.values()])
    assert all(row.numbers == 0 for row in rows.values())


def test_an_answer_that_ends_before_half_of_it_is_said_to() -> None:
    rows = rows_of(Fake("ends early"), only=("restored", "stopped"))
    assert {row.verdict for row in rows.values()} <= {"not offered", "exact"}
    notes = [row.note for row in rows.values() if row.verdict == "not offered"]
    assert len(notes) > 1 and all("the model ended its text" in note for note in notes)


def test_a_fault_is_found_where_only_a_first_reading_is_anew() -> None:
    rows = rows_of(Fake("drops a token", offers=("tokenize", "logprobs")), "none", ("in pieces",))
    assert "differs" in verdicts(rows, "in pieces")


def test_the_command_prints_a_table_or_json_and_exits_with_1_for_a_difference(capsys) -> None:
    short = ["--length", "32", "--tokens", "4", "--texts", "2", "--rounds", "1"]
    short += ["--only", "repeated", "restored", "one"]
    with serving(Fake()) as url:
        assert main(["verify", "--server", url, *short[:-1]]) == 0
        shown = capsys.readouterr().out
        assert "2 slots" in shown and "another slot" in shown and "exact" in shown and "differs" not in shown
        assert main(["verify", "--server", url, "--json", "--beside", url, *short]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (
            told["holds"] and told["server"]["save"] == "llama.cpp" and told["rows"][-1]["verdict"] == "exact"
        )
    with serving(Fake("is random")) as url:
        assert main(["verify", "--server", url, "--json", *short[:-1]]) == 1
        told = json.loads(capsys.readouterr().out)
        row = next(row for row in told["rows"] if row["verdict"] == "differs")
        assert not told["holds"] and row["shown"][0]["wanted"] != row["shown"][0]["found"] and row["requests"]
    with serving(Fake("rounds after a restore")) as url:
        assert main(["verify", "--server", url, *short[:-1]]) == 1
        assert main(["verify", "--server", url, "--tolerance", "1e-6", *short[:-1]]) == 0
        assert main(["verify", "--server", url, "--only", "nothing"]) == 2


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ([], "run"),
        (["run", "--server", "http://127.0.0.1:1"], "run"),
        (["run", "--save", "none"], "save"),
        (["run", "--tokens", "8"], "tokens"),
        (["run", "--only", "restored"], "only"),
        (["--server", "http://127.0.0.1:1", "--here"], "here"),
        (["--server", "127.0.0.1:1"], "server"),
        (["--server", "http://127.0.0.1:1", "--tokens", "7"], "tokens"),
        (["--server", "http://127.0.0.1:1", "--length", "8"], "length"),
        (["--server", "http://127.0.0.1:1", "--cache", "2G"], "cache"),
        (["--server", "http://127.0.0.1:1"], "http://127.0.0.1:1"),
    ],
)
def test_bad_input_names_its_field(capsys, arguments, field) -> None:
    assert main(["verify", *arguments]) == 2
    error = capsys.readouterr().err
    assert field in error and len(error.splitlines()) == 1


def test_a_difference_counts_tokens_texts_and_the_largest_logprob() -> None:
    one = Answer("ab", "length", (1, 2), ("a", "b"), (-1.0, -2.0), ({1: -1.0, 5: -3.0}, {2: -2.0, 5: -4.0}))
    same = difference(one, one)
    assert same.exact and same.compared == 10
    other = Answer(
        "ac", "length", (1, 3), ("a", "c"), (-1.25, -9.0), ({1: -1.25, 5: -3.0}, {3: -1.0, 5: -4.0})
    )
    apart = difference(one, other)
    assert apart.texts and apart.at == 1
    assert apart.largest == 3.0  # of token 3, which is not among the likeliest of the other
    shorter = difference(one, Answer("ab", "stop", (1,), ("a",), (-1.0,), (one.top[0],)))
    assert shorter.texts and shorter.at == 1 and shorter.largest == 0


def test_answers_in_both_forms_of_logprobs_are_read(monkeypatch) -> None:
    server = Server("http://127.0.0.1:1")
    old = {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}],
        "token_ids": [7],
    }
    answers = {"/v1/completions": {"choices": [{"text": "a", "finish_reason": "stop", "logprobs": old}]}}
    monkeypatch.setattr(server, "ask", lambda method, path, body=None: answers[path])
    found = server.complete("x", 1)
    assert (found.ids, found.logprobs, found.top[0]["b", 0]) == ((7,), (-0.5,), -1.5)
    answers["/v1/completions"] = {"choices": [{"logprobs": {"tokens": 3}}]}
    with pytest.raises(EngineError):
        server.complete("x", 1)


def test_slots_are_refused_by_name_without_llama_cpp() -> None:
    with refused(NotOffered, "--save"):
        Server("http://127.0.0.1:1").save(0, "a")


def test_the_page_has_the_tables_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("servers", ROOT / "docs" / "servers.py")
    servers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(servers)
    whole = json.loads(servers.RESULTS.read_text())
    assert servers.write_page(servers.PAGE, whole) == servers.PAGE.read_text()
