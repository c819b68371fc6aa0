"""Report of a comparison, made from its results.json alone."""
