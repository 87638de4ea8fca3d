"""Every notebook runs from top to bottom, and is kept without outputs."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

SHORT = {"bias_maps": "epochs, patch_size = 1, 4", "relativize": "before_epochs, epochs = 1, 1"}
"""In place of the cell tagged ``parameters``; VITREL_WHOLE_NOTEBOOKS in the environment leaves it."""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(path.parents[1] / "configs")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads on a core that is busy elsewhere wait for each other
    notebook = nbformat.read(path, as_version=4)
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    if "VITREL_WHOLE_NOTEBOOKS" not in os.environ:
        cell.source = SHORT[path.stem]
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    pictures = [o for c in notebook.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) >= 2, "no picture was drawn"
    if "VITREL_SCREENSHOTS" in os.environ:
        nbformat.write(notebook, Path(os.environ["VITREL_SCREENSHOTS"]) / path.name)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_kept_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
