"""minGRU at one size."""

from perspectron.designs.mingru.mixer import MinGRUConfig
from perspectron.presets.frame import recurrence

recurrence(MinGRUConfig(), 360, "minGRU: gated averages", "arXiv 2410.01201")
