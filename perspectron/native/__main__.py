"""`python -m perspectron.native`: build the library in place, in a source tree; needs CMake and a C++ compiler."""

import subprocess
import sys
from pathlib import Path

from perspectron import native

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Build the library and install it in place; return the exit code."""
    if not (ROOT / "CMakeLists.txt").is_file():
        print(f"{ROOT} is no source tree of perspectron: reinstall the package instead", file=sys.stderr)
        return 2
    build = str(ROOT / "build" / "native")
    for command in (
        ["cmake", "-S", str(ROOT), "-B", build],
        ["cmake", "--build", build, "--parallel", "2"],
        ["cmake", "--install", build, "--prefix", str(ROOT)],
    ):
        try:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{' '.join(command)}: {error}", file=sys.stderr)
            return 1
    print(native.reason() or f"built; instruction set: {native.isa()}")
    return 0 if native.available() else 1


if __name__ == "__main__":
    sys.exit(main())
