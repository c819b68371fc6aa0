"""The stages of `benchmarks/gpu.py`: each module has ABOUT, LIMIT (seconds) and `units(place)`."""
