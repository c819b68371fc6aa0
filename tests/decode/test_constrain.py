"""Texts that a grammar constrains: they fit it, are the same alone as among others, and end where it says."""

import json
import sys

import pytest
import torch
from msgspec.structs import replace

from perspectron.data import Tokenizer
from perspectron.decode import constrain
from perspectron.decode.constrain import Constraint, json_schema
from perspectron.decode.generate import generate
from perspectron.decode.row import Piece
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.designs.perspective.safety import Safety, of_tokens
from perspectron.model.model import LanguageModel
from perspectron.util.errors import ConfigError, NonFiniteError
from tests.decode.conftest import VOCAB, Scripted, drain, make
from tests.decode.test_rows import GREEDY, SETTINGS, ids, text
from tests.refusals import refused

jsonschema, _ = (pytest.importorskip(name) for name in ("jsonschema", "llguidance"))

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": -9, "maximum": 120},
        "kind": {"enum": ["red", "blue", None, {"x": [1, 2.5]}]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{1,4}é?$"}]},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
                      "additionalProperties": False}},
}  # fmt: skip
HOT = SamplingConfig(temperature=1.5, seed=7)
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}


def finish(pieces: list[Piece], row: int) -> str | None:
    return [piece.finished for piece in pieces if piece.row == row][-1]


@pytest.fixture(scope="module")
def constraint(tokenizer) -> Constraint:
    return json_schema(SCHEMA, tokenizer)


@pytest.mark.parametrize("sampling", [HOT, *SETTINGS])
def test_what_is_drawn_fits_the_schema_and_is_the_same_alone_and_among_others(
    model, tokenizer, constraint, sampling
) -> None:
    rows = Rows(model, tokenizer)
    for number in range(7):  # every other one draws what it likes
        own = [constraint] if number % 2 == 0 else []
        rows.add(f"the {number}", max_tokens=400 if own else 40, sampling=sampling, hooks=own)
    pieces = drain(rows)
    for row in (0, 2, 4, 6):
        assert finish(pieces, row) == "stop"
        jsonschema.validate(json.loads(text(pieces, row)), SCHEMA)
    for row in (2, 3, 6):
        alone = Rows(model, tokenizer)
        settings = {"max_tokens": 40} if row == 3 else {"max_tokens": 400, "hooks": [constraint]}
        own = alone.add(f"the {row}", sampling=sampling, stream=row, **settings)
        found = drain(alone)
        assert ids(found, own) == ids(pieces, row)
        equal_state = alone.remove(own).state, rows.conversation(row).state
        assert all(map(torch.equal, *map(_tensors, equal_state)))


def _tensors(state):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def test_without_the_constraint_the_model_does_not_speak_json(model, tokenizer) -> None:
    with refused(ValueError):
        json.loads(generate(model, tokenizer, ["the"], max_tokens=60, sampling=HOT).texts[0])


def test_the_text_ends_only_where_the_grammar_lets_it(perspective, tokenizer) -> None:
    number = json_schema(NUMBER, tokenizer)
    ended = set()
    for seed in range(40):
        settings = {"sampling": SamplingConfig(1.5, seed=seed), "hooks": [number], "max_tokens": 50}
        found = generate(perspective, tokenizer, [""], **settings)
        assert 0 <= json.loads(found.texts[0]) <= 999
        ended |= {*found.finished}
        assert (found.ids[0][-1] == 0) == (found.finished == ["end"])
        cut = generate(perspective, tokenizer, [""], **settings | {"max_tokens": 1})
        assert cut.finished in (["length"], ["stop"]) and cut.ids[0] == found.ids[0][:1]
    assert ended == {"stop", "end"}  # three digits are complete; fewer may go on


def test_a_stop_id_ends_a_constrained_text_where_the_end_is_allowed_and_nowhere_else(tokenizer) -> None:
    (quote,), (brace,) = tokenizer.encode('"'), tokenizer.encode("{")
    (digit,), stop = tokenizer.encode("7"), tokenizer.encode("z")[0]
    model = Scripted(make("perspective-tiny").config, [[stop, stop], [digit, stop]])
    rows = Rows(model, tokenizer, together=False)
    number = json_schema(NUMBER, tokenizer)
    for _ in range(2):
        rows.add("x", max_tokens=9, sampling=GREEDY, hooks=[number], stop_ids=[stop])
    pieces = drain(rows)
    assert ids(pieces, 0)[0] != stop and stop not in (quote, brace)
    assert ids(pieces, 1) == [digit, stop]
    assert (text(pieces, 1), finish(pieces, 1)) == ("7", "end")


def test_logprobs_are_the_models_own_before_the_mask(perspective, tokenizer, constraint) -> None:
    settings = {"max_tokens": 1, "sampling": GREEDY, "logprobs": 3}
    rows = Rows(perspective, tokenizer, together=False)
    free, bound = rows.add("the", **settings), rows.add("the", **settings, hooks=[constraint])
    pieces = {piece.row: piece for piece in drain(rows)}
    assert pieces[free].id != pieces[bound].id
    assert pieces[free].likely == pieces[bound].likely
    assert pieces[bound].logprob < pieces[free].logprob < 0


def test_any_object_parses_when_it_ends(perspective, tokenizer) -> None:
    settings = {"max_tokens": 300, "hooks": [json_schema({"type": "object"}, tokenizer)], "sampling": HOT}
    found = generate(perspective, tokenizer, ["x"] * 12, **settings)
    for said, finished in zip(found.texts, found.finished, strict=True):
        assert said.startswith("{") and finished in ("stop", "length")
        assert finished == "length" or isinstance(json.loads(said), dict)
    assert "stop" in found.finished


def test_a_session_goes_on_before_and_after_a_constrained_text(perspective, tokenizer, constraint) -> None:
    session = Session(perspective, tokenizer).read("the cat sat")
    first = session.say(20, sampling=HOT)
    fork = session.fork()
    said = session.say(400, sampling=HOT, hooks=[constraint])
    jsonschema.validate(json.loads(said), SCHEMA)
    assert fork.say(400, sampling=HOT, hooks=[constraint]) == said
    assert session.say(20, sampling=HOT) == fork.say(20, sampling=HOT)
    assert session.text.startswith("the cat sat" + first + said)


def test_a_text_that_comes_to_a_limit_of_the_library_ends_alone(
    perspective, tokenizer, constraint, monkeypatch
) -> None:
    """Copies of one matcher would share its states: after the first all would fail."""
    monkeypatch.setattr(constrain, "LIMITS", constrain.LIMITS | {"max_lexer_states": 200})
    long = json_schema({"type": "string", "minLength": 500}, tokenizer)
    found = []
    for count in (600, 20):
        rows = Rows(perspective, tokenizer, together=False)
        rows.add("x", max_tokens=count, sampling=HOT, hooks=[long])
        other = rows.add("the", max_tokens=400, sampling=HOT, hooks=[constraint], stream=1)
        pieces = drain(rows)
        found.append(ids(pieces, other))
        if count == 600:
            assert "too many states" in next(
                str(piece.error) for piece in pieces if piece.finished == "error"
            )
        else:
            assert finish(pieces, 0) == "length"
    assert found[0] == found[1]


class Without:
    """A vocabulary whose tokens with a letter spell another."""

    def __init__(self, inner: Tokenizer, letter: bytes) -> None:
        self.vocab_size, self.specials, self.encode = inner.vocab_size, inner.specials, inner.encode
        self._inner, self._letter = inner, letter

    def token_bytes(self, id: int) -> bytes:
        return self._inner.token_bytes(id).replace(self._letter, b"~")


def test_a_row_whose_vocabulary_lacks_a_letter_ends_with_an_error_and_the_others_go_on(
    perspective, tokenizer
) -> None:
    poor = Without(tokenizer, b"}")
    pieces = []
    for first in (json_schema({"const": {"a": 1}}, poor), json_schema({"const": [1]}, poor)):
        rows = Rows(perspective, poor)
        rows.add("x", max_tokens=60, sampling=HOT, hooks=[first])
        other = rows.add("the", max_tokens=60, sampling=HOT)
        pieces.append(drain(rows))
        assert ids(pieces[0], other) == ids(pieces[-1], other)
    failed = [piece for piece in pieces[0] if piece.finished == "error"]
    assert [piece.row for piece in failed] == [0] and "constraint" in str(failed[0].error)
    assert finish(pieces[1], 0) == "stop"
    with refused(ConfigError):
        json_schema({"type": "object"}, Without(tokenizer, b"{"))


def test_a_token_of_text_that_ends_texts_is_no_text_of_a_grammar(tokenizer) -> None:
    vocabulary = Without(tokenizer, b"~")
    vocabulary.specials = replace(tokenizer.specials, stops=frozenset({0, *tokenizer.encode("{")}))
    with refused(ConfigError):
        json_schema({"type": "object"}, vocabulary)


def test_a_safe_set_that_masks_what_the_grammar_asks_for_ends_the_text_by_name(
    perspective, tokenizer
) -> None:
    (digit,) = tokenizer.encode("7")
    one = json_schema({"const": 7}, tokenizer)
    inside = torch.zeros(perspective.config.d_model, dtype=torch.float64)
    mask = Safety(of_tokens(perspective, [digit], digit + 1, 2.0, inside), "mask")
    settings = {"max_tokens": 9, "sampling": GREEDY}
    assert generate(perspective, tokenizer, ["x"], **settings, hooks=[one]).texts == ["7"]
    with refused(NonFiniteError):
        generate(perspective, tokenizer, ["x"], **settings, hooks=[one, mask])
    session = Session(perspective, tokenizer)
    with refused(NonFiniteError):
        session.say(9, sampling=GREEDY, hooks=[one, mask])


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, ["schema", "uniqueItems"]),
        ({"properties": {"a": {"maxLenght": 5}}}, ["schema.properties.a", "maxLenght"]),
        ({"$defs": {"x": {"allOf": [{"not": {}}]}}}, ["schema.$defs.x.allOf[0]", "'not'"]),
        ({"type": "array", "items": {"nullable": True}}, ["schema.items", "nullable"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["schema.exclusiveMinimum", True]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["schema.exclusiveMinimum", 0]),
        ({"items": {"minimum": -1.5, "exclusiveMaximum": -1.0}}, ["schema.items.exclusiveMaximum", -1.0]),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, ["minimum", "maximum"]),
        ({"type": "integer", "minimum": 2**63}, ["schema.minimum", 2**63]),
        (
            {"type": "integer", "exclusiveMaximum": float(-(2**60))},
            ["schema.exclusiveMaximum", float(-(2**60))],
        ),
        ({"items": {"const": {"a": [2**53 + 1]}}}, ["schema.items.const", 2**53 + 1]),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, ["schema"]),
        ({"type": "colour"}, ["colour"]),
        ({"type": "string", "format": "colour"}, ["colour"]),
        ({"type": "string", "pattern": "a("}, ["a("]),
        ({"type": "string", "pattern": "(?=a)b"}, ["(?=a)b"]),
        ({"type": "integer", "minimum": 5, "maximum": 3}, ["minimum", "maximum"]),
        ({"$ref": "http://example.com/a.json"}, ["http://example.com/a.json"]),
        ({"$ref": "#/$defs/none"}, ["/$defs/none"]),
        ({"$ref": "#"}, ["schema"]),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf", "anyOf"]),
        ({"const": float("nan")}, ["schema"]),
        ({"const": {1, 2}}, ["schema"]),
        ([], ["schema", "list"]),
        ({"title": "x" * 70_000}, ["schema", 70013, 65536]),
    ],
)
def test_a_schema_that_no_text_can_be_held_to_is_refused_by_name(tokenizer, schema, named) -> None:
    with refused(ConfigError, *named):
        json_schema(schema, tokenizer)


def _nested(levels: int) -> dict:
    schema: dict = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def _doubling() -> dict:
    names = {"d30": {"type": "object"}, "d31": {"type": "object"}}
    for i in range(30):
        both = {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 2}"}]}
        names[f"d{i}"] = {"type": "object", "properties": {f"x{i}": both}}
    return {"$defs": names, "$ref": "#/$defs/d0"}


HOSTILE = {
    "deep": _nested(5000),
    "deep for the library": _nested(200),
    "gigabytes": _doubling(),
    "multiples": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]},
    "patterns": {"type": "string", "allOf": [{"pattern": f"[ab]*a[ab]{{{i}}}"} for i in range(10, 60)]},
    "names": {"patternProperties": {f"^k{i}x+$": {"type": "null"} for i in range(1500)}, "type": "object"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_in_a_process_of_its_own(tokenizer, name, monkeypatch) -> None:
    """In this one the library would take minutes or gigabytes for the last four, and cannot be stopped."""
    monkeypatch.setattr(constrain, "SECONDS", 1)
    with refused(ConfigError):
        json_schema(HOSTILE[name], tokenizer)


def test_without_the_library_one_line_says_how_to_install_it(tokenizer, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with refused(ConfigError, "llguidance", "perspectron[constrain]"):
        json_schema({"type": "object"}, tokenizer)


def test_settings_that_do_not_go_together_are_refused(perspective, tokenizer, constraint) -> None:
    rows = Rows(perspective, tokenizer)
    for settings, named in [
        ({"hooks": [constraint], "min_tokens": 2}, ["min_tokens", 2]),
        ({"min_tokens": 10}, ["min_tokens", 10, "max_tokens", 9]),
        ({"min_tokens": -1}, ["min_tokens", -1]),
        ({"min_tokens": 1.5}, ["min_tokens", 1.5]),
        ({"stop_ids": [1.5]}, ["stop_ids", 1.5]),
        ({"stop_ids": [3, VOCAB]}, ["stop_ids", 300]),
    ]:
        with refused(ConfigError, *named):
            rows.add("x", max_tokens=9, **settings)
    again = Tokenizer.train(["another one"], 257)
    with refused(ConfigError, "constraint"):
        rows.add("x", max_tokens=9, hooks=[json_schema({"type": "object"}, again)])
    assert rows.active == []


def test_a_stop_id_ends_the_text_and_is_none_of_it(tokenizer) -> None:
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    model: LanguageModel = Scripted(make("perspective-tiny").config, [[a, b, c, a]] * 2)
    rows = Rows(model, tokenizer, together=False)
    rows.add("x", max_tokens=9, sampling=GREEDY, stop_ids=[c, b])
    rows.add("x", max_tokens=4, sampling=GREEDY)
    pieces = drain(rows)
    assert (ids(pieces, 0), text(pieces, 0), finish(pieces, 0)) == ([a, b], "a", "end")
    assert (text(pieces, 1), finish(pieces, 1)) == ("abca", "length")
    assert rows.remove(0).pending == [[b]]


def test_before_min_tokens_nothing_ends_a_text(tokenizer) -> None:
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    scripts = [[0, c, 0, 0, a], [a, b, a, b, a, b], [a, b, a, b, c]]
    model = Scripted(make("perspective-tiny").config, scripts)
    rows = Rows(model, tokenizer, together=False)
    rows.add("x", max_tokens=9, sampling=GREEDY, min_tokens=3, stop_ids=[c])
    rows.add("x", max_tokens=9, sampling=GREEDY, min_tokens=2, stop=["ab"])
    rows.add("x", max_tokens=9, sampling=GREEDY, min_tokens=3, stop=["bab"])
    pieces = drain(rows)
    drawn = ids(pieces, 0)
    assert not {0, c} & {*drawn[:3]} and drawn[3:] == [0] and finish(pieces, 0) == "end"
    assert (text(pieces, 1), finish(pieces, 1)) == ("ab", "stop")  # the first is complete too early
    assert (text(pieces, 2), finish(pieces, 2)) == ("a", "stop")  # begins early, and is complete in time


def test_min_tokens_change_no_bit_of_another_row(model, tokenizer) -> None:
    rows = Rows(model, tokenizer)
    sampling = SamplingConfig(temperature=2.0, seed=5)
    for number in range(4):
        rows.add(f"{number}", max_tokens=30, sampling=sampling, min_tokens=30 * (number % 2))
    pieces = drain(rows)
    for number in range(4):
        alone = Rows(model, tokenizer)
        own = alone.add(
            f"{number}", max_tokens=30, sampling=sampling, min_tokens=30 * (number % 2), stream=number
        )
        assert ids(drain(alone), own) == ids(pieces, number)
    assert all(len(ids(pieces, number)) == 30 for number in (1, 3))


def test_whole_bounds_that_float64_lacks_are_kept_to(perspective, tokenizer) -> None:
    low, high = 2**53 + 1, 2**53 + 3  # only 2^53 + 2 between them is a float64
    between = json_schema({"type": "integer", "minimum": low, "maximum": high}, tokenizer)
    made = generate(perspective, tokenizer, ["x"], max_tokens=40, sampling=GREEDY, hooks=[between])
    assert low <= int(made.texts[0]) <= high
    json_schema({"properties": {"id": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}}}, tokenizer)
