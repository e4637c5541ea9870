"""Programs beside this file, which tests run in processes of their own."""

import os
import subprocess
import sys

from support.pages import ROOT


def run_program(name, *arguments):
    """Run a program on one thread, and return what it prints."""
    folders = "", "tests", "tests/distributed"
    paths = os.pathsep.join([*(str(ROOT / folder) for folder in folders), *sys.path])
    command = [sys.executable, ROOT / "tests/integrations" / name, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def complaint_of(call):
    """Return the error that a call raises as text, or None."""
    try:
        call()
    except (NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None
