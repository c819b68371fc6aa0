"""Search of expert positions."""

import copy

import torch

from perspectron.designs.perspective.adapt.positions import EDGE, SearchConfig, moved, search
from perspectron.util.errors import ConfigError, DataError
from tests.designs.perspective.adapt.conftest import make, text
from tests.refusals import refused


def test_it_goes_down_a_bowl_and_stays_on_a_plain():
    place = torch.zeros(8, 3, dtype=torch.float64)
    target = 0.3 * torch.ones_like(place)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        there, ties = moved(
            place, place * 0, lambda z: float((z - target).square().sum()), SearchConfig(), generator
        )
        assert ties == 0 and float((there - place).abs().max()) <= 0.05 + 0.02 * EDGE
        place = there
    assert float((place - target).square().mean()) < 0.5 * 0.09
    same, ties = moved(place, place, lambda z: 1.0, SearchConfig(), generator)
    assert torch.equal(same, place) and ties == 1.0


def test_positions_move_only_to_lose_less_and_stay_in_their_cells():
    model = make(layers=2, experts=True)
    before, blocks = copy.deepcopy(model.state_dict()), [0, 1, 0, 1]
    steps = search(model, text(200), SearchConfig(window=32, pairs=2))
    assert [step.block for step in steps] == [*blocks, 0]
    assert all(step.accepted == (step.after < step.before) for step in steps)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed <= {f"blocks.{i}.ffn.offset_EA" for i in blocks}
    assert all(float(model.get_parameter(name).tanh().abs().max()) < 1 for name in changed)
    if not any(step.accepted for step in steps):
        assert not changed


def test_a_model_without_experts_and_a_short_text_are_told():
    with refused(ConfigError):
        search(make(layers=1), text(100))
    with refused(DataError, 100, 512):
        search(make(layers=1, experts=True), text(100))
