"""What is published is complete, carries nothing else, and is the same however it is built."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import cqs

pytestmark = [pytest.mark.slow, pytest.mark.long]  # `make check-dist` looks at them too

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution, the wheel built from it, and the wheel built from the tree."""
    folders = [tmp_path_factory.mktemp(name) for name in ("from_sdist", "from_tree")]
    for folder, options in zip(folders, ([], ["--wheel"]), strict=True):
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, *options]
        subprocess.run([*command, ROOT], check=True, capture_output=True, timeout=120)
    (sdist,) = folders[0].glob("*.tar.gz")
    (wheel,), (other,) = (list(folder.glob("*.whl")) for folder in folders)
    return sdist, wheel, other


def files_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_source_distribution_builds_the_same_wheel(built):
    _, wheel, other = built
    assert wheel.name == other.name == f"cqs_attention-{cqs.__version__}-py3-none-any.whl"
    assert files_of(wheel) == files_of(other)


def test_the_wheel_has_all_that_the_package_needs_and_nothing_else(built):
    names = set(files_of(built[1]))
    info = f"cqs_attention-{cqs.__version__}.dist-info/"
    assert {name.partition("/")[0] for name in names} == {"cqs", info.rstrip("/")}
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("cqs/**/*.py")}
    assert sources <= names and {"cqs/py.typed", f"{info}licenses/LICENSE"} <= names
    stored = {f"cqs/interest_sets/{path.name}" for path in ROOT.glob("interest_sets/*.txt")}
    assert {f"cqs/interest_sets/{number}.txt" for number in range(3, 112)} <= stored <= names
    others = r"test_|conftest|__pycache__|\.ipynb|\.jsonl|bench"
    strangers = [name for name in names if re.search(others, name)]
    assert not strangers


def test_the_source_distribution_can_be_tested(built):
    with tarfile.open(built[0]) as archive:
        top = f"cqs_attention-{cqs.__version__}"
        names = {name.removeprefix(f"{top}/") for name in archive.getnames()}
    needed = "README.md LICENSE CHANGELOG.md CITATION.cff Makefile constraints.txt docs/patterns.md"
    assert set(needed.split()) <= names
    assert {"benchmarks/__main__.py", "benchmarks/results/cpu.jsonl"} <= names
    assert {"tests/conftest.py", "tests/test_package.py", "interest_sets/7.txt"} <= names
    assert "examples/video_diffusion.py" in names


def test_all_files_name_the_same_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {cqs.__version__}\n" in citation
    assert f"\n## [{cqs.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
