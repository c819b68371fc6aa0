"""Gated delta rules, at one size each."""

from perspectron.designs.delta.gdn import GDNConfig
from perspectron.designs.delta.gdn2 import GDN2Config
from perspectron.designs.delta.kda import KDAConfig
from perspectron.presets.frame import recurrence

recurrence(GDNConfig(heads=4), 356, "Gated DeltaNet", "arXiv 2412.06464")
recurrence(KDAConfig(heads=4), 400, "Kimi Delta Attention", "arXiv 2510.26692")
recurrence(GDN2Config(heads=4), 316, "Gated DeltaNet-2", "arXiv 2605.22791")
