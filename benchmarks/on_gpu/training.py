"""Stage (d): training, in tokens/s and memory, of eight designs beside the models of transformers and fla.

An update is the trainer's: autocast to bfloat16, the gradient's norm bounded, AdamW in one kernel. A model's updates
and the transformer's are taken in turns, so that their ratio does not depend on what the GPU did in between. Tokens are
random, in windows without documents inside; `documents` says what those cost.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from on_gpu import tuning
from on_gpu.frame import ROOT, Place, Result, Skip, Unit, ratio, read, say, spread, version
from perspectron import presets
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel, build
from perspectron.ops.triton import record
from perspectron.train.loop import compiled
from perspectron.train.optim import OptimConfig, optimizer_of

ABOUT = "training: tokens/s and memory at 20 M and 125 M, eager and compiled, beside transformers and fla"
LIMIT = 300
DESIGNS = (
    "perspective2", "transformer", "perspective", "transformer[shift=true,first_values=true]", "gla", "ssd", "gdn",
    "rwkv7",
)  # fmt: skip
FLA = ("GLA", "GatedDeltaNet", "RWKV7", "Mamba2")
LLAMA, REFERENCE, PRODUCT = "transformers' Llama", "transformer", "bf16 product"
WITHIN = 0.05  # of the parameters
UPDATES, WARM, LONGEST = 10, 3, 8.0  # updates that count, updates before them, seconds for those that count
COMPILING = 90.0  # seconds that a child process may take, its start and the compiler included
OPTIM = OptimConfig(lr=1e-4)


class Size(NamedTuple):
    """How large a model is, and its batch."""

    params: int
    vocab: int
    rows: int
    T: int


SIZES = {"20M": Size(20_000_000, 8192, 32, 1024), "125M": Size(125_000_000, 32768, 16, 1024)}
TINY = Size(0, 512, 2, 32)  # of the rehearsal


class Trained(NamedTuple):
    """A model that is trained: its loss of ids and targets [B,T] and of where documents begin, its optimizer."""

    loss: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def params(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


class Batch(NamedTuple):
    ids: Tensor
    targets: Tensor
    reset: Tensor | None = None


def units(place: Place) -> Iterable[Unit]:
    """20 M eager first, ours and then the others'; then what compiling gives; then 125 M."""
    size = "tiny" if place.rehearsed else "20M"
    if place.rehearsed:
        torch.set_num_threads(1)  # tiny products, maybe on a busy machine
    yield Unit(PRODUCT, partial(product, place), seconds=3)
    kept: dict[str, Trained] = {}
    for design in DESIGNS:
        yield Unit(f"{design} {size}", partial(eager, place, design, size, kept), seconds=12)
    yield Unit(f"{LLAMA} {size}", partial(eager, place, LLAMA, size, kept), seconds=10)
    for kind in FLA[:2]:
        yield Unit(f"fla's {kind} {size}", partial(eager, place, f"fla's {kind}", size, kept), seconds=30)
    for name in ("perspective2", REFERENCE, LLAMA)[: 1 if place.rehearsed else 3]:
        yield Unit(f"{name} {size} compiled", partial(in_child, place, name, size, kept), seconds=45)
    for kind in FLA[2:]:
        yield Unit(f"fla's {kind} {size}", partial(eager, place, f"fla's {kind}", size, kept), seconds=30)
    if place.rehearsed:
        return
    kept.clear()
    for name in (*DESIGNS[:2], LLAMA, *DESIGNS[2:], *(f"fla's {kind}" for kind in FLA[:3])):
        yield Unit(f"{name} 125M", partial(eager, place, name, "125M", kept), seconds=25)
    kept.clear()
    for name in ("perspective2", REFERENCE):
        yield Unit(f"{name} 125M compiled", partial(in_child, place, name, "125M", kept), seconds=60)


# ---------------------------------------------------------------- models


def size_of(name: str) -> Size:
    return SIZES.get(name, TINY)


HEADS: dict[str, Callable[[int], str]] = {
    "perspective2": lambda H: f"heads={H},kv_heads={H // 3 if H == 6 else 3}",
    "perspective": lambda H: f"heads={H},kv_heads={H // 3 if H == 6 else 3}",
    "transformer": lambda H: f"heads={H}",
    "gla": lambda H: f"heads={H}",
    "gdn": lambda H: f"heads={H}",
    "rwkv7": lambda H: "head_dim=64",
}
"""The sizes that make heads 64 wide, as those that a GPU's kernels are made for, of H heads in the model's width."""
EVEN = 64  # what the width of a network is a multiple of, for the GPU's products


def config_of(design: str, size: Size) -> ModelConfig:
    """The design at this size, within 2%, in widths for a GPU; or as small as the rehearsal has it."""
    if not size.params:
        return presets.small(design, vocab_size=size.vocab, d_model=64, layers=2, seq_len=size.T)
    if design == "ssd":
        return presets.get("ssd-20m" if size.params < 60e6 else "ssd-125m")
    name, _, given = design.removesuffix("]").partition("[")
    sizes = ",".join(filter(None, [given, HEADS[name](6 if size.params < 60e6 else 12)]))
    config = presets.solve(f"{name}[{sizes}]", size.params, vocab_size=size.vocab, seq_len=size.T)

    def even(part: Any) -> Any:
        hidden = round(getattr(part, "hidden", 0) / EVEN) * EVEN
        return replace(part, hidden=hidden) if hidden else part

    blocks = (replace(block, mixer=even(block.mixer), ffn=even(block.ffn)) for block in config.blocks)
    return replace(config, blocks=tuple(blocks))


def made(name: str, size: Size, device: torch.device) -> Trained:
    """A model by its name here. Skip: its library is missing, or cannot run on this device."""
    if name == LLAMA:
        return of_others(llama(size, device))
    if name.startswith("fla's "):
        tuning.ready(Place(device, device.type != "cuda", 0.0, Path()))  # else it tunes for minutes
        return of_others(of_fla(name.removeprefix("fla's "), size, device))
    model = build(config_of(name, size)).to(device)
    return Trained(partial(our_loss, model), model, optimizer_of(model, OPTIM))


def our_loss(model: Callable[..., Any], ids: Tensor, targets: Tensor, reset: Tensor | None) -> Tensor:
    loss: Tensor = model(ids, targets=targets, reset_BT=reset).objective()
    return loss


def of_others(model: nn.Module) -> Trained:
    options = {"lr": OPTIM.lr, "betas": (OPTIM.beta1, OPTIM.beta2), "weight_decay": OPTIM.weight_decay}
    return Trained(
        partial(their_loss, model), model, torch.optim.AdamW(model.parameters(), fused=True, **options)
    )


def their_loss(model: Callable[..., Any], ids: Tensor, targets: Tensor, reset: None) -> Tensor:
    """The targets are the model's own shift of the ids, one fewer a window."""
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def llama(size: Size, device: torch.device) -> nn.Module:
    """transformers' Llama with the sizes of our transformer, on torch's fused attention."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as why:
        raise Skip(f"transformers is not installed ({why})") from None
    ours: Any = config_of(REFERENCE, size)
    block = ours.blocks[0]
    config = LlamaConfig(
        vocab_size=size.vocab, hidden_size=ours.d_model, intermediate_size=block.ffn.hidden,
        num_hidden_layers=len(ours.blocks), num_attention_heads=block.mixer.heads, tie_word_embeddings=True,
        num_key_value_heads=block.mixer.heads, max_position_embeddings=size.T, use_cache=False,
        attn_implementation="sdpa", pad_token_id=None, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with device:
        return LlamaForCausalLM(config).train()


def of_fla(kind: str, size: Size, device: torch.device) -> nn.Module:
    """fla's model of a kind with the width, depth and heads of ours, and a network as wide as makes the parameters
    those of ours."""
    try:
        from fla import models
    except ImportError as why:
        raise Skip(f"flash-linear-attention is not installed ({why})") from None
    own, knob = sizes_of_fla(kind, size)
    if not hasattr(models, f"{kind}ForCausalLM"):
        raise Skip(f"fla {version('fla-core')} has no {kind}ForCausalLM")
    model, config = getattr(models, f"{kind}ForCausalLM"), getattr(models, f"{kind}Config")

    def whole(value: int, place: torch.device) -> nn.Module:
        with place:
            built: nn.Module = model(config(**own, **{knob: value}))
            return built

    def count(value: int) -> int:
        return sum(p.numel() for p in whole(value, torch.device("meta")).parameters())

    with torch.device("meta"):
        wanted = sum(p.numel() for p in LanguageModel(config_of(OURS[kind], size)).parameters())
    low, high, step = LEAST[knob]
    few = count(low)
    turns = round((wanted - few) / (count(high) - few) * (high - low) / step)
    value = max(low, low + turns * step)
    if size.params and abs(count(value) - wanted) > WITHIN * wanted:
        raise ValueError(
            f"fla's {kind} has {count(value):,} parameters with {knob} = {value}, ours has {wanted:,}"
        )
    if device.type != "cuda":
        raise Skip("fla's kernels need a GPU; its model was built without weights")
    return whole(value, device).train()


OURS = {"GLA": "gla", "GatedDeltaNet": "gdn", "RWKV7": "rwkv7", "Mamba2": "ssd"}
LEAST = {"intermediate_size": (64, 128, EVEN), "num_hidden_layers": (2, 4, 1)}


def sizes_of_fla(kind: str, size: Size) -> tuple[dict[str, Any], str]:
    """(what fla's config is given, the size that is turned)."""
    config: Any = config_of(OURS[kind], size)
    D, mixer, layers = config.d_model, config.blocks[0].mixer, len(config.blocks)
    own = {
        "vocab_size": size.vocab, "hidden_size": D, "num_hidden_layers": layers, "tie_word_embeddings": True,
        "use_cache": False, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    if kind == "GLA":
        return own | {"num_heads": mixer.heads, "max_position_embeddings": size.T}, "intermediate_size"
    if kind == "GatedDeltaNet":
        heads = {"num_heads": mixer.heads, "head_dim": 3 * D // (4 * mixer.heads), "expand_v": 2.0}
        return own | heads | {"max_position_embeddings": size.T}, "intermediate_size"
    if kind == "RWKV7":  # a layer is two of our blocks
        own |= {"head_dim": mixer.head_dim, "num_hidden_layers": layers // 2, "use_l2warp": False}
        return own | {"max_position_embeddings": size.T}, "intermediate_size"
    own |= {"head_dim": mixer.head_dim, "state_size": mixer.state, "expand": mixer.expand}
    del own["num_hidden_layers"]
    return own, "num_hidden_layers"


# ---------------------------------------------------------------- updates


def batch_of(size: Size, rows: int, device: torch.device) -> Batch:
    """The same numbers for every model."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, size.vocab, (rows, size.T + 1), generator=draw).to(device)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def update(trained: Trained, batch: Batch) -> float:
    """One update, as the trainer makes it; its loss, for which the host waits."""
    device = batch.ids.device
    with torch.autocast(device.type, torch.bfloat16):
        loss = trained.loss(*batch)
    value = loss.item()
    loss.backward()
    parameters = list(trained.model.parameters())
    total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    total.item()
    nn.utils.clip_grads_with_norm_(parameters, OPTIM.clip, total)
    trained.optimizer.step()
    trained.optimizer.zero_grad(set_to_none=True)
    return value


def timed(place: Place, call: Callable[[], object]) -> float:
    """Seconds of the host, the device's work included: an update waits for it twice anyway."""
    place.wait()
    begun = time.perf_counter()
    call()
    place.wait()
    return time.perf_counter() - begun


def rounds(place: Place) -> Iterator[int]:
    """The updates that count."""
    begun, most = time.perf_counter(), 2 if place.rehearsed else UPDATES
    for turn in range(most):
        if turn >= 2 and time.perf_counter() - begun > LONGEST:
            return
        yield turn


def fitting(place: Place, trained: Trained, size: Size) -> Batch:
    """The largest batch, of `size.rows` or a power of two below, with which an update fits into memory."""
    rows = size.rows
    while True:
        try:
            batch = batch_of(size, rows, place.device)
            update(trained, batch)
            return batch
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        trained.optimizer.zero_grad(set_to_none=True)
        if place.device.type == "cuda":  # the peak is that of the batch that fits
            torch.cuda.reset_peak_memory_stats(place.device)
        rows = 1 << (rows - 1).bit_length() - 1
        place.free()


def started(place: Place, name: str, trained: Trained, size: Size) -> tuple[Trained, Batch, str]:
    """The model after its first update, its batch, and its weights' dtype: bfloat16 of those of fla's models that do
    not run under autocast."""
    try:
        return trained, fitting(place, trained, size), "float32"
    except torch.OutOfMemoryError:
        raise
    except Exception as why:
        if not name.startswith("fla's"):
            raise
        say(
            f"training: {name} under autocast: {type(why).__name__}: {str(why)[:200]}; with weights in bfloat16"
        )
    trained = of_others(trained.model.bfloat16())
    return trained, fitting(place, trained, size), "bfloat16"


def eager(place: Place, name: str, size_name: str, kept: dict[str, Trained]) -> Result:
    """A model's updates, in turns with those of our transformer, which is kept from unit to unit."""
    size, cuda = size_of(size_name), place.device.type == "cuda"
    if REFERENCE not in kept and name != REFERENCE:
        kept[REFERENCE] = made(REFERENCE, size, place.device)
        update(kept[REFERENCE], batch_of(size, size.rows, place.device))
    place.free()
    before = torch.cuda.memory_allocated(place.device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(place.device)
    begun = time.perf_counter()
    trained = made(name, size, place.device)
    built = time.perf_counter() - begun
    begun = time.perf_counter()
    trained, batch, weights = started(place, name, trained, size)
    first = time.perf_counter() - begun
    update(trained, batch)
    for _ in range(1 if place.rehearsed else WARM - 2):
        loss = update(trained, batch)
    peak = torch.cuda.max_memory_allocated(place.device) - before if cuda else 0
    other = kept.get(REFERENCE, trained)
    theirs = batch_of(size, size.rows, place.device)
    times, reference = list[float](), list[float]()
    for _ in rounds(place):
        times.append(timed(place, lambda: update(trained, batch)))
        if other is not trained:
            reference.append(timed(place, lambda: update(other, theirs)) * len(batch.ids) / size.rows)
    result = told(place, trained, times, batch)
    result |= {
        "peak_bytes": peak,
        "loss": round(loss, 4),
        "first_seconds": round(first, 3),
        "built": round(built, 3),
        "weights": weights,
    }
    if reference:
        result |= {f"speed_of_{REFERENCE}": ratio(reference, times)}
    if name in DESIGNS[:2]:
        result["documents"] = documents(place, trained, batch)
    if name == REFERENCE:
        kept[REFERENCE] = trained
    if name == "fla's Mamba2":
        from fla.layers import mamba2

        result["kernels"] = (
            "mamba_ssm" if mamba2.is_fast_path_available else "torch: mamba_ssm is not installed"
        )
    return result


def told(place: Place, trained: Trained, times: list[float], batch: Batch) -> dict[str, Any]:
    """The figures of some updates."""
    tokens = batch.ids.numel()
    speed = tokens / statistics.median(times)
    of_product = read(place.folder / "training.json").get("units", {}).get(PRODUCT, {}).get("result", {})
    flops = of_product.get("flops")
    return {
        "params": trained.params,
        "rows": len(batch.ids),
        "T": batch.ids.shape[1],
        "tokens_per_second": round(speed),
        "milliseconds": spread([1e3 * seconds for seconds in times]),
        "share_of_product": 6 * trained.params * speed / flops if flops else None,
        "triton": place.device.type == "cuda" and record.passed(place.device),
    }


def documents(place: Place, trained: Trained, batch: Batch) -> Result:
    """The same with a document that begins somewhere in each row, and without, in turns."""
    draw = torch.Generator().manual_seed(1)
    starts = torch.randint(1, batch.ids.shape[1], (len(batch.ids), 1), generator=draw)
    reset = torch.zeros(batch.ids.shape, dtype=torch.bool).scatter_(1, starts, True).to(place.device)
    with_BT = batch._replace(reset=reset)
    update(trained, with_BT)
    pairs = [[timed(place, partial(update, trained, b)) for b in (with_BT, batch)] for _ in range(5)]
    return {"speed_of_without": ratio([without for _, without in pairs], [seconds for seconds, _ in pairs])}


def product(place: Place) -> Result:
    """FLOP/s of a product of bfloat16 matrices, over about a second."""
    n = 64 if place.rehearsed else 8192
    a, b = (torch.randn(n, n, device=place.device, dtype=torch.bfloat16) for _ in "ab")
    repeats = 1 if place.rehearsed else 50

    def call() -> None:
        for _ in range(repeats):
            torch.mm(a, b)

    call()
    found = [2 * n**3 * repeats / timed(place, call) for _ in range(2 if place.rehearsed else 10)]
    return {"flops": statistics.median(found), "spread": spread(found), "n": n}


# ---------------------------------------------------------------- compiled, in a process of its own


def in_child(place: Place, name: str, size_name: str, kept: dict[str, Trained]) -> Result:
    """Compiled and eager updates in turns, in a child process, which is ended when it takes too long."""
    kept.clear()
    place.free()
    path = place.folder / ".compiled.json"
    path.unlink(missing_ok=True)
    asked = {
        "name": name,
        "size": size_name,
        "device": str(place.device),
        "folder": str(place.folder),
        "out": str(path),
    }
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'benchmarks')!r}]\n"
        f"from on_gpu import training; training.child({json.dumps(asked)!r}, {place.rehearsed})"
    )
    limit = COMPILING if place.rehearsed else max(10.0, min(COMPILING, place.left - 5))
    begun = time.time()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], timeout=limit, check=False, capture_output=True, text=True, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return {"ended": False, "limit_seconds": limit}
    if done.returncode or not path.is_file():
        raise RuntimeError(f"exit {done.returncode}: {done.stderr[-1500:]}")
    return {"ended": True, "process_seconds": round(time.time() - begun, 1)} | read(path)


def child(asked_json: str, rehearsed: bool) -> None:
    """What the child does; writes its result where `in_child` reads it."""
    asked = json.loads(asked_json)
    place = Place(torch.device(asked["device"]), rehearsed, time.time() + COMPILING, Path(asked["folder"]))
    size = size_of(asked["size"])
    plain = made(asked["name"], size, place.device)
    torch._dynamo.config.disable = rehearsed  # the compiler of a CPU takes longer than a rehearsal may
    if asked["name"] == LLAMA:
        faster = plain._replace(loss=partial(their_loss, torch.compile(plain.model)))
    else:
        assert isinstance(plain.model, LanguageModel)
        faster = plain._replace(loss=partial(our_loss, compiled(plain.model)))
    batch = fitting(place, plain, size)
    cuda = place.device.type == "cuda"
    if cuda:
        place.free()
        torch.cuda.reset_peak_memory_stats(place.device)
    first = [timed(place, lambda: update(faster, batch)) for _ in range(WARM)]
    peak = torch.cuda.max_memory_allocated(place.device) if cuda else 0
    update(plain, batch)
    pairs = [[timed(place, partial(update, one, batch)) for one in (faster, plain)] for _ in rounds(place)]
    times, without = ([pair[i] for pair in pairs] for i in range(2))
    result = told(place, plain, times, batch)
    result |= {
        "peak_bytes": peak,
        "compile_seconds": round(sum(first) - WARM * statistics.median(times), 2),
        "speed_of_eager": ratio(without, times),
    }
    Path(asked["out"]).write_text(json.dumps(result))
