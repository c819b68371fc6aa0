"""JSON of a schema from an untrained and a trained model at temperature 1.5: how many texts parse and fit, how many
differ between alone and in a batch, and what the constraint costs a token.

A model of 2 M parameters, untrained and after some updates on JSON of the same kind. Every text is drawn in a batch and
again alone, padded as a batch is. The cost is the processor time on one thread of the same number of tokens from one
row with the constraint and without it, in turns: the grammar of the cost is an array that does not end. Bars: every
text fits; 0 differ; at most 1.3 times the time.

python benchmarks/constrained.py --json results/constrained.json
"""

import json
import random
import time
from typing import Any

import common
import jsonschema
import torch

from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.decode.constrain import Constraint, json_schema
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.eval.timing import take_turns
from perspectron.model.model import LanguageModel, build

TESTS = ("tests/decode/test_constrain.py",)
BARS = {"fit": 1.0, "differ": 0, "cost": 1.3}
MOST, LONGEST, PARAMS, VOCAB = 16, 2000, 2e6, 1024
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "score": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": -1, "maximum": 1}]},
        "kind": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "note": {"type": "string", "pattern": "^[a-z]{2,8}$"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": SCHEMA, "minItems": 10**6}


def corpus(texts: int) -> list[str]:
    """JSON of the schema, in order and by a fixed seed."""
    drawn, words = random.Random(1), ["cat", "dog", "house", "river", "stone", "apple", "light", "winter"]
    said = []
    for _ in range(texts):
        own = {
            "name": drawn.choice(words),
            "age": drawn.randrange(100),
            "score": drawn.choice([None, 0.5, -0.25]),
        }
        own |= {"kind": drawn.choice(["red", "green", "blue"]), "tags": drawn.sample(["a", "bc", "def"], 2)}
        said.append(json.dumps(own | {"place": {"x": True, "note": drawn.choice(words)}}))
    return said


def train(model: LanguageModel, tokenizer: Tokenizer, texts: list[str], updates: int) -> float:
    """The last loss of some updates of the model, in nats a token."""
    ids = torch.tensor([id for text in texts for id in (0, *tokenizer.encode(text))])
    losses = []

    def loss_of(ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        loss = model(ids_BT, targets=targets_BT).objective()
        losses.append(loss.item())
        return loss

    generator, T = torch.Generator().manual_seed(1), 64
    batch_BT = torch.empty(8, T, dtype=torch.int64)
    targets_BT = batch_BT.clone()
    update = common.updating(model.train(), loss_of, batch_BT, targets_BT, "float32")
    for _ in range(updates):
        starts = torch.randint(len(ids) - T - 1, (8,), generator=generator).tolist()
        batch_BT.copy_(torch.stack([ids[at : at + T] for at in starts]))
        targets_BT.copy_(torch.stack([ids[at + 1 : at + T + 1] for at in starts]))
        update()
    model.eval()
    return losses[-1]


def draw(
    rows: Rows, constraint: Constraint, numbers: list[int]
) -> dict[int, tuple[list[int], str, str | None]]:
    """Of each number the ids, the text and how it ended; its noise is that of the number."""
    hot = SamplingConfig(temperature=1.5, seed=11)
    number_of = {
        rows.add(f"{number}: ", max_tokens=LONGEST, sampling=hot, stream=number, hooks=[constraint]): number
        for number in numbers
    }
    found: dict[int, tuple[list[int], str, str | None]] = {number: ([], "", None) for number in numbers}
    while rows.active:
        for piece in rows.step():
            ids, text, _ = found[number_of[piece.row]]
            ids += [] if piece.id is None else [piece.id]
            found[number_of[piece.row]] = ids, text + piece.text, piece.finished
    for row in number_of:
        rows.remove(row)
    return found


def fits(text: str, finished: str | None) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return finished in ("stop", "end")


def check(model: LanguageModel, tokenizer: Tokenizer, draws: int) -> dict[str, Any]:
    constraint = json_schema(SCHEMA, tokenizer)
    together, alone = Rows(model, tokenizer), Rows(model, tokenizer)
    fit = differ = tokens = longest = 0
    for start in range(0, draws, MOST):
        numbers = list(range(start, min(start + MOST, draws)))
        found = draw(together, constraint, numbers)
        for number in numbers:
            ids, text, finished = found[number]
            fit += fits(text, finished)
            differ += draw(alone, constraint, [number])[number] != found[number]
            tokens, longest = tokens + len(ids), max(longest, len(ids))
    return {"draws": draws, "fit": fit, "differ": differ, "tokens": tokens, "longest": longest}


def cost(model: LanguageModel, tokenizer: Tokenizer, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds a token of one row, with the constraint, which has met nothing yet, and without."""
    constraint = json_schema(ENDLESS, tokenizer)

    def turn(own: Constraint | None) -> float:
        rows = Rows(model, tokenizer, together=False)
        rows.add(
            "1: ", max_tokens=tokens, sampling=SamplingConfig(1.5, seed=2), hooks=[] if own is None else [own]
        )
        rows.step()
        start, drawn = time.process_time(), 0
        while rows.active:
            drawn += len(rows.step())
        return (time.process_time() - start) / max(1, drawn)

    times = take_turns({"with": lambda: turn(constraint), "without": lambda: turn(None)}, repeats)
    seconds = {name: common.Spread.middle(values) for name, values in times.items()}
    return {"seconds": seconds, "cost": common.ratios(times["with"], times["without"], common.Spread.middle)}


def main() -> None:
    parser = common.parser(__doc__ or "", threads=1, repeats=15)
    parser.add_argument("--draws", type=int, default=1000, help="texts of each model (%(default)s)")
    parser.add_argument("--updates", type=int, default=150, help="of the trained model (%(default)s)")
    parser.add_argument("--preset", default="perspective", help="of the model (%(default)s)")
    args = parser.parse_args()
    draws, updates, tokens = (4, 2, 8) if args.quick else (args.draws, args.updates, 200)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    report = common.Report(args, TESTS, dtype="float32", shapes=f"{args.preset}, {PARAMS / 1e6:g} M")
    texts = corpus(20 if args.quick else 2000)
    tokenizer = Tokenizer.train(texts, VOCAB)
    config = presets.solve(args.preset, PARAMS, vocab_size=tokenizer.vocab_size, seq_len=128)
    model, found = build(config, seed=3).eval(), dict[str, Any]()
    for name in ("untrained", "trained"):
        own = {"loss": train(model, tokenizer, texts, updates)} if name == "trained" else {}
        own |= check(model, tokenizer, draws) | cost(
            model, tokenizer, tokens, 1 if args.quick else args.repeats
        )
        found[name] = own
        report.say(f"{name}: {own['fit']} of {own['draws']} fit, {own['differ']} differ, "
                   f"{own['cost'].text()} times the time, {own['tokens']} tokens")  # fmt: skip
    met = {
        name: {
            "fit": own["fit"] == own["draws"],
            "differ": own["differ"] == 0,
            "cost": own["cost"].median <= BARS["cost"],
        }
        for name, own in found.items()
    }
    report.finish({"models": found, "parameters": common.parameters(model), "bars": BARS, "met": met})


if __name__ == "__main__":
    main()
