"""The notebook runs from its first cell to its last, with fewer steps."""

import asyncio
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "notebooks" / "tour.ipynb"
STEPS = "STEPS = 300"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_tour_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells), (
        "it is kept without outputs"
    )
    (training,) = (cell for cell in cells if STEPS in cell.source)
    training.source = training.source.replace(STEPS, "STEPS = 3")
    known = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "IPYTHONDIR": str(tmp_path / "ipython")}
    client = NotebookClient(notebook, timeout=int(PATIENCE), resources={"metadata": {"path": str(tmp_path)}})
    asyncio.run(client.async_execute(env=os.environ | known))
    said = [output for cell in cells for output in cell.outputs]
    assert any("bytes of memory, however long" in output.get("text", "") for output in said)
    assert any("image/png" in output.get("data", {}) for output in said), "the gates are drawn"
    assert (tmp_path / "tour" / "hf" / "model.safetensors").is_file()
