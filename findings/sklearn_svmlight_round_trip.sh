#!/bin/bash
# dump_svmlight_file, then load_svmlight_file: columns move by one if the first has no entry, though n_features is given.
source "$(dirname "$0")/fresh.sh" numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1
"$PY" - <<'EOF'
import io, sys, numpy as np
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

whole = np.array([[5.0, 0, 0], [0, 1, 0], [0, 0, 2]])
labels = np.array([1, -1, 1])


def loaded(rows):
    file = io.BytesIO()
    dump_svmlight_file(whole[rows], labels[rows], file)
    file.seek(0)
    return load_svmlight_file(file, n_features=3)[0].toarray()


print("guess: what was dumped is loaded, also for a part of the rows, with n_features=3")
print("seen, all rows: ", loaded([0, 1, 2]).tolist())
print("seen, rows 1, 2:", loaded([1, 2]).tolist(), "instead of", whole[[1, 2]].tolist())
moved = np.array_equal(loaded([1, 2]), [[1, 0, 0], [0, 2, 0]])
sys.exit(int(not (moved and np.array_equal(loaded([0, 1, 2]), whole))))
EOF
