"""Results of searches: peak learning rates by design and size, and the size for a number of tokens."""

DESIGN = "perspective2"
"""The design that `perspectron train` uses if none is named."""

SAME = (
    "perspective", "perspective2", "adr2", "lens2", "drm2", "gla", "gdn", "gdn2", "kda", "ssd", "rwkv7", "hgrn2",
    "mingru",
)  # fmt: skip
SIZE = 2_000_000  # active parameters
RATES = {**dict.fromkeys(SAME, 8e-3), "transformer": 4e-3, "mamba3": 1.6e-2, "drm": 1.6e-2}
"""Peak learning rates of AdamW by design, found at SIZE: cosine schedule, batches of 8 windows of
256 tokens, embeddings normed, a warm-up of 20%, one seed on dev at 0.3 M tokens (`perspectron compare --designs DESIGN
--params N`, results/reference), the transformer's at 0.9 M (results/parts) and `perspective2`'s at 3 M (results/near).
Put measured points here."""
OTHER = 4e-3  # for designs that are not in RATES; GPT-2, ADR and Lens were found to need it
FALL = -0.4
"""Exponent of the parameters in units of SIZE, from 27 searches by six recipes at 75,000 to 2 M parameters:
−0.39; the recipes' own have a mean of −0.44, −0.64 to −0.24 (`python docs/rates.py`,
docs/designs/baselines.md#rates-and-sizes). Beyond 2 M not checked."""
SEARCHED = 3_000_000  # tokens of the trainings for which RATES hold
LONGER = -0.32
"""Exponent of the tokens beyond SEARCHED, with batches of one size: not measured here, but remembered of larger models
(Bjorck et al. 2024, arXiv 2409.19913) and not checked there. Up to SEARCHED no fall was seen: at 2 M parameters most
designs do best with 8e-3 from 0.12 M tokens to 0.3 M (results/near, results/reference),
and `perspective2` at 3 M too."""
HIGHEST, LOWEST = 1.6e-2, 2e-4

RISES, LEAST, MOST = 0.1, 120, 0.2
"""Warm-up: a tenth of the updates; in short trainings more, 120, but at most a fifth (docs/lab-notes.md)."""

TOKENS_PER_PARAMETER = 1.5
"""Tokens to train on per parameter, if time or tokens are given and the size is free (docs/lab-notes.md)."""
PASSES = 8.0
"""Passes over a text after which a model of any size learns little more from it."""


def warmup(steps: int) -> int:
    """Give the number of warm-up updates, in which the rate rises, for a training of `steps` updates.

    >>> 0 < perspectron.presets.warmup(1000) < 1000
    True
    """
    return max(1, round(min(max(RISES * steps, LEAST), MOST * steps)))


def rate(design: str, params: int, tokens: int | None = None) -> float:
    """Give the peak learning rate of a design at `params` active parameters, to two digits: that found at SIZE, scaled
    by N^FALL, with N the ratio of `params` to SIZE, and for more than SEARCHED tokens by D^LONGER, with D the ratio of
    `tokens` to SEARCHED. None: at most that many tokens.

        >>> perspectron.presets.rate("transformer", 1_000_000) > perspectron.presets.rate("transformer", 100_000_000)
        True
    """
    found = RATES.get(design, OTHER) * (params / SIZE) ** FALL
    found = min(found, HIGHEST) * max(1.0, (tokens or 0) / SEARCHED) ** LONGER
    return float(f"{max(found, LOWEST):.2g}")
