"""The HTTP server: what needs the extra `serve` is here alone."""
