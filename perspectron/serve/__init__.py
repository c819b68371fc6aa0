"""Serving many conversations at once: the engine, and the web server around it."""
