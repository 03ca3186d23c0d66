#!/bin/bash
# scipy's lsmr(A, b, damp, x0=): a start changes the solution, because the penalty is on the distance from the start.
source "$(dirname "$0")/fresh.sh" numpy==2.4.6 scipy==1.17.1
"$PY" - <<'EOF'
import sys, numpy as np
from scipy.sparse.linalg import lsmr

A, b = np.diag([1.0, 2.0]), np.ones(2)
right = A @ b / (np.diag(A) ** 2 + 1)
cold, warm = (lsmr(A, b, damp=1.0, atol=1e-12, btol=1e-12, x0=x0)[0] for x0 in (None, np.full(2, 100.0)))
print("guess: x0 is an initial guess, so both find the minimum of |b - Ax|^2 + |x|^2:", right)
print("seen: ", cold, "from zero, and", warm, "from 100")
towards = 100 + A @ (b - A @ np.full(2, 100.0)) / (np.diag(A) ** 2 + 1)
print("the second is the minimum of |b - Ax|^2 + |x - x0|^2:", towards)
sys.exit(int(not (np.allclose(cold, right) and np.allclose(warm, towards) and not np.allclose(warm, right, rtol=0.1))))
EOF
