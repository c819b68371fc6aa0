"""Pages that people open: no violation of axe's rules (contrast, names, order, what the keyboard reaches), in light and
dark, on a wide screen and on a phone; nothing in the console, and nothing wider than the phone.

    python -m tests.test_pages RUN docs/images

takes pictures of the report and of a run's playground.
"""

import sys
import tempfile
from pathlib import Path

import pytest

import perspectron
from perspectron import presets
from perspectron.data import Tokenizer
from perspectron.designs.perspective import playground
from perspectron.train import metrics
from tests.browser import CHROMIUM, browsing, look

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


def test_rules_are_seen_to_be_broken(tmp_path):
    path = tmp_path / "page.html"
    path.write_text('<html><body><img src="data:,"><p style="color:#ddd">pale</p></body></html>')
    with browsing(path.as_uri()) as page:
        found = " ".join(look(page))
    assert all(rule in found for rule in ("image-alt", "color-contrast", "html-has-lang"))


def test_the_report_has_no_violations():
    with browsing((ROOT / "results" / "compare.html").as_uri()) as page:
        assert look(page) == []


def test_the_playground_has_no_violations(tmp_path):
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
    metrics.draw(lines, tmp_path / "loss.svg")
    playground.write(tmp_path / "page.html", model, tokenizer, tmp_path / "loss.svg", [("text", "stdlib")])
    with browsing((tmp_path / "page.html").as_uri()) as page:
        assert look(page) == []


def test_the_demo_has_no_violations(tmp_path):
    from perspectron.designs.adr import demo

    model = {"parameters": 1000, "likeliest": [[" Rome", 0.8]] + [[" ,", 0.1]] * 4,
             "asked": {"told": 3, "unseen": 2, "unknown": 1},
             "right": {"told": 0.9, "unseen": 0.8, "unknown": 0.2}}  # fmt: skip
    literal = {"text": " ba", "token": 3, "leak": 0.2, "again": 0.1}
    results = {"prompt": demo.PROMPT, "steps": 6, "seconds": 5.0, "literal": literal,
               "models": {"adr": model, "gpt2": model}}  # fmt: skip
    (tmp_path / "demo.html").write_text(demo.page(results))
    with browsing((tmp_path / "demo.html").as_uri()) as page:
        assert look(page) == []


def pictures(run: Path, folder: Path) -> None:
    """The first screen of the report in both schemes and on a phone, and the gates of a run's playground."""
    report = ROOT / "results" / "reference" / "results.html"
    for kind, scheme, width in (("light", "light", 1300), ("dark", "dark", 1300), ("phone", "light", 390)):
        size = {"width": width, "height": 800}
        with browsing(report.as_uri(), color_scheme=scheme, viewport=size) as page:
            page.screenshot(path=folder / f"report-{kind}.png")
    model, tokenizer = perspectron.load(run)
    path = Path(tempfile.mkdtemp()) / "page.html"
    playground.write(path, model, tokenizer, run / "loss.svg", [("text", "a play")])
    for scheme in ("light", "dark"):
        with browsing(path.as_uri(), color_scheme=scheme, viewport={"width": 1100, "height": 500}) as page:
            page.locator("svg").last.screenshot(path=folder / f"gates-{scheme}.png")


if __name__ == "__main__":
    pictures(Path(sys.argv[1]), Path(sys.argv[2]))
