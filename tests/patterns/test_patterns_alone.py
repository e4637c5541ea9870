"""Patterns need neither torch nor ray."""

import subprocess
import sys


def test_patterns_need_neither_torch_nor_ray():
    statements = (
        "from cqs.patterns import *",
        "(strided(8) | sliding_window(3)).bind(10**9).count(range(99), range(99))",
        "causal().to_mask(9)",
        "import sys",
        "print(*sys.modules)",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(statements)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert "cqs.patterns.piece" in imported
    assert not imported & {"torch", "ray", "triton", "matplotlib"}
