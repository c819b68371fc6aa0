"""Sampling that a model's authors suggest: what the generation_config.json of an imported model says of it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from perspectron.decode.sampling import SamplingConfig
from perspectron.util.errors import ConfigError
from perspectron.util.files import read_object

FILE = "generation_config.json"
FILTERS = ("top_k", "top_p", "min_p")
USED = ("temperature", *FILTERS, "repetition_penalty")
SILENT = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version",
    "_from_model_config", "do_sample", "use_cache", "cache_implementation", "cache_config",
    "return_dict_in_generate", "return_legacy_cache", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "trust_remote_code", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "prompt_lookup_num_tokens", "is_assistant", "disable_compile", "low_memory",
    "chat_format",
}  # fmt: skip
"""Keys on which the distribution of the next token does not depend, and ids that specials.json has."""
NEUTRAL = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "typical_p": 1, "top_h": 1, "length_penalty": 1,
    "encoder_repetition_penalty": 1, "guidance_scale": 1,
}  # fmt: skip
"""Values at which a key has no effect, besides 0, false, null and empty ones."""


@dataclass(frozen=True)
class Asked:
    """The rules by which the next token is drawn. What is left out is as the generation_config.json of an imported
    model has it, or else as here."""

    temperature: float | None = None
    """Logits are divided by it; 0 takes the most likely token; left out: the model's, or 0.8."""
    top_k: int | None = None
    """Keep so many of the most likely tokens; 0 is off; left out: the model's, or 0."""
    top_p: float | None = None
    """Keep the fewest most likely tokens that together reach this probability; 1 is off; left out: the model's, or
    1."""
    min_p: float | None = None
    """Keep tokens at least so many times as probable as the most likely one; 0 is off; left out: the model's, or 0."""
    repetition_penalty: float | None = None
    """Logits of the last tokens are divided by it where positive and multiplied where negative; 1 is off; left out: the
    model's, or 1."""
    repetition_window: int = SamplingConfig.repetition_window
    """Number of last tokens that have the penalty."""
    seed: int = SamplingConfig.seed
    """Seed of the noise; each row of a batch has a stream of its own under it."""

    def __post_init__(self) -> None:
        SamplingConfig(**self.values)

    @property
    def values(self) -> dict[str, Any]:
        """The fields that are not left out."""
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in every.items() if value is not None}


def suggested(
    folder: Path,
    asked: Mapping[str, Any],
    otherwise: SamplingConfig = SamplingConfig(),  # noqa: B008
) -> tuple[SamplingConfig, str]:
    """Sampling rules: as in `asked`, else as in the file in the folder, else as in `otherwise`; and a line that says
    what was taken from the file and what of it is not used, empty if there is neither.

    ConfigError, naming the file and the key: an invalid value, unless `asked` replaces it.
    """
    path = folder / FILE
    found = read_object(path, ConfigError)
    values, greedy = dict[str, Any](), found.get("do_sample") is False
    if greedy or (found.get("do_sample") is True and found.get("temperature") is None):
        values["temperature"] = (
            0.0 if greedy else 1.0
        )  # which transformers does not write, as it is its default
    for name in USED:
        if name not in asked and name not in values and found.get(name) is not None:
            values[name] = _checked(name, found[name], path)
    values = {name: value for name, value in values.items() if name not in asked}
    config = replace(otherwise, **values, **asked)
    moot = FILTERS if config.temperature == 0 else ()
    taken = [f"{name} {value:g}" for name, value in values.items() if name not in moot]
    unused = [
        name for name, value in found.items() if name not in {*USED, *SILENT} and not _neutral(name, value)
    ]
    parts = [", ".join(taken), f"not used: {', '.join(unused)}" if unused else ""]
    said = "; ".join(filter(None, parts))
    return config, said and f"{path}: {said}"


def _checked(name: str, value: Any, path: Path) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path}: {name} = {value!r}, must be a number")
    if name == "top_k":
        value = max(0, int(value)) if value == value // 1 else value  # −1 is off
        if not isinstance(value, int):
            raise ConfigError(f"{path}: {name} = {value!r}, must be a whole number")
    try:
        SamplingConfig(**{name: value})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return value


def _neutral(name: str, value: Any) -> bool:
    return not value or (name in NEUTRAL and value == NEUTRAL[name])
