"""Kernels for a GPU, in Triton, for `pdr.scan`, `gla.scan` and `packed`. Only `kernels` and `packed_kernels` import triton,
when one is chosen."""
