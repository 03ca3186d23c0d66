"""Private names of torch that the package uses: why each of them, and what public name would do.

A name is a path (``torch._guards.tracing``), an attribute of something of torch (``.name``), or a text by which torch
calls it (``"name"``); a star at the end matches several.
"""

import ast
import inspect
import re
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch.optim import lr_scheduler, optimizer


class Name(NamedTuple):
    name: str
    files: str  # where it is used
    why: str
    instead: str  # what would replace it


NAMES = [
    # ------------------------------------------------------------------------------------ tensors
    Name(
        "._backward_hooks",
        "oracle/hooks.py",
        "hooks on x are called once, for the whole hypergradient; those on y for each copy; a graph would call none",
        "a public way to ask a tensor, or a module, for its hooks",
    ),
    Name(
        '"_backward_hooks"',
        "compiled/key.py",
        "hooks on parameters are a part of a step's key, read with other attributes by one call in C",
        "likewise",
    ),
    Name("._backward_pre_hooks", "oracle/hooks.py", "the same of a module", "likewise"),
    Name("._post_accumulate_grad_hooks", "oracle/hooks.py", "a step would never call these", "likewise"),
    Name(
        "torch.nn.modules.module._global_backward_*hooks",
        "compiled/key.py oracle/hooks.py",
        "hooks on all modules, which vmap does not call and Dynamo does not guard",
        "likewise",
    ),
    Name(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "hypergradient/layer.py",
        "a checkpoint counts the tensors that graphs save; those of a check are none of its own",
        "a public way to ask for the hooks that are on, or to leave them out",
    ),
    Name(
        "torch._C._len_torch_dispatch_stack",
        "compiled/alone.py",
        "modes of torch that an interrupt has left on in a trace",
        "nothing, once torch's tracers end their modes whatever happens",
    ),
    Name("torch.utils._python_dispatch._pop_mode", "compiled/alone.py", "likewise", "likewise"),
    Name(
        "torch._foreach_*",
        "problem/vector.py compiled/places.py",
        "one kernel for all tensors of a vector, as torch.optim has it",
        "a public foreach; until then a loop over the tensors",
    ),
    Name(
        "torch.utils._pytree.*",
        "pytree.py",
        "nested data; Dynamo and vmap take the same for trees",
        "torch.utils.pytree, which 2.15 has not",
    ),
    Name('"_fields"', "pytree.py", "tells a named tuple; Python documents it", "nothing: the name is public"),
    Name(
        '"_weight_norm"',
        "compiled/rewrites.py",
        "the fused operation in a graph of Dynamo, by its name",
        "nothing, once torch's derivative is right",
    ),
    Name(
        '"_autograd_grad"',
        "compiled/rewrites.py",
        "the gradient of torch.func in a graph of Dynamo, by its name",
        "nothing, once torch's third derivative of layer norms is right",
    ),
    Name(
        "torch._weight_norm",
        "oracle/differentiable.py",
        "the fused operation, whose second derivative is wrong, is known by it",
        "nothing, once torch's derivative is right",
    ),
    Name(
        "._is_view",
        "compiled/rewrites.py oracle/point.py",
        "whether an operation writes into a view of an argument, or a loss is an entry of a parameter",
        "a public question",
    ),
    Name("._base", "compiled/rewrites.py", "of which argument it is a view", "a public name of the base of a view"),
    Name(
        '"_saved_input"',
        "oracle/differentiable.py",
        "how large the input of a convolution is; the attributes _saved_* are in torch's notes on autograd",
        "nothing that is known",
    ),
    Name(
        '"_saved_padding_idx"',
        "oracle/differentiable.py",
        "which row of an embedding is a constant",
        "nothing that is known",
    ),
    Name(
        "._input_metadata",
        "oracle/differentiable.py",
        "to which type a cast in a graph changes values",
        "a public type of what an operation returns",
    ),
    Name(
        "._version",
        "oracle/point.py problem/objective.py",
        "whether an evaluation writes into a parameter (an embedding with max_norm), or a loss into its batch",
        "a public count of the writes into a tensor",
    ),
    Name(
        '"_iterator"',
        "problem/random.py",
        "a search for generators of a loader leaves out its present pass",
        "a public list of what a loader consists of",
    ),
    Name(
        '"_sampler_iter"',
        "problem/objective.py",
        "whether another pass over a loader with persistent workers was started, which ends the one before",
        "a public number of the pass, or an error of torch",
    ),
    # ------------------------------------------------------------------------------------ optimizers
    Name(
        "._optimizer_step_p*_hooks",
        "optimizer/hooks.py",
        "whether an optimizer has hooks: torch's own wrapper of step costs as much as a small step",
        "a public question, or a cheaper wrapper",
    ),
    Name(
        "torch.optim.optimizer._global_optimizer_p*_hooks",
        "optimizer/hooks.py",
        "the same of hooks on all optimizers",
        "likewise",
    ),
    Name(
        "torch.nn.modules.module._global_forward_*hooks",
        "compiled/key.py",
        "hooks on all modules, which Dynamo calls but does not guard",
        "a guard of Dynamo's",
    ),
    Name(
        '"_optimizer_step_"',
        "solvers/lower.py",
        "the same of a lower optimizer, whose step is then made by itself",
        "likewise",
    ),
    Name(
        '"_optimizer_"',
        "optimizer/checkpoint.py",
        "hooks are not pickled, as in torch",
        "a public list of what an optimizer keeps to itself",
    ),
    Name(
        '"_optimizer"',
        "optimizer/base.py",
        "Lightning's wrapper of an optimizer, which inherits from it",
        "nothing that is known",
    ),
    Name(
        "._opt_called",
        "optimizer/base.py",
        "a scheduler would warn after backward, although another optimizer's step follows",
        "a public switch of that warning",
    ),
    Name(
        '"_opt_called"',
        "optimizer/checkpoint.py",
        "not pickled: torch sets it anew",
        "a public list of what an optimizer keeps to itself",
    ),
    Name('"_zero_grad_profile_name"', "optimizer/checkpoint.py", "likewise", "likewise"),
    Name('"_warned_capturable_if_run_uncaptured"', "optimizer/checkpoint.py", "likewise", "likewise"),
    # ------------------------------------------------------------------------------------ switches
    Name(
        "torch.autograd.profiler._is_profiler_enabled",
        "tracing.py",
        "a range in a profile costs microseconds, also when nobody profiles",
        "a public question",
    ),
    Name(
        "torch._compile._disable_dynamo",
        "optimizer/hooks.py hypergradient/layer.py",
        "torch.compiler.disable imports torch._dynamo when a class is defined; this does when it is needed",
        "torch.compiler.disable, once it waits likewise",
    ),
    Name(
        "torch._C._len_torch_function_stack",
        "optimizer/transaction.py",
        "an interrupt inside of the exit of a mode leaves it on",
        "nothing, once the exit of a mode cannot be interrupted",
    ),
    Name("torch.overrides._pop_mode", "optimizer/transaction.py", "likewise", "likewise"),
    Name("torch._C._functorch.*", "optimizer/transaction.py", "the same for vmap", "likewise"),
    Name(
        "torch._C._functorch.*",
        "oracle/stacks.py",
        "vmap goes through its arguments as nested values, in Python; its rules for linear layers and classes take ten "
        "operations instead of three: together a quarter of a lower step of a small head",
        "torch.func.vmap, once it costs microseconds, and rules in C++ for nll_loss",
    ),
    # ------------------------------------------------------------------------------------ processes
    Name(
        "._current_frames",
        "optimizer/transaction.py",
        "an interrupt can leave a turn taken: whether its thread is still in a step shows only in its stack",
        "a lock that an interrupt releases",
    ),
    Name('"_turn"', "optimizer/transaction.py", "that of the optimizer whose call is in the stack", "likewise"),
    # ------------------------------------------------------------------------------------ compiling
    Name(
        "torch._C._dynamo.eval_frame.set_eval_frame",
        "compiled/reading.py",
        "calls what was compiled, and never compiles anew, as torch._dynamo.run: so it is seen that a loss has changed",
        "torch.compiler.set_stance, which holds for the whole process",
    ),
    Name(
        "torch._dynamo.eval_frame._callback_from_stance",
        "compiled/reading.py",
        "what set_eval_frame gets, also where the user has set a stance",
        "a public way to ask for the stance",
    ),
    Name(
        "torch._dynamo.mutation_guard.GenerationTracker.generation",
        "compiled/reading.py",
        "CUDA graphs tell steps apart by it, as by a call of what torch.compile returns",
        "torch.compiler.cudagraph_mark_step_begin, which ends all other graphs of the process too",
    ),
    Name(
        "torch._C._dynamo.guards.TensorGuards",
        "compiled/forms.py",
        "compares the forms of all tensors that a step takes by one call in C",
        "nothing: attributes one by one are compared where it says no",
    ),
    Name(
        "torch._dynamo.eval_frame.remove_from_cache",
        "compiled/reading.py",
        "what was read goes with its reader",
        "nothing, once torch lets it go with the code",
    ),
    Name(
        "torch._dynamo.config.*",
        "compiled/entry.py",
        "what Dynamo leaves out of its guards by default, to be fast, is looked at too",
        "options of torch.compile",
    ),
    Name(
        "torch._C._set_grad_enabled",
        "compiled/rewrites.py compiled/steps.py oracle/doors.py",
        "a node of Dynamo's graphs, which is taken out of custom autograd functions; a function under no_grad is "
        "called with a graph, to see whether its result depends on x; a small step without gradients",
        "nothing, once Dynamo's function has right second derivatives; a public mode that keeps gradients on",
    ),
    Name(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "compiled/program.py",
        "the library's own code is traced on tensors without values, and refuses to read one",
        "a public form of it for torch.fx.experimental.proxy_tensor.make_fx",
    ),
    Name(
        "torch.fx.experimental.*",
        "compiled/program.py",
        "make_fx traces a step; a ShapeEnv, values read by the host",
        "torch.export, once it takes functions that differentiate",
    ),
    Name(
        "torch._decomp.get_decompositions",
        "compiled/program.py",
        "some normalisations write statistics without saying so, and would be removed from a graph",
        "nothing, once their schemas say it",
    ),
    Name(
        "torch._inductor.*",
        "compiled/backend.py",
        "compiles a graph; what it makes is called again without the 40 us of torch.compile around it",
        "torch.compiler.compile of a graph, should it come",
    ),
    Name(
        '"_schema"',
        "compiled/repeats.py",
        "whether an operation writes into a tensor or returns a view, which the body of a call must not",
        "torch.library, should it tell",
    ),
    Name(
        "torch._higher_order_ops.invoke_subgraph.invoke_subgraph",
        "compiled/repeats.py",
        "Inductor compiles the body of a call once, however often a graph has it: 50 lower steps in the time of a few",
        "torch.compiler.nested_compile_region, which is for code that Dynamo traces, once graphs may have it",
    ),
    Name(
        "torch._dynamo.backends.registry.lookup_backend",
        "compiled/backend.py",
        "a backend by its name, as torch.compile takes it",
        "a public look-up beside torch.compiler.list_backends",
    ),
]

# Attributes of optimizers, also where they are reached by ``self``.
OF_OPTIMIZERS = {
    name
    for module in (optimizer, lr_scheduler)
    for name in re.findall(r"\b(?:self|optimizer|opt)\.(_[a-z]\w+)", inspect.getsource(module))
}
OTHERS = {"_replace", "_last"}  # of named tuples; and an ending of names of our own


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """The path of a name or attribute of torch; empty for others. ``known`` are the imported names."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([known[node.id], *reversed(parts)]) if isinstance(node, ast.Name) and node.id in known else ""


def imported(tree: ast.AST) -> dict[str, str]:
    """Return a module's imports of torch: the path of each name."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {a.asname or "torch": a.name if a.asname else "torch" for a in node.names if is_torch(a.name)}
        elif isinstance(node, ast.ImportFrom) and not node.level and is_torch(node.module):
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return known


def of_torch(tree: ast.AST) -> set[str]:
    """All names of torch that a module uses, as paths."""
    known = imported(tree)
    found = {path for path in known.values() if path != "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(dotted(node, known))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            text = node.args[1]
            if (path := dotted(node.args[0], known)) and isinstance(text, ast.Constant):
                found.add(f"{path}.{text.value}")
    return {path for path in found if path and not any(other.startswith(f"{path}.") for other in found)}


def is_torch(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "torch"


def is_private(path: str) -> bool:
    return any(re.match(r"_(?!_)", part) or part == "experimental" for part in path.split("."))


def private_names(tree: ast.AST) -> set[str]:
    """The private names of others that a module uses."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    own |= {node.attr for node in stored}
    own -= OF_OPTIMIZERS
    inner = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values[1:]
    }  # a text that goes on
    known = imported(tree)
    found = {path for path in of_torch(tree) if is_private(path)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr) and not dotted(node, known):
            at_home = ast.unparse(node.value) in ("self", "cls", "super()") and node.attr not in OF_OPTIMIZERS
            if not at_home and node.attr not in own | OTHERS:
                found.add(f".{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(text := node.value, str) and id(node) not in inner:
            private = re.fullmatch(r"_[a-z]\w+", text) and text not in own | OTHERS
            found |= {f'"{text}"'} if private else set()
    return found


def entry_of(name: str, file: str) -> Name | None:
    """The row of the table for a name in a file."""
    return next((row for row in NAMES if file in row.files.split() and fnmatchcase(name, row.name)), None)
