"""A step in onnxruntime beside PyTorch's, of the small presets whose mixers can be exported; each file's greedy tokens
are compared before it is timed, one thread each.

python benchmarks/in_onnx.py --json results/in_onnx.json
"""

import tempfile
from pathlib import Path

import common
import torch

from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.interop import onnx
from perspectron.model.model import build

PRESETS = (
    "perspective-tiny-dense",
    "perspective2-tiny",
    "gla-tiny",
    "ssd-tiny",
    "transformer-tiny",
    "gpt2-tiny",
)
TESTS = ("tests/interop/test_onnx.py",)


def main() -> None:
    args = common.parser(__doc__ or "", threads=1, repeats=1).parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    tokenizer = Tokenizer.train(["the quick brown fox jumps over the lazy dog. " * 9], 300)
    report = common.Report(
        args, TESTS, dtype="float32", shapes="the presets' own, a vocabulary of 512, one row"
    )
    found: dict[str, onnx.Report] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PRESETS[:1] if args.quick else PRESETS:
            model = build(presets.get(name, vocab_size=512), 0)
            found[name] = onnx.export(model, tokenizer, Path(folder) / "model.onnx")
    report.table(
        ["preset", "greedy tokens that are equal", "ms in onnxruntime", "in PyTorch", "MB"],
        [
            [name, str(f.tokens), f"{f.ms:.2f}", f"{f.torch_ms:.2f}", f"{f.bytes / 1e6:.1f}"]
            for name, f in found.items()
        ],
    )
    report.finish(dict(found))


if __name__ == "__main__":
    main()
