"""Learning while reading: an adapter of the gates for each conversation, and how its gradient is estimated
(docs/designs/perspective.md#adaptation)."""

from perspectron.designs.perspective.adapt.adapter import Adapter, AdapterConfig, merge
from perspectron.designs.perspective.adapt.hook import Adapting
from perspectron.designs.perspective.adapt.learner import AdaptConfig, Learner, Report

__all__ = ["AdaptConfig", "Adapter", "AdapterConfig", "Adapting", "Learner", "Report", "merge"]
