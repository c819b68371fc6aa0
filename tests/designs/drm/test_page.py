"""The page of `perspectron drm geometry` in a browser."""

import pytest

import perspectron
from perspectron import presets
from perspectron.designs.drm import geometry_command
from perspectron.designs.drm.geometry import Options, measure
from tests.browser import CHROMIUM, browsing, look
from tests.designs.drm.test_geometry import FEW, TINY

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser")


@pytest.mark.slow
def test_everyone_can_read_it(tmp_path):
    model = perspectron.build(presets.get("drm", **TINY)).requires_grad_(False)
    found = measure(model, [i * i % 40 for i in range(2400)], Options(**FEW))
    (tmp_path / "geometry.html").write_text(geometry_command.page(found))
    with browsing((tmp_path / "geometry.html").as_uri()) as page:
        assert look(page) == []
