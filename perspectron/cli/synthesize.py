"""`perspectron synthesize`."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

from perspectron import presets
from perspectron.cli.options import Encoding, Json, Sets, answer, assignments
from perspectron.cli.progress import Work
from perspectron.data import Tokenizer, open_corpus, with_encoding
from perspectron.stream.synthetic import synthesize
from perspectron.util.config import one_of, require


@dataclass(frozen=True)
class Synthesize:
    """Write an artifact with random weights, to measure the cost of running a model at full size.

    Example: perspectron synthesize perspective-1t --experts 1 --out runs/1t

    Every routed layer has --experts distinct experts; the others are copies of these.
    """

    preset: tyro.conf.Positional[str]
    """One of the perspective presets with experts."""
    out: Path
    """Folder to write."""
    experts: int = 1
    """Distinct experts of each layer."""
    linear: Literal["2bit", "4bit", "int8"] = "2bit"
    """Format of the shared layers; the embedding is int8."""
    set: Sets = ()
    """Sizes of the preset to replace, as KEY=VALUE."""
    data: str = "stdlib"
    """Corpus from which the tokenizer learns."""
    encoding: Encoding = ""
    seed: int = 0
    """Seed of the weights."""
    json: Json = False

    def __call__(self) -> int:
        known = [name for name, preset in presets.PRESETS.items() if preset.design == "perspective"]
        config = presets.get(one_of(self.preset, known, "preset"), **assignments(self.set))
        require(not self.out.exists(), "out", str(self.out), "a new folder")
        require(self.seed >= 0, "seed", self.seed, "≥ 0")
        start = time.perf_counter()
        with Work(f"writing {self.out}"):
            header = synthesize(
                config,
                self.out,
                lambda: self._tokenizer(config.vocab_size),
                experts=self.experts,
                linear=self.linear,
                seed=self.seed,
            )
        written = sum(file.stat().st_size for file in self.out.rglob("*") if file.is_file())
        seconds = time.perf_counter() - start
        assert header.experts is not None
        fields = {"out": str(self.out), "bytes": written, "seconds": seconds}
        fields |= {"experts": asdict(header.experts), "about": header.about}
        line = f"{self.out}: {written / 1e9:.2f} GB in {seconds:.0f} s; {header.about}"
        return answer(self.json, fields, line)

    def _tokenizer(self, vocab_size: int) -> Tokenizer:
        documents = open_corpus(with_encoding(self.data, self.encoding)).documents("train")
        return Tokenizer.train((document.text for document in documents), vocab_size)
