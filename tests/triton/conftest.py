"""Triton's interpreter, which runs kernels on a CPU: asked for before they are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
