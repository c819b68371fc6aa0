"""Delta."""
