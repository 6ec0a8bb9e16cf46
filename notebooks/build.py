"""Run the notebooks and store their outputs:

    python notebooks/build.py                                             # all notebooks
    python notebooks/build.py notebooks/2_from_critique_to_delta.ipynb    # one notebook

Each notebook runs in a new kernel. Times, warnings and the kernel's version are removed, so
that a second build writes the same bytes if it computes the same numbers.
"""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}
# The notebooks need no network, and one thread is enough for their small model.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def execute_notebook(path: Path) -> nbformat.NotebookNode:
    """Run a notebook in a new kernel and return it with its outputs.

    Raises CellExecutionError if a cell fails, and CellTimeoutError if a cell runs longer than
    900 seconds.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=900, kernel_name="python3",
                            record_timing=False, coalesce_streams=True,
                            resources={"metadata": {"path": str(HERE)}})
    # Discard the kernel's log. An error in a cell still raises an exception here.
    client.execute(env=os.environ | ENVIRONMENT, stderr=subprocess.DEVNULL)
    return notebook


def remove_run_details(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove standard error, number the cells, and set fixed metadata, in place."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main():
    """Run the notebooks given on the command line, or all notebooks in this directory."""
    paths = [Path(argument) for argument in sys.argv[1:]] or sorted(HERE.glob("*.ipynb"))
    for path in paths:
        nbformat.write(remove_run_details(execute_notebook(path)), path)


if __name__ == "__main__":
    main()
