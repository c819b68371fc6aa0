"""Models that train in a second, and such trainings."""

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
"""Of a Perspective."""
PLAIN = [
    "--preset",
    "transformer-tiny",
    "--set",
    "d_model=32",
    "layers=1",
    "heads=2",
    "hidden=32",
    "vocab_size=300",
]
"""A transformer."""
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
