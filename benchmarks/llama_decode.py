"""A decoded token here and in llama.cpp on one thread: the same random weights as our transformer and as a GGUF file.

The transformer is Llama's: rotary positions, RMSNorm, SwiGLU. llama.cpp has it in float32, with a cache in float32,
where its logits are ours, and in 8 bits (Q8_0). Beside it `perspective2` of the same size. A token is
one step with its head; none is drawn. Caches are filled, since reading that far is quadratic. All take turns at each
context. Seconds are processor time. `pip install llama-cpp-python gguf` first, which compiles llama.cpp.

python benchmarks/llama_decode.py --json results/llama_decode.json
"""

import ctypes
import struct
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import common
import gguf
import llama_cpp
import numpy as np
import torch

from perspectron import presets
from perspectron.eval.contexts import Pool, Stepper, cache_bytes, decode_model, shapes
from perspectron.eval.timing import take_turns
from perspectron.model import LanguageModel

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
    """A GGUF file in llama.cpp, on one thread. The cache is in float32, and there is no flash attention, which computes
    in float16 and is slower here, as a cache in float16 is."""

    def __init__(self, path: Path, context: int, vocab: int) -> None:
        llama_cpp.llama_log_set(QUIET, None)
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx, asked.n_batch, asked.n_ubatch = context, READ, READ
        asked.n_threads = asked.n_threads_batch = 1
        asked.type_k = asked.type_v = llama_cpp.GGML_TYPE_F32
        asked.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, asked)
        if not self.context:
            raise MemoryError(f"llama.cpp has no room for {context:,} tokens of {path}")
        self.vocab = vocab

    def read(self, ids: list[int]) -> np.ndarray:
        """The logits after these tokens, which follow those before."""
        for start in range(0, len(ids), READ):
            part = ids[start : start + READ]
            tokens = (llama_cpp.llama_token * len(part))(*part)  # the batch only points at them
            assert llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, len(part))) == 0
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, -1), (self.vocab,)).copy()

    def back_to(self, length: int) -> None:
        memory = llama_cpp.llama_get_memory(self.context)
        assert llama_cpp.llama_memory_seq_rm(memory, 0, length, -1)

    def state(self) -> bytes:
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        data = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_seq_get_data(self.context, data, size, 0) == size
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
        assert columns == 1
        assert raw[16:head] == cells[:READ].tobytes()
        parts = [np.frombuffer(raw[:12] + struct.pack("I", length), np.uint8)]
        parts += [cells.reshape(-1).view(np.uint8), np.frombuffer(raw, np.uint8, 8, head)]
        at = head + 8
        for layer in range(2 * layers):
            size, n = struct.unpack_from("2I", raw, at + 4)
            shape = (n, READ, size) if layer >= layers else (1, READ, size)
            parts.append(np.frombuffer(raw, np.uint8, 12, at))
            parts.append(np.frombuffer(raw, np.uint8, prod(shape), at + 12).reshape(shape))
            at += 12 + parts[-1].size
        assert at == len(raw)
        sizes = [x.size // READ * length if x.ndim == 3 else x.size for x in parts]
        whole, start = np.empty(sum(sizes), np.uint8), 0
        for x, size in zip(parts, sizes, strict=True):
            whole[start : start + size] = x[:, again].reshape(-1) if x.ndim == 3 else x
            start += size
        self.back_to(0)
        given = whole.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        assert llama_cpp.llama_state_seq_set_data(self.context, given, whole.size, 0) == whole.size

    def turn(self, length: int) -> Callable[[], float]:
        """Seconds of a token after `length` of them."""
        token = (llama_cpp.llama_token * 1)(1)

        def timed() -> float:
            self.back_to(length)
            self.read([1])
            before = time.process_time()
            for _ in range(VISIT):
                assert llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(token, 1)) == 0
                llama_cpp.llama_get_logits_ith(self.context, -1)
            return (time.process_time() - before) / VISIT

        return timed


@llama_cpp.llama_log_callback
def QUIET(level: int, text: bytes, data: Any) -> None:
    """Nothing is said."""


def difference(model: LanguageModel, theirs: Theirs) -> float:
    """The largest between the logits after the same tokens. A cache that was filled must be as one that was read."""
    ids = [1 + 7 * i % (model.config.vocab_size - 1) for i in range(CHECKED)]
    ours, read = model(torch.tensor([ids])).logits[0, -1].numpy(), theirs.read(ids)
    theirs.fill(READ)
    assert (theirs.read(ids[READ:]) == read).all()
    return float(np.abs(ours - read).max())


def measure(params: int, contexts: tuple[int, ...], repeats: int, report: common.Report) -> dict[str, Any]:
    """Our models and llama.cpp's of one size, in turns, at one context after the other."""
    configs = {
        name: presets.solve(design, params, vocab_size=2048, seq_len=512) for name, design in DESIGNS.items()
    }
    most, cpu = contexts[-1], torch.device("cpu")
    models = {name: decode_model(config, most, cpu) for name, config in configs.items()}
    found: dict[str, Any] = {
        "parameters": {name: sum(x.numel() for x in model.parameters()) for name, model in models.items()}
    }
    with tempfile.TemporaryDirectory() as folder:
        theirs, vocab = {}, configs["transformer"].vocab_size
        for name, bits in (("float32", 32), ("8 bits", 8)):
            write(models["transformer"], path := Path(folder) / f"{bits}.gguf", bits, most)
            theirs[f"llama.cpp, {name}"] = Theirs(path, most, vocab)
        found["largest_difference"] = {
            name: difference(models["transformer"], one) for name, one in theirs.items()
        }
        report.say(f"{params:,} parameters: logits differ by {found['largest_difference']}")
        for context in contexts:
            length = context - VISIT - 1
            for one in theirs.values():
                one.fill(length)
            pool = Pool(max(cache_bytes(shapes(model, context)) for model in models.values()), cpu)
            turns = {
                name: Stepper(model, context, VISIT, pool, time.process_time).turn
                for name, model in models.items()
            }
            taken = take_turns(turns | {name: one.turn(length) for name, one in theirs.items()}, repeats)
            found[str(context)] = {
                "seconds": {name: common.Spread.of(seconds) for name, seconds in taken.items()},
                "to_ours": {name: common.ratios(taken[name], taken["transformer"]) for name in theirs},
            }
            for name, spread in found[str(context)]["seconds"].items():
                report.say(f"at {context:,}: {name} {spread.text(1e3)} ms")
    return found


@torch.inference_mode()
def main() -> int:
    parser = common.parser(__doc__ or "", threads=1, repeats=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes, contexts = ((150_000,), (64, 256)) if args.quick else ((2_000_000, 20_000_000), (1024, 262144))
    report = common.Report(args, TESTS, dtype="float32", shapes=f"{sizes} parameters, one row")
    results: dict[str, Any] = {"llama_cpp": llama_cpp.__version__, "sizes": {}}
    for params in sizes:
        results["sizes"][str(params)] = measure(params, contexts, args.repeats, report)
    report.finish(results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
