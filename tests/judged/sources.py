"""Files of packages that are read, not installed: unpacked into the ignored folder ``.judged``."""

import shutil
import subprocess
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".judged"


def unpacked(requirement):
    """Return the folder of a package's source distribution, or of its wheel if it has no other.

    Args:
        requirement: Name and exact version, such as ``"natten==0.21.7"``.
    """
    name = requirement.replace("==", "-")
    target = FOLDER / name
    if not target.exists():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
            archive = _download(requirement, scratch)
            is_wheel = archive.suffix == ".whl"
            content = Path(scratch, "content")
            shutil.unpack_archive(archive, content, "zip" if is_wheel else None)
            (content if is_wheel else next(content.iterdir())).rename(target)
    return target


def _download(requirement, scratch):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
    for options in (["--no-binary", ":all:", "--no-build-isolation"], []):
        if not subprocess.run([*command, *options, requirement], capture_output=True).returncode:
            return next(path for path in Path(scratch).iterdir() if path.is_file())
    raise ModuleNotFoundError(f"pip cannot download {requirement}", name=requirement)


def module_of(path):
    """Import a file by itself, without the package that it belongs to."""
    spec = spec_from_file_location(f"judged_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
