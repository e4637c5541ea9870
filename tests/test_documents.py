"""The code in README.md and docs does what they say."""

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cqs.__main__ import main

ROOT = Path(__file__).parent.parent


def blocks_of(page, language):
    blocks = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert blocks, f"{page} has no {language}"
    return blocks


@pytest.mark.parametrize(
    "page", [pytest.param("README.md", marks=pytest.mark.ray), "docs/patterns.md"]
)
def test_the_code_of_a_page_runs(page):
    """Blocks run in one namespace; what follows a prompt must print what is shown."""
    names = {}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for block in blocks_of(page, "python"):
        if block.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block, names, page, page, 0)
            assert runner.run(test, clear_globs=False).failed == 0
            names = test.globs
        else:
            exec(compile(block, page, "exec"), names)


def test_the_commands_of_the_patterns_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in "".join(blocks_of("docs/patterns.md", "bash")).splitlines():
        name, *arguments = shlex.split(command)
        assert name == "cqs" and main(arguments) == 0
    assert (tmp_path / "owners-longformer-w7.png").exists() and capsys.readouterr().out


def test_the_script_of_the_distributed_page_runs(tmp_path):
    script, _ = blocks_of("docs/distributed.md", "python")
    (tmp_path / "shards.py").write_text(script)
    (command,) = blocks_of("docs/distributed.md", "bash")
    name, *arguments = shlex.split(command)
    assert name == "torchrun"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": ""},
        check=True,
        timeout=120,
    )


@pytest.mark.ray
def test_the_cluster_of_the_distributed_page_runs(tmp_path):
    _, script = blocks_of("docs/distributed.md", "python")
    (tmp_path / "cluster.py").write_text(script)
    subprocess.run([sys.executable, tmp_path / "cluster.py"], check=True, timeout=240)
