"""Kernels for a GPU, in Triton: the memories of `pdr`, `gla` and `delta`, and packed matrices. Only the modules of
kernels import triton, when one is chosen."""
