"""The library as a whole: threads, fork, buffers that end at a page nobody may read, the loader."""

import ctypes
import logging
import mmap
import os
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from perspectron import native
from perspectron.native import library, training
from perspectron.ops import pdr
from tests.native.isa import forced_isa
from tests.native.packing import matrix
from tests.refusals import refused

needed = pytest.mark.skipif(not native.available(), reason=str(native.reason()))
ISAS = ("avx512", "avx2", "scalar")


def guarded(tensor):
    """A copy of it whose last byte is the last before a page without access."""
    size, page = tensor.nbytes, mmap.PAGESIZE
    length = -(-size // page) * page + page
    memory = mmap.mmap(-1, length)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + length - page), ctypes.c_size_t(page), 0) == 0
    flat = torch.frombuffer(memory, dtype=torch.uint8)[length - page - size : length - page]
    copy = flat.view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


@needed
@pytest.mark.parametrize("isa", ISAS)
def test_nothing_is_read_past_the_end(isa, use_isa):
    use_isa(isa)
    rng = np.random.default_rng(0)
    for format in native.FORMATS:
        for N, K, T in ((1, 1, 1), (13, 200, 1), (13, 192, 3), (9, 77, 7)):
            _, packed, scales = matrix(format, N, K, rng)
            x = torch.randn(T, K)
            expected = native.linear(x, packed, scales, format, N)
            found = native.linear(guarded(x), guarded(packed), guarded(scales), format, N)
            assert torch.equal(found, expected)
    tensors = [
        torch.rand(1, 3, 37),
        torch.rand(1, 3, 37),
        torch.rand(1, 3, 5),
        torch.rand(1, 3, 5),
        torch.rand(1, 5, 37),
    ]
    native.pdr_scan(*map(guarded, tensors), guarded(torch.empty(1, 3, 5)))
    T, D, R = native.SEGMENT + 17, 67, 37
    q, k, v, gamma = (guarded(torch.rand(1, T, n)) for n in (R, R, D, D))
    state, borders = guarded(torch.rand(1, D, R)), guarded(torch.empty(2, 1, D, R))
    native.pdr_scan(q, k, v, gamma, state, guarded(torch.empty(1, T, D)), borders)
    training.scan_backward(q, k, v, gamma, borders, guarded(torch.rand(1, T, D)), state)
    native.read(guarded(torch.ones(1001, dtype=torch.uint8)), 1)


@needed
def test_nothing_is_written_past_the_end(monkeypatch):
    """Outputs, those of swiglu too, that end at a page without access."""
    rng = np.random.default_rng(2)
    gate, up, down = (matrix("ternary", N, K, rng)[1:] for N, K in ((37, 100), (37, 100), (100, 37)))
    x = torch.randn(3, 100)

    def at_the_end(x, *shape, empty=native._empty, **kind):
        return guarded(empty(x, *shape, **kind))

    def products():
        for T in (1, 3):
            yield native.linear(x[:T], *gate, "ternary", 37)
            yield native.swiglu(guarded(x[:T]), gate, up, down, "ternary", 37)

    for isa in ISAS:
        try:
            with forced_isa(isa):
                expected = list(products())
                with monkeypatch.context() as patch:
                    patch.setattr(native, "_empty", at_the_end)
                    for found, wanted in zip(products(), expected, strict=True):
                        assert torch.equal(found, wanted)
        except ValueError:
            continue


@needed
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"])
def test_outputs_do_not_follow_the_default_dtype_and_device(default):
    gate, up, down = (
        matrix("2bit", N, K, np.random.default_rng(3))[1:] for N, K in ((37, 100), (37, 100), (100, 37))
    )
    x, scanned = torch.randn(3, 100), [torch.rand(1, 3, n) for n in (37, 37, 5, 5)]
    state = torch.rand(1, 5, 37)

    def results():
        with torch.inference_mode():
            yield native.linear(x, *gate, "2bit", 37)
            yield native.swiglu(x, gate, up, down, "2bit", 37)
            yield from pdr.scan(*scanned, state.clone(), backend="native")

    expected = list(results())
    before = torch.get_default_dtype()
    try:
        with torch.device("meta") if default == "meta" else nullcontext():
            torch.set_default_dtype(before if default == "meta" else default)
            found = list(results())
    finally:
        torch.set_default_dtype(before)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


@needed
@pytest.mark.parametrize("count", [0, -1, 1025])
def test_threads_that_no_machine_has_are_refused(count):
    for call in (
        lambda: native.read(torch.ones(9, dtype=torch.uint8), count),
        lambda: native.peak(count),
        lambda: native.set_threads(count),
    ):
        with refused(ValueError, "threads", count):
            call()


@needed
def test_many_callers_at_once():
    rng = np.random.default_rng(1)
    cases = []
    for format in native.FORMATS:
        _, packed, scales = matrix(format, 700, 900, rng)
        for T in (1, 9):
            x = torch.randn(T, 900)
            cases.append((x, packed, scales, format, 700, native.linear(x, packed, scales, format, 700)))
    wrong = []

    def work(seed):
        torch.set_num_threads(2)
        for i in np.random.default_rng(seed).integers(0, len(cases), 60):
            *arguments, expected = cases[i]
            if not torch.equal(native.linear(*arguments), expected):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(1)
    assert not wrong


SHARED = """
import os, torch
from perspectron import native
torch.set_num_threads(3)
codes, scales, x = torch.randint(0, 243, (900, 1024), dtype=torch.uint8), torch.rand(4500), torch.randn(1, 1024)
torch.ones(1 << 20).exp_()
before = len(os.listdir("/proc/self/task"))
y = native.linear(x, codes, scales, "ternary", 4500)
assert len(os.listdir("/proc/self/task")) == before, "a second pool"
native.set_threads(2)  # a team is always whole
assert torch.equal(native.linear(x, codes, scales, "ternary", 4500), y)
assert len(os.listdir("/proc/self/task")) == before, "a second pool"
torch.set_num_threads(1)  # as a stream of experts has it, whose small operations are faster so
assert torch.equal(native.linear(x, codes, scales, "ternary", 4500), y)
assert len(os.listdir("/proc/self/task")) == before + 1
"""


@needed
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_kernels_take_the_threads_of_pytorch_and_own_ones_only_where_it_has_fewer():
    done = subprocess.run(
        [sys.executable, "-c", SHARED], capture_output=True, text=True, cwd=library.HERE.parents[1]
    )
    assert done.returncode == 0, done.stderr


EARLY = """
import os, signal, sys, torch
from perspectron import native
torch.set_num_threads(3)
if sys.argv[1] == "loaded":
    assert native.available()
torch.ones(1 << 20).exp_()  # a team of OpenMP's, whose threads the child will not have
codes, scales, x = torch.randint(0, 243, (900, 1024), dtype=torch.uint8), torch.rand(4500), torch.randn(1, 1024)
child = os.fork()
if child == 0:
    signal.alarm(20)
    native.linear(x, codes, scales, "ternary", 4500)
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@needed
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("library_is", ["loaded", "not loaded"])
def test_a_child_that_was_forked_before_the_first_kernel_does_not_wait_for_threads_it_has_not(library_is):
    done = subprocess.run(
        [sys.executable, "-c", EARLY, library_is], capture_output=True, text=True, cwd=library.HERE.parents[1]
    )
    assert done.returncode == 0, done.stderr


@needed
@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot choose")
@pytest.mark.parametrize("torch_threads", [1, 3], ids=["our own threads", "OpenMP's"])
def test_small_numbers_are_what_they_are_to_the_thread_that_calls(torch_threads):
    """Whatever the others had when they started."""
    torch.set_flush_denormal(False)
    small, ones = torch.full((1 << 18,), 3e-39), torch.ones(1 << 18)
    torch.set_num_threads(torch_threads)
    native.set_threads(3)
    try:
        for flushed, left in ((True, 0), (False, 1 << 18), (True, 0)):
            torch.set_flush_denormal(flushed)
            found = training.gated(ones, small)
            torch.set_flush_denormal(False)
            assert np.count_nonzero(found.numpy()) == left  # PyTorch would ask its own threads
    finally:
        native.set_threads(None)
        torch.set_num_threads(1)


FORK = """
import os, signal, torch
from perspectron import native
torch.set_num_threads(3)
codes, scales, x = torch.randint(0, 243, (900, 1024), dtype=torch.uint8), torch.rand(4500), torch.randn(1, 1024)
y = native.linear(x, codes, scales, "ternary", 4500)
child = os.fork()
signal.alarm(20)
if child == 0:
    same = all(torch.equal(native.linear(x, codes, scales, "ternary", 4500), y) for _ in range(50))
    os._exit(7 if same else 1)
same = all(torch.equal(native.linear(x, codes, scales, "ternary", 4500), y) for _ in range(50))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert same
"""


@needed
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_starts_threads_of_its_own_and_exit_is_quiet():
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, cwd=library.HERE.parents[1]
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@needed
def test_speeds_are_measured_and_an_instruction_set_can_be_forced():
    assert native.peak(1) > 1e8
    assert native.read(torch.full((1000,), 3, dtype=torch.uint8), 1) > 0
    assert native.isa() in ISAS
    with forced_isa("scalar"):
        assert native.isa() == "scalar"
    assert native.reason() is None
    with refused(ValueError, "isa", "mmx"), forced_isa("mmx"):
        pass


@pytest.mark.skipif(not shutil.which("c++") or os.environ.get("CC") == "false", reason="no compiler")
def test_where_there_is_a_compiler_the_library_is_there():
    assert native.available(), native.reason()


def test_absent_it_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(native, "load", lambda: library.Loaded(None, "not built"))
    native.wanted.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "perspectron"):
            assert not native.wanted()
            assert not native.wanted()
    finally:
        native.wanted.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "native kernels: not built; PyTorch is used, slower"
    ]


@needed
def test_a_library_of_other_sources_is_refused(monkeypatch, tmp_path):
    found = next(path for path in library._places() if path.is_file())
    monkeypatch.setattr(library, "_places", lambda: [found])
    root, here = library.HERE.parents[1], tmp_path / "perspectron" / "native"
    if library.sources_digest() is not None:
        shutil.copytree(library.HERE / "csrc", here / "csrc")
        shutil.copy(root / "CMakeLists.txt", tmp_path)
        monkeypatch.setattr(library, "HERE", here)
        (here / "csrc" / "api.cpp.orig").write_text("left by an editor")
        (here / "csrc" / "__pycache__").mkdir()
        assert library.load.__wrapped__().reason is None
        (tmp_path / "CMakeLists.txt").write_text("other flags")
        assert "was built from other sources" in library.load.__wrapped__().reason
    (here / "csrc").mkdir(parents=True, exist_ok=True)
    (tmp_path / "CMakeLists.txt").touch()
    monkeypatch.setattr(library, "HERE", here)
    (here / "csrc" / "api.cpp").write_text("changed")
    assert library.load.__wrapped__().reason.endswith("(to build it again: python -m perspectron.native)")
    (tmp_path / library.NAME).parent.mkdir()
    (tmp_path / library.NAME).write_text("no library")
    monkeypatch.setattr(library, "_places", lambda: [tmp_path / library.NAME])
    assert "cannot be loaded" in library.load.__wrapped__().reason
    monkeypatch.setattr(library, "_places", lambda: [tmp_path / "none"])
    assert library.load.__wrapped__() == (None, "not built (to build it: python -m perspectron.native)")


@needed
@pytest.mark.parametrize("rows", [[0, 1, 7], [0, 0], [0, -1], [0, 1, 0], [2], [0, 1, 2]])
def test_rows_that_are_not_there_are_refused(rows):
    pairs = [matrix("int8", 4, 4, np.random.default_rng(0))[1:] for _ in range(3)]
    network = native.SwiGLU(*pairs, "int8", 4, 4)
    y = torch.full((2, 4), 123.0)
    with pytest.raises(ValueError, match="rows"):
        network(torch.zeros(2, 4), y, rows)
    assert (y == 123).all()
    network(torch.zeros(2, 4), y, [1, 0])
    assert (y == 0).all()


@needed
def test_attention_without_heads_is_refused():
    q, first = torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="H = 0"):
        training.attention(q, torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), first, 1.0)
    with pytest.raises(ValueError, match="H = 0"):
        training.attention_after(q, torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), first, 1.0)
