"""Rooms that a call goes through: python benchmarks/stays.py RUN

A room is a folder of the package, or a module beside them. A stay begins where a call enters a room from another one;
returning is none. What stands in `util` counts as part of its caller's room. Counted are opening a folder and
generating from it, once each, after a first time that imports what they need.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import perspectron
from perspectron.decode.generate import generate
from perspectron.opening import open_model

PACKAGE = Path(perspectron.__file__).parent


def room(file: str) -> str:
    """The room of a source file; "" for `util` and for what is not of the package."""
    path = Path(file)
    if not path.is_relative_to(PACKAGE):
        return ""
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if name == "util" else name


def stays(call: Callable[[], object]) -> Counter[tuple[str, str]]:
    """How often each room was entered from another, by the function that was called."""
    entered, rooms = Counter[tuple[str, str]](), [""]

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            here = room(frame.f_code.co_filename) or rooms[-1]
            if here != rooms[-1]:
                entered[here, frame.f_code.co_qualname] += 1
            rooms.append(here)
        elif event == "return" and len(rooms) > 1:
            rooms.pop()

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--names", action="store_true", help="print what was called")
    options = parser.parse_args()
    opened = open_model(options.run)
    calls: dict[str, Callable[[], object]] = {
        "opening": lambda: open_model(options.run),
        "generate": lambda: generate(opened.model, opened.tokenizer, ["import "], max_tokens=8),
    }
    for name, call in calls.items():
        call()
        entered = stays(call)
        rooms = Counter[str]()
        for (where, _), count in entered.items():
            rooms[where] += count
        print(f"{name}: {entered.total()} stays;", ", ".join(f"{r} {n}" for r, n in rooms.most_common()))
        if options.names:
            for (where, function), count in entered.most_common():
                print(f"  {count:4} {where}: {function}")


if __name__ == "__main__":
    main()
