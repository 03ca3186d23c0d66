#!/bin/bash
# TorchOpt's zero_order(method="forward") multiplies by sigma where it has to divide.
source "$(dirname "$0")/fresh.sh" torch==2.14.1 numpy==2.4.6 torchopt==0.7.3
"$PY" -W ignore - <<'EOF'
import sys, torch, torchopt

torch.manual_seed(0)
found = {}
for method in ("forward", "antithetic"):
    for sigma in (0.1, 0.01):
        options = dict(method=method, argnums=0, num_samples=2000, sigma=sigma)

        @torchopt.diff.zero_order(distribution=torch.distributions.Normal(loc=0.0, scale=1.0), **options)
        def f(x):
            return (x**2).sum()

        x = torch.ones(1, requires_grad=True)
        found[method, sigma] = float(torch.autograd.grad(f(x), x)[0])
print("guess: the derivative of x^2 at 1 is about 2, whatever sigma")
for (method, sigma), value in found.items():
    print(f"seen: method={method!r}, sigma={sigma}: {value:.4f}")
sys.exit(abs(found["forward", 0.01] - 2) < 1)
EOF
