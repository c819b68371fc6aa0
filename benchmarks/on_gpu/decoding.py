"""Stage (e): decoding, in tokens/s, with the modules, with graphs and with compiled graphs; sessions, in ms.

A step is the forward of one token in each row, head included, drawing not. Weights and states are random numbers, on
which times do not depend: a state has the shapes and the length that it has after so many tokens. The share of the
bandwidth is bytes that a token must move (each weight once for all rows, memories read and written, keys and values
read) over time, over what a copy reaches.
Bars: one row ≥ 0.6 of the bandwidth at 125 M; 512 rows ≥ 100 times the tokens/s of one.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from on_gpu import joined
from on_gpu.frame import Place, Result, Skip, Unit, in_turns, ratio, spread
from perspectron import presets
from perspectron.decode import graphs as graphs_module
from perspectron.decode.graphs import Graphs
from perspectron.decode.held import caches
from perspectron.decode.recorder import Mode
from perspectron.decode.steps import stepped
from perspectron.model.cache import Cache
from perspectron.model.model import LanguageModel
from perspectron.model.ring import Ring
from perspectron.model.state import LMState, load_state, save_state
from perspectron.ops import attention

ABOUT = (
    "decoding: tokens/s at 1 to 512 rows, with and without graphs, and the share of the bandwidth; sessions"
)
LIMIT = 200
SIZES = {"20M": (20_000_000, 8192), "125M": (125_000_000, 32768)}
ROWS, MODULES = (1, 8, 64, 512), (1, 512)  # rows with graphs; those of them that the modules step too
FREE = 256  # slots of a cache for the steps that are timed
READ = 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VIEWS = {
    *("view", "_unsafe_view", "t", "transpose", "unsqueeze", "select", "slice", "expand", "detach", "alias"),
    *("split", "split_with_sizes", "unbind", "permute", "as_strided", "squeeze", "reshape", "empty_strided"),
    *("empty", "empty_like", "new_empty", "new_empty_strided", "promote_types", "scalar_tensor", "flatten"),
    *("unflatten", "chunk", "lift_fresh", "to", "contiguous", "expand_as", "view_as", "T", "mT", "numpy_T"),
}


def units(place: Place) -> Iterable[Unit]:
    """125 M first, and what the bars are about; then sessions, the compiler, the other designs, and 20 M."""
    if place.device.type != "cuda":
        graphs_module.Graph = _Again  # type: ignore[misc]
        torch.set_num_threads(1)
    graphs_module.PATIENCE = 0
    yield Unit("copy bandwidth", partial(bandwidth, place), seconds=3)
    asked = [("perspective2", "125M", dtype, 1024) for dtype in DTYPES]
    asked += [("transformer", "125M", "bfloat16", 1024)]
    asked += [(design, "125M", "bfloat16", 65536) for design in ("perspective2", "transformer")]
    yield from (_unit(place, *each) for each in asked)
    yield Unit("kernels of a step", partial(operations, place), seconds=8)
    for design in ("perspective2", "transformer"):
        yield Unit(f"sessions, {design} 125M at 65536", partial(sessions, place, design), 8 << 30, 15)
    for dtype in list(DTYPES)[: 1 if place.rehearsed else None]:
        name = f"compiled with its products, perspective2 125M {dtype}"
        yield Unit(name, partial(compiled, place, "all", dtype), 8 << 30, 40)
    more = [(design, "125M", "bfloat16", 1024) for design in ("rwkv7", "gdn")]
    more += [(design, "20M", "bfloat16", 1024) for design in ("perspective2", "transformer", "rwkv7", "gdn")]
    more += [(design, "125M", "float32", 1024) for design in ("transformer", "rwkv7", "gdn")]
    yield from (_unit(place, *each) for each in (more[:1] if place.rehearsed else more))
    if place.rehearsed:
        return
    name = "compiled between products, perspective2 125M bfloat16"
    yield Unit(name, partial(compiled, place, "between", "bfloat16"), 8 << 30, 40)


def _unit(place: Place, design: str, size: str, dtype: str, context: int) -> Unit:
    name = f"{design} {size} {dtype} at {context}"
    return Unit(name, partial(decoding, place, design, size, dtype, context), 8 << 30, 7)


# ---------------------------------------------------------------- what is measured


def bandwidth(place: Place) -> Result:
    """Bytes/s of a copy, read and written."""
    n = 1 << (20 if place.rehearsed else 30)
    x, y = (torch.zeros(n, dtype=torch.uint8, device=place.device) for _ in "xy")
    seconds = in_turns(place, {"copy": lambda: y.copy_(x)})["copy"]
    return {"bytes": 2 * n, "seconds": spread(seconds), "bytes_per_second": 2 * n / spread(seconds)["median"]}


@torch.inference_mode()
def decoding(place: Place, design: str, size: str, dtype: str, context: int) -> Result:
    """Tokens/s of each number of rows, in turns."""
    model = build(place, design, size, DTYPES[dtype])
    context = min(context, 48) if place.rehearsed else context
    calls: dict[str, Callable[[], object]] = {}
    moved, left, used = dict[str, int](), dict[str, str](), dict[str, Graphs]()
    for rows in (1, 8) if place.rehearsed else ROWS:
        try:
            state = after(place, model, rows, context)
            graphs = Graphs(model)
            step = stepper(model, graphs, state)
            step()
        except (torch.OutOfMemoryError, Skip) as why:
            left[f"graph {rows}"] = str(why).splitlines()[0]
            place.free()
            continue
        calls[f"graph {rows}"], moved[f"graph {rows}"] = step, bytes_of(model, state)
        used[f"graph {rows}"] = graphs
        if rows in MODULES:
            moved[f"modules {rows}"] = moved[f"graph {rows}"]
            calls[f"modules {rows}"] = stepper(model, None, after(place, model, rows, context))
        del state
    if not calls:
        raise Skip("; ".join(left.values()))
    copied = bandwidth(place)["bytes_per_second"]
    seconds = in_turns(place, calls)
    found = {name: _said(int(name.split()[1]), times, moved[name], copied) for name, times in seconds.items()}
    ratios = {}
    if {"graph 1", "graph 512"} <= seconds.keys():
        ratios["tokens/s of 512 rows over 1"] = {
            key: 512 * value if key != "count" else value
            for key, value in ratio(seconds["graph 1"], seconds["graph 512"]).items()
        }
    for rows in MODULES:
        if {f"graph {rows}", f"modules {rows}"} <= seconds.keys():
            ratios[f"modules over graph, {rows} rows"] = ratio(
                seconds[f"modules {rows}"], seconds[f"graph {rows}"]
            )
    return {
        "model": about(model), "context": context, "copy_bytes_per_second": copied, "steps": found,
        "ratios": ratios, "left_out": left,
    }  # fmt: skip


@torch.inference_mode()
def compiled(place: Place, what: joined.Compiled, dtype: str) -> Result:
    """One row with a compiled graph beside the modules' graph, and the seconds that compiling took."""
    model = build(place, "perspective2", "125M", DTYPES[dtype])
    context = 48 if place.rehearsed else READ
    if place.device.type != "cuda":
        joined.COMPILER, attention.stepped = "eager", _stepped
    begun = time.perf_counter()
    state = after(place, model, 1, context)
    made = stepper(model, joined.Joined(model, what), state)
    made()
    place.wait()
    took = time.perf_counter() - begun
    calls = {"graph": stepper(model, Graphs(model), after(place, model, 1, context)), what: made}
    moved, copied = bytes_of(model, state), bandwidth(place)["bytes_per_second"]
    seconds = in_turns(place, calls)
    return {
        "model": about(model), "context": context, "seconds_to_compile": took, "copy_bytes_per_second": copied,
        "steps": {name: _said(1, times, moved, copied) for name, times in seconds.items()},
        "ratios": {f"graph over {what}": ratio(seconds["graph"], seconds[what])},
    }  # fmt: skip


@torch.inference_mode()
def operations(place: Place) -> Result:
    """Kernels that the modules launch for a token of one row: operations that are no views."""
    found = {}
    for design in ("perspective2", "transformer", "rwkv7", "gdn")[: 1 if place.rehearsed else None]:
        for dtype in DTYPES:
            model = build(place, design, "125M", DTYPES[dtype])
            state, ids_11 = after(place, model, 1, 48), _ids(place, model, 1)
            model.hidden(ids_11, state)
            with _Counted() as counted:
                model.head(model.hidden(ids_11, state)[0][:, 0])
            most = dict(counted.names.most_common(12))
            found[f"{design} {dtype}"] = {"operations": sum(counted.names.values()), "most": most}
    return found


@torch.inference_mode()
def sessions(place: Place, design: str) -> Result:
    """Milliseconds to save a session of one row to a file, to load it onto the device, and to fork it; those of the
    model's fingerprint, which saving and loading both take, apart."""
    model = build(place, design, "125M", torch.bfloat16)
    state = after(place, model, 1, 48 if place.rehearsed else 65536)
    few = 1 if state.nbytes > 1 << 30 or place.rehearsed else 5
    with tempfile.TemporaryDirectory(dir=place.folder) as folder:
        path = Path(folder) / "a.state"
        print_ms = _clock(place, few, lambda: model.fingerprint())
        save_ms = _clock(place, few, lambda: save_state(path, state, model))
        load_ms = _clock(place, few, lambda: load_state(path, model).to(place.device))
        size = path.stat().st_size
    fork = in_turns(place, {"fork": lambda: state.fork()})["fork"]
    one, ids_11 = Graphs(model), _ids(place, model, 1)
    one.step(ids_11, state.fork())
    others = [state.fork() for _ in range(3)]
    take_ms = _clock(place, 3, lambda: one.step(ids_11, others.pop() if others else state.fork()))
    return {
        "model": about(model), "state_bytes": state.nbytes, "file_bytes": size, "fingerprint_ms": print_ms,
        "save_ms": save_ms, "restore_ms": load_ms, "fork_ms": spread([1e3 * x for x in fork]),
        "step_of_another_session_ms": take_ms,
    }  # fmt: skip


# ---------------------------------------------------------------- models, states and steps


def build(place: Place, design: str, size: str, dtype: torch.dtype) -> LanguageModel:
    """A model with random weights, made on the device."""
    params, vocab = SIZES[size]
    if place.rehearsed:
        config = presets.small(design, vocab_size=128, d_model=32, layers=2, seq_len=64)
    else:
        config = presets.solve(design, params, vocab_size=vocab, seq_len=READ)
    with torch.inference_mode(False), torch.no_grad():
        with place.device:
            model = LanguageModel(config).to(dtype).eval()
        draw = torch.Generator(place.device).manual_seed(0)
        for parameter in model.parameters():
            parameter.uniform_(-0.05, 0.05, generator=draw)
        for buffer in model.buffers():
            buffer.zero_()
    return model.requires_grad_(requires_grad=False)


def after(place: Place, model: LanguageModel, rows: int, context: int) -> LMState:
    """The state of so many rows after `context` tokens, with room for those that are timed."""
    free = FREE if not place.rehearsed else 64
    state = model.init_state(rows, capacity=context + free)

    def filled(part: Any) -> Any:
        if isinstance(part, Cache):
            for x in (part.k_BHSK, part.v_BHSV):
                x[:, :, :context].normal_()
            return replace(part, length_B=torch.full_like(part.length_B, context), used=context)
        if not isinstance(part, Tensor):
            return part
        return part.normal_() if part.is_floating_point() else torch.full_like(part, context)

    full = pytree.tree_map(filled, state, is_leaf=lambda part: isinstance(part, Cache))
    return replace(full, model=model.number)


def stepper(model: LanguageModel, graphs: Graphs | None, state: LMState) -> Callable[[], object]:
    """A function that reads a token in each row and goes on from there."""
    now = [state]
    ids_B1 = torch.ones(state.batch_size, 1, dtype=torch.int64, device=model.device)

    def by_graph() -> None:
        assert graphs is not None
        done = graphs.step(ids_B1, now[0])
        if done is None:
            raise Skip(f"no graph: {graphs.told}")
        now[0] = done[2]

    def by_modules() -> None:
        now[0] = stepped(model, None, ids_B1, now[0])[2]

    return by_modules if graphs is None else by_graph


def bytes_of(model: LanguageModel, state: LMState) -> int:
    """Bytes that a step of all rows must move."""
    weights = {x.data_ptr(): x.nbytes for x in (*model.parameters(), *model.buffers())}
    if model.config.head is not None:
        weights.pop(model.embedding.weight.data_ptr())
    kept = pytree.tree_leaves(state, is_leaf=lambda part: isinstance(part, Cache | Ring))
    once = sum(
        (part.k_BHSK.nbytes + part.v_BHSV.nbytes) * part.used // max(1, part.slots) for part in caches(state)
    )
    once += sum(part.k_BGWK.nbytes + part.v_BGWK.nbytes for part in kept if isinstance(part, Ring))
    twice = sum(part.nbytes for part in kept if isinstance(part, Tensor))
    return sum(weights.values()) + once + 2 * twice


def about(model: LanguageModel) -> dict[str, Any]:
    sizes = {"parameters": sum(x.numel() for x in model.parameters()), "dtype": str(model.dtype)}
    return {"name": model.config.name, "layers": len(model.blocks), "d_model": model.config.d_model} | sizes


def _said(rows: int, seconds: list[float], moved: int, copied: float) -> dict[str, Any]:
    middle = spread(seconds)["median"]
    return {
        "seconds": spread(seconds), "tokens_per_second": rows / middle, "bytes": moved,
        "bytes_per_second": moved / middle, "share_of_bandwidth": moved / middle / copied,
    }  # fmt: skip


def _ids(place: Place, model: LanguageModel, rows: int) -> Tensor:
    return torch.ones(rows, 1, dtype=torch.int64, device=place.device)


def _clock(place: Place, count: int, call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a call, by the host's clock."""
    times = []
    for _ in range(count):
        place.wait()
        begun = time.perf_counter()
        call()
        place.wait()
        times.append(1e3 * (time.perf_counter() - begun))
    return spread(times)


def _stepped(q: Tensor, ring: tuple[Tensor, Tensor], at: attention.Places, **more: Any) -> Tensor:
    """`attention.stepped`, as a GPU has it: it asks for no number."""
    filled_BS = attention.slots(at.length_B.clamp_min(1), ring[0].shape[2]) >= 0
    return attention.attend(q, *ring, filled_BS[:, None], **more)


class _Again:
    """A graph without CUDA, for the rehearsal: the function again."""

    def __init__(self, run: Callable[[], None], device: torch.device, *, asks: bool = True) -> None:
        run()
        self.replay = run


class _Counted(Mode):
    """Counts operations by name, but for those that make views or empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, out = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        cast = name == "to" and out.dtype != args[0].dtype
        if cast or name not in VIEWS:
            self.names[name] += 1
        return out
