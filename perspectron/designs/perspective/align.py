"""Arrangement of experts on the torus lattice, so that those that are alike are neighbours.

Finding the best one is a quadratic assignment problem. Here: classical multidimensional scaling (MDS) of the experts'
distances, two coordinates to an axis, whose angle is the place along it; cells are filled in the order of the
angles; then the swap of two experts that helps most is made until none helps. The present arrangement is refined the
same way, and the better of the two is taken. Nothing is random.

Shapes: E experts and as many cells of the lattice, A its axes, M numbers of an expert.
"""

import torch
from torch import Tensor


def distances(expert_EM: Tensor) -> Tensor:
    """L1 distance between every two experts [E,E], float64."""
    return torch.cdist(expert_EM, expert_EM, p=1).double()


def cost(distance_EE: Tensor, adjacent_EE: Tensor, expert_E: Tensor) -> float:
    """Sum of the distances between neighbours, where cell c holds expert_E[c]."""
    return float((distance_EE[expert_E][:, expert_E] * adjacent_EE).sum() / 2)


def arrange(distance_EE: Tensor, adjacent_EE: Tensor, torus: tuple[int, ...]) -> Tensor:
    """The expert that each cell shall hold [E], for symmetric distances and cells that are neighbours.

    Experts stay where they are when nothing better is known.
    """
    adjacent_EE = adjacent_EE.to(distance_EE)
    stay_E = torch.arange(len(distance_EE))
    refined = [swap(distance_EE, adjacent_EE, start_E) for start_E in (stay_E, embed(distance_EE, torus))]
    return min(refined, key=lambda expert_E: cost(distance_EE, adjacent_EE, expert_E))


def embed(distance_EE: Tensor, torus: tuple[int, ...]) -> Tensor:
    """The expert that each cell holds by MDS [E]: experts in the order of their angle on the last axis are cut into
    as many equal groups as the axis is long, each group likewise on the axis before; ids count the first axis
    fastest."""
    angle_EA = angles(distance_EE, len(torus))

    def place(group: list[int], axis: int) -> list[int]:
        if axis < 0:
            return group
        group = sorted(group, key=lambda e: (float(angle_EA[e, axis]), e))
        size = len(group) // torus[axis]
        parts = (group[i * size : (i + 1) * size] for i in range(torus[axis]))
        return [e for part in parts for e in place(part, axis - 1)]

    return torch.tensor(place(list(range(len(distance_EE))), len(torus) - 1))


def angles(distance_EE: Tensor, axes: int) -> Tensor:
    """Angles [E,A] in the planes of the first, second, … pair of MDS coordinates."""
    E = len(distance_EE)
    centred_EE = torch.eye(E).to(distance_EE) - 1 / E
    gram_EE = -0.5 * centred_EE @ distance_EE.square() @ centred_EE
    values_E, vectors_EE = torch.linalg.eigh(gram_EE)
    coordinate_EE = (vectors_EE * values_E.clamp_min(0).sqrt()).flip(1)
    coordinate_EE = torch.nn.functional.pad(coordinate_EE, (0, max(0, 2 * axes - E)))
    return torch.atan2(coordinate_EE[:, 1 : 2 * axes : 2], coordinate_EE[:, 0 : 2 * axes : 2])


def swap(distance_EE: Tensor, adjacent_EE: Tensor, expert_E: Tensor) -> Tensor:
    """The arrangement after exchanging the two experts that lower the cost most, as long as any two do."""
    expert_E = expert_E.clone()
    enough = -1e-9 * float(distance_EE.sum())
    while True:
        change_EE = changes(distance_EE[expert_E][:, expert_E], adjacent_EE)
        best = int(change_EE.argmin())
        if not float(change_EE.flatten()[best]) < enough:
            return expert_E
        pair = torch.tensor(divmod(best, len(expert_E)))
        expert_E[pair] = expert_E[pair.flip(0)]


def changes(placed_EE: Tensor, adjacent_EE: Tensor) -> Tensor:
    """Change of the cost when the experts of cells c and d are exchanged [E,E]; placed_EE: distances by cell.

    c's neighbours k get d's expert: Σ_k (A_ck − A_dk)(P_dk − P_ck) over k other than c and d.
    """
    product_EE = adjacent_EE @ placed_EE
    own_E = product_EE.diagonal()
    whole_EE = product_EE + product_EE.T - own_E[:, None] - own_E
    return whole_EE + 2 * adjacent_EE * placed_EE
