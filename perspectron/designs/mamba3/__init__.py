"""Mamba3."""
