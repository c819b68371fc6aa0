"""Distillation: learning from the probabilities of another run's model, in addition to the text.

Shapes: B batch, T time, V vocabulary, N tokens.
"""

from pathlib import Path

import torch
from torch import Tensor

from perspectron.data import Tokenizer
from perspectron.data.loader import IGNORE
from perspectron.model.model import LanguageModel
from perspectron.train import checkpoint
from perspectron.util import ranks
from perspectron.util.config import require
from perspectron.util.terms import Term


class Teacher:
    """A frozen model. As for the student, its state is empty at the start of each batch."""

    def __init__(
        self, run: Path, tokenizer: Tokenizer, device: torch.device, weight: float, temperature: float
    ) -> None:
        """CheckpointError if the run does not load; ConfigError if its tokenizer differs."""
        model, its = checkpoint.load_run(run)
        require(its.fingerprint == tokenizer.fingerprint, "teacher", str(run), "a run of the same tokenizer")
        self.model: LanguageModel = model.requires_grad_(False).to(device)
        self.weight, self.temperature, self.ids = weight, temperature, tokenizer.vocab_size

    def term(self, student_BTV: Tensor, ids_BT: Tensor, targets_BT: Tensor, reset_BT: Tensor | None) -> Term:
        """The term added to the student's loss for one batch, over the ids that the tokenizer has: a vocabulary padded
        to a round size has more."""
        with torch.no_grad():
            teacher_BTV = self.model(ids_BT, reset_BT=reset_BT).logits
        counted_BT = targets_BT != IGNORE
        student_NV, teacher_NV = (
            logits_BTV[counted_BT][:, : self.ids] for logits_BTV in (student_BTV, teacher_BTV)
        )
        value = divergence(student_NV, teacher_NV, self.temperature)
        return Term(value, self.weight)


def divergence(student_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    """T² · KL(teacher ‖ student) in nats, both at temperature T, mean over tokens; 0 without tokens.

    T² keeps the gradient's size as T grows.
    """
    wide = torch.promote_types(student_NV.dtype, torch.float32)
    student_NV, teacher_NV = (
        torch.log_softmax(logits_NV.to(wide) / temperature, -1) for logits_NV in (student_NV, teacher_NV)
    )
    total = torch.nn.functional.kl_div(student_NV, teacher_NV, reduction="sum", log_target=True)
    counted = ranks.all_reduce_sum(total.new_tensor(len(student_NV))).clamp_min(1)
    return temperature**2 * ranks.all_reduce_sum(total) / counted
