"""A Perspective that trains in a second, and such a training."""

SIZES = [
    "d_model=32",
    "layers=4",
    "hidden=32",
    "rank=8",
    "heads=2",
    "kv_heads=1",
    "window=16",
    "vocab_size=300",
]
TRAIN = [
    "--batch-size",
    "2",
    "--seq-len",
    "32",
    "--eval-every",
    "0",
    "--save-every",
    "0",
    "--eval-tokens",
    "64",
]
