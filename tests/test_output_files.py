"""A file that is written whole is the old or the complete new one at every moment."""

import os
import stat

import pytest
from support.files import files_up_to

from cqs.files import replace_file


def test_a_file_is_the_old_one_until_the_new_one_is_complete(tmp_path):
    path, link = tmp_path / "trace.json", tmp_path / "link"
    link.symlink_to(path)
    for old, new in (("", "one"), ("one", "two")):
        with replace_file(link) as partial:
            partial.write_text(new)
            assert not old or path.read_text() == old
        assert path.read_text() == new and link.is_symlink()
    with pytest.raises(KeyboardInterrupt), replace_file(path) as partial:
        partial.write_text("th")
        raise KeyboardInterrupt
    with files_up_to(3), pytest.raises(OSError, match="too large"), replace_file(path) as partial:
        partial.write_text("three")
    assert path.read_text() == "two" and sorted(os.listdir(tmp_path)) == ["link", "trace.json"]


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to a pipe"])
def test_other_than_regular_files_are_not_replaced(tmp_path, kind):
    path = tmp_path / "pipe"
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    before = stat.S_IFMT(path.stat().st_mode)
    if kind == "link to a pipe":
        path = tmp_path / "link"
        path.symlink_to("pipe")
    with pytest.raises(ValueError, match="path must be a new or a regular file"):
        with replace_file(path):
            pytest.fail("it must not be written")
    assert stat.S_IFMT(path.stat().st_mode) == before
