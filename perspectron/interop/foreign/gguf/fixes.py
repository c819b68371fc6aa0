"""How changes of tensors by llama.cpp's converter are undone, by their names in a GGUF.

Shapes: of linear attention Hk key heads, Hv value heads, K and V their widths.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from perspectron.interop.foreign.gguf.fields import Values

Fix = Callable[[Tensor], Tensor]
NORMS_OF_QWEN = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")


def permuted(values: Values) -> dict[str, Fix]:
    """Undo the order of query and key rows, in which the two channels of a rotary pair are adjacent."""

    def apart(heads: int, x: Tensor) -> Tensor:
        return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    heads = {"attn_q": values["num_attention_heads"], "attn_k": values["num_key_value_heads"]}
    return {name: partial(apart, count) for name, count in heads.items()}


def less_one(names: tuple[str, ...]) -> dict[str, Fix]:
    """Undo the addition of 1 to weights of norms."""
    return dict.fromkeys(names, lambda x: x.float() - 1)


def mamba(values: Values) -> dict[str, Fix]:
    return {
        "ssm_conv1d.weight": lambda x: x[:, None], "ssm_d": torch.flatten, "ssm_norm": torch.flatten,
        "ssm_a": lambda x: logarithm(x.flatten()),
    }  # fmt: skip


def mamba_permuted(values: Values) -> dict[str, Fix]:
    return permuted(values) | mamba(values)


def logarithm(x: Tensor) -> Tensor:
    """A_log from the stored −e^A_log."""
    return (-x.double()).log().float()


def qwen35(values: Values) -> dict[str, Fix]:
    """Undo the changes of norms, and of the order of value heads: those of one key head become adjacent again."""
    Hk, Hv = values["linear_num_key_heads"], values["linear_num_value_heads"]
    K, V = values["linear_key_head_dim"], values["linear_value_head_dim"]

    def grouped(x: Tensor, width: int) -> Tensor:
        """Reorder the first axis, Hv heads of this width."""
        return x.reshape(Hv // Hk, Hk, width, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    def values_last(x: Tensor) -> Tensor:
        keys = 2 * Hk * K
        return torch.cat([x[:keys], grouped(x[keys:], V)])

    return less_one(NORMS_OF_QWEN) | {
        "attn_qkv": values_last, "ssm_conv1d": lambda x: values_last(x)[:, None],
        "attn_gate": lambda x: grouped(x, V), "ssm_out": lambda x: grouped(x.T, V).T,
        "ssm_alpha": lambda x: grouped(x, 1), "ssm_beta": lambda x: grouped(x, 1),
        "ssm_dt.bias": lambda x: grouped(x, 1), "ssm_a": lambda x: logarithm(grouped(x, 1)),
    }  # fmt: skip


def qwen3next(values: Values) -> dict[str, Fix]:
    """Undo the changes of Qwen3-Next, in which value heads kept their order."""
    return less_one(NORMS_OF_QWEN) | {
        "ssm_conv1d": lambda x: x[:, None], "ssm_a": logarithm, "ffn_gate_inp_shexp": lambda x: x.reshape(1, -1),
    }  # fmt: skip


def kimi_linear(values: Values) -> dict[str, Fix]:
    taps = {f"ssm_conv1d_{x}": lambda x: x.reshape(-1, 1, x.shape[-1]) for x in "qkv"}
    return taps | {"ssm_a": lambda x: logarithm(x).reshape(1, 1, -1, 1)}


def rwkv7(values: Values) -> dict[str, Fix]:
    D, K = values["hidden_size"], values["head_dim"]
    return {
        "time_mix_lerp_fused.weight": lambda x: x.reshape(6, D),
        "time_mix_r_k.weight": lambda x: x.reshape(-1, K),
    }
