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

_KINDS = {
    "p": ctypes.c_void_p, "i": ctypes.c_int, "l": ctypes.c_int64, "d": ctypes.c_double, "s": ctypes.c_char_p,
    "u": ctypes.c_uint64,
}  # fmt: skip
# The type of each function's result, if it has one, and of its arguments.
_SIGNATURES = {
    "digest": "s:", "isa": "s:", "set_isa": "i:s", "forked": ":", "poison": ":i", "linear": ":pllppilpi",
    "swiglu": ":plpllppppppipi", "route": ":pllpplpplppp", "scan": ":pppppppllllli", "entropy": ":pipllppi",
    "entropy_backward": ":pipllpdpi", "norm_rows": ":ppdllppi", "norm_backward": ":pppplllppi", "gated": ":ppilpi",
    "gated_backward": ":pppilppi", "gelu": ":pilpi", "gelu_backward": ":ppilpi", "shifted": ":ppppllllpi",
    "shifted_backward": ":pppplllllppppi", "decayed": ":ppilppi", "decayed_backward": ":ppppilppi",
    "convolve": ":ppppllllpi", "convolve_backward": ":pppppllllpppi", "scan_backward": ":ppppppllllllpppppi",
    "memory": ":ppppppllllllppi", "memory_backward": ":ppppppppllllllpppppppi", "attention": ":pppiplllllldppi",
    "attention_after": ":ppppllllllldpi", "attention_backward": ":pppiplllllldppppppi", "turn": ":pippllllpi",
    "tape": "l:plpi", "read": "u:pli", "peak": "d:i",
}  # fmt: skip


class Loaded(NamedTuple):
    """The library, or the reason why there is none."""

    library: ctypes.CDLL | None
    reason: str | None


@cache
def load() -> Loaded:
    """Find and load the library, once for all calls."""
    digest = sources_digest()
    problem = f"not built (to build it: {BUILD})"
    if digest is None:
        problem = "not in this installation (no C++ compiler worked when it was made)"
    for path in _places():
        if not path.is_file():
            continue
        try:
            library = ctypes.CDLL(str(path))
            for name, kinds in _SIGNATURES.items():
                function, (result, arguments) = getattr(library, f"pspx_{name}"), kinds.split(":")
                function.argtypes, function.restype = [_KINDS[x] for x in arguments], _KINDS.get(result)
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
