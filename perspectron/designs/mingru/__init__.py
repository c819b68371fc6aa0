"""Mingru."""
