"""The scripts of the page about loops: each becomes bilevel by its diff, of at most six lines; needs ``tools``."""

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs/howto/drop_in.md").read_text()
TASK, *SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
NAMES = ["loop", "accelerate", "lightning", "transformers"]

pytestmark = pytest.mark.filterwarnings("ignore")


def changed(script, diff):
    """The script after a diff, whose lines in common with it are anchors."""
    lines, at, new = script.splitlines(), 0, []
    for line in diff.splitlines():
        kind, text = line[:1], line[1:]
        if kind == "+":
            new.append(text)
            continue
        found = lines.index(text, at)
        new += lines[at:found] + ([text] if kind == " " else [])
        at = found + 1
    return "\n".join([*new, *lines[at:]])


def run(*scripts):
    torch.set_default_dtype(torch.float32)
    names = {}
    for script in scripts:
        exec(script, names)
    return names


def accuracy(names):
    model, test = names["model"], names["test"]
    return float((model(names["images"][test]).argmax(1) == names["truth"][test]).float().mean())


def test_the_page_has_a_diff_of_six_lines_for_each_script():
    assert len(SCRIPTS) == len(DIFFS) == len(NAMES)
    for diff in DIFFS:
        assert sum(line[0] in "+-" for line in diff.splitlines()) <= 6


SAID = [float(f) for f in re.findall(r"0\.\d\d\d", PAGE.split("## What to expect")[1])]


@pytest.mark.slow
@pytest.mark.parametrize("bilevel", [False, True], ids=["plain", "bilevel"])
def test_the_page_says_what_the_loop_reaches(bilevel):
    found = accuracy(run(TASK, changed(SCRIPTS[0], DIFFS[0]) if bilevel else SCRIPTS[0]))
    assert found == pytest.approx(SAID[bilevel], abs=0.01)


def test_a_few_steps_of_the_bilevel_loop_reach_more_than_the_plain_one():
    names = run(TASK, changed(SCRIPTS[0], DIFFS[0]).replace("range(100)", "range(12)"))
    assert accuracy(names) > SAID[False] + 0.1
    assert names["weights"][names["wrong"]].mean() < names["weights"][~names["wrong"]].mean() - 0.5


@pytest.mark.parametrize("bilevel", [False, True], ids=["plain", "bilevel"])
@pytest.mark.parametrize("name", NAMES[1:3])
def test_a_trainer_learns_what_the_loop_learns(name, bilevel):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install .[tools]")
    ends = []
    for i in (0, NAMES.index(name)):
        names = run(TASK, changed(SCRIPTS[i], DIFFS[i]) if bilevel else SCRIPTS[i])
        ends.append([names["weights"].detach(), *(p.detach() for p in names["model"].parameters())])
    assert all(map(torch.equal, *ends))
    assert bool(ends[0][0].any()) == bilevel


@pytest.mark.slow
def test_the_trainer_of_transformers_makes_bilevel_steps(tmp_path, monkeypatch):
    """60 steps hardly train the model, so this is about the steps, not about what they reach."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install .[tools]")
    monkeypatch.chdir(tmp_path)
    plain = run(TASK, SCRIPTS[3])
    assert not plain["weights"].any()
    weights = run(TASK, changed(SCRIPTS[3], DIFFS[3]))["weights"].detach()
    assert weights.isfinite().all()
    assert weights.bool().float().mean() > 0.9  # nearly all labels have been in a batch
