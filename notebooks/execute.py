"""Run notebooks, by default all of this folder, and store them with their outputs."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from tqdm import tqdm

for path in tqdm(
    [Path(name) for name in sys.argv[1:]] or sorted(Path(__file__).parent.glob("*.ipynb"))
):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": path.parent}},
    ).execute()
    nbformat.write(notebook, path)
