"""Kernels for a GPU, in Triton, for `pdr.scan`, `gla.scan` and `delta`. Only `kernels`,
`delta` and `delta_gradients` import triton, when one is chosen."""
