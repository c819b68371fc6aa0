"""Log-probabilities: of each prompt token as the model reads it, under names that no two tokens share."""

import json

import pytest
import torch
from fastapi.testclient import TestClient

from perspectron.data import Tokenizer
from perspectron.decode.reading import CHUNK
from perspectron.decode.sampling import logprobs
from perspectron.serve.web.about import texts
from perspectron.serve.web.app import create
from perspectron.serve.web.likely import Completed, Mark, shown
from tests.foreign_tokenizers import KINDS
from tests.serve.conftest import served
from tests.serve.test_routes import PROMPT, complete, streamed

LONG = "Row 3 of 9: the cat sat. " * 40


def echoed(client, **body) -> dict:
    return complete(client, echo=True, logprobs=4, temperature=0, **body)["choices"][0]


@torch.inference_mode()
def read(model, ids: list[int], V: int) -> list[tuple]:
    """What the model's own forward says of each id, a chunk at a time, after the separator."""
    whole, state, found = [0, *ids], None, []
    for start in range(0, len(ids), CHUNK):
        part = torch.tensor([whole[start : start + CHUNK]])
        output = model(part, state)
        state = output.state
        found += [
            logprobs(logits_V[:V], id, 4)
            for logits_V, id in zip(output.logits[0], whole[start + 1 : start + 1 + CHUNK], strict=False)
        ]
    return found


@pytest.mark.parametrize("design", ["perspective-tiny", "transformer-tiny"])
def test_an_echo_has_the_bits_of_the_models_own_reading(tmp_path, tokenizer, design) -> None:
    one = served(tmp_path, tokenizer, design=design)
    ids = tokenizer.encode(LONG)
    assert len(ids) > 2 * CHUNK
    expected = read(one.engine.model, ids, tokenizer.vocab_size)
    with TestClient(create([one]), base_url="http://localhost") as client:
        for prompt in (LONG, ids, [ids]):
            choice = echoed(client, prompt=prompt, max_tokens=1)
            got = choice["logprobs"]
            assert got["token_ids"][:-1] == ids and choice["text"].startswith(LONG)
            assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None
            assert got["token_logprobs"][1:-1] == [logprob for logprob, _ in expected[1:]]
            for at, (logprob, likely) in enumerate(expected[1:], 1):
                pairs = dict([*likely, (ids[at], logprob)])
                named = [(shown(tokenizer, id), value) for id, value in pairs.items()]
                assert list(got["top_logprobs"][at].items()) == named
        alone = echoed(client, prompt=LONG, max_tokens=0)
        assert alone["text"] == LONG and alone["finish_reason"] == "length"
        assert alone["logprobs"]["token_logprobs"] == got["token_logprobs"][:-1]
        read_before = one.engine.store.counters.tokens_saved
        complete(client, prompt=LONG)
        assert one.engine.store.counters.tokens_saved > read_before, "what was scored is not read again"


def test_several_prompts_and_choices_and_streams_echo_alike(client, tiny) -> None:
    several = complete(
        client, prompt=["The cat", "", "Row 3 of 9"], n=2, echo=True, logprobs=2, max_tokens=0
    )["choices"]
    assert [choice["text"] for choice in several] == ["The cat"] * 2 + [""] * 2 + ["Row 3 of 9"] * 2
    assert several[2]["logprobs"]["tokens"] == []
    frames = streamed(client, "/v1/completions", PROMPT | {"echo": True, "logprobs": 2})
    whole = complete(client, echo=True, logprobs=2)["choices"][0]
    parts = [frame["choices"][0] for frame in frames]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts for value in part["logprobs"][name]] == values, name
    none = streamed(client, "/v1/completions", PROMPT | {"echo": True, "max_tokens": 0})
    assert [frame["choices"][0]["text"] for frame in none] == ["The cat sat"]


def test_a_prompt_after_a_saved_state_has_a_first_token_with_something_before_it(client, tiny) -> None:
    complete(client, prompt="The cat sat", max_tokens=3, temperature=0, save="three")
    got = echoed(client, prompt=" on the mat", state="three", max_tokens=0)["logprobs"]
    again = echoed(client, prompt=" on the mat", state="three", max_tokens=0)["logprobs"]
    assert got == again and None not in got["token_logprobs"]
    fresh = echoed(client, prompt=" on the mat", max_tokens=0)["logprobs"]
    assert fresh["token_logprobs"][1:] != got["token_logprobs"][1:]


def test_names_of_tokens_are_unique_and_offsets_are_where_they_begin(client, tiny) -> None:
    tokenizer = tiny.tokenizer
    names = [shown(tokenizer, id) for id in range(tokenizer.vocab_size)]
    assert len(set(names)) == len(names) and "bytes:\\xe2" in names
    text = "größe → 日本 🦊, the cat"
    got = echoed(client, prompt=text, max_tokens=0)["logprobs"]
    for token, offset in zip(got["tokens"], got["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)
    for choice in (echoed(client, prompt=text, max_tokens=12), complete(client, logprobs=20)["choices"][0]):
        for id, top in zip(choice["logprobs"]["token_ids"], choice["logprobs"]["top_logprobs"], strict=True):
            if top is not None:
                assert len(top) >= 4 and shown(tokenizer, id) in top
                assert list(top.values()) == sorted(top.values(), reverse=True)
    whole = complete(client, echo=True, logprobs=0, max_tokens=9)["choices"][0]["logprobs"]
    assert all(len(top) == 1 for top in whole["top_logprobs"][1:])


def test_half_a_character_at_the_border_of_prompt_and_answer_is_where_the_text_has_it(tokenizer) -> None:
    data = "日".encode()
    ids = [tokenizer.encode("日")[0]]
    assert tokenizer.token_bytes(ids[0]) == data[:1]
    writer = Completed(tokenizer, [Mark(ids[0], None, ())], tokenizer.decode(ids))
    cat = tokenizer.encode("cat")
    assert writer.write([Mark(id, -1.0, ()) for id in cat])["text_offset"][:2] == [0, 1]


def test_after_half_a_character_a_token_begins_where_the_text_has_it(tokenizer) -> None:
    half, cat = tokenizer.encode("日")[:1], tokenizer.encode("cat")
    for ids in (half + cat, half + half + cat, cat + half + tokenizer.encode("é") + cat):
        text = tokenizer.decode(ids)
        got = Completed(tokenizer).write([Mark(id, -1.0, ()) for id in ids])
        for token, at in zip(got["tokens"], got["text_offset"], strict=True):
            assert token.startswith("bytes:") or text[at:].startswith(token), (token, at, text)
        at = got["text_offset"][-len(cat)]
        assert text[at:] == "cat"


def test_offsets_are_those_of_a_text_that_begins_without_the_space_of_its_first_word(tmp_path) -> None:
    KINDS["llama2"]().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    ids = tokenizer.encode("The fox")
    marks, text = [Mark(id, -1.0, ()) for id in ids], tokenizer.decode(ids)
    assert Completed(tokenizer, begins=True).write(marks)["text_offset"][-1] == len(text) - 1
    assert Completed(tokenizer, marks, text).write(marks[:1])["text_offset"][-2:] == [6, 7]
    assert Completed(tokenizer).write(marks)["text_offset"][-1] == len(text)
    assert "".join(texts(tokenizer, ids)[0]) == text


def test_too_many_log_probabilities_are_refused_before_any_work(client, tiny, monkeypatch) -> None:
    monkeypatch.setattr("perspectron.serve.web.answers.ENTRIES", 30)
    body = PROMPT | {"prompt": [5] * 11, "echo": True, "logprobs": 2, "max_tokens": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "logprobs"
    assert "more than 30 of them at once; these prompts have 33" in answer.text
    assert tiny.engine.store.counters.misses == 0


def test_chats_name_parts_of_characters_too(client, tiny) -> None:
    from perspectron.data.template import Template
    from tests.serve.conftest import TEMPLATE

    tiny.template = Template(TEMPLATE, "here")
    body = {
        "messages": [{"role": "user", "content": "日"}],
        "logprobs": True,
        "top_logprobs": 20,
        "max_tokens": 8,
    }
    answer = client.post("/v1/chat/completions", json=body).json()
    for token in answer["choices"][0]["logprobs"]["content"]:
        names = [one["token"] for one in token["top_logprobs"]]
        assert len(set(names)) == len(names) == 20 and "\ufffd" not in json.dumps(names, ensure_ascii=False)
