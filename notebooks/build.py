"""Run the notebooks and store their outputs, without what changes from run to run:

    python notebooks/build.py                  # all; or name some
    python notebooks/build.py notebooks/2_from_critique_to_delta.ipynb

Each runs in a kernel of its own. Times, warnings and the kernel's version are left out, so that
a second build gives the same bytes wherever the numbers are the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
PLAIN = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
         "language_info": {"name": "python"}}
# No hub, and one thread, which is enough for a model this small.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def executed(path: Path, timeout: int = 900) -> nbformat.NotebookNode:
    """The notebook with the outputs of a clean kernel.

    Raises CellExecutionError where a cell fails, CellTimeoutError after `timeout` seconds.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3",
                            record_timing=False, coalesce_streams=True,
                            resources={"metadata": {"path": str(HERE)}})
    # The kernel's own log is dropped; an error in a cell raises here.
    client.execute(env=os.environ | ENVIRONMENT, stderr=subprocess.DEVNULL)
    return notebook


def without_chance(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The same without standard error, and with numbered cells and plain metadata."""
    notebook.metadata = nbformat.from_dict(PLAIN)
    for number, cell in enumerate(notebook.cells, 1):
        cell.id, cell.metadata = f"cell-{number:02d}", nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return notebook


def main():
    """Run the notebooks named, or all beside this file."""
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(HERE.glob("*.ipynb")):
        started = time.time()
        nbformat.write(without_chance(executed(path)), path)
        print(f"{path.name}: {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
