"""The training loop: from a run's config and data to checkpoints, metrics and a curve."""

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from perspectron.data import Shards, Tokenizer
from perspectron.data.loader import Batch, Loader
from perspectron.experts import ternary
from perspectron.experts.router import RoutedConfig
from perspectron.experts.stats import matrices, means
from perspectron.model.block import Block
from perspectron.model.model import LanguageModel, build
from perspectron.model.parts import Dropout
from perspectron.train import checkpoint, lora
from perspectron.train.checkpoint import RUN_LOCK, Progress
from perspectron.train.config import RunConfig, Turn
from perspectron.train.distill import Teacher
from perspectron.train.estimate import Estimate, autocast, estimate, faster
from perspectron.train.heldout import Heldout, heldout, require_targets
from perspectron.train.metrics import Metrics, forget, noting
from perspectron.train.optim import falls_at, freeze, learning_rate, optimizer_of
from perspectron.train.pace import Pace
from perspectron.train.page import Page, Write, forget_samples
from perspectron.train.prepare import training_batches
from perspectron.train.resume import resume, set_aside
from perspectron.util import ranks
from perspectron.util.config import require
from perspectron.util.errors import BackendError, CheckpointError, NonFiniteError
from perspectron.util.files import locked, sweep, write_json
from perspectron.util.hooks import first_non_finite
from perspectron.util.machine import in_large_pages, pick_device, signals

TERNARY = "ternary.json"
SETTLED = 10  # updates after which memory holds all that it will


class Trainer:
    """One run: a model, its optimizer and its position in the text. A checkpoint holds everything that determines the
    next step, so that a run that was stopped and resumed ends with the same weights, bit for bit.

    It is made in steps that a subclass may extend: `build` makes the model, `wrap` decides what holds its parameters,
    `settle` chooses their dtype by time, `start` fills them."""

    first = True
    """True if it writes the run's files: of several ranks that train together, one does."""

    def __init__(
        self,
        run: Path,
        config: RunConfig,
        tokenizer: Tokenizer,
        shards: Shards,
        *,
        ended: Sequence[Path] = (),
        allow_changed: bool = False,
    ) -> None:
        """Start, or resume from the newest valid checkpoint, in the folder `run`. The resolved config is saved there
        last. ended: checkpoints not to resume from, as returned by `extend`. allow_changed: resume although `config`
        differs from the checkpoint's; otherwise ConfigError names the difference. StorageError if another process is
        training in the folder."""
        self.run_dir, self.config, self.tokenizer, self.ended = run, config, tokenizer, ended
        self.allow_changed = allow_changed
        self.device = pick_device(config.train.device)
        self.shards, self.heldout_split = shards, shards.split(config.train.measured_on)
        require_targets(
            self.heldout_split, config.train.seq_len, config.train.eval_tokens or None, spread=True
        )
        self.loader = self.batches()
        self.progress = Progress(loader=self.loader.state_dict())
        self.best = math.inf
        self.damaged: CheckpointError | None = None
        self.page: Page | None = None
        self.build()
        self.wrap()
        self.settle()
        self.start()

    def batches(self) -> Loader:
        """A loader at the run's first batch."""
        return training_batches(self.config, self.shards)

    def build(self) -> None:
        """Create `model` and `teacher` on the device."""
        train = self.config.train
        positions = self.config.model.positions or train.seq_len
        require(train.seq_len <= positions, "seq_len", train.seq_len, f"≤ positions = {positions}")
        torch.manual_seed(train.seed)
        self.model = self.new_model()
        self.model.recompute = train.recompute
        freeze(self.model, train.only)
        if train.lora:
            if not checkpoint.paths(self.run_dir):
                checkpoint.start_from(Path(train.init), self.model, self.tokenizer)
            lora.adapt(self.model, lora.LoraConfig.parse(train.lora), self.batches().next_batch())
        self.teacher = None
        if train.teacher:
            weight, temperature = train.teacher_mix or train.teacher_weight, train.teacher_temperature
            self.teacher = Teacher(Path(train.teacher), self.tokenizer, self.device, weight, temperature)
            self.config = replace(self.config, taught=self.teacher.model.fingerprint())
            most = self.teacher.model.config.positions or train.seq_len
            require(
                train.seq_len <= most, "seq_len", train.seq_len, f"≤ {most}, positions of {train.teacher}"
            )

    def new_model(self) -> LanguageModel:
        """The model, with the weights of the run's seed."""
        return build(self.config.model, self.config.train.seed).to(self.device)

    def wrap(self) -> None:
        """Set `forward`, which a step calls, and `optimizer`. Parameters may be replaced here, by shards of them say:
        before it nothing holds them but the model, and after it they stay the same objects."""
        self.forward: Callable[..., Any] = self.model
        if self.config.train.compile:
            self.forward = compiled(self.model)
        self.optimizer = optimizer_of(self.model, self.config.train.optim)

    def settle(self) -> None:
        """Replace a dtype of "auto" in `config` after timing passes over a batch, which have no other effect."""
        if self.config.train.dtype == "auto":
            dtype = faster(self.model, self.batches().next_batch(), self.device)
            self.config = replace(self.config, train=replace(self.config.train, dtype=dtype))

    def start(self) -> None:
        """Resume, and save the run's config."""
        with locked(self.run_dir, RUN_LOCK):
            self.resume()
            checkpoint.save_config(self.run_dir, self.config)

    def resume(self) -> None:
        """Fill the model, the optimizer, `progress` and the loader from the newest checkpoint that verifies, and forget
        what was logged after it; without one, from the run named by `init`, if any. CheckpointError when there
        are checkpoints and none of them verifies."""
        newest, self.damaged = self.restored()
        if not self.config.id:
            known = "" if newest is None else newest.config.id
            self.config = replace(self.config, id=known or secrets.token_hex(16))
        if newest is not None:
            self.progress = newest.progress
            self.loader.load_state_dict(self.progress.loader)
        else:
            optimizer = self.config.train.optim.optimizer
            turned = any("ns_steps" in group for group in self.optimizer.param_groups)
            bound = "adamw: no matrix of a block learns that muon could turn"
            require(optimizer != "muon" or turned, "optimizer", optimizer, bound)
            if self.config.train.init and not self.config.train.lora:
                self.start_from(Path(self.config.train.init))
        measured = (c.progress.heldout for c in checkpoint.found_in(self.run_dir))
        self.best = min((value for value in measured if value is not None), default=math.inf)
        if self.first:
            forget(self.run_dir, self.progress.step)
            forget_samples(self.run_dir, self.progress.step)

    def restored(self) -> tuple[checkpoint.Checkpoint | None, CheckpointError | None]:
        """Fill the model and the optimizer by `train.resume`, and return what it returns."""
        self.sweep()
        aside = set_aside if self.first else lambda path, why: None
        return resume(self.run_dir, self.restore, self.ended, self.config, aside, self.allow_changed)

    def sweep(self) -> None:
        """Remove temporary files that a killed process left."""
        for place in (self.run_dir, checkpoint.folder(self.run_dir)):
            sweep(place)

    def restore(self, newest: checkpoint.Checkpoint) -> None:
        """Fill the model, the optimizer and the random state. CheckpointError: it is damaged, or another model's."""
        checkpoint.restore(newest, self.model, self.tokenizer, self.optimizer)

    def start_from(self, run: Path) -> None:
        """Take the weights of another run."""
        checkpoint.start_from(run, self.model, self.tokenizer)

    def fit(
        self,
        until: int | None = None,
        report: Callable[[Metrics], None] = lambda _: None,
        pace: Pace | None = None,
        write: Write | None = None,
    ) -> int | None:
        """Train to the end (or to step `until`) and call `report` with each line of metrics. pace: ends the training on
        time by changing the number of updates. write: a function that has the model continue some texts, for the run's
        page; it must not change the model or a generator of torch.

        Returns the number of the signal (SIGINT, SIGTERM, SIGHUP) that ended it early, or None. In both cases a
        checkpoint of the last step is on disk. NonFiniteError is raised before the optimizer step, StorageError if
        writing fails or another process is training in the folder.
        """
        train = self.config.train
        before_fall = falls_at(train.steps, train.optim)

        def last() -> int:
            steps = self.config.train.steps
            return steps if until is None else min(until, steps)

        with contextlib.ExitStack() as stack:
            caught = stack.enter_context(signals())
            note: Callable[[Metrics], None] = lambda _: None  # noqa: E731
            if self.first:
                stack.enter_context(locked(self.run_dir, RUN_LOCK))
                if self.progress.step < last():  # else its page is complete
                    self.page = stack.enter_context(Page(self, pace, write))
                note = stack.enter_context(noting(self.run_dir, self._told(report), caught))
            settled = self.progress.step + SETTLED
            while self.progress.step < last() and not self.agreed(caught):
                note(self.step())
                if self.progress.step == settled and self.device.type == "cpu":
                    in_large_pages()
                step, best = self.progress.step, self.best
                if pace is not None:
                    self._keep(pace)
                measured = _due(step, train.eval_every) or step == self.config.train.steps
                if measured:
                    note(self.measure())
                if _due(step, train.save_every) or self.best < best or step in (last(), before_fall):
                    self.save()
                if measured and self.page is not None:
                    self.page.draw()
                if pace is not None and measured:
                    pace.paused()
            self.save()
            self.saved()
            stopped = self.agreed(caught)
        return stopped or None

    def _told(self, report: Callable[[Metrics], None]) -> Callable[[Metrics], None]:
        def told(line: Metrics) -> None:
            if self.page is not None:
                self.page.note(line)
            report(line)

        return told

    def agreed(self, caught: list[int]) -> int:
        """The signal that is to end the training; 0: none. Asked before every update."""
        return caught[0] if caught else 0

    def decided(self, steps: int) -> int:
        """The number of updates that the run is to have, where a clock decides it."""
        return steps

    def saved(self) -> None:
        """Wait until every checkpoint is on disk."""

    def _keep(self, pace: Pace) -> None:
        pace.updated()
        step, train = self.progress.step, self.config.train
        every = train.eval_every or train.steps
        steps = self.decided(pace.steps(step, train.steps, -(-train.steps // every) - step // every))
        if step < train.steps != steps:
            self.turn(steps)

    def turn(self, steps: int) -> None:
        """Change the run's number of updates from the next update on. The run's config says so before that update is
        made: stopped or killed anywhere after it, the run goes on with the same number."""
        train, turn = self.config.train, Turn(self.progress.step, self.config.train.steps)
        turned = replace(self.config, train=replace(train, steps=steps), turns=(*self.config.turns, turn))
        if self.first:
            checkpoint.save_config(self.run_dir, turned)
        self.config = turned

    def estimate(self) -> Estimate:
        """The time of an update and the memory of the training, measured."""
        batch = self.batches().next_batch()
        return estimate(self.model, lambda: self.backward(batch, 1.0), self.config)

    def step(self) -> Metrics:
        """One update."""
        start, train, schedule = time.perf_counter(), self.config.train, self.config.schedule
        place, done = map(self.config.place, (self.progress.step, self.progress.step + 1))
        lr = learning_rate(place, schedule.steps, train.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("rate", 1.0)
        self.model.set_step(self.progress.step)
        ternary.set_share(self.model, ternary.share_at(done - 1, *schedule.ternary_between))
        batches = [self.loader.next_batch() for _ in range(train.accumulate)]
        targets = sum(batch.targets for batch in batches)
        loss, aux = 0.0, dict[str, float]()
        for batch in batches:
            parts = targets / batch.targets  # so that every target counts the same, wherever it stands
            value, terms = self.backward(batch, parts)
            loss += value / parts
            aux = {name: aux.get(name, 0.0) + term / parts for name, term in terms.items()}
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds, tokens = time.perf_counter() - start, train.batch_size * train.seq_len * train.accumulate
        self.progress = Progress(
            self.progress.step + 1,
            self.progress.tokens + tokens,
            self.progress.seconds + seconds,
            self.loader.state_dict(),
        )
        return {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens_per_second": tokens / seconds,
            "seconds": self.progress.seconds,
        } | ({"aux": aux} if aux else {})

    def backward(self, batch: Batch, parts: float) -> tuple[float, dict[str, float]]:
        """Add one batch's gradients, divided by `parts`; its loss and the terms that the model reports, undivided."""
        ids, targets = (ranks.columns(x).to(self.device) for x in (batch.ids_BT, batch.targets_BT))
        reset = None if batch.reset_BT is None else ranks.columns(batch.reset_BT).to(self.device)
        with autocast(self.device, self.config.train.dtype):
            output = self.forward(ids, targets=targets, reset_BT=reset)
            if self.teacher is not None:
                output.aux["distill"] = self.teacher.term(output.logits, ids, targets, reset)
        loss: Tensor = output.objective()
        if self.config.train.teacher_mix:
            loss = loss - self.config.train.teacher_mix * output.loss
        require(loss.requires_grad, "only", self.config.train.only, "of parameters that get a gradient")
        value = loss.item()
        if not math.isfinite(value):
            with autocast(self.device, self.config.train.dtype):
                where = first_non_finite(self.model, lambda: self.model(ids, targets=targets, reset_BT=reset))
            raise NonFiniteError(f"step {self.progress.step + 1}: loss is {value}, first in {where}")
        (loss / parts).backward()
        return output.loss.item(), {name: term.mean().item() for name, term in output.aux.items()}

    def _clip(self) -> float:
        """Bound the gradient's norm, and return what it was. NonFiniteError if it is not finite."""
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        total = nn.utils.get_total_norm(list(gradients.values()))
        norm, clip = total.item(), self.config.train.optim.clip
        if not math.isfinite(norm):
            where = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
            first = f"{where[0]} and {len(where) - 1} more" if where else "the sum of squares"
            raise NonFiniteError(f"step {self.progress.step + 1}: gradient is not finite in {first}")
        if clip > 0:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, total)
        return norm

    def measure(self) -> Metrics:
        """Loss at this step on the held-out or dev split. While experts are becoming ternary it is logged but not used
        to choose the best checkpoint."""
        train = self.config.train
        result: Heldout = heldout(
            self.model,
            self.heldout_split,
            self.tokenizer,
            seq_len=train.seq_len,
            batch_size=train.batch_size,
            limit_tokens=train.eval_tokens or None,
            spread=True,
            dtype=torch.bfloat16 if train.dtype == "bfloat16" else None,
        )
        if not math.isfinite(result.bits_per_byte):
            raise NonFiniteError(f"step {self.progress.step}: held-out loss is {result.bits_per_byte}")
        if ternary.converted(self.model):
            self.progress = replace(self.progress, heldout=result.bits_per_byte)
            self.best = min(self.best, result.bits_per_byte)
        line: Metrics = {
            "step": self.progress.step,
            f"{train.measured_on}_bits_per_byte": result.bits_per_byte,
            f"{train.measured_on}_perplexity": result.perplexity,
            f"{train.measured_on}_tokens": result.tokens,
        }
        if by_matrix := self.matrices():
            if self.first:
                write_json(self.run_dir / TERNARY, {"step": self.progress.step, "matrices": by_matrix})
            line["ternary"] = means(by_matrix)
        return line

    def matrices(self) -> dict[str, dict[str, list[float]]]:
        """The statistics of matrices that are, or become, ternary."""
        return matrices(self.model)

    def save(self) -> Path:
        """Write a checkpoint of this step, unless it is there."""
        path = checkpoint.path_of(self.run_dir, self.progress.step)
        if any(c.path == path and c.progress == self.progress for c in checkpoint.found_in(self.run_dir)):
            checkpoint.prune(self.run_dir, self.config.train)
            return path
        return checkpoint.save(
            self.run_dir, self.config, self.tokenizer, self.model, self.optimizer, self.progress
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def compiled(model: LanguageModel) -> Callable[..., Any]:
    """torch.compile of all but mixers, experts and dropout, which run as they are: unrolling time takes minutes, and
    dropout's generators cannot be traced. Raises BackendError for a CPU without a C++ compiler."""
    if next(model.parameters()).device.type == "cpu":
        _require_cpp_compiler()
    for module in model.modules():
        if isinstance(module, Dropout):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    for block in cast("list[Block]", model.blocks):
        for mixer in block.mixers:
            mixer.forward = torch.compiler.disable(mixer.forward)
        if isinstance(block.config.ffn, RoutedConfig):  # how many tokens an expert has differs each time
            block.ffn.forward = torch.compiler.disable(block.ffn.forward)
    result: Callable[..., Any] = torch.compile(model)
    return result


def _require_cpp_compiler() -> None:
    """Without it torch.compile raises at the first step, many frames deep."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # they load the compiler, which takes a second
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError) as error:  # OSError: CXX names what cannot be run
        raise BackendError(
            "torch.compile found no C++ compiler. Install one, name it in CXX, or train without compile"
        ) from error
