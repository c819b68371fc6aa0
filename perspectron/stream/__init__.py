"""Models larger than memory: artifacts on disk, and a cache that reads experts while the model computes."""
