"""Sampling as generation_config.json suggests it."""

import json

import pytest

from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.suggested import FILE, Asked, suggested
from perspectron.util.errors import ConfigError
from tests.refusals import names, refused


@pytest.fixture
def read(tmp_path):
    def read(values, asked=Asked(), **otherwise):
        (tmp_path / FILE).write_text(json.dumps(values))
        return suggested(tmp_path, asked.values, SamplingConfig(**otherwise))

    return read


def test_without_a_file_or_with_ids_alone_nothing_changes(read, tmp_path):
    assert suggested(tmp_path, {}) == (SamplingConfig(), "")
    ids = {
        "bos_token_id": 1,
        "eos_token_id": [2],
        "transformers_version": "5.0.0",
        "use_cache": True,
        "num_beams": 1,
    }
    assert read(ids, temperature=0.3) == (SamplingConfig(temperature=0.3), "")


def test_each_setting_is_used_unless_it_is_asked_for(read, tmp_path):
    file = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
    }
    config, line = read(file)
    assert config == SamplingConfig(0.6, 20, 0.9, 0.02, 1.1)
    assert names(line, tmp_path / FILE, "temperature", "0.6", "top_k", 20, "repetition_penalty", "1.1")
    config, line = read(file, Asked(top_k=0, temperature=0.8, seed=3))
    assert config == SamplingConfig(0.8, 0, 0.9, 0.02, 1.1, seed=3)
    assert names(line, "top_p") and not names(line, "temperature") and not names(line, "top_k")


def test_no_sampling_is_greedy_and_temperature_0_needs_no_filters(read):
    config, line = read({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2})
    assert (config.temperature, config.repetition_penalty) == (0, 1.2)
    assert names(line, "temperature", 0, "repetition_penalty") and not names(line, "top_p")
    assert read({"do_sample": False}, Asked(temperature=0.7))[0].temperature == 0.7
    config, line = read({"do_sample": True, "temperature": 0.6, "top_k": 9}, Asked(temperature=0))
    assert (config.temperature, line) == (0, "")


def test_sampling_without_a_temperature_is_at_1_as_transformers_leaves_it_out(read):
    assert read({"do_sample": True, "top_k": 64})[0] == SamplingConfig(1.0, 64)
    assert read({"top_k": -1, "top_p": 0.5})[0] == SamplingConfig(top_p=0.5)


def test_settings_without_a_counterpart_are_named_once(read):
    _, line = read(
        {"no_repeat_ngram_size": 3, "typical_p": 0.9, "num_beams": 4, "suppress_tokens": [], "top_h": 1.0}
    )
    assert names(line, "no_repeat_ngram_size", "typical_p", "num_beams")
    assert not names(line, "suppress_tokens") and not names(line, "top_h")


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("temperature", -1), ("top_p", 1.5), ("top_k", 2.5), ("min_p", True)],
)
def test_a_value_that_is_none_is_named_unless_another_is_asked_for(name, value, read, tmp_path):
    with refused(ConfigError, tmp_path / FILE, name, repr(value).strip("'")):
        read({name: value})
    assert getattr(read({name: value}, Asked(**{name: 1}))[0], name) == 1


def test_what_is_asked_for_is_checked_at_once():
    with refused(ConfigError, "top_p", 2):
        Asked(top_p=2)
