"""The demo of ADR as its document prints it, to run it and say what it does; the library's ADR is another
(docs/designs/adr.md#the-demo).

Shapes: B batch, T time, D width, H heads, K head width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GAMMA = 0.97


class _Memory(nn.Module):
    """A memory with one state for all its callers, kept from call to call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru, self.state = nn.GRUCell(width, width), torch.zeros(0)

    def forward(self, x_BK: Tensor) -> Tensor:
        before_BK = self.state if self.state.numel() else torch.zeros_like(x_BK)
        self.state = GAMMA * before_BK + (1 - GAMMA) * self.gru(x_BK, before_BK)
        return self.state


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.memories = nn.ModuleList(_Memory(width // heads) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = self.norms[0](x_BTD)
        q, k, v = (
            project(h_BTD).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        k, v = (
            torch.cat(
                [own, torch.stack([memory(own[:, head, -1]) for head in range(self.heads)], 1)[:, :, None]], 2
            )
            for own, memory in ((k, self.memories[0]), (v, self.memories[1]))
        )
        o = F.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v  # nothing hides what comes later
        x_BTD = x_BTD + self.out(o.transpose(1, 2).flatten(2))
        added_BTD: Tensor = x_BTD + self.mlp(self.norms[1](x_BTD))
        return added_BTD


class LiteralADR(nn.Module):
    """Logits [B,T,V] of ids [B,T]; dropout is left out, as in evaluation."""

    def __init__(self, vocab_size: int, positions: int) -> None:
        super().__init__()
        width, heads, layers = 256, 4, 4
        self.embed, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed(ids_BT) + self.positions.weight[: ids_BT.shape[1]]
        logits_BTV: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits_BTV


@torch.no_grad()
def tried(ids: list[int], vocab_size: int, positions: int) -> dict[str, float | int]:
    """Results of the demo with a prompt. token: its argmax. leak: how far the first token's logits move when the last
    token is another, 0 of a causal model. again: how far the same prompt's logits move when it is asked again."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LiteralADR(vocab_size, positions)
    prompt = torch.tensor([ids])

    def fresh(ids_BT: Tensor) -> Tensor:
        for module in model.modules():
            if isinstance(module, _Memory):
                module.state = torch.zeros(0)
        logits_BTV: Tensor = model(ids_BT)
        return logits_BTV

    first, other = fresh(prompt), prompt.clone()
    again = model(prompt)
    other[0, -1] = (other[0, -1] + 1) % vocab_size
    return {
        "token": int(first[0, -1].argmax()),
        "leak": (fresh(other)[0, 0] - first[0, 0]).abs().max().item(),
        "again": (again - first).abs().max().item(),
    }
