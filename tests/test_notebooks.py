"""Notebooks run, at other sizes than they are stored with, and are stored as they ran."""

import re
from functools import partial
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

SMALL = {
    "1-quorums": {"NUM_TOKENS": 14, "NUM_TASKS": 4, "MOST_TASKS": 8},
    "2-exact-attention": {"NUM_TOKENS": 150, "NUM_TASKS": 4, "NUM_HEADS": 2, "HEAD_DIM": 16}
    | {"TASK_COUNTS": (1, 3)},
    "3-sparse-patterns": {"NUM_TOKENS": 96, "NUM_TASKS": 3, "MANY_TOKENS": 5000},
    "4-on-a-cluster": {"NUM_TOKENS": 4096, "NUM_HEADS": 2, "HEAD_DIM": 16, "NUM_TASKS": 21}
    | {"NUM_PROCESSES": 2},
    "5-scaling": {"NUM_TOKENS": 256, "NUM_HEADS": 2, "HEAD_DIM": 16, "TASK_COUNTS": (1, 2, 7)}
    | {"REPEATS": 1, "DEVICE_COUNTS": (2, 8, 64, 512), "MANY_TOKENS": 2**20, "MANY_HEADS": 32},
    "6-in-a-model": {"NUM_TASKS": 3, "NUM_TOKENS": 32, "NUM_STEPS": 3},
    "7-bottleneck": {"TOKEN_COUNTS": (32, 64), "WINDOW": 8, "REPEATS": 1},
    "8-many-hosts": {"HOST_COUNTS": (4, 7), "NUM_TOKENS": 84, "NUM_HEADS": 4, "HEAD_DIM": 8}
    | {"MBIT": 10},
    "9-undivided-heads": {"NUM_RANKS": 2, "NUM_STEPS": 1, "NUM_TOKENS": 60, "NUM_HEADS": 6}
    | {"HEAD_DIM": 8, "GPU_COUNTS": (2, 4, 7)},
}
"""Notebook -> values in place of those that its first cell sets."""
ON_RAY = {"4-on-a-cluster"}
FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cells):
    """The outputs of all cells, none of which may be an error or a warning."""
    outputs = [output for cell in cells for output in cell.outputs]
    for output in outputs:
        assert output.output_type in ("stream", "display_data", "execute_result"), output
        assert output.get("name") != "stderr", output.text
    return outputs


def pictures(outputs):
    return sum("image/png" in output.get("data", {}) for output in outputs)


def text_of(outputs):
    texts = (output.get("text") or output["data"].get("text/plain", "") for output in outputs)
    return "\n".join(texts)


@pytest.fixture(scope="module")
def execute():
    """Execute notebooks in one kernel: none knows the names of another, but imports are shared."""
    resources = {"metadata": {"path": str(FOLDER)}}
    nothing = nbformat.v4.new_notebook()
    client = NotebookClient(nothing, kernel_name="python3", timeout=120, resources=resources)

    def execute(notebook, **options):
        client.nb = notebook
        client.execute(**options)

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MPLBACKEND", raising=False)
        execute(nothing, cleanup_kc=False)
    yield partial(execute, cleanup_kc=False)
    execute(nothing)  # which ends the kernel


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ray] * (name in ON_RAY)) for name in NOTEBOOKS]
)
def test_a_notebook_runs_at_small_sizes(name, execute):
    notebook, cells = read(name)
    stored = pictures(shown(cells))
    assert all(variable in cells[0].source for variable in SMALL[name])
    values = (f"{variable} = {value!r}" for variable, value in SMALL[name].items())
    cells[0].source = "\n".join(["%reset -f", cells[0].source, *values])
    execute(notebook)
    assert pictures(shown(cells)) == stored
    if name == "4-on-a-cluster":
        assert re.search(
            r"bitwise identical: True\nfailed workers: \[\d+\]\nre-executed tasks: \(\d+,",
            text_of(shown(cells)),
        )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_stored_with_its_outputs(name):
    notebook, cells = read(name)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert "execution" not in {key for cell in cells for key in cell.metadata}
    assert pictures(shown(cells)) >= 2
    leaked = re.search(
        r"/(home|root|tmp|work|Users|usr|opt)/|\.py:\d|[Ww]arning", text_of(shown(cells))
    )
    assert not leaked, leaked
    assert (FOLDER / f"{name}.ipynb").stat().st_size <= 600_000
    assert re.match(r'# %cd \S+\n# %pip install -q "\.\[[a-z,]+\]"\n', cells[0].source)
