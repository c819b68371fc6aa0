"""The training loop: from a run's config and data to checkpoints, metrics and a curve."""

import contextlib
import fnmatch
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from perspectron.block import Block
from perspectron.config import require
from perspectron.data import Batch, Loader, Shards, Tokenizer
from perspectron.device import pick_device
from perspectron.errors import CheckpointError, NonFiniteError, StorageError
from perspectron.eval.perplexity import Heldout, heldout
from perspectron.experts import RoutedConfig
from perspectron.files import atomic, remove, write_json
from perspectron.model import build
from perspectron.optim import adamw, learning_rate
from perspectron.quant import ternary
from perspectron.train import checkpoint
from perspectron.train.checkpoint import Progress
from perspectron.train.config import RunConfig
from perspectron.train.curve import draw, draw_terms
from perspectron.train.distill import Teacher
from perspectron.train.measure import matrices, means
from perspectron.train.precision import autocast, faster

Metrics = dict[str, Any]
METRICS, CURVE, TERMS, TERNARY = "metrics.jsonl", "loss.svg", "terms.svg", "ternary.json"


class Trainer:
    """One run. Everything that decides the next step is in a checkpoint, so a run that was stopped anywhere
    and goes on gives the same weights, bit for bit, as one that never stopped."""

    def __init__(self, run: Path, config: RunConfig, tokenizer: Tokenizer, shards: Shards) -> None:
        """Start, or go on from the newest checkpoint that verifies, in the folder `run`.

        A "dtype" of "auto" is settled here by measuring, and the resolved config is saved.
        """
        self.run_dir, self.tokenizer = run, tokenizer
        self.device = pick_device(config.train.device)
        positions = config.model.positions or config.train.seq_len
        require(
            config.train.seq_len <= positions, "seq_len", config.train.seq_len, f"≤ positions = {positions}"
        )
        self.heldout_split = shards.split("heldout")
        train = config.train
        self.loader = Loader(
            shards.split("train"), batch_size=train.batch_size, seq_len=train.seq_len, seed=train.seed
        )
        torch.manual_seed(train.seed)
        self.model = build(config.model, train.seed).to(self.device)
        self.model.recompute = train.recompute
        freeze(self.model, train.only)
        self.teacher = None
        if train.teacher:
            weight, temperature = train.teacher_weight, train.teacher_temperature
            self.teacher = Teacher(Path(train.teacher), tokenizer, self.device, weight, temperature)
        if train.dtype == "auto":
            batch = self.loader.next_batch()
            train = replace(train, dtype=faster(self.model, batch, self.device))
            self.loader.load_state_dict(self.loader.state_dict() | {"epoch": 0, "cursor": 0})
        self.config = replace(config, train=train)
        self.optimizer = adamw(self.model, train.optim)
        self.progress = Progress(loader=self.loader.state_dict())
        self.best = math.inf
        self.damaged: CheckpointError | None = None
        self._forward = self._compiled() if train.compile else self.model
        self._resume()
        checkpoint.save_config(run, self.config)

    def _compiled(self) -> Callable[..., Any]:
        """torch.compile around mixers and experts, which run as they are: unrolling time takes minutes."""
        for block in cast("list[Block]", self.model.blocks):
            if block.config.mixer is not None:
                block.mixer.forward = torch.compiler.disable(block.mixer.forward)
            if isinstance(block.config.ffn, RoutedConfig):  # how many tokens an expert has differs each time
                block.ffn.forward = torch.compiler.disable(block.ffn.forward)
        compiled: Callable[..., Any] = torch.compile(self.model)
        return compiled

    def _resume(self) -> None:
        """Load the newest checkpoint that verifies; set damaged newer ones aside and forget what was written
        after it. CheckpointError when there are checkpoints and none of them verifies."""
        for place in (self.run_dir, checkpoint.folder(self.run_dir)):
            for leftover in place.glob(".*.tmp"):
                remove(leftover)
        damaged = []
        for path in reversed(checkpoint.paths(self.run_dir)):
            try:
                found = checkpoint.read(path)
                checkpoint.restore(found, self.model, self.tokenizer, self.optimizer)
            except CheckpointError as error:
                self.damaged = self.damaged or error
                damaged.append(path)
                continue
            self.progress = found.progress
            self.loader.load_state_dict(self.progress.loader)
            break
        else:
            if self.damaged:
                raise self.damaged
            if self.config.train.init:
                checkpoint.start_from(Path(self.config.train.init), self.model, self.tokenizer)
        for path in damaged:
            checkpoint.set_aside(path)
        measured = [c.progress.heldout for c in checkpoint.found_in(self.run_dir)]
        self.best = min((value for value in measured if value is not None), default=math.inf)
        self._truncate_metrics()

    def _truncate_metrics(self) -> None:
        path = self.run_dir / METRICS
        if path.is_file():
            kept = [line for line in read_metrics(self.run_dir) if line["step"] <= self.progress.step]
            with atomic(path) as temporary:
                temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def fit(self, until: int | None = None, report: Callable[[Metrics], None] = lambda _: None) -> int | None:
        """Train to the end (or to step `until`), calling `report` with each line of metrics.

        Returns the number of the signal (SIGINT, SIGTERM) that ended it early, or None. Either way a
        checkpoint of the last step is on disk. NonFiniteError stops before the optimizer's step.
        """
        train = self.config.train
        last = train.steps if until is None else min(until, train.steps)
        with _signals() as caught, (self.run_dir / METRICS).open("ab", buffering=0) as log:

            def note(line: Metrics) -> None:
                try:
                    log.write(json.dumps(line).encode() + b"\n")
                except OSError as error:
                    raise StorageError(f"{self.run_dir / METRICS}: not written ({error.strerror})") from error
                report(line)

            while self.progress.step < last and not caught:
                note(self.step())
                step = self.progress.step
                best = self.best
                if _due(step, train.eval_every) or step == train.steps:
                    note(self.measure())
                if _due(step, train.save_every) or self.best < best or step == last:
                    self.save()
            self.save()
        metrics = read_metrics(self.run_dir)
        draw(metrics, self.run_dir / CURVE)
        draw_terms(metrics, self.run_dir / TERMS)
        return caught[0] if caught else None

    def step(self) -> Metrics:
        """One update."""
        start, train = time.perf_counter(), self.config.train
        lr = learning_rate(self.progress.step, train.steps, train.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.set_step(self.progress.step)
        start_at, end_at = train.ternary_from * train.steps, train.ternary_until * train.steps
        ternary.set_share(self.model, ternary.share_at(self.progress.step, start_at, end_at))
        loss, aux = 0.0, dict[str, float]()
        for _ in range(train.accumulate):
            part, terms = self._backward(self.loader.next_batch())
            loss += part / train.accumulate
            aux = {name: aux.get(name, 0.0) + value / train.accumulate for name, value in terms.items()}
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not math.isfinite(norm.item()):
            self._stop_at_gradient()
        if train.optim.clip > 0:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), train.optim.clip, norm)
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
            "grad_norm": norm.item(),
            "tokens_per_second": tokens / seconds,
            "seconds": self.progress.seconds,
        } | ({"aux": aux} if aux else {})

    def _backward(self, batch: Batch) -> tuple[float, dict[str, float]]:
        """One batch's gradients; its loss, and what the model reports beside it."""
        ids, targets = batch.ids_BT.to(self.device), batch.targets_BT.to(self.device)
        reset = None if batch.reset_BT is None else batch.reset_BT.to(self.device)
        with autocast(self.device, self.config.train.dtype):
            output = self._forward(ids, targets=targets, reset_BT=reset)
            if self.teacher is not None:
                output.aux["distill"] = self.teacher.term(output.logits, ids, targets, reset)
        loss: Tensor = output.objective()
        require(loss.requires_grad, "only", self.config.train.only, "of parameters that get a gradient")
        value = loss.item()
        if not math.isfinite(value):
            with autocast(self.device, self.config.train.dtype):
                where = first_non_finite(self.model, lambda: self.model(ids, targets=targets, reset_BT=reset))
            raise NonFiniteError(f"step {self.progress.step + 1}: loss is {value}, first in {where}")
        (loss / self.config.train.accumulate).backward()
        return output.loss.item(), {name: term.mean().item() for name, term in output.aux.items()}

    def _stop_at_gradient(self) -> None:
        named = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
        where = [name for name, gradient in named if not gradient.isfinite().all()]
        first = f"{where[0]} and {len(where) - 1} more" if where else "the sum of squares"
        raise NonFiniteError(f"step {self.progress.step + 1}: gradient is not finite in {first}")

    def measure(self) -> Metrics:
        """Held-out loss at this step. While experts are being made ternary it is written, but is none to choose
        a checkpoint by: the model is not yet what it shall be."""
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
            "heldout_bits_per_byte": result.bits_per_byte,
            "heldout_perplexity": result.perplexity,
            "heldout_tokens": result.tokens,
        }
        if found := matrices(self.model):
            write_json(self.run_dir / TERNARY, {"step": self.progress.step, "matrices": found})
            line["ternary"] = means(found)
        return line

    def save(self) -> Path:
        """Write a checkpoint of this step, unless it is there."""
        path = checkpoint.path_of(self.run_dir, self.progress.step)
        if any(
            found.path == path and found.progress == self.progress
            for found in checkpoint.found_in(self.run_dir)
        ):
            return path
        return checkpoint.save(
            self.run_dir, self.config, self.tokenizer, self.model, self.optimizer, self.progress
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def freeze(model: nn.Module, only: tuple[str, ...]) -> None:
    """All but the parameters whose names match one of these patterns; none without a pattern. ConfigError for a
    pattern that matches no name."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in only:
        require(
            bool(fnmatch.filter(names, pattern)), "only", pattern, "the name of a parameter, or a pattern"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not only or any(fnmatch.fnmatchcase(name, pattern) for pattern in only))


def first_non_finite(model: nn.Module, forward: Callable[[], object]) -> str:
    """The name of the innermost module that first gives a non-finite output, or "the loss itself"."""
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if not found and isinstance(first, Tensor) and not first.isfinite().all():
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in hooks:
            handle.remove()
    return found[0] if found else "the loss itself"


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM; a second one acts at once."""
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, catch)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def read_metrics(run: Path) -> list[Metrics]:
    """The lines of metrics.jsonl; a last line cut short by a crash is left out."""
    path = run / METRICS
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines
