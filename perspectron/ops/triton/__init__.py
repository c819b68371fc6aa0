"""Kernels for a GPU, in Triton, for `pdr.scan` and `gla.scan`. Only `kernels` imports triton, when one is chosen."""
