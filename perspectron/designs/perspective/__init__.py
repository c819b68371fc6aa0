"""Perspective."""
