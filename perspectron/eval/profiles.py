"""Profiles of the suite `recall`: tasks and sizes that small models are trained on, for how long and how often."""

from dataclasses import dataclass, replace

from perspectron.eval.reasoning import Brevo, Depo, Mano
from perspectron.eval.tasks import MQAR, Needle, SelectiveCopy, Task
from perspectron.eval.tracking import Brackets, Parity, Permutations


@dataclass(frozen=True)
class Setting:
    """A task of one size, and for how many steps a design may learn it. also: variants in the same ids that the trained
    model is measured on; of those with longer texts the second half alone, where questions are far from their facts.
    """

    task: Task
    steps: int
    also: tuple[Task, ...] = ()


@dataclass(frozen=True)
class Profile:
    """Settings that are measured, number of seeds, learning rates that are tried, and layers of the models. Two layers
    of the perspective design are its memories alone; four have its windowed attention too."""

    settings: tuple[Setting, ...]
    seeds: int
    rates: tuple[float, ...]
    layers: int


MANY = MQAR(64, pairs=16, keys=64, values=64, gaps="uniform")
DEPO, BREVO, MANO = Depo(32, things=8, hops=3), Brevo(32, things=6, needs=2), Mano(8, operations=2, modulus=7)
LOADS = (4, 8, 16, 32, 64)
"""Numbers of pairs in a text, which has at least as many tokens as in training and at least 4 for each pair."""
FAR = tuple(2**k for k in range(7, 14))
"""Lengths in tokens of texts with 8 pairs."""
LONG = (
    Setting(
        MANY,
        400,
        (
            *(
                replace(MANY, length=max(MANY.length, 4 * pairs), pairs=pairs)
                for pairs in LOADS
                if pairs != MANY.pairs
            ),
            *(replace(MANY, length=length, pairs=8) for length in FAR),
        ),
    ),
    Setting(DEPO, 400, tuple(replace(DEPO, hops=k, fewest=k) for k in (1, 2, 3))),
    Setting(BREVO, 400),
    Setting(MANO, 400, tuple(replace(MANO, operations=n, fewest=n) for n in (1, 2))),
)

PROFILES = {
    "quick": Profile(
        (Setting(MQAR(32, pairs=8, keys=16, values=16), 400), Setting(Parity(64), 100)),
        seeds=1,
        rates=(3e-3,),
        layers=2,
    ),
    "full": Profile(
        (
            Setting(MQAR(32, pairs=4, keys=16, values=16), 600),
            Setting(MQAR(32, pairs=8, keys=16, values=16), 600),
            Setting(MQAR(64, pairs=8, keys=16, values=16, gaps="uniform"), 600),
            Setting(SelectiveCopy(32, letters=4), 400),
            Setting(Needle(32), 300),
            Setting(Needle(128), 300),
            Setting(Permutations(32, n=3), 400),
            Setting(Parity(64), 400),
            Setting(Brackets(64), 400),
        ),
        seeds=3,
        rates=(3e-3, 1e-3),
        layers=4,
    ),
    "long": Profile(LONG, seeds=1, rates=(3e-3, 1e-3), layers=2),
}
