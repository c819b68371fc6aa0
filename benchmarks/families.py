"""Hybrids of other programs at their published sizes, with random weights of 4 bits: a decoded token and a prompt here
and in llama.cpp, in turns; and a conversation of 32k tokens: its bytes beside those of a transformer, to fork it and to
read it from a file, and 64 conversations together.

A GGUF with matrices of Q4_0 (embeddings Q8_0) is written as llama.cpp's converter would; both read it. Ours is packed
again: 4 bits with our scales, the head 8 bits. Logits before that are compared. `pip install llama-cpp-python gguf`
first, which compiles llama.cpp.

python benchmarks/families.py --json results/families.json
python benchmarks/families.py --only states --json results/states.json
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from unittest import mock

import common
import gguf
import llama_cpp
import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from perspectron import presets
from perspectron.data.bpe import byte_letters
from perspectron.decode.reading import prefill
from perspectron.decode.steps import stepped, steps_of
from perspectron.decode.store import PrefixStore
from perspectron.eval.timing import take_turns
from perspectron.interop import foreign
from perspectron.interop.foreign.gguf import unpacked
from perspectron.model import cache
from perspectron.model.model import LanguageModel, build
from perspectron.model.state import LMState, read_state, save_state
from perspectron.ops import attention as attending
from perspectron.quant.convert import convert

TESTS = ("tests/interop/test_hybrid_tools.py",)
VISIT = 16  # tokens of a turn
PROMPT = 256
BATCH = 512  # tokens that llama.cpp reads at once
CONTEXTS = (1024, 32_768)
LONG, TOGETHER, SHORT = 32_768, 64, 256
"""Tokens of a long conversation; conversations together, and tokens of each."""
BESIDE = {"Qwen3.5-0.8B": ("Qwen3-0.6B", 28, 8, 128)}
OTHERS = ("SmolLM2-360M", 32, 5, 64)
"""Transformers of about the size: name, layers, heads of keys, and their width."""
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
RWKV = "RWKV-7 0.4B"
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


def filled(model: LanguageModel, rows: int, tokens: int) -> LMState:
    """A state as after so many tokens, with random numbers in it. Caches are filled as reading fills them, without the
    attention to what is written."""
    draw = torch.Generator().manual_seed(0)

    def leaf(part: Any) -> Any:
        if isinstance(part, cache.Cache):
            (_, H, _, K), V = part.k_BHSK.shape, part.v_BHSV.shape[3]
            k, v = (
                torch.randn(rows, H, tokens, width, generator=draw).to(part.k_BHSK.dtype) for width in (K, V)
            )
            at = attending.places(part.length_B, tokens, None, None)
            with mock.patch.object(attending, "attend", lambda q, *_, **__: q):
                return cache.attend(k, k, v, part, at)[1]
        if isinstance(part, Tensor) and part.is_floating_point():
            return torch.randn(part.shape, generator=draw).to(part.dtype)
        return part + tokens if isinstance(part, Tensor) else part

    state = model.init_state(rows)
    made = pytree.tree_map(leaf, state, is_leaf=lambda part: isinstance(part, cache.Cache))
    return replace(made, model=model.number)


def states(
    name: str, model: LanguageModel, repeats: int, folder: Path, long: int, report: common.Report
) -> dict[str, Any]:
    """A long conversation's bytes, its fork and its restore, and conversations together."""
    label, layers, heads, width = BESIDE.get(name, OTHERS)
    state, path = filled(model, 1, long), folder / "conversation.state"
    its = state.filled().nbytes
    transformer = 2 * layers * heads * width * 4 * long
    found: dict[str, Any] = {"tokens": long, "bytes": its, "beside": label, "beside_bytes": transformer}
    kin = PrefixStore(model).model  # which knows the digest of the weights, as in a server
    save_state(path, state, kin)
    found["file_bytes"] = path.stat().st_size
    again = read_state(path, kin)[0]
    pairs = zip(pytree.tree_leaves(state.filled()), pytree.tree_leaves(again.filled()), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)
    calls = {"fork": state.fork, "restore": lambda: read_state(path, kin)}
    taken = take_turns({what: common.timed(call) for what, call in calls.items()}, repeats)
    found["seconds"] = {what: common.Spread.of(seconds) for what, seconds in taken.items()}
    path.unlink()
    del state, again
    steps, decoding = steps_of(model), dict[str, Callable[[], float]]()
    for rows in (1, TOGETHER):
        held = [filled(model, rows, SHORT)]
        ids = torch.full((rows, 1), 5)
        decoding[str(rows)] = lambda held=held, ids=ids: stepping(model, steps, held, ids)  # type: ignore[misc]
        found[f"bytes_of_{rows}"] = held[0].nbytes
    taken = take_turns(decoding, repeats)
    found["tokens_per_second"] = {
        rows: common.Spread.of([int(rows) / s for s in seconds]) for rows, seconds in taken.items()
    }
    spreads = {what: f"{spread.text(1e3)} ms" for what, spread in found["seconds"].items()}
    rates = {rows: f"{spread.text()} tokens/s" for rows, spread in found["tokens_per_second"].items()}
    report.say(
        f"{name}: {long:,} tokens in {its / 1e6:.1f} MB; {label} {transformer / 1e6:.1f} MB; {spreads}; "
        f"together {rates}"
    )
    return found


def stepping(model: LanguageModel, steps: Any, held: list[LMState], ids: Tensor) -> float:
    """Seconds of a step of all rows."""
    before = time.perf_counter()
    for _ in range(2):
        _, _, held[0] = stepped(model, steps, ids, held[0])
    return (time.perf_counter() - before) / 2


def rwkv7(args: argparse.Namespace, report: common.Report) -> dict[str, Any]:
    """RWKV-7 at its published size of 0.4 B parameters, with random weights, packed as the others."""
    sizes: dict[str, int] = {
        "vocab_size": 65_536,
        "d_model": 1024,
        "layers": 24,
        "head_dim": 64,
        "hidden": 4096,
    }
    if args.quick:
        sizes = {"vocab_size": 320, "d_model": 64, "layers": 2, "head_dim": 32, "hidden": 128}
    model = build(presets.get("rwkv7-tiny", **sizes)).eval()
    count = common.parameters(model)
    convert(model, args.format)
    with tempfile.TemporaryDirectory() as folder:
        long = 512 if args.quick else LONG
        return {"parameters": count, **states(RWKV, model, args.repeats, Path(folder), long, report)}


def measure(name: str, write: Write, args: argparse.Namespace, report: common.Report) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write(path := Path(folder) / "model.gguf")
        with unpacked(path) as source:
            model = foreign.model(source).eval()
        if args.only == "states":
            count = common.parameters(model)
            convert(model, args.format)
            long = 512 if args.quick else LONG
            return {"parameters": count, **states(name, model, args.repeats, Path(folder), long, report)}
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
    parser.add_argument(
        "--only", choices=("states",), help="bytes, forks and restores alone, without llama.cpp"
    )
    parser.add_argument("--format", default="4bit", help="of our matrices")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = QUICK if args.quick else PUBLISHED
    chosen = {name: models[name] for name in args.models or models if name != RWKV}
    report = common.Report(args, TESTS, dtype=f"{args.format}; Q4_0", shapes=f"one row, prompts of {PROMPT}")
    results = dict[str, Any]()
    if args.only == "states" and (not args.models or RWKV in args.models):
        results[RWKV] = rwkv7(args, report)
    for name, write in chosen.items():
        results[name] = measure(name, write, args, report)
        report.keep({"llama_cpp": llama_cpp.__version__, "models": results})
    report.finish({"llama_cpp": llama_cpp.__version__, "models": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
