"""Designs side by side: planned to match, trained, measured, reported."""
