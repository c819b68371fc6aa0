"""Designs register what they bring, and the core asks for it by name."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from torch import nn

import perspectron
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.mixer import Mixer, mixers
from perspectron.util import registry
from perspectron.util.config import MixerConfig
from perspectron.util.errors import ConfigError
from perspectron.util.registry import Design, designs, part, places, register
from tests.refusals import refused


@dataclass(frozen=True)
class PlainConfig(MixerConfig):
    kind = "plain, for a test"


class Plain(nn.Module):
    """No `Mixer`: it has none of the attributes that the model asks for."""

    def __init__(self, d_model: int, norm_eps: float, config: PlainConfig) -> None:
        super().__init__()


class Silent(Mixer):
    """A `Mixer` that does not say what it is."""

    def init_state(self, batch_size, device, dtype, capacity=0):
        return None


@pytest.fixture
def own(monkeypatch):
    """Designs of a test, which are gone after it."""
    designs()
    monkeypatch.setattr(registry, "_designs", dict(registry._designs))
    return register


def test_every_folder_is_found_and_every_name_stands_for_something():
    assert {"adr", "lens", "perspective", "transformer"} <= designs().keys()
    for table in registry.TABLES:
        if table != "titles":
            for name in places(table):
                assert part(table, name) is not None


def test_asking_for_one_design_imports_no_other():
    code = (
        "import sys; from perspectron.util import registry; registry.part('mixers', 'gla');"
        "print(*[m for m in sys.modules if m.startswith('perspectron.designs.') and m.count('.') > 2])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["perspectron.designs.gla.mixer"]


def test_a_name_is_registered_once(own):
    with refused(ConfigError, "mixer", "gla", "perspectron.designs.gla", "somewhere.mine"):
        own(Design("somewhere.mine", mixers={"gla": Plain}))
    with refused(ConfigError, "design", "gla", "perspectron.designs.gla", "somewhere.gla"):
        own(Design("somewhere.gla"))
    own(Design("somewhere.mine", mixers={"mine": Plain}))
    own(Design("somewhere.mine", mixers={"mine": Plain}))  # a notebook's cell that runs again


def test_what_is_no_mixer_is_refused_by_name(own):
    own(Design("mine", mixers={PlainConfig.kind: Plain}))
    with refused(ConfigError, "'Plain'", "perspectron.model.mixer.Mixer"):
        perspectron.build(ModelConfig("m", 11, 16, (BlockConfig(PlainConfig(), None),)))


def test_a_mixer_without_what_has_no_default_is_refused_by_name(own):
    own(Design("mine", mixers={PlainConfig.kind: Silent}))
    with refused(ConfigError, "Silent.small", "docs/add-a-mixer.md"):
        mixers()
