"""A step that is captured gives what the modules give. Without CUDA a graph is a function that is called again, on the
same memory, and what a device must not be asked for is looked for on tensors without numbers."""

import contextlib
import gc
import logging
import threading
import weakref

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from benchmarks.on_gpu import joined
from perspectron import presets
from perspectron.decode import batch as batch_module
from perspectron.decode import graphs as graphs_module
from perspectron.decode import steps as steps_module
from perspectron.decode.graphs import PATIENCE, Graphs
from perspectron.decode.held import tensors
from perspectron.decode.rows import Rows
from perspectron.decode.steps import stepped, steps_of
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState, load_state, save_state
from perspectron.native.tape import Unrecordable
from perspectron.ops import attention
from tests.decode.conftest import drain
from tests.decode.test_rows import prompt_of
from tests.decode.test_steps import DESIGNS, VARIANTS, near, tokens
from tests.decode.test_store import small
from tests.refusals import refused

GRAPH = graphs_module.Graph
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ASK = {
    "drm": "the strength of its metric, and which rows refresh their geometry",
    "drm2": "the same",
    "perspective-experts": "which experts the tokens chose",
}
"""Designs whose step asks the device for numbers, and what for: the modules take their steps."""


class Again:
    """A graph without CUDA."""

    def __init__(self, run, device, asks=True):
        run()
        self.replay = run


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(graphs_module, "Graph", Again)
    monkeypatch.setattr(graphs_module, "PATIENCE", 0)


def here(design: str) -> LanguageModel:
    return small(design).to(DEVICE)


def read(model: LanguageModel, rows: int, length: int = 12) -> LMState:
    ids = torch.tensor([prompt_of(length + row % 3, row)[:length] for row in range(rows)])
    with torch.inference_mode():
        return model.hidden(ids.to(DEVICE))[1]


def go_on(graphs: Graphs | None, model: LanguageModel, ids_NB1: Tensor, state: LMState, least: int = 1):
    """The logits after each token, and the state after all. least: steps that a graph must take."""
    said, by_graph = [], 0
    with torch.inference_mode():
        for ids_B1 in ids_NB1.to(DEVICE):
            done = None if graphs is None else graphs.step(ids_B1, state)
            by_graph += done is not None
            _, logits, state = done or stepped(model, None, ids_B1, state)
            said.append(logits)
    assert graphs is None or by_graph >= least
    return said, state


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.few(2, each="design")
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("design", [*DESIGNS, *VARIANTS])
def test_a_graph_gives_what_the_modules_give(design, rows):
    model = here(design)
    ids, before = tokens(rows, 20), read(model, rows)
    least = 0 if design in ASK and DEVICE.type == "cuda" else 20
    found, after = go_on(Graphs(model), model, ids, before.fork(), least)
    wanted, modules = go_on(None, model, ids, before.fork())
    for one, other in zip(found, wanted, strict=True):
        same(one, other)
    near(after, modules)


class Seen:
    """A graph that is run once, where nothing may be asked."""

    def __init__(self, run, device, asks=True):
        with graphs_module._Unasked():
            run()


aten = torch.ops.aten
OTHERWISE = {
    Tensor.contiguous: lambda x: aten.clone(x, memory_format=torch.contiguous_format),
    Tensor.__invert__: aten.bitwise_not,
    Tensor.tolist: lambda x: aten._to_copy(x, device="cpu"),
    **dict.fromkeys(
        (Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__bool__), aten._local_scalar_dense
    ),
}


class NoBuild(TorchFunctionMode):
    """What PyTorch leaves to a build with CUDA, even of tensors without numbers: copies, and views by brackets."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.copy_:
            into, x = args
            assert into.device == x.device and torch.broadcast_shapes(into.shape, x.shape) == into.shape
            return into.fill_(0)
        if func is Tensor.__setitem__:
            return self.__torch_function__(
                Tensor.copy_, (), (self.__torch_function__(Tensor.__getitem__, (), args[:2]), args[2])
            )
        if func in OTHERWISE:
            return OTHERWISE[func](*args)
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        x, places = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
        missing = x.ndim - sum(place is not None and place is not Ellipsis for place in places)
        at = 0
        for place in places:
            if place is Ellipsis:
                at += missing
            elif isinstance(place, Tensor):
                x, at = aten.index.Tensor(x, [None] * at + [place]), at + 1
            elif place is None or isinstance(place, slice):
                x = (
                    x.unsqueeze(at)
                    if place is None
                    else aten.slice(x, at, place.start, place.stop, place.step or 1)
                )
                at += 1
            else:
                x = x.select(at, place)
        return x


@pytest.mark.parametrize("design", [*DESIGNS, *VARIANTS])
def test_a_step_on_cuda_asks_the_device_for_nothing(design, monkeypatch):
    monkeypatch.setattr(graphs_module, "Graph", Seen)
    monkeypatch.setattr(graphs_module, "like", lambda state, rows, slots: state)
    monkeypatch.setattr(graphs_module.Step, "_check", lambda *_: None)
    with torch.device("meta"):
        model = LanguageModel(small(design).config).eval()
    with FakeTensorMode(allow_non_fake_inputs=True), NoBuild(), torch.no_grad():
        model.to_empty(device="cuda")
        state = model.init_state(3, capacity=64)
        assert all(x.device.type == "cuda" for x in tensors(state))
        if design not in ASK:
            graphs_module.Step(model, state)
            return
        with refused(Unrecordable):
            graphs_module.Step(model, state)


@pytest.mark.parametrize(
    ("asks", "named"),
    [
        (lambda x: x.max().item(), "_local_scalar_dense"),
        (lambda x: aten.nonzero(x), "nonzero"),
        (lambda x: x.cpu(), "_to_copy"),
        (lambda x: aten._to_copy(torch.ones(3), device=x.device), "_to_copy"),
        (lambda x: x + torch.tensor([1.0], device=x.device), "_to_copy"),
    ],
)
def test_what_a_capture_must_not_ask_is_seen(asks, named):
    with FakeTensorMode():
        x = torch.ones(3, device="cuda")
        torch.ones(3, device="cuda") + x * 2
        with graphs_module._Unasked(), refused(Unrecordable, named):
            asks(x)


@pytest.mark.parametrize("design", ["perspective2", "transformer", "adr", "lens"])
def test_a_state_that_was_kept_goes_on(design, tmp_path):
    model = here(design)
    graphs, ids = Graphs(model), tokens(1, 30)
    whole, after = go_on(graphs, model, ids, read(model, 1), 30)
    _, half = go_on(graphs, model, ids[:13], read(model, 1))
    save_state(tmp_path / "half.state", half, model)
    fork = half.fork()
    go_on(graphs, model, tokens(1, 5, 1), half)  # it is used up
    for kept in (load_state(tmp_path / "half.state", model).to(DEVICE), fork):
        rest, end = go_on(graphs, model, ids[13:], kept, 17)
        assert all(torch.equal(one, other) for one, other in zip(whole[13:], rest, strict=True))
        near(end, after)


@pytest.mark.parametrize("design", ["perspective2", "transformer", "gdn"])
def test_states_that_take_turns_do_not_meet(design):
    model = here(design)
    graphs = Graphs(model)
    alone = [go_on(graphs, model, tokens(1, 12, n), read(model, 1))[0] for n in range(3)]
    states = [read(model, 1) for _ in range(3)]
    for at in range(12):
        for n, state in enumerate(states):
            said, states[n] = go_on(graphs, model, tokens(1, 12, n)[at : at + 1], state)
            assert torch.equal(said[0], alone[n][at])
    assert sum(made is not None for made in graphs._made.values()) == 1


def test_views_of_a_state_that_others_have_are_left_to_them():
    """A detached state shares the graph's memory; another text must not write into it."""
    model = here("gdn")
    graphs, ids = Graphs(model), tokens(1, 4)
    wanted, _ = go_on(graphs, model, ids, read(model, 1))
    with torch.inference_mode():
        _, state = go_on(graphs, model, ids[:2], read(model, 1))
        view = state.detach()
        del state
        go_on(graphs, model, tokens(1, 5, 1), read(model, 1, 9))
        said, _ = go_on(graphs, model, ids[2:], view)
    assert all(torch.equal(one, other) for one, other in zip(said, wanted[2:], strict=True))


@pytest.mark.parametrize("design", ["perspective2", "rwkv7", "transformer"])
def test_a_text_that_the_modules_go_on_with_in_its_memory_comes_back(design):
    model, more = here(design), tokens(1, 7, 3)[:, :, 0].T.to(DEVICE)
    ids, said = tokens(1, 12), []
    for graphs in (Graphs(model), None):
        first, state = go_on(graphs, model, ids[:5], read(model, 1))
        with torch.inference_mode():
            state = model.hidden(more, state, consume_state=True)[1]
        kept = graphs and next(iter(graphs._made.values()))
        second, _ = go_on(graphs, model, ids[5:], state)
        said.append(first + second)
        assert graphs is None or list(graphs._made.values()) == [kept]
    for one, other in zip(*said, strict=True):
        same(one, other)


def test_a_cache_grows_and_the_state_says_so(monkeypatch):
    monkeypatch.setattr(graphs_module, "LEAST_SLOTS", 16)
    model = here("transformer")
    graphs, ids, before = Graphs(model), tokens(1, 100), read(model, 1)
    wanted, _ = go_on(None, model, ids, before.fork())
    said, after = go_on(graphs, model, ids, before, 100)
    for one, other in zip(said, wanted, strict=True):
        same(one, other)
    cache = after.layers[0]
    assert cache.used == 112 <= cache.slots and int(cache.length_B) == 112 and len(graphs._made) > 2
    cache.room()


def test_learned_positions_end_where_the_modules_say_so():
    model = here("gpt2")
    graphs, P = Graphs(model), model.config.positions
    state = read(model, 1, P - 2)
    _, state = go_on(graphs, model, tokens(1, 2), state, 2)
    with torch.inference_mode():
        assert graphs.step(torch.tensor([[3]], device=DEVICE), state) is None


def test_a_shape_is_captured_once_it_comes_up_often(monkeypatch):
    monkeypatch.setattr(graphs_module, "PATIENCE", PATIENCE)
    model = here("gla")
    graphs, state = Graphs(model), read(model, 1)
    ids_11 = torch.tensor([[3]], device=DEVICE)
    with torch.inference_mode():
        by_graph = []
        for _ in range(PATIENCE + 2):
            done = graphs.step(ids_11, state)
            by_graph.append(done is not None)
            state = (done or stepped(model, None, ids_11, state))[2]
    assert by_graph == [False] * PATIENCE + [True] * 2


def test_weights_that_change_are_seen():
    model = here("perspective2")
    graphs, ids = Graphs(model), tokens(1, 2)
    _, state = go_on(graphs, model, ids, read(model, 1))
    before = state.fork()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    found, _ = go_on(graphs, model, ids, state)
    wanted, _ = go_on(None, model, ids, before.fork())
    assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
    model.norm.weight.data = model.norm.weight.data.clone() * 2
    with torch.inference_mode():
        assert graphs.step(ids[0].to(DEVICE), before.fork()) is None and not graphs._made


def test_what_cannot_be_captured_is_stepped_by_the_modules_and_said_once(caplog, monkeypatch):
    def refused(*_, **__):
        raise Unrecordable("item, for which the host waits")

    monkeypatch.setattr(graphs_module, "Graph", refused)
    model = here("transformer")
    graphs = Graphs(model)
    with caplog.at_level(logging.INFO, "perspectron"), torch.inference_mode():
        for length in (5, 9, 300):
            state = read(model, 1, length)
            assert graphs.step(torch.tensor([[3]], device=DEVICE), state) is None
            stepped(model, graphs, torch.tensor([[3]], device=DEVICE), state)
        assert Graphs(model, graphs.told).step(torch.tensor([[3]], device=DEVICE), read(model, 1)) is None
    levels = [record.levelname for record in caplog.records if "without a graph" in record.message]
    assert levels == ["WARNING", "INFO"]


def test_a_graph_that_is_wrong_is_not_used(monkeypatch):
    class Wrong(graphs_module.Graph):
        def __init__(self, run, device, asks=True):
            super().__init__(run, device, asks=asks)
            right = self.replay
            self.replay = lambda: (right(), model.norm.weight.data.add_(1), right())

    monkeypatch.setattr(graphs_module, "Graph", Wrong)
    model = here("gla")
    with torch.inference_mode():
        assert Graphs(model).step(torch.tensor([[3]], device=DEVICE), read(model, 1)) is None


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["between", "all"])
def test_a_compiled_step_gives_what_the_modules_give(compiled, monkeypatch):
    if DEVICE.type == "cpu":  # its front is the compiler's, its kernels are PyTorch's
        monkeypatch.setattr(joined, "COMPILER", "aot_eager")
        monkeypatch.setattr(attention, "stepped", masked)
    model, ids = here("gdn"), tokens(1, 6)
    found, after = go_on(joined.Joined(model, compiled), model, ids, read(model, 1), 6)
    wanted, modules = go_on(None, model, ids, read(model, 1))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    rows = pytree.tree_leaves(after.take(0)), pytree.tree_leaves(modules.take(0))
    for one, other in zip(*rows, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def masked(q, ring, at, *, scale=None):
    """`attention.stepped` as a GPU has it."""
    S = ring[0].shape[2]
    return attention.attend(q, *ring, attention.slots(at.length_B.clamp_min(1), S)[:, None] >= 0, scale=scale)


def test_few_graphs_are_kept_and_little_memory_of_idle_ones(monkeypatch):
    model = here("gla")
    graphs = Graphs(model)
    for rows in range(1, graphs_module.MOST_GRAPHS + 3):
        go_on(graphs, model, tokens(rows, 1), read(model, rows))
    assert len(graphs._made) == graphs_module.MOST_GRAPHS
    monkeypatch.setattr(graphs_module, "MOST_IDLE", 0)
    go_on(graphs, model, tokens(1, 1), read(model, 1))
    assert len(graphs._made) == 1


def test_a_model_that_is_gone_leaves_nothing():
    model = here("gla")
    graphs = Graphs(model)
    go_on(graphs, model, tokens(1, 2), read(model, 1))
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None


def test_it_is_the_same_without_inference_mode():
    model, ids = here("perspective2"), tokens(1, 4)
    said, _ = go_on(Graphs(model), model, ids, read(model, 1))
    state, graphs = read(model, 1).fork(), Graphs(model)
    with torch.no_grad():
        for wanted, ids_B1 in zip(said, ids, strict=True):
            _, logits, state = stepped(model, graphs, ids_B1.to(DEVICE), state)
            assert torch.equal(logits, wanted) and not logits.is_inference()
    assert any(graphs._made.values())


@pytest.mark.parametrize("design", ["perspective2", "transformer", "rwkv7"])
def test_rows_that_join_and_leave_read_the_same_text(design, tokenizer, monkeypatch):
    model = here(design)

    def texts(graphs) -> list[str]:
        monkeypatch.setattr(batch_module, "steps_of", lambda _: graphs)
        rows, said = Rows(model, tokenizer), []
        with torch.inference_mode():
            for n in range(12):  # one batch of 8, then one of 16
                rows.add(prompt_of(6 + n, n), max_tokens=4 + n)
                said += rows.step()
            said += drain(rows)
        return [(piece.row, piece.id, piece.text) for piece in said]

    graphs = Graphs(model)
    assert texts(graphs) == texts(None)
    assert any(made is not None for made in graphs._made.values())


@pytest.mark.skipif(DEVICE.type != "cuda", reason="CUDA is not here")
def test_a_model_on_cuda_has_graphs():
    model = here("perspective2")
    assert isinstance(steps_of(model), Graphs)
    model.norm.register_forward_hook(lambda *_: None)
    assert steps_of(model) is None


def test_a_model_on_cuda_is_asked_for_graphs(monkeypatch):
    """The choice, without CUDA: what a model says of its device decides."""
    monkeypatch.setattr(LanguageModel, "device", torch.device("cuda"))
    model = small("gla")
    assert steps_of(model) is None, "its weights are not there"
    assert isinstance(steps_module._known[model], Graphs)


def test_trees_of_states_have_their_caches_in_order():
    model = here("perspective2")
    state = read(model, 2)
    assert len(tensors(state)) == sum(isinstance(x, Tensor) for x in pytree.tree_leaves(state))
    assert presets.DESIGNS


def test_a_gradient_through_a_state_that_a_graph_has_used_up_is_refused():
    model, ids = here("gla"), tokens(1, 1).to(DEVICE)
    graphs, state = Graphs(model), read(model, 1).fork()
    with torch.no_grad():
        state = graphs.step(ids[0], state)[2]
    (made,), unchanged = graphs._made.values(), torch.autograd._unsafe_preserve_version_counter
    replay = made._graph.replay

    def unseen():  # as a graph of CUDA writes
        with unchanged(tuple(made._bases)):
            replay()

    made._graph.replay = unseen
    loss = model.hidden(ids[0], state)[0].sum()
    with torch.no_grad():
        assert graphs.step(ids[0], state) is not None
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_a_state_stays_whole_where_memory_runs_out_while_it_gets_memory_of_its_own(monkeypatch):
    model, ids = here("gla"), tokens(1, 8)
    wanted, _ = go_on(None, model, ids, read(model, 1))
    graphs = Graphs(model)
    said, state = go_on(graphs, model, ids[:2], read(model, 1), 2)
    (made,), clone, given = graphs._made.values(), Tensor.clone, []

    def full(x, **how):
        given.extend(i for i, base in enumerate(made._bases) if x is base)
        if given == [0, 1]:
            raise torch.OutOfMemoryError
        return clone(x, **how)

    def refused(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(graphs_module, "Graph", refused)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "clone", full)
        go_on(graphs, model, tokens(1, 1, 1), read(model, 1), 0)
    assert given == [0, 1]
    rest, _ = go_on(graphs, model, ids[2:], state, 0)
    for one, other in zip(said + rest, wanted, strict=True):
        same(one, other)


def test_a_graph_that_is_gone_back_to_is_kept():
    model = here("gla")
    graphs, kept = Graphs(model), read(model, 1)
    _, kept = go_on(graphs, model, tokens(1, 1), kept)
    (made,) = graphs._made.values()
    for rows in range(2, graphs_module.MOST_GRAPHS + 4):
        go_on(graphs, model, tokens(rows, 1), read(model, rows))
        _, kept = go_on(graphs, model, tokens(1, 1), kept)
    assert any(one is made for one in graphs._made.values()) and made.at(kept)


def test_a_state_that_another_thread_may_be_reading_stays_where_it_is():
    """To move it would lose what is written between the copy and the move."""
    model, ids, told = here("gla"), tokens(1, 6), []
    wanted, _ = go_on(None, model, ids, read(model, 1))
    graphs = Graphs(model)
    said, state = go_on(graphs, model, ids[:2], read(model, 1), 2)
    places = [x.data_ptr() for x in tensors(state)]

    def elsewhere(state):
        told.append(go_on(graphs, model, tokens(1, 3, 1), state, 3)[0])

    def run(*states):
        threads = [threading.Thread(target=elsewhere, args=(state,)) for state in states]
        for thread in threads:
            thread.start()
            thread.join()

    run(read(model, 1))
    assert [x.data_ptr() for x in tensors(state)] == places
    rest, state = go_on(graphs, model, ids[2:], state, 4)
    for one, other in zip(said + rest, wanted, strict=True):
        same(one, other)
    run(state.fork(), state)  # the second goes on in its own memory, by another thread
    assert [x.data_ptr() for x in tensors(state)] == places
    go_on(graphs, model, ids, read(model, 1), 0)  # of the thread that had it before
    assert [x.data_ptr() for x in tensors(state)] == places
    for one, other in zip(*told[1:], strict=True):
        same(one, other)


def test_a_graph_whose_text_has_ended_is_taken_by_any_thread():
    model = here("gla")
    graphs, before = Graphs(model), read(model, 1)
    go_on(graphs, model, tokens(1, 2), read(model, 1), 2)
    made = [*graphs._made.values()]
    thread = threading.Thread(target=go_on, args=(graphs, model, tokens(1, 2), before))
    thread.start()
    thread.join()
    assert [*graphs._made.values()] == made and threading.get_ident() not in {key[0] for key in graphs._made}


class Fake:
    """CUDA's streams without CUDA; `current` is the one that is so. A capture fails as PyTorch's does: its stream
    stays the current one."""

    class Stream(str):
        def wait_stream(self, other):
            Fake.waits.append((self, other))

    class graph:
        def __init__(self, *_, stream, **__):
            self.stream = stream

        def __enter__(self):
            Fake.current = self.stream

        def __exit__(self, *_):
            raise RuntimeError("operation failed due to a previous error during capture")

    class stream:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.before, Fake.current = Fake.current, self.stream

        def __exit__(self, *_):
            Fake.current = self.before


@pytest.mark.parametrize("fails", ["the capture", "a run before it"])
def test_a_capture_that_fails_leaves_the_streams_as_they_were(fails, monkeypatch):
    main, side = Fake.Stream("main"), Fake.Stream("side")
    Fake.current, Fake.waits = main, []
    for name, fake in {
        "device": lambda _: contextlib.nullcontext(), "current_stream": lambda: Fake.current, "stream": Fake.stream,
        "set_stream": lambda stream: setattr(Fake, "current", stream), "CUDAGraph": object, "graph": Fake.graph,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(graphs_module, "_side", lambda _: side)

    def run():
        if fails != "the capture":
            raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError):
        GRAPH(run, DEVICE, asks=False)
    assert Fake.current == main and Fake.waits == [(side, main), (main, side)]
