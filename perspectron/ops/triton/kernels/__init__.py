"""The modules that import triton, of kernels alone; others import them when kernels are chosen."""
