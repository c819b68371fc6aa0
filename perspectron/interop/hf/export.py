"""A run as a folder of transformers. (`perspectron.interop.foreign` reads it back.)"""

from pathlib import Path

from transformers import GenerationConfig

from perspectron.data.tokenizer import Tokenizer
from perspectron.interop.hf import card, remote
from perspectron.interop.hf.configuration import PerspectronConfig
from perspectron.interop.hf.tokenizer import fast_tokenizer
from perspectron.model.model import LanguageModel
from perspectron.opening import Opened
from perspectron.util.config import require
from perspectron.util.files import atomic
from perspectron.util.tensors import save_tensors
from perspectron.util.version import __version__


def export(opened: Opened, out: Path) -> None:
    """Write a run's model as a new folder that `from_pretrained` reads: weights, config, tokenizer, chat template
    if it has one, code for those who have not installed us, and a card with the run's own numbers.
    ConfigError for an artifact in few bits, and where `out` exists; StorageError where it cannot be written."""
    opened.folder.of_run()
    require(not out.exists(), "hf", str(out), "a new folder")
    with atomic(out) as temporary:
        temporary.mkdir()
        write(opened.model, opened.tokenizer, temporary)
        if (template := opened.template()) is not None:
            template.save(temporary)
        (temporary / "README.md").write_text(card.card(opened, out.name), encoding="utf-8")


def write(model: LanguageModel, tokenizer: Tokenizer, out: Path) -> None:
    """All but the card, into a folder that exists."""
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
    GenerationConfig(**ids).save_pretrained(out)
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    save_tensors(out / "model.safetensors", weights, {"format": "pt"})
    fast_tokenizer(tokenizer, max_length=model.config.positions or None).save_pretrained(out)
    for name, text in remote.sources(model.config).items():
        (out / name).write_text(text, encoding="utf-8")
