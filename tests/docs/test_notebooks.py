"""The notebooks of docs/notebooks run from their first cell to their last."""

import shutil

import nbformat
import pytest
from docs.pages import ROOT
from nbclient import NotebookClient

CELL_S = 900
"""Seconds that a cell may take: many times what it takes on a quiet machine, since a busy one is no fault."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    folder = tmp_path / "docs" / "notebooks"
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=CELL_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    assert all(cell.execution_count for cell in book.cells if cell.cell_type == "code")
