"""A stopped run resumes with a bitwise identical result, or one error names the damaged file."""

import contextlib
import errno
import gc
import itertools
import os
import shutil
import zipfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import xxhash
from ranks import make_context
from safetensors.numpy import save_file

import cqs
from cqs.executors.streaming import checkpoint as checkpoints
from cqs.executors.streaming.checkpoint import WorkingDirectory
from cqs.executors.verify import VerificationError
from cqs.streaming import open_tensor

pytestmark = pytest.mark.slow

SHAPE = (1, 2, 700, 16)
WITHIN = {"memory_budget": 80_000, "device": "cpu"}
RESUMED = WITHIN | {"resume": "run"}


class Stop(Exception):
    pass


@pytest.fixture
def maps(tmp_path, monkeypatch):
    """Query, key and value in files of the working directory."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for name in "qkv":
        np.save(name, generator.standard_normal(SHAPE).astype(np.float32))
    return [np.load(f"{name}.npy", mmap_mode="r") for name in "qkv"]


@pytest.fixture
def save_every_block(monkeypatch):
    monkeypatch.setattr(checkpoints, "_SECONDS_BETWEEN_SAVES", 0)


def new_output():
    return np.lib.format.open_memmap("out.npy", "w+", np.float32, SHAPE)


def stop(maps, number=15, **options):
    """Compute some of the blocks; return the output."""
    calls, out = itertools.count(1), new_output()

    def progress(done, total):
        if next(calls) == number:
            raise Stop

    with pytest.raises(Stop):
        cqs.streaming.attention(*maps, out=out, progress=progress, **RESUMED | options)
    return out


def append(path, content=b"x"):
    with open(path, "ab") as file:
        file.write(content)


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


@pytest.mark.parametrize("what", SPOILED)
def test_a_damaged_working_file_is_named(maps, what):
    out, (name, spoil) = stop(maps), SPOILED[what]
    spoil(Path("run", name))
    before = {path.name for path in Path("run").iterdir()}
    with pytest.raises(ValueError, match=f"run/{name}'"):
        cqs.streaming.attention(*maps, out=out, **RESUMED)
    assert {path.name for path in Path("run").iterdir()} == before


def test_a_journal_that_is_a_pipe_is_refused(maps):
    out = stop(maps)
    os.unlink("run/cqs-resume")
    os.mkfifo("run/cqs-resume")
    with pytest.raises(ValueError, match="^resume must be"):
        cqs.streaming.attention(*maps, out=out, **RESUMED)


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("name", checkpoints.FILES)
def test_links_in_the_directory_are_not_followed(maps, save_every_block, name, link):
    out = stop(maps)
    os.rename(f"run/{name}", "precious")
    link(os.path.abspath("precious"), f"run/{name}")
    before = Path("precious").read_bytes()
    with pytest.raises(ValueError, match="^resume must be|run/lse' is missing or damaged"):
        cqs.streaming.attention(*maps, out=out, **RESUMED)
    assert Path("precious").read_bytes() == before


@pytest.mark.parametrize("owned", ["run", "run/cqs-resume", "run/lse"])
def test_files_of_another_user_are_refused(maps, monkeypatch, owned):
    out, stat, owned = stop(maps), os.stat, os.stat(owned)

    def of_another(found):
        other = os.stat_result([*found[:4], found.st_uid + 1, *found[5:]])
        return other if os.path.samestat(found, owned) else found

    monkeypatch.setattr(os, "stat", lambda *args, **kwargs: of_another(stat(*args, **kwargs)))
    monkeypatch.setattr(os, "fstat", lambda file: of_another(stat(file)))
    with pytest.raises(ValueError, match="^resume must be|run/lse' is missing or damaged"):
        cqs.streaming.attention(*maps, out=out, **RESUMED)


TORN = [(share, content) for share in (0.02, 0.5, 0.9, 1) for content in (b"", b"\0" * 5000)]


@pytest.mark.parametrize(("share", "content"), [*TORN, (1, b"x\n"), (1, b'{"part": 5}\n')])
def test_what_a_torn_journal_does_not_call_final_is_computed_again(
    maps, save_every_block, share, content
):
    out, journal = stop(maps, number=30), Path("run/cqs-resume")
    entries = len(journal.read_bytes().splitlines())
    os.truncate(journal, int(share * os.path.getsize(journal)))
    append(journal, content)
    with contextlib.suppress(Stop), WorkingDirectory("run") as directory:
        found = len(directory.read())
        assert found == entries if share == 1 else found < entries
        assert (share < 0.1) == (found == 0)
        raise Stop
    cqs.streaming.attention(*maps, out=out, **RESUMED)
    assert np.array_equal(out, cqs.streaming.attention(*maps, **WITHIN))
    assert not os.path.exists("run")


@pytest.mark.parametrize("row", [0, 127, 130])
@pytest.mark.parametrize("head", [0, 1])
def test_a_changed_result_is_named_by_its_rows(maps, row, head):
    out = stop(maps, number=30)
    before = out[0, head, row, 3]
    out[0, head, row, 3] += 1
    out.flush()
    rows = "rows 0 to 127 of" if row < 128 else "rows 128 to 255 of"
    with pytest.raises(ValueError, match=f"{rows} head {head} of batch element 0 in .*out.npy"):
        cqs.streaming.attention(*maps, out=out, **RESUMED)
    out[0, head, row, 3] = before
    overwrite("run/lse", 4 * (700 * head + row))
    with pytest.raises(ValueError, match=f"{rows} head {head} of batch element 0 in .*run/lse"):
        cqs.streaming.attention(*maps, out=out, **RESUMED)


def test_an_output_that_was_made_anew_is_refused(maps):
    stop(maps)
    with pytest.raises(ValueError, match="out.npy"):
        cqs.streaming.attention(*maps, out=new_output(), **RESUMED)


def test_another_computation_is_refused(maps):
    out = stop(maps)
    for name, options in (
        ("scale", {"scale": 2.0}),
        ("is_causal", {"is_causal": True}),
        ("backend", {"backend": "reference"}),
        ("output", {"out": np.lib.format.open_memmap("other.npy", "w+", np.float32, SHAPE)}),
    ):
        with pytest.raises(ValueError, match=f"resume must be .*run', whose {name} is "):
            cqs.streaming.attention(*maps, **{"out": out} | RESUMED | options)
    with pytest.raises(ValueError, match="memory_budget must be at least .*run' *, got 60000"):
        cqs.streaming.attention(*maps, out=out, **RESUMED | {"memory_budget": 60_000})
    os.utime("q.npy", (0, 0))
    with pytest.raises(ValueError, match="resume must be .*run', whose inputs is "):
        cqs.streaming.attention(*maps, out=out, **RESUMED)
    with pytest.raises(ValueError, match="out must be in a file"):
        cqs.streaming.attention(*maps, **RESUMED)


@pytest.mark.parametrize("kind", ["a map", "safetensors"])
@pytest.mark.parametrize("names", ["qvk", "zkv", "qzv", "qkz"])
def test_another_tensor_of_the_same_file_is_another_computation(maps, kind, names):
    arrays = dict(zip("qkvz", [*maps, maps[0] + 1], strict=True))
    if kind == "a map":
        np.save("all.npy", np.concatenate(list(arrays.values())))
        whole = np.load("all.npy", mmap_mode="r")
        inputs = {name: whole[i : i + 1] for i, name in enumerate(arrays)}
    else:
        save_file(arrays, "all.safetensors")
        inputs = {name: open_tensor("all.safetensors", name) for name in arrays}
    out = stop([inputs[name] for name in "qkv"])
    with pytest.raises(ValueError, match="resume must be .*run', whose inputs is "):
        cqs.streaming.attention(*(inputs[name] for name in names), out=out, **RESUMED)
    cqs.streaming.attention(*(inputs[name] for name in "qkv"), out=out, **RESUMED)
    assert np.array_equal(out, cqs.streaming.attention(*maps, **WITHIN))


def test_an_input_that_changes_while_results_are_checked_is_noticed(maps, monkeypatch):
    out = stop(maps)
    check = checkpoints.Checkpoint._check_results

    def check_and_change(*arguments):
        check(*arguments)
        os.utime("k.npy", (0, 0))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.Checkpoint, "_check_results", check_and_change)
        with pytest.raises(OSError, match="an input file was changed"):
            cqs.streaming.attention(*maps, out=out, **RESUMED)
    with pytest.raises(ValueError, match="resume must be .*run', whose inputs is "):
        cqs.streaming.attention(*maps, out=out, **RESUMED)


def test_a_file_that_replaces_an_input_is_not_taken_for_it(maps):
    """The first run reads the file that it has opened, under whatever name."""
    inputs = [open_tensor(f"{name}.npy") for name in "qkv"]
    np.save("new.npy", maps[1] + 1)
    os.replace("new.npy", "k.npy")
    out = stop(inputs)
    with pytest.raises(ValueError, match="resume must be .*run', whose inputs is "):
        cqs.streaming.attention(inputs[0], open_tensor("k.npy"), inputs[2], out=out, **RESUMED)
    cqs.streaming.attention(*inputs, out=out, **RESUMED)
    assert np.array_equal(out, cqs.streaming.attention(*maps, **WITHIN))


def test_an_error_while_a_run_begins_leaves_no_file_open(maps, monkeypatch):
    out, before = new_output(), sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cqs.streaming.attention(*maps, out=out, **RESUMED)
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before and not os.path.exists("run")


@pytest.mark.parametrize(
    "name", ["q.npy", "out.npy", "notes.txt", "folder", ".", "", "to the folder", "pipe"]
)
def test_what_others_have_made_is_neither_changed_nor_removed(maps, name):
    out = new_output()
    os.mkdir("folder")
    for path in ("notes.txt", "folder/lse", "folder/state", "run.lse.npy", "run.partial"):
        Path(path).write_text(f"mine: {path}")
    os.symlink("folder", "to the folder")
    os.mkfifo("pipe")
    before = contents()
    with pytest.raises(ValueError, match="^resume must be"):
        cqs.streaming.attention(*maps, out=out, **WITHIN, resume=name)
    assert contents() == before
    cqs.streaming.attention(*maps, out=out, **RESUMED)
    assert contents().keys() == before.keys()
    assert all(contents()[path] == before[path] for path in before.keys() - {"out.npy"})


def contents():
    return {str(path): path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}


def test_files_of_the_user_in_the_directory_stay(maps):
    out = stop(maps)
    Path("run/notes.txt").write_text("mine")
    cqs.streaming.attention(*maps, out=out, **RESUMED)
    assert os.listdir("run") == ["notes.txt"]


def test_a_directory_that_cannot_be_made_is_an_error_of_the_system(maps):
    with pytest.raises(OSError, match="nowhere/run"):
        cqs.streaming.attention(*maps, out=new_output(), **WITHIN, resume="nowhere/run")
    with pytest.raises(TypeError):
        cqs.streaming.attention(*maps, out=new_output(), **WITHIN, resume=3)


def test_what_fails_before_anything_is_final_leaves_no_directory(maps):
    stop(maps, number=1)
    assert not os.path.exists("run")
    with pytest.raises(ValueError, match="^out "):
        cqs.streaming.attention(*maps, out=maps[0], **RESUMED)
    assert not os.path.exists("run")


def test_a_result_that_is_wrong_is_not_kept(maps, monkeypatch):
    monkeypatch.setattr("cqs.executors.contract.verify_rows", lambda *_: _fail())
    with pytest.raises(VerificationError):
        cqs.streaming.attention(*maps, out=new_output(), verify=True, **RESUMED)
    assert not os.path.exists("run")


def _fail():
    raise VerificationError("it is wrong")


def use_directory(parent, connection):
    os.chdir(parent)
    with WorkingDirectory("run"):
        connection.send("ready")
        connection.poll(None)


def test_only_one_process_at_a_time_uses_a_directory(maps):
    expected = cqs.streaming.attention(*maps, **WITHIN)
    out, other = stop(maps), np.lib.format.open_memmap("o.npy", "w+", np.float32, SHAPE)
    context = make_context()
    connection, of_process = context.Pipe()
    process = context.Process(target=use_directory, args=(os.getcwd(), of_process))
    process.start()
    assert connection.recv() == "ready"
    for target in (out, other):
        with pytest.raises(BlockingIOError, match="^.Errno 11. resume must be .*run'$"):
            cqs.streaming.attention(*maps, out=target, **RESUMED)
    process.kill()
    process.join()
    cqs.streaming.attention(*maps, out=out, **RESUMED)
    assert np.array_equal(out, expected)

    def meanwhile(done, total):
        with pytest.raises(BlockingIOError):
            cqs.streaming.attention(*maps, out=other, **RESUMED)

    cqs.streaming.attention(*maps, out=out, progress=meanwhile, **RESUMED)
    assert np.array_equal(out, expected) and not other.any()


def test_a_directory_that_its_owner_removes_meanwhile_is_not_taken(maps, monkeypatch):
    """Two runs lock files of one name, of which the first is no longer there."""
    lock = checkpoints.fcntl.flock
    owner = WorkingDirectory("run")
    owner.__enter__()

    def remove_first(descriptor, operation):
        monkeypatch.setattr(checkpoints.fcntl, "flock", lock)
        owner.__exit__(None, None, None)
        third.__enter__()
        lock(descriptor, operation)

    third = WorkingDirectory("run")
    monkeypatch.setattr(checkpoints.fcntl, "flock", remove_first)
    with pytest.raises(BlockingIOError), WorkingDirectory("run"):
        pytest.fail("it is of another run")
    assert os.path.exists("run/cqs-resume")
    third.__exit__(None, None, None)
    assert not os.path.exists("run")


@pytest.fixture
def disks(monkeypatch, save_every_block):
    """What a disk has for certain whenever the journal was written: what was written there."""
    disk, states = {}, []

    def fsync(descriptor, fsync=os.fsync):
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_file():
            disk[path.name] = path.read_bytes()
            if path.name == "cqs-resume":
                states.append(dict(disk))

    monkeypatch.setattr(os, "fsync", fsync)
    return states


def test_a_checkpoint_holds_after_a_loss_of_power(maps, disks):
    """Whatever it calls final was on the disk before."""
    expected = cqs.streaming.attention(*maps, **WITHIN)
    cqs.streaming.attention(*maps, out=new_output(), **RESUMED)
    found = list(disks)
    assert len(found) > 3
    for state in found:
        shutil.rmtree("run", ignore_errors=True)
        os.mkdir("run")
        Path("out.npy").write_bytes(state["out.npy"])
        for name in checkpoints.FILES:
            Path("run", name).write_bytes(state[name])
        out = np.load("out.npy", mmap_mode="r+")
        cqs.streaming.attention(*maps, out=out, **RESUMED)
        assert torch.equal(torch.from_numpy(np.load("out.npy")), expected)


@pytest.mark.parametrize("name", ["out.npy", "lse", "cqs-resume"])
@pytest.mark.parametrize("number", [1, 3])
def test_a_full_disk_leaves_the_checkpoint_before(
    maps, monkeypatch, save_every_block, name, number
):
    expected = cqs.streaming.attention(*maps, **WITHIN)
    out, calls = new_output(), itertools.count(1)

    def fsync(descriptor, fsync=os.fsync):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.basename(path) == name and next(calls) == number:
            if name == "cqs-resume":
                os.truncate(path, os.path.getsize(path) - 100)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        cqs.streaming.attention(*maps, out=out, **RESUMED)
    assert os.path.exists("run") == (number > 1 or name == "cqs-resume")
    seen = []
    cqs.streaming.attention(*maps, out=out, progress=lambda *done: seen.append(done), **RESUMED)
    assert np.array_equal(out, expected) and not os.path.exists("run")
    assert number == 1 or seen[0][0] > seen[-1][1] / 20, "begins where the other ended"


def test_another_budget_goes_on_bitwise_identically(maps):
    expected, out = cqs.streaming.attention(*maps, **WITHIN), stop(maps)
    cqs.streaming.attention(*maps, out=out, **RESUMED | {"memory_budget": "1GiB"}, verify=True)
    assert np.array_equal(out, expected) and not os.path.exists("run")


def test_an_empty_directory_is_taken(maps):
    """A run that is killed leaves one if it has not yet made or has just removed its lock."""
    os.mkdir("run")
    out = new_output()
    cqs.streaming.attention(*maps, out=out, **RESUMED)
    assert np.array_equal(out, cqs.streaming.attention(*maps, **WITHIN)) and not os.path.exists(
        "run"
    )


def test_saves_are_at_most_one_a_second_and_one_at_the_end(maps, monkeypatch):
    now, saves = [100.0], []
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])

    def write(self, entries, write=WorkingDirectory.append):
        saves.append(len(entries[-1]["blocks"]))
        write(self, entries)

    monkeypatch.setattr(WorkingDirectory, "append", write)
    out = new_output()
    cqs.streaming.attention(*maps, out=out, **RESUMED)
    assert len(saves) == 2, "the first block, and all"
    num_blocks = sum(saves)

    def wait(done, total):
        now[0] += 0.15

    saves.clear()
    cqs.streaming.attention(*maps, out=out, progress=wait, **RESUMED)
    assert 2 < len(saves) < num_blocks / 2 and sum(saves) == num_blocks
    assert np.array_equal(out, cqs.streaming.attention(*maps, **WITHIN))


def test_what_was_not_saved_is_computed_again(maps, monkeypatch):
    """A run that is killed saves nothing at its end."""
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: 100.0)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.Checkpoint, "__exit__", lambda *_: None)
        out = stop(maps, number=30)
    assert len(Path("run/cqs-resume").read_bytes().splitlines()) == 2, "the first block"
    expected = cqs.streaming.attention(*maps, **WITHIN)
    assert not np.array_equal(out, expected)
    cqs.streaming.attention(*maps, out=out, **RESUMED)
    assert np.array_equal(out, expected) and not os.path.exists("run")


@pytest.mark.parametrize("number", [1, 15])
def test_a_forked_process_that_ends_leaves_the_directory_to_its_parent(maps, number):
    expected, out, calls = (
        cqs.streaming.attention(*maps, **WITHIN),
        new_output(),
        itertools.count(1),
    )
    parent = os.getpid()

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
        cqs.streaming.attention(*maps, out=out, progress=fork, **RESUMED)
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert np.array_equal(out, expected) and not os.path.exists("run")


@pytest.mark.parametrize("number", [1, 15])
def test_what_is_put_in_the_place_of_the_directory_stays(maps, number):
    out, calls = new_output(), itertools.count(1)

    def replace(done, total):
        if next(calls) == number:
            os.rename("run", "moved")
            os.mkdir("run")
            for name in checkpoints.FILES:
                Path("run", name).write_text(f"mine: {name}")

    with pytest.raises(OSError, match="run' was moved or removed"):
        cqs.streaming.attention(*maps, out=out, progress=replace, **RESUMED)
    for name in checkpoints.FILES:
        assert Path("run", name).read_text() == f"mine: {name}"


def unpack_frozen_run(version=4):
    """Unpack a run of format 4 that was stopped after two of six blocks; return its tensors."""
    make_frozen_inputs()
    with zipfile.ZipFile(Path(__file__).with_name("resume-format-4.zip")) as frozen:
        frozen.extractall()
    journal, folder, digest, lines = Path("run/cqs-resume"), os.getcwd().encode(), b"", []
    for line in journal.read_bytes().splitlines(keepends=True):
        content = line.partition(b" ")[2].replace(b"/frozen", folder)
        content = content.replace(b'"format": 4', b'"format": %d' % version)
        digest = xxhash.xxh3_128_hexdigest(digest + content).encode()
        lines.append(digest + b" " + content)
    journal.write_bytes(b"".join(lines))
    return [np.load(f"{name}.npy", mmap_mode="r") for name in "qkv"]


def make_frozen_inputs():
    shape = (1, 2, 300, 8)
    for i, name in enumerate("qkv"):
        numbers = np.arange(4800).reshape(shape) * (7919 + 2 * i) % 1000
        np.save(name, (numbers / 500 - 1).astype(np.float32))
        os.utime(f"{name}.npy", (10**9, 10**9))


FROZEN = {"memory_budget": 30_000, "device": "cpu", "backend": "cpu"}


def test_a_frozen_run_of_this_format_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inputs, out = unpack_frozen_run(), np.load("out.npy", mmap_mode="r+")
    before, seen = np.array(out), []
    cqs.streaming.attention(
        *inputs, out=out, resume="run", progress=lambda *done: seen.append(done), **FROZEN
    )
    assert seen[0] == (256 * 300 + 44 * 300, 180_000), "begins where the other ended"
    assert np.array_equal(out[:, 0, :256], before[:, 0, :256]) and not os.path.exists("run")
    expected = cqs.streaming.attention(*inputs, **FROZEN)
    torch.testing.assert_close(torch.tensor(out), expected, atol=1e-6, rtol=1e-5)


def test_a_run_of_another_format_is_rejected_with_both_versions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inputs, out = unpack_frozen_run(version=3), np.load("out.npy", mmap_mode="r+")
    before = contents()
    with pytest.raises(ValueError, match="run' must have resume format 4 .* got format 3"):
        cqs.streaming.attention(*inputs, out=out, resume="run", **FROZEN)
    assert contents() == before


def test_query_heads_that_share_a_kv_head_resume(tmp_path):
    query, key, value = (torch.randn(1, heads, 300, 16) for heads in (4, 2, 2))
    out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", np.float32, query.shape)
    cqs.streaming.attention(query, key, value, **WITHIN, out=out, resume=tmp_path / "run")
    torch.testing.assert_close(torch.from_numpy(out), cqs.attention(query, key, value))


def test_a_run_with_sinks_is_not_one_without(maps, save_every_block):
    stop(maps, scores=cqs.Scores(sinks=torch.ones(2)))
    with pytest.raises(ValueError, match="whose sinks is .* instead of None"):
        cqs.streaming.attention(*maps, **RESUMED, out=np.load("out.npy", mmap_mode="r+"))
