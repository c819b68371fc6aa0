"""`perspectron lm-eval`: the command line of lm-evaluation-harness, in which any run is a model.

The harness finds models in a registry that lives in its process, and has no way to name a package that adds to it; so
this registers ours and then runs the harness.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from perspectron.cli.options import open_model
from perspectron.eval.harness import Answers
from perspectron.util.config import one_of, require
from perspectron.util.errors import ConfigError

NAME = "perspectron"
INSTALL = "pip install 'perspectron[eval]'"
HELP = f"""usage: perspectron lm-eval --model perspectron --model_args run=RUN --tasks TASK [OPTIONS]

Tasks of lm-evaluation-harness, with a run as the model. All its options are listed here once it is installed:
{INSTALL}

Example: perspectron lm-eval --model perspectron --model_args run=runs/mine --tasks lambada_openai"""
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


def run(arguments: Sequence[str]) -> int:
    """Run tasks of lm-evaluation-harness with a run as the model: --model perspectron.

    Hands the arguments on to the harness, to which `--model perspectron --model_args run=DIR` is known.

    Without the extra `eval` it says how to install it: as help where help is asked for, else as ConfigError; and what
    the run raises when it is opened.
    """
    if find_spec("lm_eval") is None:
        if {"-h", "--help"} & set(arguments):
            print(HELP)
            return 0
        raise ConfigError(f"lm-eval is not installed; {INSTALL}")
    from lm_eval.__main__ import cli_evaluate

    register()
    sys.argv = ["perspectron lm-eval", *arguments]
    cli_evaluate()
    return 0


def open_answers(
    run: str,
    batch_size: int | str = Answers.batch_size,
    device: str = "auto",
    dtype: str = "auto",
    cache: str | None = None,
    max_batch_size: int | None = None,
) -> Answers:
    """Open a run for the harness. run: folder of a run, of one of its checkpoints, or of an artifact. dtype: float32,
    bfloat16 or auto, which is that of training, as in `perspectron eval` (an artifact: float32). cache: memory for the
    experts of an artifact, as 512M. ConfigError for any of them, and the errors of opening a run."""
    size = str(batch_size)
    require(size.isdecimal() or size == "auto", "batch_size", batch_size, "a number or auto")
    one_of(dtype, ("auto", *DTYPES), "dtype")
    if device == "cuda:0" and not torch.cuda.is_available():
        device = "cpu"  # what the harness passes where nobody said anything
    opened = open_model(Path(run), cache, device=device)
    rows = int(size) if size.isdecimal() else Answers.batch_size
    autocast = opened.folder.dtype if dtype == "auto" else DTYPES[dtype]
    return Answers(opened.model, opened.tokenizer, min(rows, max_batch_size or rows), autocast)


def register() -> None:
    """Make the harness know the model "perspectron", in this process."""
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model

    @register_model(NAME)
    class PerspectronLM(LM):
        """A run that `open_answers` opened; the harness itself names a batch size, a device and the largest batch
        size."""

        def __init__(self, run: str = "", **options: Any) -> None:
            super().__init__()
            for name in options:
                one_of(name, signature(open_answers).parameters, "model_args")
            require(bool(run), "model_args", "", "run=DIR, a run or an artifact")
            self.answers = open_answers(run, **options)
            self._device = self.answers.model.device

        @property
        def tokenizer_name(self) -> str:
            return self.answers.tokenizer.fingerprint

        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            raise ConfigError("--apply_chat_template: leave it out; a run reads the text of a task as it is")

        def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            return self._answer("loglikelihood", requests, self._pairs)

        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
            return self._answer("loglikelihood_rolling", requests, self._texts)

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            return self._answer("generate_until", requests, self.answers.continuations)

        def _pairs(self, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
            return [(score.log_likelihood, score.greedy) for score in self.answers.log_likelihoods(pairs)]

        def _texts(self, texts: list[tuple[str]]) -> list[float]:
            return self.answers.rolling([text for (text,) in texts])

        def _answer(self, name: str, requests: list[Any], ask: Callable[[list[Any]], list[Any]]) -> list[Any]:
            """The answers, kept in the harness's cache where it has one."""
            asked = [request.args for request in requests]
            answers = ask(asked)
            for arguments, answer in zip(asked, answers, strict=True):
                self.cache_hook.add_partial(name, arguments, answer)
            return answers
