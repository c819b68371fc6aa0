"""Evaluation: held-out loss beside general compressors, and suites for other properties."""
