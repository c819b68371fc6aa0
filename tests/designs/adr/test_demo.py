"""`perspectron adr demo`: what is told and what is kept from training, the document's own code, and the page."""

import json

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.cli.main import main
from perspectron.designs.adr import countries, demo
from perspectron.designs.adr.countries import PHRASINGS, UNKNOWN, Sentences, facts
from perspectron.designs.adr.literal import LiteralADR, tried
from tests.refusals import in_a_line

RIGHT = {"told": 0.9, "unseen": 0.8, "unknown": 0.2}


@pytest.fixture
def results():
    model = {"parameters": 1000, "likeliest": [[" Rome", 0.8]] + [[" ,", 0.1]] * 4, "right": RIGHT,
             "asked": {"told": 3, "unseen": 2, "unknown": 1}}  # fmt: skip
    better = model | {"right": RIGHT | {"unknown": 0.9}}
    literal = {"text": " ba", "token": 3, "leak": 0.2, "again": 0.1}
    return {"prompt": demo.PROMPT, "steps": 6, "seconds": 5.0, "literal": literal,
            "models": {"adr": model, "gpt2": better}}  # fmt: skip


def test_what_is_asked_was_not_told():
    train, heldout = ({document.text for document in Sentences().documents(s)} for s in ("train", "heldout"))
    assert not train & heldout and len(train | heldout) == len(facts()) * len(PHRASINGS)
    unknown = [fact for fact in facts() if not fact.known]
    assert len(unknown) == UNKNOWN and all(len(fact.told) == 1 for fact in unknown)
    assert all(len(fact.told) == len(PHRASINGS) - 1 for fact in facts() if fact.known)
    assert demo.PROMPT == "The capital of Italy is" and f"{demo.PROMPT} Rome." in heldout
    assert len({fact.country for fact in facts()}) == len(facts()) > 180
    fact = facts()[3]
    assert fact.prompt(4) + f" {fact.capital}." == fact.sentence(4)


def test_the_document_as_printed_sees_what_comes_and_keeps_what_was():
    found = tried([5, 6, 7, 8], vocab_size=30, positions=16)
    assert found["leak"] > 1e-4 and found["again"] > 1e-6 and 0 <= found["token"] < 30
    assert found == tried([5, 6, 7, 8], vocab_size=30, positions=16)
    model = LiteralADR(30, 16)
    model(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(RuntimeError):  # a state for two texts is there still
        model(torch.zeros(1, 3, dtype=torch.int64))


def test_our_own_sees_nothing_of_what_comes():
    model = perspectron.build(presets.get("adr-demo", vocab_size=30, d_model=32, hidden=32, layers=2)).eval()
    one, other = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 6, 7, 9]])
    assert torch.equal(model(one).logits[:, :3], model(other).logits[:, :3])


def test_the_failure_is_told_first(results):
    said = demo.told(results)
    assert said.index("20%") < said.index("80%") and "GPT-2" in said
    page = demo.page(results)
    assert page.index("Its model is not trained") < page.index(">What training teaches</h2>")


def test_the_command_trains_two_models_asks_them_and_draws_a_page(tmp_path, capsys, monkeypatch):
    few = [fact for fact in facts() if fact.country in ("Italy", "France", "Peru")] + [
        fact for fact in facts() if not fact.known
    ][:2]
    for module in (countries, demo):
        monkeypatch.setattr(module, "facts", lambda: tuple(few))
    preset = presets.get
    monkeypatch.setattr(
        demo.presets, "get",
        lambda name, **own: preset(name, **({"d_model": 32, "layers": 1, "heads": 2} | own)
                                   | ({"hidden": 16} if name == "adr-demo" else {})),
    )  # fmt: skip
    command = ["adr", "demo", "--steps", "2", "--out", str(tmp_path / "demo"), "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    adr, gpt2 = (found["models"][name] for name in ("adr", "gpt2"))
    assert abs(adr["parameters"] / gpt2["parameters"] - 1) < 0.02
    assert adr["asked"] == {"told": 5, "unseen": 3, "unknown": 10} and len(adr["likeliest"]) == 5
    assert "Capitals named" in (tmp_path / "demo" / "demo.html").read_text()
    assert main(["adr", "demo", "--steps", "0"]) == 2
    in_a_line(capsys.readouterr().err, "steps", 0)
