"""Comparisons of designs: planned at equal size, trained, measured and reported."""
