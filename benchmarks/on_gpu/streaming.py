"""Experts from host memory, by way of two buffers on the GPU: bytes/s against the bus, and what overlaps.

`perspective-1t` has 60 routed layers of 128 experts of 27 MB, 209 GB. Here its whole model runs, with all its shared
weights and as many copies for a token as it has; but host memory holds HELD experts, which stand for all others in
turns. They are 0.65 GB, more than a processor caches, and the GPU keeps two: every expert crosses the bus as it would.
Weights are random. What a disk would add is not measured.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from on_gpu import frame
from on_gpu.frame import Place, Result, Skip, Unit
from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.designs.perspective.pdr import GATE_BIAS
from perspectron.experts.router import RoutedConfig
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel
from perspectron.ops import packed, packing
from perspectron.ops.packing import Packed
from perspectron.ops.triton import record
from perspectron.quant.convert import formats
from perspectron.quant.linear import QuantEmbedding, QuantLinear
from perspectron.stream.artifact import FORMAT, Header, expert_files
from perspectron.stream.device import DeviceExperts
from perspectron.stream.engine import StreamedModel, load_artifact
from perspectron.stream.expert_file import ExpertLayout, Shard
from perspectron.stream.synthetic import TERNARY, Draw, synthesize
from perspectron.stream.tensors import aligned

ABOUT = "experts from host memory: bytes/s against the bus, tokens/s of perspective-1t"
LIMIT = 120
HELD = 24
ROUND = 12  # experts in a measured call
PRODUCTS = (  # of perspective-1t: format, rows, columns
    ("2bit", 4096, 4096), ("2bit", 256, 4096), ("ternary", 11008, 4096), ("int8", 32000, 4096),
)  # fmt: skip
TEXT = "the cat sat on the mat, and the dog sat on the log. "


def units(place: Place) -> Iterator[Unit]:
    # They share the experts and the model, which take seconds to make.
    shared = _Shared(place)
    tokens = (1, 16) if place.rehearsed else (1, 64, 512)
    needs = 0 if place.rehearsed else 6 << 30
    yield Unit("packed expert", partial(expert, place, shared), seconds=12)
    yield Unit("whole model, a token", partial(whole, place, shared, True), seconds=25, needs=needs)
    yield Unit("the same as in memory", partial(same, place, shared), seconds=12)
    for product in PRODUCTS[: 2 if place.rehearsed else None]:
        name = "packed {}, {} x {}".format(*product)
        yield Unit(name, partial(products, place, *product), seconds=6)
    yield Unit("bus", partial(bus, place), seconds=8, needs=2 << 30 if not place.rehearsed else 0)
    for how in ("resident", "staged"):
        for T in tokens:
            name = f"experts {how}, {T} tokens"
            yield Unit(name, partial(overlap, place, shared, how == "resident", T), seconds=6)
    yield Unit("whole model, a token, staged", partial(whole, place, shared, False), seconds=20, needs=needs)


def _config(place: Place) -> ModelConfig:
    return presets.get("perspective-tiny" if place.rehearsed else "perspective-1t")


# ---------------------------------------------------------------- experts in host memory


class HostExperts:
    """Takes the place of a cache: HELD experts in host memory, which stand for all. resident: its memory may be pinned;
    else it is brought by way of the pinned buffers. Counts what is brought."""

    def __init__(self, layout: ExpertLayout, memories: list[Any], resident: bool) -> None:
        self.layout, self.resident, self.asked = layout, resident, 0
        self._shards = [layout.shard(memory) for memory in memories]

    @contextmanager
    def get(self, layer: int, expert: int, *, asked: bool = True) -> Iterator[Shard]:
        self.asked += 1
        yield self._shards[(7 * layer + expert) % len(self._shards)]

    def ask(self, layer: int, experts: Sequence[int]) -> None:
        pass

    def hint(self, layer: int, expert: int) -> None:
        pass

    def holds(self, layer: int, expert: int) -> bool:
        return True

    def served(self, layer: int, expert: int) -> None:
        pass


class OnDevice(HostExperts):
    """An ExpertSource of one expert that is on the device: what computing costs by itself."""

    def __init__(self, shard: Shard) -> None:
        self._shards, self.asked = [shard], 0


class _Shared:
    """What several units use, made when the first asks for it."""

    def __init__(self, place: Place) -> None:
        self.place, self.config = place, _config(place)
        self._memories: list[Any] = []
        self._model: StreamedModel | None = None

    @property
    def layout(self) -> ExpertLayout:
        ffn = next(block.ffn for block in self.config.blocks if isinstance(block.ffn, RoutedConfig))
        return ExpertLayout(self.config.d_model, ffn.hidden)

    def host(self, resident: bool) -> HostExperts:
        """The experts. Who has pinned them releases them, so that they are pageable again."""
        layout = self.layout
        if not self._memories:
            codes = np.take(
                np.resize(TERNARY, 256), np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
            )
            end = layout.parts[3].start
            for i in range(4 if self.place.rehearsed else HELD):
                memory = aligned(layout.bytes)
                memory[:end] = np.resize(np.roll(codes, 977 * i), end)
                gains = (1.0, 1.0, (2 * len(self.config.blocks)) ** -0.5)
                for matrix, shape, gain in zip(layout.shard(memory), layout.shapes, gains, strict=True):
                    matrix.scales.copy_(Draw("ternary", shape, gain).scales())
                self._memories.append(memory)
        return HostExperts(layout, self._memories, resident)

    def device_shard(self) -> Shard:
        """An expert on the device."""
        device, host = self.place.device, self.host(False)
        with host.get(0, 0) as shard:
            return Shard(*(Packed(m.codes.to(device), m.scales.to(device), m.format, m.shape) for m in shard))

    @cached_property
    def backend(self) -> str:
        """The backend of packed matrices that `auto` takes from now on: Triton's kernels, whatever the record of a
        selftest says, if an expert's outputs are those of PyTorch's operations."""
        shard = self.device_shard()
        try:
            for T in (5,) if self.place.rehearsed else (1, 5, 64):
                x = _tokens(self.place, T, self.layout.d_model)
                found, expected = (packed.swiglu(x, *shard, backend=how) for how in ("triton", "torch"))
                if float((found - expected).norm() / expected.norm()) > 1e-3:
                    return f"torch: Triton's kernels are wrong for {T} tokens"
        except Exception as error:
            return f"torch: {type(error).__name__}: {error}"[:200]
        if self.place.device.type == "cuda":
            packed.on_gpu.wanted = lambda backend, x, *_: x.is_cuda and backend in ("auto", "triton")
        return "triton"

    @property
    def model(self) -> StreamedModel:
        if self._model is None:
            self._model = _random(self.config, self.place.device)
        return self._model


def _random(config: ModelConfig, device: torch.device) -> StreamedModel:
    """The model with random shared weights, made on the device."""
    with torch.device("meta"):
        plain = LanguageModel(config)
        quant = formats(plain, "2bit")
        model = StreamedModel(
            Header(FORMAT, config, "", quant, expert_files(config, 1), None, "random weights")
        )
    model = model.to_empty(device=device).requires_grad_(False).eval()
    packed_names, writes = set[str](), (2 * len(config.blocks)) ** -0.5
    torch.manual_seed(0)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear | QuantEmbedding):
            gain = writes if name.endswith(("o_proj", "down_proj")) else 1.0
            if isinstance(module, QuantEmbedding):
                gain = config.embedding_std * config.d_model**0.5
            module.codes.random_(1, 256)
            module.scales.copy_(Draw(module.format, module.shape, gain).scales())
            packed_names |= {f"{name}.codes", f"{name}.scales"}
    for name, tensor in model.state_dict().items():
        if name in packed_names:
            continue
        tensor.zero_()
        if name.endswith("norm.weight"):
            tensor.fill_(1)
        elif name.endswith("route_proj.weight"):
            tensor.normal_()
        elif name.endswith("route_proj.bias"):
            tensor.uniform_()
        elif name.endswith("p_proj.bias"):
            tensor.fill_(GATE_BIAS)
    return model


# ---------------------------------------------------------------- units


def _tokens(place: Place, T: int, K: int) -> Tensor:
    return torch.randn(T, K, generator=torch.Generator().manual_seed(0)).to(place.device)


def _compared(place: Place, calls: dict[str, Callable[[], Tensor]], size: int) -> Result:
    """Both backends' outputs beside each other; their seconds, and those of the kernels in a CUDA graph."""
    with torch.inference_mode():
        found, expected = (call() for call in calls.values())
        calls = dict(calls)
        if place.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                calls["triton"]()
            calls["triton, in a graph"] = graph.replay
        times = frame.in_turns(place, calls, rounds=3, warm=1)
    spreads = {name: frame.spread(taken) for name, taken in times.items()}
    return {
        "same_bits": bool(torch.equal(found, expected)),
        "largest_difference": float((found - expected).abs().max() / expected.abs().max()),
        "seconds": spreads,
        "bytes_per_second": {name: size / one["median"] for name, one in spreads.items()},
        "times_as_fast": frame.ratio(times["torch"], times["triton"]),
    }


def _with_triton() -> None:
    if record.version() is None:
        raise Skip("triton is not installed")


def products(place: Place, format: str, N: int, K: int) -> Result:
    """A packed matrix times few and many tokens: Triton's kernels against PyTorch's operations. Copies of the matrix,
    used in turns, are more than a processor caches. Bytes are the matrix's, once."""
    _with_triton()
    if place.rehearsed:
        N, K = N // 128, K // 16
    legal = torch.from_numpy(TERNARY) if format == "ternary" else torch.arange(1, 256, dtype=torch.uint8)
    draw, (codes_shape, scales_shape, dtype) = torch.Generator().manual_seed(0), packing.sizes(format, (N, K))
    codes = legal[torch.randint(len(legal), codes_shape, generator=draw)].to(place.device)
    scales = (torch.rand(scales_shape, generator=draw) + 0.5).to(place.device, dtype)
    one = Packed(codes, scales, format, (N, K))
    count = 2 if place.rehearsed else max(1, min(8, (128 << 20) // one.nbytes))
    copies = [one, *(one._replace(codes=codes.clone()) for _ in range(count - 1))]
    result: dict[str, Any] = {"bytes": one.nbytes, "matrices": count}
    for T in (1, 5) if place.rehearsed else (1, 16, 512):
        x = _tokens(place, T, K)

        def run(backend: str, x: Tensor = x) -> Tensor:
            y = [packed.linear(x, matrix, backend=backend) for matrix in copies]
            return y[-1]

        calls = {"triton": partial(run, "triton"), "torch": partial(run, "torch")}
        result[f"{T} tokens"] = _compared(place, calls, count * one.nbytes)
    return result


def expert(place: Place, shared: _Shared) -> Result:
    """An expert on the device, likewise; four copies in turns."""
    _with_triton()
    shards = [shared.device_shard() for _ in range(1 if place.rehearsed else 4)]
    result: dict[str, Any] = {"bytes": shared.layout.bytes, "experts": len(shards)}
    for T in (5,) if place.rehearsed else (1, 16, 64, 512):
        x = _tokens(place, T, shared.layout.d_model)

        def run(backend: str, x: Tensor = x) -> Tensor:
            y = [packed.swiglu(x, *shard, backend=backend) for shard in shards]
            return y[-1]

        calls = {"triton": partial(run, "triton"), "torch": partial(run, "torch")}
        result[f"{T} tokens"] = _compared(place, calls, len(shards) * shared.layout.bytes)
    return result


def bus(place: Place) -> Result:
    """Bytes/s of copies from the host, pinned and not, whole and in pieces of an expert."""
    size, piece = (1 << 22, 1 << 18) if place.rehearsed else (1 << 30, 27172864)
    cuda = place.device.type == "cuda"
    pageable = torch.ones(size, dtype=torch.uint8)
    pinned = torch.ones(size, dtype=torch.uint8, pin_memory=cuda)
    to = torch.empty(size, dtype=torch.uint8, device=place.device)

    def pieces(host: Tensor) -> None:
        for at in range(0, size - piece + 1, piece):
            to[at : at + piece].copy_(host[at : at + piece], non_blocking=True)

    calls = {
        "pinned": lambda: to.copy_(pinned, non_blocking=True),
        "pinned, in experts": lambda: pieces(pinned),
        "pageable": lambda: to.copy_(pageable, non_blocking=True),
        "back to pinned": lambda: pinned.copy_(to, non_blocking=True),
        "on the device": lambda: (
            to.copy_(to.roll(0)) if place.rehearsed else to[: size // 2].copy_(to[size // 2 :])
        ),
        "pageable to pinned, by the host": lambda: pinned.copy_(pageable),
    }
    times = frame.in_turns(place, calls, rounds=5, warm=1)
    counted = {"pinned, in experts": size // piece * piece, "on the device": size}  # read and written
    return {
        name: {"seconds": frame.spread(taken), "bytes": counted.get(name, size)}
        | {"bytes_per_second": counted.get(name, size) / frame.spread(taken)["median"]}
        for name, taken in times.items()
    }


def same(place: Place, shared: _Shared) -> Result:
    """A small model from a folder: on the device, with experts from pinned memory and from disk, beside the CPU, which
    has all in memory. The same products in another order differ in last bits, and one before an activation is rounded
    to 8 bits may be a whole step after it: few numbers may differ visibly, and logits by a hundredth at most, in
    norm."""
    folder = place.folder / "streaming-tiny"
    config = presets.get("perspective-tiny")
    if not folder.exists():
        synthesize(config, folder, lambda: Tokenizer.train([TEXT * 40], 300), experts=8)
    ids = torch.randint(
        1, 290, (1, 28 if place.rehearsed else 40), generator=torch.Generator().manual_seed(3)
    )
    resident, _ = load_artifact(folder)
    expected, chosen = _read(resident, ids), _greedy(place, resident, ids[:, :8])
    size = resident.header.experts.shard_bytes  # type: ignore[union-attr]
    result: dict[str, Any] = {"packed_by": shared.backend}
    for name, budget in (("resident", None), ("from disk", 3 * size)):
        model, _ = load_artifact(folder, cache_bytes=budget)
        assert model.cache is not None
        assert model.cache.resident == (budget is None)
        if place.device.type == "cuda":
            model.to(place.device)
        else:
            model.attach(DeviceExperts(model.cache, place.device), predict=True)
        found = _read(model, ids.to(place.device)).cpu()
        got = _greedy(place, model, ids[:, :8])
        apart = float((found - expected).norm() / expected.norm())
        result[name] = {
            "relative_difference": apart,
            "largest_difference": float((found - expected).abs().max()),
            "largest_logit": float(expected.abs().max()),
            "same_choices": float((found.argmax(-1) == expected.argmax(-1)).double().mean()),
            "same_tokens": got == chosen,
            "first_other_token": next(
                (i for i, (a, b) in enumerate(zip(got, chosen, strict=True)) if a != b), None
            ),
            "holds": apart < 0.01,
        }
        if model._copies is not None:
            model._copies.close()
        model.cache.close()
    return result


def _read(model: StreamedModel, ids: Tensor) -> Tensor:
    """Logits of a prompt of 25 tokens, then of steps."""
    with torch.inference_mode():
        out = [model(ids[:, :25])]
        for t in range(25, ids.shape[1]):
            out.append(model(ids[:, t : t + 1], out[-1].state))
    return torch.cat([one.logits for one in out], 1)


def _greedy(place: Place, model: StreamedModel, ids: Tensor) -> list[int]:
    found = list[int]()
    with torch.inference_mode():
        out = model(ids.to(model.device))
        for _ in range(3 if place.rehearsed else 24):
            token = out.logits[:, -1:].argmax(-1)
            found.append(int(token))
            out = model(token, out.state)
    return found


def overlap(place: Place, shared: _Shared, resident: bool, T: int) -> Result:
    """Milliseconds of an expert: copied alone, computed alone, one after the other, and one while the other. The
    efficiency is the longer of the two alone over what both take together: 1 is perfect."""
    host, count = shared.host(resident), 4 if place.rehearsed else ROUND
    backend = shared.backend
    copies, device_shard = DeviceExperts(host, place.device), shared.device_shard()  # type: ignore[arg-type]
    x = torch.randn(T, host.layout.d_model, generator=torch.Generator().manual_seed(0)).to(place.device)
    turn = itertools.count()

    def keys() -> list[tuple[int, int]]:
        """Others than the last time."""
        at = next(turn)
        return [(at % 2 + 10, (at * count + i) % 1000) for i in range(count)]

    def copied() -> None:
        for key in keys():
            with copies.get(*key):
                pass

    def computed() -> None:
        for _ in range(count):
            packed.swiglu(x, *device_shard)

    def in_turn() -> None:
        for key in keys():
            with copies.get(*key) as shard:
                packed.swiglu(x, *shard)
            place.wait()

    def together() -> None:
        wanted = keys()
        for key, after in itertools.zip_longest(wanted, wanted[1:]):
            with copies.get(*key) as shard:
                if after is not None:
                    copies.hint(*after)
                packed.swiglu(x, *shard)

    calls = {"copied": copied, "computed": computed, "in turn": in_turn, "together": together}
    with torch.inference_mode():
        computed()  # once before it is counted: it tries what is tried once
        counted = _Counted()
        with counted:
            packed._swiglu(x, tuple(device_shard), "torch")
        for call in calls.values():  # pins all
            for _ in range(1 if place.rehearsed else 2):
                call()
        times = frame.in_turns(place, calls, rounds=5, warm=1)
    copies.close()
    each = {name: frame.spread([1e3 * seconds / count for seconds in taken]) for name, taken in times.items()}
    longer = [max(pair) for pair in zip(times["copied"], times["computed"], strict=True)]
    return {
        "tokens": T,
        "bytes": host.layout.bytes,
        "milliseconds": each,
        "copied_bytes_per_second": host.layout.bytes / (1e-3 * each["copied"]["median"]),
        "efficiency": frame.ratio(longer, times["together"]),
        "gain_over_in_turn": frame.ratio(times["in turn"], times["together"]),
        "packed_by": backend,
        "operations_of_torch": counted.count,
        "integers": packed._integers(place.device),
    }


class _Counted(TorchDispatchMode):
    """Counts operations that compute, about as many as kernels."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = all(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        self.count += not views and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


def whole(place: Place, shared: _Shared, resident: bool) -> Result:
    """Seconds of a token through the whole model: with experts from the host; with one that is on the device already;
    and of its copies alone. The longest that host memory could make it is as fast as the bus brings the experts of a
    token, one for each routed layer."""
    backend, host, model, device = shared.backend, shared.host(resident), shared.model, place.device
    copies = DeviceExperts(host, device)  # type: ignore[arg-type]
    layers, count = [ffn.layer for ffn in model.routed], 2 if place.rehearsed else 3
    cuda, last, bring_turn = device.type == "cuda", [torch.empty(0)], [0]
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)

    def stepped(source: Any) -> tuple[list[float], list[int]]:
        model.attach(source, predict=True)
        seconds, asked = list[float](), list[int]()
        with torch.inference_mode():
            token = torch.full((1, 1), 17, device=device)
            state = model(token).state
            for step in range(1 + count):
                place.wait()
                before, start = host.asked, time.perf_counter()
                out = model(token, state, consume_state=True)
                state, token, last[0] = out.state, out.logits[:, -1:].argmax(-1), out.logits
                place.wait()
                if step > 0:
                    seconds.append(time.perf_counter() - start)
                    asked.append(host.asked - before)
        return seconds, asked

    def bring() -> None:
        for layer in layers:
            with copies.get(layer, bring_turn[0] % 100):
                bring_turn[0] += 1

    with torch.inference_mode():
        bring()
    streamed, asked = stepped(copies)
    peak = torch.cuda.max_memory_allocated(device) if cuda else None
    alone, _ = stepped(OnDevice(shared.device_shard()))
    with torch.inference_mode():
        copied = frame.in_turns(place, {"copies": bring}, rounds=3, warm=1)["copies"]
    copies.close()
    token, computed, brought = (frame.spread(x) for x in (streamed, alone, copied))
    size = host.layout.bytes
    E = next(b.ffn for b in shared.config.blocks if isinstance(b.ffn, RoutedConfig)).torus
    return {
        "model": shared.config.name,
        "packed_by": backend,
        "experts_held_of": [HELD, len(layers) * int(np.prod(E))],
        "seconds_of_a_token": token,
        "tokens_per_second": 1 / token["median"],
        "seconds_without_copies": computed,
        "seconds_of_the_copies": brought,
        "efficiency": max(computed["median"], brought["median"]) / token["median"],
        "copies_of_a_token": asked,
        "bytes_of_a_token": size * sum(asked) / len(asked),
        "bytes_per_second": size * sum(asked) / sum(streamed),
        "tokens_per_second_of_the_bus": 1 / brought["median"],
        "formula": "routed layers × bytes of an expert ÷ bytes/s of the copies = seconds_of_the_copies, for one token",
        "shared_bytes": model.shared_bytes,
        "expert_bytes_of_the_model": len(layers) * int(np.prod(E)) * size,
        "peak_device_memory": peak,
        "finite": bool(last[0].isfinite().all()),
    }
