"""`python -m tests.fuzz.memory`: files of tensors that claim much or hold much, each read in a process of its own, and
the memory that reading took beside what is promised: the file's size and ROOM.

A line of JSON for each case: its name, bytes of its files, bytes that reading took, seconds of a processor, what was
said.
"""

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from itertools import count, repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import perspectron
from perspectron.data import Tokenizer
from perspectron.decode.session import Session
from perspectron.interop import foreign
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.mixer import mixers
from perspectron.model.narrow import SCALE
from perspectron.model.state import load_state, save_state
from perspectron.stream.reader import ShardFile
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.util.errors import PerspectronError
from perspectron.util.files import MAX_JSON
from tests.fuzz.mutate import header_of, with_header
from tests.states import sealed
from tests.waiting import PATIENCE

ROOM = 64 << 20
BIG = 160 << 20  # bytes
Reader = Callable[[], object]


class Case(NamedTuple):
    """make: writes the files. ready: does all that comes before reading them."""

    make: Callable[[Path], None]
    ready: Callable[[Path], Reader]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak() -> int:
    """The most bytes that were resident since `forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def forget() -> int:
    """Let `peak` begin anew; the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def small_model() -> Any:
    blocks = (BlockConfig(mixers()["ssd"].small, SwiGLUConfig(8)),)
    torch.manual_seed(0)
    return perspectron.build(ModelConfig("small", 300, 16, blocks))


def state_with(change: Callable[[dict[str, str], dict[str, Tensor]], object], dtype: Any = "full") -> Case:
    """A state with other metadata and tensors, under a digest that fits them."""

    def make(folder: Path) -> None:
        model, path = small_model(), folder / "s.state"
        with torch.inference_mode():
            save_state(path, model(torch.ones(2, 5, dtype=torch.int64)).state, model, dtype=dtype)
        header, tensors = header_of(path.read_bytes())[0]["__metadata__"], load_file(path)
        change(header, tensors)
        save_file(tensors, path, sealed(header, tensors))

    def ready(folder: Path) -> Reader:
        model = small_model()
        model.fingerprint()
        return lambda: load_state(folder / "s.state", model)

    return Case(make, ready)


def extra(items: Iterable[str], brackets: str = "[]", most: int = MAX_JSON - 5000) -> Case:
    """A state whose `extra` holds so much of these that its header has `most` bytes."""

    def change(header: dict[str, str], _: object) -> None:
        kept, size = list[str](), 0
        for item in items:
            size += len(json.dumps(item)) - 1  # quotes are escaped once more
            if size > most:
                break
            kept.append(item)
        header["extra"] = f'{{"x": {brackets[0]}{",".join(kept)}{brackets[1]}}}'

    return state_with(change)


def spread(header: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Codes of one column and scales of one row: multiplied, they would be a table of 8 GB."""
    name = next(name for name in tensors if name + SCALE in tensors)
    tensors[name] = torch.ones(46_000, 1, dtype=torch.int8)
    tensors[name + SCALE] = torch.ones(1, 46_000)


def many(count: int) -> Case:
    return state_with(lambda _, tensors: tensors.update({f"t{i}": torch.zeros(0) for i in range(count)}))


TEXT = ["the cat sat on the mat. " * 9]


def make_session(folder: Path) -> None:
    session = Session(small_model(), Tokenizer.train(TEXT, 300), chunk=4096)
    session.read([i % 200 + 40 for i in range(200_000)]).save(folder / "s")


def ready_session(folder: Path) -> Reader:
    model, tokenizer = small_model(), Tokenizer.train(TEXT, 300)
    model.fingerprint()
    return lambda: Session.load(folder / "s", model, tokenizer)


def make_run(folder: Path) -> None:
    """Nearly all of it is the embedding."""
    config = ModelConfig("wide", 40_000, 1024, (BlockConfig(mixers()["ssd"].small, SwiGLUConfig(8)),))
    model = perspectron.build(config)
    checkpoint.export(
        folder,
        RunConfig(config, TrainConfig(data="none")),
        Tokenizer.train(TEXT, 300),
        model,
        checkpoint.Progress(),
    )


def make_import(folder: Path) -> None:
    from tests.foreign_models import saved, tokenizer

    saved(folder, "llama", tokenizer())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.shape[0] == 300:
            tensors[name] = torch.ones(600_000, *tensor.shape[1:])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 600_000}))


def make_experts(folder: Path) -> None:
    """A header of metadata alone, from which one of many entries would follow."""
    count = (2 << 20) // (7 * 17 + 5) - 99
    fields = {
        "format": "perspectron-experts-2", "layer": "0", "d_model": "16", "hidden": "16",
        "weights_of": " ".join(map(str, range(count))), "xxh3_64": " ".join(["0" * 16] * 7 * count), "header": "",
    }  # fmt: skip
    (folder / "layer").write_bytes(with_header({"__metadata__": fields}, b""))


CASES = {
    "one large tensor": state_with(lambda _, tensors: tensors.update(zz=torch.ones(BIG // 4))),
    "200,000 empty tensors": many(200_000),
    "30,000 empty tensors": many(30_000),
    "86 MiB of extra": extra(repeat("[]"), most=86 << 20),
    "lists in extra": extra(repeat("[]")),
    "nested lists in extra": extra(repeat("[[[[]]]]")),
    "objects in extra": extra(repeat("{}")),
    "fields in extra": extra(repeat('{"a":0}')),
    "texts in extra": extra(repeat('"a"')),
    "a wide text in extra": extra(repeat('"\\ud83d\\ude00' + "a" * 10**7 + '"')),
    "reals in extra": extra(repeat("1.5")),
    "numbers in extra": extra(map(str, count(10**5))),
    "equal numbers in extra": extra(repeat("1")),
    "keys in extra": extra((f'"{i:x}":0' for i in count()), "{}"),
    "a million metadata": state_with(
        lambda header, _: header.update({f"{i:x}": "" for i in range(1_200_000)})
    ),
    "codes and scales that spread": state_with(spread, "int8"),
    "a session of 200,000 tokens": Case(make_session, ready_session),
    "a run": Case(make_run, lambda folder: lambda: checkpoint.load_run(folder)),
    "a folder of transformers": Case(make_import, lambda folder: lambda: foreign.read(folder)),
    "an expert file of metadata": Case(make_experts, lambda folder: lambda: ShardFile(folder / "layer")),
}


def in_a_process(work: Callable[[], str]) -> str:
    """What work returns, or the error it ends with, in a process that nothing is kept of."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE)
            try:
                said.write(work())
            except BaseException:
                said.write(traceback.format_exc())
            said.flush()
            os._exit(0)
        os.waitpid(child, 0)
        said.seek(0)
        return said.read()


def measured(case: Case, folder: Path) -> str:
    """A line of JSON about one case."""

    def read() -> str:
        reader, said = case.ready(folder), "read"
        gc.collect()
        before, began = forget(), time.process_time()
        try:
            kept = reader()
        except PerspectronError as error:
            kept, said = None, str(error)
        took, seconds = peak() - before, time.process_time() - began
        del kept
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return json.dumps({"bytes": size, "took": took, "seconds": seconds, "said": said})

    folder.mkdir()
    return in_a_process(lambda: str(case.make(folder) or "")) or in_a_process(read)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        for number, name in enumerate(sys.argv[1:] or CASES):
            folder = Path(place) / str(number)
            print(json.dumps(name), measured(CASES[name], folder), sep="\t", flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
