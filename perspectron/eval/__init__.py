"""Measuring models: held-out loss, and what general compressors make of the same bytes."""
