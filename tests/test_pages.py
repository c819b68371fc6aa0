"""Pages that people open: no violation of axe's rules (contrast, names, order, what the keyboard reaches), in light and
dark, on a wide screen and on a phone; nothing in the console, and nothing wider than the phone.

    python -m tests.test_pages RUN docs/images

takes pictures of the report and of a run's page.
"""

import contextlib
import io
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from perspectron.cli.main import main
from perspectron.train.checkpoint import load_config
from perspectron.train.page import Shown, course, read_samples, rendered
from perspectron.util.files import write_text
from tests.browser import CHROMIUM, browsing, look

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]


def test_rules_are_seen_to_be_broken(tmp_path):
    path = tmp_path / "page.html"
    path.write_text('<html><body><img src="data:,"><p style="color:#ddd">pale</p></body></html>')
    with browsing(path.as_uri()) as page:
        found = " ".join(look(page))
    assert all(rule in found for rule in ("image-alt", "color-contrast", "html-has-lang"))


def test_the_report_has_no_violations():
    with browsing((ROOT / "results" / "compare.html").as_uri()) as page:
        assert look(page) == []


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """A quickstart, of which nothing is printed."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "text.txt").write_text("the cat sat on the mat, and the dog on the cat.\n" * 400)
    with contextlib.redirect_stdout(io.StringIO()):
        command = ["quickstart", "--out", str(folder / "tour"), "--data", str(folder / "text.txt")]
        assert main([*command, "--steps", "4"]) == 0
    return folder / "tour"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["index.html", "perspective/index.html", "transformer/index.html"])
def test_the_quickstarts_pages_have_no_violations(tour, name):
    with browsing((tour / name).as_uri()) as page:
        assert look(page) == []
        for summary in page.locator("summary").all():
            summary.click()
        assert look(page) == []


def test_the_page_of_a_training_loads_itself_anew_until_it_ends(tour, tmp_path):
    run, path = tour / "perspective", tmp_path / "index.html"
    config, history, samples = load_config(run), course(run), read_samples(run)

    def write(state, kind, every=0.3):
        write_text(path, rendered(run, config, history, samples, Shown(state, kind, every=every)))

    write("training, first", "training", 1000.0)
    with browsing(path.as_uri()) as page:
        assert look(page) == []
        write("training, first", "training")
        page.reload()
        page.locator("summary").last.click()
        write("training, second", "training")
        expect(page.get_by_role("status")).to_contain_text("second")
        expect(page.locator("details").last).to_have_attribute("open", "")
        page.get_by_role("checkbox").uncheck()
        write("training, third", "training")
        page.wait_for_timeout(1000)
        expect(page.get_by_role("status")).to_contain_text("second")
        page.reload()
        expect(page.get_by_role("checkbox")).not_to_be_checked()
        page.get_by_role("checkbox").check()
        write("finished", "done")
        expect(page.get_by_role("status")).to_contain_text("finished")
        expect(page.get_by_role("checkbox")).to_have_count(0)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_wide_table_scrolls_by_the_keyboard_and_shows_it(width):
    """On a phone those of the reference do; each region has a name, and a shadow where more of it is."""
    size = {"width": width, "height": 800}
    with browsing((ROOT / "results" / "reference" / "results.html").as_uri(), viewport=size) as page:
        regions = page.get_by_role("region").and_(page.locator(".scroll")).all()
        wide = [region for region in regions if region.evaluate("e => e.scrollWidth > e.clientWidth")]
        assert regions and (width > 1000 or wide)
        for region in wide:
            assert region.get_attribute("aria-label")
            assert "gradient" in region.evaluate("e => getComputedStyle(e).backgroundImage")
            region.focus()
            page.keyboard.press("ArrowRight")
            page.wait_for_function("e => e.scrollLeft > 0", arg=region.element_handle())


def test_texts_of_figures_are_readable_on_a_phone():
    """No smaller than 8.5 pixels on the screen."""
    for path in (ROOT / "results" / "reference" / "results.html", ROOT / "results" / "compare.html"):
        with browsing(path.as_uri(), viewport={"width": 390, "height": 800}) as page:
            heights = page.locator("figure svg text").evaluate_all(
                "all => all.map(e => parseFloat(getComputedStyle(e).fontSize) "
                " * Math.hypot(e.getScreenCTM().c, e.getScreenCTM().d))"
            )
            assert heights and min(heights) >= 8.5


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
    """The first screen of the report and of a run's page in both schemes and on a phone."""
    pages = {"report": ROOT / "results" / "reference" / "results.html", "run": run / "index.html"}
    for name, path in pages.items():
        for kind, scheme, width in (
            ("light", "light", 1300),
            ("dark", "dark", 1300),
            ("phone", "light", 390),
        ):
            size = {"width": width, "height": 800}
            with browsing(path.as_uri(), color_scheme=scheme, viewport=size) as page:
                page.screenshot(path=folder / f"{name}-{kind}.png")


if __name__ == "__main__":
    pictures(Path(sys.argv[1]), Path(sys.argv[2]))
