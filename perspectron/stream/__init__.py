"""Experts on disk: their file, and a cache that reads them while the model computes."""

from perspectron.stream.format import ExpertLayout, Header, Shard
from perspectron.stream.shards import ShardFile
from perspectron.stream.write import CloseTo, SameAs, write_layer

__all__ = ["CloseTo", "ExpertLayout", "Header", "SameAs", "Shard", "ShardFile", "write_layer"]
