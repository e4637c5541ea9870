"""Kernels compile: what the interpreter runs, a compiler may still refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "arguments",
    [["90"], ["89", "128"], *([target, "128", "256"] for target in ("80", "100", "120"))],
    ids=" ".join,
)
def test_all_kernels_compile_for_every_gpu(tmp_path, arguments):
    """For 9.0 all kernels, for others the plain ones with these head_dims."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    program = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run(
        [sys.executable, program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
