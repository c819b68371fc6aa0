"""What does a safe set of half-spaces keep out, what does it cost, and does it withstand an attacker who sees it?

10,000 random projections against scipy's solver; the document's five sweeps beside them; a set fitted to two classes of
sentences (benchmarks/facts.py) on a small trained model: false and true positives, bits per byte of allowed text, a
blocked token's probability against masking, and an attack by gradients on the input's embeddings.
"""

import math
import tempfile
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from facts import QUICK, SIZES, STEPS, TRAIN, classed, prepared, trained
from torch import Tensor

from perspectron.data.loader import IGNORE, windows
from perspectron.designs.perspective.projection import Faces, faces, project
from perspectron.designs.perspective.safety import Polytope, fit, of_tokens, states
from perspectron.opening import Opened
from perspectron.util.files import plain

TESTS = ("tests/designs/perspective/test_safety.py",)
ALPHA = 0.02
DOCUMENT = {"half-spaces": 500, "sweeps": 5}


def drawn(H: int, D: int, seed: int) -> Faces:
    """Random half-spaces about the origin."""
    draw = torch.Generator().manual_seed(seed)
    rows_HD = torch.nn.functional.normalize(torch.randn(H, D, generator=draw, dtype=torch.float64), dim=1)
    return faces(rows_HD, 0.5 + torch.rand(H, generator=draw, dtype=torch.float64), torch.zeros(D))


def solved(h_D: Tensor, made: Faces) -> Tensor:
    """The nearest point by scipy's non-negative least squares (least-distance programming)."""
    from scipy.optimize import nnls

    excess_H = (made.normal_HD @ h_D - made.offset_H).numpy()
    matrix = np.vstack([-made.normal_HD.numpy().T, excess_H[None]])
    ones = np.zeros(len(matrix))
    ones[-1] = 1
    weights, _ = nnls(matrix, ones, maxiter=50 * len(excess_H))
    left = matrix @ weights - ones
    return h_D + torch.from_numpy(-left[:-1] / left[-1])


def swept(h_D: Tensor, made: Faces, sweeps: int) -> Tensor:
    """The document's loop: each violated half-space in turn, no correction."""
    x_D = h_D.clone()
    for _ in range(sweeps):
        for normal_D, offset in zip(made.normal_HD, made.offset_H, strict=True):
            x_D -= torch.clamp(normal_D @ x_D - offset, min=0) * normal_D
    return x_D


def projections(count: int, compare: int) -> dict[str, Any]:
    """How far outside projections end, from float32 too, and how far from the solver's; the same of five sweeps."""
    outside, apart, rounds, sweep_far, sweep_more = [], [], [], [], []
    shapes = [(20, 8), (64, 32), (200, 96), (10, 40)]
    for seed, (H, D) in enumerate(shapes):
        made, draw = drawn(H, D, seed), torch.Generator().manual_seed(100 + seed)
        size = torch.linspace(0.1, 4, count // len(shapes), dtype=torch.float64)[:, None]
        h_ND = torch.randn(len(size), D, generator=draw, dtype=torch.float64) * size
        x_ND, report = project(h_ND, made)
        short_ND, _ = project(h_ND.float(), made)
        for x in (x_ND, short_ND.double()):
            outside.append(float((x @ made.normal_HD.T - made.offset_H).max()))
        rounds.append(int(report.rounds_N.max()))
        for row in np.linspace(0, len(h_ND) - 1, compare // len(shapes)).astype(int).tolist():
            nearest_D = solved(h_ND[row], made)
            apart.append(float((x_ND[row] - nearest_D).norm()))
            if report.violated_N[row]:
                step, loop_D = float(report.moved_N[row]), swept(h_ND[row], made, DOCUMENT["sweeps"])
                sweep_far.append(float((loop_D - nearest_D).norm()) / step)
                sweep_more.append(float((loop_D - h_ND[row]).norm()) / step - 1)
    return {
        "projections": 2 * count,
        "most outside": max(outside),
        "compared with a solver": len(apart),
        "farthest from the solver": max(apart),
        "rounds": max(rounds),
        "five sweeps": {
            "from the projection, in steps": float(np.median(sweep_far)),
            "further than needed": float(np.median(sweep_more)),
        },
    }


def interval(share: float, count: int) -> list[float]:
    """95% of a share, by Wilson."""
    z, mid = 1.96, share + 1.96**2 / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return [(mid - half) / (1 + z * z / count), (mid + half) / (1 + z * z / count)]


@torch.inference_mode()
def text_loss(opened: Opened, shards: Any, made: Polytope, tokens: int, seq_len: int) -> dict[str, float]:
    """Nats per token of held-out text with and without the projection, and the share of states that it moves."""
    model, split, lost, safe, moved, count = opened.model, shards.split("heldout"), 0.0, 0.0, 0, 0
    for batch in windows(split, seq_len=seq_len, batch_size=8, limit_tokens=tokens, spread=True):
        real_BT = batch.targets_BT != IGNORE
        hidden_BTD, _, _ = model.hidden(batch.ids_BT, reset_BT=batch.reset_BT)
        h_ND, target_N = hidden_BTD[real_BT], batch.targets_BT[real_BT]
        x_ND, report = project(h_ND, made.faces)
        for hidden, name in ((h_ND, "plain"), (x_ND, "safe")):
            nats = torch.nn.functional.cross_entropy(model.head(hidden).double(), target_N, reduction="sum")
            lost, safe = (lost + float(nats), safe) if name == "plain" else (lost, safe + float(nats))
        moved, count = moved + int(report.violated_N.sum()), count + len(target_N)
    return {"nats": lost / count, "nats projected": safe / count, "share projected": moved / count}


def blocked_token(opened: Opened, h_ND: Tensor, made: Polytope, margin: float) -> dict[str, Any]:
    """The mass of 59 blocked tokens before and after half-spaces keep them under a reference, and its bound."""
    model = opened.model
    p_NV = model.head(h_ND.float()).double().softmax(1)
    order = p_NV.mean(0).argsort(descending=True).tolist()
    ids, reference = order[20:79], order[-1]
    low = of_tokens(model, ids, reference, margin, made.inside)
    x_ND, _ = project(h_ND.float(), low.faces)
    after_NV = model.head(x_ND).double().softmax(1)
    bound_N = len(ids) * math.exp(-margin) * after_NV[:, reference]
    mass_N = after_NV[:, ids].sum(1)
    return {
        "tokens": len(ids),
        "margin": margin,
        "mass before": float(p_NV[:, ids].sum(1).mean()),
        "mass after": float(mass_N.mean()),
        "mass by masking": 0.0,
        "over the bound": float((mass_N / bound_N).max()),
        "reference before": float(p_NV[:, reference].mean()),
        "reference after": float(after_NV[:, reference].mean()),
    }


def attack(
    opened: Opened, made: Polytope, texts: list[str], goal: int, steps: int, *, through: bool
) -> dict[str, float]:
    """An attacker moves the embeddings of a text, each by at most a tenth of its length, to raise a token's
    probability after the projection; with the projection's Jacobian, or as if it were the identity."""
    model, before, after, outside = opened.model, [], [], []
    for text in texts:
        ids_1T = torch.tensor([[0, *opened.tokenizer.encode(text)]])
        start_1TD = model.embedding(ids_1T).detach()
        change_1TD = torch.zeros_like(start_1TD, requires_grad=True)
        radius_1T1 = 0.1 * start_1TD.norm(dim=2, keepdim=True)

        def read(change: Tensor, jacobian: bool, start: Tensor = start_1TD) -> tuple[Tensor, Tensor]:
            hidden_1TD, _, _ = model.hidden(inputs_embeds=start + change)
            h_1D = hidden_1TD[:, -1]
            x_1D, _ = project(h_1D, made.faces)
            x_1D = x_1D if jacobian else h_1D + (x_1D - h_1D).detach()
            return model.head(x_1D).double().log_softmax(1)[0, goal], x_1D

        before.append(float(read(change_1TD, True)[0].detach().exp()))
        for _ in range(steps):
            value, _ = read(change_1TD, through)
            (gradient,) = torch.autograd.grad(value, change_1TD)
            with torch.no_grad():
                change_1TD += (
                    0.3 * radius_1T1 * gradient / gradient.norm(dim=2, keepdim=True).clamp_min(1e-12)
                )
                change_1TD *= (radius_1T1 / change_1TD.norm(dim=2, keepdim=True).clamp_min(1e-12)).clamp_max(
                    1
                )
        value, x_1D = read(change_1TD, True)
        after.append(float(value.detach().exp()))
        outside.append(float(made.scores(x_1D.detach())[0]))
    return {
        "p before": float(np.mean(before)),
        "p after": float(np.mean(after)),
        "most outside": max(outside),
    }


def cost(made: Polytope, h_ND: Tensor, repeats: int) -> dict[str, Any]:
    """Milliseconds of a token: the check alone, and a projection of a state outside; and a check of the document's
    size, 500 × 4096."""
    outside_ND = h_ND[made.scores(h_ND) > 0][:50].float()
    inside_ND = h_ND[made.scores(h_ND) <= 0][:50].float()
    large, x_1D = torch.randn(DOCUMENT["half-spaces"], 4096), torch.randn(1, 4096)
    taken = common.interleave(
        {
            "check": lambda: [project(h_D[None], made.faces) for h_D in inside_ND],
            "project": lambda: [project(h_D[None], made.faces) for h_D in outside_ND],
            "500 x 4096": lambda: [x_1D @ large.T for _ in range(50)],
        },
        repeats,
    )
    return {
        name: common.Spread.of([1e3 * t / 50 for t in times])
        for name, times in taken.items()
        if name != "project" or len(outside_ND) == 50
    }


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=5)
    parser.add_argument("--runs", type=Path, help="folder of the trained models (default: trained anew)")
    parser.add_argument("--count", type=int, default=10_000, help="random projections (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    sizes, train, source = SIZES, TRAIN | {"steps": STEPS}, "stdlib"
    count, compare, allowed, blocked, fresh, tokens, steps = args.count, 400, 1200, 400, 2000, 8192, 30
    if args.quick:
        sizes, source = QUICK, str(common.ROOT / "perspectron" / "decode")
        train = TRAIN | {"steps": 2, "batch_size": 2, "seq_len": 16, "eval_tokens": 64}
        count, compare, allowed, blocked, fresh, tokens, steps = 40, 8, 200, 40, 40, 256, 2
    report = common.Report(args, TESTS, dtype="float32 states, float64 sets", shapes=f"{sizes}, {train}")
    result: dict[str, Any] = {"projections": projections(count, compare)}
    report.say(f"{result}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.runs or Path(scratch)
        _, shards = prepared(folder, source, sizes, few=args.quick)
        opened = trained(folder, 0, sizes, train)
        model = opened.model.requires_grad_(False)

        def seen(kind: str, number: int, seed: int) -> Tensor:
            return states(model, opened.tokenizer, classed(kind, number, seed))

        fitted_ND, kept_ND = seen("allowed", allowed, 1), seen("blocked", blocked, 1)
        made = fit(model, fitted_ND, {"harm": kept_ND}, facets=8, alpha=ALPHA)
        fresh_ND, bad_ND = seen("allowed", fresh, 2), seen("blocked", fresh, 2)
        false, true = (float((made.scores(h) > 0).double().mean()) for h in (fresh_ND, bad_ND))
        result["positives"] = {
            "alpha": ALPHA,
            "half-spaces": len(made.labels),
            "epsilon": made.epsilon,
            "false": false,
            "false, 95%": interval(false, fresh),
            "true": true,
            "true, 95%": interval(true, fresh),
        }
        report.say(f"{result['positives']}")
        result["other text"] = text_loss(opened, shards, made, tokens, train["seq_len"])
        report.say(f"{result['other text']}")
        result["tokens"] = blocked_token(opened, fresh_ND[:200], made, 8.0)
        report.say(f"{result['tokens']}")
        # The attacker wants blocked tokens that half-spaces keep under a reference.
        ids = opened.model.head(bad_ND[:200].float()).mean(0).argsort(descending=True)[:6].tolist()
        guard = of_tokens(model, ids[1:], ids[0], 4.0, made.inside)
        texts = classed("blocked", 4 if args.quick else 24, 3)
        free = Polytope(guard.normals, guard.offsets + 1e6, guard.inside, guard.labels, 0.0, 0.0, guard.model)
        result["attack"] = {
            "no set": attack(opened, free, texts, ids[1], steps, through=True),
            "with the Jacobian": attack(opened, guard, texts, ids[1], steps, through=True),
            "Jacobian ignored": attack(opened, guard, texts, ids[1], steps, through=False),
            "bound": math.exp(-4.0),
        }
        report.say(f"{result['attack']}")
        hidden = guard_probe(opened, made, classed("blocked", 4 if args.quick else 24, 3), steps)
        result["attack on the check"] = hidden
        report.say(f"{hidden}")
        result["milliseconds"] = cost(made, torch.cat([fresh_ND, bad_ND]), args.repeats)
    report.say(f"{result['milliseconds']}")
    report.finish(plain(result))


def guard_probe(opened: Opened, made: Polytope, texts: list[str], steps: int) -> dict[str, float]:
    """Blocked texts whose embeddings an attacker moves, each by at most a tenth of its length, until no half-space
    is violated: the share outside before and after."""
    model, before, after = opened.model, [], []
    for text in texts:
        start_1TD = model.embedding(torch.tensor([[0, *opened.tokenizer.encode(text)]])).detach()
        change_1TD = torch.zeros_like(start_1TD, requires_grad=True)
        radius_1T1 = 0.1 * start_1TD.norm(dim=2, keepdim=True)
        for turn in range(steps + 1):
            hidden_1TD, _, _ = model.hidden(inputs_embeds=start_1TD + change_1TD)
            score = made.scores(hidden_1TD[:, -1])[0]
            (before if turn == 0 else after).append(float(score.detach()) > 0)
            (gradient,) = torch.autograd.grad(score, change_1TD)
            with torch.no_grad():
                change_1TD -= (
                    0.3 * radius_1T1 * gradient / gradient.norm(dim=2, keepdim=True).clamp_min(1e-12)
                )
                change_1TD *= (radius_1T1 / change_1TD.norm(dim=2, keepdim=True).clamp_min(1e-12)).clamp_max(
                    1
                )
    last = after[steps - 1 :: steps]
    return {"outside before": float(np.mean(before)), "outside after": float(np.mean(last))}


if __name__ == "__main__":
    main()
