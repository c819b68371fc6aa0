"""The page in headless Chromium: type, go on, fork, return, and find the same texts.

    python -m tests.serve.test_page RUN docs

takes its pictures, with a run behind it.
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
from playwright.sync_api import Page, expect

from perspectron.decode.store import PrefixStore
from perspectron.opening import open_model
from perspectron.serve.engine import Engine
from perspectron.serve.served import Served
from perspectron.serve.states import States
from perspectron.serve.web.app import create
from tests.browser import CHROMIUM, browsing, look
from tests.serve.conftest import served


@contextlib.contextmanager
def serving(one: Served) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(
            uvicorn.Config(create([one]), log_level="warning", timeout_graceful_shutdown=2)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def go_on(page: Page, text: str, name: str) -> str:
    page.get_by_label("Continue with").fill(text)
    page.get_by_label("Name").fill(name)
    page.get_by_label("Continue with").press("Control+Enter")
    expect(page.get_by_role("status")).to_contain_text(f"kept as {name}")
    return page.locator("#text").text_content() or ""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_type_go_on_fork_and_return(tmp_path, tokenizer) -> None:
    with serving(served(tmp_path, tokenizer)) as url, browsing(url) as page:
        expect(page.locator("#memory")).to_have_text(
            "Memory of a text of 8,192 tokens: 5.2 kB; a transformer of this width and depth keeps 8.4 MB for them"
        )
        page.get_by_label("Tokens").fill("24")
        first = go_on(page, "The cat sat", "one")
        assert first.startswith("The cat sat") and len(first) > 20
        second = go_on(page, " on", "two")
        assert second.startswith(first + " on")
        expect(page.get_by_role("button", name="two", exact=True)).to_have_attribute("aria-current", "true")
        expect(page.locator("#memory")).to_contain_text("a transformer of this width and depth keeps")
        assert page.locator("#text span.drawn").count() == 48
        page.locator("#text").focus()
        for key in ("Home", "End", "ArrowLeft", "ArrowLeft"):
            page.keyboard.press(key)
        expect(page.locator("#chosen")).to_contain_text("drawn with probability")
        assert 1 <= page.locator("#likely li").count() <= 6  # five, and the token itself
        page.get_by_label("Name").fill("back")
        page.locator("#text").focus()
        page.keyboard.press("f")
        expect(page.get_by_role("status")).to_contain_text("as back")
        forked = page.locator("#text").text_content() or ""
        assert second.startswith(forked) and len(forked) < len(second)
        page.get_by_role("button", name="one", exact=True).click()
        expect(page.get_by_role("status")).to_contain_text("Returned to one in")
        assert page.locator("#text").text_content() == first
        assert go_on(page, " on", "again") == second, "the same state and seed say the same"
        with page.expect_download() as download:
            page.get_by_label("Download back").click()
        page.locator("#file").set_input_files(download.value.path())
        expect(page.get_by_role("status")).to_contain_text("Restored")
        assert page.locator("#text").text_content() == forked
        page.get_by_label("Delete again").click()
        expect(page.get_by_role("button", name="again", exact=True)).to_have_count(0)
        page.get_by_label("Tokens").fill("9999")
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_role("status")).to_contain_text("max_tokens = 9999, must be ≤ 64")
        page.set_viewport_size({"width": 375, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= 375


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_the_served_page_is_used_by_the_keyboard_alone(tmp_path, tokenizer):
    with serving(served(tmp_path, tokenizer)) as url, browsing(url) as page:
        assert look(page) == []
        page.get_by_label("Tokens").fill("8")
        go_on(page, "The cat sat", "one")
        page.locator("#text").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("#chosen").text_content().startswith("Token "), "the keyboard chooses a token"
        assert look(page) == []
        reached = set()
        for _ in range(30):
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")
            )
        assert {"more", "count", "temperature", "seed", "name", "go", "fresh", "one", "file"} <= reached


def pictures(run: Path, folder: Path) -> None:
    """The page in light and dark, and on a phone."""
    opened, folder_of = open_model(run), Path(tempfile.mkdtemp())
    engine = Engine(opened.model, opened.tokenizer, store=PrefixStore(opened.model))
    kept, slots = States(folder_of / "states"), States(folder_of / "slots")
    with serving(Served(run.name, engine, opened.tokenizer, kept, slots, 400)) as url:
        for name, scheme, width in (
            ("light", "light", 1100),
            ("dark", "dark", 1100),
            ("phone", "light", 390),
        ):
            with browsing(url, color_scheme=scheme, viewport={"width": width, "height": 760}) as page:
                if name == "light":
                    go_on(page, "KING.\n", "king")
                    go_on(page, "\nQUEEN.\n", "queen")
                    page.get_by_role("button", name="king", exact=True).click()
                    expect(page.get_by_role("status")).to_contain_text("Returned")
                    go_on(page, "\nFOOL.\n", "fool")
                page.get_by_role("button", name="fool", exact=True).click()
                expect(page.get_by_role("status")).to_contain_text("Returned")
                page.screenshot(path=folder / f"page-{name}.png")


if __name__ == "__main__":
    pictures(Path(sys.argv[1]), Path(sys.argv[2]))
