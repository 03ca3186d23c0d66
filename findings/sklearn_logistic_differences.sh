#!/bin/bash
# Differences of a loss over LogisticRegression at its default tolerance: no step gives the derivative.
source "$(dirname "$0")/fresh.sh" numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1
"$PY" - <<'EOF'
import sys, numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression

inputs, labels = load_breast_cancer(return_X_y=True)
inputs = (inputs - inputs.mean(0)) / inputs.std(0)


def loss(log_c, tol):
    model = LogisticRegression(C=np.exp(log_c), tol=tol, max_iter=100_000).fit(inputs[:300], labels[:300])
    return np.logaddexp(0, -(2 * labels[300:] - 1) * model.decision_function(inputs[300:])).mean()


def slopes(tol):
    return [(loss(0.5 + h, tol) - loss(0.5 - h, tol)) / (2 * h) for h in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)]


right = slopes(1e-12)[1]
print(f"derivative of the validation loss in log C, with tol=1e-12: {right:.3e}")
print("guess: with the default tol=1e-4 some step between 0.1 and 1e-5 gives it within 10 per cent")
errors = [s / right - 1 for s in slopes(1e-4)]
print("seen: relative errors", [f"{e:+.0%}" for e in errors])
sys.exit(int(min(map(abs, errors)) < 0.1))
EOF
