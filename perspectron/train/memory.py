"""Training a memory instead of weights: an offset, biases of decays or a first memory (`model.tuned`) of a run's frozen
model, kept in a state file with which conversations begin.

Shapes: B batch, T time.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from perspectron.data import Shards, Tokenizer
from perspectron.data.loader import Batch
from perspectron.model import tuned
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.model.tuned import KINDS, Tuned
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.heldout import heldout
from perspectron.train.optim import AdamW, learning_rate
from perspectron.train.prepare import training_batches
from perspectron.util.config import one_of, require
from perspectron.util.errors import NonFiniteError
from perspectron.util.machine import pick_device

RATES = {"offset": 0.5, "gates": 0.2, "first": 1.0}
"""Learning rates, peaks of the schedule, found once (docs/lab-notes.md); `--lr` is the offset's, and the others are in
proportion to it."""
STEPS, BETA2 = 200, 0.99
Tell = Callable[[dict[str, float]], None]
LEFT_OUT = frozenset(
    (
        "lora", "only", "teacher", "teacher_weight", "teacher_mix", "teacher_temperature", "ternary_from",
        "ternary_until", "compile", "eval_every", "save_every", "keep", "optimizer", "weight_decay", "groups",
    )
)  # fmt: skip
"""Settings of a training of weights that do not apply to a training of a memory."""


@dataclass(frozen=True)
class About:
    """Description of a trained memory: what it was trained on, and bits per byte of held-out text of its data, before
    and after, measured on windows of seq_len tokens."""

    kinds: tuple[str, ...]
    numbers: int
    model: str
    data: str
    digest: str
    tokens: int
    steps: int
    seq_len: int
    before: float
    after: float
    heldout_tokens: int


def kinds_of(text: str) -> tuple[str, ...]:
    """The kinds named in a text such as "offset,gates". ConfigError: a kind is unknown, or named twice."""
    kinds = tuple(text.split(","))
    for kind in kinds:
        one_of(kind, KINDS, "state")
    require(len(set(kinds)) == len(kinds), "state", text, "each kind once")
    return tuple(kind for kind in KINDS if kind in kinds)


class Memory(nn.Module):
    """The trained parameters: one [1,…] of each kind for each matrix memory. ConfigError: the model has none."""

    def __init__(self, model: LanguageModel, kinds: Sequence[str]) -> None:
        super().__init__()
        self._model = [model]  # no submodule
        self.kinds = tuple(kinds)
        self.parts = [
            nn.ParameterDict({kind: nn.Parameter(getattr(part, kind).clone()) for kind in kinds})
            for part in tuned.parts(model.init_state(1, tuned=kinds))
        ]
        for number, own in enumerate(self.parts):
            self.add_module(str(number), own)

    @property
    def numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def start(self, rows: int = 1) -> LMState:
        """The state before any token, with a gradient in what is trained."""
        (model,), learnt = self._model, iter(self.parts)

        def filled(part: Tuned) -> Tuned:
            own = next(learnt)
            return replace(part, **{k: x.expand(rows, *x.shape[1:]) for k, x in own.items()})

        return model.begun(tuned.with_parts(model.init_state(rows, tuned=self.kinds), filled))

    def groups(self, lr: float) -> list[dict[str, object]]:
        """Parameter groups with their learning rates, of which `lr` is the offset's."""
        return [
            {"params": [own[kind] for own in self.parts], "share": lr * RATES[kind] / RATES["offset"]}
            for kind in self.kinds
        ]


def train_memory(
    model: LanguageModel,
    tokenizer: Tokenizer,
    shards: Shards,
    config: RunConfig,
    kinds: Sequence[str],
    tell: Tell = lambda _: None,
) -> tuple[LMState, About]:
    """(the trained state before any token, what it was trained on). The model is frozen, and its fingerprint is the
    state's. tell: gets the loss of each update. ConfigError: the model has no matrix memory. NonFiniteError: a loss or
    a gradient is not finite."""
    train = config.train
    device = pick_device(train.device)
    model.requires_grad_(False).to(device).eval()
    model.recompute = train.recompute
    memory = Memory(model, kinds)
    split, loader = shards.split(train.measured_on), training_batches(config, shards)

    def measured(start: LMState | None) -> tuple[float, int]:
        found = heldout(
            model, split, tokenizer, seq_len=train.seq_len, batch_size=train.batch_size, spread=True,
            limit_tokens=train.eval_tokens or None, start=start,
        )  # fmt: skip
        return found.bits_per_byte, found.tokens

    before, _ = measured(None)
    fit(model, memory, loader.next_batch, train, tell)
    start = memory.start().detach()
    after, tokens = measured(start)
    if not math.isfinite(after):
        raise NonFiniteError(f"held-out loss of the trained memory is {after}; try a smaller --lr")
    counted = train.steps * train.batch_size * train.seq_len * train.accumulate
    about = About(
        tuple(kinds), memory.numbers, model.fingerprint(), train.data, shards.corpus_fingerprint, counted, train.steps,
        train.seq_len, before, after, tokens,
    )  # fmt: skip
    return start, about


def fit(
    model: LanguageModel, memory: Memory, next_batch: Callable[[], Batch], train: TrainConfig, tell: Tell
) -> None:
    """Train a memory by AdamW; each window begins with it. NonFiniteError: a loss or a gradient is not finite."""
    optim = train.optim
    optimizer = AdamW(
        memory.groups(optim.lr), lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=0.0
    )
    dtype = torch.bfloat16 if train.dtype == "bfloat16" else None
    for step in range(train.steps):
        began, loss = time.perf_counter(), 0.0
        for group in optimizer.param_groups:
            group["lr"] = group["share"] * learning_rate(step, train.steps, optim) / optim.lr
        batches = [next_batch() for _ in range(train.accumulate)]
        targets = sum(batch.targets for batch in batches)
        for batch in batches:
            ids, wanted = batch.ids_BT.to(model.device), batch.targets_BT.to(model.device)
            reset = None if batch.reset_BT is None else batch.reset_BT.to(model.device)
            with torch.autocast(model.device.type, dtype, enabled=dtype is not None):
                output = model(ids, memory.start(len(ids)), wanted, reset_BT=reset)
            (output.loss * (batch.targets / targets)).backward()
            loss += float(output.loss.detach()) * batch.targets / targets
        norm = nn.utils.clip_grad_norm_(memory.parameters(), optim.clip or math.inf)
        if not (math.isfinite(loss) and bool(norm.isfinite())):
            raise NonFiniteError(
                f"step {step + 1}: loss {loss}, gradient norm {float(norm)}; try a smaller --lr"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tell({"step": step + 1, "loss": loss, "seconds": time.perf_counter() - began})
