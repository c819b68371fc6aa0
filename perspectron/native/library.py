"""Finding and loading the shared library of the native kernels.

It lies in lib/, where the wheel installed it or `python -m perspectron.native` built it. A source tree without
one takes that of an installed copy. Where the sources are at hand, a library built from others is refused.
"""

import ctypes
import hashlib
import importlib.metadata
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
NAME = "lib/_native.so"
SOURCES = (".cpp", ".h", ".inl")
BUILD = "python -m perspectron.native"

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "pspx_digest": ([], ctypes.c_char_p),
    "pspx_isa": ([], ctypes.c_char_p),
    "pspx_set_isa": ([ctypes.c_char_p], _INT),
    "pspx_forked": ([], None),
    "pspx_poison": ([_INT], None),
    "pspx_linear": ([_POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT, _LONG, _POINTER, _INT], None),
    "pspx_swiglu": (
        [_POINTER, _LONG, _POINTER, _LONG, _LONG, *[_POINTER] * 6, _INT, _POINTER, _INT],
        None,
    ),
    "pspx_route": (
        [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, *[_POINTER] * 3],
        None,
    ),
    "pspx_scan": ([*[_POINTER] * 7, *[_LONG] * 5, _INT], None),
    "pspx_entropy": ([_POINTER, _INT, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT], None),
    "pspx_entropy_backward": (
        [_POINTER, _INT, _POINTER, _LONG, _LONG, _POINTER, ctypes.c_double, _POINTER, _INT],
        None,
    ),
    "pspx_norm_rows": ([_POINTER, _POINTER, ctypes.c_double, _LONG, _LONG, _POINTER, _POINTER, _INT], None),
    "pspx_norm_backward": ([*[_POINTER] * 4, *[_LONG] * 3, *[_POINTER] * 2, _INT], None),
    "pspx_gated": ([_POINTER, _POINTER, _INT, _LONG, _POINTER, _INT], None),
    "pspx_gated_backward": ([*[_POINTER] * 3, _INT, _LONG, *[_POINTER] * 2, _INT], None),
    "pspx_gelu": ([_POINTER, _INT, _LONG, _POINTER, _INT], None),
    "pspx_gelu_backward": ([_POINTER, _POINTER, _INT, _LONG, _POINTER, _INT], None),
    "pspx_shifted": ([*[_POINTER] * 4, *[_LONG] * 4, _POINTER, _INT], None),
    "pspx_shifted_backward": ([*[_POINTER] * 4, *[_LONG] * 5, *[_POINTER] * 4, _INT], None),
    "pspx_decayed": ([_POINTER, _POINTER, _INT, _LONG, _POINTER, _POINTER, _INT], None),
    "pspx_decayed_backward": ([*[_POINTER] * 4, _INT, _LONG, *[_POINTER] * 2, _INT], None),
    "pspx_convolve": ([*[_POINTER] * 4, *[_LONG] * 4, _POINTER, _INT], None),
    "pspx_convolve_backward": ([*[_POINTER] * 5, *[_LONG] * 4, *[_POINTER] * 3, _INT], None),
    "pspx_scan_backward": ([*[_POINTER] * 6, *[_LONG] * 6, *[_POINTER] * 5, _INT], None),
    "pspx_memory": ([*[_POINTER] * 6, *[_LONG] * 6, *[_POINTER] * 2, _INT], None),
    "pspx_memory_backward": ([*[_POINTER] * 8, *[_LONG] * 6, *[_POINTER] * 7, _INT], None),
    "pspx_attention": (
        [*[_POINTER] * 3, _INT, _POINTER, *[_LONG] * 6, ctypes.c_double, *[_POINTER] * 2, _INT],
        None,
    ),
    "pspx_attention_after": ([*[_POINTER] * 4, *[_LONG] * 7, ctypes.c_double, _POINTER, _INT], None),
    "pspx_attention_backward": (
        [*[_POINTER] * 3, _INT, _POINTER, *[_LONG] * 6, ctypes.c_double, *[_POINTER] * 6, _INT],
        None,
    ),
    "pspx_turn": ([_POINTER, _INT, *[_POINTER] * 2, *[_LONG] * 4, _POINTER, _INT], None),
    "pspx_tape": ([_POINTER, _LONG, _POINTER, _INT], _LONG),
    "pspx_read": ([_POINTER, _LONG, _INT], ctypes.c_uint64),
    "pspx_peak": ([_INT], ctypes.c_double),
}


class Loaded(NamedTuple):
    """The library, or the reason why there is none."""

    library: ctypes.CDLL | None
    reason: str | None


@cache
def load() -> Loaded:
    """Look once."""
    digest = sources_digest()
    problem = f"not built (to build it: {BUILD})"
    if digest is None:
        problem = "not in this installation (no C++ compiler worked when it was made)"
    for path in _places():
        if not path.is_file():
            continue
        try:
            library = ctypes.CDLL(str(path))
            for name, (arguments, result) in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, result
        except (OSError, AttributeError) as error:
            problem = f"{path} cannot be loaded ({error})"
            continue
        if digest is None or library.pspx_digest().decode() == digest:
            if _forked:
                library.pspx_forked()
            return Loaded(library, None)
        problem = f"{path} was built from other sources (to build it again: {BUILD})"
    return Loaded(None, problem)


def _note_fork() -> None:
    global _forked
    _forked = True


_forked = False  # since this module was imported; once the library is loaded, it sees forks itself
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def sources_digest() -> str | None:
    """The digest of the C++ sources beside this file, formed as CMakeLists.txt forms it; None where they are not at
    hand."""
    build = HERE.parents[1] / "CMakeLists.txt"
    files = sorted(file for file in (HERE / "csrc").glob("*") if file.suffix in SOURCES)
    if not files or not build.is_file():
        return None
    digests = (hashlib.sha256(file.read_bytes()).hexdigest() for file in (*files, build))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _places() -> list[Path]:
    places = [HERE / NAME]
    try:
        installed = importlib.metadata.distribution("perspectron")
    except importlib.metadata.PackageNotFoundError:
        return places
    return [*places, Path(str(installed.locate_file(f"perspectron/native/{NAME}")))]
