"""The code in README.md and docs does what they say."""

import argparse
import doctest
import logging
import os
import re
import runpy
import shlex
import sys
import tomllib
from importlib import import_module

import pytest
from ranks import run_as_torchrun
from support.pages import ROOT, fences, joined
from torch.distributed.run import get_args_parser

import benchmarks.__main__
from cqs.__main__ import main

pytestmark = pytest.mark.slow

PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))]
SAMPLE = ("docs/api/scores.md",)
"""Pages that `make test` runs."""
PACKAGES = {"cqs": "cqs.commands", "benchmarks": "benchmarks"}
CHECKER = doctest.OutputChecker()


def with_marks(page):
    uses_ray = any(
        fence.language == "python" and "Cluster(" in fence.code for fence in fences(page)
    )
    marks = [pytest.mark.ray] if uses_ray else []
    return pytest.param(page, marks=marks + ([] if page in SAMPLE else [pytest.mark.long]))


def run_python(fence, names, page):
    """Blocks of a page share their names; what follows a prompt must print what is shown."""
    if not fence.code.startswith(">>>"):
        exec(compile(fence.code, page, "exec"), names)
        return
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    test = doctest.DocTestParser().get_doctest(fence.code, names, page, page, 0)
    assert runner.run(test, clear_globs=False).failed == 0
    names.update(test.globs)


def run_command(command, folder, is_shown):
    """Run a command; where its output is not shown, simulations of chance need few trials."""
    name, *arguments = shlex.split(command)
    if "--trials" in arguments and not is_shown:
        arguments += ["--trials", "2"]
    if name == "cqs":
        assert main(arguments) == 0
        return
    if (name, *arguments[:2]) == ("python", "-m", "benchmarks"):
        assert benchmarks.__main__.main(arguments[2:]) == 0
        return
    assert name == "torchrun", f"cannot run {command!r}"
    options = get_args_parser().parse_args(arguments)
    run_as_torchrun(int(options.nproc_per_node), run_script, folder, options.training_script)


def run_script(folder, script):
    os.chdir(folder)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.parametrize("page", [with_marks(page) for page in PAGES])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    """``python`` and ``bash`` run in the order of the page; ``sh`` needs more than this machine."""
    monkeypatch.chdir(tmp_path)
    for name in ("benchmarks", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    names = {"__name__": "__main__"}
    monkeypatch.setattr(logging.getLogger("cqs"), "level", logging.NOTSET)  # a page changes it
    for fence in fences(page):
        capsys.readouterr()
        if fence.language == "python" and fence.file:
            (tmp_path / fence.file).write_text(fence.code)
            continue
        if fence.language == "python":
            run_python(fence, names, page)
        elif fence.language == "bash":
            for command in joined(fence.code):
                run_command(command, tmp_path, is_shown=fence.output is not None)
        if fence.output:
            lines = capsys.readouterr().out.splitlines()
            printed = "".join(f"{line.rstrip()}\n" for line in lines)
            assert CHECKER.check_output(fence.output, printed, doctest.ELLIPSIS), printed


@pytest.mark.parametrize("page", PAGES)
def test_pictures_and_tests_that_a_page_names_are_there(page):
    text = (ROOT / page).read_text()
    for picture in re.findall(r'<img src="([^"]+)"', text):
        assert ((ROOT / page).parent / picture).is_file()
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_need_more_than_this_machine_have_their_options(page):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    for fence in fences(page):
        for command in joined(fence.code) if fence.language == "sh" else ():
            words = shlex.split(command, comments=True)
            if words[:2] == ["pip", "install"]:
                for extra in re.findall(r"\[([\w,]+)\]", words[-1]):
                    assert set(extra.split(",")) <= set(extras["optional-dependencies"])
            elif words[0] == "make":
                assert re.search(rf"^{words[1]}:", makefile, re.M)
            elif set(words) & set(PACKAGES):
                (package,) = set(words) & set(PACKAGES)
                name, *options = words[words.index(package) + 1 :]
                parser = argparse.ArgumentParser()
                import_module(f"{PACKAGES[package]}.{name}").add_arguments(parser)
                parser.parse_args(options)
            else:
                assert words[0] in ("torchrun", "ray", "python"), f"what is {command!r}?"
