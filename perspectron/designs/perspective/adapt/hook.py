"""Decoding with an adapter for each row."""

from pathlib import Path

import torch

from perspectron.decode.conversation import Conversation
from perspectron.decode.processors import Hook
from perspectron.decode.row import Row
from perspectron.designs.perspective.adapt.adapter import Adapter
from perspectron.designs.perspective.adapt.learner import AdaptConfig, Learner
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState


class Adapting(Hook):
    """Hook that gives each row an adapter of its own. path: a saved adapter to start from; None: a new one. learns: the
    adapter reads the row's prompt and learns from it. saves: traces are carried along, to be saved with it."""

    name = "adapter"
    shares_prefixes = False

    def __init__(self, model: LanguageModel, path: Path | None, *, learns: bool, saves: bool) -> None:
        self.model, self.path, self.learns, self.saves = model, path, learns, saves
        self.adapter: Adapter | None = None
        """The adapter of the row that began last."""

    def begin(self, row: Row) -> "_Adapted":
        special = row.vocabulary.specials
        first = max(1, len(row.unread) - len(special.bare(row.unread)))  # the prefix teaches nothing
        rest = row.unread[first:]
        with torch.inference_mode(False):
            state = self.model.init_state(1) if row.state is None else row.state
            talk = Conversation(state, [row.unread[:first]], [row.recent], [row.drawn])
            adapter = Adapter(self.model) if self.path is None else Adapter.load(self.path, self.model)
            config = AdaptConfig.of_text(len(rest))
            learner = Learner(self.model, adapter, config, talk, special, fresh=row.fresh)
            if self.learns and rest:
                learner.read(rest)
                row.unread, row.fresh = row.unread[-1:], False
            row.state = learner.conversation(traces=self.saves).state
        self.adapter = adapter
        return _Adapted(adapter)

    def save(self, path: Path) -> None:
        """Write the adapter of the only row. StorageError."""
        assert self.adapter is not None
        self.adapter.save(path)


class _Adapted(Hook):
    """The hook of one row, with its adapter."""

    name, shares_prefixes = Adapting.name, Adapting.shares_prefixes

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    def end(self, state: LMState) -> LMState:
        """The state without the adapter, which keeps its traces."""
        return self.adapter.detach(state)
