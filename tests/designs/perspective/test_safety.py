"""The safe set: projections against brute force and a solver, its Jacobian, conformal rate, files, and decoding."""

import copy
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from perspectron import build
from perspectron.cli.main import main
from perspectron.decode.generate import generate
from perspectron.decode.processors import Mark
from perspectron.decode.sampling import SamplingConfig
from perspectron.designs.perspective import projection
from perspectron.designs.perspective.projection import SLACK, faces, hildreth, project
from perspectron.designs.perspective.safety import Polytope, Safety, _digest, fit, of_tokens, states
from perspectron.designs.perspective.views import Perspectives, PerspectivesConfig
from perspectron.opening import save
from perspectron.quant.convert import convert
from perspectron.util.errors import ConfigError
from perspectron.util.tensors import load_tensors, save_tensors
from tests.decode.conftest import VOCAB, make
from tests.refusals import in_a_line, refused

GREEDY = SamplingConfig(temperature=0)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_faces(H, D, seed=0):
    rows = torch.nn.functional.normalize(normal(H, D, seed=seed), dim=1)
    return faces(rows, 0.3 + normal(H, seed=seed + 1).abs(), torch.zeros(D))


def brute(h, made):
    """The nearest of the projections on every set of faces that lies inside."""
    N, b = made.normal_HD, made.offset_H
    H, D = N.shape
    best = None
    for size in range(min(H, D) + 1):
        for chosen in itertools.combinations(range(H), size):
            A = N[list(chosen)]
            x = h - torch.linalg.pinv(A) @ (A @ h - b[list(chosen)]) if chosen else h
            if (N @ x - b).max() < 1e-9 and (best is None or (x - h).norm() < (best - h).norm()):
                best = x
    return best


@pytest.mark.parametrize(("H", "D"), [(6, 3), (9, 5), (3, 4)])
def test_projections_are_those_of_brute_force_over_active_sets(H, D):
    made, h_ND = random_faces(H, D), 2 * normal(12, D, seed=9)
    x_ND, report = project(h_ND, made)
    for h, x in zip(h_ND, x_ND, strict=True):
        torch.testing.assert_close(x, brute(h, made), atol=1e-9, rtol=0)
    assert report.violated_N.any() and torch.allclose(report.moved_N, (x_ND - h_ND).norm(dim=1))


def test_many_points_end_inside_stay_there_and_fulfil_the_conditions_of_the_nearest():
    made = random_faces(40, 12)
    h_ND = 0.35 * normal(1000, 12, seed=3).float() * torch.linspace(0.2, 6, 1000)[:, None]
    x_ND, report = project(h_ND, made)
    assert x_ND.dtype == torch.float32 and 0.2 < report.violated_N.double().mean() < 1
    excess_NH = x_ND.double() @ made.normal_HD.T - made.offset_H
    assert excess_NH.max() <= SLACK
    still = ~report.violated_N
    assert torch.equal(x_ND[still], h_ND[still])
    again_ND, _ = project(x_ND, made)
    torch.testing.assert_close(again_ND, x_ND, atol=2e-6, rtol=0)
    for h, x, excess_H in zip(h_ND[-40:].double(), x_ND[-40:].double(), excess_NH[-40:], strict=True):
        active = excess_H > -1e-4  # h − x is a sum of active normals with weights ≥ 0
        weights = torch.linalg.lstsq(made.normal_HD[active].T, (h - x)[:, None]).solution[:, 0]
        torch.testing.assert_close(weights @ made.normal_HD[active], h - x, atol=1e-4, rtol=0)
        assert weights.min() > -1e-3


def test_order_and_the_fallback_change_nothing():
    made, h_ND = random_faces(60, 9), 3 * normal(20, 9, seed=4)
    x_ND, _ = project(h_ND, made)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    other = faces(made.normal_HD[order], made.offset_H[order], made.inside_D)
    torch.testing.assert_close(project(h_ND, other)[0], x_ND, atol=1e-8, rtol=0)
    for h, x in zip(h_ND, x_ND, strict=True):
        multiplier_H, sweeps = hildreth(made.gram_HH, made.normal_HD @ h - made.offset_H, 1e-10)
        assert sweeps < 0
        torch.testing.assert_close(h - multiplier_H @ made.normal_HD, x, atol=1e-6, rtol=0)


def test_points_far_outside_of_many_faces_end_at_the_nearest():
    """Where neither pivoting nor Hildreth's sweeps end."""
    made, h_ND = random_faces(40, 6, seed=4), 200 * normal(3, 6, seed=54)
    x_ND, report = project(h_ND, made)
    assert (report.rounds_N < 0).all()
    for h, x in zip(h_ND, x_ND, strict=True):
        active = made.normal_HD @ x - made.offset_H > -1e-5
        _, rest = nnls(made.normal_HD[active].T.numpy(), (h - x).numpy())
        assert rest < 1e-6 * float((h - x).norm())
    assert torch.autograd.gradcheck(lambda x: project(x, made)[0], h_ND[:1].clone().requires_grad_())


def test_sweeps_that_end_at_no_nearest_point_are_not_the_last_word(monkeypatch):
    made, h_ND = random_faces(40, 6, seed=4), 200 * normal(3, 6, seed=54)
    nearest, _ = project(h_ND, made)
    monkeypatch.setattr(projection, "hildreth", lambda gram_HH, excess_H, _: (excess_H.clamp_min(0), -7))
    again, _ = project(h_ND, made)
    torch.testing.assert_close(again, nearest, rtol=0, atol=1e-8 * float(h_ND.norm()))


def test_a_projection_that_may_not_be_the_nearest_says_so(monkeypatch):
    made, h_ND = random_faces(40, 6, seed=4), 200 * normal(1, 6, seed=54)
    monkeypatch.setattr(projection, "hildreth", lambda gram_HH, excess_H, _: (excess_H.clamp_min(0), -7))

    def endless(*_, **__):
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr("scipy.optimize.nnls", endless)
    with pytest.warns(UserWarning, match="nearest"):
        x_ND, _ = project(h_ND, made)
    assert (x_ND @ made.normal_HD.T - made.offset_H).max() <= SLACK


def test_nearly_parallel_rows_no_rows_and_more_rows_than_width():
    row = torch.nn.functional.normalize(normal(1, 5), dim=1)
    close = torch.nn.functional.normalize(row + 1e-9 * normal(30, 5, seed=2), dim=1)
    made = faces(torch.cat([row, close]), torch.ones(31), torch.zeros(5))
    x_ND, _ = project(1e4 * normal(5, 5, seed=1).float(), made)
    assert (x_ND.double() @ made.normal_HD.T - 1).max() <= SLACK
    nothing = faces(torch.zeros(0, 5), torch.zeros(0), torch.zeros(5))
    h_ND = normal(3, 5)
    assert project(h_ND, nothing)[0] is h_ND
    with refused(ConfigError, "polytope", 5, 4):
        project(normal(2, 4), made)


def test_the_jacobian_is_that_of_differences_in_both_modes():
    made, h_ND = random_faces(20, 6), 2 * normal(8, 6, seed=5)
    assert torch.autograd.gradcheck(
        lambda x: project(x, made)[0], h_ND.requires_grad_(), check_forward_ad=True
    )


def gaussian(count, shift=0.0, seed=0, D=16):
    x = normal(count, D, seed=seed)
    x[:, 0] += shift
    return x


class Anyone:
    config = init_state = None

    def fingerprint(self):
        return "f" * 64


def test_the_share_of_allowed_text_outside_is_alpha_over_resamples():
    shares = []
    for seed in range(40):
        made = fit(
            Anyone(),
            gaussian(240, seed=3 * seed),
            {"far": gaussian(60, 3.0, 3 * seed + 1)},
            facets=3,
            alpha=0.1,
            seed=seed,
        )
        shares.append(float((made.scores(gaussian(300, seed=3 * seed + 2)) > 0).double().mean()))
        assert made.scores(gaussian(100, 6.0, seed)).gt(0).double().mean() > 0.9
    error = np.std(shares) / math.sqrt(len(shares))
    assert 0.1 - 4 * error - 1 / 120 < np.mean(shares) < 0.1 + 3 * error


def test_bad_states_are_said_in_a_line():
    far = {"far": gaussian(60, 3.0, 1)}
    with refused(ConfigError, "alpha", 0.001):
        fit(Anyone(), gaussian(240), far, alpha=0.001)
    broken = gaussian(240)
    broken[3, 2] = math.nan
    with refused(ConfigError, "allowed"):
        fit(Anyone(), broken, far)
    with refused(ConfigError, "alpha", 2):
        fit(Anyone(), gaussian(240), far, alpha=2)
    with refused(ConfigError, "none"):
        fit(Anyone(), gaussian(240), far | {"few": gaussian(0)})


def test_categories_and_clusters_of_one_state_are_kept():
    one = gaussian(1, 9.0)
    assert fit(Anyone(), gaussian(240), {"one": one}).labels == ("one",)
    assert fit(Anyone(), gaussian(240), {"far": gaussian(60, 3.0, 1), "one": one}, facets=1).labels == (
        "far",
        "one",
    )
    lonely = torch.cat([gaussian(39, 3.0, 1), -30 * gaussian(1, 3.0, 2)])
    found = fit(Anyone(), gaussian(240), {"far": lonely}, facets=2)
    assert len(found.labels) == 2 and (found.scores(lonely[-1:]) > 0).all()


@pytest.fixture(scope="module")
def made(perspective, tokenizer):
    allowed = [f"Row {i} of {i}: the cat sat" for i in range(160)]
    blocked = [f"mat mat {i} and then" for i in range(40)]
    h, b = states(perspective, tokenizer, allowed), states(perspective, tokenizer, blocked)
    return fit(perspective, h, {"mats": b}, facets=2, alpha=0.05)


def test_a_file_is_the_set_again_and_of_its_model_alone(made, perspective, tmp_path):
    path = tmp_path / "set.safe"
    made.save(path)
    again = Polytope.load(path, perspective)
    assert torch.equal(again.normals, made.normals) and torch.equal(again.offsets, made.offsets)
    assert (again.labels, again.epsilon, again.alpha) == (made.labels, made.epsilon, made.alpha)
    other = copy.deepcopy(perspective)
    with torch.no_grad():
        other.embedding.weight[0, 0] += 1
    with refused(ConfigError, path):
        Polytope.load(path, other)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with refused(ConfigError, path) as caught:
        Polytope.load(path, perspective)
    assert "perspectron perspective safety fit RUN" in str(caught.value)
    with refused(ConfigError, "label", "cats"):
        made.remove("cats")


def test_a_set_without_half_spaces_has_every_state_inside(made, perspective, tokenizer, tmp_path):
    made.remove("mats").save(tmp_path / "set.safe")
    bare = Polytope.load(tmp_path / "set.safe", perspective)
    assert bare.scores(normal(3, 32)).tolist() == [-math.inf] * 3
    settings = {"max_tokens": 6, "sampling": GREEDY}
    plain = generate(perspective, tokenizer, ["the"], **settings)
    for action in ("project", "flag", "stop"):
        found = generate(perspective, tokenizer, ["the"], **settings, hooks=[Safety(bare, action, window=2)])
        assert found.ids == plain.ids and not any(mark.flagged for mark in found.verdicts["safety"][0])
    assert bare.add(made).labels == made.labels


def test_half_spaces_of_another_model_or_width_are_not_added(made):
    with refused(ConfigError, "model", "zzz"):
        made.add(replace(made, model="zzz"))
    narrow = fit(Anyone(), gaussian(240), {"far": gaussian(60, 3.0, 1)})
    with refused(ConfigError, "width", 16, 32):
        made.add(replace(narrow, model=made.model))


@pytest.mark.parametrize(
    "change",
    [
        {"labels": None},
        {"labels": "mats"},
        {"labels": [1, 2]},
        {"labels": ["mats"]},
        {"labels": ["token:x", "mats"]},
        {"labels": ["token:" + "9" * 5000, "mats"]},
        {"labels": ["token:99999", "mats"]},
        {"labels": ["a\x1b[2J", "mats"]},
        {"epsilon": "much"},
        {"alpha": 1.5},
        {"alpha": None},
        {"model": 7},
        {"more": 1},
        "[]",
        "no JSON",
        torch.float64,
        torch.bfloat16,
        torch.bool,
    ],
    ids=str,
)
def test_a_forged_file_is_refused_in_a_line(made, perspective, tmp_path, change):
    path = tmp_path / "set.safe"
    made.save(path)
    header, tensors = load_tensors(path, ConfigError, "a polytope")
    if isinstance(change, torch.dtype):
        tensors["normals"] = tensors["normals"].to(change)
    else:
        told = json.loads(header["about"])
        header["about"] = change if isinstance(change, str) else json.dumps(told | change)
    header["digest"] = _digest(header["about"], tensors)
    save_tensors(path, tensors, header)
    with refused(ConfigError, path) as error:
        Polytope.load(path, perspective)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


def test_tokens_stay_under_their_reference_for_every_state(perspective):
    blocked, reference, margin = [5, 9, 33], 7, 3.0
    inside = torch.zeros(32, dtype=torch.float64)
    low = of_tokens(perspective, blocked, reference, margin, inside)
    x_ND, _ = project(4 * normal(50, 32).float(), low.faces)
    p_NV = perspective.head(x_ND).double().softmax(1)
    assert (p_NV[:, blocked] <= math.exp(-margin) * p_NV[:, [reference]] * (1 + 1e-3)).all()
    with refused(ConfigError, "reference", 5):
        of_tokens(perspective, blocked, 5, margin, inside)


def test_logits_that_are_scaled_keep_the_margin_and_capped_ones_are_refused(perspective):
    inside = torch.zeros(32, dtype=torch.float64)
    scaled, capped = (
        build(replace(perspective.config, **{name: 0.25})) for name in ("logits_factor", "logits_cap")
    )
    x_ND, _ = project(4 * normal(50, 32).float(), of_tokens(scaled, [5, 9], 7, 3.0, inside).faces)
    logit_NV = scaled.head(x_ND).double()
    assert (logit_NV[:, [5, 9]] <= logit_NV[:, [7]] - 3.0 + 1e-3).all()
    with refused(ConfigError, "logits_cap", 0.25):
        of_tokens(capped, [5, 9], 7, 3.0, inside)


@pytest.mark.parametrize("design", ["perspective-tiny", "transformer-tiny"])
def test_a_packed_head_which_rounds_its_inputs_is_refused(design):
    packed = make(design)
    convert(packed)
    with refused(ConfigError, "tokens", packed.config.name):
        of_tokens(packed, [5, 9], 7, 3.0, torch.zeros(32, dtype=torch.float64))


@pytest.fixture(scope="module")
def folder(perspective, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("safety")
    save(perspective, tokenizer, folder / "run", seq_len=32)
    (folder / "good.txt").write_text("".join(f"Row {i} of {i}: the cat sat\n" for i in range(120)))
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "bad.txt").write_text("".join(f"mat mat {name} {i}\n" for i in range(12)))
    return folder


def test_files_of_one_name_are_one_category(folder, perspective, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    words = ["run", "set.safe", "--allowed", "good.txt", "--blocked", "a/bad.txt", "b/bad.txt"]
    assert main(["perspective", "safety", "fit", *words, "--facets", "6"]) == 0
    assert Polytope.load(folder / "set.safe", perspective).labels == ("bad",) * 6  # of 12 texts they were 3
    capsys.readouterr()
    assert main(["perspective", "safety", "test", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outside"].keys() == {"allowed", "bad"}


@pytest.mark.parametrize(
    ("action", "more", "named"),
    [
        ("fit", ["--blocked", "allowed=a/bad.txt"], ["blocked", "allowed=a/bad.txt"]),
        ("test", ["--blocked", "a/bad.txt", "--facets", "4"], ["facets", 4]),
        ("test", ["--blocked", "a/bad.txt", "--alpha", "0.1"], ["alpha", "0.1"]),
        ("test", ["--blocked", "a/bad.txt", "--seed", "3"], ["seed", 3]),
    ],
)
def test_mistakes_are_one_line(folder, monkeypatch, capsys, action, more, named):
    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert main(["perspective", "safety", action, "run", "none.safe", "--allowed", "good.txt", *more]) == 2
    in_a_line(capsys.readouterr().err, *named)


def test_decoding_projects_flags_stops_and_masks(made, perspective, tokenizer):
    settings = {"max_tokens": 8, "sampling": GREEDY}
    plain = generate(perspective, tokenizer, ["the cat"], **settings)
    wide = Polytope(made.normals, made.offsets + 1e6, made.inside, made.labels, 0.0, 0.0, made.model)
    inside = generate(perspective, tokenizer, ["the cat"], **settings, hooks=[Safety(wide)])
    assert inside.ids == plain.ids and inside.verdicts["safety"] == [[Mark()] * len(inside.ids[0])]
    other = next(id for id in (7, 8) if id != plain.ids[0][0])
    low = of_tokens(perspective, [plain.ids[0][0]], other, 2.0, torch.zeros(32, dtype=torch.float64))
    every = {
        action: generate(perspective, tokenizer, ["the cat"], **settings, hooks=[Safety(low, action)])
        for action in ("project", "flag", "stop", "mask")
    }
    assert every["flag"].ids == plain.ids and every["flag"].verdicts["safety"][0][0].flagged
    assert every["stop"].finished == ["unsafe"] and every["stop"].ids == [[]]
    for action in ("project", "mask"):
        assert plain.ids[0][0] not in every[action].ids[0]
    with refused(ConfigError, "action", "mask"):
        Safety(made, "mask")


def test_surrogates_draw_no_token_that_is_masked(tokenizer):
    """Their mixture is drawn from, where the majority outvotes the base."""
    dense = make("perspective-tiny-dense")
    first = generate(dense, tokenizer, ["the cat"], max_tokens=1, sampling=GREEDY).ids[0][0]
    blocked = [id for id in range(1, VOCAB) if id != 7]
    low = of_tokens(dense, blocked, 7, 2.0, torch.zeros(32, dtype=torch.float64))
    views = PerspectivesConfig(surrogate=True, every=1, threshold=0.0)
    settings = {"max_tokens": 12, "sampling": SamplingConfig(temperature=3.0, seed=1)}
    drawn = generate(
        dense, tokenizer, ["the cat"], **settings, hooks=[Perspectives(dense, views), Safety(low, "mask")]
    ).ids[0]
    assert first in blocked and drawn and not set(drawn) & set(blocked)


def test_windows_are_tested_and_both_signs_together_stop(perspective, tokenizer):
    settings = {"max_tokens": 12, "sampling": GREEDY}
    row = torch.zeros(1, 32)
    row[0, 0] = 1
    offsets, inside = torch.full((2,), 1e-3).double(), torch.zeros(32).double()
    narrow = Polytope(
        torch.cat([row, -row]), offsets, inside, ("a", "b"), 0.0, 0.0, perspective.fingerprint()
    )
    flagged = generate(perspective, tokenizer, ["the"], **settings, hooks=[Safety(narrow, "flag", window=4)])
    assert all(mark.flagged for mark in flagged.verdicts["safety"][0]) and len(flagged.ids[0]) == 12
    views = PerspectivesConfig(every=1, threshold=0.0)
    both = Safety(narrow, "project", on_both="stop", kappa=0.0)
    seen = generate(
        perspective, tokenizer, ["the"], **settings, hooks=[Perspectives(perspective, views), both]
    )
    disagreed = next(
        (i for i, verdict in enumerate(seen.verdicts["perspectives"][0]) if verdict.flagged), None
    )
    assert disagreed is None and (seen.finished == ["unsafe"] or len(seen.ids[0]) == 12)
