"""Code of other libraries on the pages "Coming from ..." does what they say, where the library is installed."""

import inspect
import logging
import pkgutil
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HOWTO = Path(__file__).parents[2] / "docs/howto"
# page: (names that its code takes from other libraries, end of the common part, results of the two columns)
PAGES = {
    "higher": (("higher",), "\nmeta = ", ("log_decay", "log_decay")),
    "torchopt": (("torchopt",), "\nmeta = ", ("log_decay", "log_decay")),
    "betty": (
        ("betty.configs.Config", "betty.configs.EngineConfig", "betty.engine.Engine", "betty.problems.ImplicitProblem"),
        "\noptions = ",
        ("decay.log_decay", "log_decay"),
    ),
    "learn2learn": (("learn2learn as l2l",), "\nstart = ", ("[*model.parameters()]", "start")),
    "jaxopt": (("jax", "jax.numpy as np", "jaxopt"), "\nmethod = ", ("log_decay", "log_decay")),
}


@pytest.fixture(autouse=True)
def _quiet():
    """Betty writes to a log, which keeps the standard output of the first test."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def text_of(name):
    return (HOWTO / f"from_{name}.md").read_text()


def taken(name):
    """What the code of a page imports, by the names that it has there."""
    found = {}
    for entry in PAGES[name][0]:
        path, _, alias = entry.partition(" as ")
        top = path.partition(".")[0]
        pytest.importorskip(top, reason=f"{top} is not installed: pip install .[peers]")
        found[alias or path.rpartition(".")[2]] = pkgutil.resolve_name(path)
    return found


def results(name, change=lambda code: code):
    """Run theirs and ours, as printed, on the problem of the page."""
    text, (_, end, names) = text_of(name), PAGES[name]
    (runnable,) = re.findall(r"```python\n(.*?)```", text, re.S)
    problem, split, _ = runnable.partition(end)
    assert split
    columns = re.findall(r"```\n(.*?)```", text, re.S)[:2]
    torch.set_default_dtype(torch.float32)
    for code, result in zip(columns, names, strict=True):
        torch.manual_seed(0)
        namespace = taken(name)
        exec(problem + "\n" + change(code), namespace)
        found = eval(result, namespace)
        yield [t.detach() for t in found] if isinstance(found, list) else torch.tensor(found.tolist())


def stated(name, pattern):
    (found,) = re.findall(pattern, " ".join(text_of(name).split()))
    return found


@pytest.mark.parametrize("name", ["betty", "higher", "learn2learn", "torchopt"])
@pytest.mark.filterwarnings("default")
def test_the_other_library_gives_the_same(name):
    theirs, ours = results(name)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    assert "Both give the same" in text_of(name)


@pytest.mark.parametrize("kind", ["darts", "sama"])
@pytest.mark.filterwarnings("default")
def test_an_identity_for_the_hessian_is_a_series_of_one_term(kind):
    """A row of the table of Betty's page."""

    def change(code):
        code = re.sub(r'type="neumann", neumann_iterations=5,\s+neumann_alpha=0.1', f'type="{kind}"', code)
        return code.replace("linear_steps=5", 'linear_steps=0, hvp="finite-difference"')

    pytest.importorskip("betty")
    if version("betty-ml") < "0.2":
        pytest.skip("darts takes a coarser difference, and there is no sama")
    theirs, ours = results("betty", change)
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)
    assert '`Config(type="darts")`, `"sama"` with SGD' in text_of("betty")


@pytest.mark.filterwarnings("default")
def test_conjugate_gradients_of_betty_differ_by_the_residual_that_the_page_names(monkeypatch):
    """If they no longer do, the page has to say so."""

    def change(code):
        theirs = r'type="neumann", neumann_iterations=5,\s+neumann_alpha=0.1'
        code = re.sub(theirs, 'type="cg", cg_iterations=5', code)
        return re.sub(r'linear_solver="neumann", linear_steps=5', 'linear_solver="cg", linear_steps=50', code)

    theirs, ours = results("betty", change)  # five unknowns
    assert (theirs - ours).norm() > 0.01 * ours.norm()
    assert version("betty-ml") in stated("betty", r"to rounding \(Betty ([^)]*)\)")
    import betty.hypergradient as hypergradient

    source = inspect.getsource(hypergradient.cg)
    assert source.count("in zip(r, p)]") == 1
    namespace = dict(vars(sys.modules[hypergradient.cg.__module__]))
    exec(source.replace("in zip(r, p)]", "in zip(r_new, p)]"), namespace)
    monkeypatch.setitem(hypergradient.jvp_fn_mapping, "cg", namespace["cg"])
    theirs, ours = results("betty", change)
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)


def exact():
    """Twenty steps with the exact hypergradient, in double precision, on the problem of JAXopt's page."""
    torch.manual_seed(0)
    inputs, targets = (torch.randn(*shape, dtype=torch.float32).double() for shape in ((64, 4), (64,)))
    log_decay = torch.zeros(4, dtype=torch.float64)
    for _ in range(20):
        log_decay = log_decay.requires_grad_()
        hessian = inputs[32:].T @ inputs[32:] / 32 + log_decay.exp().diag()
        weight = torch.linalg.solve(hessian, inputs[32:].T @ targets[32:] / 32)
        loss = (inputs[:32] @ weight - targets[:32]).square().mean()
        log_decay = log_decay.detach() - 0.1 * torch.autograd.grad(loss, log_decay)[0]
    return log_decay


@pytest.mark.filterwarnings("default")
def test_jaxopt_and_we_are_as_far_from_the_truth_as_the_page_says():
    right = exact()
    said = [float(n) for n in stated("jaxopt", r"left is off by (\S+) \(JAXopt 0.8.5\) and on the right by (\S+)\.")]
    loose = float(stated("jaxopt", r"it is off by (\S+) %")) / 100
    found = [*results("jaxopt"), next(results("jaxopt", lambda code: code.replace(", tol=1e-6", "")))]
    for error, value in zip([*said, loose], found, strict=True):
        assert error / 3 < float((value.double() - right).norm() / right.norm()) < 3 * error


@pytest.mark.filterwarnings("ignore")  # of other libraries, when they are imported
def test_the_table_of_features_names_what_exists():
    """Names of this library always; those of others, and their versions, where they are installed."""
    rows = [line for line in (HOWTO.parent / "peer_features.md").read_text().splitlines() if line.startswith("| ")][1:]
    packages = {"Betty": ("betty", "betty-ml"), "BOAT": ("boat_torch", "boat-torch")}
    libraries = [cell.split() for row in rows if (cell := row.split("|")[1]).strip()]
    assert len(rows) == 2 * len(libraries) == 28
    for name in re.findall(r"`([a-z_0-9]+\.[\w.]+)`", "\n".join(rows)):
        top, _, rest = name.partition(".")
        if top == "bo" or find_spec(top):
            pkgutil.resolve_name(f"bilevel_optim.{rest}" if top == "bo" else name)
    for library, number in libraries:
        module, package = packages.get(library, (library.lower(), library.lower()))
        if find_spec(module):
            assert version(package) == number
