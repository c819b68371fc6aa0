"""`python -m tests.hf`: for every design, small, or presets that are named, the share of checks that pass, and what
fails. `--table` prints what of transformers' own tests they are."""

import argparse
import time
import warnings
from pathlib import Path

import torch
import transformers

from perspectron import presets
from perspectron.data import Tokenizer
from tests.hf.subject import small, subject
from tests.hf.upstream import CHECKS, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hf", description=__doc__)
    parser.add_argument("names", nargs="*", help="presets at their own size (default: every design, small)")
    parser.add_argument(
        "--table", action="store_true", help="print the table of docs/reference/transformers.md"
    )
    given = parser.parse_args()
    if given.table:
        print(table(), end="")
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    text = [path.read_text() for path in sorted(Path(__file__).parents[1].glob("test_m*.py"))]
    tokenizer = Tokenizer.train(text, 300)
    for name in given.names or presets.DESIGNS:
        started = time.perf_counter()
        config = presets.get(name, vocab_size=300) if given.names else small(name)
        s, failed = subject(config, tokenizer), []
        for check in CHECKS:
            try:
                check(s)
            except Exception as error:
                failed.append(f"{check.__name__}: {type(error).__name__}: {str(error)[:160]}")
        share = f"{len(CHECKS) - len(failed)}/{len(CHECKS)}"
        print(f"{name:28} {share} {time.perf_counter() - started:5.1f} s", *failed, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
