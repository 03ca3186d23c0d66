"""The code on the pages runs, and so do the examples of the gallery, at smoke size."""

import ast
import contextlib
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import matplotlib
import pytest
import torch
from sklearn.model_selection import GridSearchCV
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..ranks import processes

ROOT = Path(__file__).parents[2]
PAGES = [p for folder in ("howto", "explain") for p in sorted((ROOT / "docs" / folder).glob("*.md"))]
EXAMPLES = sorted((ROOT / "docs/gallery").glob("plot_*.py"))
NEEDED = {"lightning": "lightning", "accelerate": "accelerate"}
# Two are in tests/test_docs.py: one goes on from the README's code, one shows a warning. One is in tests/tools, one in
# tests/ranks/test_elastic.py, and one below.
ELSEWHERE = ("checkpoints", "compile", "ddp", "drop_in", "elastic")


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem not in ELSEWHERE], ids=lambda p: p.stem)
@pytest.mark.filterwarnings("default", "error::bilevel_optim.BilevelWarning")  # tools give warnings of their own
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, request):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    if not blocks:
        return
    if page.stem in NEEDED:
        pytest.importorskip(NEEDED[page.stem])
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    module = types.ModuleType(f"page_{page.stem}")  # where torch before 2.12 looks for what functions read
    monkeypatch.setitem(sys.modules, module.__name__, module)
    namespace = vars(module)
    for block in blocks:  # later ones go on from earlier ones
        short = re.sub(r"range\((1[1-9]\d|\d{4,})\)", "range(20)", block)  # what takes longer
        if not request.config.getoption("--slow"):
            short = short.replace(", 500, ", ", 40, ")  # steps of an ordinary training
            short = re.sub(r"range\(20\)", "range(5)", short)
            short = short if "assert" in block else short.replace("range(100)", "range(5)")
            short = short.replace(", 40, ", ", 8, ").replace("steps=30)", "steps=5)")
            short = short.replace("range(10):\n    w = solve(", "range(1):\n    w = solve(")  # each solves five folds
            short = short.replace("np.logspace(-2, 1, 7)", "[0.1, 1.0]")  # each penalty is fitted to five folds
            short = short.replace("1, 28, 28)", "1, 16, 16)")  # images
        exec(compile(short, page.name, "exec"), namespace)


def losses_of(output):
    return [float(line.split()[1]) for line in output.splitlines() if re.fullmatch(r"\d+ \S+", line)]


def run_here(folder):
    """Run the program in a process that a launcher has forked, where torch is imported already."""
    os.chdir(folder)
    with open(f"printed {os.environ['RANK']}", "w") as file, contextlib.redirect_stdout(file):
        runpy.run_path("train.py", run_name="__main__")


def test_the_program_for_several_gpus_learns(tmp_path, monkeypatch):
    """Started by what `torchrun` calls."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/howto/ddp.md").read_text(), re.S)
    assert program.count("range(60)") == program.count("% 20") == 1
    (tmp_path / "train.py").write_text(program.replace("range(60)", "range(9)").replace("% 20", "% 4"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, start_method=processes.START, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, run_id="page", monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, run_here)(str(tmp_path))
    first, *_, last = losses_of((tmp_path / "printed 0").read_text())
    assert last < first
    assert losses_of((tmp_path / "printed 1").read_text()) == []
    assert set(torch.load(tmp_path / "found.pt")) == {"log_decay", "model"}


@pytest.mark.slow
def test_the_program_for_several_gpus_runs_on_two_processes(tmp_path):
    text = (ROOT / "docs/howto/ddp.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (command,) = re.findall(r"```sh\n(.*?)\n```", text, re.S)
    assert command == "torchrun --standalone --nproc-per-node 2 train.py"
    (tmp_path / "train.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(torchrun, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    first, *_, last = losses_of(ran.stdout)
    assert last < first
    assert set(torch.load(tmp_path / "found.pt")) == {"log_decay", "model"}


def test_a_folder_of_images_gives_an_index(tmp_path):
    datasets = pytest.importorskip("torchvision.datasets")
    from PIL import Image

    text = (ROOT / "docs/howto/wrong_labels.md").read_text()
    first = re.search(r"```python\n(.*?)\n\n\nfrom sklearn", text, re.S)[1]
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name / "one.png")
    namespace = {}
    exec(first, namespace)
    data = namespace["Indexed"](datasets.ImageFolder(tmp_path))
    assert [data[i][1:] for i in range(len(data))] == [(0, 0), (1, 1)]


def assert_readable_on_a_phone(figure):
    """A page of 390 pixels leaves 358 to a picture: no letter may be smaller than 9 there, and no panel narrow."""
    from matplotlib.text import Text

    scale = 358 / (figure.get_figwidth() * 72)  # pixels for a point
    small = {t.get_text(): t.get_fontsize() * scale for t in figure.findobj(Text) if t.get_text().strip()}
    assert min(small.values()) >= 9, {text: size for text, size in small.items() if size < 9}
    plots = [axis for axis in figure.axes if axis.lines or axis.patches or axis.containers]
    assert all(axis.get_window_extent().width > 0.3 * figure.bbox.width for axis in plots)


def few_fits(estimator, grid, **options):
    """Search on the first two points of each axis."""
    return GridSearchCV(estimator, {name: values[:2] for name, values in grid.items()}, **options)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_runs_and_draws(path, monkeypatch, request):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    monkeypatch.setenv("SMOKE", "1")
    if not request.config.getoption("--slow"):
        monkeypatch.setattr("sklearn.model_selection.GridSearchCV", few_fits)
    monkeypatch.setattr(plt, "show", lambda: None)
    torch.set_default_dtype(torch.float32)
    plt.close("all")
    try:
        runpy.run_path(str(path), run_name=path.stem)
        (number,) = plt.get_fignums()
        figure = plt.figure(number)
        assert all(axis.has_data() or axis.images or axis.child_axes for axis in figure.axes if axis.axison)
        assert_readable_on_a_phone(figure)
    finally:
        plt.close("all")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_short_and_says_what_it_is(path):
    text = path.read_text()
    title, line = (ast.get_docstring(ast.parse(text)) or "").splitlines()[:2]
    assert line == "=" * len(title)
    code = [row for row in text.split('"""', 2)[2].splitlines() if row.strip() and not row.startswith("#")]
    assert len(code) <= 80
    assert max(map(len, text.splitlines())) <= 88


def test_the_examples_have_the_width_of_a_page():
    assert "line-length = 88" in (ROOT / "docs/gallery/ruff.toml").read_text()


def test_there_are_enough_examples():
    assert len(EXAMPLES) >= 12
    names = {name for path in EXAMPLES for name in re.findall(r"\bbo\.(\w+)", path.read_text())}
    assert {"AID", "ITD", "F2SA", "SOBA", "MAML", "RSVRB", "PRAHGD", "GDA", "check_hypergradient"} <= names
