#!/bin/bash
# BOAT's cg_step returns the iterate before the one that met its tolerance: a system of one unknown gives 0.
source "$(dirname "$0")/fresh.sh" torch==2.14.1 numpy==2.4.6 higher==0.2.1 matplotlib==3.11.2 boat-torch==1.1.1
"$PY" -W ignore - <<'EOF'
import sys, torch
from boat_torch.utils.op_utils import cg_step

torch.set_default_dtype(torch.float64)
print("guess: H v = b is solved to the tolerance of 1e-10 as soon as there are enough iterations")
worst = 0.0
for diagonal in ([2.0], [1.0, 2.0], [1.0, 2.0, 4.0]):
    H, b = torch.tensor(diagonal), torch.ones(len(diagonal))
    v = cg_step(lambda p: [H * p[0]], [b], max_iter=100, epsilon=1e-10)[0]
    worst = max(worst, float((v - b / H).norm() / (b / H).norm()))
    print("seen:", v.tolist(), "right:", (b / H).tolist())
sys.exit(int(worst < 0.1))
EOF
