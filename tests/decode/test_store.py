"""The prefix store: nothing is read twice, and nothing that is drawn or computed changes by a bit."""

import random
import sqlite3

import pytest
import torch

from perspectron import presets
from perspectron.decode.disk import INDEX
from perspectron.decode.history import exhausted
from perspectron.decode.kept import bytes_of
from perspectron.decode.rows import Rows
from perspectron.decode.sampling import SamplingConfig
from perspectron.decode.session import Session
from perspectron.decode.store import PrefixStore
from perspectron.model.model import LanguageModel, build
from perspectron.model.state import LMState
from perspectron.train.optim import OptimConfig, optimizer_of
from perspectron.util.errors import ConfigError, StateError
from tests.decode.conftest import VOCAB, make
from tests.decode.test_rows import equal, prompt_of
from tests.refusals import refused

CHUNK = 8
SAMPLED = SamplingConfig(temperature=1.0, seed=3)


def small(design: str) -> LanguageModel:
    """Any design, tiny, with logits that prefer some tokens to others."""
    model = build(presets.small(design, vocab_size=VOCAB, d_model=32, layers=2, seq_len=64), seed=5)
    with torch.no_grad():
        model.embedding.weight.mul_(12)
    return model.eval()


def answered(
    model: LanguageModel,
    tokenizer,
    ids: list[int],
    store: PrefixStore | None,
    chunk: int = CHUNK,
    count: int = 3,
) -> tuple[list[tuple], LMState]:
    """Tokens of one row with the logprobs of all tokens, and the state after them."""
    rows = Rows(model, tokenizer, chunk=chunk, store=store)
    row, pieces = rows.add(ids, max_tokens=count, sampling=SAMPLED, stream=0, logprobs=VOCAB), []
    while rows.active:
        pieces += rows.step()
    return [(piece.id, piece.logprob, piece.likely) for piece in pieces], rows.remove(row).state


def same(got: tuple[list[tuple], LMState], expected: tuple[list[tuple], LMState]) -> None:
    assert got[0] == expected[0]
    equal(got[1], expected[1])


@pytest.mark.parametrize("design", presets.DESIGNS)
def test_with_the_store_every_bit_is_as_without(design: str, tokenizer, tmp_path) -> None:
    """Prompts that are cut, go on, and leave one another anywhere: from memory, and from the disk by another store."""
    model, text, other = small(design), prompt_of(37, 1), prompt_of(37, 2)
    prompts = [text[:20], text[:7] + other[:9], text[:15], text[:16] + other[:3], text, text[:23]]
    stores = [PrefixStore(model, chunk=CHUNK, folder=tmp_path / "disk") for _ in range(2)]
    for prompt in prompts:
        expected = answered(model, tokenizer, prompt, None)
        for store in stores:  # the second finds on disk what the first has read
            same(answered(model, tokenizer, prompt, store), expected)
    assert all(store.counters.tokens_saved > 8 * CHUNK for store in stores)
    assert stores[1].counters.damaged == stores[1].counters.failed == 0
    assert stores[1].counters.misses == 0


def test_a_prompt_read_before_costs_no_call_and_a_cut_one_at_most_a_chunk(perspective, tokenizer) -> None:
    store, text = PrefixStore(perspective, chunk=CHUNK), prompt_of(50, 3)
    read = counted(perspective)
    answered(perspective, tokenizer, text, store, count=1)
    assert sum(read) == 51
    for cut in (50, 49, 33, 8, 1):
        read.clear()
        answered(perspective, tokenizer, text[:cut], store, count=1)
        assert sum(read) <= CHUNK and (sum(read) == 0) == (cut == 50)


def counted(model: LanguageModel) -> list[int]:
    """Tokens of each call of the model from now on."""
    calls, hidden = [], type(model).hidden

    def counting(ids_BT, *args, **kwargs):
        calls.append(ids_BT.shape[1])
        return hidden(model, ids_BT, *args, **kwargs)

    model.hidden = counting
    return calls


@pytest.fixture
def perspective() -> LanguageModel:
    return make("perspective-tiny")


def test_another_model_and_another_chunk_share_nothing(perspective, tokenizer) -> None:
    other = make("perspective-tiny")
    with torch.no_grad():
        other.norm.weight[0] += 1
    stores = [PrefixStore(perspective), PrefixStore(other), PrefixStore(perspective, chunk=64)]
    assert len({store.root for store in stores}) == 3
    assert PrefixStore(perspective).root == stores[0].root


def test_what_is_worth_least_goes_first_and_its_time_passes_to_what_needs_it(perspective) -> None:
    store = PrefixStore(perspective, chunk=1)
    path, state = store.path([0, 5, 6, 7, 8]), perspective.init_state(1)
    last, size = torch.zeros(1, 32), perspective.init_state(1).nbytes + 32 * 4
    store.memory_bytes = 3 * size
    for tokens, seconds in enumerate((2.0, 5.0, 6.0), 1):
        store.put(path, tokens, state, last, seconds)
    store.put(path, 4, state, last, 10.0)
    assert store.used_bytes == 3 * size and store.counters.evicted == 1
    assert [store.find(path, most=most).tokens for most in (1, 2, 3, 4)] == [1, 2, 2, 4]
    store.memory_bytes = size
    store.put(store.path([9]), 1, state, last, 50.0)
    assert len(store) == 1 and store.find(store.path([9]), most=1).seconds == 50.0
    assert store.find(path, most=5) is None


def read(model: LanguageModel, tokenizer, tokens: int, seed: int) -> tuple[list[int], LMState]:
    """Ids, the tokenizer's prefix among them, and the state after them."""
    session = Session(model, tokenizer, chunk=CHUNK).read(prompt_of(tokens - 1, seed))
    return session._ids[:], exhausted(session.remembering())


def test_a_state_that_has_no_room_alone_takes_nobody_elses(tokenizer, tmp_path) -> None:
    """In memory and on disk, however much time it would save."""
    model, last_1D = small("gpt2"), torch.zeros(1, 32)
    store = PrefixStore(model, chunk=CHUNK, folder=tmp_path)
    for seed in range(3):
        ids, state = read(model, tokenizer, 9, seed)
        store.put(store.path(ids), 9, state, last_1D, 1.0)
    entries, files = set(store._entries), held(tmp_path)
    ids, state = read(model, tokenizer, 60, 4)
    store.memory_bytes, store._disk.budget = bytes_of(state), sum(files.values())
    store.put(store.path(ids), 60, state, last_1D, 1000.0)
    assert set(store._entries) == entries and store.counters.evicted == store.counters.failed == 0
    assert held(tmp_path) == files and counted_in(tmp_path) == (files.keys(), sum(files.values()))


def test_what_a_state_is_worth_on_disk_counts_its_pages_after_its_parent_went(tokenizer, tmp_path) -> None:
    model = small("gpt2")
    store = PrefixStore(model, chunk=CHUNK, folder=tmp_path, memory_bytes=0)
    path, index = store.path(read(model, tokenizer, 60, 1)[0]), store._disk._index
    for tokens in (8, 56):
        _, state = read(model, tokenizer, tokens, 1)
        store.put(path, tokens, state, torch.zeros(1, 32), float(tokens))
    worth = "SELECT worth FROM entries WHERE key = ?", (path.key(56).hex(),)
    [before] = index.execute(*worth).fetchone()
    store._disk._forget(index, path.key(8).hex())
    assert index.execute(*worth).fetchone()[0] == pytest.approx(before * 56 / 48)


def test_a_budget_is_kept_on_disk_and_in_memory(perspective, tokenizer, tmp_path) -> None:
    budget = 150_000
    store = PrefixStore(perspective, chunk=CHUNK, memory_bytes=budget, folder=tmp_path, disk_bytes=budget)
    for seed in range(6):
        answered(perspective, tokenizer, prompt_of(60, seed), store, count=1)
    assert 0 < store.used_bytes <= budget and store.counters.evicted > 0
    files = list(tmp_path.glob("*.state"))
    assert 0 < sum(file.stat().st_size for file in files) <= budget
    rows = sqlite3.connect(tmp_path / INDEX).execute("SELECT key FROM entries").fetchall()
    assert {file.stem for file in files} == {key for (key,) in rows}
    none = PrefixStore(perspective, chunk=CHUNK, memory_bytes=0)
    same(answered(perspective, tokenizer, [5], none), answered(perspective, tokenizer, [5], None))
    assert len(none) == 0


def test_damaged_files_are_dropped_counted_and_read_again(perspective, tokenizer, tmp_path) -> None:
    """Cut short, changed by a bit, another's file under this name, gone, a link."""
    prompt, draw = prompt_of(60, 1), random.Random(0)
    expected = answered(perspective, tokenizer, prompt, None)
    for damage in range(5):
        folder = tmp_path / str(damage)
        answered(perspective, tokenizer, prompt, PrefixStore(perspective, chunk=CHUNK, folder=folder))
        files = sorted(folder.glob("*.state"))
        contents = [file.read_bytes() for file in files]
        for at, file in enumerate(files):
            content = contents[at]
            where = draw.randrange(len(content))
            if damage == 0:
                file.write_bytes(content[:where])
            elif damage == 1:
                file.write_bytes(content[:where] + bytes([content[where] ^ 1]) + content[where + 1 :])
            elif damage == 2:
                file.write_bytes(contents[at - 1])
            else:
                file.unlink()
                if damage == 4:
                    file.symlink_to("/dev/zero")
        store = PrefixStore(perspective, chunk=CHUNK, folder=folder)
        same(answered(perspective, tokenizer, prompt, store), expected)
        assert store.counters.damaged == (0 if damage == 3 else len(files)), damage
        again = PrefixStore(perspective, chunk=CHUNK, folder=folder)
        same(answered(perspective, tokenizer, prompt, again), expected)
        assert again.counters.hits == 1 and again.counters.damaged == 0


def held(folder) -> dict[str, int]:
    """Bytes of the files of prefixes by name."""
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.suffix in (".state", ".page")}


def counted_in(folder) -> tuple[set[str], int]:
    """Names of the files that the index has, and their bytes by it."""
    index = sqlite3.connect(folder / INDEX)
    entries = index.execute("SELECT key, bytes FROM entries").fetchall()
    pages = index.execute("SELECT name, bytes FROM pages").fetchall()
    names = {f"{key}.state" for key, _ in entries} | {f"{name}.page" for name, _ in pages}
    return names, sum(size for _, size in (*entries, *pages))


def test_branches_of_a_prompt_have_its_pages_once(tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("perspectron.model.appended.MOST_PARTS", 1)  # of one file: a text has any number
    model, prompt = small("gpt2"), prompt_of(31, 1)
    store = PrefixStore(model, chunk=CHUNK, folder=tmp_path, memory_bytes=0)
    answered(model, tokenizer, prompt, store, count=1)
    pages = {name for name in held(tmp_path) if name.endswith(".page")}
    assert len(pages) == 4
    for seed in range(20):
        answered(model, tokenizer, prompt + prompt_of(6, seed + 10), store, count=1)
    files = held(tmp_path)
    assert len([name for name in files if name.endswith(".page")]) == 4 + 20 and pages < files.keys()
    assert counted_in(tmp_path) == (files.keys(), sum(files.values()))
    again = PrefixStore(model, chunk=CHUNK, folder=tmp_path, memory_bytes=0)
    for seed in range(20):
        text = prompt + prompt_of(6, seed + 10)
        same(
            answered(model, tokenizer, text, again, count=1), answered(model, tokenizer, text, None, count=1)
        )
    assert again.counters.misses == again.counters.damaged == again.counters.failed == 0


def test_pages_go_with_the_last_prefix_that_needs_them(tokenizer, tmp_path) -> None:
    model, prompt = small("gpt2"), prompt_of(32, 1)
    store = PrefixStore(model, chunk=CHUNK, folder=tmp_path, memory_bytes=0)
    for seed in range(8):
        answered(model, tokenizer, prompt + prompt_of(6, seed + 10), store, count=1)
    whole = sum(held(tmp_path).values())
    small_store = PrefixStore(model, chunk=CHUNK, folder=tmp_path, memory_bytes=0, disk_bytes=whole // 2)
    answered(model, tokenizer, prompt_of(9, 99), small_store, count=1)
    files = held(tmp_path)
    assert 0 < sum(files.values()) <= whole // 2 and small_store.counters.evicted > 0
    assert counted_in(tmp_path) == (files.keys(), sum(files.values()))
    none = PrefixStore(model, chunk=CHUNK, folder=tmp_path, memory_bytes=0, disk_bytes=1)
    answered(model, tokenizer, prompt_of(9, 98), none, count=1)
    assert held(tmp_path) == {} and counted_in(tmp_path) == (set(), 0)


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "another"])
def test_a_damaged_page_ends_the_prefixes_that_need_it_and_no_others(damage, tokenizer, tmp_path) -> None:
    model, prompts = small("gpt2"), [prompt_of(20, 1), prompt_of(20, 2)]
    first = PrefixStore(model, chunk=CHUNK, folder=tmp_path, memory_bytes=0)
    answered(model, tokenizer, prompts[0], first, count=1)
    own = {name for name in held(tmp_path) if name.endswith(".page")}
    answered(model, tokenizer, prompts[1], first, count=1)
    index = sqlite3.connect(tmp_path / INDEX)
    (name,) = next(index.execute("SELECT name FROM pages WHERE before = '' ORDER BY name"))
    bad = tmp_path / f"{name}.page"
    content = bytearray(bad.read_bytes())
    if damage == "bit":
        content[-5] ^= 1
    elif damage == "another":
        others = [path for path in tmp_path.glob("*.page") if path != bad]
        content = bytearray(others[0].read_bytes())
    bad.write_bytes(content[:-9] if damage == "cut" else content)
    if damage == "gone":
        bad.unlink()
    index.close()
    hurt = prompts[0] if bad.name in own else prompts[1]
    store = PrefixStore(model, chunk=CHUNK, folder=tmp_path, memory_bytes=0)
    for prompt in prompts:
        hits = store.counters.hits
        expected = answered(model, tokenizer, prompt, None, count=1)
        same(answered(model, tokenizer, prompt, store, count=1), expected)
        assert store.counters.hits == hits + (prompt != hurt)
        same(answered(model, tokenizer, prompt, store, count=1), expected)
        assert store.counters.hits > hits
    assert store.counters.damaged == (damage != "gone")
    files = held(tmp_path)
    assert counted_in(tmp_path) == (files.keys(), sum(files.values()))


def test_a_state_is_read_after_its_own_pages_alone(tokenizer, tmp_path) -> None:
    model, prompts = small("gpt2"), [prompt_of(20, 1), prompt_of(20, 2)]
    store = PrefixStore(model, chunk=CHUNK, folder=tmp_path, memory_bytes=0)
    for prompt in prompts:
        answered(model, tokenizer, prompt, store, count=1)
    store.close()
    index = sqlite3.connect(tmp_path / INDEX)
    pages = [name for (name,) in index.execute("SELECT page FROM entries GROUP BY page")]
    stops = dict(index.execute("SELECT name, stop FROM pages"))
    longest = [name for name in pages if stops[name] == max(stops.values())]
    assert len(longest) == 2
    index.execute("UPDATE entries SET page = ? WHERE page = ?", longest)
    index.commit()
    index.close()
    again = PrefixStore(model, chunk=CHUNK, folder=tmp_path, memory_bytes=0)
    for prompt in prompts:
        text = [*prompt, 5]
        same(
            answered(model, tokenizer, text, again, count=1), answered(model, tokenizer, text, None, count=1)
        )
    assert again.counters.damaged == 1


def test_a_text_that_begins_anew_shares_no_page_with_what_was_before(tokenizer, tmp_path) -> None:
    """Its keys go on from those before, its slots from the first."""
    model, end = small("gpt2"), tokenizer.specials.reset
    text = [*prompt_of(9, 1), end, *prompt_of(20, 2), end, *prompt_of(13, 1)]
    assert end is not None
    for _ in range(2):
        store = PrefixStore(model, chunk=CHUNK, folder=tmp_path, memory_bytes=0)
        for cut in (len(text), 24, 40):
            same(answered(model, tokenizer, text[:cut], store), answered(model, tokenizer, text[:cut], None))
        assert store.counters.damaged == store.counters.failed == 0


def test_an_index_of_an_earlier_version_begins_anew(perspective, tokenizer, tmp_path) -> None:
    index = sqlite3.connect(tmp_path / INDEX)
    index.execute("CREATE TABLE entries (key TEXT PRIMARY KEY, parent TEXT, bytes INTEGER) WITHOUT ROWID")
    index.execute("INSERT INTO entries VALUES ('a', '', 1)")
    index.commit(), index.close()
    (tmp_path / "a.state").write_bytes(b"of that version")
    store, prompt = PrefixStore(perspective, chunk=CHUNK, folder=tmp_path), prompt_of(30, 1)
    answered(perspective, tokenizer, prompt, store)
    assert store.counters.failed == 0 and not (tmp_path / "a.state").exists()


def test_a_damaged_index_begins_anew_and_a_killed_writer_leaves_nothing(
    perspective, tokenizer, tmp_path
) -> None:
    prompt = prompt_of(30, 1)
    first = PrefixStore(perspective, chunk=CHUNK, folder=tmp_path)
    answered(perspective, tokenizer, prompt, first)
    first.close()
    kept = sorted(tmp_path.glob("*.state"))
    orphan, unfinished = tmp_path / f"{'0' * 64}.state", tmp_path / f".{2**22 + 7}-{'0' * 16}.tmp"
    orphan.write_bytes(b"written, but not in the index yet")
    unfinished.write_bytes(b"half")
    store = PrefixStore(perspective, chunk=CHUNK, folder=tmp_path)
    assert not orphan.exists() and not unfinished.exists() and sorted(tmp_path.glob("*.state")) == kept
    store.close()
    (tmp_path / INDEX).write_bytes(b"no database" * 1000)
    anew = PrefixStore(perspective, chunk=CHUNK, folder=tmp_path)
    assert anew.counters.damaged == 1 and not list(tmp_path.glob("*.state"))
    expected = answered(perspective, tokenizer, prompt, None)
    same(answered(perspective, tokenizer, prompt, anew), expected)
    assert len(list(tmp_path.glob("*.state"))) == len(kept)


def test_a_disk_that_is_full_stops_nothing(perspective, tokenizer, tmp_path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("perspectron.decode.disk.write", full)
    store, prompt = PrefixStore(perspective, chunk=CHUNK, folder=tmp_path), prompt_of(30, 1)
    same(answered(perspective, tokenizer, prompt, store), answered(perspective, tokenizer, prompt, None))
    assert store.counters.failed > 0 and len(store) > 0 and not list(tmp_path.glob("*.state"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_store_of_other_weights_is_refused(optimizer, tokenizer, tmp_path) -> None:
    """Fused updates change no version."""
    model, prompt = small("gla"), prompt_of(20, 1)
    store = PrefixStore(model, chunk=CHUNK)
    answered(model, tokenizer, prompt, store)
    session = Session(model, tokenizer, chunk=CHUNK, store=store).read(prompt)
    update = optimizer_of(model, OptimConfig(optimizer=optimizer))
    model(torch.tensor([prompt]), targets=torch.tensor([prompt])).loss.backward()
    update.step()
    for use in (
        lambda: answered(model, tokenizer, prompt, store),
        lambda: session.save(tmp_path / "one.state"),
        lambda: session.read(prompt_of(20, 2)),
    ):
        with refused(StateError):
            use()
    answered(model, tokenizer, prompt, PrefixStore(model, chunk=CHUNK))


def test_the_store_of_another_model_is_refused(tokenizer) -> None:
    model, other = small("transformer"), small("transformer")
    for made in (Rows, Session):
        with refused(ConfigError, "store"):
            made(model, tokenizer, chunk=CHUNK, store=PrefixStore(other, chunk=CHUNK))
        with refused(ConfigError, "store", 5, "PrefixStore"):
            made(model, tokenizer, chunk=CHUNK, store=5)


@pytest.mark.parametrize("statement", ["SELECT page", "SELECT DISTINCT"])
def test_an_index_that_fails_stops_nothing(statement, perspective, tokenizer, tmp_path) -> None:
    class Broken:
        def __init__(self, index) -> None:
            self.index = index

        def __getattr__(self, name):
            return getattr(self.index, name)

        def execute(self, query, *values):
            if query.startswith(statement):
                raise sqlite3.OperationalError("disk I/O error")
            return self.index.execute(query, *values)

    text = prompt_of(37, 1)
    store = PrefixStore(perspective, chunk=CHUNK, folder=str(tmp_path), memory_bytes=0)
    Session(perspective, tokenizer, chunk=CHUNK, store=store).read(text)
    store._disk._index = Broken(store._disk._index)
    same(answered(perspective, tokenizer, text, store), answered(perspective, tokenizer, text, None))
    assert store.counters.failed > 0
