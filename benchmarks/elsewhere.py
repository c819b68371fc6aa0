"""Training against the models that people train elsewhere: transformers' GPT-2 and Mamba-2, and the decoders of nanoGPT
and nanochat, each as a plain loop, as it is and compiled by torch.compile.

An update is forward, loss, backward, clipping and fused AdamW on random tokens, bfloat16 by autocast or float32. All
models take turns. Beside each stands ours of the same design, or of the nearest, with as many parameters, and
`perspective2`.

nanoGPT's decoder: learned positions, LayerNorm, GELU, a head that is the embedding. nanochat's: rotary positions, norms
without weights, also of queries and keys and of the embedding, squared ReLU, capped logits, a head of its own. Both are
written here from their descriptions, on PyTorch's fused attention.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron import presets
from perspectron.designs.ssd.mixer import SSDConfig
from perspectron.designs.transformer.attention import AttentionConfig
from perspectron.model.config import ModelConfig
from perspectron.model.ffn import MLPConfig
from perspectron.model.model import build
from perspectron.util.machine import memory_kept

TESTS = ("tests/native/test_training.py", "tests/model/test_gpt2.py")
BAR = 1.5
CAP = 15.0  # of nanochat's logits
PAIRS = {
    "GPT-2 of transformers": "gpt2",
    "nanoGPT": "gpt2",
    "nanochat": "transformer",
    "Mamba-2 of transformers": "ssd",
}
"""What is trained elsewhere, and ours of that design, or of the nearest."""
OURS = ("perspective2", "gpt2", "transformer", "ssd")


@dataclass(frozen=True)
class Setting:
    """Parameters, and B windows of T tokens."""

    params: int
    B: int
    T: int

    def __str__(self) -> str:
        return f"{self.params / 1e6:.3g} M, {self.B}×{self.T}"

    def ours(self, design: str) -> ModelConfig:
        return presets.solve(design, self.params, vocab_size=self.vocab_size, seq_len=self.T)

    @property
    def vocab_size(self) -> int:
        return presets.vocabulary(self.params)


FULL = (Setting(2_000_000, 8, 256), Setting(20_000_000, 8, 512))
QUICK = (Setting(80_000, 2, 16),)


class Attention(nn.Module):
    def __init__(self, D: int, heads: int, modern: bool) -> None:
        super().__init__()
        self.heads, self.modern = heads, modern
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x_BTD: Tensor, turns: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.modern:
            q, k = (F.rms_norm(turned(x, turns), x.shape[-1:]) for x in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


def turned(x_BHTK: Tensor, turns: Tensor) -> Tensor:
    """Halves of a head's channels as real and imaginary parts, turned by their position's angles."""
    cos, sin = turns.to(x_BHTK.dtype).unbind(-1)
    a, b = x_BHTK.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Decoder(nn.Module):
    """nanoGPT's, or `modern`, nanochat's."""

    turns: Tensor

    def __init__(
        self, vocab_size: int, D: int, layers: int, heads: int, hidden: int, T: int, *, modern: bool
    ) -> None:
        super().__init__()
        self.modern = modern
        self.wte, self.head = nn.Embedding(vocab_size, D), nn.Linear(D, vocab_size, bias=False)
        if not modern:
            self.head.weight = self.wte.weight
            self.wpe = nn.Embedding(T, D)
        nn.init.normal_(self.wte.weight, std=0.02)

        def norm() -> nn.Module:
            return nn.RMSNorm(D, elementwise_affine=False) if modern else nn.LayerNorm(D, bias=False)

        self.first, self.last = norm() if modern else nn.Identity(), norm()
        self.mixers = nn.ModuleList(Attention(D, heads, modern) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(D, hidden, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(hidden, D, bias=False) for _ in range(layers))
        self.norms = nn.ModuleList(norm() for _ in range(2 * layers))
        half = D // heads // 2
        angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.wte(ids_BT)
        x = self.first(x) if self.modern else x + self.wpe.weight[: ids_BT.shape[1]]
        for i, (mixer, up, down) in enumerate(zip(self.mixers, self.up, self.down, strict=True)):
            x = x + mixer(self.norms[2 * i](x), self.turns)
            h = up(self.norms[2 * i + 1](x))
            x = x + down(h.relu().square() if self.modern else F.gelu(h))
        logits = self.head(self.last(x)).float()
        logits = CAP * torch.tanh(logits / CAP) if self.modern else logits
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


class OfTransformers(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        logits = self.model(ids_BT).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets_BT.flatten())


def theirs(name: str, setting: Setting) -> nn.Module:
    """The model of that name, as wide as ours of its design; nano's as deep as brings their networks nearest
    to four times that width."""
    own = setting.ours(PAIRS[name])
    D, layers, mixer, network = own.d_model, len(own.blocks), own.blocks[0].mixer, own.blocks[0].ffn
    if name.startswith("nano"):
        assert isinstance(mixer, AttentionConfig)

        def of(depth: int, hidden: int) -> Decoder:
            modern = name == "nanochat"
            return Decoder(setting.vocab_size, D, depth, mixer.heads, hidden, setting.T, modern=modern)

        def width(depth: int) -> int:
            with torch.device("meta"):
                rest = setting.params - common.parameters(of(depth, 1)) + 2 * D * depth
            return round(rest / (2 * D * depth))

        depth = min(range(1, 4 * layers), key=lambda depth: abs(width(depth) - 4 * D))
        return of(depth, width(depth))
    from transformers import AutoModelForCausalLM, GPT2Config, Mamba2Config, PreTrainedConfig

    ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False}
    config: PreTrainedConfig
    if name.startswith("GPT-2"):
        assert isinstance(mixer, AttentionConfig)
        assert isinstance(network, MLPConfig)
        config = GPT2Config(
            vocab_size=setting.vocab_size, n_embd=D, n_layer=layers, n_head=mixer.heads, n_inner=network.hidden,
            n_positions=own.positions, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ids,
        )  # fmt: skip
    else:
        assert isinstance(mixer, SSDConfig)
        heads = mixer.expand * D // mixer.head_dim
        config = Mamba2Config(
            vocab_size=setting.vocab_size, hidden_size=D, num_hidden_layers=layers, num_heads=heads,
            head_dim=mixer.head_dim, state_size=mixer.state, expand=mixer.expand, conv_kernel=mixer.conv, n_groups=1,
            chunk_size=min(setting.T, 64), tie_word_embeddings=True, **ids,
        )  # fmt: skip
    return OfTransformers(AutoModelForCausalLM.from_config(config))


def ours(design: str, setting: Setting) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    model = build(setting.ours(design), 0)
    return model, lambda ids, targets: model(ids, targets=targets).objective()


def measure(setting: Setting, dtype: str, repeats: int, *, quick: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    batch = torch.randint(setting.vocab_size, (2, setting.B, setting.T)).unbind()
    calls: dict[str, Callable[[], None]] = {}
    sizes: dict[str, int] = {}
    for design in OURS:
        model, loss_of = ours(design, setting)
        calls[design], sizes[design] = (
            common.updating(model, loss_of, *batch, dtype),
            common.parameters(model),
        )
    compiling: dict[str, float] = {}
    for name in PAIRS:
        for way in ("", ", compiled"):
            if way and quick:  # the compiler takes a minute
                continue
            model = theirs(name, setting).train()
            called = torch.compile(model, dynamic=False) if way else model
            update = common.updating(model, called, *batch, dtype)
            start = time.perf_counter()
            update()
            compiling[name + way] = time.perf_counter() - start
            calls[name + way], sizes[name + way] = update, common.parameters(model)
    with memory_kept():
        seconds = common.interleave(calls, repeats)
    tokens = setting.B * setting.T
    found: dict[str, Any] = {}
    for name, taken in seconds.items():
        found[name] = {
            "parameters": sizes[name],
            "tokens_per_second": common.Spread.of([tokens / s for s in taken]),
            "first_update_seconds": compiling.get(name),
        }
        if name not in OURS:
            own = PAIRS[name.removesuffix(", compiled")]
            found[name] |= {
                "ours": own,
                "times": common.ratios(taken, seconds[own]),
                "perspective2_times": common.ratios(taken, seconds["perspective2"]),
            }
    return {
        "params": setting.params,
        "batch": setting.B,
        "seq_len": setting.T,
        "dtype": dtype,
        "models": found,
    }


def show(report: common.Report, setting: Setting, run: dict[str, Any]) -> None:
    report.say(f"{setting}, {run['dtype']}")
    rows = []
    for name, found in run["models"].items():
        times = [found[key].text() if key in found else "" for key in ("times", "perspective2_times")]
        size = f"{found['parameters'] / 1e6:.2f}"
        rows.append([name, size, found["tokens_per_second"].text(), found.get("ours", ""), *times])
    header = ["", "M parameters", "tokens/s", "ours", "ours is times as fast", "perspective2 is"]
    report.table(header, rows)
    slower = {name: found["times"].median for name, found in run["models"].items() if "times" in found}
    missed = [name for name, times in slower.items() if times < BAR]
    report.say(f"Bar: ours at least {BAR} times as fast. Not met beside: {', '.join(missed) or 'none'}.", "")


def main() -> None:
    parser = common.parser(__doc__ or "", threads=torch.get_num_threads(), repeats=5)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("bfloat16",))
    sizes = [setting.params for setting in FULL]
    parser.add_argument("--params", type=int, nargs="+", choices=sizes, default=sizes, help="(%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = QUICK if args.quick else [setting for setting in FULL if setting.params in args.params]
    shapes = "; ".join(map(str, settings))
    report = common.Report(args, TESTS, dtype=", ".join(args.dtypes), shapes=shapes)
    runs = []
    for setting in settings:
        for dtype in args.dtypes:
            runs.append(measure(setting, dtype, 1 if args.quick else args.repeats, quick=args.quick))
            show(report, setting, runs[-1])
    report.finish({"bar": BAR, "runs": runs})


if __name__ == "__main__":
    main()
