"""Quantisation of trained models into packed matrices."""
