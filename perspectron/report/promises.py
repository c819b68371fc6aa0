"""The claim of each design, in one clause of its document, and what of a comparison would bear it out.

The ledger of every number in the documents is another thing (`perspectron claims`); this is what a design is for.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """rival: the design whose loss it has to beat, "" where it claims nothing of losses. recalls: the design whose
    recall it has to match, "" where it claims nothing of memory. flat_state: the state has one size at every context.
    pruned: the cache is smaller than the rival's once attention is dropped where gates allow."""

    source: str
    clause: str
    rival: str = ""
    recalls: str = ""
    flat_state: bool = False
    pruned: bool = False


CLAIMS = {
    "perspective": Claim(
        "seeds/pdr.md §3.2, §4.3",
        "a decay from a full d×d projection tells apart what a small gate cannot, in a state of constant size",
        rival="gla",
        flat_state=True,
    ),
    "adr": Claim(
        "seeds/adr.md §3, §4",
        "recurrent keys and values keep a transformer's flexibility and add long-term memory to it",
        rival="gpt2",
        recalls="gpt2",
    ),
    "lens": Claim(
        "seeds/lens.md, Enhancement 4 and Summary",
        "its parts improve on GPT-2's loss and its route gate shrinks the cache",
        rival="gpt2",
        pruned=True,
    ),
    "drm": Claim(
        "seeds/drm.md, Generation",
        "a trajectory state holds the history and no cache is needed; of losses it says nothing",
        recalls="transformer",
        flat_state=True,
    ),
}
