"""Saved states in fewer bits: half precision, bfloat16, or 8 bits with a scale for each row."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from perspectron.util.errors import StateError
from perspectron.util.files import parse_json
from perspectron.util.tensors import JSON_ROOM

Dtype = Literal["full", "float16", "bfloat16", "int8"]
"""Precision of a saved state's numbers: as they are, in half precision, in bfloat16, or in 8 bits, each row with a
scale."""
STORED, SCALE = "stored", "/scale"
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
MOST = 127


def tensors(path: Path | str, held: dict[str, Tensor], header: dict[str, str], dtype: Dtype) -> None:
    """Convert all floating-point tensors in place of those in `held`, and note their dtypes in the header. StateError:
    a number does not fit, or there is no such dtype."""
    if dtype not in get_args(Dtype):
        raise StateError(f"dtype = {str(dtype)[:40]!r}, must be {', '.join(get_args(Dtype))}")
    stored = {}
    for name, tensor in list(held.items()):
        if not tensor.is_floating_point():
            continue
        stored[name] = str(tensor.dtype)
        if dtype != "int8":
            held[name] = tensor.to(getattr(torch, dtype))
            fits = bool(held[name].isfinite().all())
        else:
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            scale = wide.abs().amax(-1, keepdim=True) / MOST if wide.numel() else wide[..., :1]
            scale = scale.float()
            fits = bool((MOST * scale).isfinite().all())
            codes = torch.where(scale > 0, wide / scale.where(scale > 0, 1), 0) if fits else wide
            held[name], held[name + SCALE] = codes.round().clamp(-MOST, MOST).to(torch.int8), scale
        if not fits:
            raise StateError(f"{path}: {name} has numbers that {dtype} cannot hold; save it in full")
    header[STORED] = json.dumps(stored)


def widened(
    path: Path | str, held: dict[str, Tensor], header: dict[str, str], wanted: Mapping[str, Any]
) -> None:
    """Undo `tensors`, up to rounding. wanted: the dtype of each tensor of the model's states. StateError: the header
    does not fit it, or the tensors."""
    try:
        stored = parse_json(header.pop(STORED), room=JSON_ROOM)
        for name, was in stored.items():
            dtype, tensor = DTYPES[was], held[name]
            if dtype != wanted[name]:
                raise ValueError
            if tensor.dtype == torch.int8:
                scale = held.pop(name + SCALE)
                # A scale of another shape would broadcast the tensor to more than the file holds, unless it is empty.
                if tensor.numel() and scale.shape != (*tensor.shape[:-1], 1):
                    raise ValueError
                held[name] = (tensor * scale).to(dtype)
            else:
                held[name] = tensor.to(dtype)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(f"{path}: {STORED} does not fit its tensors ({type(error).__name__})") from None
