"""Models on a device that is not the CPU, of which there need be none: see `another_device`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from perspectron.presets import DESIGNS

VALUES = {"drm", "drm2", "perspective-experts"}
"""Designs in which numbers decide what is computed."""
WAITS = {False: {"model.py: placed"}, True: {"model.py: placed", "masks.py: _finite", "cache.py: _remember"}}


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch makes no backend in Python",
)
def test_a_model_is_on_one_device_and_hardly_waits_for_it():
    """Forward, backward, a prompt and a step. The host waits for a learned position's bound, and where documents begin
    for whether all is finite and how long the longest is; for nothing else, and no tensor comes from the CPU."""
    designs = [name for name in DESIGNS if name not in VALUES and not name.startswith("perspective[")]
    designs += ["perspective2@", "transformer@"]
    root = Path(__file__).parent
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.another_device",
            *designs,
        ],  # as a file it would take tests/triton for Triton
        env=os.environ | {"PYTHONPATH": str(root.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(designs) + 2
    for line in lines:
        assert line.get("elsewhere") == [], line
        assert line["waits"].keys() <= WAITS[line["resets"]], line
