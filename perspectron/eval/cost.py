"""The costs of designs side by side: training, memory, and decoding at growing contexts.

All designs take turns in one process, so that ratios hold on a busy machine; peak memory is measured in separate
processes. Weights are random, because the cost of a step does not depend on them.
"""

import gc
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from perspectron import presets
from perspectron.eval import timing
from perspectron.eval.subject import Subject
from perspectron.eval.timing import FREE_SHARE, Decoded, Dtype, Setting, Spread
from perspectron.model import census
from perspectron.model.config import ModelConfig
from perspectron.train.estimate import PER_LOGIT, PER_PARAMETER, parameters, room
from perspectron.train.optim import OptimConfig
from perspectron.util.config import at_least, one_of, require
from perspectron.util.errors import ConfigError
from perspectron.util.machine import Peak, pick_device, return_memory, trim

REFERENCE = "transformer"
Result = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """contexts: lengths in tokens, with the one that is read. rounds: in each, all have a turn of `visit` tokens, or of
    one training step; more rounds, for `seconds`, where tokens are quick. batch_size, seq_len, dtype and device are
    those of training; None is the run's, or 256, float32 and the CPU. Decoding is one row in float32."""

    contexts: tuple[int, ...] = census.CONTEXTS
    rounds: int = 9
    visit: int = 4
    seconds: float = 5.0
    batch_size: int = 8
    seq_len: int | None = None
    dtype: Dtype | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        at_least(1, self, "rounds", "visit")
        require(self.seconds >= 0, "seconds", self.seconds, "≥ 0")
        require(len(self.contexts) > 0, "contexts", self.contexts, "at least one")
        bound = f"≥ {self.visit + 2}, for the {self.visit + 1} tokens of a turn and one before"
        for context in self.contexts:
            require(context >= self.visit + 2, "contexts", context, bound)
        one_of(self.dtype, (None, "float32", "bfloat16"), "dtype")

    @property
    def setting(self) -> Setting:
        return Setting(self.batch_size, 256 if self.seq_len is None else self.seq_len, self.device or "cpu")

    @property
    def trained_in(self) -> Dtype:
        return self.dtype or "float32"

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """float32 always, so that runs of any dtype compare."""
        return ("float32",) if self.trained_in == "float32" else ("float32", self.trained_in)


QUICK = Options(rounds=3, visit=2, seconds=2.0)


@dataclass(frozen=True)
class Measured:
    """Measurements of one design. peak: bytes of training, or why there is no answer. seconds: of a training step, by
    dtype once a round, empty where `untimed` says why. decoded: by context."""

    counted: census.Census
    peak: int | str
    seconds: dict[Dtype, list[float]]
    untimed: str
    decoded: dict[int, Decoded]


def compare_costs(
    configs: Mapping[str, ModelConfig],
    options: Options = QUICK,
    optims: Mapping[str, OptimConfig | None] = MappingProxyType({}),
) -> dict[str, Result]:
    """Costs of each design as plain JSON values, with ratios to "transformer" where that is among them. optims: of
    those that are not trained by AdamW.

    ConfigError: no design, a table of positions shorter than seq_len, no such device.
    """
    require(len(configs) > 0, "designs", list(configs), "at least one")
    for config in configs.values():
        timing.check(config, options.setting)
    measured = _measure(configs, options, optims)
    results = {name: _result(config, measured[name], options) for name, config in configs.items()}
    if REFERENCE in configs:
        for name in configs:
            beside = _ratios(measured[name], measured[REFERENCE], options.trained_in)
            results[name]["to_transformer"] = beside
    return results


def measure(subject: Subject, options: Options = Options()) -> Result:
    """Costs of a run's design, beside a transformer of as many parameters (under "transformer"; null, with the
    reason under "no_transformer", where none has as many). ConfigError for an artifact."""
    folder, config = subject.opened.folder, subject.model.config
    bound = "a run; `perspectron generate --bench` measures an artifact"
    require(folder.quant is None, "run", str(folder.path), bound)
    options = replace(
        options,
        seq_len=subject.seq_len if options.seq_len is None else options.seq_len,
        dtype=options.dtype or ("bfloat16" if folder.dtype == torch.bfloat16 else "float32"),
        device=options.device or str(subject.model.device),
    )
    configs, why = {config.name: config}, ""
    try:
        params = census.active_parameters(config)
        twin = presets.solve(REFERENCE, params, vocab_size=config.vocab_size, seq_len=options.setting.seq_len)
        configs = {REFERENCE: twin} | configs  # a run of that name is its own
    except ConfigError as error:
        why = str(error)
    results = compare_costs(configs, options)
    return results[config.name] | {"transformer": results.get(REFERENCE), "no_transformer": why}


def _measure(
    configs: Mapping[str, ModelConfig], options: Options, optims: Mapping[str, OptimConfig | None]
) -> dict[str, Measured]:
    device, longest = pick_device(options.setting.device), max(options.contexts)
    peak = peaks(configs, options.setting, options.trained_in, optims)
    counted = {name: _census(config, options.contexts) for name, config in configs.items()}
    needed = sum(PER_PARAMETER * one.parameters for one in counted.values())
    needed += max((bytes for bytes in peak.values() if isinstance(bytes, int)), default=0)
    seconds: dict[str, dict[Dtype, list[float]]] = {name: {} for name in configs}
    untimed = ""
    if needed <= FREE_SHARE * (free := room(device)):
        seconds = timing.seconds_per_step(configs, options.setting, options.dtypes, options.rounds, optims)
    else:
        untimed = (
            f"{needed / 1e9:.1f} GB for all designs at once is more than half of the {free / 1e9:.1f} GB free"
        )
    models = {name: timing.decode_model(config, longest, device) for name, config in configs.items()}
    decoded = {
        at: timing.decoding(models, at, rounds=options.rounds, visit=options.visit, seconds=options.seconds)
        for at in sorted(set(options.contexts))
    }
    return {
        name: Measured(
            counted[name], peak[name], seconds[name], untimed, {at: d[name] for at, d in decoded.items()}
        )
        for name in configs
    }


def peaks(
    configs: Mapping[str, ModelConfig],
    setting: Setting,
    dtype: Dtype,
    optims: Mapping[str, OptimConfig | None] = MappingProxyType({}),
) -> dict[str, int | str]:
    """Bytes by which memory rises in the first step of training, weights, gradients and optimizer included, or why
    there is no answer. Each in a process of its own."""
    answers: dict[str, int | str] = {}
    for name, config in configs.items():
        try:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                answers[name] = process.submit(
                    _peak, config, setting, dtype, torch.get_num_threads(), optims.get(name)
                ).result()
        except Exception as error:  # of any kind, also that the process was killed
            why = (str(error).splitlines() or [""])[0]
            answers[name] = f"{type(error).__name__}: {why}"
    return answers


def _peak(
    config: ModelConfig, setting: Setting, dtype: Dtype, threads: int, optim: OptimConfig | None = None
) -> int | str:
    """The peak of one step in this process, or why it was not made."""
    device = pick_device(setting.device)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    needs = PER_PARAMETER * parameters(config) + PER_LOGIT * setting.tokens * config.vocab_size
    if needs > FREE_SHARE * (free := room(device)):
        return f"needs {needs / 1e9:.1f} GB or more, over half of the {free / 1e9:.1f} GB free"
    return_memory()
    few = replace(setting, batch_size=1, seq_len=min(16, setting.seq_len))
    timing.stepper(config, few, optim)(dtype)  # loads libraries
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        timing.stepper(config, setting, optim)(dtype)
        return torch.cuda.max_memory_allocated(device) - before
    trim()
    with Peak() as peak:
        timing.stepper(config, setting, optim)(dtype)
    return "this system does not tell" if peak.bytes is None else peak.bytes


def _census(config: ModelConfig, at: tuple[int, ...]) -> census.Census:
    """The census of a design as if its table of positions were as long as the longest context; only rows that it has
    count as parameters."""
    counted = census.census(config, at)
    if config.positions == 0:
        return counted
    longer = census.census(replace(config, positions=max(config.positions, *at)), at)
    return replace(longer, parameters=counted.parameters, active_parameters=counted.active_parameters)


def _result(config: ModelConfig, measured: Measured, options: Options) -> Result:
    """Every number of one design; keys of contexts are strings, as in JSON."""
    decoded = {str(context): one for context, one in measured.decoded.items()}
    spreads = {
        context: Spread.middle([1e3 * s for s in one.seconds]) if one.seconds else None
        for context, one in decoded.items()
    }
    speeds = {
        dtype: Spread.middle([options.setting.tokens / s for s in seconds])
        for dtype, seconds in measured.seconds.items()
    }
    skipped = {context: one.skipped for context, one in decoded.items() if one.skipped}
    skipped |= {"peak": measured.peak} if isinstance(measured.peak, str) else {}
    skipped |= {"training": measured.untimed} if measured.untimed else {}
    lengthened = 0 < config.positions < max(options.contexts)
    return {
        "parameters": measured.counted.parameters,
        "active_parameters": measured.counted.active_parameters,
        "contexts": list(measured.decoded),
        "decode_ms": {context: spread and spread.median for context, spread in spreads.items()},
        "decode_ms_spread": {context: spread and asdict(spread) for context, spread in spreads.items()},
        "state_bytes": {context: one.state_bytes for context, one in decoded.items()},
        "touched_bytes": {context: one.touched_bytes or None for context, one in decoded.items()},
        "flops_per_token": {str(context): n for context, n in measured.counted.flops_per_token.items()},
        "train_tokens_per_second": speeds[options.trained_in].median if speeds else None,
        "train_peak_bytes": measured.peak if isinstance(measured.peak, int) else None,
        "train_tokens_per_second_spread": {dtype: asdict(spread) for dtype, spread in speeds.items()},
        "skipped": skipped,
        "positions": f"timed with the first of {config.positions} positions repeated" if lengthened else "",
        "conditions": asdict(options) | asdict(options.setting) | {
            "contexts": sorted(set(options.contexts)), "dtype": options.trained_in,
            "device": str(pick_device(options.setting.device)), "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
    }  # fmt: skip


def _ratios(measured: Measured, reference: Measured, dtype: Dtype) -> Result:
    """Ratios to the reference; null where one of the two was not measured."""
    both = {str(at): (one, reference.decoded[at]) for at, one in measured.decoded.items()}
    own, others = measured.peak, reference.peak
    peak = own / others if isinstance(own, int) and isinstance(others, int) else None
    return {
        "decode_ms": {at: _ratio(one.seconds, other.seconds) for at, (one, other) in both.items()},
        "state_bytes": {at: one.state_bytes / other.state_bytes for at, (one, other) in both.items()},
        "train_tokens_per_second": _ratio(reference.seconds.get(dtype), measured.seconds.get(dtype)),
        "train_peak_bytes": peak,
    }


def _ratio(above: Sequence[float] | None, below: Sequence[float] | None) -> Result | None:
    """The spread of ratios taken round by round; None if one of both is missing."""
    if not above or not below:
        return None
    return asdict(Spread.middle([a / b for a, b in zip(above, below, strict=True)]))


# For a person


def lines(result: Result) -> list[str]:
    """The result of `measure` as lines for the terminal."""
    conditions, to = result["conditions"], result.get("to_transformer")
    training = f"training {conditions['batch_size']}×{conditions['seq_len']} in {conditions['dtype']}"
    speed, peak = result["train_tokens_per_second"], result["train_peak_bytes"]
    times: Result = to or {"decode_ms": {}, "state_bytes": {}}
    text = [
        f"{result['parameters']:,} parameters; {conditions['threads']} thread(s), {conditions['device']}",
        f"{training}: {_shown(speed, ',.0f')} tokens/s {_times(times.get('train_tokens_per_second'))}, "
        f"at most {_shown(peak and peak / 1e6, ',.0f')} MB {_times(times.get('train_peak_bytes'))}",
        f"{'context':>9}  {'ms per token':<38}  state MB",
    ]
    for context in map(str, result["contexts"]):
        ms = f"{_shown(result['decode_ms'][context], '.3f'):>9} {_times(times['decode_ms'].get(context))}"
        size = f"{result['state_bytes'][context] / 1e6:>9,.2f} {_times(times['state_bytes'].get(context))}"
        text.append(f"{int(context):>9,}  {ms:<38}  {size}".rstrip())
    text += [f"not run, {what}: {why}" for what, why in result["skipped"].items()]
    text += [result["positions"]] if result["positions"] else []
    if to is None:
        return [*text, f"no transformer to compare with: {result['no_transformer']}"]
    brackets = "ratio to a transformer with as many parameters, and its interquartile range over the rounds"
    return [*text, f"in brackets: {brackets}"]


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _times(ratio: Any) -> str:
    """A ratio in brackets, with its spread where it has one."""
    if ratio is None:
        return ""
    if isinstance(ratio, dict):
        return f"({ratio['median']:.2f}×, {ratio['low']:.2f}–{ratio['high']:.2f})"
    return f"({ratio:.2f}×)"
