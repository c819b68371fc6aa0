"""The metadata of a GGUF, and what the configs of all its families have.

Shapes: D model width, H query heads, K head width.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from perspectron.interop.foreign.gguf.container import Container
from perspectron.model.config import MOST_BLOCKS, MOST_SIZE
from perspectron.util.errors import CheckpointError

Values = dict[str, Any]


class Fields:
    """Metadata of a container's architecture. Fields that are read are noted, so that `done` can report the rest."""

    def __init__(self, container: Container, arch: str) -> None:
        self.container, self.arch = container, arch
        self._read = set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self.container.metadata.get(f"{self.arch}.{name}", default)

    def number(self, name: str, default: int | None = None, most: int = MOST_SIZE) -> int:
        """A whole number from 1 to `most`; a list with one for each layer must have one value, apart from zeros."""
        value = self.get(name, default)
        if isinstance(value, list) and len(set(value) - {0}) == 1:
            value = max(value)
        if type(value) is not int or not 1 <= value <= most:
            raise self.error(name, value, f"a whole number from 1 to {most:,}, the same in all layers")
        return value

    def real(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(name, value, "a finite number")
        return float(value)

    def flags(self, name: str, count: int, default: Callable[[int], bool]) -> list[bool]:
        """A flag for each layer: true where the field's list is not 0; without a list, `default` of the index."""
        value = self.get(name)
        if value is None:
            return [default(i) for i in range(count)]
        if not isinstance(value, list) or len(value) < count:
            raise self.error(name, value, f"{count} values")
        return [bool(each) for each in value[:count]]

    def has(self, tensor: str) -> bool:
        """True if a layer has a tensor of this name."""
        return any(name.startswith("blk.") and name.endswith(f".{tensor}") for name in self.container.tensors)

    def error(self, name: str, value: Any, must: str) -> CheckpointError:
        return self.container.error(f"{self.arch}.{name} is {value!r}, must be {must} to be read")

    def done(self) -> None:
        """Raise CheckpointError, with its name, for a field that was not read and is not 0 or empty: it may matter."""
        for key, value in self.container.metadata.items():
            arch, _, name = key.partition(".")
            if arch == self.arch and name not in self._read and value:
                raise self.error(name, value, "0 or missing")


def shared(fields: Fields, *, experts: bool = False) -> Values:
    """The values that all families with attention have. experts: the family may have experts."""
    layers = fields.number("block_count", most=MOST_BLOCKS)
    if fields.get("nextn_predict_layers"):
        layers -= fields.number("nextn_predict_layers")
    D, H = fields.number("embedding_length"), fields.number("attention.head_count")
    K = fields.number("attention.key_length", D // H)
    if fields.get("attention.value_length", K) != K:
        raise fields.error("attention.value_length", fields.get("attention.value_length"), f"{K}, as of keys")
    if not fields.get("attention.causal", True):
        raise fields.error("attention.causal", False, "true")
    fields.get("vocab_size"), fields.get("rope.scaling.finetuned")
    rope = {"rope_theta": fields.real("rope.freq_base", 1e4), **_rope_scaling(fields)}
    if (turned := fields.number("rope.dimension_count", K)) != K:
        rope["partial_rotary_factor"] = turned / K
    if not experts and (count := fields.get("expert_count", 0)):
        raise fields.error("expert_count", count, "0")
    fields.get("expert_used_count")
    return {
        "hidden_size": D, "num_hidden_layers": layers, "num_attention_heads": H, "head_dim": K,
        "num_key_value_heads": fields.number("attention.head_count_kv", H),
        "intermediate_size": fields.number("feed_forward_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": fields.number("context_length", 2048),
        "vocab_size": fields.container.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in fields.container.tensors,
        "rope_parameters": rope,
    }  # fmt: skip


def unattended(fields: Fields) -> Values:
    """The values that all families have, attention's left out."""
    for name in ("attention.head_count", "context_length", "vocab_size"):
        fields.get(name)
    return {
        "hidden_size": fields.number("embedding_length"),
        "num_hidden_layers": fields.number("block_count", most=MOST_BLOCKS),
        "vocab_size": fields.container.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in fields.container.tensors,
    }  # fmt: skip


def _rope_scaling(fields: Fields) -> Values:
    """The scaling of rotary positions."""
    kind, factor = fields.get("rope.scaling.type", "linear"), fields.real("rope.scaling.factor", 0.0)
    factor = factor or fields.real("rope.scale_linear", 0.0)
    factor = 1.0 if kind == "none" else factor  # llama.cpp then ignores the factor
    scale = fields.real("rope.scaling.attn_factor", 1.0)
    if kind != "yarn" and scale != 1:
        raise fields.error("rope.scaling.attn_factor", scale, "1 without yarn")
    if "rope_freqs.weight" in fields.container.tensors:
        if factor not in (0, 1):
            raise fields.error("rope.scaling.factor", factor, "missing beside rope_freqs.weight")
        return _llama3(fields)
    if kind == "yarn":
        values = {"rope_type": "yarn", "factor": factor}
        if scale != 1:  # OLMo 3's own, as the converter writes it; llama.cpp writes 1 for any model
            values["attention_factor"] = scale
        for name, there in (
            ("original_context_length", "original_max_position_embeddings"), ("yarn_attn_factor", "attention_factor"),
            ("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"),
        ):  # fmt: skip
            if (value := fields.get(f"rope.scaling.{name}")) is not None:
                values[there] = value
        if (share := fields.get("rope.scaling.yarn_ext_factor", 1.0)) != 1:
            raise fields.error("rope.scaling.yarn_ext_factor", share, "1")
        return values
    if kind not in ("none", "linear"):
        raise fields.error("rope.scaling.type", kind, "'none', 'linear' or 'yarn'")
    fields.get("rope.scaling.original_context_length")
    return {"rope_type": "default"} if factor in (0, 1) else {"rope_type": "linear", "factor": factor}


def _llama3(fields: Fields) -> Values:
    """Llama 3's rotary scaling, found from the divisors of the frequencies in rope_freqs.weight, which rise from 1 to
    the factor between two wavelengths of ratio 4. CheckpointError: they are others."""
    divisors = fields.container.tensors["rope_freqs.weight"].load().double()
    factor, theta = float(divisors.max()), fields.real("rope.freq_base", 1e4)
    if factor == 1 == float(divisors.min()):
        return {"rope_type": "default"}
    waves = 2 * math.pi * theta ** (torch.arange(len(divisors)).double() / len(divisors))
    for original in (2**n for n in range(4, 24)):
        share = ((original / waves - 1) / 3).clamp(0, 1)
        if torch.allclose(divisors, 1 / ((1 - share) / factor + share), rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    raise fields.container.error("rope_freqs.weight is not the scaling of Llama 3, the one that can be read")
