"""Folders of transformers and GGUF files, which `perspectron import` reads, as formats for the fuzzer."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.interop import foreign
from perspectron.util.config import dump
from tests.fuzz.formats import IMPORTED, SIZES, Format, digest


def imported(name: str, folder: Path) -> Format:
    """The format of this name in IMPORTED, with a sample in a new folder."""
    kind = name.removeprefix(IMPORTED)
    path, files = (
        folder,
        {"config.json": "json", "model.safetensors": "safetensors", "tokenizer.json": "json"},
    )
    if kind == "perspectron":
        _own(folder)
    elif kind == "gguf":
        path, files = _gguf(folder), {"model.gguf": "bytes"}
    else:
        from tests.foreign_models import saved, tokenizer

        saved(folder, kind, tokenizer())

    def read(path: Path) -> str:
        model, tokenizer, *_ = foreign.read(path)
        ids = tokenizer.encode("The quick brown fox's 1,234 naïve jumps")
        with torch.inference_mode():
            out = model(torch.tensor([ids[:7]]))
            model.hidden(torch.tensor([ids[7:8]]), out.state, consume_state=True)
        return digest(dump(model.config), model.state_dict(), out.logits, tokenizer.fingerprint, ids)

    return Format(name, folder, path, files, False, read)


def _gguf(folder: Path) -> Path:
    from tests.gguf_models import KINDS, folder_of, write

    folder.mkdir()
    with TemporaryDirectory() as place:
        write(folder / "model.gguf", folder_of("llama", Path(place)), "llama", KINDS.Q8_0)
    return folder / "model.gguf"


def _own(folder: Path) -> None:
    from perspectron.interop.hf import PerspectronConfig, PerspectronForCausalLM

    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["the quick brown fox jumps, and counts to 1234. " * 9], SIZES["vocab_size"])
    sizes = SIZES | {"vocab_size": tokenizer.vocab_size}
    model = PerspectronForCausalLM(PerspectronConfig.of(presets.get("perspective-tiny", **sizes)))
    model.save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
