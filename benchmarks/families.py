"""Hybrids of other programs at their published sizes, with random weights of 4 bits: a decoded token and a prompt here
and in llama.cpp, in turns, and the bytes of a conversation's state.

A GGUF with matrices of Q4_0 (embeddings Q8_0) is written as llama.cpp's converter would; both read it. Ours is packed
again: 4 bits with our scales, the head 8 bits. Logits before that are compared. `pip install llama-cpp-python gguf`
first, which compiles llama.cpp.

python benchmarks/families.py --json results/families.json
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import common
import gguf
import llama_cpp
import numpy as np
import torch

from perspectron.data.bpe import byte_letters
from perspectron.decode.reading import prefill
from perspectron.decode.steps import stepped, steps_of
from perspectron.eval.timing import take_turns
from perspectron.interop import foreign
from perspectron.interop.foreign.gguf import unpacked
from perspectron.model.model import LanguageModel
from perspectron.quant.convert import convert

TESTS = ("tests/interop/test_hybrid_tools.py",)
VISIT = 16  # tokens of a turn
PROMPT = 256
BATCH = 512  # tokens that llama.cpp reads at once
CONTEXTS = (1024, 32_768)
FOUR, EIGHT, FULL = (gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q8_0", "F32"))
Shapes = dict[str, tuple[int, ...]]


class File:
    """A GGUF while it is written. Matrices of 4 bits are drawn in their stored form, with scales as of a layer's
    initial weights; vectors around what they start at."""

    mute: tuple[int, ...] = ()
    """Tokens whose embedding is zero, so that none of them is ever the likeliest."""

    def __init__(self, path: Path, arch: str, D: int, layers: int, F: int, vocab: int) -> None:
        self.writer, self.draw, self.vocab = gguf.GGUFWriter(path, arch), np.random.default_rng(0), vocab
        self.writer.add_context_length(1 << 15)
        self.writer.add_embedding_length(D)
        self.writer.add_block_count(layers)
        self.writer.add_feed_forward_length(F)
        self.writer.add_layer_norm_rms_eps(1e-6)
        self.writer.add_vocab_size(vocab)
        letters = byte_letters()
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("qwen2")
        self.writer.add_token_list([*letters, *(f"t{i}" for i in range(vocab - len(letters)))])
        self.writer.add_token_types([1] * vocab)
        self.writer.add_token_merges(["t 0"])

    def matrix(
        self, name: str, rows: int, columns: int, kind: Any = FOUR, zero: tuple[int, ...] = ()
    ) -> None:
        bits = 4 if kind is FOUR else 8
        blocks = self.draw.integers(0, 256, (rows, columns // 32, 2 + 4 * bits), np.uint8)
        scale = 1 / (columns**0.5 * (4.6 if bits == 4 else 74))
        blocks[..., :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        blocks[list(zero)] = 0
        self.writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=kind)

    def vector(self, name: str, *shape: int, around: float = 1.0) -> None:
        x = around + 0.1 * self.draw.standard_normal(shape)
        self.writer.add_tensor(name, x.astype(np.float32), raw_dtype=FULL)

    def layer(self, i: int, matrices: Shapes, vectors: Shapes, minus: Shapes | None = None) -> None:
        """Tensors of a layer, by name; `minus`: those that are around −1."""
        for name, (rows, columns) in matrices.items():
            self.matrix(f"blk.{i}.{name}", rows, columns)
        for name, shape in vectors.items():
            self.vector(f"blk.{i}.{name}", *shape)
        for name, shape in (minus or {}).items():
            self.vector(f"blk.{i}.{name}", *shape, around=-1.0)

    def done(self, D: int, last: str) -> None:
        self.matrix("token_embd", self.vocab, D, EIGHT, self.mute)
        self.vector(f"{last}.weight", D)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def attention(D: int, H: int, G: int, K: int, *, norms: bool, gate: bool = False) -> tuple[Shapes, Shapes]:
    """Matrices and vectors of attention."""
    matrices: Shapes = {"attn_q": ((1 + gate) * H * K, D), "attn_k": (G * K, D), "attn_v": (G * K, D)}
    vectors: Shapes = {"attn_q_norm.weight": (K,), "attn_k_norm.weight": (K,)} if norms else {}
    return matrices | {"attn_output": (D, H * K)}, vectors


def network(D: int, F: int) -> Shapes:
    return {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}


def qwen(path: Path, *, D: int, F: int, layers: int, heads: tuple[int, int, int], delta: tuple[int, int], vocab: int,
         every: int = 4) -> None:  # fmt: skip
    """Qwen3.5. heads: H, G, K of attention. delta: heads and their width."""
    file, (H, G, K), (Hv, V) = File(path, "qwen35", D, layers, F, vocab), heads, delta
    file.writer.add_head_count(H)
    file.writer.add_head_count_kv(G)
    file.writer.add_key_length(K)
    file.writer.add_value_length(K)
    file.writer.add_rope_dimension_count(K // 4)
    file.writer.add_rope_dimension_sections([K // 8 - 2 * (K // 24), K // 24, K // 24, 0])
    file.writer.add_rope_freq_base(1e7)
    file.writer.add_full_attention_interval(every)
    file.writer.add_ssm_conv_kernel(4)
    file.writer.add_ssm_state_size(V)
    file.writer.add_ssm_group_count(Hv)
    file.writer.add_ssm_time_step_rank(Hv)
    file.writer.add_ssm_inner_size(Hv * V)
    norms: Shapes = {"attn_norm.weight": (D,), "post_attention_norm.weight": (D,)}
    for i in range(layers):
        if (i + 1) % every == 0:
            matrices, vectors = attention(D, H, G, K, norms=True, gate=True)
            file.layer(i, matrices | network(D, F), vectors | norms)
            continue
        matrices = {"attn_qkv": (3 * Hv * V, D), "attn_gate": (Hv * V, D), "ssm_alpha": (Hv, D), "ssm_beta": (Hv, D),
                    "ssm_out": (D, Hv * V)}  # fmt: skip
        vectors = {"ssm_conv1d.weight": (3 * Hv * V, 4), "ssm_dt.bias": (Hv,), "ssm_norm.weight": (V,)}
        file.layer(i, matrices | network(D, F), vectors | norms, {"ssm_a": (Hv,)})
    file.done(D, "output_norm")


def granite(path: Path, *, D: int, F: int, layers: int, heads: tuple[int, int], ssm: tuple[int, int], vocab: int,
            attends: tuple[int, ...]) -> None:  # fmt: skip
    """Granite 4. heads: H, G of attention. ssm: heads and rows of a memory. attends: layers with attention."""
    file, (H, G), (n, N) = File(path, "granitehybrid", D, layers, F, vocab), heads, ssm
    inner, K = 2 * D, D // H
    channels = inner + 2 * N
    file.writer.add_head_count(H)
    file.writer.add_head_count_kv([G if i in attends else 0 for i in range(layers)])
    file.writer.add_attention_scale(1 / K)
    file.writer.add_embedding_scale(12.0)
    file.writer.add_residual_scale(0.246)
    file.writer.add_logit_scale(3.0)
    file.writer.add_rope_scaling_finetuned(False)
    file.writer.add_rope_dimension_count(K)
    file.writer.add_ssm_conv_kernel(4)
    file.writer.add_ssm_state_size(N)
    file.writer.add_ssm_group_count(1)
    file.writer.add_ssm_time_step_rank(n)
    file.writer.add_ssm_inner_size(inner)
    norms: Shapes = {"attn_norm.weight": (D,), "ffn_norm.weight": (D,)}
    for i in range(layers):
        if i in attends:
            file.layer(i, attention(D, H, G, K, norms=False)[0] | network(D, F), norms)
            continue
        matrices = {"ssm_in": (inner + channels + n, D), "ssm_out": (D, inner)}
        vectors = {"ssm_conv1d.weight": (channels, 4), "ssm_conv1d.bias": (channels,), "ssm_dt.bias": (n,),
                   "ssm_d": (n, 1), "ssm_norm.weight": (1, inner)}  # fmt: skip
        file.layer(i, matrices | network(D, F), vectors | norms, {"ssm_a": (n, 1)})
    file.done(D, "output_norm")


def lfm2(path: Path, *, D: int, F: int, layers: int, heads: tuple[int, int], vocab: int,
         attends: tuple[int, ...]) -> None:  # fmt: skip
    """LFM2. heads: H, G of attention. attends: layers with attention."""
    file, (H, G) = File(path, "lfm2", D, layers, F, vocab), heads
    file.writer.add_head_count(H)
    file.writer.add_head_count_kv([G if i in attends else 0 for i in range(layers)])
    file.writer.add_rope_freq_base(1e6)
    file.writer.add_shortconv_l_cache(3)
    norms: Shapes = {"attn_norm.weight": (D,), "ffn_norm.weight": (D,)}
    for i in range(layers):
        if i in attends:
            matrices, vectors = attention(D, H, G, D // H, norms=True)
            file.layer(i, matrices | network(D, F), vectors | norms)
        else:
            matrices = {"shortconv.in_proj": (3 * D, D), "shortconv.out_proj": (D, D)}
            file.layer(i, matrices | network(D, F), norms | {"shortconv.conv.weight": (D, 3)})
    file.done(D, "token_embd_norm")


Write = Callable[[Path], None]
PUBLISHED: dict[str, Write] = {
    "LFM2-350M": lambda path: lfm2(
        path, D=1024, F=4608, layers=16, heads=(16, 8), vocab=65_536, attends=(2, 5, 8, 10, 12, 14)
    ),
    "Granite-4.0-H-350M": lambda path: granite(
        path, D=768, F=2048, layers=32, heads=(12, 4), ssm=(48, 128), vocab=100_352, attends=(10, 13, 17, 27)
    ),
    "Qwen3.5-0.8B": lambda path: qwen(
        path, D=1024, F=3584, layers=24, heads=(8, 2, 256), delta=(16, 128), vocab=248_320
    ),
}
QUICK: dict[str, Write] = {
    "lfm2": lambda path: lfm2(path, D=64, F=96, layers=3, heads=(4, 2), vocab=320, attends=(1,)),
    "granite": lambda path: granite(path, D=64, F=96, layers=3, heads=(4, 2), ssm=(4, 32), vocab=320, attends=(1,)),
    "qwen3.5": lambda path: qwen(
        path, D=64, F=96, layers=4, heads=(2, 1, 64), delta=(2, 32), vocab=320
    ),
}  # fmt: skip


class Theirs:
    """A GGUF in llama.cpp, with its usual cache."""

    def __init__(self, path: Path, vocab: int, threads: int) -> None:
        llama_cpp.llama_log_set(quiet, None)
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx, asked.n_batch, asked.n_ubatch = 4096, BATCH, BATCH
        asked.n_threads = asked.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, asked) if self.model else None
        done(bool(self.context))
        self.vocab = vocab

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def read(self, ids: list[int], *, fresh: bool = False) -> np.ndarray:
        """The logits after these tokens, which follow those before."""
        if fresh:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        tokens = (llama_cpp.llama_token * len(ids))(*ids)  # the batch only points at them
        done(llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, len(ids))) == 0)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, -1), (self.vocab,))

    def decode(self) -> float:
        """Seconds of a token after a few."""
        self.read([1, 2, 3], fresh=True)
        self.read([4])
        before = time.perf_counter()
        for id in range(VISIT):
            self.read([5 + id])
        return (time.perf_counter() - before) / VISIT

    def prompt(self) -> float:
        """Seconds of a token of a prompt."""
        before = time.perf_counter()
        self.read(list(range(1, 1 + PROMPT)), fresh=True)
        return (time.perf_counter() - before) / PROMPT


@llama_cpp.llama_log_callback
def quiet(level: int, text: bytes, data: Any) -> None:
    """Nothing is said."""


def done(well: bool) -> None:
    if not well:
        raise RuntimeError("llama.cpp did not do what it was asked for")


def decode(model: LanguageModel) -> float:
    """Seconds of a token after a few."""
    _, state = prefill(model, [[1, 2, 3]])
    _, _, state = stepped(model, steps := steps_of(model), torch.tensor([[4]]), state)
    before = time.perf_counter()
    for id in range(VISIT):
        _, _, state = stepped(model, steps, torch.tensor([[5 + id]]), state)
    return (time.perf_counter() - before) / VISIT


def prompt(model: LanguageModel) -> float:
    """Seconds of a token of a prompt."""
    before = time.perf_counter()
    prefill(model, [list(range(1, 1 + PROMPT))])
    return (time.perf_counter() - before) / PROMPT


def measure(name: str, write: Write, args: argparse.Namespace, report: common.Report) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write(path := Path(folder) / "model.gguf")
        with unpacked(path) as source:
            model = foreign.model(source).eval()
        with Theirs(path, model.config.vocab_size, args.threads) as theirs:
            ids = list(range(1, 33))
            ours, other = prefill(model, [ids])[0][0].numpy(), theirs.read(ids, fresh=True)
            apart = float(np.abs(ours - other).max() / np.abs(ours).max())
            found: dict[str, Any] = {"parameters": common.parameters(model), "logits_apart": apart}
            convert(model, args.format)
            found["state_bytes"] = {str(n): model.init_state(1, capacity=n).nbytes for n in CONTEXTS}
            report.say(f"{name}: {found['parameters']:,} parameters; logits in float32 differ by {apart:.1e} of the "
                       f"largest; state {found['state_bytes']}")  # fmt: skip
            for what, mine, their in (("token", decode, theirs.decode), ("prompt", prompt, theirs.prompt)):
                taken = take_turns({"ours": lambda mine=mine: mine(model), "llama.cpp": their}, args.repeats)
                spreads = {n: common.Spread.of([1 / s for s in seconds]) for n, seconds in taken.items()}
                ratio = common.ratios(taken["ours"], taken["llama.cpp"])
                found[what] = {"tokens_per_second": spreads, "ours_to_llama.cpp": ratio}
                rates = ", ".join(f"{n} {spread.text()}" for n, spread in spreads.items())
                report.say(f"  {what}: {rates} tokens/s; ours takes {ratio.text()} of llama.cpp's time")
            steps = steps_of(model)
            report.say(f"  recorded: {'yes' if steps is not None and steps.told is None else 'no'}")
    return found


@torch.inference_mode()
def main() -> int:
    parser = common.parser(__doc__ or "", threads=1, repeats=5)
    parser.add_argument("--models", nargs="*", help="of " + ", ".join(PUBLISHED))
    parser.add_argument("--format", default="4bit", help="of our matrices")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = QUICK if args.quick else PUBLISHED
    chosen = {name: models[name] for name in args.models or models}
    report = common.Report(args, TESTS, dtype=f"{args.format}; Q4_0", shapes=f"one row, prompts of {PROMPT}")
    results = {name: measure(name, write, args, report) for name, write in chosen.items()}
    report.finish({"llama_cpp": llama_cpp.__version__, "models": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
