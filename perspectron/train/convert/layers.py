"""The first stage: each recurrence alone learns the output of the attention that it replaces, all of them from one pass
of the teacher; and the cost of converting each layer.

Shapes: B batch, T time, D model width.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from perspectron.data.loader import Batch
from perspectron.model.model import LanguageModel
from perspectron.model.parts import Shared
from perspectron.train.convert.build import attention_in, blocks_of, noting
from perspectron.train.distill import Teacher
from perspectron.train.estimate import autocast
from perspectron.train.loop import Trainer
from perspectron.util.errors import NonFiniteError


def learning(model: LanguageModel, layers: Sequence[int]) -> tuple[str, ...]:
    """Names of the parameters of these blocks' recurrences, token shifts and value residuals."""
    parts = tuple(f"blocks.{i}.{name}." for i in layers for name in ("mixer", "mixer_shift", "first_values"))
    return tuple(name for name, _ in model.named_parameters() if name.startswith(parts))


class LayerTrainer(Trainer):
    """`Trainer` whose loss is the sum over converted blocks of the mean squared error of the mixers' output against
    that of the teacher's block for the same input, as a share of the latter's mean square."""

    def backward(self, batch: Batch, parts: float) -> tuple[float, dict[str, float]]:
        errors = self.errors(batch)
        loss = torch.stack(list(errors.values())).sum()
        if not math.isfinite(loss.item()):
            raise NonFiniteError(f"step {self.progress.step + 1}: loss is {loss.item()}")
        (loss / parts).backward()
        found = {f"layer {index}": error.item() for index, error in errors.items()}
        return sum(found.values()) / len(found), found

    def errors(self, batch: Batch) -> dict[int, Tensor]:
        """The error of each block that is converted, by its index."""
        teacher = cast(Teacher, self.teacher).model
        converted, errors, shared = attention_in(teacher), dict[int, Tensor](), Shared()
        layers = converted
        if teacher.config.first_values:  # lower ones provide the values of value residuals
            layers = [i for i, block in enumerate(teacher.config.blocks) if block.mixer is not None]
        ids_BT = batch.ids_BT.to(self.device)
        reset_BT = None if batch.reset_BT is None else batch.reset_BT.to(self.device)
        with autocast(self.device, self.config.train.dtype):
            with torch.no_grad(), noting(teacher, layers) as notes:
                teacher.hidden(ids_BT, reset_BT=reset_BT)
            for index in layers:
                x_BTD, its_BTD = notes[index]
                block = blocks_of(self.model)[index]
                state: Any = block.init_state(len(ids_BT), self.device, torch.float32)
                own_BTD, *_ = block.mixed(x_BTD, state, reset_BT, None, shared=shared)
                if index not in converted:
                    continue
                apart = (own_BTD.float() - its_BTD.float()).square().mean()
                errors[index] = apart / its_BTD.float().square().mean().clamp_min(1e-12)
        return errors


@torch.no_grad()
def costs(
    teacher: LanguageModel, learned: LanguageModel, batches: Sequence[Batch], dtype: str
) -> dict[int, float]:
    """The cost of converting each layer alone: the rise of the teacher's loss in nats a token with the learned block in
    the place of its own."""

    def loss() -> float:
        total = 0.0  # weighed by targets: a window of chats may have few
        for batch in batches:
            ids_BT, targets_BT = (x.to(teacher.device) for x in (batch.ids_BT, batch.targets_BT))
            reset_BT = None if batch.reset_BT is None else batch.reset_BT.to(teacher.device)
            with autocast(teacher.device, dtype):
                mean = teacher(ids_BT, targets=targets_BT, reset_BT=reset_BT).loss.item()
            total += mean * batch.targets
        return total / max(1, sum(batch.targets for batch in batches))

    blocks, found, before = teacher.blocks, dict[int, float](), loss()
    for index in attention_in(teacher):
        own = blocks[index]
        blocks[index] = blocks_of(learned)[index]
        found[index] = loss() - before
        blocks[index] = own
    return found


def kept(cost: dict[int, float], keep: int) -> list[int]:
    """The layers that keep attention, one in `keep`: those that cost most to convert; none for 0."""
    number = max(1, round(len(cost) / keep)) if keep else 0
    return sorted(sorted(cost, key=lambda index: -cost[index])[:number])
