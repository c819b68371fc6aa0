"""Kernels for a GPU, in Triton, for `pdr.scan`, `gla.scan` and `delta`. Only `kernels` and `delta` import triton, when
one is chosen."""
