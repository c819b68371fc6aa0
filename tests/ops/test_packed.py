"""Packed matrices: bytes by the table, products by their definition, and what an op owes to torch."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from perspectron import native
from perspectron.ops import packed, packing, tiles
from perspectron.ops.packed import linear, swiglu
from perspectron.ops.packing import LAYOUTS, Packed, check, dequantise, pack, pack_tiles, unpack
from perspectron.util.errors import BackendError, DataError
from tests.native.isa import forced_isa
from tests.refusals import refused

pytestmark = pytest.mark.cpu_only("packed matrices are the CPU's; on a device PyTorch unpacks them")
FORMATS = list(LAYOUTS)
PLAIN = [format for format in FORMATS if format not in tiles.FORMATS]
SHAPES = [(1, 1), (5, 64), (7, 65), (37, 200), (130, 448), (4, 1100)]
every_format = pytest.mark.parametrize("format", FORMATS)
plain_format = pytest.mark.parametrize("format", PLAIN)
HYPOTHESIS = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def matrix(format, N, K, seed=0) -> Packed:
    layout, draw = LAYOUTS[format], generator(seed)
    codes = torch.randint(layout.lowest, layout.highest + 1, (N, K), generator=draw, dtype=torch.uint8)
    if format in tiles.FORMATS:
        unit = (torch.rand(N, generator=draw) + 0.1) / 255
        a, b = torch.randint(0, 256, (2, N, -(-K // 32)), generator=draw)
        return pack_tiles(codes, unit, a, b if format == "4bit32" else None, format)
    if layout.zero is not None:
        return pack(codes, torch.rand(N, generator=draw) + 0.1, None, format)
    groups = (N, -(-K // 128))
    return pack(codes, torch.rand(groups, generator=draw), torch.randn(groups, generator=draw), format)


def tokens(T, K, seed=1):
    return torch.randn(T, K, generator=generator(seed))


def f32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


# ---------------------------------------------------------------- bytes


def byte(codes, format):
    if format == "ternary":
        return sum(t * r for t, r in zip(codes, (1, 3, 9, 27, 84), strict=True))
    return sum(t << i * (8 // len(codes)) for i, t in enumerate(codes))


@plain_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_the_table(format, shape):
    whole = matrix(format, *shape)
    R, zero = LAYOUTS[format].rows, LAYOUTS[format].zero or 0
    codes = unpack(whole)
    assert codes.shape == shape
    blocks, S = whole.codes.shape
    assert blocks == -(-shape[0] // R) and S % 64 == 0 and 0 <= S - shape[1] < 64
    for b in range(blocks):
        for k in range(0, S, 7):
            rows = range(b * R, b * R + R)
            ts = [int(codes[n, k]) if n < shape[0] and k < shape[1] else zero for n in rows]
            assert int(whole.codes[b, k]) == byte(ts, format)
    check(whole)
    assert torch.equal(packing.pack_codes(codes, format), whole.codes)
    other = pack(codes.T.contiguous().T, torch.ones(()).expand(whole.scales.shape), None, format)
    assert torch.equal(other.codes, whole.codes)
    assert other.codes.is_contiguous() and other.scales.is_contiguous()


@plain_format
def test_weights_are_those_of_the_table(format):
    whole = matrix(format, 37, 200)
    R, zero, codes, weights = LAYOUTS[format].rows, LAYOUTS[format].zero, unpack(whole), dequantise(whole)
    for n, k in [(0, 0), (3, 127), (4, 128), (36, 199), (35, 128)]:
        t = int(codes[n, k])
        if zero is None:
            s, o = (float(whole.scales[n // R, k // 128, part * R + n % R]) for part in (0, 1))
            assert float(weights[n, k]) == f32(s * t - o)
        else:
            assert float(weights[n, k]) == f32((t - zero) * float(whole.scales[n]))
    assert torch.equal(dequantise(whole, torch.float64).float(), weights)


@plain_format
@HYPOTHESIS
@given(st.data())
def test_any_codes_come_back(format, data):
    N, K = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 140))
    layout = LAYOUTS[format]
    codes = torch.randint(
        layout.lowest, layout.highest + 1, (N, K), generator=generator(data.draw(st.integers(0, 9)))
    )
    stored = packing.pack_codes(codes, format)
    assert torch.equal(unpack(Packed(stored, torch.empty(0), format, (N, K))).long(), codes)
    assert not packing.illegal(stored, format).any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_of_4bit32_are_those_of_its_table(shape):
    whole, (N, K) = matrix("4bit32", *shape), shape
    codes, S = unpack(whole), whole.codes.shape[1] // 9
    a, b = tiles.scales(whole.codes, "4bit32", S)
    assert codes.shape == shape and whole.codes.shape == (-(-N // 16), 9 * S) and S % 64 == 0
    for n, k in {(0, 0), (N // 2, K // 2), (N - 1, K - 1)}:
        line, group, column = whole.codes[n // 16], k // 32, k % 32
        byte = int(line[S + group * 256 + column // 8 * 64 + n % 16 * 4 + column % 4])
        assert byte >> (4 if column % 8 >= 4 else 0) & 15 == int(codes[n, k])
        assert [int(line[group * 32 + part * 16 + n % 16]) for part in (0, 1)] == [
            int(a[n, group]),
            int(b[n, group]),
        ]
        number = int(a[n, group]) * int(codes[n, k]) - 15 * int(b[n, group])
        assert float(dequantise(whole)[n, k]) == f32(number * float(whole.scales[n]))
    check(whole)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_of_8bit32_are_those_of_its_table(shape):
    whole, (N, K) = matrix("8bit32", *shape), shape
    S, codes = -(-K // 64) * 64, unpack(whole)
    head = -(-S // 128) * 64
    assert codes.shape == shape and whole.codes.shape == (-(-N // 16), head + 16 * S)
    for n, k in {(0, 0), (N // 2, K // 2), (N - 1, K - 1)}:
        line = whole.codes[n // 16]
        assert int(line[head + k // 4 * 64 + n % 16 * 4 + k % 4]) == int(codes[n, k])
        number = int(line[k // 32 * 16 + n % 16]) * (int(codes[n, k]) - 128)
        assert float(dequantise(whole)[n, k]) == f32(number * float(whole.scales[n]))
    check(whole)


def test_243_bytes_are_ternary():
    every = torch.arange(256, dtype=torch.uint8)
    legal = {byte([n // 3**i % 3 for i in range(5)], "ternary") for n in range(243)}
    assert set(every[~packing.illegal(every, "ternary")].tolist()) == legal
    assert packing.illegal(every, "int8").nonzero().tolist() == [[0]]
    assert not packing.illegal(every, "2bit").any()


def test_the_size_the_document_counts():
    """27,065,344 bytes of codes and 104,448 of scales for an expert of 4096 ↔ 11008."""
    shapes = [packing.sizes("ternary", shape) for shape in [(11008, 4096)] * 2 + [(4096, 11008)]]
    assert sum(codes[0] * codes[1] for codes, _, _ in shapes) == 27_065_344
    assert sum(4 * scales[0] for _, scales, _ in shapes) == 104_448


@every_format
def test_what_cannot_be_is_refused(format):
    whole = matrix(format, 7, 70)
    for wrong in (
        whole._replace(codes=whole.codes[:, :64]),
        whole._replace(codes=whole.codes.long()),
        whole._replace(scales=whole.scales.double()),
        whole._replace(scales=whole.scales[:-1]),
        whole._replace(scales=whole.scales * torch.inf),
        whole._replace(shape=(70, 7)),
    ):
        with refused(DataError, "expert", 3):
            check(wrong, "expert 3")
    if format in tiles.FORMATS:
        if format == "8bit32":
            whole.codes[0, 70] = 0
            with refused(DataError, 1, "8bit32"):
                check(whole)
        return
    codes = unpack(whole).long()
    codes[3, 3] = LAYOUTS[format].highest + 1
    with refused(DataError, format):
        packing.pack_codes(codes, format)
    with refused(ValueError, 65536):
        packing.sizes(format, (1, 65537))
    if format in ("ternary", "int8"):
        whole.codes[1, 5] = 83 if format == "ternary" else 0
        with refused(DataError, 1, format):
            check(whole)


# ---------------------------------------------------------------- products


def defined(x_K, whole):
    """y of one token, number by number, from the definition."""
    if whole.format in tiles.FORMATS:
        return by_tiles(x_K, whole)
    a = max(abs(v) for v in x_K.tolist())
    per, step = f32(127 / a), f32(a / 127)
    q = [round(f32(v * per)) for v in x_K.tolist()]
    codes, layout = unpack(whole).tolist(), LAYOUTS[whole.format]
    found = []
    for n, row in enumerate(codes):
        if layout.zero is not None:
            exact = sum((t - layout.zero) * v for t, v in zip(row, q, strict=True))
            found.append(f32(f32(step * float(whole.scales[n])) * f32(exact)))
            continue
        lanes, offset = [0.0] * 16, 0.0
        for g in range(-(-len(q) // 128)):
            scales = whole.scales[n // layout.rows, g]
            s, o = (float(scales[part * layout.rows + n % layout.rows]) for part in (0, 1))
            columns = range(g * 128, min(g * 128 + 128, len(q)))
            for lane in range(16):
                exact = sum(row[k] * q[k] for k in columns if k % 64 // 4 == lane)
                lanes[lane] = f32(s * exact + lanes[lane])
            offset = f32(o * sum(q[k] for k in columns) + offset)
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [f32(a + b) for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        found.append(f32(f32(lanes[0] - offset) * step))
    return found


def by_tiles(x_K, whole):
    a_NG, b_NG = tiles.scales(whole.codes, whole.format, packing.columns(whole))
    sums = [0.0] * whole.shape[0]
    for g, part in enumerate(x_K.split(32)):
        most = max(abs(v) for v in part.tolist())
        q = [round(f32(v * f32(127 / most))) for v in part.tolist()]
        for n, row in enumerate(unpack(whole)[:, 32 * g : 32 * g + 32].tolist()):
            if b_NG is None:
                number = int(a_NG[n, g]) * sum((t - 128) * v for t, v in zip(row, q, strict=True))
            else:
                product = sum(t * v for t, v in zip(row, q, strict=True))
                number = int(a_NG[n, g]) * product - 15 * int(b_NG[n, g]) * sum(q)
            sums[n] = f32(f32(number) * f32(most / 127) + sums[n])
    return [f32(total * float(unit)) for total, unit in zip(sums, whole.scales, strict=True)]


@every_format
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_products_are_those_of_the_definition_bit_for_bit(format, shape):
    whole, x = matrix(format, *shape), tokens(3, shape[1])
    assert linear(x, whole, backend="torch").tolist() == [defined(row, whole) for row in x]


@every_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backends_agree_with_float64(format, shape):
    whole, x = matrix(format, *shape), tokens(9, shape[1])
    exact, fast = linear(x, whole, backend="naive"), linear(x, whole, backend="torch")
    assert (fast - exact).norm() <= 1e-6 * exact.norm()
    full = x.double() @ dequantise(whole, torch.float64).T
    assert (exact - full).norm() <= 0.02 * full.norm()  # 8 bits of x


@every_format
def test_a_token_does_not_depend_on_its_company(format, monkeypatch):
    whole, x = matrix(format, 37, 300), tokens(40, 300)
    every = linear(x, whole, backend="torch")
    monkeypatch.setattr(packed, "DECODED", 3000)
    monkeypatch.setattr(packed, "PARTS", 2000)
    for T in (1, 3, 40):
        rows = torch.randperm(40, generator=generator(T))[:T]
        assert torch.equal(linear(x[rows], whole, backend="torch"), every[rows])


@pytest.mark.parametrize("format", ["ternary", "int8"])
@pytest.mark.parametrize("shape", [*SHAPES, (1003, 600), (2, 8256)], ids=str)
def test_products_of_integers_as_on_a_gpu_give_the_same_bits(format, shape, monkeypatch):
    whole = matrix(format, *shape)
    for T in (1, 5, 16, 17, 33):
        x = tokens(T, shape[1])
        x[0] = 3.0
        expected = linear(x, whole, backend="torch")
        with monkeypatch.context() as patch:
            patch.setattr(packed, "_integers", lambda device: True)
            patch.setattr(packed, "DECODED", 64 * 1024)
            assert torch.equal(linear(x, whole, backend="torch"), expected)


def test_integers_are_used_only_where_they_are_right(monkeypatch):
    here, tried = torch.device("cpu"), packed._tried.__wrapped__
    assert tried(here) and not packed._integers(here)
    inner = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: inner(a, b).clamp(max=1 << 25))
    assert not tried(here)

    def refused(a, b):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(torch, "_int_mm", refused)
    assert not tried(here)


def test_sums_are_exact_where_they_are_greatest():
    K = packing.MAX_COLUMNS
    for format, top in (("ternary", 1), ("int8", 127)):
        codes = torch.full((2, K), LAYOUTS[format].highest)
        codes[1, ::2] = LAYOUTS[format].lowest
        codes[1, 0] = LAYOUTS[format].highest
        whole = pack(codes, torch.ones(2), None, format)
        y = linear(torch.full((1, K), 127.0), whole, backend="torch")
        assert y.tolist() == [[f32(127.0 * top * K), 2 * 127.0 * top]]


@every_format
def test_rounding_is_to_even_and_in_each_token_by_itself(format):
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [1270.0, 5.0, 15.0, -25.0], [0.0, 0.0, 0.0, 0.0]])
    q, step = packed.quantise(x)
    assert q.tolist() == [[127, 0, 2, -2], [127, 0, 2, -2], [0, 0, 0, 0]]
    assert step.tolist() == [1, 10, 0]
    whole = matrix(format, 6, 4)
    assert linear(x, whole, backend="torch")[2].abs().max() == 0


@every_format
@pytest.mark.parametrize("backend", ["naive", "torch"])
def test_a_token_that_is_not_finite_spoils_its_row_alone(format, backend):
    """What is not finite gives NaN in its own row only; the smallest numbers give 0 or themselves, never NaN."""
    whole, x = matrix(format, 11, 130), tokens(7, 130)
    clean = linear(x, whole, backend=backend)
    x[1, 3], x[2, 129], x[4, 0] = torch.nan, torch.inf, -torch.inf
    x[5] *= 1e-38
    y = linear(x, whole, backend=backend)
    bad = [1, 2, 4]
    assert y[bad].isnan().all()
    assert torch.equal(y[[0, 3, 6]], clean[[0, 3, 6]])
    assert y[5].isfinite().all() and y[5].abs().max() < 1e-34
    much = 1e28 if format in tiles.FORMATS else 1e36  # sums are in units of a row until their end
    large = linear(x[:1] * much, whole, backend=backend)
    torch.testing.assert_close(large, clean[:1] * much, rtol=1e-5, atol=0)


@every_format
def test_swiglu_is_three_products(format):
    gate, up = (matrix(format, 70, 33, seed) for seed in (0, 1))
    down, x = matrix(format, 33, 70, 2), tokens(5, 33)
    hidden = packed._silu(linear(x, gate, backend="torch")) * linear(x, up, backend="torch")
    assert torch.equal(swiglu(x, gate, up, down, backend="torch"), linear(hidden, down, backend="torch"))
    exact = swiglu(x, gate, up, down, backend="naive")
    assert (swiglu(x, gate, up, down, backend="torch") - exact).norm() < 1e-3 * exact.norm()


def test_silu_is_that_of_float64():
    x = torch.cat([torch.linspace(-100, 100, 20001), torch.tensor([0.0, 1e-30, -1e-30, 3e38, -3e38])])
    exact = torch.nn.functional.silu(x.double())
    assert ((packed._silu(x) - exact).abs() <= 3e-7 * exact.abs() + 2e-36).all()
    assert packed._silu(torch.tensor([torch.nan, torch.inf, -torch.inf])).isnan().tolist() == [
        True,
        False,
        True,
    ]


@every_format
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_shapes_dtypes_and_strides(format, mode):
    whole, x = matrix(format, 13, 40), tokens(24, 40)
    gate, down = matrix(format, 9, 40, 3), matrix(format, 40, 9, 4)
    expected = linear(x, whole, backend="torch")
    with mode():
        assert torch.equal(linear(x.view(2, 3, 4, 40), whole, backend="torch").flatten(0, 2), expected)
        assert torch.equal(linear(x[0], whole, backend="torch"), expected[0])
        assert torch.equal(linear(x.T.contiguous().T, whole, backend="torch"), expected)
        assert torch.equal(linear(x[::2], whole, backend="torch"), expected[::2])
        assert linear(x[:0], whole, backend="torch").shape == (0, 13)
        assert swiglu(x[:0], gate, gate, down, backend="torch").shape == (0, 40)
        assert torch.equal(linear(x.double(), whole, backend="torch"), expected.double())
        half = linear(x.bfloat16(), whole, backend="torch")
        assert half.dtype == torch.bfloat16
        assert torch.equal(half, linear(x.bfloat16().float(), whole, backend="torch").bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(linear(x, whole, backend="torch"), expected)


def test_matrices_that_do_not_fit_are_errors():
    whole, x = matrix("ternary", 13, 40), tokens(2, 40)
    with refused(ValueError, "x", 39, 40):
        linear(x[:, 1:], whole)
    with refused(BackendError, "backend", "fast"):
        linear(x, whole, backend="fast")
    with refused(ValueError, "ternary", "int8"):
        swiglu(x, whole, matrix("int8", 13, 40), matrix("ternary", 40, 13))
    with refused(ValueError, "gate", "up", "down"):
        swiglu(x, whole, whole, whole)


# ---------------------------------------------------------------- native

needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built")


@needs_native
@every_format
@pytest.mark.parametrize("isa", ["avx512", "avx2", "scalar"])
@pytest.mark.parametrize("shape", [*SHAPES, (200, 4416)], ids=str)
def test_native_gives_the_same_bits(format, isa, shape):
    whole = matrix(format, *shape)
    try:
        with forced_isa(isa):
            for T in (0, 1, 2, 7, 33, 130):
                x = tokens(T, shape[1])
                if T == 33:
                    x[1, 0], x[3], x[4], x[5] = torch.nan, 0, x[4] * 1e-39, x[5] * 1e30
                y = linear(x, whole, backend="native")
                expected = linear(x, whole, backend="torch")
                assert torch.equal(y.nan_to_num(7e7), expected.nan_to_num(7e7))
    except ValueError as error:
        pytest.skip(str(error))


@needs_native
@every_format
def test_native_swiglu_gives_the_same_bits(format):
    for hidden, D in ((70, 33), (344, 128), (1100, 400)):
        gate, up = (matrix(format, hidden, D, seed) for seed in (0, 1))
        down = matrix(format, D, hidden, 2)
        for T in (0, 1, 2, 7, 70):
            x = 0.1 * tokens(T, D)
            y = swiglu(x, gate, up, down, backend="native")
            assert torch.equal(y, swiglu(x, gate, up, down, backend="torch"))
            for t in range(0, T, 9):
                assert torch.equal(swiglu(x[t : t + 1], gate, up, down, backend="native")[0], y[t])


@needs_native
def test_on_the_cpu_the_automatic_backend_is_native():
    whole, x = matrix("2bit", 13, 40), tokens(3, 40)
    assert packed._backend(x, "auto") == "native"
    assert torch.equal(linear(x, whole), linear(x, whole, backend="native"))
    assert packed._backend(x.to("meta"), "auto") == "torch"
    with refused(BackendError, "native", "meta"):
        packed._backend(x.to("meta"), "native")


def test_without_the_library_the_products_are_the_same(monkeypatch):
    whole, x = matrix("2bit", 13, 40), tokens(3, 40)
    expected, count, kernel = linear(x, whole), [], native.linear
    monkeypatch.setattr(native, "linear", lambda *args: count.append(1) or kernel(*args))
    linear(x, whole)
    assert len(count) == native.available()
    count.clear()
    monkeypatch.setattr(native, "wanted", lambda: False)
    monkeypatch.setattr(native, "reason", lambda: "not built")
    assert torch.equal(linear(x, whole), expected)
    with refused(BackendError, "native"):
        linear(x, whole, backend="native")
    assert not count


@needs_native
@every_format
def test_strides_of_the_matrix_do_not_matter(format):
    whole, x = matrix(format, 40, 40), tokens(3, 40)
    apart = whole._replace(
        codes=whole.codes.T.contiguous().T, scales=whole.scales.repeat_interleave(2, 0)[::2]
    )
    assert not apart.codes.is_contiguous() and not apart.scales.is_contiguous()
    for backend in ("native", "torch"):
        assert torch.equal(linear(x, apart, backend=backend), linear(x, whole))
        found = swiglu(x, apart, apart, apart, backend=backend)
        assert torch.equal(found, swiglu(x, whole, whole, whole))


# ---------------------------------------------------------------- torch


def calls(backend="torch"):
    whole = matrix("2bit", 13, 40)
    gate, up, down = matrix("ternary", 9, 40, 1), matrix("ternary", 9, 40, 2), matrix("ternary", 40, 9, 3)
    return {
        "linear": lambda x: linear(x, whole, backend=backend),
        "swiglu": lambda x: swiglu(x, gate, up, down, backend=backend),
    }


@pytest.mark.parametrize("name", calls())
def test_a_derivative_is_an_error_in_either_mode(name):
    call, x = calls()[name], tokens(3, 40)
    for tracked in (call(x.clone().requires_grad_()), call(x[0].clone().requires_grad_())):
        with pytest.raises(RuntimeError, match=packed.NO_GRADIENT):
            tracked.sum().backward()
    for function in (call, lambda x: torch.func.vmap(call)(x[None])):
        with pytest.raises(RuntimeError, match=f"{packed.NO_GRADIENT}|vmap"):
            torch.func.jvp(function, (x,), (x,))
    with torch.inference_mode(), pytest.raises(RuntimeError):
        torch.func.jvp(call, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match=packed.NO_GRADIENT):
            call(dual)
    for function in (torch.func.grad(lambda x: call(x).sum()), torch.func.jacfwd(call)):
        with pytest.raises(RuntimeError, match=f"{packed.NO_GRADIENT}|vmap"):
            function(x)


@pytest.mark.parametrize("name", calls())
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_compiled_product_is_the_same(name, mode, backend):
    torch._dynamo.reset()
    call, x = calls(backend)[name], tokens(3, 40)
    compiled = torch.compile(lambda x: call(x * 2) + 1, fullgraph=True, backend="aot_eager")
    with mode():
        assert torch.equal(compiled(x), call(x * 2) + 1)
    if mode is torch.enable_grad:
        with pytest.raises(RuntimeError, match=f"autograd|{packed.NO_GRADIENT}"):
            compiled(x.clone().requires_grad_()).sum().backward()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", calls())
def test_traces_hold_the_op(name):
    call, x = calls("auto")[name], tokens(3, 40)
    with torch.inference_mode():
        traces = torch.jit.trace(call, (x,)), make_fx(call)(x)
        for trace in traces:
            assert f"packed_{name}" in str(trace.graph)
            assert torch.equal(trace(-2 * x), call(-2 * x))


@pytest.mark.parametrize("name", calls())
def test_compiled_forward_mode_is_refused(name):
    call, x = calls()[name], tokens(3, 40)
    compiled = torch.compile(lambda x: torch.func.jvp(call, (x,), (x,)), backend="aot_eager")
    with pytest.raises(Exception, match=f"{packed.NO_GRADIENT}|jvp"):
        compiled(x)


@every_format
def test_the_op_is_sound(format):
    whole, x = matrix(format, 13, 40), tokens(3, 40)
    args = (x, whole.codes, whole.scales, format, 13, "torch")
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(packed._linear_op, args, test_utils=checks)
    down = matrix(format, 40, 13)
    parts = [part for m in (whole, whole, down) for part in (m.codes, m.scales)]
    torch.library.opcheck(packed._swiglu_op, (x, *parts, format, 13, 40, "torch"), test_utils=checks)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_fake_and_meta_tensors(mode):
    x, whole = tokens(3, 40), matrix("4bit", 13, 40)
    with mode(), FakeTensorMode(allow_non_fake_inputs=True):
        y = linear(torch.empty(2, 3, 40), whole, backend="torch")
        assert y.shape == (2, 3, 13) and isinstance(y, torch._subclasses.FakeTensor)
    with mode():
        meta = whole._replace(codes=whole.codes.to("meta"), scales=whole.scales.to("meta"))
        assert linear(x.to("meta"), meta, backend="torch").shape == (3, 13)


@pytest.mark.parametrize("format", tiles.FORMATS)
def test_triton_has_no_kernels_for_tiles(format):
    with refused(BackendError, format):
        linear(tokens(2, 64), matrix(format, 16, 64), backend="triton")
