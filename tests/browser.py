"""A page in headless Chromium, and what axe finds wrong with it."""

import contextlib
import os
import shutil
from collections.abc import Iterator

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ConsoleMessage, Page, expect, sync_playwright

from tests.waiting import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browsing(url: str, **options) -> Iterator[Page]:
    """A page; what its console complains of, or what it fails to load, is an error."""
    with sync_playwright() as driver:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(**options)
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if said_badly(message) else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.set_default_timeout(1000 * PATIENCE)
        expect.set_options(timeout=1000 * PATIENCE)
        page.goto(url)
        try:
            yield page
        finally:
            browser.close()
        assert not wrong, wrong


def said_badly(message: ConsoleMessage) -> bool:
    """An error, but for an answer of 400, which the page shows."""
    return message.type == "error" and "status of 400" not in message.text


AA = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}}
"""Only the rules of WCAG 2.2 AA, for pages whose frame is a theme's."""


COLOURS: dict[str, object] = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
AT_REST = """() => new Promise(requestAnimationFrame).then(() => Promise.all(document.getAnimations()
    .filter(a => a.effect.getComputedTiming().endTime !== Infinity).map(a => a.finished.catch(() => null))))"""
"""Waits for transitions, in which colours are neither the old nor the new ones."""


def look(page: Page, options: dict[str, object] | None = None) -> list[str]:
    """Each violated rule and where it is first, in both palettes and widths; all of axe's rules without options, and
    for the dark palette those of colours."""
    found = []
    for scheme in ("light", "dark"):
        if scheme == "dark":
            options = COLOURS
        for width in (1300, 390):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate(AT_REST)
            for rule in Axe().run(page, options=options).response["violations"]:
                found.append(f"{scheme}, {width}: {rule['id']} at {rule['nodes'][0]['target']}")
    if page.evaluate("document.documentElement.scrollWidth") > 390:
        found.append("wider than a phone")
    return found
