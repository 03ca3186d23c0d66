#!/bin/bash
# hypergrad's conjugate_gradient: the next direction is made from the old residual, so more iterations do not converge.
source "$(dirname "$0")/fresh.sh" torch==2.14.1 numpy==2.4.6 hypergrad==0.0.1
"$PY" -W ignore - <<'EOF'
import sys, torch
from hypergrad.approx_hypergrad import conjugate_gradient

torch.set_default_dtype(torch.float64)
H, b = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3)
inner = lambda i, o: (H * i[0] ** 2).sum() / 2 - (i[0] * o[0]).sum()  # y*(x) = x / H
outer = lambda i, o: (b * i[0]).sum() + 0 * o[0].sum()
right = b / H
print("guess: three iterations solve a system of three unknowns:", right.tolist())
for k in (1, 3, 10, 50):
    found = conjugate_gradient(inner, outer, (torch.ones(3),), (torch.ones(3),), k, 1.0)[0]
    print(f"seen after {k} iterations:", [round(v, 4) for v in found.tolist()])
sys.exit(int((found - right).norm() < 0.1 * right.norm()))
EOF
