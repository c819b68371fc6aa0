"""Hgrn2."""
