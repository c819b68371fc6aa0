"""Experts on disk: their file, and a cache that reads them while the model computes."""
