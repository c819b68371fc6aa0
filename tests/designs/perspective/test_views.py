"""Perspectives: measures against an oracle, the pass of extra rows, decisions, and what must not change."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

from perspectron import presets
from perspectron.decode.conversation import Conversation
from perspectron.decode.generate import generate
from perspectron.decode.reading import read
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.designs.perspective.measures import compared, confidence, divergence, majority, probabilities
from perspectron.designs.perspective.views import (
    Perspectives,
    PerspectivesConfig,
    load_calibration,
    save_calibration,
)
from perspectron.experts.router import RoutedConfig, Views
from perspectron.model.model import build
from perspectron.util.errors import ConfigError, NonFiniteError
from tests.decode.conftest import drain
from tests.refusals import refused

GREEDY, WARM = SamplingConfig(temperature=0), SamplingConfig(temperature=1.0, seed=3)
ALWAYS = PerspectivesConfig(every=1, threshold=0.02)
PROMPTS = ["the cat", "", "Row 7 of", "and then the mat", "of 49"]


def looks(model, config):
    return [Perspectives(model, config)]


def oracle(p, q):
    """20 lines, one number at a time."""
    total = 0.0
    for a, b in zip(p.tolist(), q.tolist(), strict=True):
        m = (a + b) / 2
        for x in (a, b):
            if x > 0:
                total += x * math.log2(x / m) / 2
    return total


def test_divergence_is_exact_at_its_ends_symmetric_and_as_the_oracle_says():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 2, 40, generator=draw) * torch.tensor([0.1, 1, 5, 20, 1e3, 1e4])[:, None, None]
    for a, b in probabilities(logits):
        assert abs(divergence(a, b) - oracle(a, b)) < 1e-12
        assert divergence(a, b) == divergence(b, a) and 0 <= divergence(a, b) <= 1 + 1e-12
        assert divergence(a, a) == 0
    one, other = torch.eye(4, dtype=torch.float64)[:2]
    assert divergence(one, other) == 1


def test_disagreement_and_information_of_known_cases():
    ends = torch.eye(8, dtype=torch.float64)
    cases = torch.stack([ends[[0, 0, 0, 0]], ends[[0, 0, 0, 1]], ends[[0, 1, 2, 3]]])
    apart, more = compared(cases)
    assert apart.tolist() == [0, 0.5, 1]
    torch.testing.assert_close(more, torch.tensor([0, 0.8112781245, 2], dtype=torch.float64))


@pytest.mark.parametrize(
    ("votes", "token"),
    [((1, 1, 2, 3), 1), ((1, 2, 2, 1), 1), ((1, 2, 2, 3), 2), ((1, 2, 3, 4), None), ((5, 2, 2, 2), 2)],
)
def test_the_majority_is_the_token_with_most_votes(votes, token):
    assert majority(votes) == token


def test_confidence_is_the_probability_at_a_temperature():
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert confidence(p, 0, 1.0) == pytest.approx(0.5)
    assert confidence(p, 0, 0.5) == pytest.approx(0.25 / 0.375)


def test_the_base_among_the_views_reads_as_the_model_does(perspective):
    ids = [[0, 5, 9, 33, 7], [0, 80, 4, 4, 11]]
    views = Views(("nearest", "second"), (0, 0), torch.empty(0))
    with torch.inference_mode():
        plain, _ = read(perspective, ids, perspective.init_state(2), fresh=[True] * 2, reset=0)
        seen, _ = read(perspective, ids, perspective.init_state(2), fresh=[True] * 2, reset=0, views=views)
        none, _ = read(
            perspective,
            ids,
            perspective.init_state(2),
            fresh=[True] * 2,
            reset=0,
            views=replace(views, from_layer=4),
        )
    torch.testing.assert_close(seen[0], plain[0], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(seen[1], plain[1], atol=1e-3)
    assert torch.equal(none, plain)  # from the last layer on, nothing differs


def leaves(talk: Conversation):
    return [x for x in torch.utils._pytree.tree_leaves(talk.state) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "drawn"])
def test_a_threshold_that_nothing_reaches_changes_no_token_and_no_bit_of_the_state(
    perspective, tokenizer, sampling
):
    settings = {"max_tokens": 12, "sampling": sampling}
    plain = generate(perspective, tokenizer, PROMPTS, **settings)
    watched = generate(
        perspective, tokenizer, PROMPTS, **settings, hooks=looks(perspective, replace(ALWAYS, threshold=1.0))
    )
    assert watched.ids == plain.ids and plain.verdicts == {}
    assert all(map(torch.equal, leaves(plain.conversation), leaves(watched.conversation)))
    assert all(verdict.triggered for row in watched.verdicts["perspectives"] for verdict in row)
    assert any(verdict.disagreement > 0 for row in watched.verdicts["perspectives"] for verdict in row)


def same(one, other):
    """Verdicts that are equal but for rounding."""
    assert [v[:3] + v[6:] for v in one] == [v[:3] + v[6:] for v in other]
    for a, b in zip(one, other, strict=True):
        assert a[3:6] == pytest.approx(b[3:6], abs=1e-5)


@pytest.mark.parametrize(
    "config", [PerspectivesConfig(trigger_p=0.3, threshold=0.01), replace(ALWAYS, persistent=True)]
)
def test_a_batch_of_mixed_triggers_is_its_single_runs(perspective, tokenizer, config):
    settings = {"max_tokens": 8, "sampling": GREEDY, "hooks": looks(perspective, config)}
    batch = generate(perspective, tokenizer, PROMPTS, **settings)
    triggers = {verdict.triggered for row in batch.verdicts["perspectives"] for verdict in row}
    assert config.persistent or triggers == {True, False}
    for row, prompt in enumerate(PROMPTS):
        alone = generate(perspective, tokenizer, [prompt], **settings)
        assert alone.ids[0] == batch.ids[row]
        same(alone.verdicts["perspectives"][0], batch.verdicts["perspectives"][row])


def test_persistent_views_read_all_that_was_drawn(perspective, tokenizer):
    config, perspective = replace(ALWAYS, seed=5, persistent=True), copy.deepcopy(perspective)
    with torch.no_grad():  # experts that matter
        for block in perspective.blocks[:3]:
            block.ffn.down_EDF.mul_(20)
    made = generate(
        perspective, tokenizer, ["the cat"], max_tokens=6, sampling=GREEDY, hooks=looks(perspective, config)
    )
    ids = [0, *tokenizer.encode("the cat")]
    for id, verdict in zip(made.ids[0], made.verdicts["perspectives"][0], strict=True):
        views = Views(("nearest", "second", "antipode", "random"), (5,) * 4, torch.empty(0))
        with torch.inference_mode():
            last, _ = read(
                perspective, [ids] * 4, perspective.init_state(4), fresh=[True] * 4, reset=0, views=views
            )
            apart, _ = compared(probabilities(perspective.head(last))[None])
        assert verdict.disagreement == pytest.approx(float(apart), abs=1e-4)
        ids.append(id)


def test_each_verdict_follows_from_a_reading_by_hand(perspective, tokenizer):
    config, perspective = replace(ALWAYS, seed=5), copy.deepcopy(perspective)
    with torch.no_grad():  # experts that matter
        for block in perspective.blocks[:3]:
            block.ffn.down_EDF.mul_(20)
    made = generate(
        perspective, tokenizer, ["the cat"], max_tokens=10, sampling=GREEDY, hooks=looks(perspective, config)
    )
    ids = [0, *tokenizer.encode("the cat")]
    chosen = 0
    for id, verdict in zip(made.ids[0], made.verdicts["perspectives"][0], strict=True):
        with torch.inference_mode():
            _, past = read(perspective, [ids[:-1]], perspective.init_state(1), fresh=[True], reset=0)
            views = Views(("nearest", "second", "antipode", "random"), (5,) * 4, torch.empty(0))
            last, _ = read(
                perspective, [ids[-1:]] * 4, past.select([0] * 4), fresh=[False] * 4, reset=0, views=views
            )
            p = probabilities(perspective.head(last))
        apart, more = compared(p[None])
        assert verdict.disagreement == pytest.approx(float(apart), abs=1e-5)
        assert verdict.information == pytest.approx(float(more), abs=1e-5)
        votes = p.argmax(1).tolist()
        assert list(verdict.votes) == votes
        common = majority(votes)
        wanted = votes[0] if apart < config.threshold or common is None else common
        assert id == verdict.token == wanted
        assert verdict.flagged == bool(apart >= config.threshold and common is None)
        assert verdict.confidence == pytest.approx(float(p.mean(0)[id]), abs=1e-5)
        chosen += wanted != votes[0]
        ids.append(id)
    assert chosen and any(verdict.flagged for verdict in made.verdicts["perspectives"][0])


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "drawn"])
def test_a_probe_asks_where_what_the_head_reads_is_past_its_threshold_and_nowhere_else(
    perspective, tokenizer, sampling
):
    """No other trigger is on, and the views that are asked change no token."""
    draw = torch.Generator().manual_seed(0)
    normal_D = torch.randn(perspective.config.d_model, generator=draw, dtype=torch.float64)
    never = PerspectivesConfig(trigger_p=0.0, trigger_entropy=1e9, threshold=1.0)
    settings = {"max_tokens": 12, "sampling": sampling}
    plain = generate(perspective, tokenizer, PROMPTS, **settings, hooks=looks(perspective, never))
    scores = []
    for prompt, ids in zip(PROMPTS, plain.ids, strict=True):
        text = [0, *tokenizer.encode(prompt), *ids]
        with torch.inference_mode():
            hidden_1TD, _, _ = perspective.hidden(torch.tensor([text[:-1]]))
        scores.append((hidden_1TD[0, -len(ids) :].double() @ normal_D).tolist())
    flat = sorted(score for row in scores for score in row)
    third = len(flat) * 2 // 3
    level = (flat[third - 1] + flat[third]) / 2
    config = replace(never, probe=tuple(normal_D.tolist()), trigger_probe=level)
    made = generate(perspective, tokenizer, PROMPTS, **settings, hooks=looks(perspective, config))
    asked = [[verdict.triggered for verdict in row] for row in made.verdicts["perspectives"]]
    assert asked == [[score > level for score in row] for row in scores]
    assert made.ids == plain.ids
    assert all(map(torch.equal, leaves(plain.conversation), leaves(made.conversation)))
    off = generate(
        perspective, tokenizer, PROMPTS, **settings, hooks=looks(perspective, replace(config, probe=()))
    )
    assert off.verdicts == plain.verdicts != made.verdicts
    silent = replace(config, trigger_probe=flat[-1] + 1)
    assert (
        generate(perspective, tokenizer, PROMPTS, **settings, hooks=looks(perspective, silent)).verdicts
        == plain.verdicts
    )


def test_saved_in_the_middle_it_goes_on_to_the_same_tokens_and_verdicts(perspective, tokenizer, tmp_path):
    settings = {
        "sampling": WARM,
        "hooks": looks(perspective, replace(ALWAYS, kinds=("base", "perturbed", "perturbed"))),
    }
    whole = generate(perspective, tokenizer, ["the cat"], max_tokens=12, **settings)
    first = generate(perspective, tokenizer, ["the cat"], max_tokens=5, **settings)
    first.conversation.save(tmp_path / "talk", perspective)
    again = Conversation.load(tmp_path / "talk", perspective)
    rest = generate(perspective, tokenizer, [""], max_tokens=7, conversation=again, **settings)
    assert first.ids[0] + rest.ids[0] == whole.ids[0]
    same(
        first.verdicts["perspectives"][0] + rest.verdicts["perspectives"][0],
        whole.verdicts["perspectives"][0],
    )


def test_a_stop_string_and_the_end_of_text_end_a_row_in_a_triggered_step(perspective, tokenizer):
    whole = generate(
        perspective, tokenizer, ["the cat"], max_tokens=12, sampling=WARM, hooks=looks(perspective, ALWAYS)
    )
    stop = whole.texts[0][3:5]
    ended = generate(
        perspective,
        tokenizer,
        ["the cat"],
        max_tokens=12,
        sampling=WARM,
        hooks=looks(perspective, ALWAYS),
        stop=[stop],
    )
    assert ended.finished == ["stop"] and ended.texts[0] == whole.texts[0][: whole.texts[0].index(stop)]
    ending = copy.deepcopy(perspective)
    with torch.no_grad():
        ending.embedding.weight.zero_()  # all tokens alike: greedily the first, the end of text
    made = generate(ending, tokenizer, ["the"], max_tokens=9, sampling=GREEDY, hooks=looks(ending, ALWAYS))
    assert made.finished == ["end"] and len(made.verdicts["perspectives"][0]) == 1


def test_surrogates_need_no_count_of_tokens():
    model = build(presets.get("gdn", vocab_size=40, d_model=16, layers=1, heads=2, hidden=16))
    assert model.init_state(1).document_length_B is None
    assert Perspectives(model, PerspectivesConfig(surrogate=True)).names[0] == "base"


def test_a_model_without_experts_takes_surrogates_that_are_marked(tokenizer, double):
    if any(isinstance(block.ffn, RoutedConfig) for block in double.config.blocks):
        with refused(ConfigError, "surrogate", True):
            Perspectives(double, PerspectivesConfig(surrogate=True))
        return
    with refused(ConfigError, "perspectives", "surrogate"):
        Perspectives(double, PerspectivesConfig())
    config = PerspectivesConfig(surrogate=True, every=0, trigger_p=1.0, threshold=0.001)
    made = generate(
        double, tokenizer, ["the cat"], max_tokens=5, sampling=GREEDY, hooks=looks(double, config)
    )
    again = generate(
        double, tokenizer, ["the cat"], max_tokens=5, sampling=GREEDY, hooks=looks(double, config)
    )
    assert Perspectives(double, config).names == ("base", "noise", "temperature", "mask")
    assert made.verdicts == again.verdicts and all(
        v.disagreement > 0 for v in made.verdicts["perspectives"][0]
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kinds": ("second", "random")}, ["kinds", "base"]),
        ({"kinds": ("base",)}, ["kinds", "base"]),
        ({"kinds": ("base", "behind")}, ["behind", "base", "second"]),
        ({"threshold": 1.5}, ["threshold"]),
        ({"temperature": 0.0}, ["temperature"]),
        ({"from_layer": -1}, ["from_layer", -1]),
        ({"probe": (1.0, math.nan)}, ["probe"]),
        ({"trigger_probe": math.inf}, ["probe"]),
    ],
)
def test_bad_settings_are_said_in_a_line(fields, named):
    with refused(ConfigError, *named):
        PerspectivesConfig(**fields)


def test_bad_models_and_files_are_said_in_a_line(perspective, tokenizer, tmp_path):
    with refused(ConfigError, "from_layer", 5):
        Perspectives(perspective, PerspectivesConfig(from_layer=5))
    width = perspective.config.d_model
    with refused(ConfigError, "probe", 5, width):
        Perspectives(perspective, PerspectivesConfig(probe=(1.0,) * 5))
    ffn = replace(perspective.config.blocks[0].ffn, torus=(1,))
    lonely = copy.deepcopy(perspective)
    blocks = (replace(lonely.config.blocks[0], ffn=ffn), *lonely.config.blocks[1:])
    lonely.config = replace(lonely.config, blocks=blocks)
    with refused(ConfigError, "perspectives"):
        Perspectives(lonely, PerspectivesConfig())
    path, mine = tmp_path / "calibration.json", tokenizer.fingerprint
    save_calibration(path, ALWAYS, perspective, mine, {"trigger": 1.0})
    assert load_calibration(path, perspective, mine) == ALWAYS
    probed = replace(ALWAYS, probe=tuple(i / 7 for i in range(width)), trigger_probe=-0.1)
    save_calibration(path, probed, perspective, mine, {})
    assert load_calibration(path, perspective, mine) == probed
    save_calibration(path, ALWAYS, perspective, mine, {"auroc": {"probe": math.nan}})
    assert load_calibration(path, perspective, mine) == ALWAYS
    assert json.loads(path.read_text())["rates"] == {"auroc": {"probe": None}}
    other = copy.deepcopy(perspective)
    with torch.no_grad():
        other.embedding.weight[0, 0] += 1
    with refused(ConfigError, path):
        load_calibration(path, other, mine)
    with refused(ConfigError, path, "0" * 12):
        load_calibration(path, perspective, "0" * 64)
    path.write_text("[]")
    with refused(ConfigError, path) as caught:
        load_calibration(path, perspective, mine)
    assert "perspectron perspective views RUN --out" in str(caught.value)
    looked = Perspectives(perspective, ALWAYS)
    good = torch.zeros(1, 300)
    bad = torch.zeros(1, 3, 300)
    bad[0, 1, 5] = math.nan
    with refused(NonFiniteError, "antipode"):
        looked.judge(good, torch.zeros(1, 32), 0, 0, lambda: bad[0], lambda *_: 0)


def test_a_row_whose_views_are_not_finite_ends_and_the_others_go_on(perspective, tokenizer, monkeypatch):
    rows = Rows(perspective, tokenizer, hooks=looks(perspective, ALWAYS))
    for prompt in PROMPTS[:3]:
        rows.add(prompt, max_tokens=4, sampling=GREEDY)
    expected = generate(
        perspective, tokenizer, PROMPTS[:3], max_tokens=4, sampling=GREEDY, hooks=looks(perspective, ALWAYS)
    )
    judge = Perspectives.judge

    def spoiled(self, logits_1V, hidden_1D, drawn, at, look, mixed):
        """The antipode's logits for whom it is the second token that follows "Row 7 of"."""

        def bad() -> torch.Tensor:
            found = look().clone()
            if drawn == expected.ids[2][1] and at == position:
                found[1, 0] = math.nan
            return found

        return judge(self, logits_1V, hidden_1D, drawn, at, bad, mixed)

    position = len(tokenizer.encode(PROMPTS[2])) + 1
    monkeypatch.setattr(Perspectives, "judge", spoiled)
    pieces = drain(rows)
    (failed,) = [piece for piece in pieces if piece.finished == "error"]
    assert failed.row == 2 and str(failed.error) == "logits of the perspective 'antipode': must be finite"
    for row in (0, 1):
        own = [piece for piece in pieces if piece.row == row]
        assert [piece.id for piece in own] == expected.ids[row]
        assert [piece.verdicts["perspectives"] for piece in own] == expected.verdicts["perspectives"][row]
