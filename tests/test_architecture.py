"""Design rules that can be checked from outside: imports, calls, inheritance and access to private names."""

import ast
import re
import subprocess
import sys
from abc import ABC
from collections import Counter, defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import FunctionType

import pytest
from torch.optim import Optimizer

import bilevel_optim as bo
from bilevel_optim.optimizer.declaration import methods
from bilevel_optim.optimizer.method import Method
from bilevel_optim.optimizer.options import Options

from .private_names import NAMES, entry_of, of_torch, private_names

PACKAGE = Path(__file__).parent.parent / "bilevel_optim"
# A folder imports only those before it; ``methods`` and ``checking`` are side by side.
LAYERS = (
    "kernels", "problem", "distributed", "oracle", "solvers", "hypergradient", "optimizer", "compiled", "methods",
    "checking",
)  # fmt: skip
DOOR = ("optimizer", "base")  # who alone imports this folder
BEHIND = "compiled"
FAMILIES = {
    "meta": ("aid", "itd", "zeroth_order"),
    "ba": ("aid", "growing"),
    "stochastic": ("growing",),
    "paid": ("aid",),
}
MODULES = dict.fromkeys(sorted(PACKAGE.rglob("*.py")))


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def private_names_of(path):
    return [*private_names(tree_of(path))]


def parts_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts


def file_of(path):
    return path.relative_to(PACKAGE).as_posix()


def module_of(target):
    path = PACKAGE.joinpath(*target)
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p in MODULES), None)


def imported(path, nodes=None):
    """Return a module's imports from the package: for each name its module and its name there; None means all."""
    package, found = parts_of(path)[:-1], {}
    for node in ast.walk(tree_of(path)) if nodes is None else nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + tuple(node.module.split(".") if node.module else ())
            for alias in node.names:
                whole = module_of((*base, alias.name))
                found[alias.asname or alias.name] = (whole, None) if whole else (module_of(base), alias.name)
    return found


@cache
def all_imported(path):
    return imported(path)


def imports(path):
    """The modules of the package that a module imports, wherever it does: types and functions included."""
    return {target for target, _ in all_imported(path).values()}


def test_the_package_imports_itself_by_relative_names():
    """The tests in this file rely on it."""
    absolute = {
        (path.name, ast.unparse(node))
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "bilevel_optim" in ast.unparse(node)
    }
    assert not absolute


def test_few_modules_are_outside_the_folders():
    assert len(list(PACKAGE.glob("*.py"))) <= 6
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_folder_imports_only_those_below(path):
    own = parts_of(path)
    if len(own) == 1:
        return  # the public face, and the errors that everything may raise
    for target in map(parts_of, imports(path)):
        if target[0] in LAYERS and not (own == DOOR and target[0] == BEHIND):
            assert LAYERS.index(target[0]) <= LAYERS.index(own[0]), f"{'.'.join(own)} imports {'.'.join(target)}"
            assert (own[0], target[0]) != ("checking", "methods")
        if own[0] == target[0] == "methods" and own[1] != "__init__":
            allowed = (own[1], *FAMILIES.get(own[1], ()))
            assert target[1] in allowed, f"{'.'.join(own)} imports {'.'.join(target)}"


def test_compilation_has_one_entry_point():
    """Without compilation it costs nothing, and no part of a step depends on it."""
    outside = (path for path in MODULES if parts_of(path)[0] != BEHIND)
    importing = {path for path in outside if any(parts_of(target)[0] == BEHIND for target in imports(path))}
    base = module_of(DOOR)
    assert importing == {base}
    functions = [node for node in ast.walk(tree_of(base)) if isinstance(node, ast.FunctionDef)]
    modules = {f.name: {t for t, _ in imported(base, ast.walk(f)).values()} for f in functions}
    assert [name for name, targets in modules.items() if targets] == ["compile"]
    at_once = {t for t, _ in imported(base, tree_of(base).body).values()}
    assert module_of((BEHIND, "steps")) not in at_once


def test_no_modules_import_each_other():
    """This includes imports of types: modules in a cycle cannot be used separately."""
    graph = {path: imports(path) - {path} for path in MODULES}
    TopologicalSorter(graph).prepare()


FOREIGN = ("torch.fx", "torch._dynamo", "torch._inductor", "torch._subclasses", "torch._guards")


def test_graphs_are_where_steps_are_compiled():
    outside = {path: of_torch(tree_of(path)) for path in MODULES if parts_of(path)[0] != BEHIND}
    ends = tuple(f"{name}." for name in FOREIGN)
    assert not {
        (file_of(path), name) for path, names in outside.items() for name in names if f"{name}.".startswith(ends)
    }


def test_torch_distributed_is_named_in_one_folder():
    for path in MODULES:
        if parts_of(path)[0] != "distributed":
            text = path.read_text()
            assert "torch.distributed as" not in text, path
            assert "from torch.distributed" not in text, path


# The parts of a step are private: these modules ask the optimizer for them. Methods do so by ``self``.
STEPPING = {
    "compiled/steps.py": "makes steps in place of the optimizer",
    "compiled/runs.py": "likewise, many in a chain",
    "compiled/beside.py": "refuses steps by the update rules that they have used",
    "compiled/draws.py": "asks the method for the draws of its next step",
    "compiled/key.py": "tells steps apart by the module buffers that they change",
    "compiled/pure.py": "the step as a function of values",
    "compiled/places.py": "reads the state of a step and writes its results",
    "checking/check.py": "evaluates the losses at other points than a step",
    "optimizer/checkpoint.py": "makes a step of a twin to see what is remembered",
}


def parts_of_a_step():
    """The private functions and attributes of the optimizer's base class."""
    (base,) = (
        node for node in tree_of(module_of(("optimizer", "method"))).body if getattr(node, "name", "") == "Method"
    )
    names = {node.name for node in base.body if isinstance(node, ast.FunctionDef)}
    names |= {node.id for node in ast.walk(base) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored = (n for n in ast.walk(base) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    names |= {node.attr for node in stored if ast.unparse(node.value) == "self"}
    return {f".{name}" for name in names if name[0] == "_"}


def test_private_names_stay_in_their_module_or_are_in_the_table():
    """Nothing that begins with an underscore is used but through self, in the module that has it, or with a reason."""
    used = {(file_of(path), name) for path in MODULES for name in private_names_of(path)}
    own, others = parts_of_a_step(), {(file, name) for file, name in used if entry_of(name, file) is None}
    assert not {(file, name) for file, name in others if file not in STEPPING or name not in own}
    assert {file for file, _ in others} == STEPPING.keys()


def test_the_table_of_private_names_has_no_unused_entries():
    used = {(entry_of(name, file_of(path)), file_of(path)) for path in MODULES for name in private_names_of(path)}
    gone = {(row.name, file) for row in NAMES for file in row.files.split() if (row, file) not in used}
    assert not gone
    assert all(row.why and row.instead for row in NAMES)


def definitions(tree, outer=()):
    """The functions and classes of a module, with those around each of them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node, outer
            yield from definitions(node, (*outer, node))
        else:
            yield from definitions(node, outer)


def origin(path, name):
    """Return the origin of a module's name, and its name there."""
    while name in all_imported(path):
        path, name = all_imported(path)[name]
    return path, name


def uses():
    """Return the uses of each function: by module and name for a module's functions, by name for a class's."""
    found = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Name):
                found[origin(path, node.id)].append((path, node.lineno))
            elif isinstance(node, ast.Attribute):
                found[None, node.attr].append((path, node.lineno))
                module, name = origin(path, node.value.id) if isinstance(node.value, ast.Name) else (None, "")
                if name is None:
                    found[origin(module, node.attr)].append((path, node.lineno))
    return found


def public():
    """Names of what users can reach: of the package, of its two public modules, and of classes among these."""
    values = [getattr(space, name) for space in (bo, bo.hypergradient, bo.linear) for name in space.__all__]
    found = {(v.__module__, v.__qualname__) for v in values if isinstance(v, FunctionType)}
    for cls in {base for v in values if isinstance(v, type) for base in v.__mro__}:
        own = ["", *(f".{name}" for name in vars(cls) if name[0] != "_")]
        found |= {(cls.__module__, cls.__qualname__ + end) for end in own}
    return found


# Called from outside the package, without being public names.
CALLED = {
    "compiled/reading.py _Run.run_node": "by torch.fx.Interpreter",
    "compiled/rewrites.py _function_of.Own.setup_context": "by torch.autograd.Function",
}


def test_every_function_has_a_caller_or_is_public():
    known, seen, alone = public(), uses(), set()
    for path in MODULES:
        module = ".".join(("bilevel_optim", *parts_of(path))).removesuffix(".__init__")
        for node, outer in definitions(tree_of(path)):
            name = ".".join(n.name for n in (*outer, node))
            if node.name.startswith("__") or (module, name) in known:
                continue
            of_class = bool(outer) and isinstance(outer[-1], ast.ClassDef)
            own = range(node.lineno, node.end_lineno + 1)
            if all(p == path and line in own for p, line in seen[(None if of_class else path), node.name]):
                alone.add(f"{file_of(path)} {name}")
    assert alone == CALLED.keys()


# Why a module has to know whether a step is traced, where no value can be read.
TRACING = {
    "hypergradient/storm.py": "all rows are projected, not only those that the host found outside",
    "methods/f2sa.py": "whether rounding is large is checked in eager steps",
    "methods/tracked/rows.py": "the clock stays a tensor",
    "methods/tracked/tracking.py": "indices and rates of a graph are on its device, those of eager steps on the host",
    "optimizer/method.py": "the flags of an estimate are not read, but are results of the graph",
    "oracle/oracle.py": "operations without second derivatives are written otherwise in the graph",
    "oracle/session.py": "whether a vector is finite is looked at where it is made; a response cannot be read",
    "oracle/substitution.py": "graphs of the user's functions are called with the values in the place of live tensors",
    "problem/objective.py": "a step that draws random numbers in its losses is not compiled",
    "problem/placement.py": "no memory is pinned, and nothing is kept, in a graph",
    "solvers/functional.py": "the step of an optimizer of torch has another form",
    "problem/tasks.py": "the ids of the drawn tasks have no values to be checked",
    "solvers/linear.py": "the host does not look whether a solve has ended",
    "solvers/lower.py": "the step of an optimizer of torch has another form",
}
# Why a module has to know whether Dynamo reads it: it is called by the user's own code.
READ_BY_DYNAMO = {
    "hypergradient/layer.py": "a compiled program of the user calls the solver of a layer without tracing it",
    "optimizer/hooks.py": "verbs are called, and not looked into, where the loop of a user is compiled",
    "oracle/stacks.py": "a compiled module of the user calls operations in their own forms, as Dynamo knows no levels",
    "oracle/buffers.py": "a hook of a first step does not note what a compiled module calls",
}


def test_few_modules_ask_whether_a_step_is_traced():
    outside = [path for path in MODULES if parts_of(path)[0] not in (BEHIND, "tracing")]
    named = {path: {n.id for n in ast.walk(tree_of(path)) if isinstance(n, ast.Name)} for path in MODULES}
    named |= {p: {*named[p], *(n.attr for n in ast.walk(tree_of(p)) if isinstance(n, ast.Attribute))} for p in MODULES}
    assert {file_of(path) for path in outside if "is_tracing" in named[path]} == TRACING.keys()
    assert {file_of(path) for path in outside if "is_dynamo_compiling" in named[path]} == READ_BY_DYNAMO.keys()


def test_no_class_declares_what_another_assigns():
    """A class assigns its own attributes; dataclass fields are declared."""
    data = ("dataclass", "values", "NamedTuple", "TypedDict", "total=", "Protocol", "Trackers")
    found = {}
    for path in MODULES:
        for cls in ast.walk(tree_of(path)):
            if not isinstance(cls, ast.ClassDef):
                continue
            made_by = " ".join(map(ast.unparse, (*cls.decorator_list, *cls.bases, *cls.keywords)))
            declared = {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and n.value is None}
            stored = (n for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
            declared -= {n.attr for n in stored if ast.unparse(n.value) == "self"}
            if declared and not any(name in made_by for name in data):
                found[f"{file_of(path)} {cls.name}"] = declared
    assert not found


def test_no_two_classes_have_one_name():
    names = Counter(n.name for path in MODULES for n in ast.walk(tree_of(path)) if isinstance(n, ast.ClassDef))
    assert {name: count for name, count in names.items() if count > 1} == {}


def generations(cls):
    """The longest line of classes from one up to ``torch.optim.Optimizer``, without these two."""
    return (
        0 if Optimizer in cls.__bases__ else 1 + max(generations(b) for b in cls.__bases__ if issubclass(b, Optimizer))
    )


@pytest.mark.parametrize("name", sorted(methods()))
def test_few_classes_stand_between_a_method_and_torch(name):
    assert generations(methods()[name]) <= 4
    assert bo.BilevelOptimizer.__bases__ == (Method,)
    assert Method.__bases__ == (Options, Optimizer, ABC)


def test_overridden_hooks_are_in_the_list():
    """CONTRIBUTING.md names all hooks of the base class that a method of the package, or a base of one, overrides."""
    base = bo.BilevelOptimizer
    own = [cls for cls in methods().values() if cls.__module__.startswith("bilevel_optim.")]
    classes = {part for cls in own for part in cls.__mro__} - {*base.__mro__}
    made = vars(type("Plain", (base,), {})).keys()  # every class has these without a word
    known = {*vars(base), *vars(Method)}
    hooks = {name for cls in classes for name in vars(cls).keys() & known} - made - base._options.keys()
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text().split("### What a method may override\n")[1]
    listed = re.findall(r"^\* `(\w+)`: ", text.split("\n## ")[0], re.M)
    assert listed == sorted(name for name in hooks if not name.startswith("__"))


def test_the_import_brings_in_nothing_heavy():
    """A compiler, or a package that torch itself has not loaded, waits until it is needed."""
    code = "import sys, torch; before = {*sys.modules}; import bilevel_optim; print(*({*sys.modules} - before))"
    made = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    new = made.stdout.split()
    assert "bilevel_optim.optimizer.base" in new
    known = ("bilevel_optim", "torch", "_remote_module_non_scriptable", *sys.stdlib_module_names)  # a part of torch's
    others = {name for name in new if name.split(".")[0] not in known}
    compilers = {name for name in new if name.startswith((*FOREIGN, "torch._functorch", "bilevel_optim.compiled"))}
    assert not others | compilers
