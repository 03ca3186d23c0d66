#!/bin/bash
# jax.scipy.sparse.linalg.cg returns nan, with info None, for an indefinite matrix of two rows.
source "$(dirname "$0")/fresh.sh" numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2
"$PY" -W ignore - <<'EOF'
import sys, jax.numpy as np
from jax.scipy.sparse.linalg import cg

A, b = np.diag(np.array([1.0, -1.0])), np.ones(2)
x, info = cg(lambda v: A @ v, b)
print("guess: (1, -1), which is the solution, or a sign of failure")
print("seen: x", x, "info", info)
sys.exit(bool(np.isfinite(x).all()) or info is not None)
EOF
