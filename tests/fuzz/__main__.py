"""`python -m tests.fuzz`: read mutants of every file that perspectron reads, and say what came of it.

Example: python -m tests.fuzz --mutants 100000 --jobs 2 --out table.md
"""

import argparse
import contextlib
import itertools
import secrets
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.fuzz.formats import FORMATS
from tests.fuzz.run import HEAD, whole


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=1000, help="of each format (%(default)s)")
    parser.add_argument(
        "--formats", nargs="*", default=FORMATS, choices=FORMATS, help="all of them when left out"
    )
    parser.add_argument("--seed", type=int, help="of the mutants (drawn, and printed, when left out)")
    parser.add_argument("--jobs", type=int, default=1, help="formats at once (%(default)s)")
    parser.add_argument("--out", type=Path, help="file for the table, as Markdown")
    args = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    rows, failed = [HEAD], False
    with contextlib.ExitStack() as stack:
        each: Any = map
        if args.jobs > 1:
            each = stack.enter_context(ProcessPoolExecutor(args.jobs, get_context("spawn"))).map
        for outcome in each(whole, args.formats, itertools.repeat(args.mutants), itertools.repeat(seed)):
            rows.append(outcome.row())
            print(outcome.row(), flush=True)
            for failure in outcome.failures[:20]:
                failed = True
                print(f"  {outcome.name}: {failure}", flush=True)
            if args.out is not None:
                args.out.write_text("\n".join(rows) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
