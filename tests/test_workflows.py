"""Third parties cannot change the code that workflows run or publish; type checkers see an installation."""

import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from .selection import MAIN

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_those_of_one_commit(path):
    used = re.findall(r"uses: (\S+)(.*)", path.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_only_jobs_that_install_nothing_may_write(path):
    head, *jobs = re.split(r"^  (?=\w+:\n)", path.read_text().partition("\njobs:\n")[2], flags=re.MULTILINE)
    assert not head
    assert re.search(r"^permissions:\n  contents: read\n(?! )", path.read_text(), re.MULTILINE)
    for job in jobs:
        may_write = re.search(r"^ +[\w-]+: write", job, re.MULTILINE)
        assert not (may_write and "pip install" in job)


def test_an_editable_installation_is_a_path():
    """Type checkers do not run import hooks."""
    found = [path for place in site.getsitepackages() for path in Path(place).glob("__editable__*bilevel_optim*")]
    if not found:
        pytest.skip("the installation is not editable")
    assert [path.suffix for path in found] == [".pth"]
    assert (Path(found[0].read_text().strip()) / "bilevel_optim").is_dir()


def test_the_full_sizes_of_all_tests_run_nightly():
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    wanted = sorted(folders | {"files", "package", "inductor"})
    named = re.search(r"^    set -- (.*)$", (ROOT / ".ci/slow").read_text(), re.MULTILINE)[1]
    assert sorted(named.split()) == wanted
    nightly = re.search(r"folder: \[(.*)\]", (ROOT / ".github/workflows/nightly.yml").read_text())[1]
    assert sorted(re.findall(r"\w+", nightly)) == wanted


@pytest.mark.slow  # as its pass, which ends with an error if it selects nothing
def test_the_inductor_pass_selects_tests_in_any_folder(tmp_path):
    """Also where the name of the checkout is that of a marker."""
    command = re.search(r'inductor\) command="(.*)"', (ROOT / ".ci/slow").read_text())[1]
    place = tmp_path / "slow"
    shutil.copytree(ROOT / "tests", place / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", place)
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only", *command.split()],
        cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    selected = re.findall(r"test_fifty_steps\[(.*)-torch.float64-stochastic\]", found.stdout)
    assert sorted(selected) == sorted(MAIN), found.stdout + found.stderr
