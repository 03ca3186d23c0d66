"""The house rules that can be seen from outside: who imports whom, who touches whose private parts, who inherits."""

import ast
from abc import ABC
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from torch.optim import Optimizer

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import methods

PACKAGE = Path(__file__).parent.parent / "bilevel_optim"
# A folder imports only those before it; ``methods`` and ``checking`` are side by side.
LAYERS = ("kernels", "problem", "distributed", "oracle", "solvers", "hypergradient", "optimizer", "methods", "checking")
FAMILIES = {
    "meta": ("aid", "itd", "zeroth_order"),
    "ba": ("aid",),
    "paid": ("aid",),
}
MODULES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in MODULES}


def parts_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts


def imports(path):
    """The modules of the package that a module imports, as tuples of names."""
    package = parts_of(path)[:-1]
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            target = base + tuple(node.module.split(".") if node.module else ())
            yield from ([(*target, alias.name) for alias in node.names] if not node.module else [target])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bilevel_optim"):
            yield tuple(node.module.split(".")[1:])


def test_few_modules_stand_outside_of_the_folders():
    assert len(list(PACKAGE.glob("*.py"))) <= 6
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_folder_imports_only_those_below(path):
    own = parts_of(path)
    if len(own) == 1:
        return  # the public face, and the errors that everything may raise
    for target in imports(path):
        if target and target[0] in LAYERS:
            assert LAYERS.index(target[0]) <= LAYERS.index(own[0]), f"{'.'.join(own)} imports {'.'.join(target)}"
            assert (own[0], target[0]) != ("checking", "methods")
        if own[0] == target[0] == "methods" and len(own) > 1 and len(target) > 1 and own[1] != "__init__":
            allowed = (own[1], *FAMILIES.get(own[1], ()))
            assert target[1] in allowed, f"{'.'.join(own)} imports {'.'.join(target)}"


def test_torch_distributed_is_named_in_one_folder():
    for path in MODULES:
        if parts_of(path)[0] != "distributed":
            text = path.read_text()
            assert "torch.distributed as" not in text, path
            assert "from torch.distributed" not in text, path


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_attributes_stay_at_home(path):
    """No attribute that begins with an underscore is used, but through self or in the module that has it."""
    tree = TREES[path]
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")):
            continue
        value = node.value
        at_home = isinstance(value, ast.Name) and value.id in ("self", "cls")
        of_super = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"
        of_torch = ast.unparse(value).startswith("torch") or node.attr in ALLOWED
        assert at_home or of_super or of_torch or node.attr in own, f"{path.name}:{node.lineno}: {ast.unparse(node)}"


ALLOWED = {
    "_replace",  # of a named tuple
    "_buffers",  # of a torch module
    "_get_backend",  # of a process group, for its timeout
}


def imported_at_once(path):
    """The modules of the package that are imported with a module, those for type checkers alone included."""
    package, waiting, found = parts_of(path)[:-1], [*TREES[path].body], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + tuple(node.module.split(".") if node.module else ())
            known = [(*base, alias.name) for alias in node.names if module_of((*base, alias.name)) is not None]
            found |= {module_of(target) for target in (known or [base])}
    return found


def module_of(target):
    path = PACKAGE.joinpath(*target)
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p in TREES), None)


def test_no_modules_import_each_other():
    """Types included: whoever needs one of them needs all. An import inside a function is none of these."""
    # oracle/ has a circle still
    graph = {path: imported_at_once(path) for path in MODULES if parts_of(path)[0] != "oracle"}
    TopologicalSorter(graph).prepare()


def test_the_optimizer_imports_the_capture_when_it_is_asked_for():
    """Nobody who does not compile pays for it, and nothing of a step knows it."""
    late = {
        (path.name, node.module)
        for path in MODULES
        if parts_of(path)[0] == "optimizer"
        for function in ast.walk(TREES[path])
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.level
    }
    assert late == {("base.py", "running")}


@pytest.mark.parametrize("path", [p for p in MODULES if parts_of(p)[0] == "optimizer"], ids=lambda p: p.stem)
def test_no_class_declares_what_another_assigns(path):
    """A class of the optimizer assigns its own attributes; what is data, and made by a decorator, is declared."""
    for cls in ast.walk(TREES[path]):
        if not isinstance(cls, ast.ClassDef) or any(
            name in ast.unparse(part)
            for part in (*cls.decorator_list, *cls.bases, *cls.keywords)
            for name in ("dataclass", "values", "NamedTuple", "TypedDict", "total=")
        ):
            continue
        declared = {
            node.target.id
            for node in cls.body
            if isinstance(node, ast.AnnAssign) and node.value is None and isinstance(node.target, ast.Name)
        }
        assigned = {
            node.attr
            for node in ast.walk(cls)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        }
        assert declared <= assigned, f"{cls.name} declares {', '.join(sorted(declared - assigned))}"


def generations(cls):
    """The longest line of classes from one up to ``torch.optim.Optimizer``, without these two."""
    return (
        0 if Optimizer in cls.__bases__ else 1 + max(generations(b) for b in cls.__bases__ if issubclass(b, Optimizer))
    )


@pytest.mark.parametrize("name", sorted(methods()))
def test_few_classes_stand_between_a_method_and_torch(name):
    assert generations(methods()[name]) <= 3
    assert bo.BilevelOptimizer.__bases__ == (Optimizer, ABC)
