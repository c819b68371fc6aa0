"""Evidence for claims: counted from built models, tried on small ones, read from trained ones."""
