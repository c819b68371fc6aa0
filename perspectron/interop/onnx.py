"""A run as one ONNX file: a step of the model, with its state as inputs and outputs.

Shapes: V vocabulary.
"""

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.utils._pytree as pytree
from numpy.typing import NDArray
from torch import Tensor, nn

from perspectron.data.tokenizer import Tokenizer
from perspectron.experts.mixture import ExpertsConfig
from perspectron.model.block import Block
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.util.config import require
from perspectron.util.errors import ArtifactError
from perspectron.util.files import atomic
from perspectron.util.machine import threads_of
from perspectron.util.version import __version__

MOST_BYTES = 2**31 - 2**24
"""Most bytes of weights in one ONNX file."""
CHECKED = 200
"""Number of greedy tokens that must be those of PyTorch."""
TIE = 1e-4
"""Difference of two logits below which rounding may choose either."""
OPSET = 20


@dataclass(frozen=True)
class Report:
    """bytes: size of the file. tokens: number of tokens compared. ms, torch_ms: milliseconds of the fastest of those
    steps, in onnxruntime and in PyTorch, each with one thread."""

    bytes: int
    tokens: int
    ms: float
    torch_ms: float


class Step(nn.Module):
    """Maps one token [1,1] and the tensors of a state to logits [1,V] and the tensors of the next state."""

    def __init__(self, model: LanguageModel, context: int) -> None:
        super().__init__()
        self.model = model
        state = model.init_state(1, capacity=context)
        paths, self.spec = pytree.tree_flatten_with_path(state)
        # Plain numbers in the state become constants of the program. `used` says that a cache is full but for one slot,
        # so that steps see all slots; the document's length says which are filled.
        numbers = {"used": context - 1}
        self.constant = [
            None if isinstance(x, Tensor) else numbers.get(_name(where), x) for where, x in paths
        ]
        self.names = [_path(where) for where, x in paths if isinstance(x, Tensor)]
        self.start = [x for _, x in paths if isinstance(x, Tensor)]

    def forward(self, ids: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if value is None else value for value in self.constant]
        state: LMState = pytree.tree_unflatten(leaves, self.spec)
        hidden, state, _ = self.model.hidden(ids, state)
        after = (x for x in pytree.tree_leaves(state) if isinstance(x, Tensor))
        return self.model.head(hidden)[:, -1], *after


def require_exportable(model: LanguageModel, context: int) -> None:
    """ConfigError, naming it, for a part that cannot be exported, too many weights, or a context that does not fit."""
    config = model.config
    for i, block in enumerate(cast("list[Block]", model.blocks)):
        for name, mixer in zip(("mixer", "beside"), block.mixers, strict=False):
            mixer.require_onnx(f"blocks[{i}].{name}")
        ffn = block.config.ffn
        kind = ffn.kind if isinstance(ffn, ExpertsConfig) else ""
        require(not kind, f"blocks[{i}].ffn", kind, "without experts to be exported to ONNX")
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    require(size <= MOST_BYTES, "onnx", f"{size:,} bytes of weights", f"≤ {MOST_BYTES:,}")
    most = config.positions or 2**24
    require(2 <= context <= most, "context", context, f"in [2, {most:,}]")


def export(model: LanguageModel, tokenizer: Tokenizer, path: Path, *, context: int | None = None) -> Report:
    """Write FILE, and check it: its first CHECKED greedy tokens, or those before a tie, must be those of PyTorch.
    context: tokens that full attention looks back on; other mixers have no bound (None: 1024, or the learned positions
    if there are fewer).

    Inputs are `ids` [1,1] and the state's tensors, zeros before a text, which begins with the tokenizer's prefix.
    Outputs are `logits` [1,V] and each state tensor's next value, named with `.next` at the end. The file's metadata
    holds the tokenizer as "tokenizer" and its special ids as "specials". ConfigError: a part cannot be exported
    (`require_exportable`). ArtifactError: the tokens differ.
    """
    if context is None:
        context = min(1024, model.config.positions or 1024)
    require_exportable(model, context)
    step = Step(model.eval(), context)
    size, first = min(CHECKED, context - 1), [*tokenizer.specials.start, 0][0]
    with atomic(path) as temporary:
        _write(step, tokenizer, temporary)
        ours, gaps, torch_ms = _greedy_torch(step, size, first)
        theirs, ms = _greedy(temporary, step, size, first)
        if ours != theirs:
            at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
            if at == 0 or gaps[at] > TIE:  # after a tie two texts go on, both right
                told = f"token {at} is {theirs[at]} in onnxruntime, {ours[at]} in PyTorch"
                raise ArtifactError(f"{path}: {told}; not written")
            size = at
        return Report(temporary.stat().st_size, size, ms, torch_ms)


def _write(step: Step, tokenizer: Tokenizer, path: Path) -> None:
    ids = torch.ones(1, 1, dtype=torch.int64)
    inputs, outputs = ["ids", *step.names], ["logits", *(f"{name}.next" for name in step.names)]
    with _quiet(), torch.inference_mode():
        program = torch.onnx.export(
            step,
            (ids, *step.start),
            input_names=inputs,
            output_names=outputs,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
        )
    assert program is not None
    known = {
        "perspectron": __version__,
        "model": step.model.config.name,
        "tokenizer": tokenizer.to_str(),
        "specials": tokenizer.specials.to_json().decode(),
    }
    program.model.metadata_props.update(known)
    program.save(path, external_data=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's log messages and warnings."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@torch.inference_mode()
def _greedy_torch(step: Step, count: int, first: int) -> tuple[list[int], list[float], float]:
    """(greedy tokens after the first, gap of the two highest logits at each, ms of the fastest step) in PyTorch."""
    model, chosen, gaps, times = step.model, [first], list[float](), list[float]()
    state = model.init_state(1)
    with threads_of(1):
        for _ in range(count):
            began = time.perf_counter()
            hidden, state, _ = model.hidden(torch.tensor([chosen[-1:]]), state, consume_state=True)
            logits = model.head(hidden)[0, -1]
            chosen.append(int(logits.argmax()))
            times.append(time.perf_counter() - began)
            first, second = logits.topk(2).values.tolist()
            gaps.append(first - second)
    return chosen[1:], gaps, 1e3 * min(times)


def _greedy(path: Path, step: Step, count: int, first: int) -> tuple[list[int], float]:
    """(greedy tokens after the first, ms of the fastest step) in onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    state: Sequence[NDArray[Any]] = [tensor.numpy() for tensor in step.start]
    chosen, times = [first], list[float]()
    for _ in range(count):
        began = time.perf_counter()
        given = dict(zip(step.names, state, strict=True)) | {"ids": np.array([chosen[-1:]])}
        logits, *state = session.run(None, given)
        chosen.append(int(logits[0].argmax()))
        times.append(time.perf_counter() - began)
    return chosen[1:], 1e3 * min(times)


def _name(where: Sequence[Any]) -> str:
    return str(getattr(where[-1], "name", where[-1]))


def _path(where: Sequence[Any]) -> str:
    """The place of a tensor in a state, such as layers.0.memory_BDR."""
    parts = [str(getattr(key, "name", getattr(key, "idx", key))) for key in where]
    return ".".join(parts)
