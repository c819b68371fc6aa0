"""A decoded token here and in llama.cpp on one thread: the same random weights as our transformer and as a GGUF file.

The transformer is Llama's: rotary positions, RMSNorm, SwiGLU. llama.cpp has it in float32, with a cache in float32,
where its logits are ours, and in 8 bits (Q8_0), where ours have 8 bits, too (int8, a scale for each row). Beside it
`perspective2` of the same size. A token is one step with its head; none is drawn. Caches are filled, since reading that
far is quadratic. All take turns at each context. `pip install llama-cpp-python gguf` first, which compiles llama.cpp.

python benchmarks/llama_decode.py --json results/llama_decode.json
"""

import argparse
import ctypes
import struct
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any, Self

import common
import gguf
import llama_cpp
import numpy as np
import torch

from perspectron import presets
from perspectron.eval.timing import Stepper, cache_bytes, decode_model, noise, shapes, take_turns
from perspectron.model.model import LanguageModel
from perspectron.quant.convert import convert

TESTS = ("tests/decode/test_steps.py",)
DESIGNS = {"transformer": "transformer[embedding_norm=false]", "perspective2": "perspective2"}
VISIT = 8  # tokens of a turn
CHECKED = 40  # tokens whose logits are compared
READ = 16  # tokens that a cache is filled with


def write(model: LanguageModel, path: Path, bits: int, context: int) -> None:
    """The transformer as GGUF. llama.cpp pairs neighbouring channels in rotary positions, we the halves of a head."""
    config, weights = model.config, {name: x.detach().numpy() for name, x in model.state_dict().items()}
    block = config.blocks[0]
    heads, D = block.mixer.heads, config.d_model
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(D)
    writer.add_block_count(len(config.blocks))
    writer.add_feed_forward_length(block.ffn.hidden)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(block.mixer.rope_base)
    writer.add_rope_dimension_count(D // heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    eight, full = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32

    def add(name: str, x: np.ndarray) -> None:
        kind = eight if bits == 8 and x.ndim == 2 and x.shape[1] % 32 == 0 else full
        x = np.ascontiguousarray(x, np.float32)
        writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)

    def paired(x: np.ndarray) -> np.ndarray:
        return x.reshape(heads, 2, D // heads // 2, -1).swapaxes(1, 2).reshape(D, -1)

    add("token_embd.weight", weights["embedding.weight"])
    add("output_norm.weight", weights["norm.weight"])
    for i in range(len(config.blocks)):
        own = {
            name.removeprefix(f"blocks.{i}."): x
            for name, x in weights.items()
            if name.startswith(f"blocks.{i}.")
        }
        q, k, v = np.split(own["mixer.qkv_proj.weight"], 3)
        for name, x in {
            "attn_norm": own["mixer_norm.weight"], "ffn_norm": own["ffn_norm.weight"], "attn_q": paired(q),
            "attn_k": paired(k), "attn_v": v, "attn_output": own["mixer.o_proj.weight"],
            "ffn_gate": own["ffn.gate_proj.weight"], "ffn_up": own["ffn.up_proj.weight"],
            "ffn_down": own["ffn.down_proj.weight"],
        }.items():  # fmt: skip
            add(f"blk.{i}.{name}.weight", x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Theirs:
    """A GGUF file in llama.cpp. The cache is in float32, and there is no flash attention, which computes in float16 and
    is slower here, as a cache in float16 is."""

    def __init__(self, path: Path, context: int, vocab: int, threads: int) -> None:
        llama_cpp.llama_log_set(quiet, None)
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx, asked.n_batch, asked.n_ubatch = context, READ, READ
        asked.n_threads = asked.n_threads_batch = threads
        asked.type_k = asked.type_v = llama_cpp.GGML_TYPE_F32
        asked.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, asked)
        done(bool(self.context))
        self.vocab = vocab

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def read(self, ids: list[int]) -> np.ndarray:
        """The logits after these tokens, which follow those before."""
        for start in range(0, len(ids), READ):
            part = ids[start : start + READ]
            tokens = (llama_cpp.llama_token * len(part))(*part)  # the batch only points at them
            batch = llama_cpp.llama_batch_get_one(tokens, len(part))
            done(llama_cpp.llama_decode(self.context, batch) == 0)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, -1), (self.vocab,)).copy()

    def back_to(self, length: int) -> None:
        done(llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, length, -1))

    def state(self) -> bytes:
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        data = (ctypes.c_uint8 * size)()
        done(llama_cpp.llama_state_seq_get_data(self.context, data, size, 0) == size)
        return bytes(data)

    def fill(self, length: int) -> None:
        """A cache of `length` tokens: that of READ of them, again and again. To read them all would be quadratic.

        A state is a header of 12 bytes, the number of cells, 12 bytes for each, whether values lie in columns, the
        number of layers; for each layer, keys: their type, the bytes of a row as 64 bits, rows; then for each, values:
        type, bytes of a number, how many columns, columns.
        """
        self.back_to(0)
        self.read([1 + 7 * i % (self.vocab - 1) for i in range(READ)])
        raw, head = self.state(), 16 + 12 * READ
        cells, again = np.zeros((length, 3), np.int32), np.arange(length) % READ
        cells[:, 0], cells[:, 1] = np.arange(length), 1
        columns, layers = struct.unpack_from("2I", raw, head)
        done(columns == 1 and raw[16:head] == cells[:READ].tobytes())
        parts = [np.frombuffer(raw[:12] + struct.pack("I", length), np.uint8)]
        parts += [cells.reshape(-1).view(np.uint8), np.frombuffer(raw, np.uint8, 8, head)]
        at = head + 8
        for layer in range(2 * layers):
            size, n = struct.unpack_from("2I", raw, at + 4)
            shape = (n, READ, size) if layer >= layers else (1, READ, size)
            parts.append(np.frombuffer(raw, np.uint8, 12, at))
            parts.append(np.frombuffer(raw, np.uint8, prod(shape), at + 12).reshape(shape))
            at += 12 + parts[-1].size
        done(at == len(raw))
        sizes = [x.size // READ * length if x.ndim == 3 else x.size for x in parts]
        whole, start = np.empty(sum(sizes), np.uint8), 0
        for x, size in zip(parts, sizes, strict=True):
            whole[start : start + size] = x[:, again].reshape(-1) if x.ndim == 3 else x
            start += size
        self.back_to(0)
        given = whole.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        done(llama_cpp.llama_state_seq_set_data(self.context, given, whole.size, 0) == whole.size)

    def turn(self, length: int) -> Callable[[], float]:
        """Seconds of a token after `length` of them."""
        token = (llama_cpp.llama_token * 1)(1)

        def timed() -> float:
            self.back_to(length)
            self.read([1])
            before = time.perf_counter()
            for _ in range(VISIT):
                done(llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(token, 1)) == 0)
                llama_cpp.llama_get_logits_ith(self.context, -1)
            return (time.perf_counter() - before) / VISIT

        return timed


@llama_cpp.llama_log_callback
def quiet(level: int, text: bytes, data: Any) -> None:
    """Nothing is said."""


def difference(model: LanguageModel, theirs: Theirs) -> float:
    """The largest between the logits of our float32 model and theirs after the same tokens. A cache that was filled
    must be as one that was read."""
    ids = [1 + 7 * i % (model.config.vocab_size - 1) for i in range(CHECKED)]
    theirs.back_to(0)
    ours, read = model(torch.tensor([ids])).logits[0, -1].numpy(), theirs.read(ids)
    theirs.fill(READ)
    done(bool((theirs.read(ids[READ:]) == read).all()))
    theirs.fill(2 * READ + 3)
    _, one, two, three = np.split(keys(theirs.state()), [0, READ, 2 * READ])
    done(bool((one == two).all() and (one[:3] == three).all()))
    return float(np.abs(ours - read).max())


def packed(model: LanguageModel) -> LanguageModel:
    """A copy in 8 bits."""
    convert(copy := deepcopy(model), "int8")
    return copy


def keys(state: bytes) -> np.ndarray:
    """The first layer's keys in a state, a row for each cell."""
    (cells,) = struct.unpack_from("I", state, 12)
    at = 16 + 12 * cells + 8
    (size,) = struct.unpack_from("Q", state, at + 4)
    return np.frombuffer(state, np.uint8, cells * size, at + 12).reshape(cells, size)


def done(well: bool) -> None:
    """RuntimeError where llama.cpp did not do what it was asked for."""
    if not well:
        raise RuntimeError("llama.cpp: no room, or a state is not laid out as it was in version 0.3.36")


def measure(params: int, contexts: tuple[int, ...], args: argparse.Namespace, report: common.Report) -> Any:
    """Our models of one size and one of llama.cpp's files at a time, in turns, at one context after the other."""
    configs = {
        name: presets.solve(design, params, vocab_size=2048, seq_len=512) for name, design in DESIGNS.items()
    }
    most, cpu, vocab = contexts[-1], torch.device("cpu"), configs["transformer"].vocab_size
    models = {name: decode_model(config, most, cpu) for name, config in configs.items()}
    parameters = {name: sum(x.numel() for x in model.parameters()) for name, model in models.items()}
    found: dict[str, Any] = {"parameters": parameters, "largest_difference": {}, "contexts": {}}
    with tempfile.TemporaryDirectory() as folder:
        for bits, name in ((32, "float32"), (8, "8 bits")):
            write(models["transformer"], path := Path(folder) / f"{bits}.gguf", bits, most)
            ours = models if bits == 32 else {n: packed(model) for n, model in models.items()}
            for context in contexts:
                with Theirs(path, context, vocab, args.threads) as theirs:
                    apart = found["largest_difference"][name] = difference(models["transformer"], theirs)
                    theirs.fill(length := context - VISIT - 1)
                    pool = noise(max(cache_bytes(shapes(model, context)) for model in models.values()), cpu)
                    turns = {n: Stepper(model, context, VISIT, pool).turn for n, model in ours.items()}
                    taken = take_turns(turns | {"llama.cpp": theirs.turn(length)}, args.repeats)
                    del turns, pool
                own = found["contexts"].setdefault(str(context), {})[name] = {
                    "seconds": {n: common.Spread.of(seconds) for n, seconds in taken.items()},
                    "to_ours": {n: common.ratios(taken["llama.cpp"], taken[n]) for n in models},
                }
                report.say(f"{params:,} parameters at {context:,}, {name}: logits differ by {apart:.1e}")
                for n, spread in own["seconds"].items():
                    ratio = (
                        f", llama.cpp takes {own['to_ours'][n].text()} times as long" if n in models else ""
                    )
                    report.say(f"  {n} {spread.text(1e3)} ms{ratio}")
    return found


@torch.inference_mode()
def main() -> int:
    parser = common.parser(__doc__ or "", threads=1, repeats=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes, contexts = ((150_000,), (64, 256)) if args.quick else ((2_000_000, 20_000_000), (1024, 262144))
    report = common.Report(args, TESTS, dtype="float32 and int8", shapes=f"{sizes} parameters, one row")
    results: dict[str, Any] = {"llama_cpp": llama_cpp.__version__, "sizes": {}}
    for params in sizes:
        results["sizes"][str(params)] = measure(params, contexts, args, report)
    report.finish(results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
