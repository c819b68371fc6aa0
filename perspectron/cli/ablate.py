"""`perspectron ablate`."""

from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from perspectron.cli.compare import finish
from perspectron.cli.console import progress
from perspectron.cli.options import Jobs, answer, count
from perspectron.cli.progress import Work
from perspectron.compare.ablations import ablate, ablations_of, removed
from perspectron.compare.plan import Models, Settings, plan, threads_for
from perspectron.data import absolute, is_encoded
from perspectron.eval.suites import OF_TEXT
from perspectron.model.census import active_parameters
from perspectron.opening import describe
from perspectron.presets import DESIGNS, design_of
from perspectron.presets.table import OF_TRAINING
from perspectron.train.checkpoint import run_of
from perspectron.train.config import RunConfig
from perspectron.train.optim import OptimConfig
from perspectron.util.config import between_commas, one_of, require
from perspectron.util.files import locked


@dataclass(frozen=True)
class Ablate:
    """Retrain the design of a run with parts removed, at the same parameters, text, tokenizer and learning rate, and
    report.

    The optimizer, its groups of weights, betas and decay are the run's, the schedule is that of `compare`. Each arm is
    trained from nothing and without a teacher.

    Example: perspectron ablate runs/letters --over no_first_values,no_gqa --out runs/ablate

    List the ablations of a run: perspectron ablate runs/letters

    Every available ablation, with fewer tokens: perspectron ablate runs/letters --tokens 1M --out runs/parts

    Resume after an interruption with the same command, or: perspectron compare --resume runs/ablate
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run of any design; baselines have fewer ablations than our own designs."""
    out: Path | None = None
    """Output folder, where the same command resumes; without it, the ablations of the run are listed."""
    over: str = "all"
    """Ablations, separated by commas, or "all"."""
    tokens: str | None = None
    """Tokens that each arm is trained on (default: as many as the run)."""
    seeds: int = 1
    """Number of trainings of each arm."""
    suites: str = ""
    """Suites to run besides the held-out loss, separated by commas: position, calibration, robustness."""
    jobs: Jobs = 1

    def __call__(self) -> int:
        require(self.jobs >= 1, "jobs", self.jobs, "≥ 1")
        config = describe(self.run).of_run()
        design, known = design_of(config.model), ablations_of(config.model)
        if self.out is None:
            for name in ("over", "tokens", "seeds", "suites", "jobs"):
                value, default = getattr(self, name), Ablate.__dataclass_fields__[name].default
                require(value == default, name, value, "with --out DIR; without it, ablations are listed")
            return answer(False, {}, *(f"{name:<18} {known[name].about}" for name in removed(config.model)))
        names = list(removed(config.model)) if self.over == "all" else between_commas(self.over)
        made: Models = {
            design: (replace(config.model, name=design), "the whole design", DESIGNS[design].source)
        }
        for name in names:
            about = known[one_of(name, known, f"ablation of {design}")].about
            made[name] = (ablate(config.model, name), about, DESIGNS[design].source)
        bound = f"all, or one or more of {', '.join(removed(config.model))}"
        require(len(names) > 0, "over", self.over or "nothing", bound)
        console = progress()
        if config.train.init or config.train.teacher:
            how = "began from other weights" if config.train.init else "was taught"
            console.print(f"{self.run} {how}; here each arm is trained from nothing, without a teacher")
        with locked(self.out), Work("encoding the text and planning"):
            settings = self.settings(config, tuple(made))
            optim = replace(
                OptimConfig(), **{name: getattr(config.train.optim, name) for name in OF_TRAINING}
            )
            what = plan(self.out, "ablations", settings, lambda _: made, threads_for(self.jobs), optim)
        return finish(self.out, what, self.jobs, console)

    def settings(self, config: RunConfig, arms: tuple[str, ...]) -> Settings:
        """Settings of the run, as far as they apply to its ablations."""
        train, tokens = config.train, self.tokens
        heldout = Settings.heldout if is_encoded(train.data) else train.heldout
        require(
            train.template == "", "template", train.template, "left out: ablations are not trained on chats"
        )
        learned = train.tokenizer == "bpe" and not train.init and not train.teacher
        own = learned or is_encoded(train.data)
        whole = train.steps * train.batch_size * train.seq_len * train.accumulate
        return Settings(
            arms, active_parameters(config.model), whole if tokens is None else count(tokens, "tokens"), self.seeds,
            absolute(train.data), heldout, 0.05 if train.measured_on == "dev" else 0.0, "tokens",
            config.model.vocab_size, train.seq_len, train.batch_size * train.accumulate, (train.optim.lr,),
            (min(1.0, train.optim.warmup / train.steps),), dtype=train.dtype, device=train.device,
            suites=tuple(one_of(name, OF_TEXT, "suites") for name in between_commas(self.suites)),
            tokenizer="bpe" if own else str((run_of(self.run) / "tokenizer.json").resolve()),
        )  # fmt: skip
