"""What the commands refuse, and what they leave behind."""

import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
from command_reference import BEGIN, END, PAGE, format_tables
from safetensors.torch import load_file, save_file
from support.exact import attend
from support.files import written_files

import cqs.patterns as patterns
from cqs.__main__ import _COMMANDS, main
from cqs.commands.options import parse_integer
from cqs.commands.tensor_files import create_tensor
from cqs.patterns.text import parse_pattern
from cqs.problem import check_problem
from cqs.report.table import Table, show
from cqs.scheduler import Plan
from cqs.worker import BACKENDS


def test_no_command_prints_help_with_examples(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "commands:" in printed
    assert "examples:\n  cqs doctor\n" in printed


@pytest.mark.parametrize("command", list(_COMMANDS))
def test_the_help_of_every_option_states_its_default(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = re.split(r"\n  (?=-)", capsys.readouterr().out)[1:]
    assert "-h, --help" in options[0]
    for option in options[1:]:
        name, *words = option.split("\n\n")[0].split()
        takes_value = words and words[0][0] in "[{ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        assert not takes_value or "default" in option, option


def test_doctor_gives_a_verdict_and_the_next_step(capsys):
    assert main(["doctor"]) == 0
    verdict, step, *findings = capsys.readouterr().out.splitlines()
    assert verdict.startswith("Ready: ") and step == "Next: cqs demo"
    assert len(findings) <= 10 and not any("requires" in line for line in findings)
    assert main(["doctor", "--all"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{verdict}\n{step}\n") and "no, it requires" in output
    assert all(f" {name} " in output for name in BACKENDS) and "sparse patterns" in output


def test_doctor_says_how_to_use_a_gpu_that_pytorch_cannot_use(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    for version, step in (("13.0", "torch.cuda.init()"), (None, "install PyTorch with CUDA")):
        monkeypatch.setattr("torch.version.cuda", version)
        assert main(["doctor"]) == 0
        verdict, next_step, *_ = capsys.readouterr().out.splitlines()
        assert verdict.startswith("Not ready: ") and step in next_step


def test_a_terminal_shows_the_words_of_plain_text(capsys, monkeypatch):
    def printed(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert main("simulate --devices 8,64 --kv-heads 8".split()) == 0
        return capsys.readouterr().out

    plain = printed()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    drawn = re.sub(r"\x1b\[\d*m", "", printed(TERM="xterm", COLUMNS="100"))
    assert "\u2500" in drawn and max(map(len, drawn.splitlines()[3:-1])) <= 100
    assert sorted(re.findall(r"[^\s\u2500-]+", drawn)) == sorted(re.findall(r"[^\s-]+", plain))
    assert printed(COLUMNS="50") == plain, "too narrow for the table"
    assert printed(COLUMNS="100", NO_COLOR="1") == plain


def test_tables_need_no_rich(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show(Table(["worker", "share"], [["first", "14.3 %"]]))
    assert capsys.readouterr().out == "worker   share\n------  ------\nfirst   14.3 %\n"


def test_the_reference_of_commands_is_up_to_date():
    text = PAGE.read_text().partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]
    assert text == format_tables(), "run python tests/command_reference.py"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A working directory with query, key and value; and the problem that they are."""
    monkeypatch.chdir(tmp_path)
    tensors = torch.randn(3, 1, 4, 60, 8)
    for name, tensor in zip(("q", "k", "v"), tensors, strict=True):
        np.save(f"{name}.npy", tensor.numpy())
    return check_problem(*tensors, is_causal=True)


ATTEND = ["attend", "q.npy", "k.npy", "v.npy", "o.npy"]


def run_attend(*options):
    return main([*ATTEND, "--causal", "--tasks=7", *options])


@pytest.mark.parametrize(
    ("command", "note"),
    [
        (["plan", "--seqlen", "4", "--tasks", "7", "--json"], "7 tasks for 4 tokens"),
        (["simulate", "--seqlen", "4", "--devices", "2,7"], "7 devices for 4 tokens"),
        ([*ATTEND, "--tasks", "70"], "70 tasks for 60 tokens"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_more_tasks_than_tokens_are_noted(files, capsys, command, note):
    assert main(command) == 0
    assert note in capsys.readouterr().err


def test_lengths_may_have_units(capsys):
    assert main(["plan", "--seqlen", "64K", "--seqlen-kv", "1M", "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert (plan.seqlen_q, plan.seqlen_kv) == (65536, 2**20)


@pytest.mark.parametrize(
    ("text", "number"),
    [("-3", -3), ("1.5k", 1536), ("2e3", 2000), ("9007199254740993", 9007199254740993)],
)
def test_integers_are_read_exactly(text, number):
    assert parse_integer(text) == number


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan --tasks 1e8", "num_tasks must be at most"),
        ("plan --tasks 1025 --json tasks", "--tasks with --json tasks must be at most"),
        ("plan --tasks 5000 --picture plan.png", "--tasks with --picture must be at most"),
        ("plan --tasks 2000 --pattern causal()", "num_tasks must be at most"),
        ("plan --tasks 100000 --interest-set traffic", "num_tasks must be at most"),
        (f"plan --tasks 250K --interest-set {','.join('0' * 9000)}", "interest_set must have at"),
        (f"plan --interest-set 0,1,1{'0' * 30}", "interest_set must lie in range(7)"),
        ("plan --interest-sets 1025", "num_tasks must be at most"),
        ("plan --interest-sets 0", "num_tasks must be at least 1"),
        ("plan --interest-sets 9 --json", "must be without --json and --picture"),
        (f"plan --seqlen 1{'0' * 30}", "seqlen_q must be at most"),
        ("plan --rows 0", "--rows must be at least 1"),
        ("plan --pattern per_head([[causal(),strided(2)]])", "differs by head"),
        ("attend q.npy k.npy v.npy o.npy --tasks 5000", "num_tasks must be at most"),
        ("attend q.npy k.npy v.npy o.npy --resume run", "go with --budget"),
        ("attend q.npy k.npy v.npy o.npy --budget 1MB --tasks 3", "--budget cannot be combined"),
        ("demo --tasks 1e8", "num_tasks must be at most"),
        ("demo --seqlen 1e17", "too little memory"),
        ("report --tasks 1e8", "--tasks must be at most"),
        ("report --tasks 3,0", "--tasks must be at least 1, got 0"),
        ("report --heads 3 --kv-heads 2", "num_heads must be a positive multiple"),
        ("report --seed -1", "--seed must be at least 0, got -1"),
        ("report --pattern strided(", "is no expression"),
        ("report --workers 2", "--executor must be ray with --workers"),
        ("simulate --devices 1e8", "--devices must be at most"),
        ("simulate --devices=8,-1K", "--devices must be at least 1, got -1024"),
        ("simulate --between ib", "--devices-per-node must be given"),
        ("simulate --rate 0", "rate must be positive, got 0"),
        ("simulate --latency -1", "latency must be at least 0 and finite, got -1e-06"),
        ("simulate --latency inf", "latency must be at least 0 and finite, got inf"),
        ("simulate --heads 0", "num_heads must be at least 1, got 0"),
        ("simulate --seqlen 0", "--seqlen must be at least 1, got 0"),
    ],
    ids=lambda text: text[:50],
)
def test_impossible_options_are_refused_at_once(files, capsys, command, message):
    start = time.process_time()
    assert main(command.split()) == 2
    assert time.process_time() - start < 10
    output, error = capsys.readouterr()
    *notes, line = error.splitlines()
    assert output == "" and message in line and len(notes) < 2
    assert sorted(map(str, Path().rglob("*.*"))) == ["k.npy", "q.npy", "v.npy"]


def test_plans_are_summarised_by_the_tokens_of_their_tasks(capsys):
    assert main("plan --seqlen 7000 --tasks 7 --causal --rows 2".split()) == 0
    title, header, _, *rows, more, ratio, tokens, first, second = (
        capsys.readouterr().out.splitlines()
    )
    assert "7 tasks" in title and header.split()[0] == "task"
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert more == "... and 5 tasks more" and float(ratio.split()[-1]) == pytest.approx(7, 0.01)
    assert tokens == (
        "tokens of a task: longest 3,000, shortest 2,000, mean 2,714.3, standard deviation 451.8"
    )
    assert first.split()[:4] == ["2,000", "..", "2,100", "2"]
    assert second.split()[:4] == ["2,909", "..", "3,000", "5"]


def test_stored_interest_sets_are_listed_and_chosen(capsys):
    assert main("plan --interest-sets 9 --seqlen 1000 --causal".split()) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["interest", "set", "longest"] and len(rows) == 16
    assert [row.endswith("*") for row in rows] == [True] + [False] * 15
    rows = [row.removesuffix("*") for row in rows]
    least = min(rows, key=lambda row: float(row.split()[-2].replace(",", "")))
    assert main("plan --tasks 9 --seqlen 1000 --causal --interest-set traffic".split()) == 0
    chosen = ", ".join(least.split()[:4])
    assert f"interest set ({chosen})" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [("plan --tasks 700", ""), ("simulate", ""), ("simulate", "1")]
)
def test_a_reader_that_leaves_early_ends_a_command_quietly(arguments, unbuffered):
    command = [sys.executable, "-m", "cqs", *arguments.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
def test_standard_streams_may_be_closed(files):
    script = f"{shlex.join([sys.executable, '-m', 'cqs', *ATTEND])} <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert np.load("o.npy").shape == (1, 4, 60, 8)


@pytest.mark.parametrize("picture", ["", "plan.xyz", "plan", "nowhere/plan.png", "folder.png"])
def test_impossible_pictures_are_refused_before_the_work(capsys, tmp_path, monkeypatch, picture):
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder.png")
    assert main(["plan", "--picture", picture]) == 2
    output, error = capsys.readouterr()
    assert output == "" and picture in error and error.count("\n") == 1


SUFFIXES = pytest.mark.parametrize("suffix", ["npy", "safetensors"])


@SUFFIXES
def test_two_writers_of_one_file_do_not_share_a_temporary_one(tmp_path, suffix):
    target = str(tmp_path / f"o.{suffix}")
    with create_tensor(target, "output", (1, 1, 4, 5), torch.float32) as first:
        with create_tensor(target, "output", (1, 1, 4, 5), torch.float32) as second:
            assert len(os.listdir(tmp_path)) == 2
            first.fill_(1)
            second.fill_(2)
            assert (first == 1).all()
        assert sorted(os.listdir(tmp_path))[0] == f"o.{suffix}"
    assert os.listdir(tmp_path) == [f"o.{suffix}"]


@SUFFIXES
def test_space_is_taken_before_the_work(tmp_path, monkeypatch, suffix):
    target = str(tmp_path / f"o.{suffix}")
    with create_tensor(target, "output", (1, 1, 1000, 1000), torch.float32):
        (partial,) = os.scandir(tmp_path)
        assert partial.stat().st_blocks * 512 >= 4_000_000
    for error, raised in ((OSError("No space left"), ValueError), (KeyboardInterrupt, None)):
        monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=error))
        with pytest.raises(raised or error):
            with create_tensor(target, "output", (1, 1, 1000, 1000), torch.float32):
                pytest.fail("there is no space")
        assert os.listdir(tmp_path) == [f"o.{suffix}"]


def test_failures_end_in_one_line_and_status_1(files, monkeypatch, capsys):
    from cqs.commands import attend as command
    from cqs.executors.ray import TaskFailedError, WorkersFailedError
    from cqs.executors.verify import VerificationError

    for failure in (VerificationError, WorkersFailedError, TaskFailedError):
        monkeypatch.setattr(command, "attend", Mock(side_effect=failure("it failed")))
        assert run_attend() == 1
        assert capsys.readouterr().err.splitlines()[-1] == "cqs attend: it failed"
    monkeypatch.setattr(command, "attend", lambda *arguments, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_attend()
    assert sorted(os.listdir()) == ["k.npy", "q.npy", "v.npy"]


@pytest.mark.parametrize(
    ("options", "tasks"),
    [(["--tasks=7"], "7"), (["--budget=100KB", "--device=cpu"], "1, within 100KB of cpu")],
    ids=["tasks", "budget"],
)
def test_attend_says_shapes_tasks_backend_and_time(files, capsys, options, tasks):
    assert main([*ATTEND, "--backend=reference", *options]) == 0
    *inputs, how, output = capsys.readouterr().out.splitlines()
    shape = "[batch 1, heads 4, tokens 60, dim 8] torch.float32"
    assert inputs == [f"{name} {shape}" for name in ("query", "key", "value")]
    expected = rf"tasks: {tasks}, backend: reference, [\d.]+ s from files to file"
    assert re.fullmatch(expected, how)
    assert output == f"o.npy: {shape}"


def test_attend_finds_a_wrong_answer(files, monkeypatch, capsys):
    from cqs.executors.local import LocalExecutor

    monkeypatch.setattr(LocalExecutor, "run", lambda self, part, into, hooks: into.output.fill_(7))
    assert run_attend("--verify") == 1
    assert "cqs attend: output of batch 0, head 0, row 0 deviates by" in capsys.readouterr().err
    assert not os.path.exists("o.npy")


@pytest.mark.parametrize(
    "text",
    [
        "dilated(3, 0, 4) & causal()",
        "strided(8) - (fixed(8, 1) | block_diagonal(4))",
        "global_tokens([0, 1, 5])",
        "longformer(6, [0, 70])",
        "bigbird(block=16, seed=5)",
        "documents([0, 3, 9], is_causal=False)",
        "block_sparse([[1, 0], [1, 1]], 4)",
        "from_mask([[True], [False]])",
        "acsr([0, 1], (1, 1), [1, 1])",
        "per_head([[causal(), strided(3)]])",
    ],
)
def test_patterns_are_read_as_they_print(text):
    pattern = eval(text, vars(patterns))
    assert parse_pattern(text) == pattern
    if "<" not in repr(pattern):  # which stands for many elements
        assert parse_pattern(repr(pattern)) == pattern


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no expression"),
        ("x = causal()", "is no expression"),
        ("[causal()]", r"is no pattern but \[causal"),
        ("causal", "'causal' is neither a literal nor a call of"),
        ("open('owned', 'w')", "is neither a literal nor a call of"),
        ("causal().__class__", "is neither a literal nor a call of"),
        ("(lambda: causal())()", "is neither a literal nor a call of"),
        ("strided([i for i in [3]][0])", "is neither a literal nor a call of"),
        ("strided(*[3])", "is neither a literal nor a call of"),
        ("causal() | 3", "is neither a literal nor a call of"),
        ("strided(0)", "stride must be at least 1, got 0"),
        ("global_tokens([*range(0, 1000000000, 2)])", "what a star unpacks must have at most"),
        ("documents(range(0, 100000000000))", "cu_seqlens must have at most"),
        ("|".join(f"global_tokens([{i}])" for i in range(300)), "at most 100 levels deep"),
        ("strided()", "missing 1 required positional argument"),
        ("|".join(["causal()"] * 10_000), "nested too deeply|is no expression"),
    ],
    ids=lambda text: text[:50],
)
def test_everything_else_is_refused_in_one_line(tmp_path, monkeypatch, capsys, text, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        parse_pattern(text)
    assert main(["plan", f"--pattern={text}"]) == 2
    output, error = capsys.readouterr()
    assert output == "" and error.startswith("cqs plan: ") and error.count("\n") == 1
    assert os.listdir() == []


def test_plans_of_patterns_are_shown(tmp_path, capsys):
    path = tmp_path / "plan.png"
    options = ["--seqlen", "700", "--pattern", "sliding_window(9, 5)", "--causal"]
    assert main(["plan", *options, "--picture", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "sliding_window(9, 5) & causal() attention" in capsys.readouterr().out
    assert main(["plan", *options, "--json"]) == 0
    plan = Plan.from_json(
        capsys.readouterr().out, patterns.sliding_window(9, 5) & patterns.causal()
    )
    assert plan.live_pairs == 700 * 10 - 45


@pytest.mark.parametrize(
    ("text", "executor"),
    [
        ("sliding_window(20, 5) | global_tokens(2)", "local"),
        ("per_head([[strided(4), causal(), fixed(8, 1), block_diagonal(16)]])", "local"),
        pytest.param("strided(4)", "ray", marks=[pytest.mark.ray, pytest.mark.long]),
    ],
)
def test_attend_takes_patterns(files, request, assert_right, text, executor):
    if executor == "ray":
        request.getfixturevalue("ray_session")
    options = "--pattern", text, "--executor", executor, "--verify", "--lse", "lse.npy"
    assert run_attend(*options) == 0
    pattern = parse_pattern(text) & patterns.causal()
    problem = check_problem(files.query, files.key, files.value, pattern=pattern)
    found = (torch.from_numpy(np.load(f"{name}.npy")) for name in ("o", "lse"))
    assert_right(problem, tuple(found))
    assert sorted(os.listdir()) == ["k.npy", "lse.npy", "o.npy", "q.npy", "v.npy"]


WITHOUT_BUDGET = [*ATTEND, "--causal"]
BUDGETED = [*WITHOUT_BUDGET, "--budget", "100KB", "--device", "cpu"]
COMMANDS = pytest.mark.parametrize(
    "command",
    [BUDGETED, WITHOUT_BUDGET, [*BUDGETED, "--resume", "run"]],
    ids=["budget", "no budget", "resume"],
)


@contextmanager
def interrupted_at(number):
    """Interrupt a command after some blocks."""
    from cqs.executors.streaming import executor

    calls = [*[DEFAULT] * number, KeyboardInterrupt]
    look = Mock(wraps=executor._fingerprints, side_effect=calls)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(executor, "_fingerprints", look)
        yield


def test_attend_keeps_a_budget_and_goes_on_where_it_was_stopped(files, capsys):
    resumed, mine = [*BUDGETED, "--resume", "run"], {"o.npy.partial.npy", "run.partial"}
    for name in mine:
        Path(name).write_text("mine")
    before = set(os.listdir())
    for number, command in ((1, resumed), (3, BUDGETED)):
        with interrupted_at(number):
            main(command)
        assert set(os.listdir()) == before, "nothing was final"
    with interrupted_at(4):
        main(resumed)
    (partial,) = set(os.listdir()) - {*before, "run"}
    output = capsys.readouterr().err
    assert os.path.realpath("run") in output and partial in output
    for other in ("other.npy", f"{partial}.npy", "o.safetensors"):
        assert main([*resumed[:4], other, *resumed[5:]]) == 2
        assert repr(other) in capsys.readouterr().err
    content = Path(partial).read_bytes()
    Path(partial).write_bytes(content[:-3])
    for _ in range(2):
        assert main(resumed) == 2
        assert partial in capsys.readouterr().err.splitlines()[-1]
        Path(partial).unlink(missing_ok=True)
    Path(partial).write_bytes(content)
    assert main([*resumed, "--verify"]) == 0
    assert set(os.listdir()) == {*before, "o.npy"}
    output, _ = attend(files)
    torch.testing.assert_close(torch.from_numpy(np.load("o.npy")), output, atol=1e-6, rtol=1e-5)
    assert all(Path(name).read_text() == "mine" for name in mine)


@pytest.mark.slow
def test_a_path_that_is_no_text_is_printed_as_it_is(files):
    """A process of its own, whose output refuses what is no UTF-8, as in most locales."""
    path = b"o\xff.npy"
    command = [sys.executable, "-m", "cqs", *WITHOUT_BUDGET[:4], path]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"}, capture_output=True
    )
    assert done.returncode == 0 and path in done.stdout and not done.stderr
    assert os.path.exists(path)


def test_attend_goes_on_after_a_kill_between_the_rename_and_the_end(files, capsys):
    before = set(os.listdir())
    if (child := os.fork()) == 0:
        rename = os.replace

        def be_killed(source, target):
            rename(source, target)
            if target == "o.npy":
                os.kill(os.getpid(), 9)

        os.replace = be_killed
        torch.set_num_threads(1)
        os._exit(main([*BUDGETED, "--resume", "run"]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert set(os.listdir()) == before | {"o.npy", "run"}
    content = Path("o.npy").read_bytes()
    os.rename("o.npy", "mine.npy")
    Path("o.npy").write_bytes(content)
    assert main([*BUDGETED, "--resume", "run"]) == 2
    assert "missing" in capsys.readouterr().err, "a file of that name that another has made"
    os.replace("mine.npy", "o.npy")
    inode = os.stat("o.npy").st_ino
    assert main([*BUDGETED, "--resume", "run"]) == 0
    assert set(os.listdir()) == before | {"o.npy"} and os.stat("o.npy").st_ino == inode
    assert Path("o.npy").read_bytes() == content


@COMMANDS
@pytest.mark.parametrize(
    "name", ["q.npy", "./v.npy", "symbolic.npy", "hard.npy", "folder/../k.npy"]
)
def test_attend_writes_to_no_file_that_it_reads(files, capsys, command, name):
    os.symlink("q.npy", "symbolic.npy")
    os.link("k.npy", "hard.npy")
    os.mkdir("folder")
    before = written_files()
    assert main([*command[:4], name, *command[5:]]) == 2
    assert repr(name) in capsys.readouterr().err
    if command is WITHOUT_BUDGET:
        assert main([*command, "--lse", name]) == 2
        assert main([*command, "--lse", "./o.npy"]) == 2
    assert written_files() == before


@pytest.mark.parametrize("name", ["run/lse", "symbolic.npy", "hard.npy"])
def test_attend_keeps_inputs_in_its_resume_directory(files, capsys, name):
    os.mkdir("run")
    Path("run/cqs-resume").touch()  # as a run leaves it that was killed at once
    os.rename("k.npy", "run/lse")
    os.symlink("run/lse", "symbolic.npy")
    os.link("run/lse", "hard.npy")
    before = written_files("run")
    assert main([*BUDGETED[:2], name, *BUDGETED[3:], "--resume", "run"]) == 2
    assert "--resume must be another file than" in capsys.readouterr().err
    assert written_files("run") == before


def test_attend_writes_to_no_safetensors_file_that_it_reads(files, capsys):
    tensors = {name: getattr(files, name).contiguous() for name in ("query", "key", "value")}
    save_file(tensors, "all.safetensors")
    for options in ([], ["--budget", "100KB", "--device", "cpu"]):
        inputs = [f"all.safetensors:{name}" for name in tensors]
        assert main(["attend", *inputs, "all.safetensors", *options]) == 2
        assert "'all.safetensors'" in capsys.readouterr().err
        assert main(["attend", *inputs, "o.safetensors", *options]) == 0
    assert load_file("all.safetensors").keys() == tensors.keys()


@COMMANDS
@pytest.mark.parametrize(
    "name", ["pipe.npy", "folder.npy", "pipe.safetensors", "q.npy/o.npy", "nowhere/o.npy"]
)
def test_attend_takes_regular_files_alone(files, capsys, monkeypatch, command, name):
    """A pipe would be waited for."""
    os.mkfifo("pipe.npy")
    os.mkfifo("pipe.safetensors")
    os.mkdir("folder.npy")
    before = sorted(os.listdir())
    monkeypatch.setattr("cqs.streaming.attention", lambda *_, **__: 1 / 0)
    monkeypatch.setattr("cqs.commands.attend.attend", lambda *_, **__: 1 / 0)
    for place in (1, 4):
        assert main([*command[:place], name, *command[place + 1 :]]) == 2
        error = capsys.readouterr().err
        assert name in error and error.count("\n") == 1
    assert sorted(os.listdir()) == before


def array(shape="(1, 4, 60, 8)", descr="'<f4'", is_fortran=False):
    header = f"{{'descr': {descr}, 'fortran_order': {is_fortran}, 'shape': {shape}, }}"
    header = header.ljust(117) + "\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    return content + bytes(4 * 60 * 8 * 4)


@COMMANDS
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (array(is_fortran=True), "four dimensions in C order .* in Fortran order"),
        (array("(4, 60, 8)"), r"four dimensions in C order .*\(4, 60, 8\)"),
        (array(descr="'>f4'"), "got .*>f"),
        (array(descr="'|O'"), ""),
        (array(descr="'<i4'"), "got torch.int32"),
        (array("(1, 4, -60, 8)"), ""),
        (array(f"(1, 4, {10**30}, 8)"), ""),
        (array("(1, 4, 60.0, 8)"), ""),
        (array("(" * 60), ""),
        (array("'''"), ""),
        (array()[:50], ""),
        (b"\x93NUMPY\x07\x00", ""),
        (b"", ""),
    ],
    ids=lambda content: str(content[10:80]),
)
def test_damaged_arrays_are_refused_in_one_line(files, capsys, command, content, message):
    Path("k.npy").write_bytes(content)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert re.match(f"cqs attend: .*{message}", error) and error.count("\n") == 1
    assert sorted(os.listdir()) == ["k.npy", "q.npy", "v.npy"]


@pytest.mark.long
@pytest.mark.ray
def test_the_demo_kills_a_worker(capsys):
    assert main(["demo", "--seqlen", "8192", "--workers", "2", "--kill"]) == 0
    *_, killed, dense, compared = capsys.readouterr().out.splitlines()
    assert re.match(r"[1-7] tasks ran again in .* the result is bitwise identical", killed)
    assert dense.startswith("one dense call")
    assert "float64 on sampled rows: correct" in compared


def test_the_demo_runs_without_ray(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["demo", "--seqlen", "300"]) == 0
    printed = capsys.readouterr()
    assert "without Ray one process computes all tasks" in printed.out
    assert "float64 on sampled rows: correct" in printed.out
    assert main(["demo", "--seqlen", "300", "--kill"]) == 2
    assert "--kill requires Ray" in capsys.readouterr().err
