"""Kernels start with poisoned scratch memory, as in tests/native."""

from tests.native.conftest import poisoned_scratch, use_isa  # noqa: F401
