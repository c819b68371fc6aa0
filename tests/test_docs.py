"""The documentation: blocks of code run, citations and links lead somewhere, and the site needs no network.

    mkdocs build -d SITE && python -m tests.test_docs SITE

says what axe finds wrong on any of its pages, and with a folder after SITE takes pictures of the first one into it.
"""

import contextlib
import functools
import http.server
import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path

import pytest

from perspectron.cli import compare, scale
from perspectron.cli.main import main
from tests.browser import AA, CHROMIUM, browsing, look
from tests.gguf_models import folder_of, write

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(\S*) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
BENCHMARK = re.compile(r"\bpython (-m )?benchmarks[./](\w+)")
CITATION = re.compile(r"\b(docs/[\w/-]+\.md)(?:#([\w-]+))?")
RUN = ("guides/your-text.md", "guides/keep-a-memory.md", "guides/choose-a-design.md")
RUN += ("guides/bring-a-model.md", "guides/serve.md")
RUN += ("guides/quantise-and-stream.md", "guides/transformers.md", "guides/fine-tune.md", "guides/convert.md")
RUN += ("guides/onnx.md", "guides/python.md", "reference/from-fla.md")
"""In this order: later pages use the run of the first."""
SIZES = "layers=3 d_model=16 hidden=16 rank=4 heads=2 kv_heads=1 window=16"
STEPS = "--steps 3 --batch-size 2 --seq-len 32 --eval-every 0 --save-every 0 --eval-tokens 64 --dtype float32"
SMALL = {
    "convert": "--dtype float32",
    "train": f"{STEPS} --set {SIZES} vocab_size=300",
    "quantize": "--windows 2 --tokens 64",
    "eval": "--tokens 64",
    "scale": "--sizes 70k,140k --per-parameter 0.1 --vocab-size 300 --seq-len 32 --dtype float32",
}
"""Options that a reader's command is given here beside its own, so that it takes seconds."""


def pages() -> list[Path]:
    return sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "results").glob("*.md")])


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, label, text) of every block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and mkdocs make them (alike for ASCII with single spaces)."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [
        unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode() for heading in headings
    ]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where a reader sits, with a text."""
    folder = tmp_path_factory.mktemp("reader")
    lines = (f"KING: QUEEN number {i} went over {i * 7 % 13} hills to the sea.\n" for i in range(2000))
    (folder / "play.txt").write_text("".join(lines))
    write(folder / "model.gguf", folder_of("llama", folder / "model-hf"), "llama")
    return folder


@pytest.mark.slow
def test_every_block_of_the_guides_runs(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    trained = []  # a comparison is planned here, and trained in tests/compare
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    for module in (compare, scale):
        monkeypatch.setattr(module, "finish", lambda out, *_: trained.append(out) or 0)
    for name in RUN:
        for language, _, code in blocks(DOCS / name):
            if language == "python":
                exec(compile(code, name, "exec"), {})
                continue
            if language == "text" and name == "guides/serve.md":
                continue  # a server does not end
            assert language == "sh", name
            for line in code.splitlines():
                program, command, *rest = shlex.split(line)
                resumed = "--resume" in rest
                small = [] if resumed else SMALL.get(command, "").split()
                small = STEPS.split() if "--init" in rest else small  # of the sizes of that run
                if "--minutes" in rest:  # tests/eval/test_budget.py and tests/cli ask what they lead to
                    at = rest.index("--minutes")
                    del rest[at : at + 2]
                assert program == "perspectron"
                assert main([command, *rest, *small]) == 0, (name, line, capsys.readouterr().err)
    assert (
        trained
        == [Path("runs/compared")] * 2 + [Path("runs/scaled/70k-0.1"), Path("runs/scaled/140k-0.1")] * 2
    )


def test_a_served_model_takes_few_lines_of_python():
    language, _, first = blocks(DOCS / "guides" / "python.md")[0]
    assert language == "python" and len(first.splitlines()) <= 25


def test_blocks_elsewhere_are_equations_or_run_by_a_test_of_their_own():
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).as_posix()
        if name not in (*RUN, "add-a-mixer.md"):  # tests/designs/test_add_a_mixer.py
            files = {"nginx", "json", "yaml"} if name == "guides/several-servers.md" else set()
            assert {language for language, *_ in blocks(page)} <= {"text", *files}, name
            for language, _, text in blocks(page):
                if language == "json":
                    json.loads(text)


def test_what_contributors_are_told_to_run_is_what_has_to_pass():
    told = [
        line
        for _, label, code in blocks(ROOT / "CONTRIBUTING.md")
        if label == "checks"
        for line in code.splitlines()
    ]
    must = (ROOT / ".ci" / "run").read_text() + (ROOT / "README.md").read_text()
    assert len(told) >= 5
    assert [line for line in told if line not in must] == []


def test_citations_name_a_page_and_a_heading_that_exist():
    sources = [*pages(), ROOT / "perspectron" / "cli" / "catalogue.json"]
    for part in ("perspectron", "claims", "benchmarks", "tests"):
        sources += (ROOT / part).rglob("*.py")
    cited = {
        (source.relative_to(ROOT).as_posix(), *match)
        for source in sources
        for match in CITATION.findall(source.read_text(encoding="utf-8"))
    }
    assert len({page for _, page, _ in cited if page.startswith("docs/designs/")}) == 5
    lost = [
        (source, page, anchor)
        for source, page, anchor in sorted(cited)
        if not (ROOT / page).is_file() or (anchor and anchor not in anchors(ROOT / page))
    ]
    assert lost == []


def test_benchmarks_that_pages_name_start_as_they_say():
    """A script imports what lies beside it, a module does not."""
    named = {match for page in pages() for match in BENCHMARK.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 15
    for module, name in sorted(named):
        text = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
        assert not (module and "\nimport common\n" in text), name


def test_nothing_cites_what_a_user_cannot_open():
    hidden = re.compile(r"\bseeds/|\bdecisions(\.md| §)")
    sources = [*pages(), *(ROOT / "claims").rglob("*.py")]
    sources += [path for path in (ROOT / "perspectron").rglob("*") if path.suffix in (".py", ".json", ".j2")]
    found = [path for path in sources if hidden.search(path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_in_the_repository(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in (link or image for link, image in LINK.findall(text)):
        if re.match(r"https?://", target):
            continue
        place, _, anchor = target.partition("#")
        there = (page.parent / place).resolve() if place else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    site = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    quiet = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(build, cwd=ROOT, env=os.environ | quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.mark.slow
def test_the_site_fetches_nothing(site):
    fetched = re.compile(r"""(?:src=|<link[^>]+href=|url\(|@import )["']?(?:https?:)?//[^"')\s]+""")
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert fetched.findall(path.read_text(encoding="utf-8")) == [], path


def test_the_site_has_every_page_and_citations_in_the_reference_are_links(site):
    assert {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")} <= {
        path.relative_to(site) for path in site.rglob("*.html")
    }
    for name in ("index", "results", "changelog", "contributing", "security"):
        assert (site / f"{name}.html").is_file()
    mixers = (site / "reference" / "mixers.html").read_text(encoding="utf-8")
    assert 'href="../designs/perspective.html#the-recurrence"' in mixers
    assert 'id="perspectron.designs.perspective.pdr.PDRConfig"' in mixers


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(site):
    """The site behind a server, without which its search does not work."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def address(site):
    with serving(site) as address:
        yield address


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize(
    "name",
    [
        "index.html",
        "guides/serve.html",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("reference/decoding.html", "reference/package.html", "results.html")
        ),
    ],
)
def test_the_site_can_be_read_by_everyone(address, name):
    with browsing(f"{address}/{name}") as page:
        assert look(page, AA) == []
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent.trim()") == "Skip to content"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [1300, 390])
def test_a_term_is_found_on_the_site(address, width):
    with browsing(f"{address}/index.html", viewport={"width": width, "height": 900}) as page:
        if width == 390:  # behind the magnifying glass
            page.locator("label[for=__search].md-header__button").click()
        page.get_by_role("textbox", name="Search").fill("bisect")
        page.locator(".md-search-result__item").first.get_by_role("link").first.click()
        page.wait_for_url("**/past-of-a-memory.html*")
        assert page.locator("main h1").inner_text().startswith("The past of a memory")
        assert page.locator(".md-content").get_by_text("bisect").first.is_visible()


def test_every_file_of_the_results_is_listed_with_what_wrote_it(site):
    listed = (site / "results-files.html").read_text(encoding="utf-8")
    files = [path for path in (ROOT / "results").rglob("*.*") if path.suffix != ".md"]
    assert len(files) > 100
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        assert (site / name).read_bytes() == path.read_bytes() and f'href="{name}"' in listed, name
    assert "python benchmarks/contexts.py" in listed


def all_pages(site: Path) -> int:
    wrong = 0
    with serving(site) as address:
        for path in sorted(site.rglob("*.html")):
            with browsing(f"{address}/{path.relative_to(site)}") as page:
                found = look(page, AA)
            print(path.relative_to(site), *found or ["as it should be"], sep="\n  ", flush=True)
            wrong += len(found)
    return min(wrong, 1)


def pictures(site: Path, folder: Path) -> None:
    for kind, scheme, width in (("light", "light", 1300), ("dark", "dark", 1300), ("phone", "light", 390)):
        size = {"width": width, "height": 844}
        with (
            serving(site) as address,
            browsing(f"{address}/index.html", color_scheme=scheme, viewport=size) as page,
        ):
            page.screenshot(path=folder / f"site-{kind}.png")


if __name__ == "__main__":
    sys.exit(pictures(*map(Path, sys.argv[1:])) if sys.argv[2:] else all_pages(Path(sys.argv[1])))
