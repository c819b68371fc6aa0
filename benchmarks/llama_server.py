"""The same conversations with our engine and with llama.cpp's server: the same random Mamba-2 weights, both in memory.

Conversations share a system prompt and take turns; then each goes back to its first turn and asks something else (a
fork), and each comes back to where it had ended (a return). A prompt is all that was said before, the engine's own
answers among it. Told are the tokens of prompts that were not read again, the time to the first token, and the
tokens that differ from those of the same engine when nothing is kept. llama.cpp runs with its defaults (4 slots, 32
checkpoints of a state, 8 GiB of prompts kept), and with a slot for each conversation and a checkpoint for each message,
in the binding `xllamacpp`, which has its server in a wheel.

python benchmarks/llama_server.py --json results/llama_server.json
"""

import functools
import queue
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import common
import gguf
import torch
import xllamacpp
from tokenizers import ByteLevelBPETokenizer
from transformers import Mamba2Config, Mamba2ForCausalLM

from perspectron.decode.row import Piece
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.store import PrefixStore
from perspectron.interop import foreign
from perspectron.serve.engine import Engine, Job

TESTS = ("tests/decode/test_store.py", "tests/interop/test_foreign.py")
ANSWER = 16  # tokens
HEAD = 64  # of a mixer
SHARED = (1500, 700), (100, 20)  # tokens that texts share, and those of each alone
Ask = Callable[[list[int], bool], tuple[list[int], int, float]]
"""(prompt, whether to keep what is read) → (tokens of the answer, tokens not read again, seconds to the first)."""


class Sizes(NamedTuple):
    """Of the model, and of the trace in tokens."""

    width: int = 512
    layers: int = 8
    state: int = 128
    vocab: int = 1024
    conversations: int = 8
    turns: int = 3
    system: int = 1000
    message: int = 60


# One model, twice


def write_models(folder: Path, sizes: Sizes) -> None:
    """transformers' Mamba-2 with random weights, and the same as GGUF. Token 0 is never drawn."""
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=sizes.vocab, hidden_size=sizes.width, num_hidden_layers=sizes.layers, state_size=sizes.state,
        head_dim=HEAD, num_heads=2 * sizes.width // HEAD, n_groups=1, expand=2, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = Mamba2ForCausalLM(config).eval()
    with torch.no_grad():
        model.backbone.embeddings.weight.normal_()[0] = 0
    model.save_pretrained(folder)
    letters = ByteLevelBPETokenizer()
    letters.train_from_iterator(["a b c"], vocab_size=257, special_tokens=["<|end|>"], show_progress=False)
    letters.save(str(folder / "tokenizer.json"))
    write_gguf(folder / "model.gguf", config, model.state_dict(), sizes)


def write_gguf(path: Path, config: Any, weights: dict[str, torch.Tensor], sizes: Sizes) -> None:
    """Tokens are w0, w1, w2 …, so that texts can be read back as ids."""
    writer = gguf.GGUFWriter(path, "mamba2")
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(sizes.width)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(sizes.layers)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(2 * sizes.width)
    writer.add_ssm_state_size(sizes.state)
    writer.add_ssm_time_step_rank(config.num_heads)
    writer.add_ssm_group_count(1)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(sizes.vocab)
    writer.add_tokenizer_model("llama")
    kinds = gguf.TokenType
    writer.add_token_list([f"w{i}" for i in range(sizes.vocab)])
    writer.add_token_scores([0.0] * sizes.vocab)
    writer.add_token_types([kinds.CONTROL, *[kinds.NORMAL] * (sizes.vocab - 1)])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(0)
    tensors = {
        "token_embd.weight": weights["backbone.embeddings.weight"],
        "output_norm.weight": weights["backbone.norm_f.weight"],
    }
    for layer in range(sizes.layers):
        there, its = f"blk.{layer}.", f"backbone.layers.{layer}."
        mixer = its + "mixer."
        tensors |= {
            there + "attn_norm.weight": weights[its + "norm.weight"],
            there + "ssm_in.weight": weights[mixer + "in_proj.weight"],
            there + "ssm_conv1d.weight": weights[mixer + "conv1d.weight"].squeeze(1),
            there + "ssm_conv1d.bias": weights[mixer + "conv1d.bias"],
            there + "ssm_dt.bias": weights[mixer + "dt_bias"],
            there + "ssm_a": -weights[mixer + "A_log"].exp()[:, None],
            there + "ssm_d": weights[mixer + "D"][:, None],
            there + "ssm_norm.weight": weights[mixer + "norm.weight"][None],
            there + "ssm_out.weight": weights[mixer + "out_proj.weight"],
        }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# Two engines


def ours(folder: Path, threads: int) -> tuple[Ask, Callable[[], None]]:
    """Ask an engine of ours, and end it."""
    torch.set_num_threads(threads)
    model = foreign.read(folder)[0].eval()
    tokenizer = common.Letters(model.config.vocab_size)
    kept = Engine(model, tokenizer, store=PrefixStore(model), together=False)
    plain = Engine(model, tokenizer, together=False)

    def ask(prompt: list[int], keep: bool) -> tuple[list[int], int, float]:
        engine, events = kept if keep else plain, queue.Queue[tuple[float, Any]]()
        start = time.perf_counter()
        session = engine.session()
        session.append(prompt[1:])  # every text of ours begins with token 0
        job = Job(
            session,
            ANSWER,
            lambda event: events.put((time.perf_counter(), event)),
            SamplingConfig(temperature=0),
        )
        engine.submit([job])
        first, seconds = None, list[float]()
        while first is None or first.finished is None:
            at, first = events.get(timeout=600)
            assert isinstance(first, Piece), first
            seconds.append(at - start)
        return list(job.ids), max(0, job.spared), seconds[0]

    def end() -> None:
        kept.close()
        plain.close()

    return ask, end


def theirs(
    folder: Path, threads: int, slots: int | None = None, every: int | None = None
) -> tuple[Ask, Callable[[], None]]:
    """Ask llama.cpp's server, with so many slots and a state kept every so many tokens, or as many as it likes."""
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / "model.gguf")
    params.n_parallel, params.n_ctx, params.verbosity = slots or 4, 1 << 16, -1
    if every is not None:
        params.checkpoint_min_step = every
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = [xllamacpp.Server(params)]

    def ask(prompt: list[int], keep: bool) -> tuple[list[int], int, float]:
        events = list[tuple[float, dict[str, Any]]]()
        start = time.perf_counter()
        server[0].handle_completions(
            {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "stream": True, "cache_prompt": keep},
            lambda event: events.append((time.perf_counter(), event)),
        )
        text = "".join(event["choices"][0]["text"] for _, event in events)
        ids = [int(number) for number in text.split("w")[1:]]
        return ids, events[-1][1]["usage"]["prompt_tokens_details"]["cached_tokens"], events[0][0] - start

    return ask, server.clear


# The trace


def trace(ask: Ask, sizes: Sizes) -> tuple[list[dict[str, Any]], list[tuple[list[int], list[int]]]]:
    """Every request's kind, tokens, tokens not read again and seconds; and every prompt with its answer."""
    draw = random.Random(1)
    requests, answers = list[dict[str, Any]](), list[tuple[list[int], list[int]]]()

    def words(count: int) -> list[int]:
        return [draw.randrange(1, sizes.vocab) for _ in range(count)]

    def say(kind: str, text: list[int]) -> list[int]:
        prompt = [*text, *words(sizes.message)]
        answer, hits, seconds = ask(prompt, True)
        requests.append({"kind": kind, "tokens": len(prompt), "hits": hits, "seconds": seconds})
        answers.append((prompt, answer))
        return [*prompt, *answer]

    system = [0, *words(sizes.system - 1)]
    texts, firsts = [list(system) for _ in range(sizes.conversations)], list[list[int]]()
    for turn in range(sizes.turns):
        texts = [say("turn", text) for text in texts]
        if turn == 0:
            firsts = [list(text) for text in texts]
    for text in firsts:
        say("fork", text)
    for text in texts:
        say("return", text)
    return requests, answers


def partings(ask: Ask, sizes: Sizes) -> dict[str, list[int]]:
    """Tokens not read again of each of three texts that share a beginning, by SHARED."""
    draw, found = random.Random(2), dict[str, list[int]]()
    for shared, own in SHARED:
        begin = [0, *(draw.randrange(1, sizes.vocab) for _ in range(shared - 1))]
        rests = [
            [1 + number, *(draw.randrange(1, sizes.vocab) for _ in range(own - 1))] for number in range(3)
        ]
        found[f"{shared} + {own}"] = [ask([*begin, *rest], True)[1] for rest in rests]
    return found


def summed(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """By kind: share of the prompts' tokens not read again, and seconds to the first token."""
    found = {}
    for kind in dict.fromkeys(request["kind"] for request in requests):
        own = [request for request in requests if request["kind"] == kind]
        tokens = sum(request["tokens"] for request in own)
        found[kind] = {
            "requests": len(own),
            "tokens": tokens,
            "hits": sum(request["hits"] for request in own),
            "first_token_seconds": common.Spread.of([request["seconds"] for request in own]),
        }
    return found


def main() -> None:
    parser = common.parser(__doc__ or "", threads=2, repeats=3)
    args = parser.parse_args()
    sizes = Sizes(64, 2, 16, 512, 2, 2, 150, 10) if args.quick else Sizes()
    report = common.Report(args, TESTS, dtype="float32", shapes=str(sizes._asdict()))
    found: dict[str, Any] = {"llama.cpp": xllamacpp.__version__, "engines": {}}
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), sizes)
        tuned = functools.partial(theirs, slots=sizes.conversations, every=sizes.message)
        makers = {"perspectron": ours, "llama.cpp": theirs, "llama.cpp, a slot each": tuned}
        made = {name: list[dict[str, Any]]() for name in makers}
        differ, cold, drawn = dict.fromkeys(makers, 0), {name: list[float]() for name in makers}, 0
        first, parted = dict[str, list[list[int]]](), dict[str, dict[str, list[int]]]()
        for repeat in range(args.repeats):
            for name, maker in makers.items():
                ask, end = maker(Path(folder), args.threads)
                requests, answers = trace(ask, sizes)
                made[name] += requests
                parted[name] = partings(ask, sizes)
                if repeat == 0:
                    first[name] = [answer for _, answer in answers]
                    for prompt, answer in answers:
                        alone, _, seconds = ask(prompt, False)
                        cold[name].append(seconds)
                        differ[name] += sum(a != b for a, b in zip(answer, alone, strict=True))
                    drawn = sum(len(answer) for _, answer in answers)
                end()
    rows = []
    for name, requests in made.items():
        kinds = summed(requests)
        own = found["engines"][name] = {
            "kinds": kinds, "tokens_that_differ": differ[name], "of_tokens": drawn,
            "nothing_kept_seconds": common.Spread.of(cold[name]), "parted": parted[name],
        }  # fmt: skip
        for kind, its in kinds.items():
            share = its["hits"] / its["tokens"]
            rows.append([f"{name}, {kind}", f"{share:.1%}", its["first_token_seconds"].text(1e3)])
        for case, counts in parted[name].items():
            rows.append([f"{name}, {case} of each of three", ", ".join(map(str, counts)), ""])
        rows.append([f"{name}, nothing kept", "0%", own["nothing_kept_seconds"].text(1e3)])
    found["same_answers"] = sum(
        all(one == a for one in rest) for a, *rest in zip(*first.values(), strict=True)
    )
    report.table(["", "prompt not read again", "first token, ms"], rows)
    for name in made:
        report.say(f"{name}: {differ[name]} of {drawn} tokens differ from those with nothing kept")
    report.finish(found)


if __name__ == "__main__":
    main()
