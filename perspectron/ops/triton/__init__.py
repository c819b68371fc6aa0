"""Kernels for a GPU, in Triton, for `pdr.scan`, `gla.scan` and `packed`. Only the modules of kernels import triton,
when one is chosen."""
