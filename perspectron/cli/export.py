"""`perspectron export`."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from perspectron.cli.options import Json, answer, needs, open_model, say
from perspectron.cli.progress import Work
from perspectron.opening import describe
from perspectron.util.config import require
from perspectron.util.errors import CheckpointError
from perspectron.util.files import read_json


@dataclass(frozen=True)
class Export:
    """Write a trained model for other tools: a folder for transformers, or a file for ONNX runtimes.

    The folder holds weights, tokenizer, a model card with the run's numbers, and the model's code for those who have
    not installed perspectron (trust_remote_code=True).

    Example: perspectron export runs/letters --hf letters-hf

    One step of the model, with the state as input and output, checked against PyTorch over 200 tokens: perspectron
    export runs/letters --onnx letters.onnx
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run or of one of its checkpoints."""
    hf: Path | None = None
    """New folder for transformers' from_pretrained."""
    onnx: Path | None = None
    """New file for ONNX runtimes: of every mixer but DRM and latent attention, without experts."""
    context: int | None = None
    """With --onnx: number of tokens that full attention looks back on (default: 1024, or the learned
    positions if there are fewer)."""
    json: Json = False

    def __call__(self) -> int:
        one = (self.hf is None) != (self.onnx is None)
        require(one, "hf, onnx", None if self.hf is None else "both", "one of them: what to write")
        require(self.context is None or self.hf is None, "context", self.context, "left out with --hf")
        describe(self.run).of_run()  # an artifact is refused before it is loaded
        return self._hf(self.hf) if self.hf is not None else self._onnx(self.onnx or Path())

    def _hf(self, out: Path) -> int:
        needs("transformers", "hf")
        require(not out.exists(), "hf", str(out), "a new folder")  # said before transformers is imported
        from perspectron.data import origin
        from perspectron.interop.hf import export

        opened = open_model(self.run)
        with Work(f"writing {out}"):
            why = export.export(opened, out)
        if why and (opened.folder.path / origin.FOLDER / "config.json").is_file():
            say(f"in a class of perspectron, not as it was imported: {why}")
        if not why and "vision_config" in read_json(out / "config.json", CheckpointError, infinite=True):
            say(
                "text alone: an import leaves out the weights of images, which transformers now draws at random"
            )
        size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
        read = f'AutoModelForCausalLM.from_pretrained("{out}"{", trust_remote_code=True" if why else ""})'
        return answer(
            self.json,
            {"hf": str(out), "bytes": size},
            f"{out}: {size / 1e6:.1f} MB; read it with {read}",
        )

    def _onnx(self, out: Path) -> int:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            needs(package, "onnx")
        require(not out.exists(), "onnx", str(out), "a new file")
        from perspectron.interop import onnx

        opened = open_model(self.run)
        with Work(f"writing {out}"):
            report = onnx.export(opened.model, opened.tokenizer, out, context=self.context)
        return answer(
            self.json,
            {"onnx": str(out), "bytes": report.bytes, "checked_tokens": report.tokens}
            | {"ms_per_step": report.ms, "torch_ms_per_step": report.torch_ms},
            f"{out}: {report.bytes / 1e6:.1f} MB; {report.tokens} greedy tokens are those of PyTorch, at "
            f"{report.ms:.2f} ms a step (PyTorch: {report.torch_ms:.2f}), on one thread",
        )
