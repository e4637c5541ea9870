"""Install the wheel as a new user would, and do what README.md says in an empty directory.

``make check-dist`` builds and checks what would be published. ``make check-package`` then makes a
clean environment, installs from the registry, and runs every command and snippet.
"""

import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from support.pages import ROOT, fences, joined

TORCH = re.search(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.M)[0]
"""By its exact version: a range would take the newest build."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", top / "dist", ROOT]
        run(*build, quiet=True)
        (wheel,), (sdist,) = (top / "dist").glob("*.whl"), (top / "dist").glob("*.tar.gz")
        check_what_is_published(top, wheel, sdist)
        run_the_notebooks(top, wheel)
        if sys.argv[1:] != ["dist"]:
            follow_the_readme(top, wheel)


def check_what_is_published(top: Path, wheel: Path, sdist: Path) -> None:
    tools = make_environment(top / "tools")
    pinned = "--constraint", ROOT / "constraints.txt"
    run(tools / "pip", "install", "--quiet", *pinned, "twine", "cffconvert")
    run(tools / "twine", "check", "--strict", wheel, sdist)
    run(tools / "cffconvert", "--validate", "--infile", ROOT / "CITATION.cff")


def run_the_notebooks(top: Path, wheel: Path) -> None:
    """Run the notebooks with the wheel and the dependencies that are installed here.

    A path in a ``.pth`` file adds the packages of a directory, and no editable ones.
    """
    environment = make_environment(top / "notebooks")
    run(environment / "pip", "install", "--quiet", "--no-deps", wheel)
    (site,) = (top / "notebooks").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pytest = environment / "python", "-m", "pytest", "--noconftest", "-k", "small_sizes"
    run(*pytest, ROOT / "tests/test_notebooks.py", cwd=environment)  # its HOME, too


def follow_the_readme(top: Path, wheel: Path) -> None:
    """Install as the page says, then run its snippets in one process, then its commands."""
    empty = top / "empty"
    empty.mkdir()
    environment = make_environment(top / "clean")
    run(environment / "pip", "install", "--quiet", TORCH)
    found = list(fences("README.md"))
    commands = [
        shlex.split(line, comments=True)
        for fence in found
        if fence.language in ("bash", "sh")
        for line in joined(fence.code)
    ]
    assert ["pip", "install", ".[ray,plots]"] in commands
    run(environment / "pip", "install", "--quiet", f"{wheel}[ray,plots]")
    script = "\n".join(f.code for f in found if (f.language, f.file) == ("python", None))
    (empty / "readme.py").write_text(script)
    run(environment / "python", "readme.py", cwd=empty)
    for name, *words in commands:
        if name == "cqs":
            run(environment / "cqs", *words, cwd=empty)
    run(environment / "cqs", "demo", cwd=empty)


def make_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin"


def run(*command: object, cwd: Path | None = None, quiet: bool = False) -> None:
    words = list(map(str, command))
    print("$", shlex.join(words), flush=True)
    subprocess.run(
        words,
        cwd=cwd,
        check=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd or Path.home())},
        stdout=subprocess.DEVNULL if quiet else None,
    )


if __name__ == "__main__":
    main()
