"""`perspectron train --state`: a memory that is trained, at the terminal."""

import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from perspectron.cli.console import progress
from perspectron.cli.options import print_json
from perspectron.cli.progress import Work
from perspectron.decode.session import Session
from perspectron.opening import open_model
from perspectron.presets import rates
from perspectron.train import memory
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.prepare import prepare, training_batches
from perspectron.util.config import require
from perspectron.util.machine import memory_kept


def tune(out: Path, train: TrainConfig, kinds: str, given: frozenset[str], *, as_json: bool) -> int:
    """Train a memory and write its file; the command's exit code. given: options that were typed; the others have
    default values that were found to be good. ConfigError: a model without a matrix memory, a file that is there."""
    chosen = memory.kinds_of(kinds)
    require(not out.exists(), "out", str(out), "a new file")
    opened = open_model(Path(train.init))
    run = opened.folder.of_run("init")
    steps = train.steps if "steps" in given else memory.STEPS
    optim = replace(
        train.optim,
        lr=train.optim.lr if "lr" in given else memory.RATES["offset"],
        warmup=train.optim.warmup if "warmup" in given else rates.warmup(steps) // 4,
        beta2=train.optim.beta2 if "beta2" in given else memory.BETA2,
    )
    config = RunConfig(run.model, replace(train, steps=steps, optim=optim))
    memory.Memory(opened.model, chosen)  # kinds that the model lacks are errors before the text is read
    console = progress()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tune-", dir=out.parent) as scratch, memory_kept():
        with Work("reading and encoding the text") as work:
            tokenizer, shards, summary = prepare(Path(scratch), config, tell=work.read)
        training_batches(config, shards)  # too little text is an error before anything else
        console.print(summary)
        with Work("training the memory", quiet=0.5) as work:

            def tell(line: dict[str, float]) -> None:
                work.tell(int(line["step"]), steps)
                if as_json:
                    print_json(line)

            start, about = memory.train_memory(opened.model, tokenizer, shards, config, chosen, tell)
        begun = Session(opened.model, tokenizer, start=start)  # a conversation of which nothing is read yet
        begun.save(out, extra={"memory": asdict(about)})
    if as_json:
        print_json({"out": str(out), "bytes": out.stat().st_size, **asdict(about)})
    else:
        console.print(
            f"{out}: {about.numbers:,} numbers, {out.stat().st_size:,} bytes; held-out bits per byte "
            f"{about.before:.3f} → {about.after:.3f}"
        )
    return 0
