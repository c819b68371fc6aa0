"""HGRN2 at one size."""

from perspectron.designs.hgrn2.mixer import HGRN2Config
from perspectron.presets.frame import recurrence

recurrence(HGRN2Config(heads=4), 448, "HGRN2: writes as much as it forgets", "arXiv 2404.07904")
