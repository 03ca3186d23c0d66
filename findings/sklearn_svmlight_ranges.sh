#!/bin/bash
# load_svmlight_file with offset and length: a row that starts at the border is read by the first range.
source "$(dirname "$0")/fresh.sh" numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1
"$PY" - <<'EOF'
import io, sys
from sklearn.datasets import load_svmlight_file

rows = [f"{i} 1:{i}\n".encode() for i in range(10)]
text, border = b"".join(rows), len(b"".join(rows[:6]))
first = load_svmlight_file(io.BytesIO(text), offset=0, length=border, n_features=1, zero_based=False)[1]
second = load_svmlight_file(io.BytesIO(text), offset=border, length=-1, n_features=1, zero_based=False)[1]
print("guess: a border between rows 6 and 7 splits ten rows into 6 and 4")
print("seen:", first.tolist(), second.tolist())
sys.exit(int(len(first) == 6))
EOF
