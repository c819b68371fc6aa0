"""Files that perspectron reads, one of each kind, and what reading them means.

A format makes a good sample once, in a folder of its own; mutants of its files are then read in its place.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from safetensors import safe_open
from safetensors.torch import load, load_file
from xxhash import xxh3_64

import perspectron
from perspectron import opening, presets
from perspectron.cli.main import main
from perspectron.compare.report import figures
from perspectron.compare.results import write_page
from perspectron.data import Tokenizer, encode, open_corpus, open_shards, template
from perspectron.data.loader import Loader
from perspectron.decode.conversation import Conversation
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.designs.perspective import safety
from perspectron.designs.perspective.adapt.adapter import Adapter, AdapterConfig
from perspectron.model import appended
from perspectron.model.appended import digest_of
from perspectron.model.config import BlockConfig, ModelConfig
from perspectron.model.ffn import SwiGLUConfig
from perspectron.model.mixer import mixers
from perspectron.model.state import load_extra, load_state, save_state
from perspectron.quant.convert import convert
from perspectron.serve.states import States
from perspectron.stream.artifact import save_artifact
from perspectron.stream.engine import load_artifact
from perspectron.stream.reader import ShardFile
from perspectron.stream.tensors import PAGE, aligned
from perspectron.stream.trace import load as load_trace
from perspectron.stream.trace import stack_distances
from perspectron.train import checkpoint, loop, metrics
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.page import course
from perspectron.util.config import dump
from perspectron.util.errors import ArtifactError, ConfigError, PerspectronError
from perspectron.util.files import write_json
from tests.compare.report.conftest import made_up
from tests.data.templates import CONVERSATIONS, TEMPLATES, WEATHER
from tests.fuzz.mutate import header_of, with_header
from tests.states import sealed

SIZES = {
    "d_model": 16,
    "layers": 4,
    "hidden": 16,
    "rank": 4,
    "heads": 2,
    "kv_heads": 1,
    "window": 8,
    "vocab_size": 270,
}


@dataclasses.dataclass
class Format:
    """files: which may be mutated, and as what. sealed: whether digests must show any change that is not resealed.
    path: what is read. read: everything that the file gives, as a digest; whatever it raises but a PerspectronError
    is a failure. reseal: recompute the digests in the folder. command: of the program, on the path."""

    name: str
    folder: Path
    path: Path
    files: Mapping[str, str]
    sealed: bool
    read: Callable[[Path], str]
    reseal: Callable[[Path], None] = lambda path: None
    command: Callable[[Path], list[str]] | None = None

    @property
    def bytes(self) -> int:
        """Of the files together: what reading them may take beside a constant."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def digest(*values: Any) -> str:
    """Of tensors, plain values and bytes, in order."""
    taken = hashlib.sha256()
    for value in values:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                taken.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
                taken.update(leaf.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            else:
                taken.update(repr(leaf).encode())
    return taken.hexdigest()


def reseal_state(path: Path) -> None:
    """Recompute the digests of each part of a state's file, and where it ends."""
    data, parts = path.read_bytes(), list[bytes]()
    while data:
        fields, rest = header_of(data)
        end = max(entry["data_offsets"][1] for name, entry in fields.items() if name != "__metadata__")
        tensors = load(with_header(fields, rest[:end]))
        before = {} if parts else {"end": "0" * 32}
        fields["__metadata__"] = before | sealed(fields["__metadata__"], tensors)
        parts.append(with_header(fields, rest[:end]))
        data = rest[end:]
    whole = b"".join(parts)
    path.write_bytes(whole.replace(b"0" * 32, appended._end(len(whole)), 1))


class Samples:
    """Makes the formats; a small trained run is made once for all of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        text = root / "text"
        text.mkdir(parents=True)
        for i in range(12):
            (text / f"{i}.txt").write_text(f"the cat sat on mat number {i}, and the dog sat on the log. " * 6)
        corpus = open_corpus(str(text), 0.2)
        self.tokenizer = Tokenizer.train((d.text for d in corpus.documents("train")), SIZES["vocab_size"])
        self.config = presets.get(
            "perspective-tiny", **SIZES | {"vocab_size": self.tokenizer.vocab_size, "torus": [2]}
        )
        train = TrainConfig(data=str(text), steps=2, batch_size=2, seq_len=16, dtype="float32", device="cpu",
                            eval_every=0, save_every=0, eval_tokens=32)  # fmt: skip
        self.run = root / "run"
        encode(corpus, self.tokenizer, self.run / "data")
        self.tokenizer.save(self.run / "tokenizer.json")
        loop.Trainer(
            self.run, RunConfig(self.config, train), self.tokenizer, open_shards(self.run / "data")
        ).fit()
        self.model, _ = checkpoint.load_run(self.run)

    def make(self, name: str) -> Format:
        folder = self.root / "samples" / name
        made: Format = getattr(self, name.replace("-", "_"))(folder)
        return made

    def checkpoint(self, folder: Path) -> Format:
        there = checkpoint.found_in(self.run)[-1].path
        shutil.copytree(there, folder)
        model, optimizer = perspectron.build(self.config), None
        loader = Loader(open_shards(self.run / "data").split("train"), batch_size=2, seq_len=16, seed=0)

        def read(path: Path) -> str:
            nonlocal optimizer
            optimizer = optimizer or torch.optim.AdamW(model.parameters())
            found = checkpoint.read(path)
            checkpoint.restore(found, model, self.tokenizer, optimizer)
            loader.load_state_dict(found.progress.loader)
            return digest(model.state_dict(), [optimizer.state[p] for p in model.parameters()], found.progress.step,
                          dataclasses.astuple(found.progress), dump(found.config), found.tokenizer)  # fmt: skip

        def reseal(path: Path) -> None:
            index = json.loads((path / checkpoint.INDEX).read_text())
            for name, entry in index["files"].items():
                data = (path / name).read_bytes()
                entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            index.pop("digest", None)
            index["digest"] = checkpoint._digest(index)
            (path / checkpoint.INDEX).write_text(json.dumps(index))

        files = {
            checkpoint.INDEX: "json",
            checkpoint.MODEL: "safetensors",
            checkpoint.TRAINING: "safetensors",
        }
        return Format("checkpoint", folder, folder, files, True, read, reseal)

    def run_config(self, folder: Path) -> Format:
        shutil.copytree(self.run, folder)

        def read(path: Path) -> str:
            config = checkpoint.load_config(path)
            opening.describe(path)
            try:
                opening.open_model(path)
            except PerspectronError:
                with torch.device(
                    "meta"
                ):  # its checkpoint is of another model, but its shapes must be possible
                    perspectron.LanguageModel(config.model)
            return digest(dump(config))

        return Format("run-config", folder, folder, {"config.json": "json"}, False, read,
                      command=lambda path: ["inspect", str(path)])  # fmt: skip

    def metrics(self, folder: Path) -> Format:
        folder.mkdir(parents=True)
        shutil.copy(self.run / metrics.METRICS, folder)

        def read(path: Path) -> str:
            lines = metrics.read_metrics(path)
            course(path).figures()
            for line in lines:
                assert line["step"] >= 0
                assert float(line.get("loss", line.get("heldout_bits_per_byte"))) is not None
            return digest(lines)

        return Format("metrics", folder, folder, {metrics.METRICS: "lines"}, False, read)

    def state(self, folder: Path) -> Format:
        folder.mkdir(parents=True)
        blocks = tuple(BlockConfig(entry.small, SwiGLUConfig(8)) for entry in mixers().values())
        model = perspectron.build(ModelConfig("every mixer", 11, 16, blocks))
        ids_BT = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            save_state(folder / "s.state", model(ids_BT).state, model, extra={"text": "the cat", "seed": 3})

        def read(path: Path) -> str:
            extra = load_extra(path)
            state = load_state(path, model)
            kept = digest(state, extra)
            with torch.inference_mode():
                rows = state.batch_size
                later = model(torch.ones(rows, 1, dtype=torch.int64), state.fork()).state
                model(torch.ones(rows, 3, dtype=torch.int64), later, consume_state=True)
            return kept

        return Format(
            "state", folder, folder / "s.state", {"s.state": "safetensors"}, True, read, reseal_state
        )

    def session(self, folder: Path) -> Format:
        """A text with draws in it, as a server keeps it, in a model with a table of positions."""
        folder.mkdir(parents=True)
        size = {"vocab_size": self.tokenizer.vocab_size, "d_model": 32, "layers": 1, "seq_len": 96}
        model = perspectron.build(presets.small("gpt2", **size))
        session = Session(model, self.tokenizer, chunk=16).read("the cat sat on mat number 7")
        session.say(3), session.read(" and the dog").save(folder / "s.state", extra={"parent": "none"})

        def read(path: Path) -> str:
            found = States(path.parent).list()
            session = Session.load(path, model, self.tokenizer, chunk=16)
            kept = digest(session.tokens, session._calls, found[0].tokens, load_extra(path))
            sampling = SamplingConfig(repetition_penalty=1.2)
            session.fork().say(2, sampling=sampling)
            for token in (0, len(session.tokens) // 2):
                with contextlib.suppress(ConfigError):  # what a loaded text began with
                    session.at(token)
            talk = Conversation.load(path, model)
            generate(model, self.tokenizer, ["a"], max_tokens=2, sampling=sampling, conversation=talk)
            return kept

        return Format("session", folder, folder / "s.state", {"s.state": "session"}, True, read, reseal_state)

    def session_parts(self, folder: Path) -> Format:
        """A text that was saved three times, its file appended to."""
        format = self.session(folder)
        path, size = format.path, {"vocab_size": self.tokenizer.vocab_size, "d_model": 32, "layers": 1}
        session = Session(
            perspectron.build(presets.small("gpt2", **size, seq_len=96)), self.tokenizer, chunk=16
        )
        session.read(self.tokenizer.encode("the cat sat on mat number 7 " * 20)[:70])
        path.unlink()
        with patch.object(appended, "LEAST", 0):
            for _ in range(3):
                session.say(4)
                session.save(path, extra={"parent": "none"})
        assert path.read_bytes().count(b"__metadata__") == 3
        return dataclasses.replace(format, name="session-parts", files={path.name: "parts"})

    def adapter(self, folder: Path) -> Format:
        """With traces, of the trained run."""
        folder.mkdir(parents=True)
        model = perspectron.build(
            presets.get("perspective-tiny-dense", d_model=16, layers=2, hidden=16, rank=4, vocab_size=270)
        )
        adapter = Adapter(model, AdapterConfig(rank=2))
        adapter.detach(adapter.attach(model.init_state(1), traces=True))
        adapter.save(folder / "a.adapter")

        def read(path: Path) -> str:
            found = Adapter.load(path, model)
            kept = digest(found.up, found.first, found.second, found.trace, found.config, found.counters)
            with torch.inference_mode():
                model(torch.ones(1, 3, dtype=torch.int64), found.attach(model.init_state(1), traces=True))
            return kept

        def reseal(path: Path) -> None:
            fields, rest = header_of(path.read_bytes())
            header = fields["__metadata__"]
            header.pop("digest", None)
            fields["__metadata__"] = header | {"digest": digest_of(header, load_file(path))}
            path.write_bytes(with_header(fields, rest))

        return Format("adapter", folder, folder / "a.adapter", {"a.adapter": "session"}, True, read, reseal)

    def polytope(self, folder: Path) -> Format:
        folder.mkdir(parents=True)
        path, draw = folder / "set.safe", torch.Generator().manual_seed(0)
        rows_HD = F.normalize(torch.randn(6, SIZES["d_model"], generator=draw))
        inside_D = torch.zeros(SIZES["d_model"], dtype=torch.float64)
        labels = ("token:5", *(["given"] * 5))
        safety.Polytope(
            rows_HD, torch.ones(6).double(), inside_D, labels, 0.0, 0.0, self.model.fingerprint()
        ).save(path)

        def read(path: Path) -> str:
            found = safety.Polytope.load(path, self.model)
            kept = digest(
                found.normals, found.offsets, found.inside, found.labels, found.epsilon, found.alpha
            )
            action: safety.Action = "mask" if found.tokens else "project"
            with contextlib.suppress(PerspectronError):
                safe = safety.Safety(found, action)
                step: Any = SimpleNamespace(hidden_1D=torch.ones(1, SIZES["d_model"]), verdicts={})
                guard, row = safe.begin(step), step.hidden_1D
                guard.hidden(row, step), found.scores(row)
                guard.logits(torch.zeros(1, self.config.vocab_size), step)
            return kept

        def reseal(path: Path) -> None:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            fields, rest = header_of(path.read_bytes())
            fields["__metadata__"]["digest"] = safety._digest(fields["__metadata__"]["about"], tensors)
            path.write_bytes(with_header(fields, rest))

        return Format("polytope", folder, path, {"set.safe": "session"}, True, read, reseal)

    def packed_state(self, folder: Path) -> Format:
        """A state that the native step takes."""
        folder.mkdir(parents=True)
        artifact = folder.parent / "packed-model"
        model = self._packed(artifact)
        with torch.inference_mode():
            ids_BT = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]])
            state = model(ids_BT, model.init_state(1, capacity=1)).state
            save_state(folder / "s.state", state, model)

        def read(path: Path) -> str:
            state = load_state(path, model)
            kept = digest(state)
            with torch.inference_mode():
                for _ in range(2):
                    ids_B1 = torch.ones(state.batch_size, 1, dtype=torch.int64)
                    _, state, _ = model.hidden(ids_B1, state, consume_state=True)
            return kept

        return Format(
            "packed-state", folder, folder / "s.state", {"s.state": "safetensors"}, True, read, reseal_state
        )

    def tokenizer_(self, folder: Path) -> Format:
        folder.mkdir(parents=True)
        self.tokenizer.save(folder / "tokenizer.json")

        def read(path: Path) -> str:
            tokenizer = Tokenizer.load(path)
            ids = tokenizer.encode("the cat sat,  on 12345 mats\n\n " + "a" * 3000 + "é終\u0300")
            return digest(tokenizer.fingerprint, ids, tokenizer.decode(ids), tokenizer.byte_counts().tolist())

        return Format("tokenizer", folder, folder / "tokenizer.json", {"tokenizer.json": "json"}, False, read)

    def shards(self, folder: Path) -> Format:
        shutil.copytree(self.run / "data", folder)

        def read(path: Path) -> str:
            opened = open_shards(path)
            parts = [opened.split(name) for name in ("train", "heldout")]
            Loader(parts[0], batch_size=1, seq_len=16, seed=0).next_batch()
            ids = [part.read(0, part.tokens).tolist() for part in parts]
            return digest(ids, [part.starts.tolist() for part in parts], [part.text_bytes for part in parts],
                          opened.vocab_size, opened.tokenizer_fingerprint, opened.corpus_fingerprint)  # fmt: skip

        def reseal(path: Path) -> None:
            manifest = json.loads((path / "manifest.json").read_text())
            for split, records in manifest["splits"].items():
                for i, record in enumerate(records):
                    for key, end in (("sha256", "bin"), ("starts_sha256", "starts")):
                        data = (path / f"{split}-{i:05d}.{end}").read_bytes()
                        record[key] = hashlib.sha256(data).hexdigest()
                        if end == "bin":
                            record["tokens"] = len(data) // 2
                        else:
                            record["documents"] = len(data) // 8
            (path / "manifest.json").write_text(json.dumps(manifest))

        files = {"manifest.json": "json", "train-00000.bin": "bytes", "heldout-00000.starts": "bytes"}
        return Format("shards", folder, folder, files, False, read, reseal)

    def _packed(self, folder: Path) -> Any:
        if not folder.is_dir():
            model = perspectron.build(self.config)
            convert(model, "2bit", None)
            save_artifact(model, self.tokenizer, folder)
        return load_artifact(folder)[0]

    def artifact(self, folder: Path) -> Format:
        self._packed(folder)

        def read(path: Path) -> str:
            model, tokenizer = load_artifact(path)
            try:
                with torch.inference_mode():
                    out = model(torch.tensor([[3, 4, 5]]))
                    model.hidden(torch.tensor([[6]]), out.state, consume_state=True)
                return digest(model.state_dict(), tokenizer.fingerprint, dump(model.config), out.logits)
            finally:
                if model.cache is not None:
                    model.cache.close()

        def reseal(path: Path) -> None:
            manifest = json.loads((path / "manifest.json").read_text())
            for name, entry in manifest["files"].items():
                data = (path / name).read_bytes()
                entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            (path / "manifest.json").write_text(json.dumps(manifest))

        expert = next(path.relative_to(folder) for path in folder.glob("experts/*"))
        files = {"config.json": "json", "manifest.json": "json", "shared.safetensors": "safetensors",
                 "tokenizer.json": "json", str(expert): "safetensors"}  # fmt: skip
        return Format(
            "artifact", folder, folder, files, True, read, reseal, lambda path: ["inspect", str(path)]
        )

    def experts(self, folder: Path) -> Format:
        self._packed(folder.parent / "experts-artifact")
        folder.mkdir(parents=True)
        source = next((folder.parent / "experts-artifact").glob("experts/*"))
        shutil.copy(source, folder / "layer.safetensors")

        def read(path: Path) -> str:
            with ShardFile(path, retries=0) as file:
                size = file.header.layout.bytes
                if size > 1 << 26:
                    raise ArtifactError("an expert of more than the test's memory")
                buffer, taken = aligned(size), hashlib.sha256()
                for expert in file.header.stored:
                    file.read_into(expert, buffer)
                    taken.update(buffer)
                file.verify()
                return digest(taken.hexdigest(), file.layer, file.header.weights_of)

        def reseal(path: Path) -> None:
            data = path.read_bytes()
            fields, rest = header_of(data)
            parts = (
                rest[slice(*entry["data_offsets"])]
                for name, entry in fields.items()
                if name != "__metadata__"
            )
            meta = fields["__metadata__"] | {"xxh3_64": " ".join(xxh3_64(part).hexdigest() for part in parts)}
            meta.pop("header", None)
            fields["__metadata__"] = meta | {"header": xxh3_64(json.dumps(meta).encode()).hexdigest()}
            text = json.dumps(fields, separators=(",", ":")).encode()
            path.write_bytes(with_header(text + b" " * (-(8 + len(text)) % PAGE), rest))

        return Format(
            "experts",
            folder,
            folder / "layer.safetensors",
            {"layer.safetensors": "safetensors"},
            True,
            read,
            reseal,
        )

    def results(self, folder: Path) -> Format:
        """Two designs and one seed. Every mutant's page is made; a chart takes 50 to 100 ms, so charts are drawn for
        one file in thirty, chosen by its bytes."""
        undrawn = dict.fromkeys(("draw", "draw_dots"), lambda *args, **options: "<svg></svg>")
        whole = made_up(seeds=(0,))
        whole["designs"] = {name: whole["designs"][name] for name in ("perspective", "transformer")}
        write_json(folder / "results.json", whole)

        def read(path: Path) -> str:
            drawn = zlib.crc32(path.read_bytes()) % 30 == 0
            with contextlib.nullcontext() if drawn else patch.multiple(figures, **undrawn):
                page = write_page(path).read_text()
            assert "<script" not in page
            return digest(json.loads(path.read_text()))

        return Format("results", folder, folder / "results.json", {"results.json": "json"}, False, read)

    def trace(self, folder: Path) -> Format:
        folder.mkdir(parents=True)
        (folder / "text.txt").write_text("the cat sat on the mat " * 20)
        assert (
            main(
                [
                    "perspective",
                    "trace",
                    str(self.run),
                    "--text",
                    str(folder / "text.txt"),
                    "--out",
                    str(folder / "trace.json"),
                ]
            )
            == 0
        )

        def read(path: Path) -> str:
            found = load_trace(path)
            stack_distances(found.keys_N)
            return digest(found.model, found.layers, found.chosen_TL.tolist(), found.guessed_TL.tolist())

        return Format("trace", folder, folder / "trace.json", {"trace.json": "json"}, False, read)

    def template(self, folder: Path) -> Format:
        """A chat template, rendered with several conversations; the process that renders it must not end but for its
        limits."""
        folder.mkdir(parents=True)
        (folder / template.FILE).write_text(TEMPLATES["calls"])

        def read(path: Path) -> str:
            found, failed = list[str](), list[PerspectronError]()
            with patch.object(template, "SECONDS", 0.2):
                made = template.Template.load(path)
                for name in ("tools", "turns", "strange"):
                    try:
                        found.append(made.prompt(CONVERSATIONS[name], tools=[WEATHER]))
                    except PerspectronError as error:
                        failed.append(error)
            assert not any("ended with" in str(error) for error in failed), failed
            if not found:
                raise failed[0]
            return digest(found)

        path = folder / template.FILE
        return Format("template", folder, path, {template.FILE: "template"}, False, read)


NAMES = {
    "run-config": "run_config",
    "session-parts": "session_parts",
    "packed-state": "packed_state",
    "tokenizer": "tokenizer_",
}
FORMATS = (
    *(
        "state",
        "session",
        "session-parts",
        "packed-state",
        "adapter",
        "polytope",
        "checkpoint",
        "run-config",
        "metrics",
    ),
    *("tokenizer", "shards", "artifact", "experts", "trace", "results", "template"),
    *("hf-perspectron", "hf-gpt2", "hf-llama", "hf-mamba2", "hf-bamba", "hf-gguf"),
)
IMPORTED = "hf-"
"""What the names of folders of transformers begin with; tests.fuzz.imported makes them."""
