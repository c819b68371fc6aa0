"""Suites of Perspective."""
