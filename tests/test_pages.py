"""Pages that people open: no violation of axe's rules (contrast, names, order, what the keyboard reaches), in light and
dark, on a wide screen and on a phone; nothing in the console, and nothing wider than the phone."""

from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

import perspectron
from perspectron import presets
from perspectron.cli import playground
from perspectron.data import Tokenizer
from perspectron.train import curve
from tests.serve.test_page import CHROMIUM, browsing

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


def look(page: Page) -> list[str]:
    """Each violated rule and where it is first, in both palettes and widths."""
    found = []
    for scheme in ("light", "dark"):
        for width in (1300, 390):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 900})
            for rule in Axe().run(page).response["violations"]:
                found.append(f"{scheme}, {width}: {rule['id']} at {rule['nodes'][0]['target']}")
    if page.evaluate("document.documentElement.scrollWidth") > 390:
        found.append("wider than a phone")
    return found


def test_rules_are_seen_to_be_broken(tmp_path):
    path = tmp_path / "page.html"
    path.write_text('<html><body><img src="data:,"><p style="color:#ddd">pale</p></body></html>')
    with browsing(path.as_uri()) as page:
        found = " ".join(look(page))
    assert all(rule in found for rule in ("image-alt", "color-contrast", "html-has-lang"))


def test_the_report():
    with browsing((ROOT / "results" / "compare.html").as_uri()) as page:
        assert look(page) == []


def test_the_playground(tmp_path):
    tokenizer = Tokenizer.train([playground.TEXT * 9], 300)
    sizes = {
        "d_model": 32,
        "layers": 2,
        "hidden": 32,
        "heads": 2,
        "kv_heads": 1,
        "period": 2,
        "vocab_size": 300,
    }
    model = perspectron.build(presets.get("perspective", **sizes))
    lines = [
        {"step": i, "loss": 5 / i, "lr": 1e-3, "tokens": 64 * i, "tokens_per_second": 1.0}
        for i in range(1, 9)
    ]
    curve.draw(lines, tmp_path / "loss.svg")
    playground.write(tmp_path / "page.html", model, tokenizer, tmp_path / "loss.svg", [("text", "stdlib")])
    with browsing((tmp_path / "page.html").as_uri()) as page:
        assert look(page) == []
