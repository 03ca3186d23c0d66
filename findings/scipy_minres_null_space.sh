#!/bin/bash
# scipy's minres reports success with entries of 1e15 if the right-hand side is not in the range.
source "$(dirname "$0")/fresh.sh" numpy==2.4.6 scipy==1.17.1
"$PY" - <<'EOF'
import sys, numpy as np
from scipy.sparse.linalg import minres

A, b = np.diag([1.0, 2.0, 0.0]), np.ones(3)
x, info = minres(A, b, maxiter=100)
print("guess: the least-squares solution (1, 0.5, something moderate), or info > 0")
print("seen: info", info, "x", x, "residual", np.linalg.norm(b - A @ x))
sys.exit(int(info != 0 or abs(x).max() < 1e6))
EOF
