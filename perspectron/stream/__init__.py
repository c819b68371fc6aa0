"""Running a compressed model whose experts are read from disk as they are needed."""
