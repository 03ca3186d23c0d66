"""Claim of ``docs/security.md``: nothing from a checkpoint or from data is run."""

import ast
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import bilevel_optim as bo
from recipes.few_shot.data.pickles import unpickled

from .problems import values
from .registry import ARGUMENTS, ROWS, each
from .selection import main_rows

ROOT = Path(__file__).parent.parent
PATHS = [
    path.relative_to(ROOT).as_posix()
    for folder in ("bilevel_optim", "recipes")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
UNPICKLER = "recipes/few_shot/data/pickles.py"  # whose class refuses all but arrays
PROCESSES = "recipes/common/processes.py"  # runs the recipes themselves again
FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "subprocess", "ctypes", "socket", "urllib"}
RUNNING = {"eval", "exec", "compile", "__import__"}


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_unpickled_and_nothing_evaluated(path):
    tree = ast.parse((ROOT / path).read_text())
    allowed = {UNPICKLER: {"pickle"}, PROCESSES: {"subprocess"}}.get(path, set())
    if path.startswith("bilevel_optim/"):
        assert not allowed
    found = set(imported(tree)) & FORBIDDEN
    assert found <= allowed | ({"urllib"} if path.startswith("recipes/") else set())
    for function, options in calls(tree):
        assert function not in RUNNING, path
        assert function not in ("os.system", "os.popen", "pickle.load", "pickle.loads"), path
        if function == "torch.load":
            assert options.get("weights_only") == "True", path
        if function.endswith("load") and "allow_pickle" in options:
            assert options["allow_pickle"] == "False", path


@pytest.mark.usually(*main_rows(ROWS))
@each()
def test_checkpoints_load_with_weights_only(row):
    """Nothing in the file of any method asks for a function that torch does not know to be safe."""
    problem = row.quadratic(n=5)
    optimizer = row(problem.x, problem.y, short=True)
    problem.run(optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert not torch.serialization.get_unsafe_globals_in_checkpoint(file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    problem.run(optimizer)


RAN = []


class Payload:
    """Object whose pickle runs code."""

    def __reduce__(self):
        return RAN.append, ("run",)


@pytest.mark.parametrize("form", ["archive", "bare pickle"])
def test_a_payload_in_a_state_dict_is_not_run(form):
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    optimizer = bo.AID([x], [y], **ARGUMENTS)
    losses = (lambda: (y - 1).square().sum(), lambda: (y - x).square().sum())
    optimizer.step(*losses)
    before, state = values([x, y]), optimizer.state_dict()
    file = io.BytesIO()
    if form == "archive":
        torch.save({"method": "AID", "payload": Payload()}, file)
    else:
        pickle.dump({"method": "AID", "payload": Payload()}, file, protocol=2)
    state["param_groups"][0]["bilevel"] = file.getvalue()
    with pytest.raises((pickle.UnpicklingError, ValueError, RuntimeError)):
        optimizer.load_state_dict(state)
    assert RAN == []
    assert all(torch.equal(a, b) for a, b in zip(before, values([x, y]), strict=True))
    assert optimizer.oracle_counts["upper_grad"] == 1
    optimizer.step(*losses)


def test_options_in_a_checkpoint_assign_no_other_attribute():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    optimizer = bo.F2SA([x], [y], **ARGUMENTS)
    optimizer.step(lambda: (y - 1).square().sum(), lambda: (y - x).square().sum())
    state = optimizer.state_dict()
    own = torch.load(io.BytesIO(state["param_groups"][0]["bilevel"]), weights_only=True)
    own["options"] |= {"_lower_factory": "os.system", "order": 7, "nu": 0.5}
    file = io.BytesIO()
    torch.save(own, file)
    state["param_groups"][0]["bilevel"] = file.getvalue()
    optimizer.load_state_dict(state)
    assert (optimizer.nu, optimizer.order, optimizer._lower_factory) == (0.5, 2, torch.optim.SGD)


@pytest.mark.parametrize(
    "name",
    [
        "numpy.testing scalar", "numpy.f2py dtype", "numpy.ctypeslib ndarray", "numpy.core scalar",
        "numpy.distutils.exec_command ndarray", "numpy.core.multiarray.x _reconstruct", "builtins eval",
    ],
)  # fmt: skip
def test_pickles_of_data_import_no_other_module(name, tmp_path):
    """Any part of numpy used to be allowed, and so imported, if a name in it was that of an array's function."""
    module, _, function = name.partition(" ")
    path = tmp_path / "images.pkl"
    path.write_bytes(b"c" + module.encode() + b"\n" + (function or "_reconstruct").encode() + b"\n.")
    with pytest.raises(SystemExit, match="it wants to call"):
        unpickled(path)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("core", ["core", "_core"])
def test_pickles_of_arrays_are_read(protocol, core, tmp_path):
    """As both major versions of numpy write them."""
    content = {"labels": np.arange(3), "one": np.float64(2.5), "data": np.zeros((2, 3), np.uint8), "name": "text"}
    path, other = tmp_path / "images.pkl", "_core" if core == "core" else "core"
    text = pickle.dumps(content, protocol)
    if protocol < 4:  # later ones store lengths of names
        text = text.replace(f"numpy.{other}.".encode(), f"numpy.{core}.".encode())
    path.write_bytes(text)
    found = unpickled(path)
    assert {k: np.asarray(v).tolist() for k, v in found.items()} == {
        k: np.asarray(v).tolist() for k, v in content.items()
    }
