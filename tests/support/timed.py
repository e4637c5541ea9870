"""Run a command and print its wall time and CPU time: ``python3 tests/support/timed.py COMMAND``.

The CPU time is that of the whole machine meanwhile, so that daemons of Ray count.
"""

import os
import subprocess
import sys
import time
from pathlib import Path


def cpu_seconds() -> float:
    """Return the seconds for which the cores of this machine have not been idle (``man proc``)."""
    user, nice, system, _idle, _iowait, irq, softirq = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    wall, cpu = time.monotonic(), cpu_seconds()
    status = subprocess.run(sys.argv[1:]).returncode
    wall, cpu = time.monotonic() - wall, cpu_seconds() - cpu
    print(f"{sys.argv[1:]!r:.70}: {wall:.0f} s, {cpu:.0f} s of CPU", flush=True)
    sys.exit(status)
