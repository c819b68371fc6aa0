"""Several batches make one update: that of one batch of all their rows, but for the terms that `--accumulate` names."""

import re
from pathlib import Path

import pytest
import torch

import perspectron
from perspectron import presets
from perspectron.data.loader import IGNORE, Batch
from perspectron.train import config

SMALL = {"vocab_size": 300, "d_model": 32, "hidden": 32}
ATTENDING = SMALL | {"heads": 2, "kv_heads": 1, "window": 8}
LINEAR = {
    "perspective-tiny-dense": ATTENDING | {"layers": 4, "rank": 8},
    "transformer-tiny": SMALL | {"layers": 4, "heads": 2},
    "lens-tiny": {"vocab_size": 300},
    "adr-tiny": {"vocab_size": 300},
    "gla-tiny": {"vocab_size": 300},
    "ssd-tiny": {"vocab_size": 300},
}
EXPERTS = ATTENDING | {"layers": 4, "rank": 8, "torus": [3, 2], "diversity": 0.1}
DRM = {
    "vocab_size": 300, "condition_target": 1.5, "active_target": 0.01, "spread_target": 9.0, "u_floor": 99.0,
    "stability": 0.1,
}  # fmt: skip
"""What is not a mean over tokens, and what is one over pairs or documents; as the help of --accumulate says."""
BY_BATCH = {"balance", "condition", "metric_u_target", "dim_variance", "active_fraction"}
BY_PAIRS = {"smooth", "stability", "recurrence"}
DIAGNOSTICS = {"gini", "reached"}


def batch(rows: slice, counted: int | None = None) -> Batch:
    """Rows of one text in which documents start at odd places. counted: targets of each row, the others ignored."""
    draw = torch.Generator().manual_seed(3)
    ids_BT = torch.randint(1, 300, (4, 33), generator=draw)
    for row, at in ((0, 5), (1, 17), (1, 20), (3, 30)):
        ids_BT[row, at] = 0
    targets_BT = ids_BT[:, 1:].clone()
    if counted is not None:
        targets_BT[:, counted:] = IGNORE
    ids_BT, targets_BT = ids_BT[rows, :-1], targets_BT[rows]
    return Batch(ids_BT, targets_BT, ids_BT == 0, int((targets_BT != IGNORE).sum()))


def together(*batches: Batch) -> Batch:
    ids, targets, resets = (
        torch.cat([getattr(b, name) for b in batches]) for name in ("ids_BT", "targets_BT", "reset_BT")
    )
    return Batch(ids, targets, resets, sum(b.targets for b in batches))


def update(runs, folder, model, batches):
    """What one update reads of these batches: metrics, and the gradients in float64."""
    trainer = runs.trainer(folder, model, accumulate=len(batches), clip=0.0)
    trainer.model.double()
    trainer.loader.next_batch = iter(batches).__next__
    seen = {}
    trainer.optimizer.step = lambda: seen.update(
        {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    )
    return trainer.step(), seen


HALVES = {
    "resets": [batch(slice(0, 2)), batch(slice(2, 4))],
    "unequal targets": [batch(slice(0, 2), counted=7), batch(slice(2, 4), counted=29)],
    "unequal rows": [batch(slice(0, 1)), batch(slice(1, 4), counted=11)],
}


@pytest.mark.parametrize("parts", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("design", LINEAR)
def test_parts_make_the_update_of_the_whole(runs, tmp_path, design, parts):
    model = presets.get(design, **LINEAR[design])
    many, ours = update(runs, tmp_path / "many", model, parts)
    one, theirs = update(runs, tmp_path / "one", model, [together(*parts)])
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-12)
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-10)
    assert ours.keys() == theirs.keys()
    assert all(gradient.dtype == torch.float64 for gradient in ours.values())
    for name, gradient in theirs.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12 * max(scale, 1e-3))


def values(name: str, sizes: dict, part: Batch) -> dict[str, float]:
    """The model's terms on one batch."""
    model = perspectron.build(presets.get(name, **sizes), 0).double()
    with torch.no_grad():  # away from the start, where gates and risks of all tokens are alike
        for parameter in model.parameters():
            draw = torch.Generator().manual_seed(parameter.numel())
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    out = model(part.ids_BT, targets=part.targets_BT, reset_BT=part.reset_BT)
    return {name: term.mean().item() for name, term in out.aux.items()}


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("perspective-tiny", EXPERTS, {"balance", "smooth"}),
        (
            "drm-104k",
            DRM,
            (BY_BATCH | BY_PAIRS) - {"balance", "smooth"},
        ),
    ],
    ids=["experts", "drm"],
)
def test_the_help_names_every_term_that_is_taken_by_batch(name, sizes, expected):
    """All others are as much of the whole as of its halves together."""
    halves = [values(name, sizes, half) for half in HALVES["resets"]]
    whole = values(name, sizes, together(*HALVES["resets"]))
    apart = {
        name
        for name, value in whole.items()
        if abs(value - (halves[0][name] + halves[1][name]) / 2) > 1e-10 * abs(value)
    }
    assert apart - DIAGNOSTICS == expected
    assert len(whole) > len(expected)


def test_the_help_names_no_other():
    source = Path(config.__file__).read_text()
    text = source[source.index("accumulate: int") : source.index("seed: int")]
    linear = {"delta", "diversity", "action", "metric_reg", "metric_diversity", "dim_sparsity", "dim_entropy"}
    linear |= {"metric_u_floor", "blindspot"}
    assert set(re.findall(r"[a-z_]+", text)) & (BY_BATCH | BY_PAIRS | linear) == BY_BATCH | BY_PAIRS
