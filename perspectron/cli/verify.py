"""`perspectron verify`."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from perspectron.cli.options import answer, open_model, say
from perspectron.cli.progress import Work

if TYPE_CHECKING:
    from perspectron.decode.verify import Way

NARROWER = {"avx512": ("avx2", "scalar"), "avx2": ("scalar",)}
"""Instruction sets to try beside the one in use."""
TORCH = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "scalar": {
        "ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Verify:
    """Check what a model's bits depend on, by generating one text in many ways.

    The text is generated alone and in batches of 1 to 64, with the prompt split anywhere, on one thread and two, with
    other instruction sets, and with experts in memory and streamed. Prints a digest for each and which differ. Batches,
    splits and streaming must not change a bit; if they do, the exit code is 1.

    Example: perspectron verify runs/letters
    """

    run: tyro.conf.Positional[Path]
    """Folder of a run, of one of its checkpoints, or of an artifact."""
    cache: str | None = None
    """Memory for the experts of a streamed artifact, such as 512M; the result is compared with all experts in
    memory."""
    here: bool = False
    """Skip the other instruction sets, each of which needs a process."""
    json: bool = False
    """Print one JSON object."""

    def __call__(self) -> int:
        from perspectron.decode import verify

        opened = open_model(self.run)
        with Work(f"verifying {self.run}"):
            ways = verify.ways(opened.model, opened.tokenizer)
        isa = verify.bits()["native"]
        with Work("other instruction sets"):
            for other in () if self.here else NARROWER.get(isa, ()):
                for together, digest in enumerate(_elsewhere(self.run, other)):
                    ways.append(verify.Way(bool(together), other, digest, False))
        if self.cache is not None:
            streamed = open_model(self.run, self.cache)
            for together in (False, True):
                digest = verify.digest(streamed.model, streamed.tokenizer, together=together)
                ways.append(verify.Way(together, f"experts in {self.cache}", digest, True))
        broken = [way for way in ways if way.promised and way.digest != _alone(ways, way.together).digest]
        fields = {"run": str(self.run), "bits": verify.bits(), "ways": [asdict(way) for way in ways]}
        lines = [line for together in (False, True) for line in _lines(ways, together)]
        answer(self.json, fields | {"holds": not broken}, *lines)
        if broken:
            said = f"{len(broken)} ways that should give the bits of the text alone do not"
            say(said)
        return int(bool(broken))


def _alone(ways: "list[Way]", together: bool) -> "Way":
    """The text with no other beside it."""
    return next(way for way in ways if way.together == together)


def _lines(ways: "list[Way]", together: bool) -> list[str]:
    """A line for each digest, and who has it."""
    known: dict[str, list[str]] = {}
    for way in ways:
        if way.together == together:
            known.setdefault(way.digest, []).append(way.name)
    title = "all rows in one step" if together else "each row in a step of its own"
    lines = [f"{title}:"]
    for number, (digest, names) in enumerate(known.items()):
        lines.append(f"  {digest[:16]}  {'differ: ' if number else ''}{', '.join(names)}")
    return lines


def _elsewhere(run: Path, isa: str) -> list[str]:
    """The digests of the text alone, one by one and together, from a process of another instruction set."""
    with _environment(TORCH[isa]), get_context("spawn").Pool(1) as pool:
        return pool.apply(digests, (run, isa))


def digests(run: Path, isa: str) -> list[str]:
    """The digests from this process, with native kernels of this instruction set."""
    import torch

    from perspectron import native, opening
    from perspectron.decode import verify

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if native.available():
        native.set_isa(isa)
    opened = opening.open_model(run)
    return [verify.digest(opened.model, opened.tokenizer, together=way) for way in (False, True)]


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """An environment with these variables set."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
