"""The page in headless Chromium: go on, fork at a token, compare branches, take states out and in, and talk over a
restart of the server.

    python -m tests.serve.test_page RUN CHAT docs/images

takes its pictures, with a run behind it, and another that has a chat template.
"""

import contextlib
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Locator, Page, expect

from perspectron.data.template import Template
from perspectron.decode.history import exhausted
from perspectron.decode.session import Session
from perspectron.decode.store import PrefixStore
from perspectron.opening import open_model
from perspectron.serve.engine import Engine
from perspectron.serve.served import Served
from perspectron.serve.states import States
from perspectron.serve.web.app import create
from tests.browser import CHROMIUM, browsing, look
from tests.serve.conftest import TEMPLATE, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]


@contextlib.contextmanager
def serving(*models: Served, port: int = 0) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", port)) as listening:
        server = uvicorn.Server(
            uvicorn.Config(create(models), log_level="warning", timeout_graceful_shutdown=2)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def talking(tmp_path, tokenizer):
    """Servers of the same model over the same states, which have a template."""

    def one() -> Served:
        made = served(tmp_path, tokenizer)
        made.template = Template(TEMPLATE, "here")
        return made

    return one


@pytest.fixture
def page(tmp_path, tokenizer) -> Iterator[Page]:
    with serving(served(tmp_path, tokenizer)) as url, browsing(url) as page:
        expect(page.locator("#memory")).to_contain_text("token")
        yield page


def set_to(page: Page, **values: object) -> None:
    """Fill fields of the settings, by their ids."""
    page.locator("#settings").evaluate("one => { one.open = true }")
    for id, value in values.items():
        page.locator(f"#{id}").fill(str(value))


def go_on(page: Page, text: str, name: str) -> str:
    set_to(page, name=name)
    page.get_by_label("Continue with").fill(text)
    page.get_by_label("Continue with").press("Control+Enter")
    expect(page.get_by_role("status")).to_contain_text(f"kept as {name}")
    return text_of(page)


def text_of(page: Page) -> str:
    return page.locator("#text").text_content() or ""


def state(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def return_to(page: Page, name: str) -> None:
    state(page, name).click()
    expect(state(page, name)).to_have_attribute("aria-current", "true")


def click_from(page: Page, index: int) -> int:
    """Click the first token from there on that one sees, as parts of characters have no text; the tokens up to it."""
    texts = page.locator("#text span").all_text_contents()
    seen = next(at for at, text in enumerate(texts) if at >= index and text.strip())
    page.locator("#text span").nth(seen).click()
    return seen + 1


def dropped(page: Page, name: str, data: bytes) -> None:
    """Drag a file over the page and let it go there."""
    carried = page.evaluate_handle(
        """([name, bytes]) => {
            const carried = new DataTransfer();
            carried.items.add(new File([new Uint8Array(bytes)], name));
            return carried;
        }""",
        [name, [*data]],
    )
    for event in ("dragover", "drop"):
        page.dispatch_event("#states", event, {"dataTransfer": carried})


def test_a_text_goes_on_and_one_returns(page) -> None:
    set_to(page, count=24, seed=0)
    first = go_on(page, "The cat sat", "one")
    assert first.startswith("The cat sat") and len(first) > 20
    second = go_on(page, " on", "two")
    assert second.startswith(first + " on")
    expect(state(page, "two")).to_have_attribute("aria-current", "true")
    assert page.locator("#text span.drawn").count() == 48
    return_to(page, "one")
    expect(page.get_by_role("status")).to_contain_text("Returned to one")
    assert text_of(page) == first
    assert page.locator("#tree ul").get_by_role("button", name="two", exact=True).count() == 1, "below one"
    expect(page.locator(".words").first).to_contain_text("The cat sat")
    expect(page.locator("#tree ul .words")).to_contain_text(" on")
    assert "The cat" not in page.locator("#tree ul .words").text_content(), "its own words"
    assert go_on(page, " on", "again") == second, "the same state and seed say the same"
    page.once("dialog", lambda question: question.dismiss())
    page.get_by_label("Delete again").click()
    expect(state(page, "again")).to_have_count(1)
    page.once("dialog", lambda question: question.accept())
    page.get_by_label("Delete again").click()
    expect(state(page, "again")).to_have_count(0)
    set_to(page, count=9999)
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("status")).to_contain_text("9999")
    page.reload()
    page.locator("#tree button").first.wait_for()
    assert text_of(page) == ""
    return_to(page, "two")
    assert page.locator("#text span.drawn").count() == 48, "the file knows what was drawn"
    page.reload()
    expect(state(page, "two")).to_have_attribute("aria-current", "true")
    assert text_of(page) == second


def test_a_click_on_a_token_forks_there(page) -> None:
    set_to(page, count=24, seed=0)
    whole = go_on(page, "The cat sat", "one")
    tokens = page.locator("#text span")
    all_of_it = tokens.count()
    chosen = click_from(page, 15)
    expect(page.locator("#chosen")).to_contain_text(f"{chosen} of {all_of_it}")
    assert 5 <= page.locator("#likely li").count() <= 6, "five, and the token itself"
    assert page.locator("#text span.after").count() == all_of_it - chosen
    set_to(page, name="back")
    page.get_by_role("button", name="Fork here").click()
    expect(page.get_by_role("status")).to_contain_text("as back")
    forked = text_of(page)
    assert whole.startswith(forked) and tokens.count() == chosen
    return_to(page, "one")
    chosen = click_from(page, 2)
    set_to(page, seed=1)
    other = go_on(page, " the mat", "branch")
    assert other.startswith("".join(tokens.all_text_contents()[:chosen]) + " the mat"), (
        "goes on from the token"
    )
    expect(page.locator("#tree ul ul").get_by_role("button", name="branch", exact=True)).to_have_count(1)
    return_to(page, "one")
    assert text_of(page) == whole, "what was forked stays"
    set_to(page, name="branch")
    page.once("dialog", lambda question: question.dismiss())
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#said.bad")).to_contain_text("branch")
    assert text_of(page) == whole
    click_from(page, 2)
    go_on(page, " the row", "another")
    expect(state(page, f"one-at-{chosen}-2")).to_have_count(1)  # and no fork replaces one
    expect(page.locator("#tree .name")).to_have_count(6)
    page.goto(f"{page.url.partition('#')[0]}#tiny/100%")
    page.reload()
    expect(page.locator("#said.bad")).to_contain_text("100%")
    expect(page.locator("#tree .name")).to_have_count(6)


def test_branches_stand_side_by_side(page, tokenizer) -> None:
    set_to(page, count=8, seed=0)
    go_on(page, "The cat sat", "one")
    go_on(page, " on the mat", "left")
    return_to(page, "one")
    go_on(page, " by the row", "right")
    page.get_by_label("Compare with left").click()
    columns = page.locator("#branches > section")
    expect(columns).to_have_count(2)
    own = [columns.nth(n).locator(".parting ~ span").all_text_contents() for n in (0, 1)]
    assert "".join(own[0]).startswith(" by the row") and "".join(own[1]).startswith(" on the mat")
    same = columns.locator("span.same").all_text_contents()
    assert same[: len(same) // 2] == same[len(same) // 2 :] and "".join(same).startswith("The cat sat")
    assert page.locator(".next li").count() == 10 and page.locator(".layers li").count() == 4
    return_to(page, "left")
    expect(page.get_by_role("status")).to_be_visible()  # what is said is seen beside branches, too
    page.locator("#right").select_option("one")
    expect(columns.nth(1).locator(".parting ~ span")).to_have_count(0)
    assert look(page) == []


def test_a_state_is_dragged_in_and_out(page) -> None:
    set_to(page, count=8)
    whole = go_on(page, "The cat sat", "one")
    with page.expect_download() as download:
        page.get_by_label("Download one").click()
    data = download.value.path().read_bytes()
    carried = page.locator("#tree .state").first.evaluate(
        """row => {
            const dataTransfer = new DataTransfer();
            row.dispatchEvent(new DragEvent("dragstart", { dataTransfer }));
            return dataTransfer.getData("DownloadURL");
        }"""
    )
    assert carried.split(":", 2)[1] == "one.state"
    assert page.request.get(carried.split(":", 2)[2]).body() == data
    page.get_by_role("button", name="New text").click()
    assert text_of(page) == ""
    dropped(page, "brought <b>along</b>.state", data)
    expect(state(page, "brought--b-along--b-")).to_have_attribute("aria-current", "true")
    assert text_of(page) == whole
    dropped(page, "wrong.state", b"no state")
    expect(page.locator("#said.bad")).to_contain_text("wrong")
    expect(state(page, "wrong")).to_have_count(0)
    assert text_of(page) == whole
    page.locator("#file").set_input_files(download.value.path())
    expect(page.get_by_role("status")).to_contain_text("Restored")
    dropped(page, "one.state", data)
    expect(page.get_by_role("status")).to_contain_text("Restored one-2")
    for name in ("one", "one-2"):  # no state is replaced
        expect(state(page, name)).to_have_count(1)


def test_a_talk_goes_on_over_a_restart(talking) -> None:
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(first := serving(talking()))
        page = stack.enter_context(browsing(url))
        page.get_by_role("tab", name="Chat").click()
        set_to(page, count=8, seed=0, name="talk")

        def say(text: str, name: str) -> None:
            set_to(page, name=name)
            page.get_by_label("Message").fill(text)
            page.get_by_label("Message").press("Enter")
            expect(page.get_by_role("status")).to_contain_text(f"ept as {name}")

        def said() -> list[str]:
            return page.locator(".bubble .content").all_text_contents()

        say("The cat", "first")
        before = said()
        assert before[0] == "The cat" and len(before) == 2 and before[1]
        assert look(page) == []
        first.__exit__(None, None, None)
        stack.enter_context(serving(talking(), port=int(url.rpartition(":")[2])))
        say("The mat", "second")
        assert said()[:3] == [*before, "The mat"] and len(said()) == 4, "the page stayed open"
        talk = said()
        page.reload()
        expect(page.get_by_role("tab", name="Chat")).to_have_attribute("aria-selected", "true")
        expect(page.locator(".bubble .content")).to_have_text(talk)
        page.get_by_role("button", name="Go on from here").click()
        assert page.locator(".bubble.after").count() == 2
        say("The row", "third")
        assert said()[:3] == [*before, "The row"]
        return_to(page, "second")
        assert said() == talk, "the branch left it as it was"
        about = page.request.post(f"{url}/v1/states/second/restore", data={}).json()
        assert [one["role"] for one in about["messages"]] == ["user", "assistant"] * 2
        assert all(one in about["text"] for one in talk)


def test_a_talk_that_was_begun_with_tools_keeps_them(talking) -> None:
    one, tool = talking(), {"type": "function", "function": {"name": "add"}}
    reads = "{% for t in tools or [] %}[{{ t.function.name }}{{ mood }}]{% endfor %}"
    one.template = Template(reads + TEMPLATE, "here")
    said = {"messages": [{"role": "user", "content": "The cat"}], "max_tokens": 4, "save": "one"}
    asked = said | {"tools": [tool], "chat_template_kwargs": {"mood": "!"}}
    with serving(one) as url, browsing(url) as page:
        assert page.request.post(f"{url}/v1/chat/completions", data=asked).ok
        page.reload()
        page.get_by_role("tab", name="Chat").click()
        return_to(page, "one")
        set_to(page, count=4, name="two")
        page.get_by_label("Message").fill("on")
        page.get_by_label("Message").press("Enter")
        expect(page.get_by_role("status")).to_contain_text("ept as two")
        about = page.request.post(f"{url}/v1/states/two/restore", data={}).json()
        assert about["text"].count("user:") == 2, "what was said is not read again without its tools"
        assert about["text"].startswith("[add!]user: The cat") and len(about["messages"]) == 4
        assert about["given"] == {"tools": [tool], "mood": "!"}


def test_a_model_without_a_template_says_what_gives_it_one(page) -> None:
    page.get_by_role("tab", name="Chat").click()
    expect(page.locator("#talk")).to_contain_text("--template")
    expect(page.get_by_role("button", name="Send")).to_be_hidden()


def test_what_is_stopped_is_not_kept(tmp_path, tokenizer) -> None:
    one = served(tmp_path, tokenizer)
    one.largest = 1 << 20
    one.template = Template(TEMPLATE, "here")
    with serving(one) as url, browsing(url) as page:
        set_to(page, count=1 << 20, name="never", temperature=0)  # a draw may end the text
        page.get_by_label("Continue with").fill("The cat")
        page.get_by_role("button", name="Continue").click()
        page.locator("#text span.drawn").nth(3).wait_for()
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Continue")).to_be_enabled()
        assert text_of(page) == "" and not one.states.list()
        assert page.get_by_label("Continue with").input_value() == "The cat"
        page.get_by_role("tab", name="Chat").click()
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".bubble.model .content")).not_to_be_empty()
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        assert page.get_by_label("Message").input_value() == "The cat"
        expect(page.locator("#tree button")).to_have_count(0)
        set_to(page, count=3)
        page.get_by_label("Message").press("Enter")
        expect(page.get_by_role("status")).to_contain_text("ept as")
        assert page.locator(".bubble").count() == 2, "what was stopped is gone"


def test_settings_are_asked_for_as_they_are_set(page) -> None:
    asked = []
    page.on("request", lambda request: asked.append(request) if "completions" in request.url else None)
    set_to(page, count=3, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.2, seed=7)
    go_on(page, "The", "one")
    set_to(page, temperature="", top_p="", top_k="", min_p="", repetition_penalty="", seed="")
    go_on(page, " cat", "two")
    rules = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "seed": 7,
    }
    first, second = [request.post_data_json for request in asked]
    assert rules.items() <= first.items() and first["max_tokens"] == 3
    assert {"top_p", "top_k", "min_p", "repetition_penalty"}.isdisjoint(second) and "seed" in second


@pytest.mark.parametrize("design", ["perspective-tiny", "transformer-tiny"])
def test_the_memory_is_true_from_the_first_token(tmp_path, tokenizer, design) -> None:
    one = served(tmp_path, tokenizer, design=design)
    model, rows = one.engine.model, {}
    for tokens in (1, 16, 256, 4096):
        state = exhausted(Session(model, tokenizer).read([5] * tokens).remembering())
        rows[tokens] = (
            state.filled().nbytes,
            2 * 4 * 4 * 32 * (tokens + 1),
        )  # keys and values, float32, layers, width
    with serving(one) as url, browsing(url) as page:
        page.get_by_text("As a table").click()
        set_to(page, count=8)
        table = page.locator("#bytes tbody tr")
        shown = [[cell.strip() for cell in row.locator("th, td").all_text_contents()] for row in table.all()]
        for tokens, both in rows.items():
            assert [f"{tokens:,}", *map(spelled, both)] in shown
        go_on(page, "The cat sat", "one")
        tokens = page.locator("#text span").count()
        expect(page.locator("#memory")).to_contain_text(f"{tokens} tokens")
        assert table.filter(has_text=f"{tokens}").count() >= 1
        points = page.locator("#chart polyline.own").get_attribute("points").split()
        flat = len({point.partition(",")[2] for point in points}) == 1
        assert flat == (design == "perspective-tiny"), "a recurrence does not grow"


def spelled(bytes: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if bytes >= unit:
            return f"{bytes / unit:.{2 if name == 'GB' else 1}f} {name}"
    return f"{bytes} B"


def test_what_the_server_says_is_text(talking) -> None:
    evil = "<img src=x onerror=\"document.title='evil'\"><b class=evil>"
    with serving(talking()) as url, browsing(url) as page:
        set_to(page, count=2)
        go_on(page, evil, "one")
        assert evil in text_of(page)
        expect(page.locator(".words").first).to_contain_text("<img")
        page.get_by_role("tab", name="Chat").click()
        page.get_by_role("button", name="New chat").click()
        page.get_by_label("Message").fill(evil)
        page.get_by_label("Message").press("Enter")
        expect(page.get_by_role("status")).to_contain_text("ept as")
        assert page.locator(".bubble .content").first.text_content() == evil
        assert page.locator(".evil, main img").count() == 0 and page.title() != "evil"


def test_the_page_is_used_by_the_keyboard_alone(page) -> None:
    assert look(page) == []
    set_to(page, count=8)
    go_on(page, "The cat sat", "one")
    page.locator("#text").focus()
    for key in ("Home", "End", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    all_of_it = page.locator("#text span").count()
    expect(page.locator("#chosen")).to_contain_text(f"{all_of_it - 2} of {all_of_it}")
    assert look(page) == []
    page.keyboard.press("f")
    expect(page.locator("#text span")).to_have_count(all_of_it - 2)
    page.locator("#place").fill("2")
    page.locator("#place").press("Tab")
    expect(page.locator("#chosen")).to_contain_text("2 of")
    page.keyboard.press("Shift+Tab")
    page.locator("#tab-text").focus()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {
        "text",
        "place",
        "fork",
        "more",
        "count",
        "top_p",
        "seed",
        "name",
        "go",
        "fresh",
        "file",
    } <= reached
    assert {"one", "⇄", "↓", "×"} <= reached
    page.locator("#tab-text").focus()
    for key, view in (("ArrowRight", "Chat"), ("ArrowRight", "Compare"), ("ArrowRight", "Text")):
        page.keyboard.press(key)
        expect(page.get_by_role("tab", name=view)).to_have_attribute("aria-selected", "true")
        expect(page.get_by_role("tabpanel", name=view)).to_be_visible()


def pictures(run: Path, chat: Path, folder: Path) -> None:
    """Each view: a text in light colours, a comparison in dark ones, a talk on a phone."""
    from PIL import Image

    place, models = Path(tempfile.mkdtemp()), []
    for path in (run, chat):
        opened = open_model(path)
        engine = Engine(opened.model, opened.tokenizer, store=PrefixStore(opened.model))
        states = [States(place / path.name / kind) for kind in ("states", "slots")]
        models.append(Served(path.name, engine, opened.tokenizer, *states, 400, template=opened.template()))

    def taken(page: Page, name: str) -> None:
        page.locator("#settings").evaluate("one => { one.open = false }")
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.screenshot(path=(path := folder / f"page-{name}.png"))
        Image.open(path).convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)

    with serving(*models) as url:
        with browsing(url, viewport={"width": 1300, "height": 800}) as page:
            set_to(page, count=80, seed=1, temperature=0.5)
            go_on(page, "License", "license")
            chosen = click_from(page, 30)
            set_to(page, seed=2)
            go_on(page, "", "otherwise")
            return_to(page, "license")
            page.locator("#text span").nth(chosen - 1).click()
            taken(page, "light")
            return_to(page, "otherwise")
            page.get_by_label("Compare with license", exact=True).click()
            expect(page.locator(".next").last).to_be_visible()
            page.emulate_media(color_scheme="dark")
            taken(page, "dark")
        with browsing(url, viewport={"width": 390, "height": 800}) as page:
            page.get_by_label("Model").select_option(chat.name)
            page.get_by_role("tab", name="Chat").click()
            set_to(page, seed=0, temperature=0)
            for text, name in (("What is the capital of France?", "paris"), ("And of Italy?", "rome")):
                set_to(page, name=name)
                page.get_by_label("Message").fill(text)
                page.get_by_label("Message").press("Enter")
                expect(page.get_by_role("status")).to_contain_text(f"ept as {name}")
            taken(page, "phone")


if __name__ == "__main__":
    pictures(*map(Path, sys.argv[1:]))
