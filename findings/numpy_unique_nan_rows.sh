#!/bin/bash
# numpy.unique(axis=0, equal_nan=True): equal rows with a NaN are not found, though equal NaNs of a vector are.
source "$(dirname "$0")/fresh.sh" numpy==2.4.6
"$PY" - <<'EOF'
import sys, numpy as np

rows = np.array([[1, np.nan], [1, np.nan], [2, 3], [2, 3]])
found, vector = np.unique(rows, axis=0, equal_nan=True), np.unique(rows[:2, 1], equal_nan=True)
print("guess: 2 rows that differ, because equal_nan=True (the default) makes one of equal NaNs")
print("seen: ", len(found), "rows; of a vector of two NaNs", len(vector))
sys.exit(int((len(found), len(vector)) != (3, 1)))
EOF
