import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.decode.conversation import Conversation
from perspectron.decode.generate import generate
from perspectron.decode.reading import prefill
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.model.heads import TokenEmbedding
from perspectron.model.model import LanguageModel, init
from perspectron.model.state import save_state
from perspectron.util.errors import ConfigError, NonFiniteError, StateError
from tests.decode.conftest import SIZES, VOCAB, Scripted, drain, make
from tests.refusals import refused

PROMPTS = ["The cat", " sat on the mat, and then the cat sat; 123 times 😀!", "R"]
SAMPLED = SamplingConfig(temperature=1.2, min_p=0.01, repetition_penalty=1.3, seed=15)
GREEDY = SamplingConfig(temperature=0.0)


def of_text(listen):
    """A listener to pieces that hears (row, text) of those with text."""
    return lambda piece: listen(piece.row, piece.text) if piece.text else None


def scripted(*scripts: list[int]) -> Scripted:
    return Scripted(presets.get("perspective-tiny", **SIZES), list(scripts))


def said(tokenizer: Tokenizer, *texts: str | bytes) -> list[int]:
    """One id per byte, so that every character and stop string spans tokens."""
    single = {tokenizer.token_bytes(id): id for id in range(1, VOCAB) if len(tokenizer.token_bytes(id)) == 1}
    data = b"".join(text.encode() if isinstance(text, str) else text for text in texts)
    return [single[bytes([byte])] for byte in data]


class Listener:
    def __init__(self, rows: int = 1) -> None:
        self.pieces: list[list[str]] = [[] for _ in range(rows)]

    def __call__(self, row: int, piece: str) -> None:
        assert piece
        self.pieces[row].append(piece)

    def texts(self) -> list[str]:
        return ["".join(pieces) for pieces in self.pieces]


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY])
def test_batch_is_each_prompt_alone(
    model: LanguageModel, tokenizer: Tokenizer, sampling: SamplingConfig
) -> None:
    batch = generate(model, tokenizer, PROMPTS, max_tokens=30, sampling=sampling)
    assert len(set(batch.texts)) == 3
    for row, prompt in enumerate(PROMPTS):
        for same in (prompt, tokenizer.encode(prompt)):
            session = Rows(model, tokenizer)
            session.add(same, max_tokens=30, sampling=sampling, stream=row)
            pieces = drain(session)
            assert [piece.id for piece in pieces] == batch.ids[row]
            assert "".join(piece.text for piece in pieces) == batch.texts[row]


def test_rows_of_one_prompt_draw_apart_and_not_as_other_seeds_do(
    perspective: LanguageModel, tokenizer: Tokenizer
) -> None:
    """Rows of 4 seeds, all from one prompt: once, row i at seed s drew what row 0 at seed s + i did."""
    ids = []
    for seed in range(4):
        sampling = dataclasses.replace(SAMPLED, seed=seed)
        ids += generate(perspective, tokenizer, ["The cat"] * 4, max_tokens=12, sampling=sampling).ids
    assert len({tuple(row) for row in ids}) == 16


def test_greedy_is_argmax_of_the_whole_forward(model: LanguageModel, tokenizer: Tokenizer) -> None:
    (ids,) = generate(model, tokenizer, PROMPTS[:1], max_tokens=20, sampling=GREEDY).ids
    read = [0, *tokenizer.encode(PROMPTS[0])]
    with torch.no_grad():
        best = model(torch.tensor([read + ids])).logits[0].argmax(1).tolist()
    assert ids == best[len(read) - 1 : -1]


def test_chunks_and_torch_seed_change_nothing(model: LanguageModel, tokenizer: Tokenizer) -> None:
    results = []
    for seed, chunk in enumerate((1, 7, 512)):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        results.append(generate(model, tokenizer, PROMPTS, max_tokens=12, sampling=SAMPLED, chunk=chunk).ids)
        assert torch.equal(before, torch.random.get_rng_state())
    assert results[0] == results[1] == results[2]
    other = dataclasses.replace(SAMPLED, seed=16)
    assert generate(model, tokenizer, PROMPTS, max_tokens=12, sampling=other).ids != results[0]


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_25_and_25_through_disk_are_50(
    model: LanguageModel, tokenizer: Tokenizer, prompts: list[str], tmp_path: Path
) -> None:
    whole = generate(model, tokenizer, prompts, max_tokens=50, sampling=SAMPLED)
    assert whole.finished == ["length"] * len(prompts)
    first = generate(model, tokenizer, prompts, max_tokens=25, sampling=SAMPLED)
    first.conversation.save(tmp_path / "talk", model)
    loaded = Conversation.load(tmp_path / "talk", model)
    second = generate(
        model, tokenizer, [""] * len(prompts), max_tokens=25, sampling=SAMPLED, conversation=loaded
    )
    assert [a + b for a, b in zip(first.ids, second.ids, strict=True)] == whole.ids
    for field in ("pending", "recent", "drawn"):
        assert getattr(second.conversation, field) == getattr(whole.conversation, field)
    last = [generate(model, tokenizer, [" and"] * len(prompts), max_tokens=5, conversation=c.conversation).ids
            for c in (whole, second)]  # fmt: skip
    assert last[0] == last[1]


def test_conversation_holds_everything_drawn(double: LanguageModel, tokenizer: Tokenizer) -> None:
    """Whether a row stopped early and waited or went on: its state is that of its history read at once."""
    free = generate(double, tokenizer, PROMPTS, max_tokens=40, sampling=SAMPLED)
    stop = free.texts[0][5:8]
    result = generate(double, tokenizer, PROMPTS, max_tokens=40, sampling=SAMPLED, stop=[stop])
    assert result.finished[0] == "stop" and "length" in result.finished
    assert len(result.ids[0]) < 10 and stop not in result.texts[0]
    assert all(ids == free.ids[row][: len(ids)] for row, ids in enumerate(result.ids))
    talk = result.conversation
    assert talk.drawn == [len(ids) for ids in result.ids]
    assert talk.pending == [ids[-1:] for ids in result.ids]
    logits = prefill(double, talk.pending, talk.state, reset=0)[0]
    for row, prompt in enumerate(PROMPTS):
        history = [0, *tokenizer.encode(prompt), *result.ids[row]]
        assert talk.recent[row] == history[1:]
        torch.testing.assert_close(logits[row], prefill(double, [history])[0][0], rtol=0, atol=1e-9)


def test_a_waiting_row_is_frozen_bit_for_bit(tokenizer: Tokenizer) -> None:
    model = scripted(said(tokenizer, "ab."), said(tokenizer, "abcdefghij"))
    together = generate(model, tokenizer, ["x", "x"], max_tokens=10, sampling=GREEDY, stop=["."])
    model = scripted(said(tokenizer, "ab."), said(tokenizer, "abc"))
    short = generate(model, tokenizer, ["x", "x"], max_tokens=3, sampling=GREEDY, stop=["."])
    assert together.texts == ["ab", "abcdefghij"] and short.texts == ["ab", "abc"]
    for layer, other in zip(together.conversation.state.layers, short.conversation.state.layers, strict=True):
        for field in dataclasses.fields(layer):
            mine, theirs = getattr(layer, field.name), getattr(other, field.name)
            assert torch.equal(mine[0], theirs[0])
            assert not torch.equal(mine[1], theirs[1])


def test_end_of_text_ends_a_row_and_then_begins_a_document(
    perspective: LanguageModel, tokenizer: Tokenizer
) -> None:
    model = scripted([*said(tokenizer, "ab"), 0], said(tokenizer, "abcde"))
    ears = Listener(2)
    result = generate(model, tokenizer, ["x", "yz"], max_tokens=5, sampling=GREEDY, on_piece=of_text(ears))
    assert result.texts == ears.texts() == ["ab", "abcde"]
    assert result.finished == ["end", "length"]
    assert result.ids[0][-1] == 0 and result.conversation.pending[0] == [0]
    assert 0 not in result.conversation.recent[0]

    ended = dataclasses.replace(result.conversation, state=prefill(perspective, [[0, 5], [0, 6, 7]])[1])
    on = generate(perspective, tokenizer, ["R", "R"], max_tokens=8, sampling=GREEDY, conversation=ended)
    new = generate(perspective, tokenizer, ["R"], max_tokens=8, sampling=GREEDY)
    assert on.ids[0] == new.ids[0]


def test_stop_string_spans_tokens_and_its_beginning_is_held_back(tokenizer: Tokenizer) -> None:
    ears = Listener()
    model = scripted(said(tokenizer, "hi\nUs\nUser: no"))
    stop = ["\nUser:", "never"]
    result = generate(
        model, tokenizer, ["x"], max_tokens=99, sampling=GREEDY, stop=stop, on_piece=of_text(ears)
    )
    assert result.texts == ["hi\nUs"] == ears.texts()
    assert ears.pieces == [["h", "i", "\nUs"]]
    assert result.finished == ["stop"]
    assert tokenizer.decode(result.ids[0]) == "hi\nUs\nUser:"


def test_what_was_held_back_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    for script, finish in ((said(tokenizer, "hi\nUs"), "length"), ([*said(tokenizer, "hi\nUs"), 0], "end")):
        ears = Listener()
        result = generate(
            scripted(script),
            tokenizer,
            ["x"],
            max_tokens=len(script),
            sampling=GREEDY,
            stop=["\nUser"],
            on_piece=of_text(ears),
        )
        assert result.texts == ["hi\nUs"] == ears.texts() and result.finished == [finish]


def test_characters_stream_whole(tokenizer: Tokenizer) -> None:
    ears = Listener()
    script = said(tokenizer, "a😀é", "😀".encode()[:3])
    result = generate(
        scripted(script), tokenizer, ["x"], max_tokens=len(script), sampling=GREEDY, on_piece=of_text(ears)
    )
    assert ears.pieces == [["a", "😀", "é", "\ufffd"]]
    assert result.texts == ears.texts() == [tokenizer.decode(script)]


def test_streamed_pieces_are_the_texts(model: LanguageModel, tokenizer: Tokenizer) -> None:
    hot = SamplingConfig(temperature=3.0)
    ears = Listener(3)
    result = generate(model, tokenizer, PROMPTS, max_tokens=60, sampling=hot, on_piece=of_text(ears))
    assert ears.texts() == result.texts == [tokenizer.decode(ids) for ids in result.ids]
    assert any("\ufffd" in text for text in result.texts)


def test_repetition_penalty_counts_prompt_and_drawn_tokens(tokenizer: Tokenizer) -> None:
    """A model that always prefers the same ten tokens, in order, says the first that left the window."""
    favourites = said(tokenizer, "abcdefghij")

    class Stubborn(Scripted):
        def head(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = torch.full((*hidden.shape[:-1], VOCAB), -100.0)
            logits[..., favourites] = torch.arange(20.0, 10.0, -1)
            return logits

    model = Stubborn(presets.get("perspective-tiny", **SIZES), [])
    config = dataclasses.replace(GREEDY, repetition_penalty=3.0, repetition_window=8)
    result = generate(model, tokenizer, [said(tokenizer, "abxxx")], max_tokens=7, sampling=config)
    assert result.texts == ["cdefabg"]
    assert result.conversation.recent == [said(tokenizer, "xcdefabg")]
    more = generate(model, tokenizer, [[]], max_tokens=2, sampling=config, conversation=result.conversation)
    assert more.texts == ["hi"]
    assert generate(model, tokenizer, ["ab"], max_tokens=3, sampling=GREEDY).texts == ["aaa"]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_conversation_and_its_fork_go_on_any_number_of_times(
    model: LanguageModel, tokenizer: Tokenizer, rows: int
) -> None:
    talk = generate(model, tokenizer, PROMPTS[:rows], max_tokens=5, sampling=SAMPLED).conversation
    found = [
        generate(model, tokenizer, [""] * rows, max_tokens=9, sampling=SAMPLED, conversation=one).ids
        for one in (talk.fork(), talk, talk)
    ]
    assert found[0] == found[1] == found[2]


def test_model_may_have_more_ids_than_the_tokenizer(tokenizer: Tokenizer) -> None:
    model = make("perspective-tiny")
    model.embedding = TokenEmbedding(4 * VOCAB, SIZES["d_model"])
    model.config = dataclasses.replace(model.config, vocab_size=4 * VOCAB)
    result = generate(model, tokenizer, ["x"], max_tokens=50, sampling=SamplingConfig(temperature=9.0))
    assert all(id < VOCAB for id in result.ids[0])
    with refused(ConfigError, VOCAB):
        generate(model, tokenizer, [[VOCAB]], max_tokens=1)


def test_model_is_left_as_it_was(model: LanguageModel, tokenizer: Tokenizer) -> None:
    assert model.training
    generate(model, tokenizer, ["x"], max_tokens=2)
    assert model.training and not torch.is_inference_mode_enabled()


def test_each_option_that_cannot_be_is_refused_by_name(
    perspective: LanguageModel, tokenizer: Tokenizer
) -> None:
    model = perspective

    def asked(prompts: list[str] | list[list[int]], *named: object, **options: object) -> None:
        with refused(ConfigError, *named):
            generate(model, tokenizer, prompts, **{"max_tokens": 1, **options})

    asked([], "prompts")
    asked(["x"], "max_tokens", 0, max_tokens=0)
    asked(["x"], "stop", "ab", stop="ab")
    asked(["x"], "stop", "''", stop=["a", ""])
    asked(["x"], "chunk", 0, chunk=0)
    asked([[300]], "row", 0, 300)
    talk = generate(model, tokenizer, ["x"], max_tokens=1).conversation
    asked(["", ""], 2, 1, conversation=talk)
    narrow = make("perspective-tiny")
    narrow.config = dataclasses.replace(narrow.config, vocab_size=VOCAB - 1)
    with refused(ConfigError, "vocab_size", 300, 299):
        generate(narrow, tokenizer, ["x"], max_tokens=1)


def test_logits_that_are_not_finite_are_refused_with_their_row(tokenizer: Tokenizer) -> None:
    model = make("perspective-tiny")
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with refused(NonFiniteError, 0):
        generate(model, tokenizer, ["x"], max_tokens=1)


def test_a_file_that_holds_no_conversation_is_refused(
    perspective: LanguageModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = perspective
    talk = generate(model, tokenizer, ["x", "y"], max_tokens=3).conversation
    good = {"pending": [[1], [1]], "recent": [[], []], "drawn": [1, 1]}
    bad = [
        {},
        {"conversation": None},
        {"conversation": {"pending": [[1], [1]], "recent": [[], []]}},
        {"conversation": good | {"drawn": [1]}},
        {"conversation": good | {"drawn": [1, "1"]}},
        {"conversation": good | {"pending": [1, 1]}},
        {"conversation": good | {"recent": [[], [0.5]]}},
    ]
    for extra in bad:
        save_state(tmp_path / "talk", talk.state, model, extra=extra)
        with refused(StateError, tmp_path / "talk"):
            Conversation.load(tmp_path / "talk", model)
    save_state(tmp_path / "talk", talk.state, model, extra={"conversation": good})
    assert Conversation.load(tmp_path / "talk", model).drawn == [1, 1]
    talk.save(tmp_path / "talk", model)
    with refused(StateError, tmp_path / "talk"):
        Conversation.load(tmp_path / "talk", scripted([]))
    with refused(StateError, tmp_path / "none"):
        Conversation.load(tmp_path / "none", model)


# ---------------------------------------------------------------- learned positions


def test_what_would_run_off_the_table_is_refused_at_once(tokenizer):
    class Nine(LanguageModel):
        def head(self, hidden):
            return (
                torch.nn.functional.one_hot(torch.tensor(9), VOCAB)
                .float()
                .mul(100)
                .expand(*hidden.shape[:-1], -1)
            )

    sizes = {"vocab_size": VOCAB, "d_model": 16, "layers": 1, "heads": 2, "hidden": 16, "positions": 32}
    model = Nine(presets.get("gpt2-tiny", **sizes))
    init(model, 3)
    prompt = [1, 2, 3, 4]  # and the end-of-text token before it: five positions
    assert generate(model, tokenizer, [prompt], max_tokens=28).ids == [[9] * 28]
    with refused(ConfigError, "max_tokens", 29):
        generate(model, tokenizer, [[1], prompt], max_tokens=29)
    begun = generate(model, tokenizer, [prompt], max_tokens=4).conversation
    long = [1] * 40
    with refused(ConfigError, 41):
        generate(model, tokenizer, [long], max_tokens=5)
    with refused(ConfigError, 41, 32):
        generate(model, tokenizer, [[*long, 0, 5]], max_tokens=5)  # also of a document that ends in it
    with refused(ConfigError, 24, 0):
        generate(model, tokenizer, [[]], max_tokens=25, conversation=begun.fork())
    assert generate(model, tokenizer, [[]], max_tokens=24, conversation=begun.fork()).ids == [[9] * 24]
    assert len(generate(model, tokenizer, [[5, 0, 6]], max_tokens=31, conversation=begun).ids[0]) == 31


@pytest.mark.slow
@pytest.mark.cpu_only("memory of a process on the CPU")
def test_a_prompt_of_a_million_characters_is_read_in_constant_memory(tmp_path):
    """In a process of its own: beyond the text and its ids it takes what a short prompt takes, and it says how far it
    is."""
    program = """
import torch
from perspectron import build, presets
from perspectron.data import Tokenizer
from perspectron.decode.generate import generate
from perspectron.util.machine import Peak
torch.set_num_threads(1)
text = "the cat sat on the mat, and the dog sat on the log\\n" * 20_000
tokenizer = Tokenizer.train([text[:50_000]], 400)
sizes = dict(layers=2, d_model=16, hidden=16, rank=4, heads=2, kv_heads=1, window=8)
model = build(presets.get("perspective-tiny-dense", vocab_size=400, **sizes))
generate(model, tokenizer, [text[:30_000]], max_tokens=2)
told = []
with Peak() as peak:
    generate(model, tokenizer, [text], max_tokens=2, on_read=lambda *both: told.append(both))
read, prompts = map(list, zip(*told))
assert len(text) > 1_000_000 and read == sorted(read) and len(set(prompts)) == 1 and read[-1] < prompts[0]
assert len(read) > 300, len(read)
assert peak.bytes is None or peak.bytes < 40 << 20, peak.bytes
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("prompts", "settings", "named"),
    [
        ("abc", {}, ["prompts", "abc"]), ([5, 6], {}, ["prompts"]),
        ([b"abc"], {}, ["prompt"]), (["a"], {"max_tokens": 2.5}, ["max_tokens"]),
        (["a"], {"max_tokens": "3"}, ["max_tokens", "3"]),
    ],
)  # fmt: skip
def test_what_looks_like_prompts_and_numbers_is_not_taken_for_them(
    model, tokenizer, prompts, settings, named
) -> None:
    """A text is no list of its letters, and a number that no count reaches would draw without end."""
    with refused(ConfigError, *named):
        generate(model, tokenizer, prompts, **{"max_tokens": 2} | settings)
