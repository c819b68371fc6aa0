"""`perspectron export`."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from perspectron.cli.options import answer, needs, open_model
from perspectron.cli.progress import Work
from perspectron.config import require


@dataclass(frozen=True)
class Export:
    """Write a trained model for other tools: a folder for transformers.

    The folder holds weights, tokenizer, a model card with the run's numbers, and the model's code for those who have
    not installed perspectron (trust_remote_code=True).

    Example: perspectron export runs/letters --hf letters-hf
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run or of one of its checkpoints."""
    hf: Path | None = None
    """New folder for transformers' from_pretrained."""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        require(self.hf is not None, "hf", None, "given: what to write")
        assert self.hf is not None
        needs("transformers", "hf")
        from perspectron.hf import export

        with Work(f"writing {self.hf}"):
            opened = open_model(self.run)
            export.export(opened, self.hf)
        size = sum(file.stat().st_size for file in self.hf.rglob("*") if file.is_file())
        read = f'AutoModelForCausalLM.from_pretrained("{self.hf}", trust_remote_code=True)'
        return answer(
            self.json,
            {"hf": str(self.hf), "bytes": size},
            f"{self.hf}: {size / 1e6:.1f} MB; read it with {read}",
        )
