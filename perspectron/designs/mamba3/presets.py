"""Mamba-3 at one size."""

from perspectron.designs.mamba3.mixer import Mamba3Config
from perspectron.presets.frame import recurrence

recurrence(Mamba3Config(head_dim=32, state=64), 304, "Mamba-3: rotating keys", "arXiv 2603.15569")
