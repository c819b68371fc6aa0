"""Experts on disk: their file, and a cache that reads them while the model computes."""

from perspectron.stream.cache import Counters, ExpertSource, ShardCache
from perspectron.stream.format import ExpertLayout, Header, Shard
from perspectron.stream.shards import ShardFile
from perspectron.stream.write import CloseTo, SameAs, write_layer

__all__ = [
    "CloseTo",
    "Counters",
    "ExpertLayout",
    "ExpertSource",
    "Header",
    "SameAs",
    "Shard",
    "ShardCache",
    "ShardFile",
    "write_layer",
]
