"""A step in onnxruntime beside PyTorch's, of the small presets whose mixers can be exported; each file's greedy tokens
are compared before it is timed, one thread each.

python -m benchmarks.in_onnx
"""

import tempfile
from pathlib import Path

import torch

from perspectron import onnx, presets
from perspectron.data import Tokenizer
from perspectron.model import build

PRESETS = (
    "perspective-tiny-dense",
    "perspective2-tiny",
    "gla-tiny",
    "ssd-tiny",
    "transformer-tiny",
    "gpt2-tiny",
)


def main() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    tokenizer = Tokenizer.train(["the quick brown fox jumps over the lazy dog. " * 9], 300)
    print("| preset | greedy tokens that are equal | onnxruntime | PyTorch | file |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in PRESETS:
            model = build(presets.get(name, vocab_size=512), 0)
            found = onnx.export(model, tokenizer, Path(folder) / "model.onnx")
            times = f"{found.ms:.2f} | {found.torch_ms:.2f}"
            print(f"| `{name}` | {found.tokens} | {times} | {found.bytes / 1e6:.1f} MB |", flush=True)


if __name__ == "__main__":
    main()
