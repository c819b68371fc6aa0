"""Training: the loop, the optimizer, and checkpoints from which it resumes bit for bit.

The package can be called: `perspectron.train(data)` is `perspectron.training.train`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *data: Any, **options: Any) -> Any:
        """`perspectron.training.train`, which stands above this package."""
        return import_module("perspectron.training").train(*data, **options)


sys.modules[__name__].__class__ = _Callable
