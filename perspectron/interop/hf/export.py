"""Export of a run as a folder of transformers. (`perspectron.interop.foreign` reads it back.)"""

import json
from pathlib import Path
from typing import Any

from perspectron.data import origin
from perspectron.data.template import tokens_of
from perspectron.data.tokenizer import Tokenizer
from perspectron.interop.hf import card, remote
from perspectron.interop.hf.back import put_back, widened
from perspectron.interop.hf.configuration import PerspectronConfig
from perspectron.interop.hf.tokenizer import fast_tokenizer
from perspectron.model.model import LanguageModel
from perspectron.opening import Opened
from perspectron.util.config import require
from perspectron.util.errors import CheckpointError
from perspectron.util.files import atomic, read_json, write_json
from perspectron.util.tensors import save_tensors
from perspectron.util.version import __version__

CONFIG, GENERATION = "config.json", "generation_config.json"


def export(opened: Opened, out: Path) -> str:
    """Write a run's model as a new folder that `from_pretrained` reads, with a card of the run's own numbers. An
    imported model is written in its family's format, beside its other files, and "" is returned. If that is
    not possible, the reason is returned, and the model is written as our class, with code for users without
    perspectron. ConfigError for an artifact in few bits, and if `out` exists; StorageError if it cannot be written."""
    opened.folder.of_run()
    require(not out.exists(), "hf", str(out), "a new folder")
    with atomic(out) as temporary:
        temporary.mkdir()
        came = opened.folder.path / origin.FOLDER
        weights = put_back(opened.model, came)
        if isinstance(weights, str):
            write(opened.model, opened.tokenizer, temporary, came)
        else:
            save_tensors(temporary / "model.safetensors", weights, {"format": "pt"})
            (temporary / "tokenizer.json").write_text(opened.tokenizer.to_str(), encoding="utf-8")
            for name, text in origin.files(came).items():
                if name == CONFIG and widened(weights, came):
                    text = _in_float32(text)
                if name != origin.WEIGHTS:
                    (temporary / name).parent.mkdir(exist_ok=True)
                    (temporary / name).write_text(text, encoding="utf-8")
        if (template := opened.template()) is not None:
            template.save(temporary)
        text = card.card(opened, out.name, remote=isinstance(weights, str))
        (temporary / "README.md").write_text(text, encoding="utf-8")
    return weights if isinstance(weights, str) else ""


def _in_float32(text: str) -> str:
    """The text of a config.json with "float32" as its dtype, so that weights which learned since are not rounded to
    what they came in."""
    values = {"dtype": "float32"} | json.loads(text)
    for part in (values, values.get("text_config")):
        names = [name for name in ("dtype", "torch_dtype") if isinstance(part, dict) and name in part]
        for name in names:
            part[name] = "float32"
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def write(model: LanguageModel, tokenizer: Tokenizer, out: Path, came: Path | None = None) -> None:
    """Write a model as our class, all files but the card and the template, into a folder that exists. came: the folder
    of the files that it was imported with, if it was: its sampling options and the roles of its tokens are kept."""
    special = tokenizer.specials
    first, ends = [*special.start, None][0], sorted(special.stops)
    pad = first if special.pad is None else special.pad
    ids = {
        "bos_token_id": first,
        "eos_token_id": ends if len(ends) > 1 else [*ends, None][0],
        "pad_token_id": pad,
    }
    described = PerspectronConfig.of(
        model.config, architectures=["PerspectronForCausalLM"], end_of_text=special.reset, **ids
    )
    described.auto_map = remote.auto_map()
    described.perspectron_version = __version__
    described.dtype = str(model.dtype).removeprefix("torch.")
    described.save_pretrained(out)
    options = dict[str, Any]()
    if came is not None and (came / GENERATION).is_file():
        options = read_json(came / GENERATION, CheckpointError)
    # Not by transformers, which writes no sampling options without `do_sample`, though it reads them.
    write_json(out / GENERATION, options | ids)
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    save_tensors(out / "model.safetensors", weights, {"format": "pt"})
    roles = {} if came is None else tokens_of(came)
    made = fast_tokenizer(tokenizer, max_length=model.config.positions or None, roles=roles)
    made.save_pretrained(out)
    for name, text in remote.sources(model.config).items():
        (out / name).write_text(text, encoding="utf-8")
