"""Weights in few bits."""
