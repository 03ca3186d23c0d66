#!/bin/bash
# Betty makes the optimizer anew from its defaults: learning rates of parameter groups are lost, without a word.
source "$(dirname "$0")/fresh.sh" torch==2.14.1 numpy==2.4.6
"$PY" -m pip show --quiet betty-ml 2>/dev/null || # its metadata ask for a Python below 3.11
    "$PY" -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python betty-ml==0.2.1
"$PY" -W error - <<'EOF'
import importlib.metadata, logging, sys, torch
from betty.configs import Config, EngineConfig
from betty.engine import Engine
from betty.problems import ImplicitProblem

print("betty-ml", importlib.metadata.version("betty-ml"))
logging.disable(logging.INFO)  # warnings would be shown


class Only(ImplicitProblem):
    def training_step(self, batch):
        return self.module["a"].sum() + self.module["b"].sum()


a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([{"params": [a], "lr": 0.5}, {"params": [b]}], lr=0.1)
problem = Only("only", Config(), torch.nn.ParameterDict({"a": a, "b": b}), optimizer, train_data_loader=[[]])
Engine(problems=[problem], dependencies={"u2l": {}, "l2u": {}}, config=EngineConfig(train_iters=1)).run()
print("guess: after one step of SGD with lr 0.5 for a and 0.1 for b: a = -0.5, b = -0.1")
print(f"seen: a = {a.item():.3f}, b = {b.item():.3f}, groups: {len(problem.optimizer.param_groups)}")
sys.exit(not (abs(a.item() + 0.1) < 1e-6 and abs(b.item() + 0.1) < 1e-6))
EOF
