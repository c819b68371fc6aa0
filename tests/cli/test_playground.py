"""The page that the quickstart ends with: whole, alone, and of this model."""

import re
from html.parser import HTMLParser

import pytest
from markupsafe import Markup

import perspectron
from perspectron import presets
from perspectron.cli.options import printable
from perspectron.data import Tokenizer
from perspectron.decode.generate import generate
from perspectron.decode.sampling import SamplingConfig
from perspectron.designs.perspective import playground

SIZES = {"d_model": 32, "layers": 2, "hidden": 32, "heads": 2, "vocab_size": 300}
CURVE = '<svg viewBox="0 0 1 1"><style>:root{}</style><title>loss &amp; more</title></svg>'


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([playground.TEXT * 9], 300)


def page_of(model, tokenizer, folder, curve=True):
    if curve:
        (folder / "loss.svg").write_text(CURVE)
    playground.write(folder / "page.html", model, tokenizer, folder / "loss.svg", [("text", "a <b> & c")])
    return (folder / "page.html").read_text()


class Balanced(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.open = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img", "iframe")
        if tag not in ("meta", "use", "image", "path", "rect", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if tag not in ("path", "image", "use", "rect", "line"):
            assert self.open.pop() == tag


def test_it_shows_samples_the_curve_and_the_memory_of_each_recurrent_layer(tokenizer, tmp_path):
    model = perspectron.build(presets.get("perspective", **SIZES, kv_heads=1, period=2))
    page = page_of(model, tokenizer, tmp_path)
    Balanced(page)
    assert "http" not in page.replace("http://www.w3.org", "") and "@import" not in page
    assert "a &lt;b&gt; &amp; c" in page and "loss &amp; more" in page
    assert len(re.findall('aria-label="Half-lives"', page)) == 1 and "block 0" in page and "⏎" in page
    for temperature in playground.TEMPERATURES:
        sampling = SamplingConfig(temperature=temperature, min_p=0.02, seed=playground.SEED)
        for text in generate(
            model, tokenizer, list(playground.PROMPTS), max_tokens=60, sampling=sampling
        ).texts:
            assert Markup.escape(printable(text)) in page


def test_a_model_without_decays_has_no_pictures_of_them(tokenizer, tmp_path):
    model = perspectron.build(presets.get("transformer", **SIZES))
    page = page_of(model, tokenizer, tmp_path, curve=False)
    Balanced(page)
    assert "Half-lives" not in page and "How it learned" not in page
