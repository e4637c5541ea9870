"""What the commands refuse, and what they leave behind."""

import errno
import os
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from cqs.__main__ import main
from cqs.commands.tensor_files import create_tensor
from cqs.problem import Problem, check_problem
from cqs.testing import attend


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A working directory with query, key and value; and the problem that they are."""
    monkeypatch.chdir(tmp_path)
    tensors = torch.randn(3, 1, 4, 60, 8)
    for name, tensor in zip(("q", "k", "v"), tensors, strict=True):
        np.save(f"{name}.npy", tensor.numpy())
    return check_problem(*tensors, is_causal=True)


def run_attend(*options):
    return main(["attend", "q.npy", "k.npy", "v.npy", "o.npy", "--causal", "--workers=7", *options])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--head-dim", "-5"], "head_dim must be at least 1, got -5"),
        (["--head-dim", "0", "--json"], "head_dim must be at least 1, got 0"),
        (["--num-heads", "0"], "num_heads must be at least 1, got 0"),
        (["--itemsize", "-2"], "itemsize must be at least 1, got -2"),
    ],
)
def test_plans_of_impossible_shapes_are_refused(capsys, options, message):
    assert main(["plan", *options]) == 2
    assert capsys.readouterr() == ("", f"cqs plan: {message}\n")


@pytest.mark.parametrize("picture", ["plan.xyz", "plan", "nowhere/plan.png", "folder.png"])
@pytest.mark.parametrize("command", ["plan", "demo"])
def test_impossible_pictures_are_refused_before_the_work(
    capsys, tmp_path, monkeypatch, command, picture
):
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder.png")
    assert main([command, "--picture", picture]) == 2
    output, error = capsys.readouterr()
    assert output == "" and picture in error and error.count("\n") == 1


def test_pictures_are_drawn(tmp_path):
    path = tmp_path / "plan.PNG"
    for _ in range(2):
        assert main(["plan", "--tokens", "70", "--picture", str(path)]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_two_writers_of_one_file_do_not_share_a_temporary_one(tmp_path, suffix):
    target = str(tmp_path / f"o.{suffix}")
    with create_tensor(target, "output", (4, 5), torch.float32) as first:
        with create_tensor(target, "output", (4, 5), torch.float32) as second:
            assert len(os.listdir(tmp_path)) == 2
            first.fill_(1)
            second.fill_(2)
            assert (first == 1).all()
        assert sorted(os.listdir(tmp_path))[0] == f"o.{suffix}"
    assert os.listdir(tmp_path) == [f"o.{suffix}"]


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_space_is_taken_before_the_work(tmp_path, monkeypatch, suffix):
    target = str(tmp_path / f"o.{suffix}")
    with create_tensor(target, "output", (1000, 1000), torch.float32):
        (partial,) = os.scandir(tmp_path)
        assert partial.stat().st_blocks * 512 >= 4_000_000

    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(ValueError, match="cannot write output to .*No space left"):
        with create_tensor(target, "output", (1000, 1000), torch.float32):
            pytest.fail("there is no space")
    assert os.listdir(tmp_path) == [f"o.{suffix}"]


def test_failures_end_in_one_line_and_status_1(files, monkeypatch, capsys):
    from cqs.commands import attend as command
    from cqs.executors.ray import TaskFailedError, WorkersDiedError
    from cqs.verify import VerificationError

    for failure in (VerificationError, WorkersDiedError, TaskFailedError):
        monkeypatch.setattr(command, "run_local", Mock(side_effect=failure("it failed")))
        assert run_attend() == 1
        assert capsys.readouterr().err.splitlines()[-1] == "cqs attend: it failed"
    monkeypatch.setattr(command, "run_local", lambda *arguments, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_attend()
    assert sorted(os.listdir()) == ["k.npy", "q.npy", "v.npy"]


def test_attend_finds_a_wrong_answer(files, monkeypatch, capsys):
    from cqs.commands import attend as command

    monkeypatch.setattr(
        command, "run_local", lambda *arguments, answer, **options: answer.output.fill_(7)
    )
    assert run_attend("--verify") == 1
    assert "cqs attend: output of batch 0, head 0, row 0 is off by" in capsys.readouterr().err
    assert not os.path.exists("o.npy")


@pytest.mark.ray
def test_attend_on_ray_writes_into_the_file(files, ray_session, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(Problem, "empty_answer")
        assert run_attend("--executor", "ray", "--verify", "--lse", "lse.npy") == 0
    output, lse = attend(files, num_workers=7)
    torch.testing.assert_close(torch.from_numpy(np.load("o.npy")), output)
    torch.testing.assert_close(torch.from_numpy(np.load("lse.npy")), lse)
    assert sorted(os.listdir()) == ["k.npy", "lse.npy", "o.npy", "q.npy", "v.npy"]
