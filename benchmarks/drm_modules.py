"""The DRM emitter as one would first write it: a module for each part, called once per token; emitter and losses
inside the loop; the graph is autograd's. Beside `perspectron`'s own it is what the fast loop is measured against.

Shapes: B batch, T time, S state, E token, H hidden, N directions, R rank, V vocabulary.
"""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perspectron.designs.drm.head import Emitter
from perspectron.designs.drm.mixer import DRMConfig
from perspectron.model.config import ModelConfig
from perspectron.model.model import LanguageModel


def trunk(S: int, H: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(S, H), nn.GELU(), nn.Linear(H, H), nn.GELU())


class DirectionField(nn.Module):
    def __init__(self, S: int, config: DRMConfig) -> None:
        super().__init__()
        self.config, H, N = config, config.hidden, config.directions
        self.trunk, self.direction_head, self.gate_head = trunk(S, H), nn.Linear(H, N * S), nn.Linear(H, N)

    def forward(self, z_BS: Tensor) -> tuple[Tensor, Tensor]:
        h_BH = self.trunk(z_BS)
        V_BNS = self.direction_head(h_BH).view(len(z_BS), self.config.directions, -1)
        gates = torch.sigmoid((self.gate_head(h_BH) + self.config.gate_bias) / self.config.gate_temperature)
        return F.normalize(V_BNS, dim=-1), gates


class RelationalMetric(nn.Module):
    def __init__(self, S: int, config: DRMConfig) -> None:
        super().__init__()
        self.config, H = config, config.hidden
        self.trunk, self.diag_head, self.u_head = trunk(S, H), nn.Linear(H, S), nn.Linear(H, S * config.rank)

    def forward(self, z_BS: Tensor) -> tuple[Tensor, Tensor]:
        h_BH = self.trunk(z_BS)
        d_BS = F.softplus(self.diag_head(h_BH)) + self.config.metric_floor
        return d_BS, self.u_head(h_BH).view(*z_BS.shape, self.config.rank) / self.config.rank**0.5

    def naturalise(self, v_BS: Tensor, d_BS: Tensor, U_BSR: Tensor) -> Tensor:
        """(G + λI)⁻¹ v by Woodbury."""
        D_BS = d_BS + self.config.damping
        v_BS, W_BSR = v_BS / D_BS, U_BSR / D_BS[..., None]
        M_BRR = torch.eye(self.config.rank, dtype=v_BS.dtype) + U_BSR.mT @ W_BSR
        return v_BS - (W_BSR @ torch.linalg.solve(M_BRR, U_BSR.mT @ v_BS[..., None]))[..., 0]


class Flow(nn.Module):
    def __init__(self, S: int, E: int, config: DRMConfig) -> None:
        super().__init__()
        H = config.hidden
        self.coeff_net = nn.Sequential(nn.Linear(S + E, H), nn.GELU(), nn.Linear(H, config.directions))

    def forward(self, z_BS: Tensor, e_BE: Tensor, V_BNS: Tensor, gates_BN: Tensor) -> Tensor:
        c_BN = torch.tanh(self.coeff_net(torch.cat([z_BS, e_BE], -1)))
        return ((gates_BN * c_BN)[..., None] * V_BNS).sum(1)


class PlainDRM(nn.Module):
    """The same model as `LanguageModel` of a drm config with plain heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        mixer = config.blocks[0].mixer
        assert isinstance(mixer, DRMConfig)
        assert (mixer.direction_basis, mixer.metric_basis) == (0, 0)
        self.config, S, E, V = mixer, config.d_model, config.d_token, config.vocab_size
        self.width = S
        self.embedding = nn.Embedding(V, E)
        self.z0 = nn.Parameter(0.02 * torch.randn(S))
        self.field, self.metric, self.flow = (
            DirectionField(S, mixer),
            RelationalMetric(S, mixer),
            Flow(S, E, mixer),
        )
        H = config.head.hidden
        self.emitter = nn.Sequential(
            nn.RMSNorm(S, config.norm_eps), nn.Linear(S, H), nn.GELU(), nn.Linear(H, V)
        )

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy and all terms."""
        config, losses, s = self.config, self.config.losses, self.config.strength
        B, T = ids_BT.shape
        z_BS = self.z0.expand(B, -1)
        total, active, norms, diagonals, changes, kappas = 0.0, [], [], [], [], []
        last_BV = None
        for t in range(T):
            e_BE = self.embedding(ids_BT[:, t])
            V_BNS, a_BN = self.field(z_BS)
            d_BS, U_BSR = self.metric(z_BS)
            raw_BS = self.flow(z_BS, e_BE, V_BNS, a_BN)
            v_BS = (1 - s) * raw_BS + s * self.metric.naturalise(raw_BS, d_BS, U_BSR)
            z_BS = z_BS + config.dt * v_BS
            z_BS = z_BS * (config.radius / z_BS.norm(dim=-1, keepdim=True)).clamp(max=1)
            z_BS = config.radius * torch.tanh(z_BS / config.radius)
            logits_BV = self.emitter(z_BS)
            u_norm_B = U_BSR.flatten(1).norm(dim=-1)
            entropy = -(a_BN * a_BN.log() + (1 - a_BN) * (1 - a_BN).log()).mean()
            energy = (d_BS * v_BS**2).sum(-1) + ((U_BSR.mT @ v_BS[..., None]) ** 2).sum((-2, -1))
            total = total + F.cross_entropy(logits_BV, targets_BT[:, t])
            total = total + losses.action * energy.mean() + losses.dim_sparsity * a_BN.sum(-1).mean()
            total = total - losses.dim_entropy * entropy
            total = total + losses.metric_reg * ((d_BS**2).mean() + (U_BSR**2).mean())
            total = total + losses.metric_u_floor * F.relu(losses.u_floor - u_norm_B).square().mean()
            if last_BV is not None:
                changes.append((logits_BV - last_BV).square().mean())
            active.append(a_BN.sum(-1))
            norms.append(u_norm_B)
            diagonals.append(d_BS)
            kappas.append((d_BS.amax(-1) + u_norm_B**2) / d_BS.amin(-1))
            last_BV = logits_BV
        active_BT, kappa = torch.stack(active, 1), torch.stack(kappas, 1).mean()
        total = total / T
        total = (
            total
            + losses.dim_variance * F.relu(losses.spread_target - active_BT.std(unbiased=False)).square()
        )
        fraction = active_BT.mean() / config.directions
        total = total + losses.active_fraction * F.relu(fraction - losses.active_target).square()
        total = total - losses.metric_diversity * torch.stack(diagonals, 1).var(1, unbiased=False).mean()
        total = total + losses.condition * F.relu(kappa.log() - math.log(losses.condition_target)).square()
        return total + losses.metric_u_target * (torch.stack(norms, 1).mean() - losses.u_target).square()

    @torch.no_grad()
    def take(self, model: LanguageModel) -> "PlainDRM":
        """The weights of `model`, each in the module where it stands here."""
        own: Any = model.blocks[0].mixer
        S, N, H = self.width, self.config.directions, self.config.hidden
        R, head = self.config.rank, cast(Emitter, model.lm_head)
        direction, metric = (self.field.trunk, self.metric.trunk)
        layers: list[tuple[Any, Tensor, Tensor]] = [
            (direction[0], own.read.weight[:H], own.read.bias[:H]),
            (metric[0], own.read.weight[H : 2 * H], own.read.bias[H : 2 * H]),
            (direction[2], own.trunk_w[0], own.trunk_b[:H]),
            (metric[2], own.trunk_w[1], own.trunk_b[H:]),
            (self.field.direction_head, own.direction.weight[:-N], own.direction.bias[:-N]),
            (self.field.gate_head, own.direction.weight[-N:], own.direction.bias[-N:]),
            (self.metric.diag_head, own.metric.weight[:S], own.metric.bias[:S]),
            (
                self.metric.u_head,
                own.metric.weight[S:].view(R, S, H).transpose(0, 1).reshape(S * R, H),
                own.metric.bias[S:].view(R, S).T.reshape(-1),
            ),
            (
                self.flow.coeff_net[0],
                torch.cat([own.read.weight[2 * H :], own.token.weight], 1),
                own.read.bias[2 * H :],
            ),
            (self.flow.coeff_net[2], own.flow.weight, own.flow.bias),
            (self.emitter[1], head.up_proj.weight, head.up_proj.bias),
            (self.emitter[3], head.out_proj.weight, head.out_proj.bias),
        ]
        for layer, weight, bias in layers:
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        for mine, theirs in (
            (self.embedding.weight, model.embedding.weight),
            (self.z0, own.z0),
            (self.emitter[0].weight, model.norm.weight),
        ):
            mine.copy_(cast(Tensor, theirs))
        return self
