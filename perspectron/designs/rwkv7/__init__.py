"""Rwkv7."""
