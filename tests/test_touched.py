"""Which files a change touches, by imports."""

import pytest

from tests.support.touched import git, imports, touched


@pytest.fixture(scope="module")
def graph():
    return imports(git("ls-files", "*.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "found", "others"),
    [
        ("cqs/integrations/jax.py", "tests/integrations/test_jax.py", "tests/test_api.py"),
        ("cqs/worker/flash.py", "tests/test_matrix.py", "tests/patterns/brute_force.py"),
        ("tests/cluster/conftest.py", "tests/cluster/test_failures.py", "tests/conftest.py"),
    ],
)
def test_what_imports_a_changed_file_is_touched(graph, changed, found, others):
    files = touched({changed}, graph)
    assert files[changed] == 0 < files[found] and others not in files
