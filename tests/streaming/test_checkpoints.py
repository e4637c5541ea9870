"""A stopped run resumes with a bitwise identical result, or one error names the damaged file."""

import errno
import itertools
import os
import shutil
import signal
import zipfile
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from streams import Stop, new_output, stop_after

import cqs
from cqs.executors.streaming import checkpoint as checkpoints
from cqs.executors.streaming.checkpoint import WorkingDirectory
from cqs.executors.verify import VerificationError
from cqs.streaming import Resumable, open_tensor

pytestmark = pytest.mark.slow

SHAPE = (1, 2, 700, 16)
WITHIN = {"memory_budget": 80_000, "device": "cpu"}


@pytest.fixture
def save_every_block(monkeypatch):
    monkeypatch.setattr(checkpoints, "_SECONDS_BETWEEN_SAVES", 0)


def resume(tensors, out, directory="run", **options):
    return cqs.streaming.attention(*tensors, out=Resumable(out, directory), **WITHIN | options)


def stop(maps, number=15, **options):
    """Compute some of the blocks; return the output."""
    out = new_output(SHAPE)
    with pytest.raises(Stop):
        resume(maps, out, progress=stop_after(number), **options)
    return out


@pytest.fixture
def expected(maps):
    return cqs.streaming.attention(*maps, **WITHIN)


def overwrite(path, place, content=b"\xa5"):
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(content)


SPOILED = {
    "journal a list": ("cqs-resume", lambda path: path.write_text("[]\n")),
    "journal not UTF-8": ("cqs-resume", lambda path: path.write_bytes(b"\xff\xfe\n")),
    "journal changed": ("cqs-resume", lambda path: overwrite(path, 60)),
    "lse missing": ("lse", Path.unlink),
    "lse cut": ("lse", lambda path: os.truncate(path, 300)),
    "lse garbage": ("lse", lambda path: path.write_text("x")),
    "lse a directory": ("lse", lambda path: (path.unlink(), path.mkdir())),
}


@pytest.mark.parametrize(("name", "spoil"), SPOILED.values(), ids=SPOILED)
def test_a_damaged_working_file_is_named(maps, name, spoil):
    out = stop(maps)
    spoil(Path("run", name))
    before = {path.name for path in Path("run").iterdir()}
    with pytest.raises(ValueError, match=f"run/{name}'"):
        resume(maps, out)
    assert {path.name for path in Path("run").iterdir()} == before


NOT_ITS_OWN = "^directory must be|run/lse' is missing, damaged"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_links_in_the_directory_are_not_followed(maps, save_every_block, link):
    """Nor is a pipe read."""
    out = stop(maps)
    for name in checkpoints.FILES:
        os.rename(f"run/{name}", "precious")
        link(os.path.abspath("precious"), f"run/{name}")
        before = Path("precious").read_bytes()
        with pytest.raises(ValueError, match=NOT_ITS_OWN):
            resume(maps, out)
        assert Path("precious").read_bytes() == before
        os.rename("precious", f"run/{name}")
    os.unlink("run/cqs-resume")
    os.mkfifo("run/cqs-resume")
    with pytest.raises(ValueError, match="^directory must be"):
        resume(maps, out)


@pytest.mark.parametrize("owned", ["run", "run/cqs-resume", "run/lse"])
def test_files_of_another_user_are_refused(maps, monkeypatch, owned):
    out, stat, owned = stop(maps), os.stat, os.stat(owned)

    def of_another(found):
        other = os.stat_result([*found[:4], found.st_uid + 1, *found[5:]])
        return other if os.path.samestat(found, owned) else found

    monkeypatch.setattr(os, "stat", lambda *args, **kwargs: of_another(stat(*args, **kwargs)))
    monkeypatch.setattr(os, "fstat", lambda file: of_another(stat(file)))
    with pytest.raises(ValueError, match=NOT_ITS_OWN):
        resume(maps, out)


@pytest.mark.parametrize(
    ("share", "content"),
    [(0.02, b""), (0.5, bytes(5000)), (0.9, b""), (1, bytes(5000)), (1, b'{"part": 5}\n')],
)
def test_what_a_torn_journal_does_not_call_final_is_computed_again(
    maps, expected, save_every_block, share, content
):
    out, journal = stop(maps, number=30), Path("run/cqs-resume")
    whole = journal.read_bytes()
    journal.write_bytes(whole[: int(share * len(whole))] + content)
    resume(maps, out)
    assert np.array_equal(out, expected) and not os.path.exists("run")


@pytest.mark.parametrize(("head", "row"), [(0, 0), (0, 127), (1, 130)])
def test_a_changed_result_is_named_by_its_rows(maps, row, head):
    out = stop(maps, number=30)
    before = out[0, head, row, 3]
    out[0, head, row, 3] += 1
    out.flush()
    rows = "rows 0 to 127 of" if row < 128 else "rows 128 to 255 of"
    with pytest.raises(ValueError, match=f"{rows} head {head} of batch element 0 in .*out.npy"):
        resume(maps, out)
    out[0, head, row, 3] = before
    overwrite("run/lse", 4 * (700 * head + row))
    with pytest.raises(ValueError, match=f"{rows} head {head} of batch element 0 in .*run/lse"):
        resume(maps, out)


def test_another_computation_is_refused(maps):
    out = stop(maps)
    for name, options in (
        ("scale", {"scale": 2.0}),
        ("is_causal", {"is_causal": True}),
        ("backend", {"backend": "reference"}),
        ("sinks", {"scores": cqs.Scores(sinks=torch.ones(2))}),
        ("output", {"out": new_output(SHAPE, "other.npy")}),
    ):
        with pytest.raises(ValueError, match=f"directory must be .*run', whose {name} is "):
            resume(maps, **{"out": out} | options)
    with pytest.raises(ValueError, match="memory_budget must be at least .*run' *, got 60000"):
        resume(maps, out, memory_budget=60_000)
    with pytest.raises(ValueError, match="out must be in a file"):
        resume(maps, torch.empty(SHAPE))
    with pytest.raises(ValueError, match="out.npy"):
        resume(maps, new_output(SHAPE))
    os.utime("q.npy", (0, 0))
    with pytest.raises(ValueError, match=OTHER_INPUTS):
        resume(maps, out)


OTHER_INPUTS = "directory must be .*run', whose inputs is "


@pytest.mark.parametrize("kind", ["a map", "safetensors", "a replaced file"])
def test_another_tensor_is_another_computation(maps, expected, kind):
    """Also of the same file. A file is read that was opened, under whatever name."""
    arrays = dict(zip("qkvz", [*maps, maps[1] + 1], strict=True))
    if kind == "a map":
        np.save("all.npy", np.concatenate(list(arrays.values())))
        whole = np.load("all.npy", mmap_mode="r")
        inputs = {name: whole[i : i + 1] for i, name in enumerate(arrays)}
    elif kind == "safetensors":
        save_file(arrays, "all.safetensors")
        inputs = {name: open_tensor("all.safetensors", name) for name in arrays}
    else:
        inputs = {name: open_tensor(f"{name}.npy") for name in "qkv"}
        np.save("new.npy", arrays["z"])
        os.replace("new.npy", "k.npy")
        inputs["z"] = open_tensor("k.npy")
    out = stop([inputs[name] for name in "qkv"])
    for names in ("qvk", "qkz", "qzv"):
        with pytest.raises(ValueError, match=OTHER_INPUTS):
            resume([inputs[name] for name in names], out)
    resume([inputs[name] for name in "qkv"], out)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("name", ["out.npy", "notes.txt", "folder", "", "to the folder", "pipe"])
def test_what_others_have_made_is_neither_changed_nor_removed(maps, name):
    out = new_output(SHAPE)
    os.mkdir("folder")
    for path in ("notes.txt", "folder/lse", "folder/state", "run.lse.npy", "run.partial"):
        Path(path).write_text(f"mine: {path}")
    os.symlink("folder", "to the folder")
    os.mkfifo("pipe")
    before = contents()
    with pytest.raises(ValueError, match="^directory must be"):
        resume(maps, out, name)
    assert contents() == before
    resume(maps, out)
    assert contents().keys() == before.keys()
    assert all(contents()[path] == before[path] for path in before.keys() - {"out.npy"})


def contents():
    return {str(path): path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}


def test_files_of_the_user_in_the_directory_stay(maps, expected):
    """An empty directory is used: a run that is killed before it makes its lock leaves one."""
    os.mkdir("run")
    out = stop(maps)
    Path("run/notes.txt").write_text("mine")
    resume(maps, out)
    assert os.listdir("run") == ["notes.txt"] and np.array_equal(out, expected)


def test_what_fails_before_anything_is_final_leaves_no_directory(maps):
    stop(maps, number=1)
    assert not os.path.exists("run")
    for error, message, options in (
        (ValueError, "^out ", {"out": maps[0]}),
        (OSError, "nowhere/run", {"directory": "nowhere/run"}),
        (TypeError, None, {"directory": 3}),
    ):
        with pytest.raises(error, match=message):
            resume(maps, **{"out": new_output(SHAPE)} | options)
    assert not os.path.exists("run")


def test_a_result_that_is_wrong_is_not_kept(maps, monkeypatch):
    wrong = Mock(side_effect=VerificationError("it is wrong"))
    monkeypatch.setattr("cqs.executors.contract.verify_rows", wrong)
    with pytest.raises(VerificationError):
        resume(maps, new_output(SHAPE), verify=True)
    assert not os.path.exists("run")


def test_only_one_process_at_a_time_uses_a_directory(maps, expected):
    out, other = stop(maps), new_output(SHAPE, "o.npy")
    is_ready, tell = os.pipe()
    if (child := os.fork()) == 0:
        with WorkingDirectory("run"):
            os.write(tell, b"ready")
            signal.pause()
    assert os.read(is_ready, 5) == b"ready"
    for target in (out, other):
        with pytest.raises(BlockingIOError, match="^.Errno 11. directory must be .*run'$"):
            resume(maps, target)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    resume(maps, out)
    assert np.array_equal(out, expected)


def test_a_checkpoint_holds_after_a_loss_of_power(maps, expected, save_every_block, monkeypatch):
    """Whatever the journal calls final was on the disk before."""
    disk, states = {}, []

    def fsync(descriptor, fsync=os.fsync):
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_file():
            disk[path] = path.read_bytes()
            if path.name == "cqs-resume":
                states.append(dict(disk))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        resume(maps, new_output(SHAPE))
    assert len(states) > 3
    for state in states:
        shutil.rmtree("run", ignore_errors=True)
        os.mkdir("run")
        for path, content in state.items():
            path.write_bytes(content)
        resume(maps, np.load("out.npy", mmap_mode="r+"))
        assert np.array_equal(np.load("out.npy"), expected)


@pytest.mark.parametrize("name", ["out.npy", "lse", "cqs-resume"])
@pytest.mark.parametrize("number", [1, 3])
def test_a_full_disk_leaves_the_checkpoint_before(
    maps, expected, monkeypatch, save_every_block, name, number
):
    out, calls = new_output(SHAPE), itertools.count(1)

    def fsync(descriptor, fsync=os.fsync):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.basename(path) == name and next(calls) == number:
            if name == "cqs-resume":
                os.truncate(path, os.path.getsize(path) - 100)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        resume(maps, out)
    assert os.path.exists("run") == (number > 1 or name == "cqs-resume")
    seen = []
    resume(maps, out, progress=lambda *done: seen.append(done))
    assert np.array_equal(out, expected) and not os.path.exists("run")
    assert number == 1 or seen[0][0] > seen[-1][1] / 20, "begins where the other ended"


def test_what_was_not_saved_is_computed_again(maps, expected, monkeypatch):
    """A run that is killed saves nothing at its end. The next may have another budget."""
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: 100.0)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.Checkpoint, "close", lambda *_: None)
        out = stop(maps, number=30)
    assert len(Path("run/cqs-resume").read_bytes().splitlines()) == 2, "the first block"
    assert not np.array_equal(out, expected)
    resume(maps, out, memory_budget="1GiB", verify=True)
    assert np.array_equal(out, expected) and not os.path.exists("run")


@pytest.mark.parametrize("number", [1, 15])
def test_a_forked_process_that_ends_leaves_the_directory_to_its_parent(maps, expected, number):
    out, calls, parent = new_output(SHAPE), itertools.count(1), os.getpid()

    def fork(done, total):
        here = next(calls)
        if here == number:
            if (child := os.fork()) == 0:
                raise Stop
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        if here > number:
            with pytest.raises(BlockingIOError):
                WorkingDirectory("run").__enter__()

    try:
        resume(maps, out, progress=fork)
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert np.array_equal(out, expected) and not os.path.exists("run")


def test_what_is_put_in_the_place_of_the_directory_stays(maps):
    calls = itertools.count(1)

    def replace(done, total):
        if next(calls) == 15:
            os.rename("run", "moved")
            os.mkdir("run")
            for name in checkpoints.FILES:
                Path("run", name).write_text(f"mine: {name}")

    with pytest.raises(OSError, match="run' was moved or removed"):
        resume(maps, new_output(SHAPE), progress=replace)
    for name in checkpoints.FILES:
        assert Path("run", name).read_text() == f"mine: {name}"


def unpack_frozen_run(version=5):
    """Unpack a run of format 5 that was stopped after two of six blocks; return its tensors."""
    for i, name in enumerate("qkv"):
        numbers = np.arange(4800).reshape(1, 2, 300, 8) * (7919 + 2 * i) % 1000
        np.save(name, (numbers / 500 - 1).astype(np.float32))
        os.utime(f"{name}.npy", (10**9, 10**9))
    with zipfile.ZipFile(Path(__file__).with_name("resume-format-5.zip")) as frozen:
        frozen.extractall()
    journal, folder, digest, lines = Path("run/cqs-resume"), os.getcwd().encode(), b"", []
    for line in journal.read_bytes().splitlines(keepends=True):
        content = line.partition(b" ")[2].replace(b"/frozen", folder)
        content = content.replace(b'"format": 5', b'"format": %d' % version)
        digest = sha256(digest + content).hexdigest().encode()
        lines.append(digest + b" " + content)
    journal.write_bytes(b"".join(lines))
    return [np.load(f"{name}.npy", mmap_mode="r") for name in "qkv"]


FROZEN = {"memory_budget": 30_000, "device": "cpu", "backend": "cpu"}


def test_a_frozen_run_of_this_format_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inputs, out = unpack_frozen_run(), np.load("out.npy", mmap_mode="r+")
    before, seen = np.array(out), []
    resume(inputs, out, progress=lambda *done: seen.append(done), **FROZEN)
    assert seen[0] == (256 * 300 + 44 * 300, 180_000), "begins where the other ended"
    assert np.array_equal(out[:, 0, :256], before[:, 0, :256]) and not os.path.exists("run")
    expected = cqs.streaming.attention(*inputs, **FROZEN)
    torch.testing.assert_close(torch.tensor(out), expected, atol=1e-6, rtol=1e-5)


def test_a_run_of_another_format_is_rejected_with_both_versions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inputs, out = unpack_frozen_run(version=3), np.load("out.npy", mmap_mode="r+")
    before = contents()
    with pytest.raises(ValueError, match="run' must have resume format 5 .* got format 3"):
        resume(inputs, out, **FROZEN)
    assert contents() == before
