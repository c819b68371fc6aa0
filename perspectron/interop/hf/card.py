"""A model card from a run's own numbers."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from perspectron import presets
from perspectron.data import is_encoded, open_shards
from perspectron.eval.perplexity import said
from perspectron.opening import Opened
from perspectron.train.convert import run as conversions
from perspectron.train.convert.config import TEXT
from perspectron.train.metrics import HELDOUT, measured, read_metrics
from perspectron.util.errors import CheckpointError, DataError, escaped
from perspectron.util.files import read_json


def card(opened: Opened, name: str, *, remote: bool = True) -> str:
    """README.md of an exported run: what the model is, what it was trained on and for how long, what was measured, and
    how to use it. It says only what the run's files say. remote: the folder has the model's code, too."""
    return "\n".join(_lines(opened, name, remote)) + "\n"


def _lines(opened: Opened, name: str, remote: bool) -> Iterator[str]:
    config = opened.folder.of_run()
    model, train = config.model, config.train
    parameters = sum(parameter.numel() for parameter in opened.model.parameters())
    state = opened.model.init_state(1, capacity=1024, device="meta").nbytes
    mixers = dict.fromkeys(mixer.kind for block in model.blocks for mixer in block.mixers)
    yield from (
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- perspectron",
    )
    yield from (*(f"- {mixer}" for mixer in mixers), "---", "", f"# {_as_written(name)}", "")
    yield f"{_as_written(presets.title(model.name))}: {parameters / 1e6:.2f} M parameters in {len(model.blocks)} blocks"
    yield f"of {', '.join(mixers)}, a vocabulary of {model.vocab_size:,}, and {state:,} bytes of memory after"
    yield "1,024 tokens."
    yield from ("", "## Training", "")
    if opened.checkpoint is not None and opened.checkpoint.progress.step:
        last = opened.checkpoint.progress
        yield f"- {last.step:,} updates, {last.tokens / 1e6:.3g} M tokens in windows of {train.seq_len}, {train.dtype},"
        yield f"  {last.seconds / 60:.1f} minutes; {train.optim.title} at {train.optim.lr:g}, seed {train.seed}."
        yield f"- Text: {_as_written(_text_name(train.data))}{_held_out(opened.folder.path, train.data)}."
        metrics = [line for line in read_metrics(opened.folder.path) if "loss" not in line]
        found = [measured(line) for line in metrics if line["step"] == last.step][-1:]
        if config.recipe is not None and last.heldout is not None:  # metrics are in the stages' folders
            found = [("held-out", last.heldout)]
        if whole := _whole(opened.folder.path, last.step):
            yield f"- Held-out text: {whole}."
        for text, bits in found if not whole else []:
            yield f"- {text.capitalize()} bits per byte: {bits:.4f}."
        yield from _converted(opened.folder.path, last.tokens)
    else:
        yield "Nothing is known of it: the run's files hold weights alone."
    quoted = json.dumps(name)
    yield from (
        "",
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
    )
    trust = ", trust_remote_code=True" if remote else ""
    yield f"tokenizer = AutoTokenizer.from_pretrained({quoted}{trust})"
    yield f"model = AutoModelForCausalLM.from_pretrained({quoted}{trust})"
    yield 'print(tokenizer.decode(model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=50)[0]))'
    yield "```"
    if remote:
        yield from ("", "`import perspectron.interop.hf` (`pip install 'perspectron[hf]'`) in the place of")
        yield "`trust_remote_code=True` runs installed code, with native kernels, and none from this folder."


def _whole(run: Path, step: int) -> str:
    """The loss on all held-out text, as `train` wrote it at its end; "" if there is none, or it is of another step."""
    if not (run / HELDOUT).is_file():
        return ""
    found = read_json(run / HELDOUT, CheckpointError)
    try:
        return said(found) if found["step"] == step else ""
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{run / HELDOUT}: not what a training wrote; delete it") from None


def _converted(run: Path, tokens: int) -> Iterator[str]:
    """A line on the conversion that made this model: its teacher and, if finished, its cost; nothing without one."""
    if not (run / conversions.FILE).is_file():
        return
    notes = read_json(run / conversions.FILE, CheckpointError)
    try:
        teacher, (first, *_, last) = _as_written(_text_name(notes["config"]["teacher"])), notes["rows"]
        if (last["stage"], last["tokens"]) == (TEXT, tokens):
            yield f"- Converted from {teacher}, which has {first['bits_per_byte']:.4f} bits per byte on"
            yield f"  {first['measured']:,} held-out tokens, where this model has {last['bits_per_byte']:.4f}; with"
            yield f"  {sum(row['tokens'] for row in notes['rows']) / 1e6:.3g} M tokens in all its stages."
        else:
            yield f"- On the way of a conversion from {teacher}."
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{run / conversions.FILE}: not what a conversion wrote; delete it") from None


def _held_out(run: Path, data: str) -> str:
    """The share of a text's bytes that was held out, as the encoded text has it; "" where that is not at hand."""
    for folder in filter(is_encoded, filter(None, (str(run / "data"), data))):
        with contextlib.suppress(DataError):
            shards = open_shards(Path(folder), verify=False)
            sizes = {name: shards.split(name).text_bytes for name in shards.splits}
            return f", {sizes['heldout'] / max(1, sum(sizes.values())):.0%} of it held out"
    return ""


def _text_name(data: str) -> str:
    """The name of a text, without the folders on the machine that trained."""
    return data.rstrip("/").rpartition("/")[2] or "unknown"


def _as_written(text: str) -> str:
    """Text from a run's files, at most 200 characters, as inline code, so that none of it is Markdown or HTML."""
    line = escaped(text)[:200]
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"`{line}`"
