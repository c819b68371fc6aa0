"""RWKV-7 as a short loop of its formulas, small models of it with random weights under the names of its author and of
fla, and a small World vocabulary."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from perspectron.data import world

D, K, HIDDEN, LAYERS, V, EPS = 24, 6, 50, 3, 300, 1e-5
RANKS = {"w": 5, "a": 3, "v": 2, "g": 7}
PIECES = [
    "the",
    " the",
    " th",
    "  ",
    "    ",
    "\n\n",
    "naïve",
    "汉",
    "汉字",
    "字",
    "it's",
    '"',
    "\\n",
    " quick brown",
]
BYTES = [b"\xc3\xa9 ", b"\xe6\xb1", b" \xe6\xb1", b"\xff\xfe"]
FLA: dict[str, Any] = {
    "model_type": "rwkv7", "hidden_size": D, "num_hidden_layers": LAYERS, "head_dim": K, "vocab_size": V,
    "intermediate_size": HIDDEN, "norm_eps": EPS, "decay_low_rank_dim": 5, "a_low_rank_dim": 3, "v_low_rank_dim": 2,
    "gate_low_rank_dim": 7, "fuse_norm": False, "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "sqrelu",
    "norm_bias": True, "norm_first": True, "tie_word_embeddings": False, "architectures": ["RWKV7ForCausalLM"],
}  # fmt: skip


def vocabulary() -> dict[bytes, int]:
    """Each byte, and some texts and bytes that are not UTF-8; ids in an order of their own."""
    tokens = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES] + BYTES
    return {token: id for id, token in enumerate(dict.fromkeys(tokens), 1)}


def vocabulary_file(folder: Path) -> Path:
    """In the author's format."""
    lines = []
    for token, id in vocabulary().items():
        try:
            literal = repr(token.decode())
        except UnicodeDecodeError:
            literal = repr(token)
        lines.append(f"{id} {literal} {len(token)}\n")
    path = folder / world.FILE
    path.write_text("".join(lines), encoding="utf-8")
    return path


def weights(seed: int = 0, D: int = D, K: int = K) -> dict[str, Tensor]:
    """Of a model by the author's names, every number drawn, in numbers that bfloat16 has."""
    H = D // K
    shapes: dict[str, tuple[int, ...]] = {"emb.weight": (V, D), "head.weight": (V, D)}
    shapes |= {f"{name}.{part}": (D,) for name in ("blocks.0.ln0", "ln_out") for part in ("weight", "bias")}
    for i in range(LAYERS):
        own: dict[str, tuple[int, ...]] = {
            f"{name}.{part}": (D,) for name in ("ln1", "ln2", "att.ln_x") for part in ("weight", "bias")
        }
        own |= {f"att.x_{name}": (1, 1, D) for name in "rwkvag"}
        own |= {f"att.{name}": (1, 1, D) for name in ("k_k", "k_a", "w0", "a0", "v0")} | {"att.r_k": (H, K)}
        own |= {f"att.{name}1": (D, rank) for name, rank in RANKS.items()}
        own |= {f"att.{name}2": (rank, D) for name, rank in RANKS.items()}
        own |= {f"att.{name}.weight": (D, D) for name in ("receptance", "key", "value", "output")}
        own |= {"ffn.x_k": (1, 1, D), "ffn.key.weight": (HIDDEN, D), "ffn.value.weight": (D, HIDDEN)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in own.items()}
    generator, drawn = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator)
        matrix = len(shape) == 2 and "r_k" not in name
        x = x * shape[-1 if name.endswith("weight") else 0] ** -0.5 if matrix else 0.5 + 0.3 * x
        drawn[name] = (x if name != "head.weight" else 4 * x).bfloat16().float()
    return drawn


class Reference:
    """A model of these weights, a token a step, in float64. unit_eps: added to a key's square; None bounds its length.
    The state of a head has values as rows and keys as columns."""

    def __init__(
        self, weights: dict[str, Tensor], *, unit_eps: float | None = None, group_eps: float = 64e-5,
        first: bool = True,
    ) -> None:  # fmt: skip
        self.z = {name: x.double() for name, x in weights.items()}
        self.unit_eps, self.group_eps, self.first = unit_eps, group_eps, first
        self.H, self.K = weights["blocks.0.att.r_k"].shape
        D, H, K = self.H * self.K, self.H, self.K
        self.states = [torch.zeros(H, K, K, dtype=torch.float64) for _ in range(LAYERS)]
        self.last = torch.zeros(2 * LAYERS, D, dtype=torch.float64)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape, self.z[f"{name}.weight"], self.z[f"{name}.bias"], EPS)

    def step(self, id: int) -> Tensor:
        x, v_first = self.z["emb.weight"][id], torch.empty(0)
        x = self.norm(x, "blocks.0.ln0") if self.first else x
        for i in range(LAYERS):
            h = self.norm(x, f"blocks.{i}.ln1")
            y, v_first = self.time(i, h, self.last[2 * i], v_first)
            self.last[2 * i], x = h, x + y
            h = self.norm(x, f"blocks.{i}.ln2")
            p = {n: self.z[f"blocks.{i}.ffn.{n}"] for n in ("x_k", "key.weight", "value.weight")}
            k = h + (self.last[2 * i + 1] - h) * p["x_k"].flatten()
            self.last[2 * i + 1], x = h, x + p["value.weight"] @ (p["key.weight"] @ k).relu() ** 2
        return self.z["head.weight"] @ self.norm(x, "ln_out")

    def time(self, i: int, h: Tensor, before: Tensor, v_first: Tensor) -> tuple[Tensor, Tensor]:
        H, K, D = self.H, self.K, len(h)
        p = {n.removeprefix(f"blocks.{i}.att."): x for n, x in self.z.items() if f"blocks.{i}.att." in n}
        xr, xw, xk, xv, xa, xg = (h + (before - h) * p[f"x_{n}"].flatten() for n in "rwkvag")
        r, k, v = p["receptance.weight"] @ xr, p["key.weight"] @ xk, p["value.weight"] @ xv
        w = torch.sigmoid(p["w0"].flatten() + torch.tanh(xw @ p["w1"]) @ p["w2"])
        a = torch.sigmoid(p["a0"].flatten() + xa @ p["a1"] @ p["a2"])
        g = torch.sigmoid(xg @ p["g1"]) @ p["g2"]
        kk = (k * p["k_k"].flatten()).view(H, K)
        if self.unit_eps is None:
            kk = F.normalize(kk, dim=-1, p=2.0)
        else:
            kk = kk / (kk.square().sum(-1, keepdim=True) + self.unit_eps).sqrt()
        k = k * (1 + (a - 1) * p["k_a"].flatten())
        if i == 0:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(p["v0"].flatten() + xv @ p["v1"] @ p["v2"])
        decay = torch.exp(-torch.exp(torch.tensor(-0.5, dtype=torch.float64)) * w).view(H, 1, K)
        r, k, v, a = (x.view(H, K) for x in (r, k, v, a))
        S = self.states[i]
        S = S * decay - (S @ kk[:, :, None]) * (kk * a)[:, None] + v[:, :, None] * k[:, None]
        self.states[i] = S
        o = F.group_norm((S @ r[:, :, None]).view(1, D), H, p["ln_x.weight"], p["ln_x.bias"], self.group_eps)
        o = o.flatten() + ((r * k * p["r_k"]).sum(-1, keepdim=True) * v).flatten()
        return p["output.weight"] @ (o * g), v_first


def logits(ids: Tensor, weights: dict[str, Tensor], **options: Any) -> Tensor:
    """Of texts [B,T] in float64."""
    rows = []
    for row in ids.tolist():
        reference = Reference(weights, **options)
        rows.append(torch.stack([reference.step(id) for id in row]))
    return torch.stack(rows)


def of_fla(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights by fla's names."""
    outer = {"emb.": "model.embeddings.", "head.": "lm_head.", "ln_out.": "model.norm."}
    inner = {
        "blocks.": "model.layers.", ".ln0.": ".pre_norm.", ".ln1.": ".attn_norm.", ".ln2.": ".ffn_norm.",
        ".att.ln_x.": ".attn.g_norm.", ".att.receptance.": ".attn.r_proj.", ".att.key.": ".attn.k_proj.",
        ".att.value.": ".attn.v_proj.", ".att.output.": ".attn.o_proj.", ".att.": ".attn.",
    }  # fmt: skip
    made = {}
    for name, x in weights.items():
        if "blocks.0.att.v" in name and name[-1] in "012":
            continue
        if name[-2] in "wavg" and name[-1] in "012":
            part = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[name[-1]]
            name, x = f"{name[:-2]}{name[-2]}_lora.lora.{part}", x.flatten() if name[-1] == "0" else x.T
        elif name.endswith((".k_k", ".k_a", "ffn.x_k")):
            x = x.flatten()
        for old, new in (inner if name.startswith("blocks.") else outer).items():
            name = name.replace(old, new)
        made[name] = x.contiguous()
    return made


def fla_folder(folder: Path, weights: dict[str, Tensor], *, shards: bool = False, **values: Any) -> Path:
    """A folder as fla's models are published. values: of its config; ... leaves one out."""
    folder.mkdir(exist_ok=True)
    config = {name: value for name, value in (FLA | values).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary_file(folder)
    tensors = of_fla(weights)
    if config.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    if not shards:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names, places = list(tensors), {}
    for part, own in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{part:05}-of-00002.safetensors"
        save_file({name: tensors[name].bfloat16() for name in own}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def gguf_file(path: Path, weights: dict[str, Tensor], kind: Any = None, **more: Any) -> Path:
    """A GGUF as llama.cpp's converter writes it, of tensors of a type. more: further values."""
    import gguf

    from tests.gguf_models import KINDS, Writer

    writer, (H, K) = Writer(path, "rwkv7"), weights["blocks.0.att.r_k"].shape
    writer.values(
        block_count=LAYERS, context_length=1_048_576, embedding_length=H * K, feed_forward_length=HIDDEN,
        attention__layer_norm_epsilon=EPS, attention__head_count=0, wkv__head_size=K,
        attention__decay_lora_rank=RANKS["w"], attention__iclr_lora_rank=RANKS["a"],
        attention__value_residual_mix_lora_rank=RANKS["v"], attention__gate_lora_rank=RANKS["g"],
    )  # fmt: skip
    tokens = {0: "<s>"} | {id: repr(token)[2:-1] for token, id in vocabulary().items()}
    pads = {id: f"[PAD{id}]" for id in range(len(tokens), V)}
    writer.values(**{
        "tokenizer__ggml__model": "rwkv", "tokenizer__ggml__tokens": [*tokens.values(), *pads.values()],
        "tokenizer__ggml__token_type": [3] + [1] * (len(tokens) - 1) + [5] * len(pads),
        "tokenizer__ggml__bos_token_id": 0, "tokenizer__ggml__eos_token_id": 0,
        "tokenizer__ggml__eot_token_id": vocabulary()[b"\n\n"], "tokenizer__chat_template": "rwkv-world", **more,
    })  # fmt: skip
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.RWKV7, LAYERS)
    for i in range(LAYERS):
        mixes = torch.stack([weights[f"blocks.{i}.att.x_{name}"] for name in "rwkvag"])
        writer.tensor(f"blk.{i}.time_mix_lerp_fused.weight", mixes)
    for name, x in weights.items():
        if ".att.x_" in name:
            continue
        if name.startswith("blocks.0.att.v") and name[-1] in "012":
            x = weights[name.replace(".att.v", ".att.a")]
        low = name[-2] in "wavg" and name[-1] in "12"
        x = (x.T if low else x).squeeze()
        x = x.flatten() if name.endswith("r_k") else x
        there = (
            name.replace("blocks", "model.layers")
            .replace(".att.", ".attention.")
            .replace(".ffn.", ".feed_forward.")
        )
        there = there.replace("layers.0.ln0", "layers.0.pre_norm").replace("emb.", "model.embeddings.")
        there = there.replace("head.", "lm_head.").replace("ln_out.", "model.norm.")
        found = names.get_name(there, try_suffixes=(".weight", ".bias"))
        assert found is not None, there
        found += "" if found.endswith((".weight", ".bias")) else ".weight"
        writer.tensor(found, x, (kind or KINDS.F32) if x.ndim == 2 else KINDS.F32)
    writer.done()
    return path
